"""hybridq.summary: what is converted, why not the rest, and what share of the work it is."""

from __future__ import annotations

import copy
import io
import json
import logging
import pickle
import warnings

import pytest
import torch
from torch import nn

import hybridq
from hybridq.converters import report_of
from hybridq.report import count_flops, flops


class Block(nn.Module):
    """A patch embedding, attention by torch's function, a stack of matrices and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 4, 4)
        self.overlapping = nn.Conv2d(3, 3, 3, padding=1)
        self.qkv = nn.Linear(64, 192)
        self.stack = Stack()
        self.embed = nn.Embedding(32, 64)
        self.lm_head = nn.Linear(64, 32, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        x = self.stem(self.overlapping(x)).flatten(2).transpose(1, 2) * scale
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, 16).permute(2, 0, 3, 1, 4)
        x = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.lm_head(self.stack(x))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(2, 64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.up[0] + x @ self.up[1].float()


X = (2, 3, 16, 16)  # 16 patches of 48 values in each of 2 images
FLOPS = {
    "stem": 2 * 32 * 48 * 64,
    "qkv": 2 * 32 * 64 * 192,
    "stack": 2 * 2 * 32 * 64 * 64,
    "lm_head": 2 * 32 * 64 * 32,
}
OTHER = {"": 2 * 2 * 4 * 16 * 16 * 32, "overlapping": 2 * 2 * 256 * 27 * 3}


def test_operations_are_counted_where_they_run() -> None:
    """By hand: 2 M N K of each product, attention at scores and values, torch's convolution."""
    model = Block().train()
    model.stem.eval()
    found = count_flops(model, torch.randn(X))
    assert found.linear == FLOPS and found.other == OTHER
    assert model.training and model.qkv.training and not model.stem.training
    hybridq.convert(model)
    assert count_flops(model, {"x": torch.randn(X), "scale": 2.0}) == found
    assert count_flops(model, (torch.randn(X), 2.0)) == found
    with hybridq.autocast(recipe="mxfp8"):
        assert count_flops(model, torch.randn(X)) == found
    with pytest.raises(RuntimeError):
        count_flops(model, torch.randn(1, 2))
    assert count_flops(model, torch.randn(X)) == found, "hooks are gone after an error"
    with pytest.raises(TypeError, match=r"count_flops: model must be an nn\.Module, got str"):
        count_flops("model", None)


def test_other_products_are_counted_by_their_shapes() -> None:
    class Cast(nn.Linear):
        def forward(self, x):
            return x.double() @ self.weight.double().T

    model = nn.ModuleDict({"vector": nn.Linear(64, 32), "cast": Cast(64, 32)})
    assert count_flops(model["vector"], torch.randn(64)).linear == {"": 2 * 64 * 32}
    assert count_flops(model["cast"], torch.randn(5, 64)).linear == {"": 2 * 5 * 64 * 32}
    with hybridq.quantized_model_init("mxfp8"):
        quantized = hybridq.Linear(64, 32)
    assert count_flops(quantized, torch.randn(5, 64)).linear == {"": 2 * 5 * 64 * 32}
    a, b = (
        hybridq.quantize(torch.randn(5, 64), "mxfp8"),
        hybridq.quantize(torch.randn(7, 64), "mxfp8"),
    )

    class Direct(nn.Module):
        def forward(self, x):
            return hybridq.gemm(a, b)

    assert sum(count_flops(Direct(), torch.randn(1)).other.values()) == 2 * 5 * 7 * 64


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("options", [{}, {"bidirectional": True, "num_layers": 2}, {"bias": False}])
def test_recurrent_layers_count_each_token_by_each_matrix(kind, options) -> None:
    model = nn.Sequential(kind(32, 48, **options))
    matrices = sum(one.numel() for one in model.parameters() if one.dim() == 2)
    tokens = torch.randn(7, 3, 32)
    assert count_flops(model, tokens).linear == {"0": 2 * 7 * 3 * matrices}
    packed = nn.utils.rnn.pack_padded_sequence(tokens, [7, 4, 1])
    assert count_flops(model, (packed,)).linear == {"0": 2 * 12 * matrices}
    cudnn = flops._LINEAR[torch.ops.aten._cudnn_rnn]  # the same, as a GPU has it
    assert cudnn(tokens, list(model.parameters()), 4) == 2 * 7 * 3 * matrices


def states(found) -> dict[str, tuple[str, str]]:
    return {one.name: (one.state, one.reason) for one in found.modules}


WHY = {
    "stem": ("converted", ""),
    "overlapping": (
        "no product",
        "a convolution that is no product: stride must be kernel_size, got (1, 1) and (3, 3)",
    ),
    "qkv": ("converted", ""),
    "stack": ("not known", "no converter takes the class, which multiplies by up itself"),
    "embed": ("no product", "a lookup of rows"),
    "lm_head": ("left alone", "heads, its weight is that of the embedding embed"),
}


