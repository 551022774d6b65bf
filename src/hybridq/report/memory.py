"""`hybridq.memory_report`: what a model holds in memory, by module and by kind."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from .._text import Table, html, size_text
from .._torch_private import is_wrapper_subclass
from ..errors import must_be_one_of
from ..nn.delayed_scaling import states_of
from ..tensor import is_quantized

__all__ = ["KINDS", "MemoryReport", "memory_report", "saved_nbytes"]

#: What memory is for, in the order of a report's columns.
KINDS: Final = ("parameters", "gradients", "buffers", "kept", "histories", "optimizer", "saved")


@dataclass(frozen=True)
class MemoryReport:
    """Bytes that a model holds.

    Args:
        entries: `(module, kind, dtype, bytes)`: the module's qualified name ("" for the model
            itself), one of `KINDS`, the dtype of what is stored. Memory that two owners share is
            counted once, where it is met first.

    The kinds: `parameters` (of a quantized parameter the planes' buffers), `gradients`, `buffers`,
    `kept` (planes and operands that are made of weights and kept, see `hybridq.forget`),
    `histories` (amaxes of the steps that delayed scaling looks back on),
    `optimizer` (its state), `saved` (for the backward).
    """

    entries: tuple[tuple[str, str, torch.dtype, int], ...]

    def nbytes(self, kind: str | None = None, module: str | None = None) -> int:
        """Return the bytes of one kind, or of all, in one module, or in all.

        Args:
            kind: one of `KINDS`, or None.
            module: a qualified name: that module with all that is in it; or None.

        Raises:
            ValueError: unknown kind.
        """
        if kind is not None:
            _check_kind("nbytes", kind)
        return sum(
            size
            for name, what, _, size in self.entries
            if kind in (None, what) and (module is None or _is_in(name, module))
        )

    def by_dtype(self, kind: str) -> dict[torch.dtype, int]:
        """Return the bytes of one kind by the dtype of what is stored.

        Args:
            kind: one of `KINDS`.

        Raises:
            ValueError: unknown kind.
        """
        _check_kind("by_dtype", kind)
        sums: dict[torch.dtype, int] = defaultdict(int)
        for _, what, dtype, size in self.entries:
            if what == kind:
                sums[dtype] += size
        return dict(sums)

    def by_module(self, depth: int | None = None) -> dict[str, dict[str, int]]:
        """Return the bytes of each kind by module.

        Args:
            depth: components of a name after which modules are taken together; None: each module
                by itself, without what is in it.

        Raises:
            ValueError: `depth` is no integer >= 0.
        """
        if depth is not None and (not isinstance(depth, int) or depth < 0):
            raise ValueError(f"by_module: depth must be an integer >= 0 or None, got {depth!r}")
        sums: dict[str, dict[str, int]] = {}
        for name, kind, _, size in self.entries:
            short = name if depth is None else ".".join(name.split(".")[:depth])
            row = sums.setdefault(short, {})
            row[kind] = row.get(kind, 0) + size
        return sums

    def table(self, depth: int | None = None) -> Table:
        """Return a table with a row per module and a column per kind that occurs."""
        kinds = [kind for kind in KINDS if self.nbytes(kind)]
        rows = [
            (
                name or "(model)",
                *(size_text(row.get(kind, 0)) for kind in kinds),
                size_text(sum(row.values())),
            )
            for name, row in self.by_module(depth).items()
        ]
        rows.append(
            ("total", *(size_text(self.nbytes(kind)) for kind in kinds), size_text(self.nbytes()))
        )
        notes = tuple(
            f"saved as {str(dtype).removeprefix('torch.')}: {size_text(size)}"
            for dtype, size in self.by_dtype("saved").items()
        )
        return Table("Memory by module and kind", ("module", *kinds, "all"), tuple(rows), notes)

    def __str__(self) -> str:
        return str(self.table())

    def __rich__(self) -> Any:
        return self.table().__rich__()

    def _repr_html_(self) -> str:
        return html(self.table())


def _check_kind(where: str, kind: str) -> None:
    if kind not in KINDS:
        raise ValueError(f"{where}: kind {must_be_one_of(KINDS, kind)}")


def _is_in(name: str, module: str) -> bool:
    return module == "" or name == module or name.startswith(f"{module}.")


def _parts(tensor: Any) -> list[Tensor]:
    """Return the plain tensors that `tensor` is made of (itself, unless it is a wrapper)."""
    if not is_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in _parts(getattr(tensor, name))]


class _Count:
    """Counts memory once. It holds what it counted: an address must not be used twice."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, str, torch.dtype, int]] = []
        self._seen: dict[int, torch.UntypedStorage] = {}

    def add(self, name: str, kind: str, tensor: object) -> None:
        """Book all memory that `tensor` keeps alive, unless it is known already."""
        if not isinstance(tensor, Tensor):
            return
        for part in _parts(tensor):
            storage = part.untyped_storage()
            if storage._cdata not in self._seen:
                self._seen[storage._cdata] = storage
                if storage.nbytes():
                    self.entries.append((name, kind, part.dtype, storage.nbytes()))


def _count_model(model: nn.Module, count: _Count) -> None:
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            count.add(name, "parameters", parameter)
            count.add(name, "gradients", parameter.grad)
            count.add(name, "gradients", getattr(parameter, "main_grad", None))
            if is_quantized(parameter):
                planes: Iterable[Any] = (parameter.rowwise, parameter.columnwise)
                for plane in planes:
                    for tensor in (
                        ()
                        if plane is None or plane.operand_cache is None
                        else plane.operand_cache.tensors
                    ):
                        count.add(name, "kept", tensor)
        for buffer in module.buffers(recurse=False):
            count.add(name, "buffers", buffer)
        for kept in getattr(module, "_cached_weights", {}).values():
            for tensor in kept.tensors:
                count.add(name, "kept", tensor)
        for state in states_of(module).values():
            for history in state.histories.values():
                count.add(name, "histories", history)


def _count_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, count: _Count) -> None:
    owner = {
        id(parameter): name
        for name, module in model.named_modules()
        for parameter in module.parameters(recurse=False)
    }
    for parameter, state in optimizer.state.items():
        for value in state.values():
            count.add(owner.get(id(parameter), ""), "optimizer", value)


