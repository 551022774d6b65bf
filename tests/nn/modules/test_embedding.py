"""Embeddings: nn.Embedding's bits where nothing is stored quantized, decoded rows where it is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hybridq
from hybridq.nn import Embedding
from hybridq.tensor import is_quantized
from linear_model import Recorder, equal

RECIPES = ["mxfp8", "nvfp4", "fp8_block", "fp8_current", "mxfp8_fwd_nvfp4_bwd"]


def make(recipe: str, **options) -> tuple[Embedding, torch.Tensor]:
    """An embedding with a quantized weight, and the values that it had."""
    torch.manual_seed(2)
    with hybridq.quantized_model_init(recipe, preserve_high_precision_init_val=True):
        made = Embedding(50, 48, **options)
    assert is_quantized(made.weight) and made.weight.columnwise is None
    return made, made.weight.get_high_precision_init_val()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_lookup_is_the_row_of_the_quantized_table(recipe) -> None:
    """Against `encode` and `decode` of the whole table, then torch's lookup in FP64."""
    made, values = make(recipe)
    spec = str(made.weight.rowwise.spec)
    buffers = torch.ops.hybridq.encode(values, spec, "")
    table = torch.ops.hybridq.decode(buffers, spec, 50, 48, torch.float32)
    index = torch.tensor([[3, 49, 3], [0, 17, 1]])
    with Recorder() as seen:
        rows = made(index)
    assert torch.equal(rows.double(), nn.functional.embedding(index, table.double()))
    assert not torch.equal(rows, values[index]), "nothing was quantized"
    assert not seen.encodes
    with hybridq.autocast(recipe=recipe):
        assert torch.equal(made(index), rows), "a recipe rounds nothing again"


def test_only_the_rows_taken_are_decoded(monkeypatch) -> None:
    made, _ = make("mxfp8")
    shapes = []
    kernel = hybridq.storage.Plane.dequantize

    def counted(plane, *args):
        shapes.append(plane.rows)
        return kernel(plane, *args)

    monkeypatch.setattr(hybridq.storage.Plane, "dequantize", counted)
    made(torch.tensor([[3, 49], [0, 17]]))
    assert shapes == [4]


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_gradient_is_that_of_the_decoded_table(recipe) -> None:
    made, _ = make(recipe, padding_idx=1, scale_grad_by_freq=True)
    plain = nn.Embedding(50, 48, padding_idx=1, scale_grad_by_freq=True)
    with torch.no_grad():
        plain.weight.copy_(made.weight.dequantize())
    index, dy = torch.tensor([[3, 49, 3], [0, 17, 1]]), torch.randn(2, 3, 48)
    for one in (made, plain):
        one(index).backward(dy)
    assert type(made.weight.grad) is torch.Tensor
    assert equal([made.weight.grad], [plain.weight.grad])
    before = made.weight.dequantize()
    hybridq.optim.AdamW(made.parameters(), lr=0.5).step()
    moved = (made.weight.dequantize() != before).any(1).nonzero().flatten().tolist()
    assert {0, 3, 17, 49} <= set(moved)


def test_a_plain_weight_is_nn_embedding_under_every_recipe() -> None:
    torch.manual_seed(1)
    ours = Embedding(50, 48, padding_idx=2, max_norm=1.0, sparse=True)
    torch.manual_seed(1)
    plain = nn.Embedding(50, 48, padding_idx=2, max_norm=1.0, sparse=True)
    index = torch.tensor([[3, 49, 2]])
    with hybridq.autocast(recipe="mxfp8"):
        ours(index).sum().backward()
    plain(index).sum().backward()
    assert equal(
        [ours.weight, ours.weight.grad.to_dense()], [plain.weight, plain.weight.grad.to_dense()]
    )
    assert ours.weight.grad.is_sparse and str(ours).startswith("hybridq.Embedding(50, 48, padding")


def test_what_a_quantized_weight_does_not_take_it_says() -> None:
    made, _ = make("mxfp8", sparse=True, name="embed")
    with pytest.raises(RuntimeError, match="Embedding embed: a quantized weight has no sparse"):
        made(torch.tensor([1]))
    with torch.no_grad():
        assert made(torch.tensor([1])).shape == (1, 48)
    made, _ = make("mxfp8", max_norm=1.0)
    with pytest.raises(RuntimeError, match="max_norm writes to the rows that are looked up"):
        made(torch.tensor([1]))
    with pytest.raises(IndexError):
        make("mxfp8")[0](torch.tensor([50]))


