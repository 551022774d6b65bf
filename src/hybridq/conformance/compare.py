"""Compare answers with the right ones, and say how much differs and where first."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from .adapter import Adapter
from .case import KINDS, Array, Buffers, Case

__all__ = ["STATUSES", "Difference", "Result", "run", "run_case"]

#: Every outcome of a case.
STATUSES = ("pass", "differs", "failed", "not supported")
_NAN = 0x7FC00000


@dataclass(frozen=True)
class Difference:
    """How one array of an answer differs from the right one.

    Args:
        array: `"data"`, `"scale"`, `"amax"`, `"values"` or `"product"`.
        count, total: how many of its entries (codes, for packed data) differ.
        first: index of the first of them.
        got, want: the entries there; codes and bytes in hexadecimal.
        note: what is wrong with the array as a whole, such as its shape; "" otherwise.
    """

    array: str
    count: int
    total: int
    first: tuple[int, ...] = ()
    got: str = ""
    want: str = ""
    note: str = ""

    def __str__(self) -> str:
        if self.note:
            return f"{self.array}: {self.note}"
        place = ", ".join(map(str, self.first))
        return (
            f"{self.array}: {self.count} of {self.total} differ, first at [{place}]: "
            f"{self.got}, expected {self.want}"
        )


@dataclass(frozen=True)
class Result:
    """The outcome of one case.

    Args:
        id, kind: of the case.
        status: one of `STATUSES`.
        reason: why it is not supported, or how it failed.
        differences: one per array that differs.
    """

    id: str
    kind: str
    status: str
    reason: str = ""
    differences: tuple[Difference, ...] = ()


def run(adapter: Adapter, cases: Iterable[Case]) -> list[Result]:
    """Return the outcome of every case; an exception of the implementation is an outcome too.

    Args:
        adapter: the implementation.
        cases: the questions.
    """
    return [run_case(adapter, case) for case in cases]


def run_case(adapter: Adapter, case: Case) -> Result:
    """Return the outcome of one case.

    Args:
        adapter: the implementation.
        case: the question.
    """
    if case.kind not in KINDS:
        reason = f"the suite has no question about {case.kind}"
        return Result(case.id, case.kind, "not supported", reason)
    if case.kind == "gemm" and not hasattr(adapter, "gemm"):
        return Result(case.id, case.kind, "not supported", "has no gemm")
    try:
        refusal = adapter.supports(case)
        if refusal is not None:
            return Result(case.id, case.kind, "not supported", refusal)
        got = _answer(adapter, case)
    except Exception as error:  # whatever it raises is its answer, and other cases go on
        return Result(case.id, case.kind, "failed", f"{type(error).__name__}: {error}")
    found = [_compare(name, got.get(name), case) for name in case.want if name != "bound"]
    differences = tuple(one for one in found if one is not None)
    status = "differs" if differences else "pass"
    return Result(case.id, case.kind, status, "", differences)


def _answer(adapter: Adapter, case: Case) -> Buffers:
    if case.kind == "gemm":
        buffers = case.other[2] if case.other is not None else {}
        return {"product": adapter.gemm(case.given, buffers, case)}  # type: ignore[attr-defined]
    if case.kind in ("decode", "uncast"):
        return {"values": adapter.decode(case.given, case)}
    if case.x is None:
        raise ValueError(f"{case.id} has no input")
    return adapter.encode(case.x, case)


def _compare(name: str, got: Array | None, case: Case) -> Difference | None:
    want = case.want[name]
    if got is None:
        return Difference(name, want.size, want.size, note="missing")
    got = np.asarray(got)
    if got.shape != want.shape:
        return Difference(
            name, want.size, want.size, note=f"shape {got.shape}, expected {want.shape}"
        )
    if name == "product":
        return _outside(got, want, case.want["bound"])
    if want.dtype == np.uint8:
        if got.dtype != np.uint8:
            note = f"dtype {got.dtype}, expected uint8"
            return Difference(name, want.size, want.size, note=note)
        if name == "data" and case.spec.get("codes_per_byte") == 2:
            got, want = _nibbles(got), _nibbles(want)
        return _first(name, got != want, got, want)
    return _values_differ(name, got, want, case.ulp if name == "values" else 0)


def _nibbles(data: Array) -> Array:
    """Return codes one per byte; an odd tail's high nibble is kept, for it must be 0."""
    if data.ndim != 2:  # a cast's codes lie one per byte already
        return data
    return np.stack((data & 15, data >> 4), axis=-1).reshape(data.shape[0], 2 * data.shape[1])


def _values_differ(name: str, got: Array, want: Array, ulp: int) -> Difference | None:
    """Compare float32 bits: the sign of a zero counts, every NaN is the same."""
    got, want = (np.ascontiguousarray(array, dtype=np.float32) for array in (got, want))
    bits = [np.where(np.isnan(array), _NAN, array.view(np.uint32)) for array in (got, want)]
    differs = bits[0] != bits[1]
    if ulp:
        either = np.isnan(got) | np.isnan(want)
        steps = np.abs(_ordered(got) - _ordered(want))
        differs &= either | (steps > ulp)
    return _first(name, differs, got, want)


def _ordered(values: Array) -> Array:
    """Return integers that count float32 steps; both zeros are 0."""
    bits = values.view(np.int32).astype(np.int64)
    return np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


def _outside(got: Array, want: Array, bound: Array) -> Difference | None:
    """Compare a product with the true one: it must lie within the bound."""
    with np.errstate(invalid="ignore"):
        is_within = np.abs(got.astype(np.float64) - want) <= bound
    same = (np.isnan(got) & np.isnan(want)) | (got == want)
    return _first("product", ~(is_within | same), got, want)


def _first(name: str, differs: Array, got: Array, want: Array) -> Difference | None:
    places = np.argwhere(differs)
    if not len(places):
        return None
    place = tuple(int(i) for i in places[0])
    shown = [_text(array[place]) for array in (got, want)]
    return Difference(name, len(places), int(differs.size), place, *shown)


def _text(entry: Array) -> str:
    return f"{int(entry):#04x}" if entry.dtype == np.uint8 else f"{float(entry):.9g}"
