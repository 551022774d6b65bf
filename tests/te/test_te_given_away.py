"""Buffers that a tensor of the door gives away and takes back, as scripts do for a backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hybridq.te as te
from hybridq.errors import PlaneError

E4M3 = te.DType.kFloat8E4M3


def fp8() -> Any:
    return te.Float8CurrentScalingQuantizer(E4M3)


def hybrid(row: Any, col: Any) -> Any:
    return te.HybridQuantizer(rowwise_quantizer=row, columnwise_quantizer=col)


QUANTIZERS = {
    "fp8": fp8,
    "mxfp8": lambda: te.MXFP8Quantizer(E4M3),
    "identity": te.IdentityQuantizer,
    "hybrid": lambda: hybrid(fp8(), te.NVFP4Quantizer()),
    "hybrid of one": lambda: hybrid(fp8(), fp8()),
}


@pytest.mark.parametrize("name", sorted(QUANTIZERS))
def test_buffers_are_given_away_and_come_back(name: str) -> None:
    made = QUANTIZERS[name]()(torch.randn(32, 64))
    other, values = made.detach(), made.dequantize()
    kind, size = type(made), made.nbytes
    buffers, own = made.prepare_for_saving()
    assert own is made and isinstance(buffers, list)
    assert {type(one) for one in buffers} == {torch.Tensor}
    assert sum(one.nbytes for one in buffers) == size and made.nbytes == 0
    assert made._hp_data is None and made._data is None and made.rowwise_sub_storage is None
    with pytest.raises(PlaneError, match="given away"):
        made.dequantize()
    assert torch.equal(other.dequantize(), values)
    more = torch.ones(3)
    assert own.restore_from_saved([*buffers, more]) == [more]
    assert type(made) is kind and torch.equal(made.dequantize(), values)
    with pytest.raises(RuntimeError, match="prepare_for_saving must have been called"):
        made.restore_from_saved(buffers)


def test_functions_take_entries_that_are_tensors() -> None:
    x = torch.randn(32, 64)
    one, two = fp8()(x), te.MXFP8Quantizer(E4M3)(x)
    own, [entry] = one.prepare_for_saving(), te.prepare_for_saving(two)[1]
    flat = [*own[0], None, *te.prepare_for_saving(two)[0], torch.zeros(1)]
    (first, nothing, second), rest = te.restore_from_saved([one, None, entry], flat, True)
    assert first is one and nothing is None and len(rest) == 1
    assert torch.equal(first.dequantize(), fp8()(x).dequantize())
    assert torch.equal(second.dequantize(), two.dequantize())


@pytest.mark.parametrize("name", sorted(QUANTIZERS))
def test_a_quantizer_with_both_usages_off_makes_no_plane(name: str) -> None:
    quantizer = QUANTIZERS[name]()
    quantizer.set_usage(rowwise=False, columnwise=False)
    for made in (quantizer(torch.randn(4, 32)), quantizer.make_empty((4, 32))):
        assert tuple(made.shape) == (4, 32) and made.nbytes == 0
        assert not any(made.get_usages().values())
        assert isinstance(made, te.HybridQuantizedTensor) == name.startswith("hybrid")


def test_none_drops_the_codes_of_a_plane() -> None:
    made = fp8()(torch.randn(4, 32))
    made._transpose = None
    assert made._transpose_invalid and made._data is not None
    made._data = None
    assert made.nbytes == 0 and tuple(made.size()) == (4, 32)
    with pytest.raises(AttributeError, match="None drops it"):
        fp8()(torch.randn(4, 32))._data = torch.ones(1)