@contextmanager
def _inside(model: nn.Module) -> Iterator[list[str]]:
    """Yield the stack of names of the modules whose forward is running."""
    stack = [""]

    def enter(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            stack.append(name)

        return hook

    def leave(*_: Any) -> None:
        stack.pop()

    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(enter(name), prepend=True))
        handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield stack
    finally:
        for handle in handles:
            handle.remove()


def _count_saved(model: nn.Module, forward: Callable[[], Any], count: _Count) -> None:
    with _inside(model) as stack:

        def pack(tensor: Tensor) -> Tensor:
            count.add(stack[-1], "saved", tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            held = forward()
    del held  # alive until here, and with it the graph


def saved_nbytes(forward: Callable[[], Any], exclude: Iterable[Tensor] = ()) -> int:
    """Return the bytes that autograd keeps alive after `forward` for its backward.

    Args:
        forward: runs one forward and returns its loss.
        exclude: tensors that do not count (the parameters: they are there anyway).

    Returns:
        The sum over distinct storages. A view counts with its whole storage, since that is what
        it keeps in memory; a tensor that several operations save counts once.
    """
    count = _Count()
    for tensor in exclude:
        count.add("", "parameters", tensor)
    _count_saved(nn.Module(), forward, count)
    return sum(size for _, kind, _, size in count.entries if kind == "saved")


def memory_report(
    model: nn.Module,
    forward: Callable[[], Any] | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
) -> MemoryReport:
    """Return what `model` holds in memory, by module and by kind.

    Args:
        model: any module; those of other libraries count as well.
        forward: runs one forward of the model and returns its loss: what autograd saves for the
            backward is counted too, and booked on the innermost module that ran. None: without.
        optimizer: whose state is counted too, or None.

    Raises:
        TypeError: `model` is no module, `forward` is not callable, or `optimizer` is none.

    Example:
        >>> import torch, hybridq
        >>> model = torch.nn.Sequential(hybridq.Linear(64, 64, bias=False, dtype=torch.bfloat16))
        >>> x = torch.randn(256, 64, dtype=torch.bfloat16)
        >>> with hybridq.autocast(recipe="mxfp8"):
        ...     report = hybridq.memory_report(model, lambda: model(x))
        >>> report.nbytes("parameters"), report.nbytes("saved", "0"), x.nbytes
        (8192, 16896, 32768)
    """
    given: object = model
    if not isinstance(given, nn.Module):
        raise TypeError(f"memory_report: model must be an nn.Module, got {type(given).__name__}")
    if forward is not None and not callable(forward):
        raise TypeError(
            "memory_report: forward must be callable without arguments, as in "
            f"memory_report(model, lambda: model(x)), got {type(forward).__name__}"
        )
    if optimizer is not None and not isinstance(getattr(optimizer, "state", None), Mapping):
        raise TypeError(
            "memory_report: optimizer must be one of torch or hybridq, or None, got "
            f"{type(optimizer).__name__}"
        )
    count = _Count()
    _count_model(model, count)
    if optimizer is not None:
        _count_optimizer(model, optimizer, count)
    if forward is not None:
        _count_saved(model, forward, count)
    order = {name: place for place, (name, _) in enumerate(model.named_modules())}
    entries = sorted(count.entries, key=lambda entry: (order[entry[0]], KINDS.index(entry[1])))
    return MemoryReport(tuple(entries))
