"""Which backend runs a call: asked before a launch, never found out by catching an exception.

A backend says for a call None ("I can") or the reason why not. The first that can wins; a
forced backend (`hybridq.backend`, `HYBRIDQ_BACKEND`) wins always.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, TypeVar

import torch

from .. import settings
from ..errors import BackendError, warn_once
from ..formats import PlaneSpec
from .device import Chip

__all__ = [
    "Backend",
    "Call",
    "Choice",
    "Decision",
    "backends",
    "cached_choice",
    "candidates",
    "decide",
    "operation",
    "register_backend",
    "select",
]


@dataclass(frozen=True)
class Call:
    """What a backend must know to say whether it can run an operation.

    Args:
        op: `"encode"`, `"decode"`, `"amax"`, `"transpose"`, `"gemm"`, `"grouped_gemm"`, ...
        device: type of the tensors' device, `"cpu"`, `"cuda"`, ...
        dtype: dtype of the high-precision side: input of encode, output of decode and gemm.
        row: spec of the first plane (of operand a), or None.
        col: spec of the second plane (of operand b), or None.
        precision: of a GEMM: `"auto"`, `"exact"` or `"fast"`.
        sizes: (M, N, K) of a GEMM, or None where they are not known.
        chip: the device in more detail, or None where the kind is all that is known.
        is_alone: of a GEMM: neither a bias nor an accumulation follows the product.
        groups: of a grouped GEMM: how many there are, or None where it is not known.
    """

    op: str
    device: str
    dtype: torch.dtype
    row: PlaneSpec | None = None
    col: PlaneSpec | None = None
    precision: str = "auto"
    sizes: tuple[int, int, int] | None = None
    chip: Chip | None = None
    is_alone: bool = True
    groups: int | None = None


@dataclass(frozen=True)
class Backend:
    """One implementation of some of the operations.

    Args:
        name: what `hybridq.backend(name)` takes.
        supports: returns None or the reason why a call cannot run here.
        ops: operation name to function.
        is_native: False for the plain PyTorch reference, which is always the last resort.
        notes: returns how a call that it can run is run, one line each, for `explain`.
        finds_amax: its encode finds statistics that it is not given, in as few passes as it can.
        raises_found: what its encoder returns also takes a `found` (see `EncodePlan`).
        encoder: returns, for `(row, col, dtype)`, what encodes such planes of such tensors and
            takes `(x, row_stat, col_stat, seed, row0, col0, row_stream, col_stream)`; None where
            its `encode` has nothing to prepare.
        scratch_nbytes: temporary memory of its encode and decode, bytes per value at most.
    """

    name: str
    supports: Callable[[Call], str | None]
    ops: dict[str, Callable[..., Any]] = field(default_factory=dict, hash=False)
    is_native: bool = True
    notes: Callable[[Call], tuple[str, ...]] | None = field(default=None, hash=False)
    finds_amax: bool = False
    raises_found: bool = False
    encoder: Callable[..., Callable[..., Any]] | None = field(default=None, hash=False)
    scratch_nbytes: int = 0

    def reason(self, call: Call) -> str | None:
        """Return None if this backend can run `call`, else why not."""
        if call.op not in self.ops:
            return f"has no {call.op}"
        return self.supports(call)


@dataclass(frozen=True)
class Choice:
    """A backend beside its answer to a call.

    Args:
        backend: the backend.
        reason: None if it can run the call, else why not.
    """

    backend: Backend
    reason: str | None


_backends: dict[str, Backend] = {}
#: What forgets choices that another backend could change.
_cached: list[Callable[[], None]] = []
_T = TypeVar("_T")


def cached_choice(function: Callable[..., _T]) -> Callable[..., _T]:
    """Cache a pure function of its arguments and of the backends that are registered."""
    made = lru_cache(maxsize=4096)(function)
    _cached.append(made.cache_clear)
    return made


#: The order in which backends are asked: the fastest way first. Others come after these, in the
#: order of registration, and the reference is always last.
_ORDER: Final = ("cuda", "cpu", "native", "triton", "fold", "torch")


def register_backend(backend: Backend) -> Backend:
    """Add `backend`."""
    _backends[backend.name] = backend
    for clear in _cached:
        clear()
    return backend


def backends() -> tuple[Backend, ...]:
    """Return all backends in the order in which they are asked."""
    return tuple(sorted(_backends.values(), key=_place))


def _place(backend: Backend) -> tuple[bool, int]:
    known = backend.name in _ORDER
    return not backend.is_native, _ORDER.index(backend.name) if known else len(_ORDER)


def candidates(call: Call) -> tuple[Choice, ...]:
    """Return every backend with None or its reason why it cannot run `call`."""
    return tuple(Choice(backend, backend.reason(call)) for backend in backends())


def _reasons(choices: tuple[Choice, ...]) -> str:
    return "; ".join(f"{c.backend.name}: {c.reason}" for c in choices if c.reason)


def select(call: Call) -> Backend:
    """Return the backend that runs `call`.

    A forced backend that does not have the operation at all (`cpu` has no gemm) leaves the
    choice to the others; one that has it but cannot run this call raises.

    Raises:
        BackendError: no backend can, or the forced one cannot; the message lists the reasons.
    """
    return _select(call, settings.current().backend)


def operation(
    op: str,
    device: str,
    dtype: torch.dtype,
    row: PlaneSpec | None = None,
    col: PlaneSpec | None = None,
    *more: Any,
) -> Callable[..., Any]:
    """Return what runs a call, `select(Call(...)).ops[op]`, without making the Call again.

    Args:
        op, device, dtype, row, col, more: the fields of a Call, in order.

    Raises:
        BackendError: as `select`.
    """
    return _operation(settings.current().backend, op, device, dtype, row, col, *more)


@cached_choice
def _operation(forced: str | None, op: str, *fields: Any) -> Callable[..., Any]:
    return _select(Call(op, *fields), forced).ops[op]


@dataclass(frozen=True)
class Decision:
    """Which backend runs a call, decided in one place for calls and for those who explain them.

    Args:
        choices: every backend with its answer.
        chosen: the one that runs the call, or None.
        forced: name of the forced backend, or None.
        error: why none runs it; "" where one does.
    """

    choices: tuple[Choice, ...]
    chosen: Backend | None
    forced: str | None
    error: str = ""


def decide(call: Call, forced: str | None) -> Decision:
    """Return which backend runs `call`, without a warning and without raising.

    Args:
        call: the operation.
        forced: name of the forced backend, or None. One that lacks the operation leaves the choice
            to the others; one that has it and cannot run this call leaves none.
    """
    if forced is not None and forced not in _backends:
        error = f"backend: must be one of {', '.join(_backends)}, got {forced!r}"
        return Decision(candidates(call), None, forced, error)
    choices = candidates(call)
    if forced is not None and call.op in _backends[forced].ops:
        own = next(choice for choice in choices if choice.backend.name == forced)
        if own.reason is None:
            return Decision(choices, own.backend, forced)
        error = f"{call.op}: the forced backend {forced!r} cannot: {own.reason}"
        return Decision(choices, None, forced, error)
    chosen = next((choice.backend for choice in choices if choice.reason is None), None)
    none = "" if chosen else f"{call.op}: no backend can run this call ({_reasons(choices)})"
    return Decision(choices, chosen, forced, none)


@cached_choice
def _select(call: Call, forced: str | None) -> Backend:
    decision = decide(call, forced)
    if decision.chosen is None:
        raise BackendError(decision.error)
    if not decision.chosen.is_native and decision.chosen.name != forced:
        _warn_fallback(call, decision.choices)
    return decision.chosen


def _warn_fallback(call: Call, choices: tuple[Choice, ...]) -> None:
    """Warn once per reason: a missing core is one warning, not one per operation and format."""
    tried = tuple(choice for choice in choices if call.op in choice.backend.ops)
    specs = " and ".join(str(spec) for spec in (call.row, call.col) if spec is not None)
    reasons = _reasons(tried) or f"no native backend has {call.op}"
    warn_once(
        f"fallback on {call.device}: {reasons}",
        f"{call.op} of {specs or call.dtype} on {call.device} runs on the slow PyTorch reference "
        f"backend ({reasons}); further calls for this reason are not reported",
    )
