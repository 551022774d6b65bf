"""`save_pretrained` of models whose experts lie over ranks: one set of files, by the first rank.

The method is known by its name: no library of models is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import FunctionType
from typing import Any, Final

from torch import nn

__all__ = ["saves_whole"]

_METHOD: Final = "save_pretrained"
_MARK: Final = "gathers_experts"
#: Set on a model whose experts lie over ranks.
_DEALT: Final = "_hybridq_experts_dealt"


def saves_whole(model: nn.Module) -> None:
    """Have a model's `save_pretrained` gather the parts of all ranks; without one: nothing.

    The class that defines the method gets it anew, once; models that are not over ranks are saved
    as before.

    Args:
        model: after its experts were dealt out.
    """
    for owner in type(model).__mro__:
        method = owner.__dict__.get(_METHOD)
        if method is not None:
            if isinstance(method, FunctionType) and not hasattr(method, _MARK):
                setattr(owner, _METHOD, _gathering(method))
            setattr(model, _DEALT, True)
            return


def _gathering(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def save_pretrained(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not getattr(self, _DEALT, False) or kwargs.get("state_dict") is not None:
            return method(self, *args, **kwargs)
        import torch.distributed as dist  # not every build of torch has it
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        whole = get_model_state_dict(self, options=options)
        if dist.get_rank() != 0:
            return None
        return method(self, *args, **{**kwargs, "state_dict": whole})

    setattr(save_pretrained, _MARK, True)
    return save_pretrained
