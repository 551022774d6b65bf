"""GatheredWeight: a parameter of high precision whose all-gather by FSDP2 brings planes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, Final

import torch

from ... import settings
from ..._torch_private import tree_leaves, tree_map
from ..parameters import GatheredParameter
from .gather_hooks import GatherHooks, late_parallel
from .memory_reads import Reads
from .write_counts import Writes

__all__ = ["GatheredWeight"]

_aten = torch.ops.aten
#: Copies with the same values.
_SAME: Final = {_aten._pin_memory.default, _aten._to_copy.default, _aten.clone.default}
#: Copies that FSDP2 makes of a shard, to have it elsewhere or padded.
_MOVES: Final = {_aten._pin_memory.default, _aten._to_copy.default, _aten.new_zeros.default}
#: And those by which a module moves its parameters.
_MODULE_MOVES: Final = {*_MOVES, _aten.clone.default, _aten.empty_like.default}


class GatheredWeight(Reads, GatherHooks, torch.Tensor):
    """A parameter of high precision whose all-gather by FSDP2 brings planes.

    Made by `prepare_fsdp2`. For everything but FSDP2 it is the tensor that it holds. What lies in
    its memory is one again, so that every write is seen; copies are plain tensors, but for those by
    which FSDP2 or a module moves it.

    Args:
        values: plain tensor.
        about: shared by all tensors of the parameter.
        writes: of the memory of `values`; None: it is new.
    """

    high: torch.Tensor
    writes: Writes
    _about: GatheredParameter

    @staticmethod
    def __new__(
        cls, values: torch.Tensor, about: GatheredParameter, writes: Writes | None = None
    ) -> GatheredWeight:
        # A view of an ordinary tensor is one in inference mode too: torch shares its version.
        with nullcontext() if values.is_inference() else torch.inference_mode(False):
            made: Any = torch.Tensor._make_wrapper_subclass(
                cls,
                values.size(),
                strides=values.stride(),
                storage_offset=values.storage_offset(),
                dtype=values.dtype,
                layout=values.layout,
                device=values.device,
                pin_memory=values.is_pinned(),
                requires_grad=values.requires_grad,
            )
        return made

    def __init__(
        self, values: torch.Tensor, about: GatheredParameter, writes: Writes | None = None
    ) -> None:
        self.high, self._about = values.detach(), about
        self.writes = Writes() if writes is None else writes

    def _values(self) -> torch.Tensor:
        return self.high

    def _memory(self) -> torch.Tensor:
        return self.high

    def _is_late_part(self) -> bool:
        """Return whether it is a part of a weight that is not sharded yet.

        Of such a part only tensor parallelism wants a tensor of its kind, to scatter it.
        """
        owner = self._about.owner()
        parameter = None if owner is None else owner.held(self._about.attribute)
        return type(parameter) is GatheredWeight and parameter.shape != self.shape

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _aten.empty_like.default and args[0]._is_late_part():
            raise late_parallel(args[0]._about.name, args[0].shape)
        found: list[GatheredWeight] = []

        def plain(value: Any) -> Any:
            if isinstance(value, GatheredWeight):
                found.append(value)
                return value.high
            return value

        inner_args, inner_kwargs = tree_map(plain, (args, kwargs))
        result = func(*inner_args, **inner_kwargs)
        if func._schema.is_mutable:
            # Every write comes here; versions are counted further up.
            for writes in {
                id(one.writes): one.writes for one in _written(func, args, kwargs)
            }.values():
                writes.note()
        moves = func in (_MODULE_MOVES if settings.current().moves_parameters else _MOVES)
        source = args[0] if moves and isinstance(args[0], GatheredWeight) else None
        if source is not None and not _is_move(source, func, kwargs, result):
            source = None

        def again(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            for one in found:
                if value is one.high:
                    return one
                if _memory(value) == _memory(one.high):
                    return GatheredWeight(value, one._about, one.writes)
            if source is None:
                return value
            writes = source.writes.copied() if func in _SAME else None
            return GatheredWeight(value, source._about, writes)

        return tree_map(again, result)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"GatheredWeight({self.high!r})"

    @property
    def in_graph(self) -> torch.Tensor:
        """The tensor that it holds, for a compiled graph, which may write it and tells nobody."""
        self.writes.note()
        return self.high

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["in_graph"], _Context(self._about, self.writes)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any
    ) -> GatheredWeight:
        made = GatheredWeight(inner["in_graph"], context.about, context.writes)
        made.high = inner["in_graph"]  # a graph that writes must write to what it was given
        return made

    def __deepcopy__(self, memo: Any) -> Any:
        return self._about.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.high.__reduce_ex__(protocol)  # a plain tensor in every file


class _Context:
    """What a graph knows of a weight beside its values: guards copy it, and compare."""

    def __init__(self, about: GatheredParameter, writes: Writes) -> None:
        self.about, self.writes = about, writes

    def __eq__(self, other: object) -> bool:
        own = (self.about, self.writes)
        return isinstance(other, _Context) and own == (other.about, other.writes)

    def __hash__(self) -> int:
        return hash((self.about, self.writes))

    def __deepcopy__(self, memo: Any) -> _Context:
        return self


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[GatheredWeight]:
    """Yield the arguments that `func` writes to."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, GatheredWeight))


def _is_move(source: GatheredWeight, func: Any, kwargs: Any, result: Any) -> bool:
    """Return whether a copy is of the kind that FSDP2, or the module, makes."""
    if settings.current().moves_parameters:
        return True
    same = result.dtype == source.dtype and result.shape[1:] == source.shape[1:]
    return same and result.dim() == source.dim()
