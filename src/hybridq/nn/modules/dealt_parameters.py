"""Parameters of fused modules that are dealt out over a mesh: DTensors, one for each matrix.

A DTensor says which rows of which matrix a rank has, whatever the number of ranks: torch's
checkpoints, optimizers and `fully_shard` need nothing more. Where a whole module has several
matrices in one parameter (queries, keys and values; both halves of a gated activation) each of
them is a parameter of its own here, since ranks' parts of all of them are no part of the whole.

Parts of such a parameter lie one behind the other in memory, as long as nobody moves them: then
they are one matrix without a copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ...kernels.operators import StatedFunction
from .tensor_parallel import is_dtensor

__all__ = ["deal_out", "local_part", "matrices_of", "own_value", "reset_dealt"]


def local_part(tensor: Any) -> Any:
    """Return what this rank has of a DTensor; anything else as it is.

    Args:
        tensor: a parameter, or None. Its gradient lies as it does.
    """
    return tensor.to_local() if is_dtensor(tensor) else tensor


def matrices_of(module: Any, name: str) -> tuple[str, ...]:
    """Return the names of the parameters that have the matrices of one; else its own.

    Args:
        module: any.
        name: that a whole module has the parameter under.
    """
    found: tuple[str, ...] = getattr(module, "matrices", {}).get(name, (name,))
    return found


def own_value(module: nn.Module, name: str) -> Any:
    """Return a parameter as this rank multiplies it: its part of each matrix; or None.

    Args:
        module: whose parameters are dealt out.
        name: that a whole module has the parameter under.
    """
    parts = [local_part(getattr(module, one)) for one in matrices_of(module, name)]
    if len(parts) == 1:
        return parts[0]
    if torch.compiler.is_compiling() or not _is_one(parts):
        return torch.cat(parts)
    return _Joined.apply(*parts)


def _is_one(parts: list[torch.Tensor]) -> bool:
    """Return whether matrices lie one behind the other in the same memory."""
    first = parts[0]
    storage, at = first.untyped_storage()._cdata, first.storage_offset()
    for one in parts:
        if one.untyped_storage()._cdata != storage or one.storage_offset() != at:
            return False
        if one.dtype != first.dtype or not one.is_contiguous():
            return False
        at += one.numel()
    return True


class _Joined(StatedFunction):
    """Matrices that lie one behind the other, as one: a view of their memory."""

    second = "exact"

    @staticmethod
    def forward(ctx: Any, *parts: torch.Tensor) -> torch.Tensor:
        ctx.rows = [one.shape[0] for one in parts]
        first = parts[0]
        return first.as_strided((sum(ctx.rows), *first.shape[1:]), first.stride())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return grads[0].split(ctx.rows)


def deal_out(
    module: nn.Module,
    cuts: Mapping[str, tuple[int, Mapping[str, int]]],
    mesh: Any,
) -> None:
    """Make the parameters of a module DTensors: this rank's parts, and what every rank has whole.

    Args:
        module: with plain parameters of its own, the whole ones.
        cuts: by name, the dimension that is dealt out, and by the name of each matrix its size
            along that; parameters that are not named are replicated.
        mesh: of one dimension, whose size divides all of them.
    """
    from torch.distributed.tensor import Replicate, Shard  # not every build of torch has it

    made: dict[str, nn.Parameter | None] = {}
    matrices: dict[str, tuple[str, ...]] = {}
    for name, whole in module._parameters.items():
        if whole is None or name not in cuts:
            made[name] = None if whole is None else _dealt(whole, whole, mesh, Replicate())
            continue
        dim, sizes = cuts[name]
        wholes = whole.detach().split(list(sizes.values()), dim)
        world, rank = mesh.size(), mesh.get_local_rank()
        own = torch.cat([one.chunk(world, dim)[rank] for one in wholes], dim).contiguous()
        parts = own.split([size // world for size in sizes.values()], dim)
        for other, matrix, part in zip(sizes, wholes, parts, strict=True):
            made[other] = _dealt(part, matrix, mesh, Shard(dim), whole.requires_grad)
        if len(sizes) > 1:
            matrices[name] = tuple(sizes)
    module._parameters.clear()
    module._parameters.update(made)
    module.__dict__["matrices"] = matrices
    module.register_load_state_dict_pre_hook(_TakesValues())


def _dealt(
    part: torch.Tensor, whole: torch.Tensor, mesh: Any, placement: Any, needs_grad: Any = None
) -> Any:
    from torch.distributed.tensor import DTensor

    strides = torch.empty(whole.shape, dtype=whole.dtype, device="meta").stride()
    own = part.detach()
    # Of a part that does not begin where its memory begins, torch takes the DTensor for a tensor
    # with memory of its own, and fails to copy it. So it is told of the part afterwards.
    first = torch.empty_like(own) if own.storage_offset() else own
    made: Any = DTensor.from_local(
        first, mesh, [placement], run_check=False, shape=whole.shape, stride=strides
    )
    made = nn.Parameter(made, whole.requires_grad if needs_grad is None else needs_grad)
    made._local_tensor = own
    return made


def reset_dealt(
    module: nn.Module, name: str, fill: Any, bias: str | None, fill_bias: Any = nn.init.zeros_
) -> None:
    """Draw the values of one weight, and those of its bias.

    Args:
        module: whose parameters are dealt out.
        name, bias: that a whole module has them under.
        fill, fill_bias: called with each matrix, a DTensor.
    """
    with torch.no_grad():
        for one in matrices_of(module, name):
            fill(getattr(module, one))
        for one in () if bias is None else matrices_of(module, bias):
            if getattr(module, one) is not None:
                fill_bias(getattr(module, one))


class _TakesValues:
    """A hook before a module loads a state_dict: plain values are taken as DTensors are.

    Those of the whole are cut, those of this rank's part are its part, and a parameter that a whole
    module has is one of several matrices. No closure, so that modules copy and pickle.
    """

    def __call__(
        self,
        module: nn.Module,
        state_dict: dict[str, Any],
        prefix: str,
        metadata: Any,
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        matrices: Mapping[str, tuple[str, ...]] = module.__dict__["matrices"]
        for name, names in matrices.items():
            key = prefix + name
            if key in state_dict and not any(prefix + one in state_dict for one in names):
                errors += _take_apart(module, state_dict, prefix, name, names)
        for name, parameter in module._parameters.items():
            value = state_dict.get(prefix + name)
            if isinstance(value, torch.Tensor) and _takes(parameter) and not is_dtensor(value):
                state_dict[prefix + name] = _as_dealt(value, parameter)


def _takes(parameter: Any) -> bool:
    """Return whether a parameter is dealt out over one dimension of a mesh."""
    return is_dtensor(parameter) and parameter.device_mesh.ndim == 1


def _take_apart(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, name: str, names: tuple[str, ...]
) -> Iterator[str]:
    """Put each matrix of a parameter under its own name; yield what is wrong."""
    value = state_dict.pop(prefix + name)
    own: list[Any] = [getattr(module, one) for one in names]
    wholes = [one.shape[0] for one in own]
    parts = [getattr(one, "_local_tensor", one).shape[0] for one in own]
    rows = value.shape[0] if value.dim() else 0
    if rows not in (sum(wholes), sum(parts)):
        yield (
            f"{prefix}{name}: must have {sum(wholes)} rows, of which this rank's part has "
            f"{sum(parts)}, got shape {tuple(value.shape)}"
        )
        return
    sizes = wholes if rows == sum(wholes) else parts
    for one, matrix in zip(names, value.split(sizes), strict=True):
        state_dict[prefix + one] = matrix


def _as_dealt(value: torch.Tensor, parameter: Any) -> Any:
    """Return plain values as a DTensor that lies as a parameter does; others as they are."""
    from torch.distributed.tensor import DTensor

    mesh, (placement,) = parameter.device_mesh, parameter.placements
    part, local = value, parameter._local_tensor.shape
    if placement.is_shard() and value.shape == parameter.shape != local:
        size, dim = local[placement.dim], placement.dim
        part = value.narrow(dim, mesh.get_local_rank() * size, size)
    if part.shape != local:
        return value  # torch says what is wrong
    how: dict[str, Any] = {"shape": parameter.shape, "stride": parameter.stride()}
    return DTensor.from_local(part.contiguous(), mesh, [placement], run_check=False, **how)
