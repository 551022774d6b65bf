"""Tensors with a given scale: whatever writes them keeps it, and records the amax."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

import hybridq
from tensor_tools import same_planes


def _given(rowwise: bool = True) -> tuple[torch.Tensor, torch.Tensor, Any, Any]:
    scale, amax = torch.full((1,), 16.0), torch.zeros(1)
    quantizer = hybridq.Float8Quantizer(scale, amax, rowwise=rowwise)
    return scale, amax, quantizer, quantizer(torch.randn(32, 64))


@pytest.mark.parametrize(
    "write",
    [
        lambda t, x: t.copy_(x),
        lambda t, x: t.zero_().add_(x),
        lambda t, x: t.quantize_(x),
        lambda t, x: t.detach().copy_(x),
        lambda t, x: t.view(-1).copy_(x.view(-1)),
        lambda t, x: t.t().copy_(x.t()),
        lambda t, x: t[:].copy_(x),
        lambda t, x: t.__setitem__(slice(None), x),
        lambda t, x: torch._foreach_copy_([t], [x]),
        lambda t, x: setattr(t, "data", x),
        lambda t, x: t.clone().copy_(x),
        lambda t, x: t.update_usage(columnwise_usage=False) or t.copy_(x),
    ],
)
def test_writes_keep_a_given_scale_and_record_the_amax(write) -> None:
    scale, amax, _, t = _given()
    x = torch.randn(32, 64) * 7.0
    write(t, x)
    assert torch.equal(amax, x.abs().max()[None]) and float(scale) == 16.0
    assert t.rowwise.scale.item() == 1 / 16 and t.quantizer.scale is scale
    rows = hybridq.Float8Quantizer(scale, torch.zeros(1))(x[16:]).dequantize()
    if not torch.equal(t.dequantize()[16:], rows):
        assert torch.equal(t.clone().copy_(x).dequantize()[16:], rows), "a clone was written"


def test_copies_of_a_given_scale() -> None:
    scale, amax, _, t = _given()
    seen = amax.clone()
    apart = copy.deepcopy(t)
    assert torch.equal(apart.quantizer.scale, scale) and apart.quantizer.scale is not scale
    apart.fill_(100.0)
    assert torch.equal(amax, seen) and float(apart.quantizer.amax) == 100.0
    loaded = pickle.loads(pickle.dumps(t))
    assert loaded.quantizer == hybridq.Float8CurrentScalingQuantizer()
    same_planes(loaded, t)
    kind = torch.empty_like(torch.empty_like(t, device="meta"), device="cpu")
    assert kind.quantizer.scale is scale and torch.equal(amax, seen)
    lone = _given(rowwise=False)[3]
    assert lone.t().get_usages() == {"rowwise": True, "columnwise": False}
    lone.t().fill_(2.0)
    assert (lone.dequantize() == 2.0).all()


def test_compiled_code_does_not_drop_a_given_scale() -> None:
    _, _, _, t = _given()
    before = t.clone()
    torch._dynamo.reset()
    with pytest.raises(Exception, match="has no quantizer"):
        torch.compile(lambda t: t.mul_(2.0), fullgraph=True, backend="aot_eager")(t)
    same_planes(t, before)
    read = torch.compile(lambda t: t + 1.0, fullgraph=True, backend="aot_eager")
    assert torch.equal(read(t), t + 1.0)
