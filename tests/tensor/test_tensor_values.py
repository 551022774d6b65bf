"""A tensor has one value: parts, transposes, copies and files of a hybrid one keep it."""

from __future__ import annotations

import copy
import io

import pytest
import torch

import hybridq
from hybridq import QuantizedTensor
from tensor_tools import PAIRS, same_planes


@pytest.fixture(params=sorted(PAIRS))
def matrix(request) -> QuantizedTensor:
    """A [64, 96] tensor of each kind of pair."""
    return hybridq.quantize(torch.randn(64, 96), **PAIRS[request.param])


def values(t: torch.Tensor) -> torch.Tensor:
    return t.dequantize() if isinstance(t, QuantizedTensor) else t


CUTS = {
    "columns": lambda t: t[:, 5:9],
    "columns of a block": lambda t: t[:, 16:48],
    "rows": lambda t: t[5:9],
    "both": lambda t: t[16:32, 16:48],
    "chunk": lambda t: t.chunk(5, dim=1)[1],
    "narrow": lambda t: t.narrow(1, 16, 16),
    "diff": torch.diff,
    "transposed": lambda t: t.T + 0,
    "part of the transposed": lambda t: t.T[5:9],
    "columns of the transposed": lambda t: t.mT[:, 16:32],
    "row of the transposed": lambda t: t.t()[7],
    "transposed part": lambda t: t[16:32].T,
    "twice": lambda t: t.T.T[:, 5:9].T,
    "one line": lambda t: t.T.contiguous().view(-1),
    "cat": lambda t: torch.cat([t[:, :16], t[:, 16:]], dim=1),
    "cat of transposed": lambda t: torch.cat(t.T.split(16)),
    "lookup": lambda t: torch.nn.functional.embedding(torch.tensor([3, 95]), t.T),
}


@pytest.mark.parametrize("name", CUTS)
def test_a_part_has_the_values_of_its_whole(matrix, name) -> None:
    assert torch.equal(values(CUTS[name](matrix)), CUTS[name](matrix.dequantize()))


def _saved(t: QuantizedTensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(t, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def _restored(t: QuantizedTensor) -> torch.Tensor:
    buffers, entries = hybridq.prepare_for_saving(t)
    return hybridq.restore_from_saved(entries, buffers)[0]


def _unflattened(t: QuantizedTensor) -> torch.Tensor:
    names, context = t.__tensor_flatten__()
    inner = {name: getattr(t, name) for name in names}
    return QuantizedTensor.__tensor_unflatten__(inner, context, t.shape, t.stride())


@pytest.mark.parametrize(
    "again",
    [torch.clone, copy.deepcopy, _saved, _restored, _unflattened, lambda t: t.to(torch.bfloat16)],
)
def test_every_copy_of_a_transposed_tensor_has_its_values(matrix, again) -> None:
    transposed = matrix.T
    made = again(transposed)
    same_planes(made, transposed)
    assert torch.equal(made.dequantize(dtype=torch.float32), matrix.dequantize().T)
    assert torch.equal(made.T.dequantize(dtype=torch.float32), matrix.dequantize())


def test_a_write_through_the_transpose_keeps_the_values_where_they_are(matrix) -> None:
    if matrix.quantizer.mirrored() is None:
        return  # refuses writes: no quantizer makes its planes
    expected = matrix.quantizer(matrix.dequantize() * 2.0)
    matrix.T.mul_(2.0)
    same_planes(matrix, expected)


def test_multiplying_by_one_moves_no_value() -> None:
    t = hybridq.quantize(torch.randn(64, 64), "mxfp8", columnwise="nvfp4")
    before = t.dequantize()
    t[:, 32:64].mul_(1.0)
    t[5:9].mul_(1.0)
    t.T.mul_(1.0)
    t[:, 5:9] = t[:, 5:9] * 1.0
    assert torch.equal(t.dequantize(), before)


def test_dropping_the_plane_that_has_the_values_leaves_the_other_ones() -> None:
    t = hybridq.quantize(torch.randn(64, 64), "mxfp8", columnwise="nvfp4").T
    other = t.rowwise.dequantize()
    t.update_usage(columnwise_usage=False)
    assert torch.equal(t.dequantize(), other)


def test_what_is_encoded_of_a_transposed_tensor_is_made_of_its_values() -> None:
    t = hybridq.quantize(torch.randn(64, 96), "mxfp8", columnwise="nvfp4").T
    for options in ({"rowwise": "fp8_128x128"}, {"rowwise": "nvfp4", "columnwise": "fp8_1x128"}):
        quantizer = hybridq.quantizer(**options)
        same_planes(quantizer(t), quantizer(t.dequantize()))
    made = torch.ops.hybridq.encode(
        t, t.rowwise.spec.text, "fp32", col_source="rowwise_dequantized"
    )
    assert torch.equal(made[-1], t.rowwise.dequantize().t())
    made = torch.ops.hybridq.encode(t, t.rowwise.spec.text, "fp32")
    assert torch.equal(made[-1], t.dequantize().t())


ALIASES = {
    "detach": lambda t: t.detach(),
    "data": lambda t: t.data,
    "rows": lambda t: t[:32],
    "transposed": lambda t: t.t(),
    "view": lambda t: t.view(-1, 2, 64),
    "transposed rows": lambda t: t[:32].t(),
    "row": lambda t: t[0],
}


@pytest.mark.parametrize("name", ALIASES)
@pytest.mark.parametrize("drops", ["alias", "tensor"])
def test_no_plane_of_another_tensor_of_the_same_memory_is_left_stale(name, drops) -> None:
    t = hybridq.quantize(torch.randn(64, 64), "mxfp8", columnwise="mxfp8_e5m2")
    view = ALIASES[name](t)
    one, other = (view, t) if drops == "alias" else (t, view)
    if not all(one.get_usages().values()):
        one.zero_()  # this view lacked the plane from the start, and writes all of the tensor
        assert not any(plane.dequantize()[0].any() for plane in t.tensor_storage.planes)
        return
    before = t.clone()
    one.update_usage(columnwise_usage=False)
    if not all(other.get_usages().values()):
        other.zero_()  # writes all of what it is part of
        assert not t.dequantize()[0].any()
        return
    for write in (one.zero_, lambda: one.copy_(torch.zeros_like(one)), lambda: one.mul_(2.0)):
        with pytest.raises(hybridq.PlaneError, match=r"another tensor shares.*write that tensor"):
            write()
    assert torch.equal(t.dequantize(), before.dequantize())
    other.zero_()
    assert not any(p.dequantize().any() for p in other.tensor_storage.planes)
    assert not one.clone().zero_().any()
    del other, view
    if drops == "tensor":
        assert not t.zero_().any(), "nobody has the other plane any more"


def test_a_plane_that_an_alias_has_derived_is_not_left_stale() -> None:
    t = hybridq.quantize(torch.randn(64, 64), "mxfp8_32x32", columnwise=False)
    view = t.detach()
    view.update_usage(columnwise_usage=True)
    with pytest.raises(hybridq.PlaneError, match="another tensor shares this memory"):
        t.zero_()
    view.zero_()
    assert not t.any() and not view.columnwise.dequantize().any()
    del view
    t.fill_(1.0)
    assert (t.dequantize() == 1.0).all()


def test_planes_of_one_memory_are_never_stale() -> None:
    t = hybridq.quantize(torch.randn(64, 64), "fp32", columnwise=False)
    view = t.detach()
    view.update_usage(columnwise_usage=True)
    t.fill_(2.0)
    assert (view.columnwise.dequantize() == 2.0).all()