def test_it_is_compiled_in_one_graph() -> None:
    made, _ = make("mxfp8")
    index = torch.tensor([[3, 49, 3]])
    compiled = torch.compile(made, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(index), made(index))


def test_state_dicts_are_those_of_nn_embedding() -> None:
    made, values = make("mxfp8")
    plain = nn.Embedding(50, 48)
    plain.load_state_dict(hybridq.dequantized_state_dict(made))
    assert torch.equal(plain.weight, made.weight.dequantize())
    again, _ = make("mxfp8")
    again.load_state_dict({"weight": values})
    assert torch.equal(again.weight.dequantize(), made.weight.dequantize())
    torch.manual_seed(5)
    again.reset_parameters()
    torch.manual_seed(5)
    assert not torch.equal(again.weight.dequantize(), made.weight.dequantize())


# ---- convert


def model(tied: bool = False) -> nn.ModuleDict:
    made = nn.ModuleDict(
        {"embed": nn.Embedding(64, 48), "up": nn.Linear(48, 48), "head": nn.Linear(48, 64, False)}
    )
    if tied:
        made["head"].weight = made["embed"].weight
    return made


def test_convert_takes_embeddings_where_it_is_told_to() -> None:
    plain = model()
    before = hybridq.conversion(plain)
    assert type(hybridq.convert(plain)["embed"]) is nn.Embedding
    assert before == hybridq.conversion(plain) and before.converted == ("up", "head")
    asked = model()
    weight, index = asked["embed"].weight, torch.tensor([[3, 9]])
    want = asked["embed"](index)
    hybridq.convert(asked, also=["embeddings"])
    assert type(asked["embed"]) is Embedding and asked["embed"].weight is weight
    assert asked["embed"].name == "embed" and torch.equal(asked["embed"](index), want)
    report = hybridq.conversion(asked, also=["embeddings"])
    assert report.converted == ("embed", "up", "head")
    assert report.elements == before.elements and ("nn.Embedding", 1, 1) in report.kinds
    seen = []
    hybridq.convert(model(), lambda module, name: seen.append(name) or True)
    assert seen == ["up", "head"], "a filter is asked for what is converted"
    hybridq.convert(model(), lambda module, name: seen.append(name) or True, also=["embeddings"])
    assert seen[2:] == ["embed", "up", "head"]


def test_converted_in_quantized_model_init_the_table_is_stored_quantized() -> None:
    made = model()
    made._keep_in_fp32_modules = ["nothing"]
    with hybridq.quantized_model_init("mxfp8"):
        hybridq.convert(made, also=("embeddings", "heads"))
    assert [is_quantized(one.weight) for one in made.values()] == [True, True, True]
    assert made["embed"].weight.nbytes < made["head"].weight.nbytes, "one plane of two"
    kept = model()
    kept._keep_in_fp32_modules = ["embed"]
    with hybridq.quantized_model_init("mxfp8"):
        hybridq.convert(kept, also=("embeddings",))
    assert type(kept["embed"]) is nn.Embedding and not is_quantized(kept["embed"].weight)
    reason = ("embed", "kept_in_fp32, _keep_in_fp32_modules")
    assert reason in hybridq.conversion(kept, also=("embeddings",)).left_alone


@pytest.mark.parametrize("also", [(), ("heads",), ("heads", "embeddings")])
def test_a_tied_head_shares_the_parameter(also) -> None:
    made = model(tied=True)
    with hybridq.quantized_model_init("mxfp8"):
        hybridq.convert(made, also=also)
    assert made["head"].weight is made["embed"].weight
    assert (type(made["head"]) is hybridq.Linear) == ("heads" in also)
    assert not is_quantized(made["embed"].weight), "two kinds of modules use it"
    with hybridq.autocast(recipe="mxfp8"):
        x = made["embed"](torch.tensor([[3, 9]]))
        y = made["head"](x)
        plain = nn.functional.linear(x, made["embed"].weight)
    assert torch.equal(y, plain) == ("heads" not in also)
    y.sum().backward()
    assert made["embed"].weight.grad.shape == (64, 48)
