"""Experts are pushed each under a name of its own, with the planes of the trainer's forward."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import hybridq
from hybridq import layouts
from hybridq.errors import SpecError
from hybridq.moe import ExpertsLayout, convert_experts
from hybridq.rollout import weights
from hybridq.storage import TensorStorage
from hybridq.tensor.stack import QuantizedStack


class Own(nn.Module):
    """Experts as a model may hold them."""

    def __init__(self, is_transposed: bool, inner: int = 64) -> None:
        super().__init__()
        up, down = (2 * inner, 32), (32, inner)
        if is_transposed:
            up, down = up[::-1], down[::-1]
        self.gate_up_proj = nn.Parameter(torch.randn(3, *up, dtype=torch.bfloat16))
        self.down_proj = nn.Parameter(torch.randn(3, *down, dtype=torch.bfloat16))


def experts(is_transposed: bool, is_concatenated: bool, inner: int = 64) -> nn.Module:
    layout = ExpertsLayout(is_transposed=is_transposed, is_concatenated=is_concatenated)
    model = nn.Module()
    model.experts = convert_experts(Own(is_transposed, inner), layout)
    return model


def forward(model, x, recipe):
    top = torch.rand(len(x), 3, generator=torch.Generator().manual_seed(3)).topk(2)
    with torch.no_grad(), hybridq.autocast(recipe=recipe):
        return model.experts(x, top.indices, top.values.bfloat16())


def read(pushed, layout):
    one = layouts.get(layout)
    found = one.find({name: (t.dtype, tuple(t.shape)) for name, t in pushed.items()})
    return {name: weight.decode(pushed)[0] for name, weight in found.items()}


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("is_concatenated", [False, True])
@pytest.mark.parametrize(
    ("recipe", "layout"), [("mxfp8", "compressed-tensors"), ("nvfp4_1d_weight", "modelopt")]
)
def test_experts_give_the_trainers_outputs(recipe, layout, is_concatenated, is_transposed) -> None:
    """Put together again, gate on up, the pushed planes are those that the forward encodes."""
    model = experts(is_transposed, is_concatenated)
    x = torch.randn(6, 32, dtype=torch.bfloat16)
    expected = forward(model, x, recipe)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # gate and up have one scale
        pushed = dict(weights(model, layout, recipe=recipe))
    planes = read(pushed, layout)
    assert sorted(planes) == sorted(
        f"experts.{e}.{name}_proj.weight" for e in range(3) for name in ("gate", "up", "down")
    )
    server = copy.deepcopy(model)
    for name, parts in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
        storages = []
        for e in range(3):
            own = [planes[f"experts.{e}.{part}_proj.weight"] for part in parts]
            storages.append(TensorStorage(together(own, is_concatenated), None))
        stack = QuantizedStack.make(storages, torch.bfloat16, is_transposed)
        setattr(server.experts, name, nn.Parameter(stack, requires_grad=False))
    assert torch.equal(forward(server, x, recipe), expected)
    assert not torch.equal(forward(model, x, "fp8_current"), expected)


def together(planes, is_concatenated):
    """One plane of the rows of several, one after the other or in turn."""
    if len(planes) == 1:
        return planes[0]
    first, second = planes
    buffers = {}
    for name, buffer in first.buffers.items():
        pair = (buffer, second.buffers[name])
        if name == "amax":
            assert torch.equal(*pair)
            buffers[name] = buffer
        else:
            buffers[name] = (
                torch.cat(pair) if is_concatenated else torch.stack(pair, 1).flatten(0, 1)
            )
    return hybridq.Plane(first.spec, "rowwise", 2 * first.rows, first.cols, buffers)


def test_stacks_are_pushed_as_stacks_where_the_reader_has_them() -> None:
    """GPT-OSS's: gate and up in turn, `[E, in, out]` in the model, `[E, out, in]` in the file."""
    model = experts(True, False)
    recipe = hybridq.CustomRecipe(lambda role: hybridq.quantizer("mxfp4"))
    pushed = dict(weights(model, "gpt-oss-mxfp4", recipe=recipe))
    assert list(pushed) == [
        *("experts.gate_up_proj_blocks", "experts.gate_up_proj_scales"),
        *("experts.down_proj_blocks", "experts.down_proj_scales"),
    ]
    stored = layouts.GPT_OSS_MXFP4.find({n: (t.dtype, tuple(t.shape)) for n, t in pushed.items()})
    for e, plane in enumerate(stored["experts.gate_up_proj"].decode(pushed)):
        own = hybridq.quantize(model.experts.gate_up_proj[e].t().contiguous(), "mxfp4").rowwise
        assert torch.equal(plane.data, own.data) and torch.equal(plane.scale, own.scale)


