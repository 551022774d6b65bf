"""Models that transformers deals out over ranks by their `tp_plan`, under a recipe.

transformers makes the weights DTensors, and puts a forward into each module of the plan: it wraps
the input, calls the forward that the module had, and brings the output to the plan's layout. Under
`torch.no_grad` it gives the module the local tensors instead, of which no planes of the whole can
be made; and a module that is converted later has its old forward in there. So modules of hybridq
get a forward of the same style here, which computes on DTensors always.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from ..._log import log_once
from ...nn import QuantizedModule

__all__ = ["adopts_forward", "after_convert", "check_weights_stay_plain"]

#: Where transformers' styles of tensor parallelism are.
_STYLES: Final = "transformers.distributed.tensor_parallel"


def check_weights_stay_plain(model: Any) -> None:
    """Raise where transformers will deal quantized parameters out over ranks.

    Args:
        model: of transformers, before its weights are read.

    Raises:
        NotImplementedError: it will.
    """
    over = getattr(model.config, "distributed_config", None)
    sizes = {name: getattr(over, name, None) or 1 for name in ("tp_size", "ep_size")}
    if max(sizes.values()) > 1:
        raise NotImplementedError(
            "from_pretrained: quantized weights are not dealt out over ranks by transformers, got "
            f"a distributed_config of {', '.join(f'{k}={v}' for k, v in sizes.items())}; give "
            'HybridQConfig(recipe=..., weights="high_precision"), whose weights are quantized in '
            "each forward, and a folder without planes"
        )


def adopts_forward(module: nn.Module) -> bool:
    """Return whether a module's forward is one that `after_convert` sees to.

    Args:
        module: with a forward among its own attributes.
    """
    return getattr(vars(module).get("forward"), "__module__", None) == _STYLES


def after_convert(model: nn.Module) -> None:
    """Give the modules that transformers has dealt out forwards that know the whole.

    Args:
        model: converted before transformers dealt it out, or after.
    """
    for name, module in model.named_modules():
        if isinstance(module, QuantizedModule):
            _adopt(module, name)


def _adopt(module: Any, name: str) -> None:
    """Replace the forward that transformers has put into a module; others stay."""
    if not adopts_forward(module):
        return
    given: Any = vars(module)["forward"]
    known = inspect.getclosurevars(given).nonlocals
    style, mesh = known.get("self"), known.get("mesh")
    if style is None or mesh is None:
        raise RuntimeError(
            f"convert: {name} must have a forward of transformers' tensor parallelism as version "
            "5.23 makes it, got another; convert the model before from_pretrained deals it out, "
            'by HybridQConfig(recipe=..., weights="high_precision")'
        )
    del module.forward
    from transformers.distributed.tensor_parallel import ColwiseParallel, RowwiseParallel

    is_linear = isinstance(module, nn.Linear)
    if is_linear and isinstance(style, ColwiseParallel | RowwiseParallel):
        module.forward = _on_dtensors(module, style, mesh)
        return
    if any(isinstance(one, DTensor) for one in module.parameters(recurse=False)):
        log_once(
            f"transformers:{type(module).__name__}:{type(style).__name__}",
            f"{name}: {type(style).__name__} gives {type(module).__name__} local tensors, so that "
            "its planes are those of each rank's part alone",
        )
    style.install_forward(module, mesh)


def _on_dtensors(module: Any, style: Any, mesh: Any) -> Callable[..., Any]:
    """Return a forward of a linear layer in transformers' style, between DTensors in any mode."""
    own = module.forward
    always: Any = copy.copy(style)
    always.should_use_local_tensors = lambda module: False

    @functools.wraps(own)
    def forward(input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        x = input if isinstance(input, DTensor) else _wrapped(input, module, always, mesh)
        given, kwargs = always.transform_inputs_pre_forward(module, (x, *args), kwargs, mesh)
        return always.transform_output_post_forward(module, own(*given, **kwargs), mesh)

    return forward


def _wrapped(x: torch.Tensor, module: Any, style: Any, mesh: Any) -> DTensor:
    """Return the input as a DTensor of the style's layout; parts may be of different sizes."""
    layout = style.input_layouts
    if not isinstance(layout, Shard):
        return DTensor.from_local(x, mesh, [layout], run_check=False)
    shape = torch.Size((*x.shape[:-1], module.in_features))
    strides = torch.empty(shape, dtype=x.dtype, device="meta").stride()
    return DTensor.from_local(x, mesh, [layout], run_check=False, shape=shape, stride=strides)
