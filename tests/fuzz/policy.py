"""Which exceptions may come out of the public door, and how a call is judged."""

from __future__ import annotations

import linecache
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import hybridq

__all__ = ["Wrong", "attempt", "same_refusal"]

_PACKAGE: Final = str(Path(hybridq.__file__).parent)
#: Not subclasses: RecursionError is a RuntimeError, UnicodeError a ValueError.
_ALLOWED: Final = (
    hybridq.SpecError,
    hybridq.PlaneError,
    hybridq.BackendError,
    hybridq.RecipeError,
    hybridq.CheckpointError,
    TypeError,
    ValueError,
    RuntimeError,
    NotImplementedError,
)
_RULE_TEXT: Final = re.compile(r"^[\w.:\[\]()<>' -]+: .|^[\w ]+ must |.* is not implemented")
_LEAKS: Final = ("INTERNAL ASSERT", "please report a bug", "has no attribute", "unexpected keyword")


class Wrong(AssertionError):
    """An invariant of the public door does not hold."""


def attempt(
    call: Callable[[], Any], name: str, also: tuple[type[Exception], ...] = ()
) -> tuple[Any, Exception | None]:
    """Return (result, None), or (None, error) where the error is one that callers may get.

    Args:
        call: what is tried.
        name: of the call, for the report.
        also: further types that this call documents, or that torch raises for a plain tensor.

    Raises:
        Wrong: another exception came out, or its text says nothing.
    """
    try:
        return call(), None
    except Wrong:
        raise
    except Exception as error:
        reason = _verdict(error, also)
        if reason is None:
            return None, error
        raise Wrong(f"{name}: {reason}\n{''.join(traceback.format_exception(error))}") from error


def _verdict(error: Exception, also: tuple[type[Exception], ...]) -> str | None:
    """Return None if a caller may get `error`, else what is wrong with it."""
    text = str(error)
    if any(leak in text for leak in _LEAKS):
        return f"an internal error came out: {type(error).__name__}"
    if type(error) in also:
        return None
    if type(error) not in _ALLOWED:
        return f"an undocumented exception came out: {type(error).__name__}"
    if not text.strip():
        return f"{type(error).__name__} without a text"
    line = _own_line(error.__traceback__)
    if line is None:
        return None  # torch's or Python's own words about a call that never reached hybridq
    if line.startswith("raise"):
        return None if _RULE_TEXT.match(text) else f"the text names no function: {text!r}"
    if type(error) in (TypeError, ValueError, NotImplementedError):
        return f"{type(error).__name__} was not raised but happened in `{line}`"
    return None


def _own_line(trace: TracebackType | None) -> str | None:
    """Return the line of hybridq in which the exception appeared, None if it was not there."""
    last = None
    while trace is not None:
        last, trace = trace, trace.tb_next
    if last is None or not last.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        return None
    return linecache.getline(last.tb_frame.f_code.co_filename, last.tb_lineno).strip()


def same_refusal(plain: Exception, ours: Exception) -> bool:
    """Whether a quantized tensor refuses a call as a plain one does: the same kind of error."""
    return isinstance(ours, type(plain)) or isinstance(plain, type(ours))
