"""`make_graphed_callables`: CUDA graphs of modules under a recipe; elsewhere the modules as such.

Source: names, order and defaults of arguments: Transformer Engine's `pytorch/graph.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Final

import torch

from .. import nn
from .._log import log_once
from .quantization import autocast
from .signatures import by_name, only_defaults, options

__all__ = ["make_graphed_callables"]

#: What is passed on to torch; of the rest a value that asks for something is refused.
_OTHERS: Final = options(
    "sample_kwargs=None, calibrating=False, _order=None, _num_layers_per_chunk=None, pool=None, "
    "retain_graph_in_backward=False, _reuse_graph_input_output_buffers=False, "
    "pre_warmup_hook=None, post_warmup_hook=None, capture_time_hooks=None, fp8_calibrating=False"
)


def make_graphed_callables(
    modules: Any,
    sample_args: Any,
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    *,
    enabled: bool | None = None,
    recipe: Any = None,
    amax_reduction_group: Any = None,
    cache_quantized_params: bool = False,
    fp8_enabled: bool | None = None,
    fp8_recipe: Any = None,
    fp8_group: Any = None,
    fp8_weight_caching: bool = False,
    **others: Any,
) -> Any:
    """Return callables that run modules under a recipe: on a GPU by CUDA graphs.

    On a GPU it is `torch.cuda.make_graphed_callables`, whose rules hold: shapes are those of
    `sample_args`, and what warm-ups record of delayed scaling is taken back. On other devices there
    is nothing to capture: the modules are returned, run eagerly under the recipe, and that is said
    once.

    Args:
        modules: a module or a callable, or a tuple of them; modules are changed and returned.
        sample_args: tuple of tensors, or for a tuple of modules a tuple of such tuples.
        num_warmup_iters, allow_unused_input: as for torch's function.
        enabled, recipe, amax_reduction_group: as for `te.autocast`; `enabled` defaults to False.
        cache_quantized_params: whether callables take `is_first_microbatch`, True or False, and
            keep quantized weights between calls; without effect in a graph, which quantizes them
            each time.
        fp8_enabled, fp8_recipe, fp8_group, fp8_weight_caching: older names of the same.
        others: what else Transformer Engine takes, at its defaults.

    Raises:
        NotImplementedError: one of `others` has another value.
        TypeError: there is no such argument.

    Example:
        >>> import torch, hybridq.te as te
        >>> layer = te.Linear(64, 64)
        >>> x = torch.ones(4, 64, requires_grad=True)
        >>> recipe = te.common.recipe.MXFP8BlockScaling()
        >>> layer = te.make_graphed_callables(layer, (x,), enabled=True, recipe=recipe)
        >>> layer(x).shape
        torch.Size([4, 64])
    """
    asked = by_name("make_graphed_callables", _OTHERS, 0, (), others)
    asked = {name: value for name, value in asked.items() if value not in ((), {})}
    only_defaults("make_graphed_callables", asked, _OTHERS)
    on = enabled if enabled is not None else bool(fp8_enabled)
    own = (on, False, recipe or fp8_recipe, amax_reduction_group or fp8_group)
    given = modules if isinstance(modules, tuple) else (modules,)
    kept = [one for one in given if isinstance(one, torch.nn.Module)]
    made = tuple(_under(one, own, cache_quantized_params or fp8_weight_caching) for one in given)
    samples = sample_args if isinstance(modules, tuple) else (sample_args,)
    tensors = [one for sample in samples for one in sample if isinstance(one, torch.Tensor)]
    if not (tensors and all(one.is_cuda for one in tensors)):
        log_once(
            "te.make_graphed_callables",
            "make_graphed_callables: captures nothing elsewhere than on a GPU; the modules run "
            "eagerly under the recipe",
        )
        return made if isinstance(modules, tuple) else made[0]
    with nn.hold_history(kept):
        graphed = torch.cuda.make_graphed_callables(
            made, tuple(samples), num_warmup_iters, allow_unused_input
        )
    return graphed if isinstance(modules, tuple) else graphed[0]


def _under(one: Any, own: tuple[Any, ...], caches: bool) -> Any:
    """Return a module or callable that runs under a recipe: a module is changed."""
    forward: Callable[..., Any] = one.forward if isinstance(one, torch.nn.Module) else one

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not caches:
            kwargs.pop("is_first_microbatch", None)
        with autocast(*own):
            return forward(*args, **kwargs)

    if not isinstance(one, torch.nn.Module):
        return run
    one.forward = run
    return one
