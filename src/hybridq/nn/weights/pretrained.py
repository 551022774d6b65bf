"""State dicts of plain tensors, and `save_pretrained` of models with quantized parameters.

Libraries of models write the memory behind each tensor of `model.state_dict()` to a safetensors
file, and that of a quantized parameter is another. So while a model's own `save_pretrained` runs,
its state_dict holds decoded tensors, and so do those of the modules below it, which a library may
write to files of their own. The method is known by its name: no such library is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import FunctionType
from typing import Any, Final

import torch
from torch import nn

from ...kernels.inputs import begins_at
from ...tensor import is_quantized

__all__ = ["decode_state", "keep_planes", "saves_decoded"]

_METHOD: Final = "save_pretrained"
_MARK: Final = "decodes_state"
#: Set on a model whose library can write planes.
_KEEPS: Final = "_hybridq_keeps_planes"


def decode_state(state: dict[str, Any]) -> None:
    """Replace the quantized tensors of a state_dict by plain ones, in place.

    One parameter with several names is decoded once: it stays one. A DTensor of quantized parts
    becomes one of plain parts.

    Args:
        state: what `state_dict()` returned.
    """
    made: dict[tuple[object, ...], torch.Tensor] = {}
    for name, value in state.items():
        if getattr(value, "device_mesh", None) is not None:
            state[name] = _decoded_parts(value)
        if is_quantized(value):
            address = begins_at(value)
            key = (address, value.device, value.shape, value.dtype)
            # Empty and meta tensors have no address to be known by.
            if not address or key not in made:
                made[key] = value.detach().dequantize()
            state[name] = made[key]


def _decoded_parts(value: Any) -> Any:
    """Return a DTensor whose local tensor is plain: this one, if its own is."""
    with torch.no_grad():
        local = value.to_local()
    if not is_quantized(local):
        return value
    from torch.distributed.tensor import DTensor  # not every build of torch has it

    how: dict[str, Any] = {"shape": value.shape, "stride": value.stride(), "run_check": False}
    plain = local.detach().dequantize()
    return DTensor.from_local(plain, value.device_mesh, value.placements, **how)


def keep_planes(model: nn.Module, keeps: bool) -> None:
    """Say whether `save_pretrained` of a model leaves its quantized parameters as they are.

    Args:
        model: any.
        keeps: whether its library itself writes their planes.
    """
    setattr(model, _KEEPS, keeps)


def saves_decoded(kind: type) -> None:
    """Have the `save_pretrained` of a class of modules write decoded values; a class without: not.

    The class that defines it gets the method anew, once. Models without quantized parameters are
    saved as before.

    Args:
        kind: class of a module.
    """
    for owner in kind.__mro__:
        method = owner.__dict__.get(_METHOD)
        if method is not None:
            if isinstance(method, FunctionType) and not hasattr(method, _MARK):
                setattr(owner, _METHOD, _decoding(method))
            return


def _decoding(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def save_pretrained(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, _KEEPS, False):
            return method(self, *args, **kwargs)
        hooks = [self.register_state_dict_post_hook(_decode_hook)]
        hooks += [one.register_state_dict_post_hook(_decode_alone) for one in _parts(self)]
        try:
            return method(
                self,
                *(_decoded(value) for value in args),
                **{name: _decoded(value) for name, value in kwargs.items()},
            )
        finally:
            for hook in hooks:
                hook.remove()

    setattr(save_pretrained, _MARK, True)
    return save_pretrained


def _decode_hook(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    decode_state(state)


def _decode_alone(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    if not prefix:  # of this module alone: else the whole is decoded, and what is shared once
        decode_state(state)


def _parts(model: nn.Module) -> list[nn.Module]:
    """Return the modules below a model whose library may save each by itself.

    Left out are models inside of it whose own library writes planes, and what is below them.
    """
    found: list[nn.Module] = []
    left = list(model.children())
    seen = {id(model)}
    while left:
        one = left.pop()
        if id(one) not in seen and not getattr(one, _KEEPS, False):
            found.append(one)
            left += one.children()
        seen.add(id(one))
    return found


def _decoded(value: Any) -> Any:
    """Return an argument; a state_dict that holds quantized tensors as a plain one."""
    if not isinstance(value, dict) or not any(map(is_quantized, value.values())):
        return value
    plain = dict(value)
    decode_state(plain)
    return plain
