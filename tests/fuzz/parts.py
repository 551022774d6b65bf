"""Rules that look at tensors in another shape or in parts: what a plain tensor would give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from hypothesis import strategies as st

from .invariants import check_values, equal
from .policy import Wrong, attempt, same_refusal
from .pool import Pool, fuzz, indices

__all__ = ["PartRules"]

_Operation = Callable[[Any, int, int, int], Any]

#: Operations of shape; the integers may mean anything, also what does not exist.
SHAPES: Final[dict[str, _Operation]] = {
    "view": lambda t, a, b, c: t.view(a, b),
    "view 3": lambda t, a, b, c: t.view(a, b, c),
    "view rows": lambda t, a, b, c: t.view(a, *t.shape[-1:]),
    "view rows 3": lambda t, a, b, c: t.view(a, b, *t.shape[-1:]),
    "view ones": lambda t, a, b, c: t.view(1, *t.shape, *([1] if a == 3 else [])),
    "flat": lambda t, a, b, c: t.view(-1),
    "view_as": lambda t, a, b, c: t.view_as(torch.empty(t.numel() // max(a, 1), max(a, 1))),
    "reshape": lambda t, a, b, c: t.reshape(a, b),
    "reshape -1": lambda t, a, b, c: t.reshape(-1, a),
    "flatten": lambda t, a, b, c: t.flatten(a, b),
    "unflatten": lambda t, a, b, c: t.unflatten(a, (b, c)),
    "unsqueeze": lambda t, a, b, c: t.unsqueeze(a),
    "squeeze": lambda t, a, b, c: t.squeeze(a),
    "squeeze all": lambda t, a, b, c: t.squeeze(),
    "squeeze two": lambda t, a, b, c: t.squeeze((a, b)),
    "transpose": lambda t, a, b, c: t.transpose(a, b),
    "permute": lambda t, a, b, c: t.permute(a, b),
    "permute one": lambda t, a, b, c: t.permute(a),
    "permute 3": lambda t, a, b, c: t.permute(a, b, c),
    "movedim": lambda t, a, b, c: t.movedim(a, b),
    "t": lambda t, a, b, c: t.t(),
    "mT": lambda t, a, b, c: t.mT,
    "T": lambda t, a, b, c: t.T,
    "adjoint": lambda t, a, b, c: t.adjoint(),
    "expand": lambda t, a, b, c: t.expand(a, *t.shape),
    "repeat": lambda t, a, b, c: t.repeat(2, *([1] * t.dim())),
    "as_strided": lambda t, a, b, c: t.as_strided(t.shape, t.stride(), max(a, 0) // 30),
    "as_strided other": lambda t, a, b, c: t.as_strided((a, b), (c, 1)),
    "contiguous": lambda t, a, b, c: t.mT.contiguous(),
    "flip": lambda t, a, b, c: t.flip(a),
    "roll": lambda t, a, b, c: t.roll(a, b),
    "diagonal": lambda t, a, b, c: t.diagonal(a),
    "unfold": lambda t, a, b, c: t.unfold(a, b, c),
}
PARTS: Final[dict[str, _Operation]] = {
    "slice": lambda t, a, b, c: t[a:b],
    "slice cols": lambda t, a, b, c: t[..., a:b],
    "slice 16": lambda t, a, b, c: t[16 * a : 16 * b],
    "slice cols 16": lambda t, a, b, c: t[..., 16 * a : 16 * b],
    "slice step": lambda t, a, b, c: t[a : b : max(c, 1)],
    "slice both": lambda t, a, b, c: t[a:b, c:],
    "row": lambda t, a, b, c: t[a],
    "value": lambda t, a, b, c: t[a, b],
    "none": lambda t, a, b, c: t[None, a:b],
    "ellipsis": lambda t, a, b, c: t[..., None, a],
    "narrow": lambda t, a, b, c: t.narrow(a, b, c),
    "narrow rows": lambda t, a, b, c: t.narrow(0, a, b),
    "select": lambda t, a, b, c: t.select(a, b),
    "split": lambda t, a, b, c: t.split(a, b),
    "split rows": lambda t, a, b, c: t.split(a),
    "split sizes": lambda t, a, b, c: t.split([a, b, t.shape[0] - a - b]),
    "split none": lambda t, a, b, c: torch.split(t, [], a),
    "split cols": lambda t, a, b, c: t.split(a, -1),
    "chunk": lambda t, a, b, c: t.chunk(a, b),
    "tensor_split": lambda t, a, b, c: t.tensor_split(a, b),
    "tensor_split at": lambda t, a, b, c: t.tensor_split((a, b)),
    "unbind": lambda t, a, b, c: t.unbind(a),
    "index": lambda t, a, b, c: t[torch.tensor([a, b, c])],
    "index 2-D": lambda t, a, b, c: t[torch.tensor([[a, b], [b, c]])],
    "index int32": lambda t, a, b, c: t[torch.tensor([a], dtype=torch.int32)],
    "index list": lambda t, a, b, c: t[[a, b]],
    "index pair": lambda t, a, b, c: t[torch.tensor([a]), torch.tensor([b])],
    "index_select": lambda t, a, b, c: t.index_select(a, torch.tensor([b, c])),
    "index_select rows": lambda t, a, b, c: t.index_select(0, torch.tensor([a, b])),
    "index_select one": lambda t, a, b, c: t.index_select(0, torch.tensor(a)),
    "mask": lambda t, a, b, c: t[torch.ones(t.shape, dtype=torch.bool)],
    "mask rows": lambda t, a, b, c: t[torch.arange(t.shape[0]) % 2 == 0],
    "take": lambda t, a, b, c: t.take(torch.tensor([a, b])),
    "gather": lambda t, a, b, c: t.gather(a, torch.zeros(t.shape, dtype=torch.int64)),
    "embedding": lambda t, a, b, c: torch.nn.functional.embedding(torch.tensor([a, b]), t),
    "embedding bag": lambda t, a, b, c: torch.nn.functional.embedding_bag(
        torch.tensor([[a, b]]), t
    ),
    "cat": lambda t, a, b, c: torch.cat([t, t], a),
    "cat chunks": lambda t, a, b, c: torch.cat(t.chunk(2)),
    "cat parts": lambda t, a, b, c: torch.cat([t[:a], t[a:]]),
    "cat columns": lambda t, a, b, c: torch.cat([t[..., :a], t[..., a:]], -1),
    "cat parts 32": lambda t, a, b, c: torch.cat([t[: 32 * a], t[32 * a :]]),
    "stack": lambda t, a, b, c: torch.stack([t, t], a),
    "iterate": lambda t, a, b, c: list(t)[:3],
}
_TORCH: Final = (IndexError, RuntimeError, TypeError, ValueError)
#: A number, or from 1000 one that has to do with the shape: see `_meaning`.
_NUMBERS: Final = st.one_of(st.integers(-4, 4), st.integers(1000, 1019), st.integers(-5, 140))


def _meaning(t: Any, number: int) -> int:
    """Return a size of t, a part of one, or the number of values without one."""
    if number < 1000:
        return number
    size = t.shape[number % 5 % t.dim()] if t.dim() else 1
    return (size, size // 2, t.numel() // max(size, 1), size // 32 * 16)[(number - 1000) // 5]


def _flat(result: Any) -> list[Any]:
    return list(result) if isinstance(result, list | tuple) else [result]


class PartRules(Pool):
    """Shapes, parts, indices: each compared with what the plain values give."""

    def _as_plain(self, t: Any, operation: _Operation, name: str, numbers: Any) -> None:
        numbers = tuple(_meaning(t, number) for number in numbers)
        expected: list[Any] = []
        refusal: Exception | None = None
        try:
            expected = _flat(operation(t.dequantize(), *numbers))
        except _TORCH as error:
            refusal = error
        if any(size < 0 for piece in expected for size in piece.shape):
            return  # torch makes such tensors of empty ones, and cannot read them itself
        where = f"{name}{numbers} of {tuple(t.shape)} {t.tensor_storage.first.spec}"
        # What torch itself raises for a plain tensor may be raised here too.
        also = () if refusal is None else (type(refusal),)
        got, error = attempt(lambda: _flat(operation(t, *numbers)), where, also)
        if refusal is not None:
            if error is None:
                raise Wrong(f"{where}: a plain tensor raises {refusal!r}, this gave {got}")
            if not same_refusal(refusal, error):
                raise Wrong(f"{where}: a plain tensor raises {refusal!r}, this {error!r}")
            return
        if error is not None:
            if name.startswith("as_strided"):
                return  # only of the same geometry: there is no memory that strides count in
            raise Wrong(f"{where}: a plain tensor takes it, this raises {error!r}") from error
        if len(got) != len(expected):
            raise Wrong(f"{where}: {len(got)} pieces")
        for piece, values in zip(got, expected, strict=True):
            check_values(piece, values, where)
        for piece in got[:2]:
            self.keep(piece, where)

    @fuzz(
        index=indices(),
        name=st.sampled_from(sorted(SHAPES)),
        numbers=st.tuples(_NUMBERS, _NUMBERS, _NUMBERS),
    )
    def shape(self, index: int, name: str, numbers: tuple[int, int, int]) -> None:
        """Another shape of the same values."""
        t = self.take(index)
        if t is not None:
            self._as_plain(t, SHAPES[name], name, numbers)

    @fuzz(
        index=indices(),
        name=st.sampled_from(sorted(PARTS)),
        numbers=st.tuples(_NUMBERS, _NUMBERS, _NUMBERS),
    )
    def part(self, index: int, name: str, numbers: tuple[int, int, int]) -> None:
        """A part of the values, or tensors put together."""
        t = self.take(index)
        if t is not None:
            self._as_plain(t, PARTS[name], name, numbers)

    @fuzz(
        index=indices(),
        rows=st.one_of(
            st.lists(st.integers(-3, 40), max_size=4),
            st.slices(40),
            st.sampled_from((None, "a", [1.5], [None], 3, True)),
        ),
    )
    def dequantize_rows(self, index: int, rows: Any) -> None:
        """`dequantize_rows(i)` is `dequantize()[i]`, or says why not."""
        t = self.take(index)
        if t is None:
            return
        got, error = attempt(lambda: t.dequantize_rows(rows), "dequantize_rows", (IndexError,))
        if error is not None:
            return
        expected = t.dequantize()[
            torch.tensor(rows, dtype=torch.int64) if (isinstance(rows, list)) else rows
        ]
        if not equal(got, expected):
            raise Wrong(f"dequantize_rows: {rows} of {t!r}: not the rows of dequantize()")

    @fuzz(first=indices(), second=indices(), dim=st.integers(-3, 3))
    def cat(self, first: int, second: int, dim: int) -> None:
        """Two tensors put together hold the values of both."""
        a, b = self.take(first), self.take(second)
        if a is None:
            return
        expected, refusal = torch.empty(0), None
        try:
            expected = torch.cat([a.dequantize(), b.dequantize()], dim)
        except _TORCH as error:
            refusal = error
        also = () if refusal is None else (type(refusal),)
        got, error = attempt(lambda: torch.cat([a, b], dim), "cat", also)
        if (error is None) != (refusal is None):
            raise Wrong(f"cat: plain tensors: {refusal!r}, quantized: {error!r}")
        if error is None:
            check_values(got, expected, f"cat of {a!r} and {b!r} along {dim}")
            self.keep(got, "cat")