@pytest.mark.parametrize("is_concatenated", [False, True])
def test_biases_go_with_the_matrices(is_concatenated) -> None:
    """Rows of gate and up one after the other, or in turn; a stack's biases stay a stack."""
    model, own = nn.Module(), Own(True)
    own.gate_up_proj_bias = nn.Parameter(torch.randn(3, 128).bfloat16())
    own.down_proj_bias = nn.Parameter(torch.randn(3, 32).bfloat16())
    biases = {"gate_up_bias": "gate_up_proj_bias", "down_bias": "down_proj_bias"}
    kind = ExpertsLayout(is_transposed=True, is_concatenated=is_concatenated, **biases)
    model.experts = convert_experts(own, kind)
    both = model.experts.gate_up_proj_bias
    pushed = dict(weights(model, "modelopt", recipe="mxfp8", first_expert=2))
    for e in range(3):
        pair = both[e].chunk(2) if is_concatenated else (both[e, ::2], both[e, 1::2])
        for name, want in zip(("gate", "up"), pair, strict=True):
            assert torch.equal(pushed.pop(f"experts.{e + 2}.{name}_proj.bias"), want)
        down = pushed.pop(f"experts.{e + 2}.down_proj.bias")
        assert torch.equal(down, model.experts.down_proj_bias[e])
    assert not any("bias" in name for name in pushed)
    recipe = hybridq.CustomRecipe(lambda role: hybridq.quantizer("mxfp4"))
    if not is_concatenated:
        stacks = dict(weights(model, "gpt-oss-mxfp4", recipe=recipe))
        assert torch.equal(stacks["experts.gate_up_proj_bias"], both)


def test_numbers_of_a_ranks_own_experts() -> None:
    pushed = dict(weights(experts(False, True), "modelopt", recipe="mxfp8", first_expert=5))
    assert {name.split(".")[1] for name in pushed} == {"5", "6", "7"}


def test_halves_that_share_a_block_are_refused() -> None:
    """64 rows of gate before those of up, in blocks of 128 rows."""
    model, own = nn.Module(), Own(False)
    own.gate_up_proj = nn.Parameter(torch.randn(1, 2 * 64, 128))
    own.down_proj = nn.Parameter(torch.randn(1, 128, 64))
    model.experts = convert_experts(own, ExpertsLayout())
    wide = hybridq.quantizer("fp8_128x128")
    recipe = hybridq.CustomRecipe(
        lambda role: wide if "gate_up" in role.name else hybridq.IdentityQuantizer()
    )
    with pytest.raises(SpecError, match="shares blocks with its sibling, since 64 rows"):
        list(weights(model, "fine-grained-fp8", recipe=recipe))


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_models_of_transformers(kind) -> None:
    """The very codes that the forward keeps for its microbatches."""
    hf = pytest.importorskip("hf_models")
    torch.manual_seed(0)
    config = hf.config(kind)
    config.moe_intermediate_size = 64
    model = hf.transformers.AutoModelForCausalLM.from_config(config).bfloat16()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hybridq.HybridQWarning)
        model = hybridq.convert(model)
    with torch.no_grad(), hybridq.autocast(recipe="mxfp8", is_first_microbatch=True):
        model(hf.IDS)
        pushed = dict(weights(model, "compressed-tensors"))
    seen = 0
    for path, module in model.named_modules():
        for part, kept in getattr(module, "_cached_weights", {}).items():
            name, _, e = part.partition(".")
            if not e:
                codes = [pushed[f"{path}.weight"]]
            elif name == "gate_up_proj":
                codes = [pushed[f"{path}.{e}.{own}_proj.weight"] for own in ("gate", "up")]
            else:
                codes = [pushed[f"{path}.{e}.down_proj.weight"]]
            assert torch.equal(torch.cat(codes).view(torch.uint8), kept.row[0])
            seen += 1
    assert seen >= 2 * (4 + 2 * 4)
