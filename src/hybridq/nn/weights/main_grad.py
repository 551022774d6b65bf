"""Gradients of weights that go to `weight.main_grad` instead of autograd.

The GEMM that makes a gradient adds it there. Compiled code cannot look for a tensor that hangs on
another in its backward, nor leave a mark on it: there the tensor is the one of the forward, an
input of the graph that its backward writes, and the mark is set in the forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakSet

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...errors import warn_once
from .weight_cache import Buffers

if TYPE_CHECKING:
    from .late_gradients import GradientQueue

__all__ = [
    "Into",
    "accumulate",
    "accumulate_groups",
    "adds_to",
    "given_to_autograd",
    "part_of",
    "target_of",
    "watch_optimizers",
]

_MARK = "grad_added_to_main_grad"
_OVERWRITE = "overwrite_main_grad"


class Into(NamedTuple):
    """Where the gradient of a weight is added.

    Args:
        weight: the parameter.
        main_grad: its `main_grad` in the forward; None: its `grad` is, by `late`.
        group: of the groups that the parameter is the weight of; -1: all that it is.
        is_transposed: the parameter holds `[in, out]` of each group.
        late: what keeps the product that makes the gradient for later; None: it is made at once.
        overwrites: the gradient is written over what is there, and not added, whatever an
            `overwrite_main_grad` of the weight says in the backward.
    """

    weight: torch.Tensor
    main_grad: torch.Tensor | None
    group: int = -1
    is_transposed: bool = False
    late: GradientQueue | None = None
    overwrites: bool = False

    @staticmethod
    def of(weight: torch.Tensor) -> Into | None:
        """Return where the gradient of `weight` goes; None if its `main_grad` does not fit."""
        main_grad = getattr(weight, "main_grad", None)
        if not isinstance(main_grad, torch.Tensor) or main_grad.shape != weight.shape:
            return None
        overwrites = False
        if torch.compiler.is_compiling():
            overwrites = bool(getattr(weight, _OVERWRITE, False))
            if hasattr(weight, _MARK):
                setattr(weight, _MARK, True)
        return Into(weight, main_grad, overwrites=overwrites)


def target_of(into: Into) -> torch.Tensor:
    """Return the tensor that a gradient is added to: outside compiled code what is there now.

    A function: in a backward, dynamo of torch 2.10 knows no property of a named tuple.
    """
    whole: torch.Tensor = into.main_grad  # type: ignore[assignment]
    if not torch.compiler.is_compiling():
        whole = into.weight.main_grad  # type: ignore[attr-defined]
    if into.group < 0:
        return whole
    return whole[into.group].t() if into.is_transposed else whole[into.group]


def adds_to(into: Into) -> bool:
    """Return whether a gradient is added, and not written over what is there.

    Outside of compiled code by what the weight says now.
    """
    if into.overwrites or torch.compiler.is_compiling():
        return not into.overwrites
    return not getattr(into.weight, _OVERWRITE, False)


def part_of(into: Into, group: int, is_transposed: bool = False) -> Into:
    """Return where the gradient `[out, in]` of one group's part of a weight goes."""
    return into._replace(group=group, is_transposed=is_transposed)


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
    if into.is_transposed:
        shape = shape[::-1]
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

    Where the weight has an `overwrite_main_grad` that is true, it is written there.

    Args:
        into: of the weight `[N, M]`.
        a, b: buffers of planes whose own matrices are `[N, k]` and `[M, k]`.
        a_spec, b_spec: their specs' strings.
        k: tokens.
        precision: of the product.
    """
    target = target_of(into)
    rows, cols = target.shape
    torch.ops.hybridq.gemm_(
        target, a, a_spec, rows, b, b_spec, cols, k, accumulate=adds_to(into), precision=precision
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
            target = target_of(one)
            target.add_(gradients[g]) if adds_to(one) else target.copy_(gradients[g])
        given.append(None if one is None else given_to_autograd(one))
    return tuple(given)


class _Optimizers:
    """What is known of optimizers: whether they are watched, and which were looked at closely."""

    def __init__(self) -> None:
        self.is_watching = False
        self.known: WeakSet[torch.optim.Optimizer] = WeakSet()


_optimizers = _Optimizers()


def watch_optimizers() -> None:
    """Begin to look whether optimizers take what is in `main_grad`; later calls do nothing."""
    if not _optimizers.is_watching:
        _optimizers.is_watching = True
        register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Any, *_: Any) -> None:
    """Raise, or warn, where an optimizer would leave a gradient in `main_grad` alone.

    One that takes it says so by an attribute `takes_main_grad`. torch's own are known not to.
    """
    if torch.compiler.is_compiling() or getattr(optimizer, "takes_main_grad", False):
        return
    is_new = optimizer not in _optimizers.known
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    if not any(_is_left_alone(one, is_new) for one in parameters):
        _optimizers.known.add(optimizer)
        return
    name = type(optimizer).__name__
    text = (
        f"{name}: the gradient of a parameter is in its main_grad (fuse_wgrad_accumulation), which "
        "this optimizer does not take; use hybridq.optim.AdamW, or set parameter.grad = "
        "parameter.main_grad in the parameter's dtype before the step"
    )
    if type(optimizer).__module__.split(".")[:2] == ["torch", "optim"]:
        raise RuntimeError(text)
    warn_once(f"main_grad.{name}", f"{text}; an optimizer that takes it has takes_main_grad = True")


def _is_left_alone(parameter: torch.Tensor, looks_at_values: bool) -> bool:
    """Return whether a parameter's gradient is in `main_grad` and its `grad` holds nothing.

    Args:
        parameter: of an optimizer.
        looks_at_values: whether zeros in `grad` count as nothing, where a mark says that autograd
            was given zeros; to see them takes a wait on a GPU.
    """
    if not (parameter.requires_grad and hasattr(parameter, "main_grad")):
        return False
    grad = parameter.grad
    if grad is None:
        return True
    return looks_at_values and getattr(parameter, _MARK, False) and not bool(grad.any())
