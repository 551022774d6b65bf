"""PlaneSpec: all that encode, decode and GEMM must know of a plane."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar, Final, NamedTuple

import torch

from ..errors import SpecError, must_be_one_of
from .base import BufferSpec, Format
from .elements import FP32
from .identity import IDENTITY_BF16, IDENTITY_FP16, IDENTITY_FP32
from .registry import format as named_format
from .registry import name_of

__all__ = ["DEFAULT_SIGNS", "ERRORS", "HADAMARD_SIZE", "PlaneSpec", "PlaneText"]

#: Points of one Hadamard transform, along the contraction axis.
HADAMARD_SIZE: Final = 16
#: Bit i set: point i is multiplied by -1. The fixed random signs of docs/reference/numerics.md.
DEFAULT_SIGNS: Final = 0xD7E8
#: Significant bits of BF16.
_BF16_BITS: Final = 8
#: More rows and columns than a matrix has: a codec's plane is never cut.
_WHOLE: Final = 1 << 40
#: What four-over-six may minimize: the mean absolute or the mean squared error.
ERRORS: Final = ("mae", "mse")
#: How scales may lie, or be read, where not as in a plane of its own.
LAYOUTS: Final = ("down", "tiles", "factors")


class PlaneText(NamedTuple):
    """A PlaneSpec as code that torch compiles may hold it: nothing but a text, numbers and facts.

    Attributes:
        spec: canonical string.
        num_buffers: how many buffers such a plane has.
        is_plain: the plane is the tensor itself: no format, no change of dtype.
        needs_amax: encoding needs the amax of the whole tensor (not of each row).
        is_transformed: values are transformed before they are encoded.
        row_scaled: every row of the plane has a statistic of its own.
        blocks: rows and columns of a block of the plane's own matrix.
        units: rows and columns that share a block, a byte or a transform: see `PlaneSpec.unit`.
        codes_per_byte: along a row.
        cut_problem: why a block that is cut cannot be encoded in parts, or empty.
        is_stochastic: codes are rounded stochastically, by random bits of their places.
        is_derivable: a columnwise plane is exactly the rowwise one transposed.
    """

    spec: str
    num_buffers: int
    is_plain: bool
    needs_amax: bool
    is_transformed: bool
    row_scaled: bool = False
    blocks: tuple[int, int] = (1, 1)
    units: tuple[int, int] = (1, 1)
    codes_per_byte: int = 1
    cut_problem: str = ""
    is_stochastic: bool = False
    is_derivable: bool = False


@dataclass(frozen=True)
class PlaneSpec:
    """Format + rounding + transform and its signs + tensor bound, with a canonical string.

    Args:
        format: the format.
        stochastic: round codes stochastically instead of to nearest even.
        signs: None, or the 16 sign bits of a random Hadamard transform that is applied along
            the contraction axis before quantizing.
        tensor_bound: rule `two_level`: the largest block scale, 448 or 256.
        four_over_six: NVFP4: `"mae"` or `"mse"`: of two scales, which map a block's amax to 6 and
            to 4, each block takes the one with the smaller sum of absolute or squared errors.
        row_scaled: rule `two_level` with 1xN blocks: one FP32 amax per row of the plane instead
            of one per tensor.
        scale_layout: how the scales lie, which changes no value: `""`, those of a row beside each
            other; `"down"`, those of a group of columns beside each other, as cuBLASLt reads FP32
            scales of 1x128; `"tiles"`, one-byte scales in tiles of 128 rows by 4 blocks, padded
            with zeros, in one dimension, as Blackwell reads them: of squares, that of each row;
            `"factors"`, as they were, one FP32 scale for each row, which a product applies to its
            result (`by_row`). For planes that one product alone reads.

    Raises:
        SpecError: an option does not go with the format or with another option.

    Source: ours; `four_over_six`: arXiv:2512.02010; docs/reference/numerics.md.
    """

    format: Format
    stochastic: bool = False
    signs: int | None = None
    tensor_bound: float = 448.0
    four_over_six: str | None = None
    row_scaled: bool = False
    scale_layout: str = ""
    # Of each spec; ClassVar keeps it from being a field. Made with the spec, not at its first use,
    # since torch.compile cannot trace the lock that cached_property takes before Python 3.12.
    _text: ClassVar[str]

    def __post_init__(self) -> None:
        self._check_types()
        if self.format.is_identity and (self.stochastic or self.signs is not None):
            raise SpecError("PlaneSpec: an identity plane takes no rounding mode and no transform")
        if self.format.is_python and (self.stochastic or self.signs is not None):
            raise SpecError(
                "PlaneSpec: a codec's plane takes no rounding mode and no transform; its own "
                "encode may do both"
            )
        if self.signs is not None and not 0 <= self.signs < 1 << HADAMARD_SIZE:
            raise SpecError(f"PlaneSpec: signs must be 16 bits, got {self.signs}")
        if self.signs is not None and (self.format.block or (1, 1))[0] != 1:
            raise SpecError(
                "PlaneSpec: a transform goes with 1xN blocks or one scale per tensor, got "
                f"block {self.format.block}"
            )
        if self.four_over_six is not None:
            self._check_four_over_six(self.four_over_six)
        if self.tensor_bound not in (448.0, 256.0):
            raise SpecError(f"PlaneSpec: tensor_bound must be 448 or 256, got {self.tensor_bound}")
        if self.tensor_bound != 448.0 and self.format.rule != "two_level":
            raise SpecError(
                f"PlaneSpec: tensor_bound belongs to rule two_level, got {self.format.rule!r}"
            )
        if self.row_scaled and (self.format.rule != "two_level" or self.format.is_square):
            raise SpecError(
                "PlaneSpec: row_scaled goes with rule two_level and 1xN blocks, got "
                f"{self.format.rule!r} and block {self.format.block}"
            )
        if self.scale_layout:
            self._check_scale_layout()
        object.__setattr__(self, "_text", self._canonical_text())

    def _check_types(self) -> None:
        if not isinstance(self.format, Format):
            raise SpecError(
                f"PlaneSpec: takes a Format (see PlaneSpec.parse for strings), got {self.format!r}"
            )
        for name in ("stochastic", "row_scaled"):
            if not isinstance(getattr(self, name), bool):
                raise SpecError(f"PlaneSpec: {name} must be a bool, got {getattr(self, name)!r}")
        if self.signs is not None and type(self.signs) is not int:
            raise SpecError(f"PlaneSpec: signs must be 16 bits, got {self.signs!r}")

    def _check_scale_layout(self) -> None:
        if self.scale_layout not in LAYOUTS:
            text = must_be_one_of(LAYOUTS, self.scale_layout)
            raise SpecError(f"PlaneSpec: scale_layout {text}")
        block, scale = self.format.block, self.format.scale
        is_right = scale is not None and (scale == FP32) == (self.scale_layout != "tiles")
        is_square = block is not None and block[0] == block[1] and self.scale_layout == "tiles"
        if block is None or not (block[0] == 1 or is_square) or not is_right:
            raise SpecError(
                "PlaneSpec: scale_layout goes with 1xN blocks, 'down' and 'factors' with FP32 "
                "scales and 'tiles' with one-byte ones, of squares too, got "
                f"{self.scale_layout!r} and {self.format}"
            )
        if self.has_scales_as_factors and not self._can_be_by_row:
            raise SpecError(
                "PlaneSpec: scales that are factors go with rule amax, rounded to nearest and not "
                f"transformed, got {self.format}, stochastic={self.stochastic}, signs={self.signs}"
            )

    def _check_four_over_six(self, error: str) -> None:
        fmt = self.format
        if error not in ERRORS:
            raise SpecError(f"PlaneSpec: four_over_six must be mae or mse, got {error!r}")
        if fmt.rule != "two_level" or fmt.element is None or fmt.element.name != "e2m1":
            raise SpecError(
                "PlaneSpec: four_over_six goes with rule two_level and element e2m1, got "
                f"{fmt.rule!r} and {fmt.element}"
            )
        if self.stochastic or self.signs is not None:
            raise SpecError(
                "PlaneSpec: four_over_six compares rounding errors, so it goes neither with "
                f"stochastic rounding nor with a transform, got {fmt} with "
                f"stochastic={self.stochastic}, signs={self.signs}"
            )
        side = fmt.block[0] if fmt.block is not None else 1
        if side & (side - 1):
            raise SpecError(
                "PlaneSpec: four_over_six adds the rows of a square as a binary tree: its side "
                f"must be a power of two, got {fmt.block}"
            )

    def _canonical_text(self) -> str:
        parts = [str(self.format)]
        if self.stochastic:
            parts.append("sr")
        if self.signs is not None:
            parts.append(f"rht={self.signs:04x}")
        if self.tensor_bound != 448.0:
            parts.append(f"bound={self.tensor_bound:g}")
        if self.four_over_six is not None:
            parts.append(f"4o6={self.four_over_six}")
        if self.row_scaled:
            parts.append("rows")
        if self.scale_layout:
            parts.append(f"scales={self.scale_layout}")
        return ";".join(parts)

    @property
    def text(self) -> str:
        """The canonical string that operations take; `parse` inverts it."""
        return self._text

    def __str__(self) -> str:
        return self.text

    def __hash__(self) -> int:
        return hash(self._text)  # specs are looked up on every call; a text keeps its hash

    def plain_text(self, dtype: torch.dtype | None = None) -> PlaneText:
        """Return the spec as a PlaneText.

        Args:
            dtype: of the tensors that will be encoded; None where it is not known.
        """
        element = self.format.element
        same = element is None or (dtype is not None and element.torch_dtype == dtype)
        return PlaneText(
            self.text,
            len(self.buffers(1, 1)),
            self.format.is_identity and same,
            self.needs_tensor_amax,
            self.signs is not None,
            self.row_scaled,
            self.format.block or (1, 1),
            (self.unit(0), self.unit(1)),
            1 if element is None else element.codes_per_byte,
            self.cut_problem or "",
            self.stochastic,
            self.is_derivable,
        )

    @property
    def short_text(self) -> str:
        """The shortest string that `parse` takes: the format's name instead of its record."""
        name = name_of(self.format)
        if name is None:
            return self._text
        _, *options = self._text.split(";")
        default = f"rht={DEFAULT_SIGNS:04x}"
        return ";".join((name, *("rht" if one == default else one for one in options)))

    @staticmethod
    def is_text(which: object) -> bool:
        """Return whether `which` is a string with fields or options, and so no format's name.

        Args:
            which: what `parse` may be given, or anything else.
        """
        return isinstance(which, str) and (";" in which or "/" in which)

    @staticmethod
    def parse(text: str) -> PlaneSpec:
        """Return the PlaneSpec whose canonical string, or format name, is `text`.

        A name may have options behind it, as in the canonical string: `"nvfp4;sr;rht"` rounds
        stochastically after the transform. `rht` alone takes `DEFAULT_SIGNS`.

        Raises:
            SpecError: the string is malformed.
        """
        if not isinstance(text, str):
            raise SpecError(f"PlaneSpec.parse: takes a text, got {type(text).__name__}")
        return _parse(text)

    @property
    def needs_amax(self) -> bool:
        """Whether encoding needs a statistic first: the amax of the tensor, or of every row."""
        return self.format.needs_tensor_amax

    @property
    def needs_amax_inside(self) -> bool:
        """Whether a kernel needs an amax, of the tensor or of rows, which a plane may not keep."""
        return self.needs_amax or self.has_scales_as_factors

    @property
    def needs_tensor_amax(self) -> bool:
        """Whether encoding needs the amax of the whole tensor first."""
        return self.needs_amax and not self.row_scaled

    @property
    def cut_problem(self) -> str | None:
        """Why a block that lies on two ranks cannot be encoded by each of them, or None."""
        if self.format.is_python:
            return "a codec is given whole matrices"
        if self.signs is not None:
            return "a Hadamard transform mixes values of two ranks"
        if self.four_over_six is not None:
            return "four-over-six compares errors of values of two ranks"
        return None

    @property
    def has_scales_as_factors(self) -> bool:
        """Whether a row has one scale, which is its factor (`by_row`)."""
        return self.scale_layout == "factors"

    @property
    def has_row_factors(self) -> bool:
        """Whether every row of the plane has a factor that a product applies to its result."""
        return self.row_scaled or self.has_scales_as_factors

    @property
    def is_bf16_exact(self) -> bool:
        """Whether BF16 holds every operand of such planes, whose factors are left out of it."""
        fmt = self.format
        if self.has_scales_as_factors and fmt.element is not None:
            return fmt.element.significant_bits <= _BF16_BITS
        return fmt.is_bf16_exact

    @property
    def _can_be_by_row(self) -> bool:
        fmt = self.format
        is_amax = fmt.rule == "amax" and fmt.scale == FP32 and fmt.element is not None
        has_rows = fmt.block is not None and fmt.block[0] == 1
        return is_amax and has_rows and not self.stochastic and self.signs is None

    def by_row(self, cols: int) -> PlaneSpec:
        """Return the spec under which a block's scale is its row's factor; itself if it is not.

        A block that is as wide as the matrix has the scale of a whole row: multiplied with the
        result of a product instead, it leaves the codes, which BF16 holds.

        Args:
            cols: of the plane's own matrix.
        """
        block = self.format.block
        if block is None or block[0] != 1 or cols > block[1] or self.scale_layout:
            return self
        return _by_row(self)

    def stat_shape(self, rows: int) -> tuple[int]:
        """Return the shape of the statistic of a plane of `rows` rows: `[rows]` or `[1]`."""
        return (rows,) if self.row_scaled else (1,)

    @property
    def is_derivable(self) -> bool:
        """Whether a columnwise plane of this spec is exactly the rowwise one transposed."""
        is_plain = self.signs is None and not self.stochastic
        return self.format.is_square and is_plain and self.scale_layout != "tiles"

    def unit(self, axis: int) -> int:
        """Return how many rows (axis 0) or columns (axis 1) share a block, a byte or a transform.

        A plane may be cut, and made in parts, at multiples of it.

        Args:
            axis: of the plane's own matrix.
        """
        block = self.format.block or (1, 1)
        if self.format.is_python:
            return _WHOLE
        if axis == 0:
            return block[0]
        element = self.format.element
        per_byte = element.codes_per_byte if element is not None else 1
        return math.lcm(block[1], per_byte, 1 if self.signs is None else HADAMARD_SIZE)

    def padded(self, cols: int) -> int:
        """Return the number of codes per row for `cols` values: a transform fills its groups."""
        if self.signs is None:
            return cols
        return -(-cols // HADAMARD_SIZE) * HADAMARD_SIZE

    def buffers(self, rows: int, cols: int) -> tuple[BufferSpec, ...]:
        """Return the buffers of a plane whose own matrix is `[rows, cols]`."""
        # A symbolic size has no hash, and dynamo knows no cache.
        is_plain = type(rows) is int and type(cols) is int
        if is_plain and not torch.compiler.is_compiling():
            return _buffers(self, rows, cols)
        return self._make_buffers(rows, cols)

    def nbytes(self, rows: int, cols: int) -> int:
        """Return the bytes of a plane whose own matrix is `[rows, cols]`.

        An identity format whose dtype is open counts as BF16.
        """
        buffers = self.buffers(rows, cols)
        return sum(b.numel * (b.dtype or torch.bfloat16).itemsize for b in buffers)

    def _make_buffers(self, rows: int, cols: int) -> tuple[BufferSpec, ...]:
        made = self.format.buffers(rows, self.padded(cols))
        block = self.format.block
        if self.has_scales_as_factors and block is not None and cols > block[1]:
            raise SpecError(
                "PlaneSpec: scales that are factors serve whole rows, so blocks must be as wide as "
                f"the matrix, got {block} and {cols} columns ({self.format})"
            )
        if self.scale_layout == "tiles":
            # A square's scale is that of each of its rows.
            size = -(-rows // 128) * -(-made[1].shape[1] // 4) * 512
            made = (made[0], replace(made[1], shape=(size,)), *made[2:])
        if not self.row_scaled:
            return made
        return (*made[:-1], replace(made[-1], shape=self.stat_shape(rows)))

    def resolve(self, dtype: torch.dtype) -> PlaneSpec:
        """Return the spec with an identity format's open dtype fixed to `dtype`.

        Raises:
            SpecError: an open dtype cannot be fixed to this one.
        """
        if not self.format.is_identity or self.format.element is not None:
            return self
        if dtype not in _PLAIN:
            raise SpecError(
                f"PlaneSpec.resolve: dtype must be float32, bfloat16 or float16, got {dtype}"
            )
        return _PLAIN[dtype]

    @staticmethod
    def plain(dtype: torch.dtype) -> PlaneSpec:
        """Return the spec of a plane that holds values of `dtype` as they are.

        Raises:
            SpecError: the dtype is not float32, bfloat16 or float16.
        """
        if dtype not in _PLAIN:
            raise SpecError(
                f"PlaneSpec.plain: dtype must be float32, bfloat16 or float16, got {dtype}"
            )
        return _PLAIN[dtype]


#: An identity plane takes no options, so there is one spec per dtype. Made once: torch.compile
#: cannot trace the making of a spec.
_PLAIN: Final = {
    torch.bfloat16: PlaneSpec(IDENTITY_BF16),
    torch.float16: PlaneSpec(IDENTITY_FP16),
    torch.float32: PlaneSpec(IDENTITY_FP32),
}


@lru_cache(maxsize=1024)
def _by_row(spec: PlaneSpec) -> PlaneSpec:
    return replace(spec, scale_layout="factors") if spec._can_be_by_row else spec


@lru_cache(maxsize=4096)
def _buffers(spec: PlaneSpec, rows: int, cols: int) -> tuple[BufferSpec, ...]:
    return spec._make_buffers(rows, cols)


@lru_cache(maxsize=4096)
def _parse(text: str) -> PlaneSpec:
    head, *options = text.split(";")
    stochastic, signs, bound, four_over_six, row_scaled = False, None, 448.0, None, False
    layout = ""
    for option in options:
        key, _, value = option.partition("=")
        try:
            if option == "sr":
                stochastic = True
            elif option == "rht":
                signs = DEFAULT_SIGNS
            elif key == "rht":
                signs = int(value, 16)
            elif key == "bound":
                bound = float(value)
            elif key == "4o6":
                four_over_six = value
            elif option == "rows":
                row_scaled = True
            elif key == "scales":
                layout = value
            else:
                raise ValueError(option)
        except ValueError as error:
            raise SpecError(f"PlaneSpec.parse: unknown option {option!r} in {text!r}") from error
    fmt = Format.parse(head) if "/" in head else named_format(head)
    return PlaneSpec(fmt, stochastic, signs, bound, four_over_six, row_scaled, layout)