def test_each_module_has_its_state_and_its_share() -> None:
    model = Block()
    before = hybridq.summary(model, input=torch.randn(X))
    assert states(before) == WHY and not before.is_converted
    assert "would be quantized by hybridq.convert" in str(before)
    hybridq.convert(model)
    after = hybridq.summary(model, input=torch.randn(X))
    assert states(after) == WHY and after.is_converted
    want = (FLOPS["stem"] + FLOPS["qkv"]) / sum(FLOPS.values())
    assert before.share == after.share == want
    assert after.other_flops == sum(OTHER.values()) and after.share_of_linear_flops == want
    by_parameters = hybridq.summary(model)
    sizes = {"stem": 48 * 64, "qkv": 64 * 192, "stack": 2 * 64 * 64, "lm_head": 32 * 64}
    assert by_parameters.share == (sizes["stem"] + sizes["qkv"]) / sum(sizes.values())
    assert by_parameters.other_flops is None
    with pytest.raises(ValueError, match="summary must be given an input, got none"):
        _ = by_parameters.share_of_linear_flops
    assert states(by_parameters)["overlapping"] == WHY["overlapping"]


def test_formats_are_those_that_the_modules_bind() -> None:
    model = hybridq.convert(nn.ModuleDict({"up": nn.Linear(100, 64), "mlp": nn.Linear(64, 64)}))
    recipe = hybridq.recipes.ByName([("mlp", "fp8_block")], default="mxfp8_fwd_nvfp4_bwd")
    found = {one.name: dict(one.formats) for one in hybridq.summary(model, recipe).modules}
    assert found["mlp"]["input"] == "fp8_1x128" and found["mlp"]["weight"] == "fp8_128x128"
    assert found["up"]["weight"] == "mxfp8 | nvfp4"
    plain = hybridq.recipes.ByName([("mlp", "bf16")], default="mxfp8")
    half = hybridq.summary(model, plain)
    assert dict(half.modules[1].formats)["weight"] == "bf16" and not half.modules[1].is_quantized
    assert half.share == 6400 / (6400 + 4096)
    fused = nn.ModuleDict({"mlp": hybridq.LayerNormMLP(64, 128)})
    (row,) = hybridq.summary(fused, "mxfp8").modules
    assert row.formats == (("input", "mxfp8"), ("weight", "mxfp8"), ("grad_output", "mxfp8"))


def test_padding_is_what_blocks_cover_beyond_the_weight() -> None:
    model = nn.ModuleDict({"a": nn.Linear(100, 64), "b": nn.Linear(64, 64)})
    for _ in range(2):  # before convert, and after
        found = {one.name: one.padding for one in hybridq.summary(model, "mxfp8").modules}
        covered = 64 * 128 + 100 * 64  # rowwise blocks of 32 along 100, columnwise along 64
        assert found == {"a": pytest.approx(1 - 2 * 6400 / covered), "b": 0.0}
        hybridq.convert(model)


def test_a_table_that_is_stored_quantized_is_told_apart() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(32, 64), "up": nn.Linear(64, 64)})
    with hybridq.quantized_model_init("mxfp8"):
        hybridq.convert(model, also=["embeddings"])
    found = hybridq.summary(model, "mxfp8")
    assert states(found)["embed"] == ("no product", "a lookup of quantized rows")
    assert found.share == 1.0


def test_a_converted_module_that_is_passed_by_is_told() -> None:
    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj, self.seldom = nn.Linear(64, 32), nn.Linear(64, 32)

        def forward(self, x):
            return x @ self.proj.weight.T

    model = hybridq.convert(nn.ModuleDict({"mixer": Mixer()}))
    model.forward = lambda x: model["mixer"](x)
    found = hybridq.summary(model, input=torch.randn(5, 64))
    assert states(found) == {
        "mixer": (
            "not known",
            "no converter takes the class, which multiplies by proj.weight itself",
        ),
        "mixer.proj": ("left alone", "its weight is multiplied by mixer itself"),
        "mixer.seldom": ("converted", ""),
    }
    assert found.share_of_linear_flops == 0


