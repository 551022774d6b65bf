"""Operations on lists of tensors, against sums and products of each."""

from __future__ import annotations

import math

import pytest
import torch
from hybridq.te.pytorch.optimizers import (
    multi_tensor_applier,
    multi_tensor_l2norm,
    multi_tensor_scale,
)


def gradients() -> list[torch.Tensor]:
    torch.manual_seed(0)
    made = [torch.randn(3, 5), torch.randn(7).to(torch.bfloat16), torch.randn(2, 2, 2).half()]
    return [*made, torch.zeros(0, 4)]


def test_norms_of_all_and_of_each() -> None:
    tensors = gradients()
    flag = torch.zeros(1, dtype=torch.int32)
    norm, none = multi_tensor_applier(multi_tensor_l2norm, flag, [tensors], False)
    squares = [sum(x * x for x in one.flatten().tolist()) for one in tensors]
    assert norm.shape == (1,) and none.numel() == 0
    assert float(norm) == pytest.approx(math.sqrt(sum(squares)), rel=1e-6)
    norm, each = multi_tensor_applier(multi_tensor_l2norm, flag, [tensors], True)
    assert each.tolist() == pytest.approx([math.sqrt(square) for square in squares], rel=1e-6)
    assert norm.dtype == each.dtype == torch.float32
    assert multi_tensor_applier(multi_tensor_l2norm, None, [[]])[0].tolist() == [0]


@pytest.mark.parametrize("scale", [0.3, torch.tensor(0.3)])
def test_products_are_rounded_once(scale) -> None:
    tensors = gradients()
    before = [one.clone() for one in tensors]
    flag = torch.zeros(1, dtype=torch.int32)
    multi_tensor_applier(multi_tensor_scale, flag, [tensors, tensors], scale)
    factor = torch.tensor(0.3)
    for one, old in zip(tensors, before, strict=True):
        assert torch.equal(one, (old.float() * factor).to(one.dtype))
    assert flag.tolist() == [0]
    results = [torch.empty(one.shape) for one in tensors]
    before[1][2] = float("inf")
    multi_tensor_applier(multi_tensor_scale, flag, [before, results], 2.0)
    assert flag.tolist() == [1] and torch.equal(results[0], before[0] * 2)
    multi_tensor_applier(multi_tensor_scale, flag, [tensors, tensors], 1.0)
    assert flag.tolist() == [1]  # what was found stays


def test_a_training_step_clips_as_torch_does() -> None:
    model = torch.nn.Linear(4, 3)
    model(torch.randn(8, 4)).square().sum().backward()
    own = [parameter.grad.clone() for parameter in model.parameters()]
    norm, _ = multi_tensor_applier(multi_tensor_l2norm, None, [own], False)
    clip = 0.1 / (norm + 1e-6)
    multi_tensor_applier(multi_tensor_scale, None, [own, own], clip.clamp(max=1.0))
    wanted = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    assert float(norm) == pytest.approx(float(wanted), rel=1e-6)
    for mine, parameter in zip(own, model.parameters(), strict=True):
        assert torch.allclose(mine, parameter.grad, rtol=1e-5)


def test_bad_lists_are_told() -> None:
    with pytest.raises(ValueError, match="multi_tensor_l2norm: tensor_lists must be 1, got 2"):
        multi_tensor_applier(multi_tensor_l2norm, None, [[], []])
    with pytest.raises(ValueError, match=r"the same shapes, got \[\(2,\)\] and \[\(3,\)\]"):
        multi_tensor_applier(multi_tensor_scale, None, [[torch.ones(2)], [torch.ones(3)]], 1.0)
