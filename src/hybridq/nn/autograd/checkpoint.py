"""hybridq.checkpoint: recomputation of a part of the forward, with its recipe."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ..._torch_private import tree_map
from ...recipes import install

__all__ = ["checkpoint"]

#: Arguments of Transformer Engine's function that only say something about tensor parallelism.
_PARALLEL: Final = ("distribute_saved_activations", "get_rng_state_tracker", "tp_group")
#: Arguments of torch's function itself.
_TORCHS: Final = frozenset(
    {"context_fn", "determinism_check", "preserve_rng_state", "debug", "early_stop"}
)


def checkpoint(
    function: Callable[..., Any], *args: Any, use_reentrant: bool = False, **kwargs: Any
) -> Any:
    """Return `function(*args, **kwargs)`, and run it again in the backward instead of saving.

    It is `torch.utils.checkpoint.checkpoint`, which serves as well: with any of the two, gradients
    are bit for bit those of a run without it, stochastic rounding included, since the recipe and
    the random state of the forward come along.

    Args:
        function: any callable, such as a module.
        *args: its arguments.
        use_reentrant: False (torch's recommendation), or True: at least one of the arguments must
            then require grad. Of tensors by keyword the graph is not cut, as in Transformer Engine.
        **kwargs: `context_fn`, `determinism_check`, `preserve_rng_state`, `debug`, `early_stop` as
            torch takes them; the others go to `function`. `distribute_saved_activations`,
            `get_rng_state_tracker` and `tp_group` may be given with their defaults.

    Raises:
        TypeError: `function` is not callable.
        NotImplementedError: an argument of tensor parallelism is given another value.

    `context_fn` makes it selective: the operators that its policy names are saved and not run
    again, `torch.ops.hybridq.gemm.default` among them.

    Example:
        >>> import torch, hybridq
        >>> block = torch.nn.Sequential(hybridq.Linear(64, 64), torch.nn.GELU())
        >>> x = torch.randn(4, 64, requires_grad=True)
        >>> with hybridq.autocast(recipe="nvfp4"):
        ...     y = hybridq.checkpoint(block, x)
        >>> y.sum().backward()

    Source: Transformer Engine's function of that name; it recomputes through torch's as well.
    """
    if not callable(function):
        raise TypeError(f"checkpoint: function must be callable, got {type(function).__name__}")
    for name in _PARALLEL:
        value = kwargs.pop(name, None)
        if value is not None and value is not False:
            raise NotImplementedError(
                f"checkpoint: {name} must be left out, since activations are not split over "
                f"ranks here, got {value!r}"
            )
    install()
    if use_reentrant:  # torch passes no keywords on then
        own = {name: kwargs.pop(name) for name in kwargs.keys() - _TORCHS}
        function = partial(_without_leaves, partial(function, **own) if own else function)
    return torch_checkpoint(function, *args, use_reentrant=use_reentrant, **kwargs)


def _without_leaves(function: Callable[..., Any], *args: Any) -> Any:
    """Return what a function returns, with views in the place of parameters.

    Of a parameter that is returned as it is (a bias that is added later) autograd would make an
    output of the checkpoint, in place: a recomputation that meets it begins itself again.
    """
    taken = {id(one) for one in args}

    def other(one: Any) -> Any:
        if not isinstance(one, torch.Tensor) or id(one) in taken:
            return one
        return one.view_as(one) if one.is_leaf and one.requires_grad else one

    return tree_map(other, function(*args))