def test_tables_json_and_html() -> None:
    layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4)) for _ in range(3))
    found = hybridq.summary(hybridq.convert(layers), "mxfp8")
    classes, names = found.tables()
    assert [row[:2] for row in classes.rows] == [("hybridq.Linear", "3"), ("Linear", "3")]
    assert classes.rows[1][2] == "left alone: narrow, 64 to 4 features"
    assert [row[:3] for row in names.rows] == [
        ("*.*", "hybridq.Linear", "3"),
        ("*.*", "Linear", "3"),
    ]
    assert names.rows[0][4] == "input mxfp8, weight mxfp8, grad_output mxfp8"
    read = json.loads(found.to_json())
    assert read["share"] == found.share and len(read["modules"]) == 6
    assert read["modules"][0]["name"] == "0.0" and read["modules"][1]["state"] == "left alone"
    page = found._repr_html_()
    assert page.count("<table>") == 2 and "&lt;MXFP8BlockScaling()" in page and "<MXFP8" not in page
    assert str(found) == f"{classes}\n\n{names}"


def test_layers_that_are_alike_are_one_row() -> None:
    class Router(nn.Linear):
        def forward(self, x):
            return super().forward(x).softmax(-1)

    block = lambda: nn.ModuleDict({"gate": Router(64, 8), "router": nn.Linear(64, 8)})  # noqa: E731
    model = nn.ModuleDict({"layers": nn.ModuleList(block() for _ in range(12))})
    found = hybridq.summary(model)
    assert [row[0] for row in found.tables()[1].rows] == ["layers.*.gate", "layers.*.router"]
    assert [row[4] for row in found.tables()[1].rows] == [
        "routers, the name layers.*.gate",
        "routers, the name layers.*.router",
    ]
    assert len(found.tables()[0].rows) == 2
    assert found.modules[2].reason == "routers, the name layers.1.gate"


def test_what_convert_was_told_is_known_afterwards() -> None:
    model = nn.ModuleDict({"a": nn.Linear(64, 64), "b": nn.Linear(64, 64)})
    hybridq.convert(model, lambda module, name: name == "a")
    model["c"] = nn.Linear(64, 64)
    want = {
        "a": ("converted", ""),
        "b": ("left alone", "filter_fn"),
        "c": ("left alone", "it was not there when convert was called"),
    }
    assert states(hybridq.summary(model)) == want
    keys = list(model.state_dict())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    others = (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(file, weights_only=False),
    )
    for other in others:
        assert report_of(other) == report_of(model) and states(hybridq.summary(other)) == want
        assert list(other.state_dict()) == keys


def test_wrong_arguments_say_so() -> None:
    with pytest.raises(TypeError, match=r"summary: model must be an nn\.Module, got list"):
        hybridq.summary([])
    with pytest.raises(ValueError, match="mxfp"):
        hybridq.summary(nn.Linear(64, 64), "mxfp")


class Small(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.lm_head = nn.Linear(16, width), nn.Linear(16, 64)


def test_less_than_half_is_warned_of_once_for_a_class(caplog) -> None:
    with pytest.warns(hybridq.HybridQWarning, match=r"33.3% of the weights.*hybridq\.summary"):
        hybridq.convert(Small(32))
    with warnings.catch_warnings(), caplog.at_level(logging.INFO, "hybridq"):
        warnings.simplefilter("error")
        hybridq.convert(Small(32))
        hybridq.convert(Small(64))
        hybridq.convert(Small(32), lambda module, name: name == "up")
    assert len([one for one in caplog.records if "of the weights" in one.message]) == 3


class Window(nn.Module):
    """Attention that gives its children's weights and biases to a function (torchvision's Swin)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = nn.functional.linear(x, self.qkv.weight, self.qkv.bias).chunk(3, -1)
        y = torch.softmax(q @ k.mT, -1) @ v
        return nn.functional.linear(y, self.proj.weight, self.proj.bias)


def test_weights_with_biases_that_a_parent_multiplies_by_are_not_counted_as_converted() -> None:
    model = hybridq.convert(nn.ModuleDict({"attn": Window(), "up": nn.Linear(32, 64)}))
    model.forward = lambda x: model["up"](model["attn"](x))
    x = torch.randn(2, 16, 32)
    found = hybridq.summary(model, "mxfp8", x)
    said = {one.name: (one.state, one.reason) for one in found.modules}
    for name in ("attn.qkv", "attn.proj"):
        assert said[name] == ("left alone", "its weight is multiplied by attn itself")
    assert "multiplies by qkv.weight itself" in said["attn"][1]
    outside, inside = 2 * 32 * 32 * (96 + 32), 2 * 32 * 32 * 64  # FLOPs of tokens by weights
    assert found.share == pytest.approx(inside / (inside + outside))


def test_attention_of_torch_has_the_same_formats_before_and_after_it_is_converted() -> None:
    model = nn.TransformerEncoderLayer(64, 4, 128)
    before = hybridq.summary(model, "mxfp8").modules
    after = hybridq.summary(hybridq.convert(model), "mxfp8").modules
    assert "self_attn.out_proj" in {one.name for one in before}
    for one, other in zip(before, after, strict=True):
        assert (one.name, one.formats) == (other.name, other.formats)
