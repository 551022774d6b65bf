"""Gradients of weights that go to `weight.main_grad` instead of autograd.

The GEMM that makes a gradient adds it there. Compiled code cannot look for a tensor that hangs on
another in its backward, nor leave a mark on it: there the tensor is the one of the forward, an
input of the graph that its backward writes, and the mark is set in the forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .kept_weight import Buffers

__all__ = ["Into", "accumulate", "accumulate_groups", "given_to_autograd", "part_of"]

_MARK = "grad_added_to_main_grad"


class Into(NamedTuple):
    """Where the gradient of a weight is added.

    Args:
        weight: the parameter.
        main_grad: its `main_grad` in the forward.
        group: of the groups that the parameter is the weight of; -1: all that it is.
    """

    weight: torch.Tensor
    main_grad: torch.Tensor
    group: int = -1

    @property
    def target(self) -> torch.Tensor:
        """The tensor that the gradient is added to: outside compiled code what is there now."""
        whole = self.main_grad
        if not torch.compiler.is_compiling():
            whole = self.weight.main_grad  # type: ignore[attr-defined]
        return whole if self.group < 0 else whole[self.group]

    @staticmethod
    def of(weight: torch.Tensor) -> Into | None:
        """Return where the gradient of `weight` goes; None if its `main_grad` does not fit."""
        main_grad = getattr(weight, "main_grad", None)
        if not isinstance(main_grad, torch.Tensor) or main_grad.shape != weight.shape:
            return None
        if torch.compiler.is_compiling() and hasattr(weight, _MARK):
            setattr(weight, _MARK, True)
        return Into(weight, main_grad)


def part_of(into: Into, group: int) -> Into:
    """Return where the gradient of one group's part of a weight goes."""
    return into._replace(group=group)


def given_to_autograd(into: Into) -> torch.Tensor | None:
    """Return what autograd is given as the gradient.

    None; or zeros that take no memory where the parameter has a `grad_added_to_main_grad`, which
    is then set: somebody waits for autograd's hooks.
    """
    weight = into.weight
    if not hasattr(weight, _MARK):
        return None
    if not torch.compiler.is_compiling():
        setattr(weight, _MARK, True)
    shape = weight.shape if into.group < 0 else weight.shape[1:]
    return torch.zeros((), dtype=weight.dtype, device=weight.device).expand(shape)


def accumulate(
    into: Into,
    a: Buffers,
    a_spec: str,
    b: Buffers,
    b_spec: str,
    k: int,
    precision: str,
) -> torch.Tensor | None:
    """Add `a @ b.T` to a weight's `main_grad`; return what autograd is given as the gradient.

    Args:
        into: of the weight `[N, M]`.
        a, b: buffers of planes whose own matrices are `[N, k]` and `[M, k]`.
        a_spec, b_spec: their specs' texts.
        k: tokens.
        precision: of the product.
    """
    target = into.target
    rows, cols = target.shape
    torch.ops.hybridq.gemm_(
        target, a, a_spec, rows, b, b_spec, cols, k, accumulate=True, precision=precision
    )
    return given_to_autograd(into)


def accumulate_groups(
    into: Sequence[Into | None],
    gradients: torch.Tensor,
) -> tuple[torch.Tensor | None, ...]:
    """Add each group's gradient to the `main_grad` of its weight; return what autograd is given.

    Args:
        into: of the weight of each group; None of one that needs no gradient.
        gradients: FP32 `[G, N, M]`.
    """
    given: list[torch.Tensor | None] = []
    for g, one in enumerate(into):
        if one is not None:
            one.target.add_(gradients[g])
        given.append(None if one is None else given_to_autograd(one))
    return tuple(given)
