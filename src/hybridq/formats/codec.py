"""Codec: a format whose codes are made and read by Python, for what no record can describe."""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch

from .._torch_private import without_modes
from ..errors import SpecError

__all__ = ["PYTHON", "Codec", "CodedMatrix", "Held", "codec_of", "known_codecs", "name_codec"]

#: The rule of a Format that is a codec's.
PYTHON: Final = "python"
#: A plane has so many buffers, at most.
_MOST: Final = 3
#: Rows and columns that blocks divide, whatever they are.
_MANY: Final = 1024


class CodedMatrix(NamedTuple):
    """An operand of a product: a plane's codes, and what reads them.

    Attributes:
        codec: that made the codes; None of another format's plane, which is decoded already.
        buffers: the codes; of another format one FP32 matrix.
        rows, cols: of the matrix; products contract over `cols`.
    """

    codec: Codec | None
    buffers: list[torch.Tensor]
    rows: int
    cols: int

    def values(self) -> torch.Tensor:
        """Return FP32 `[rows, cols]`, what the codes mean."""
        if self.codec is None:
            return self.buffers[0]
        if not self.rows * self.cols:
            return self.buffers[0].new_zeros((self.rows, self.cols), dtype=torch.float32)
        return self.codec.decode(self.buffers, self.rows, self.cols).to(torch.float32)


class Codec:
    """How one plane of a matrix is made, read and multiplied: the base of those written in Python.

    A plane is made by rows: its matrix is `[rows, cols]`, and products contract over `cols`. For a
    columnwise plane the matrix is the transpose of the tensor's, so a codec knows one direction.
    What it does must depend on nothing but its arguments; it is called outside of autograd, and
    not of what is empty, but for `buffers`.
    """

    def buffers(self, rows: int, cols: int) -> Sequence[tuple[Sequence[int], torch.dtype]]:
        """Return shape and dtype of each buffer of a plane, one to three.

        Args:
            rows, cols: of the matrix; symbolic while code is compiled, and 0 of what is empty.

        Returns:
            Where a class does not override it: those that `encode` makes of an FP32 matrix of ones
            on the CPU, made once for each size; of what is empty as many, empty ones. Compiled
            code is then of one size.
        """
        size = (int(rows), int(cols))
        known: Any = self.__dict__.setdefault("_sizes", {})
        if 0 in size:
            like = next(iter(known.values()), None) or self.buffers(1, 1)
            return [((0,) * len(shape), dtype) for shape, dtype in like]
        if size not in known:
            try:
                known[size] = self._made_of_ones(size)
            except Exception:
                if size != (1, 1):
                    raise
                # How many there are is asked so; a codec may take whole blocks alone.
                made = self._made_of_ones((_MANY, _MANY))
                known[size] = [((1,) * len(shape), dtype) for shape, dtype in made]
        return known[size]

    def _made_of_ones(self, size: tuple[int, int]) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype of what `encode` makes of ones."""
        with without_modes(), torch.no_grad():
            ones = torch.ones(size, dtype=torch.float32, device="cpu")
            made = made_tensors(self, "encode", self.encode(ones))
        return [(tuple(one.shape), one.dtype) for one in made]

    def encode(self, matrix: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the buffers of a plane.

        Args:
            matrix: `[rows, cols]` float32, bfloat16 or float16, any strides.

        Raises:
            NotImplementedError: a class does not override it.
        """
        raise NotImplementedError(f"{type(self).__name__}.encode: must be overridden")

    def decode(self, buffers: Sequence[torch.Tensor], rows: int, cols: int) -> torch.Tensor:
        """Return `[rows, cols]`, the values of a plane.

        Args:
            buffers: as `encode` made them.
            rows, cols: of the matrix.

        Raises:
            NotImplementedError: a class does not override it.
        """
        raise NotImplementedError(f"{type(self).__name__}.decode: must be overridden")

    #: `product(a, b)` of two CodedMatrix returns `a @ b.T`, `[a.rows, b.rows]`, without bias and
    #: accumulation, or None where it has no way of its own for these two. A class that has none
    #: has its planes decoded, and multiplied exactly.
    product: Any = None


def made_tensors(codec: Codec, method: str, made: object) -> list[torch.Tensor]:
    """Return what `encode` made as a list.

    Args:
        codec, method: whose result it is.
        made: it.

    Raises:
        TypeError: it is no list or tuple of tensors.
    """
    if isinstance(made, list | tuple) and all(isinstance(one, torch.Tensor) for one in made):
        return list(made)
    got = [type(one).__name__ for one in made] if isinstance(made, list | tuple) else ""
    raise TypeError(
        f"{type(codec).__name__}.{method}: must return a list of tensors, got "
        f"{got or type(made).__name__}"
    )


