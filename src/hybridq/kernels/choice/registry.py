"""Which backend runs what: asked before a launch, never found out by catching an exception.

A backend answers a query with None ("I can") or the reason why not. The first that can wins; a
forced backend (`hybridq.backend`, `HYBRIDQ_BACKEND`) wins always. There is one question, `choose`,
and for what one call may do instead of several, `together`: calls, `explain` and `doctor` read the
same `Decision`. `select` and `operation` are for who runs it: they raise where none can.
Backends of other packages (`entry_points`) join when the first question is asked.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import torch

from ... import settings
from ..._log import log_once
from ...errors import BackendError, must_be_one_of, warn_once
from ...formats import PlaneSpec
from . import entry_points
from .backend import Backend, BackendAnswer
from .query import OpQuery

__all__ = [
    "Decision",
    "backends",
    "cached_choice",
    "choose",
    "fallbacks",
    "forget_choices",
    "is_unforced_native",
    "load_backends",
    "operation",
    "register_backend",
    "select",
    "together",
    "unforced",
    "unregister_backend",
]


@dataclass(frozen=True)
class Decision:
    """Which backend runs a query, decided in one place for calls and for those who explain them.

    Args:
        query: what was asked.
        answers: every backend's, in the order in which they are asked.
        chosen: the backend that runs it, or None.
        forced: name of the forced backend, or None.
        error: why none runs it; "" where one does.
    """

    query: OpQuery
    answers: tuple[BackendAnswer, ...]
    chosen: Backend | None
    forced: str | None
    error: str = ""

    @property
    def notes(self) -> tuple[str, ...]:
        """How the chosen backend runs it, one line each."""
        return () if self.chosen is None else entry_points.guarded_notes(self.chosen, self.query)


_backends: dict[str, Backend] = {}
#: Why operations have run on the reference; an ordered set.
_fallbacks: dict[str, None] = {}
#: What forgets choices that another backend could change.
_cached: list[Callable[[], None]] = []
_T = TypeVar("_T")


def cached_choice(function: Callable[..., _T]) -> Callable[..., _T]:
    """Cache a pure function of its arguments and of the backends that are registered."""
    made = lru_cache(maxsize=4096)(function)
    _cached.append(made.cache_clear)
    return made


def forget_choices() -> None:
    """Choose anew in all calls from now on."""
    for clear in _cached:
        clear()


def register_backend(backend: Backend) -> Backend:
    """Add `backend`, in the place of one that has its name.

    Args:
        backend: any.

    Raises:
        TypeError: it is no Backend.
    """
    if not isinstance(backend, Backend):
        raise TypeError(f"register_backend: takes a Backend, got {type(backend).__name__}")
    _backends[backend.name] = backend
    forget_choices()
    return backend


def unregister_backend(name: str) -> Backend:
    """Take a backend out again, and return it.

    Raises:
        BackendError: there is none of this name.
    """
    if name not in _backends:
        raise BackendError(f"unregister_backend: {_unknown(name)}")
    removed = _backends.pop(name)
    forget_choices()
    return removed


def _unknown(name: str) -> str:
    return must_be_one_of(_backends, name)


def backends(op: str = "") -> tuple[Backend, ...]:
    """Return all backends in the order in which they are asked.

    Those of a higher priority come first, those of one priority in the order of their names, and
    the reference last.

    Args:
        op: for which operation; "": for those in which no backend has a place of its own.
    """
    _load_once()
    return tuple(sorted(_backends.values(), key=lambda backend: backend.place(op)))


_is_loaded = not settings.loads_backends()
#: Whether this thread is loading now. Threads do not wait for each other, which could be for ever
#: where one of them imports such a package itself; each loads, and the second finds it done.
_loading = threading.local()


def _load_once() -> None:
    if not _is_loaded and not getattr(_loading, "now", False):
        load_backends()


def load_backends() -> tuple[str, ...]:
    """Let the backends that installed packages offer join, and return their names.

    Done when the first backend is chosen unless `HYBRIDQ_BACKEND_AUTOLOAD=0` is in the environment;
    to be called where a package was installed since. A name that is taken stays with who has it.
    """
    global _is_loaded
    names = []
    _loading.now = True
    try:
        for backend in entry_points.installed_backends():
            other = _backends.get(backend.name)
            if other is not None and _name_of(other.package) != _name_of(backend.package):
                warn_once(
                    f"backend {backend.name} of {backend.package} twice",
                    f"the package {backend.package} offers a backend {backend.name!r}, a name that "
                    f"{other.package or 'hybridq'} has; the package's is left out",
                )
                continue
            register_backend(backend)
            names.append(backend.name)
    finally:
        _loading.now = False
    _is_loaded = True
    return tuple(names)


def _name_of(package: str) -> str:
    return package.partition(" ")[0]  # another version of it may have come


def choose(query: OpQuery) -> Decision:
    """Return which backend runs `query`, silently and without raising.

    A forced backend that lacks the operation leaves the choice to the others (`cpu` has no gemm);
    one that has it and cannot run this query leaves none.

    Args:
        query: the operation.
    """
    return _choose(query, settings.current().backend)


@cached_choice
def _choose(query: OpQuery, forced: str | None) -> Decision:
    answers = tuple(
        entry_points.guarded_answer(backend, query, backend.name == forced)
        for backend in backends(query.op)
    )
    if forced is not None and forced not in _backends:
        return Decision(query, answers, None, forced, f"backend: {_unknown(forced)}")
    own = next((answer for answer in answers if answer.backend.name == forced), None)
    if own is not None and own.lacks != "operation":
        if own.reason is None:
            return Decision(query, answers, own.backend, forced)
        error = f"{query.op}: the forced backend {forced!r} cannot: {own.reason}"
        return Decision(query, answers, None, forced, error)
    chosen = next((answer.backend for answer in answers if answer.reason is None), None)
    none = "" if chosen else f"{query.op}: no backend can run this call ({_reasons(answers)})"
    return Decision(query, answers, chosen, forced, none)


def _reasons(answers: tuple[BackendAnswer, ...]) -> str:
    return "; ".join(f"{one.backend.name}: {one.reason}" for one in answers if one.reason)


def together(whole: OpQuery, parts: Sequence[OpQuery]) -> Decision:
    """Return which backend runs `whole` in one call: the one that runs all `parts`, if it can.

    So a call that does several operations at once gives what its parts give one by one, whatever
    is forced. Where none does, `chosen` is None and `error` says why; the parts then run one by
    one.

    Args:
        whole: the operation that does all.
        parts: what it stands for, at least one.
    """
    return _together(whole, tuple(parts), settings.current().backend)


@cached_choice
def _together(whole: OpQuery, parts: tuple[OpQuery, ...], forced: str | None) -> Decision:
    owners: dict[str, Backend] = {}
    for part in parts:
        decision = _choose(part, forced)
        if decision.chosen is None:
            return Decision(whole, decision.answers, None, forced, decision.error)
        owners[decision.chosen.name] = decision.chosen
    who = f"the parts run by {' and '.join(owners)}" if parts else "there are no parts"

    def answer(backend: Backend) -> BackendAnswer:
        if list(owners) == [backend.name]:
            return entry_points.guarded_answer(backend, whole, True)  # it was chosen already
        return BackendAnswer(backend, who)

    answers = tuple(answer(backend) for backend in backends())
    chosen = next((one.backend for one in answers if one.reason is None), None)
    none = "" if chosen else f"{whole.op}: no backend does all in one call ({_reasons(answers)})"
    return Decision(whole, answers, chosen, forced, none)


def select(query: OpQuery) -> Backend:
    """Return the backend that runs `query`, as `choose` says it.

    Raises:
        BackendError: no backend can, or the forced one cannot; the message lists the reasons.
    """
    return _select(query, settings.current().backend)


@cached_choice
def _select(query: OpQuery, forced: str | None) -> Backend:
    decision = _choose(query, forced)
    if decision.chosen is None:
        raise BackendError(decision.error)
    if not decision.chosen.is_native and decision.chosen.name != forced:
        _log_fallback(decision)
    return decision.chosen


def unforced(query: OpQuery) -> Backend:
    """Return the backend that runs a query where none is forced.

    Args:
        query: what another backend hands on.

    Raises:
        BackendError: none can run it.
    """
    return _select(query, None)


def is_unforced_native(query: OpQuery) -> bool:
    """Return whether a kernel runs a query where no backend is forced, silently.

    Args:
        query: what another backend would hand on.
    """
    chosen = _choose(query, None).chosen
    return chosen is not None and chosen.is_native


def operation(
    op: str,
    device: str,
    dtype: torch.dtype,
    row: PlaneSpec | None = None,
    col: PlaneSpec | None = None,
    *more: Any,
) -> Callable[..., Any]:
    """Return what runs a query, `select(OpQuery(...)).ops[op]`, without making the query again.

    Args:
        op, device, dtype, row, col, more: the fields of an OpQuery, in order.

    Raises:
        BackendError: as `select`.
    """
    return _operation(settings.current().backend, op, device, dtype, row, col, *more)


@cached_choice
def _operation(forced: str | None, op: str, *fields: Any) -> Callable[..., Any]:
    return _select(OpQuery(op, *fields), forced).ops[op]


def fallbacks() -> tuple[str, ...]:
    """Return the reasons for which operations of this process have run on the slow reference."""
    return tuple(_fallbacks)


def _log_fallback(decision: Decision) -> None:
    """Log once per reason: a missing core is one line, not one per operation and format."""
    query = decision.query
    tried = tuple(answer for answer in decision.answers if answer.lacks != "operation")
    specs = " and ".join(str(spec) for spec in (query.row, query.col) if spec is not None)
    reasons = _reasons(tried) or f"no native backend has {query.op}"
    key = f"fallback on {query.device}: {reasons}"
    _fallbacks[key] = None
    log_once(
        key,
        f"{query.op} of {specs or query.dtype} on {query.device} runs on the slow PyTorch "
        f"reference backend ({reasons}); further calls for this reason are not reported",
    )
