"""What the functions of somebody else's backend return, held to the table of operations.

hybridq's own are held to it by tests. Of others a result of another shape or dtype would go on into
products and losses, where nobody could say whose it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...formats import PlaneSpec
from .arguments import GemmArgs, Operand

__all__ = ["with_checked_results"]

_Want = tuple[tuple[int, ...], torch.dtype | None]


def with_checked_results(
    name: str, supports: Callable[..., Any], ops: Mapping[str, Callable[..., Any]]
) -> dict[str, Callable[..., Any]]:
    """Return a backend's functions, whose results are checked; those of hybridq's own as they are.

    Args:
        name: of the backend.
        supports: its own, by whose module it is known for hybridq's.
        ops: operation to function.
    """
    module = getattr(supports, "__module__", None) or ""  # None in code that exec runs
    if module.partition(".")[0] == __name__.partition(".")[0]:
        return dict(ops)
    own = {op: one._own if isinstance(one, _Checked) else one for op, one in ops.items()}
    return {
        op: _Checked(name, op, function) if op in _WANTED else function
        for op, function in own.items()
    }


class _Checked:
    """A function whose result is checked; equal to the function, and has its attributes."""

    def __init__(self, backend: str, op: str, own: Callable[..., Any]) -> None:
        self._where = f"backend {backend!r}: its {op} must return"
        self._op, self._own = op, own

    def __call__(self, *args: Any, **more: Any) -> Any:
        made = self._own(*args, **more)
        wanted = _WANTED[self._op](*args, **more)
        if isinstance(wanted, list):
            self._check_all(made, wanted)
        else:
            self._check(made, wanted)
        return made

    def _check(self, made: object, wanted: _Want) -> None:
        text = f"{self._where} a tensor {_text(*wanted)}"
        if not isinstance(made, torch.Tensor):
            raise TypeError(f"{text}, got {type(made).__name__}")
        shape, dtype = wanted
        if tuple(made.shape) != shape or dtype not in (None, made.dtype):
            raise ValueError(f"{text}, got {_text(tuple(made.shape), made.dtype)}")

    def _check_all(self, made: object, wanted: Sequence[_Want]) -> None:
        text = f"{self._where} the buffers {', '.join(_text(*one) for one in wanted)}"
        if not isinstance(made, list | tuple):
            raise TypeError(f"{text}, got {type(made).__name__}")
        got = ", ".join(
            _text(tuple(one.shape), one.dtype)
            if isinstance(one, torch.Tensor)
            else type(one).__name__
            for one in made
        )
        if len(made) != len(wanted):
            raise ValueError(f"{text}, got {got or 'none'}")
        for one, (shape, dtype) in zip(made, wanted, strict=True):
            if (
                not isinstance(one, torch.Tensor)
                or tuple(one.shape) != shape
                or dtype not in (None, one.dtype)
            ):
                raise ValueError(f"{text}, got {got}")

    def __eq__(self, other: object) -> bool:
        return bool(self._own == (other._own if isinstance(other, _Checked) else other))

    def __hash__(self) -> int:
        return hash(self._own)

    def __getattr__(self, name: str) -> Any:
        if name == "_own":  # a copy that is not filled yet
            raise AttributeError(name)
        return getattr(self._own, name)


def _text(shape: tuple[int, ...], dtype: torch.dtype | None) -> str:
    kind = "" if dtype is None else str(dtype).removeprefix("torch.")
    return f"{kind}{list(shape)}"


def _of_gemm(a: Operand, b: Operand, args: GemmArgs) -> _Want:
    return (a.rows, b.rows), args.out_dtype


def _of_decode(buffers: object, spec: PlaneSpec, rows: int, cols: int, dtype: torch.dtype) -> _Want:
    return (rows, cols), dtype


def _of_amax(x: torch.Tensor, spec: PlaneSpec) -> _Want:
    return tuple(spec.stat_shape(x.shape[0])), torch.float32


def _of_encode(
    x: torch.Tensor, row: PlaneSpec | None, col: PlaneSpec | None, request: object
) -> list[_Want]:
    rows, cols = x.shape
    planes = ((row, rows, cols), (col, cols, rows))
    return [
        (tuple(one.shape), None if spec.format.is_identity else one.dtype)
        for spec, height, width in planes
        if spec is not None
        for one in spec.resolve(x.dtype).buffers(height, width)
    ]


#: The operations that are checked: what each must return of its arguments.
_WANTED: Mapping[str, Callable[..., _Want | list[_Want]]] = {
    "gemm": _of_gemm,
    "decode": _of_decode,
    "amax": _of_amax,
    "encode": _of_encode,
}
