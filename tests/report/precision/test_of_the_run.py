"""Whose planes and products a report has: those of the model that the run makes, and no others."""

from __future__ import annotations

import copy
import math

import torch
from torch import nn

import hybridq
from hybridq.recipes import get, with_attention


def mean_square(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean()


def mlp(layers: int = 3, width: int = 64) -> nn.Sequential:
    torch.manual_seed(0)
    return hybridq.convert(nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))))


def test_a_teacher_beside_the_model_is_not_measured() -> None:
    """Its names are the student's, its outliers and its NaN are not."""
    student, x = mlp(2), torch.randn(64, 64)
    teacher = copy.deepcopy(student).requires_grad_(False)
    with torch.no_grad():
        teacher[1].weight[:, ::16] = 1e5
        target = teacher(x)

    def loop(model: nn.Module) -> torch.Tensor:
        with torch.no_grad(), hybridq.autocast(recipe="mxfp8"):
            taught = teacher(x)
        assert taught.shape == target.shape
        return mean_square(model(x) - target)

    alone = hybridq.report(student, x, recipe="mxfp8", loss=lambda y: mean_square(y - target))
    both = hybridq.report(student, loop, recipe="mxfp8")
    assert both.slots == alone.slots and both.products == alone.products
    assert both.shapes == alone.shapes
    with torch.no_grad():
        teacher[0].weight[3, 5] = math.nan
    assert hybridq.report(student, loop, recipe="mxfp8").first_bad is None
    advice = hybridq.advise(
        student, loop, device="b200", candidates=["mxfp8"], prefer="memory", budget=1
    )
    assert {one.layer for one in advice.products} == {"0", "1"}


def test_attention_of_a_teacher_is_not_measured() -> None:
    attention = hybridq.nn.DotProductAttention(
        2, 16, qkv_format="bshd", attn_mask_type="no_mask", name="core"
    )
    q = torch.randn(2, 12, 2, 16)
    student = mlp(1)

    def loop(model: nn.Module) -> torch.Tensor:
        attention(q, q, q)
        return mean_square(model(torch.ones(4, 64)))

    found = hybridq.report(student, loop, recipe=with_attention(get("mxfp8")))
    assert {row.layer for row in found.slots} == {"0"}
