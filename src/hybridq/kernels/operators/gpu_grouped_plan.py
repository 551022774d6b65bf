"""How groups are multiplied on a GPU: chosen once for the size of their matrices.

How many tokens there are changes from step to step where experts share them, so a plan holds for
any number: it is chosen for the largest power of two that groups have on average, 512 at most.
From there on no backend of ours decides another way.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from ... import settings
from ...formats import PlaneSpec
from ..choice import GroupedArgs, GroupedOperand, OpQuery, cached_choice, select
from ..inputs import chip_of
from .grouped_gemm import multiply

__all__ = ["GpuGroupedPlan", "gpu_grouped_plan", "tokens_as_planned"]

_MOST = 512


class GpuGroupedPlan(NamedTuple):
    """How planes of two specs are multiplied group by group on one GPU.

    Args:
        a, b: the operands' specs, of no open dtype.
        run: takes `(GroupedOperand, GroupedOperand, GroupedArgs)`; a stack is no list.
    """

    a: PlaneSpec
    b: PlaneSpec
    run: Callable[[GroupedOperand, GroupedOperand, GroupedArgs], torch.Tensor]


def tokens_as_planned(tokens: int, groups: int) -> int:
    """Return how many tokens a group has, as plans distinguish it.

    Args:
        tokens: of all groups, at least one.
        groups: how many there are, at least one.
    """
    average = -(-tokens // groups)
    return int(min(1 << (average.bit_length() - 1), _MOST))


def gpu_grouped_plan(
    a: str,
    b: str,
    dtype: torch.dtype,
    precision: str,
    sizes: tuple[int, int],
    groups: tuple[int, int],
    is_stack: bool,
    device: torch.device,
) -> GpuGroupedPlan:
    """Return how planes that were made of tensors of one dtype are multiplied group by group.

    Args:
        a, b: spec strings of the operands.
        dtype: of the tensors and of the result.
        precision: `"auto"`, `"exact"` or `"fast"`.
        sizes: N and K of rows of tokens; M and N of a contraction over them.
        groups: how many there are, and the tokens of one (`tokens_as_planned`).
        is_stack: b is a stack, and the rows of a are tokens.
        device: of the tensors.

    Raises:
        BackendError: no backend can multiply them.
    """
    query = (dtype, precision, sizes, groups, is_stack, device)
    return _plan((a, b), *query, settings.current().backend)


@cached_choice
def _plan(
    texts: tuple[str, str],
    dtype: torch.dtype,
    precision: str,
    sizes: tuple[int, int],
    groups: tuple[int, int],
    is_stack: bool,
    device: torch.device,
    forced: str | None,
) -> GpuGroupedPlan:
    del forced  # what `select` asks for
    left, right = (PlaneSpec.parse(text).resolve(dtype) for text in texts)
    count, average = groups
    all_sizes = (count * average, *sizes) if is_stack else (*sizes, count * average)
    query = OpQuery(
        "grouped_gemm",
        device.type,
        dtype,
        left,
        right,
        precision,
        all_sizes,
        chip_of(device),
        groups=count,
        tokens_per_group=average if is_stack else None,
    )
    run, planner = None, select(query).group_planner
    if planner is not None and all(
        spec.format.is_tensor_scaled or not spec.needs_amax for spec in (left, right)
    ):
        run = planner(query)
    return GpuGroupedPlan(left, right, run or partial(multiply, precision=precision))