def checked_matrix(codec: Codec, method: str, made: object, rows: int, cols: int) -> torch.Tensor:
    """Return what `decode` or `product` made, held to the rule.

    Args:
        codec, method: whose result it is.
        made: it.
        rows, cols: of the matrix that it must be.

    Raises:
        TypeError: it is no tensor.
        ValueError: it has another shape.
    """
    where = f"{type(codec).__name__}.{method}: must return"
    if not isinstance(made, torch.Tensor):
        raise TypeError(f"{where} a tensor [{rows}, {cols}], got {type(made).__name__}")
    if tuple(made.shape) != (rows, cols):
        raise ValueError(f"{where} [{rows}, {cols}], got {list(made.shape)}")
    return made


@contextmanager
def unwritten(codec: Codec, method: str, given: Sequence[torch.Tensor]) -> Iterator[None]:
    """Raise where a codec writes into what it is given: that is the caller's own memory.

    Args:
        codec, method: who is given it.
        given: the tensors; of those of inference mode no write is seen.

    Raises:
        RuntimeError: one was written.
    """
    before = [None if one.is_inference() else one._version for one in given]
    yield
    after = [None if one.is_inference() else one._version for one in given]
    if before != after:
        raise RuntimeError(
            f"{type(codec).__name__}.{method}: must not write into its arguments, which are the "
            "caller's; take a copy first, x.clone()"
        )


class Held:
    """Keeps a codec alive for the Format that has it; a copy is the same, a file has none.

    Args:
        codec: any, or None.
    """

    __slots__ = ("codec",)

    def __init__(self, codec: Codec | None) -> None:
        self.codec = codec

    def __deepcopy__(self, memo: Any) -> Held:
        return self

    def __reduce__(self) -> Any:
        return Held, (None,)


_codecs: dict[str, Codec] = {}
#: Those that live as long as somebody holds them, or a Format of theirs.
_passing: weakref.WeakValueDictionary[str, Codec] = weakref.WeakValueDictionary()


def name_codec(name: str, codec: Codec, is_kept: bool = True) -> None:
    """Let `name` mean a codec in this process.

    Args:
        name: lower-case letters, digits, `_`, `-` and `.`.
        codec: an instance of a class that derives from Codec.
        is_kept: whether for the life of the process, or of the codec.

    Raises:
        SpecError: the name is another codec's, or is none that strings can hold; the codec lacks
            a method.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[a-z0-9_.-]+", name):
        raise SpecError(
            f"register_codec: name must be lower-case letters, digits, _, - and ., got {name!r}"
        )
    if not isinstance(codec, Codec):
        raise SpecError(f"register_codec: takes a Codec, got {type(codec).__name__}")
    for method in ("encode", "decode"):
        if getattr(type(codec), method) is getattr(Codec, method):
            raise SpecError(
                f"register_codec: {type(codec).__name__} must have {method}, which makes or reads "
                "its codes"
            )
    other = _codecs.get(name, _passing.get(name))
    if other is not None and other is not codec:
        raise SpecError(f"register_codec: the name {name!r} is taken")
    (_codecs if is_kept else _passing)[name] = codec


def codec_of(name: str) -> Codec:
    """Return the codec of this name.

    Args:
        name: as it was registered.

    Raises:
        SpecError: there is none in this process.
    """
    found = _codecs.get(name)
    if found is None:
        found = _passing.get(name)
    if found is None:
        raise SpecError(
            f"Format: a codec is known by name; call register_codec first, got {name!r}"
        )
    return found


def known_codecs() -> tuple[str, ...]:
    """Return the names of all codecs of this process."""
    return (*_codecs, *_passing)


def checked_sizes(codec: Codec, rows: int, cols: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Return what `codec.buffers` says, held to the rule.

    Args:
        codec: any.
        rows, cols: of the matrix.

    Raises:
        SpecError: there is no buffer, or more than three, or one is no shape and dtype; or other
            sizes have another number of them.
    """
    found = [(tuple(shape), dtype) for shape, dtype in codec.buffers(rows, cols)]
    if not 1 <= len(found) <= _MOST or not all(isinstance(one[1], torch.dtype) for one in found):
        raise SpecError(
            f"{type(codec).__name__}.buffers: must be one to {_MOST} of shape and dtype, got "
            f"{found}"
        )
    number = codec.__dict__.setdefault("_number", len(found))
    if number != len(found):
        raise SpecError(
            f"{type(codec).__name__}.buffers: must be as many for every size, got {len(found)} of "
            f"[{rows}, {cols}] and {number} before"
        )
    return found
