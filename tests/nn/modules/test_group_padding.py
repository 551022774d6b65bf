"""Padding of groups against torch's own pad and split."""

from __future__ import annotations

import pytest
import torch

import hybridq
from hybridq.nn import Fp8Padding, Fp8Unpadding


@pytest.mark.parametrize("sizes", [[3, 0, 5], [4, 8, 4], [0, 0, 0], [1, 7, 2]])
def test_groups_are_padded_and_come_back(sizes):
    x = torch.randn(sum(sizes), 3, requires_grad=True)
    padded, made = Fp8Padding(3, 4)(x, sizes)
    parts = [torch.nn.functional.pad(one, (0, 0, 0, -len(one) % 4)) for one in x.split(sizes)]
    assert torch.equal(padded, torch.cat(parts)) and made == [len(one) for one in parts]
    back = Fp8Unpadding(3, 4)(padded, sizes)
    assert torch.equal(back, x)
    dy = torch.randn_like(x)
    (gradient,) = torch.autograd.grad(back, x, dy)
    assert torch.equal(gradient, dy)


def test_recipes_need_no_padding():
    x = torch.ones(5, 2)
    with hybridq.autocast(recipe="mxfp8"):
        padded, sizes = Fp8Padding(1)(x, [5])
        assert padded is x and sizes == [5] and Fp8Unpadding(1)(x, [5]) is x


def test_bad_sizes_are_told():
    with pytest.raises(ValueError, match="Fp8Padding: num_gemms must be a positive int"):
        Fp8Padding(0)
    with pytest.raises(ValueError, match="align_size must be a positive int, got 0"):
        Fp8Unpadding(1, 0)
    with pytest.raises(ValueError, match="Fp8Padding: m_splits must sum"):
        Fp8Padding(2, 4)(torch.ones(3, 2), [1, 1])
    with pytest.raises(ValueError, match="Fp8Unpadding: m_splits must sum"):
        Fp8Unpadding(2, 4)(torch.ones(4, 2), [1, 1])
