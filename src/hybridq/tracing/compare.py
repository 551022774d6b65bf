"""`compare`: the first place at which two traces differ."""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final, NamedTuple

from .trace import HEADER

__all__ = ["Difference", "compare"]

_PLACE: Final = ("step", "module", "tensor", "direction", "buffer")
_KEYS: Final = (*_PLACE, "dtype", "shape", "sha256")
_DIGEST: Final = re.compile("[0-9a-fA-F]{64}")


class Difference(NamedTuple):
    """The first buffer that differs.

    Attributes:
        step: of the run, from 0.
        module: its qualified name.
        tensor: `"input"`, `"weight"`, `"output"` or `"grad_output"`.
        direction: of its plane, or `"values"`: the tensor as it is.
        buffer: of the plane.
        byte: the first byte that differs; None: the traces keep no bytes.
        bit: of that byte, 0 being the lowest, the lowest that differs; None as for `byte`.
        a, b: that byte in both traces; None as for `byte`.
    """

    step: int
    module: str
    tensor: str
    direction: str
    buffer: str
    byte: int | None = None
    bit: int | None = None
    a: int | None = None
    b: int | None = None

    def __str__(self) -> str:
        place = f"{self.module or '(model)'}, {self.tensor}, {self.direction}, {self.buffer}"
        said = f"step {self.step}: {place}"
        if self.byte is None:
            return f"{said}; trace both with values=True for the bit"
        return f"{said}: byte {self.byte}, bit {self.bit} ({self.a:#04x} and {self.b:#04x})"


def compare(
    a: str | os.PathLike[str], b: str | os.PathLike[str], *, forward: bool = False
) -> Difference | None:
    """Return the first buffer, in the order of the run, that differs between two traces.

    Args:
        a, b: files that `hybridq.trace` wrote, or another implementation in its format.
        forward: of what a forward multiplies alone, for a trainer and a server, which has no
            gradients, no columnwise planes, and of weights their planes only.

    Returns:
        Where they differ; None: nowhere.

    Raises:
        ValueError: a file is no trace, ends in the middle, or has nothing to compare; or both are
            of different models, recipes or numbers of steps, so that their lines are not of the
            same buffers.

    Example:
        See `hybridq.trace`.
    """
    both = (
        (line for line in _lines(Path(path)) if not forward or _is_forward(line[1]))
        for path in (a, b)
    )
    is_empty = True
    for (number, one), (_, other) in zip_longest(*both, fillvalue=(0, None)):
        if one is None or other is None:
            short = a if one is None else b
            raise ValueError(f"compare: both traces must have as many steps, got fewer in {short}")
        if "end_of_step" in one or "end_of_step" in other:
            if one == other:
                continue
        elif all(one[key] == other[key] for key in _PLACE):
            if (one["dtype"], one["shape"]) != (other["dtype"], other["shape"]):
                kinds = " and ".join(f"{line['dtype']} {line['shape']}" for line in (one, other))
                raise ValueError(f"compare: line {number} must be of one kind, got {kinds}")
            if one["sha256"] != other["sha256"]:
                return _difference(one, other)
            is_empty = False
            continue
        places = " and ".join(_text(line) for line in (one, other))
        raise ValueError(
            f"compare: both traces must be of one model and recipe, got {places} in line {number}"
        )
    if is_empty:
        raise ValueError(
            f"compare: traces must have something to compare, got no product in {a} and {b}; run "
            "modules of hybridq inside of the trace, eagerly: compiled code shows none"
        )
    return None


def _is_forward(line: dict[str, Any]) -> bool:
    """Return whether a line is of what a forward multiplies, or of its result."""
    if "end_of_step" in line:
        return True
    if line["tensor"].startswith("grad_") or line["direction"] == "columnwise":
        return False
    return bool((line["tensor"], line["direction"]) != ("weight", "values"))


def _text(line: dict[str, Any]) -> str:
    if "end_of_step" in line:
        return f"the end of step {line['end_of_step']}"
    return "/".join(str(line[key]) for key in _PLACE)


def _difference(one: dict[str, Any], other: dict[str, Any]) -> Difference:
    found = Difference(*(one[key] for key in _PLACE))
    if "bytes" not in one or "bytes" not in other:
        return found
    try:
        mine, its = (base64.b64decode(line["bytes"], validate=True) for line in (one, other))
    except (TypeError, ValueError) as error:  # binascii.Error is a ValueError
        raise ValueError(f"compare: bytes of {_text(one)} must be Base64, got {error}") from None
    for place, (x, y) in enumerate(zip(mine, its, strict=False)):
        if x != y:
            bit = ((x ^ y) & -(x ^ y)).bit_length() - 1
            return found._replace(byte=place, bit=bit, a=x, b=y)
    return found


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield number and content of each line behind the header; raise where it is no whole trace."""
    try:
        with path.open(encoding="utf-8") as file:
            if _parsed(path, 1, file.readline()) != HEADER:
                raise ValueError(f"compare: {path} must be a trace of version 1, got another file")
            is_ended = True
            for number, text in enumerate(file, start=2):
                line = _parsed(path, number, text)
                is_ended = "end_of_step" in line
                if not is_ended and any(key not in line for key in _KEYS):
                    raise ValueError(f"compare: {path}, line {number} must have {', '.join(_KEYS)}")
                if not is_ended:
                    line["sha256"] = _digest(path, number, line["sha256"])
                yield number, line
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"compare: {path} must be a trace that can be read, got {error}") from None
    if not is_ended:
        raise ValueError(
            f"compare: {path} must end with the end of a step, got a file that is cut short; call "
            "step() after each step, and close()"
        )


def _digest(path: Path, number: int, text: object) -> str:
    """Return a digest in small letters, by whichever program it was written."""
    if not isinstance(text, str) or not _DIGEST.fullmatch(text):
        raise ValueError(
            f"compare: {path}, line {number} must have a sha256 of 64 hexadecimal digits, got "
            f"{text!r:.80}"
        )
    return text.lower()


def _parsed(path: Path, number: int, text: str) -> dict[str, Any]:
    try:
        line = json.loads(text)
    except json.JSONDecodeError:
        line = None
    if not isinstance(line, dict) or not text.endswith("\n"):
        raise ValueError(
            f"compare: {path}, line {number} must be a whole JSON object, got {text[:40]!r}; the "
            "file is no trace, or was cut short"
        )
    return line
