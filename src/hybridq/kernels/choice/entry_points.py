"""Backends of other packages, found by their entry points.

A package that has

    [project.entry-points."hybridq.backends"]
    abacus = "abacus_hybridq:BACKEND"

offers a backend `abacus`: `BACKEND` is a `Backend`, or a function that returns one. It is imported
when a backend is first chosen, and not before, so that it may import hybridq. A package that fails,
then or when its backend is asked, is named once in a warning; the rest goes on without it, and its
backend stays in the list with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from typing import Final

from ...errors import warn_once
from .backend import Backend, BackendAnswer
from .query import OpQuery

__all__ = ["GROUP", "guarded_answer", "guarded_notes", "installed_backends"]

#: The group of entry points.
GROUP: Final = "hybridq.backends"
#: A package whose name cannot be read.
_UNKNOWN: Final = "unknown"


def installed_backends() -> Iterator[Backend]:
    """Yield what installed packages offer; one that cannot be had as a backend that says why."""
    for entry, package in sorted(_entries(), key=lambda one: (one[0].name, one[0].value)):
        yield _loaded(entry, package)


def _entries() -> Iterator[tuple[metadata.EntryPoint, str]]:
    """Yield the entry points of the group, each with its package; of two copies the first's."""
    seen: set[str] = set()
    for dist in metadata.distributions():
        try:
            own = tuple(dist.entry_points.select(group=GROUP))
        # One damaged package, of whatever kind, must not take the others' with it.
        except Exception as error:
            name = _name(dist)
            warn_once(
                f"entry points of {name}",
                f"the entry points of the package {name} cannot be read ({type(error).__name__}: "
                f"{error}), so hybridq does not know whether it has a backend: reinstall it",
            )
            continue
        package = _name(dist) if own else ""
        name = package.partition(" ")[0]
        if own and name not in seen:
            seen |= {name} - {_UNKNOWN}
            yield from ((entry, package) for entry in own)


def _name(dist: metadata.Distribution) -> str:
    """Return name and version of a package, as far as they can be read."""
    try:
        return f"{dist.metadata['Name']} {dist.metadata['Version']}"
    except (OSError, ValueError, KeyError):
        return _UNKNOWN


def _loaded(entry: metadata.EntryPoint, package: str) -> Backend:
    try:
        made = entry.load()
        made = made if isinstance(made, Backend) else made()
        if not isinstance(made, Backend) or made.name != entry.name:
            got = f"one named {made.name!r}" if isinstance(made, Backend) else type(made).__name__
            raise TypeError(f"{entry.value} must be a Backend named {entry.name!r}, got {got}")
    # Whatever somebody else's package raises must not stop what runs without it.
    except Exception as error:
        reason = f"could not be loaded ({type(error).__name__}: {error})"
        warn_once(
            f"backend {entry.name} of {package}",
            f"the backend {entry.name!r} of the package {package} {reason}; hybridq goes on "
            "without it: repair or uninstall the package",
        )
        return Backend(entry.name, lambda query: reason, package=package, load_error=reason)
    return replace(made, package=package)


def guarded_answer(backend: Backend, query: OpQuery, is_forced: bool) -> BackendAnswer:
    """Return `backend.answer(query, is_forced)`; an error of another package is a reason.

    Args:
        backend: any.
        query, is_forced: as `Backend.answer` takes them.
    """
    if not backend.package:
        return backend.answer(query, is_forced)
    try:
        answer = backend.answer(query, is_forced)
        if not isinstance(answer.reason, str | None):
            raise TypeError(f"supports must return None or a str, got {answer.reason!r}")
    except Exception as error:  # as above
        return BackendAnswer(backend, _failed(backend, "supports", error))
    return answer


def guarded_notes(backend: Backend, query: OpQuery) -> tuple[str, ...]:
    """Return how `backend` runs `query`, one line each; an error of another package is a line.

    Args:
        backend: that can run it.
        query: the operation.
    """
    if backend.notes is None:
        return ()
    if not backend.package:
        return backend.notes(query)
    try:
        return tuple(map(str, backend.notes(query)))
    except Exception as error:  # as above
        return (_failed(backend, "notes", error),)


def _failed(backend: Backend, what: str, error: Exception) -> str:
    reason = f"its {what} failed ({type(error).__name__}: {error})"
    warn_once(
        f"backend {backend.name} of {backend.package}: {what}",
        f"the backend {backend.name!r} of the package {backend.package}: {reason}; others run "
        "what it was asked for",
    )
    return reason
