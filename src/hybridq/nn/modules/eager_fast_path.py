"""The eager forward of a Linear: with the fewest steps, and the bits of the general one.

In small layers the steps of a forward cost more than its kernels. What is decided once per recipe
is kept with the module (`PreparedLinear`); what must be asked every time is asked here, as cheaply
as it can be. Where anything is not plain the answer is None, and the caller goes the general path,
which also is where errors come from. On a GPU plain weights take it where their device is the
current one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ... import settings
from ..._torch_private import graph_task_id
from ...kernels.decoded import advise
from ...kernels.inputs import (
    HIGH_PRECISION,
    can_bypass_dispatcher,
    has_autocast,
    is_current,
    is_plain,
)
from ...storage import Plane
from ...tensor import is_quantized
from ..autograd import PreparedLinear, eager_linear

if TYPE_CHECKING:
    from .quantized_module import QuantizedModule

__all__ = ["eager_forward"]


def eager_forward(
    module: QuantizedModule, x: object, is_first_microbatch: bool | None
) -> torch.Tensor | None:
    """Return what `module` makes of x, or None: nothing was done, and the general path is taken.

    Args:
        module: a Linear.
        x: its input, whatever it is.
        is_first_microbatch: as `Linear.forward` takes it.
    """
    state = settings.current()
    recipe: Any = module.bound_recipe
    if recipe is None:
        recipe = state.recipe
    elif state.recipe is not None or module.training:  # where there is something to say
        return None
    if state.watcher is not None:  # who is shown matrices, not planes
        return None
    if recipe is None or not isinstance(x, torch.Tensor) or not can_bypass_dispatcher():
        return None
    if graph_task_id() != -1:  # a recomputation in a backward, whose recipe may be another
        return None
    parameters = module._parameters
    weight, bias = parameters.get("weight"), parameters.get("bias")
    if weight is None or not _fits(x, weight, bias):
        return None
    device = "cpu" if x.is_cpu else "cuda"
    if has_autocast(device):
        return None
    first: object = is_first_microbatch
    if first is None:
        first = state.is_first_microbatch
    if first is not None and not isinstance(first, bool):
        return None
    if module.prepared_weights:  # for ranks, which are told of each forward's recipe
        return None
    known, plans = module._bound
    plan = plans.get("") if known is recipe else None
    if plan is None:
        plan = module.plan_of(recipe)
    prepared: PreparedLinear | None = module.__dict__.get("_prepared_linear")
    if prepared is None or not (
        prepared.plan is plan and prepared.dtype is x.dtype and prepared.device == device
    ):
        prepared = module.__dict__["_prepared_linear"] = PreparedLinear(plan, x.dtype, device)
    plane = amax = None
    if is_plain(weight):
        if not prepared.is_possible or plan.is_forward_only:
            return None
    elif not x.is_cpu:
        return None
    else:
        plane = _plane_of(weight, x, bias, prepared)
        if plane is None:
            return None
        if prepared.is_static:
            amax = module.static_amax("")
            if amax is None or not amax.is_cpu or not is_plain(amax) or amax.is_inference():
                return None
    if module.fuse_wgrad_accumulation or module.delay_wgrad_compute:
        return None
    if module.save_original_input:
        return None
    if x.dtype is not torch.float32 and x.is_cpu:
        advise(x.dtype)
    if module.bound_recipe is None and (module.training or torch.is_grad_enabled()):
        module.__dict__["last_recipe"] = (recipe,)
    flat = x
    if x.dim() != 2:
        flat = x.unsqueeze(0) if x.dim() == 1 else x.flatten(0, -2)
    if plane is not None:
        y = prepared.with_plane(flat, plane, bias, amax)
    else:
        kept = None
        if first is not None:
            kept = module._keep(weight, x.dtype, plan, first, is_checked=True)
        y = eager_linear(flat, weight, bias, prepared, kept)
    return y if flat is x else y.view(*x.shape[:-1], y.shape[1])


def _plane_of(
    weight: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None, prepared: PreparedLinear
) -> Plane | None:
    """Return the rowwise plane of a quantized weight, or None: the general path is taken.

    It is another recipe's, its memory comes and goes, or a gradient is wanted.
    """
    if not is_quantized(weight):
        return None
    if torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    ):
        return None
    storage = weight.tensor_storage  # type: ignore[attr-defined]
    return None if storage.comes_and_goes else prepared.fitting(storage.rowwise)


def _fits(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Return whether these are tensors on a CPU or the current GPU that go together, not empty.

    Input and bias are plain; the weight may be a QuantizedTensor.
    """
    if not (is_plain(x) and weight.dim() == 2):
        return False
    if not (x.is_cpu or _is_on_gpu(x, weight, bias)):
        return False
    dtype, k = x.dtype, weight.shape[1]
    if dtype not in HIGH_PRECISION or x.shape[-1:] != (k,) or x.numel() == 0:
        return False
    if weight.dtype is not dtype:
        return False
    is_cpu = x.is_cpu
    if bias is None:
        return weight.is_cpu is is_cpu and weight.shape[0] != 0
    return (
        weight.is_cpu is is_cpu
        and bias.dtype is dtype
        and bias.dim() == 1
        and bias.numel() == weight.shape[0] != 0
        and bias.is_contiguous()
        and bias.is_cpu is is_cpu
        and is_plain(bias)
    )


def _is_on_gpu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Return whether all tensors are on the current GPU."""
    device = x.device
    if not (x.is_cuda and weight.device == device and is_current(device)):
        return False
    return bias is None or bias.device == device
