"""Exceptions of hybridq, and the one door that its warnings leave by."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Final

__all__ = [
    "BackendError",
    "CheckpointError",
    "HybridQWarning",
    "PlaneError",
    "RecipeError",
    "SpecError",
    "check_bools",
    "is_first",
    "must_be_one_of",
    "names_in",
    "path_in",
    "suggestion",
    "warn",
    "warn_once",
]


class SpecError(ValueError):
    """A format, element or PlaneSpec is unknown or contradicts itself."""


class PlaneError(RuntimeError):
    """A tensor lacks the plane that an operation needs."""


class BackendError(RuntimeError):
    """No backend can run the call; the message lists every backend's reason."""


class RecipeError(ValueError):
    """A recipe's quantizers do not make all the GEMMs of a module runnable."""


class CheckpointError(ValueError):
    """A checkpoint cannot be read, converted or written as asked; its files are as they were."""


class HybridQWarning(UserWarning):
    """Something works, but not in the way that the caller may expect."""


def check_bools(where: str, **given: object) -> None:
    """Raise where a switch is no bool: the text "false" would turn it on.

    Args:
        where: who asks, for the error.
        given: switches by name.

    Raises:
        TypeError: one is no bool.
    """
    for name, value in given.items():
        if not isinstance(value, bool):
            raise TypeError(f"{where}: {name} must be a bool, got {value!r}")


def names_in(where: str, given: object) -> tuple[str, ...]:
    """Return a collection of names or patterns as a tuple; one text is none, but its letters.

    Args:
        where: who asks, and for what: `"clip_weights: leave"`.
        given: what the caller gave.

    Raises:
        TypeError: it is a text, no collection, or something else than texts is in it.
    """
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise TypeError(f"{where} must be a collection of texts, as a list, got {given!r}")
    found = tuple(given)
    for one in found:
        if not isinstance(one, str):
            raise TypeError(f"{where} must hold texts only, got {one!r}")
    return found


def path_in(where: str, given: object) -> Path:
    """Return the path of a file or a folder; an empty one is none, and not the current folder.

    Args:
        where: who asks, and for what: `"export: target"`.
        given: what the caller gave.

    Raises:
        TypeError: it is no text and no path.
        ValueError: it is empty.
    """
    if not isinstance(given, str | os.PathLike):
        raise TypeError(f"{where} must be a path, as a text, got {type(given).__name__}")
    if not os.fspath(given):
        raise ValueError(f"{where} must be a path, got an empty one")
    return Path(given)


_seen: set[str] = set()


def is_first(key: str) -> bool:
    """Return whether `key` has not been asked about before in this process.

    Args:
        key: identity of a situation.
    """
    if key in _seen:
        return False
    _seen.add(key)
    return True


#: Packages whose lines a warning does not name: this one, those that call it by hooks, and what of
#: Python's own stands between a caller and a context manager, an import or a thread. Code that is
#: made of text, as that of a graph, has no name.
_BETWEEN: Final = frozenset(
    {"", "hybridq", "hybridq_cli", "torch", "accelerate", "peft", "transformers", "typer", "click"}
    | {"contextlib", "functools", "importlib", "threading", "concurrent", "runpy"}
)


def warn(message: str, category: type[Warning] = HybridQWarning) -> None:
    """Warn, naming the caller's line: the first one outside of hybridq and what calls it by hooks.

    Where there is none, as in a thread of hybridq, the line of hybridq that warns is named.

    Args:
        message: what happens and how to avoid it.
        category: of the warning.

    Source: ours. `skip_file_prefixes` of `warnings.warn` does this from Python 3.12 on.
    """
    here = sys._getframe(1)
    frame: FrameType | None = here
    while frame is not None and _package(frame) in _BETWEEN:
        frame = frame.f_back
    frame = frame or here
    warnings.warn_explicit(
        message,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=frame.f_globals.get("__name__") or "<unknown>",
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )


def _package(frame: FrameType) -> str:
    return (frame.f_globals.get("__name__") or "").partition(".")[0]


def warn_once(key: str, message: str) -> None:
    """Warn with `message` the first time that `key` is seen in this process.

    Args:
        key: identity of the situation; a later call with the same key is silent.
        message: what happens and how to avoid it.
    """
    if is_first(key):
        warn(message)


def suggestion(given: object, known: Iterable[str]) -> str:
    """Return `"; did you mean 'x'?"` for the known name that `given` is closest to, else nothing.

    Args:
        given: what the caller wrote.
        known: the names that there are.
    """
    if not isinstance(given, str):
        return ""
    import difflib  # when something is wrong, and at no other time

    plain = {_plain(name): name for name in known}
    found = difflib.get_close_matches(_plain(given), plain, n=1)
    return f"; did you mean {plain[found[0]]!r}?" if found else ""


def _plain(name: str) -> str:
    """Return a name without what writers differ in: case, and signs between words."""
    return name.lower().replace("-", "_").replace(" ", "_").replace(".", "_")


def must_be_one_of(known: Iterable[str], given: object, also: str = "") -> str:
    """Return `"must be one of a, b, got 'c'"`, and the name that may have been meant.

    Every error about a name that is looked up says it by this function.

    Args:
        known: the names that there are.
        given: what the caller wrote.
        also: what else it may be, before "one of": `"None or "`.
    """
    names = tuple(known)
    return f"must be {also}one of {', '.join(names)}, got {given!r}{suggestion(given, names)}"
