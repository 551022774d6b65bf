"""Tensors that are made when their values are asked for."""

from __future__ import annotations

import pytest
import torch

from hybridq.ptq.later import Later, now


def test_what_is_done_to_them_is_done_then() -> None:
    values = torch.randn(3, 8, 4)
    asked = []

    def make() -> torch.Tensor:
        asked.append(1)
        return values

    later = Later(torch.empty(3, 8, 4, device="meta"), make)

    def pieces(x):
        """What transformers' converters do."""
        gate, up = (one.contiguous() for one in torch.chunk(x, 2, dim=1))
        merged = torch.cat([gate, up], dim=2).transpose(1, 2)
        singles = [one.squeeze(0) for one in torch.chunk(up, 3, dim=0)]
        return [merged.contiguous(), torch.stack(singles[::-1]), singles[1][1:3], x.view(6, 16)]

    made = pieces(later)
    assert not asked and all(isinstance(one, Later) for one in made)
    for one, want in zip(made, pieces(values), strict=True):
        assert (one.shape, one.dtype, one.device) == (want.shape, want.dtype, want.device)
        assert one.stride() == want.stride() and one.nbytes == want.nbytes
        assert torch.equal(now(one), want)
    assert asked and now(values) is values


def test_values_cannot_be_read_before_or_written() -> None:
    later = Later(torch.empty(3, device="meta"), lambda: torch.zeros(3))
    with pytest.raises(TypeError, match="would write to a tensor that is not there yet"):
        later.add_(1)
    with pytest.raises((TypeError, RuntimeError, NotImplementedError)):
        later.sum().item()
    assert repr(later) == "Later([3], torch.float32)"
