"""Tensors that have given their planes away, and planes that are gathered by hand."""

from __future__ import annotations

import copy
import io

import pytest
import torch

import hybridq
from hybridq.errors import PlaneError
from tensor_tools import PAIRS, same_planes

GONE = "given away"


def test_a_cleared_tensor_has_no_bytes_and_says_so(weight) -> None:
    t = weight.detach()
    other, values = t.detach(), t.dequantize()
    t.clear()
    assert t.nbytes == 0 and t.get_usages() == {"rowwise": False, "columnwise": False}
    assert (t.shape, t.dtype, t.quantizer) == (other.shape, other.dtype, other.quantizer)
    assert "rowwise=None" in repr(t) and "columnwise=None" in repr(t)
    reads = (t.dequantize, t.detach, t.clone, t.float, lambda: t + 1, lambda: copy.deepcopy(t))
    files = (lambda: torch.save(t, io.BytesIO()), lambda: t.to(torch.bfloat16))
    writes = (lambda: t.copy_(values), lambda: t.mul_(2), lambda: t.mT)
    for use in (*reads, *files, *writes):
        with pytest.raises(PlaneError, match=GONE):
            use()
    assert torch.equal(other.dequantize(), values)  # what was made of it before is as it was
    t.data = other
    same_planes(t, other)
    assert type(t) is type(other)


def test_both_usages_off_and_none_for_data_are_ways_to_clear(weight) -> None:
    t = weight.detach()
    t.update_usage(rowwise_usage=False, columnwise_usage=False)
    assert not any(t.get_usages().values())
    t = weight.detach()
    had = t.get_usages()
    t._columnwise_data = None
    assert t.get_usages() == {"rowwise": had["rowwise"], "columnwise": False}
    t._rowwise_data = None
    t._rowwise_data = None  # again
    assert t.nbytes == 0 and tuple(t.shape) == (48, 64)
    for name, value in (("_rowwise_data", torch.ones(1)), ("_rowwise_scale", None)):
        with pytest.raises(AttributeError, match="only data can be assigned, and only None"):
            setattr(weight.detach(), name, value)


def _sent(t: hybridq.QuantizedTensor):
    return t.fsdp_pre_all_gather(None, t.shape, None, None, None)


def _put_together(parts, out=None):
    sent = [_sent(one) for one in parts]
    wire = [torch.cat(each) for each in zip(*(one for one, _ in sent), strict=True)]
    return parts[0].fsdp_post_all_gather(wire, sent[0][1], parts[0].dtype, out=out)


@pytest.mark.parametrize("name", sorted(PAIRS))
def test_parts_that_are_gathered_by_hand_are_the_whole(name: str) -> None:
    whole = hybridq.quantize(torch.randn(384, 64), **PAIRS[name])
    parts = whole.split(128)
    made, _ = _put_together(parts)
    same_planes(made, whole)
    assert made.shape == whole.shape and made.quantizer == whole.quantizer
    again = hybridq.quantize(torch.randn(384, 64), **PAIRS[name])
    halves = [one.clone() for one in again.split(128)]
    out, wire = _put_together(halves, out=made)
    assert out is made and isinstance(wire, list)
    same_planes(made, again)
    alone, _ = whole.fsdp_post_all_gather(*_sent(whole), torch.bfloat16)
    same_planes(alone, whole)
    assert alone.dtype == torch.bfloat16


def test_parts_with_other_scales_of_the_whole_are_not_put_together() -> None:
    apart = [hybridq.quantize(k * torch.ones(16, 32), "fp8_e4m3") for k in (1, 2)]
    with pytest.raises(PlaneError, match=r"2 parts \[16, 32\] must have the same scales"):
        _put_together(apart)
    cut = [hybridq.quantize(torch.randn(20, 32), "mxfp8") for _ in range(2)]
    with pytest.raises(PlaneError, match="end at blocks"):
        _put_together(cut)
    with pytest.raises(RuntimeError, match="must be prepared"):
        cut[0].fsdp_pre_all_gather(object(), cut[0].shape, None, None, None)
