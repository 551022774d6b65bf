"""The short way of a Linear through an eager forward of few rows on a CPU: fewer steps, same bits.

At batch 1 the steps of a forward cost more than its kernels. What is decided once per recipe is
kept with the module; what must be asked every time is asked here, as cheaply as it can be. Where
anything is not plain the answer is None, and the caller goes the ordinary way, which also is where
errors come from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from .. import settings
from ..kernels.checks import HIGH_PRECISION
from ..kernels.device import has_autocast
from ..kernels.product import FEW_ROWS
from ..kernels.watch import is_plain, nothing_watches
from .few_rows import FewRows
from .function import linear

if TYPE_CHECKING:
    from .module import QuantizedModule

__all__ = ["short_linear"]

_graph_task: Final[Any] = torch._C._current_graph_task_id
_is_compiling: Final[Any] = torch.compiler.is_compiling


def short_linear(
    module: QuantizedModule, x: object, is_first_microbatch: bool | None
) -> torch.Tensor | None:
    """Return what `module` makes of x, or None: nothing has happened, and the long way is taken.

    Args:
        module: a Linear.
        x: its input, whatever it is.
        is_first_microbatch: as `Linear.forward` takes it.
    """
    if _is_compiling():
        return None
    state = settings.current()
    recipe: Any = state.recipe
    # In a backward this is a recomputation, whose recipe may be another.
    if recipe is None or not isinstance(x, torch.Tensor) or _graph_task() != -1:
        return None
    if not nothing_watches():
        return None
    parameters = module._parameters
    weight, bias = parameters.get("weight"), parameters.get("bias")
    if weight is None or not _fits(x, weight, bias) or has_autocast("cpu"):
        return None
    first: object = is_first_microbatch
    if first is None:
        first = state.is_first_microbatch
    if first is not None and not isinstance(first, bool):
        return None
    plan = module._plan(recipe)
    few: FewRows | None = module.__dict__.get("_few_rows")
    if few is None or few.plan is not plan or few.dtype is not x.dtype:
        few = module.__dict__["_few_rows"] = FewRows(plan, x.dtype)
    if not few.is_possible or module.fuse_wgrad_accumulation:
        return None
    if module.training or torch.is_grad_enabled():
        module.__dict__["_last_recipe"] = (recipe,)
    kept = None
    if first is not None:
        kept = module._keep(weight, x.dtype, plan, first, is_checked=True)
    if x.dim() == 2:
        return linear(x, weight, bias, plan, kept, few=few)
    flat = x.unsqueeze(0) if x.dim() == 1 else x.flatten(0, -2)
    y = linear(flat, weight, bias, plan, kept, few=few)
    return y.view(*x.shape[:-1], weight.shape[0])


def _fits(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Return whether these are few rows and plain tensors on a CPU that go together."""
    if not (is_plain(x) and x.is_cpu and weight.dim() == 2):
        return False
    dtype, k, count = x.dtype, weight.shape[1], x.numel()
    if dtype not in HIGH_PRECISION or not 0 < count <= FEW_ROWS * k or x.shape[-1:] != (k,):
        return False
    if weight.dtype is not dtype or not is_plain(weight):
        return False
    if bias is None:
        return weight.is_cpu and weight.shape[0] != 0
    return (
        weight.is_cpu
        and bias.dtype is dtype
        and bias.dim() == 1
        and bias.numel() == weight.shape[0] != 0
        and bias.is_contiguous()
        and bias.is_cpu
        and is_plain(bias)
    )
