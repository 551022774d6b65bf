"""Format: element + block + scale + scale rule + packing + second-level scale, as data."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final

import torch

from ..errors import SpecError, must_be_one_of
from .codec import PYTHON, Held, checked_sizes, codec_of
from .elements import E4M3, E5M2, E8M0, ELEMENTS, FP32, Element

__all__ = ["BUFFER_NAMES", "RULES", "BufferSpec", "Format", "ScaleRule"]

#: Every name that a plane's buffer may have, in the order in which operations return them.
BUFFER_NAMES: Final = ("data", "scale", "amax")


@dataclass(frozen=True)
class BufferSpec:
    """Name, shape and dtype of one buffer of a plane.

    Args:
        name: one of `BUFFER_NAMES`.
        shape: unpadded.
        dtype: None: that of the encoded tensor.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class ScaleRule:
    """How a block's scale follows from its amax; the arithmetic is in `reference` and `csrc`.

    Args:
        name: key of `RULES` (see docs/reference/numerics.md).
        scale: name of the scales' element; None for identity.
        is_power_of_two: every scale that the rule makes is a power of two.
        needs_tensor_amax: block scales depend on the amax of the whole tensor, stored beside.
        summary: one line for tables.
        source: where the rule is specified.
    """

    name: str
    scale: str | None
    is_power_of_two: bool
    needs_tensor_amax: bool
    summary: str
    source: str


#: Values of a block, at most: edge blocks are padded to their size on the way.
_MAX_BLOCK: Final = 1 << 20

#: Values of a folded group, and of each of the blocks that it is made of.
_FOLDED: Final = 128
_UNFOLDED: Final = 32

_MX = "OCP MX v1.0 section 6.3"
_MX_MODES = "OCP MX v1.0 section 6.3 with another rounding; torchao, mx_formats"

#: Every scale rule by name.
RULES: dict[str, ScaleRule] = {
    rule.name: rule
    for rule in (
        ScaleRule("identity", None, True, False, "no scale", "ours"),
        ScaleRule("amax", "fp32", False, False, "fmax / amax in FP32", "Transformer Engine, FP8"),
        ScaleRule("rceil", "e8m0", True, False, "2^ceil(log2(amax / fmax))", "PTX ISA, cvt.rp"),
        ScaleRule("floor", "e8m0", True, False, "2^(floor(log2(amax)) - emax)", _MX),
        ScaleRule("ceil", "e8m0", True, False, "2^(ceil(log2(amax)) - emax)", _MX_MODES),
        ScaleRule("even", "e8m0", True, False, "floor, of amax rounded like a code", _MX_MODES),
        ScaleRule("two_level", "e4m3", False, True, "E4M3 block scale times FP32 scale", "NVFP4"),
        ScaleRule("folded", "fp32", True, False, "the largest of four rceil scales", "ours"),
    )
}


@dataclass(frozen=True)
class Format:
    """A quantization format; a plane is encoded in one. All derived values are properties.

    Args:
        element: what the codes are; None (identity only) keeps the tensor's own dtype.
        block: `(block_rows, block_cols)` of one scale, or None for one scale per tensor.
        scale: element of the scales: E8M0, E4M3 or FP32; None for identity.
        rule: name of the scale rule, a key of `RULES`; or `"python"`: a Codec does all of it.
        family: what users call it, e.g. `"mxfp8"`; the marker classes are chosen by it. Of a codec
            its name.
        power_of_two: rule `amax` only: round the scale down to a power of two.
        eps: rule `amax` only: lower bound of amax.

    Raises:
        SpecError: the fields contradict each other.

    Source: ours; the formats' own sources are in their modules.
    """

    element: Element | None
    block: tuple[int, int] | None
    scale: Element | None
    rule: str
    family: str
    power_of_two: bool = False
    eps: float = 0.0

    def __post_init__(self) -> None:
        self._check_types()
        if self.is_python:
            given = (self.element, self.block, self.scale, self.power_of_two, self.eps)
            if given != (None, None, None, False, 0.0):
                raise SpecError(f"Format: a codec's format has nothing but its name, got {given}")
            object.__setattr__(self, "_held", Held(codec_of(self.family)))
            return
        if self.rule not in RULES:
            raise SpecError(f"Format: rule {must_be_one_of(RULES, self.rule)}")
        if self.is_identity:
            if self.block is not None or self.scale is not None or self.power_of_two or self.eps:
                raise SpecError("Format: an identity format has no block, no scale and no option")
            if self.element is not None and self.element.torch_dtype is None:
                raise SpecError(
                    f"Format: an identity element must be bf16, fp16 or fp32, got {self.element}"
                )
            return
        if self.element is None or self.scale is None:
            raise SpecError(f"Format: rule {self.rule!r} needs an element and a scale element")
        if self.element.bits > 8:
            raise SpecError(f"Format: codes have at most 8 bits, got {self.element}")
        if not self.element.has_sign or self.element.mantissa_bits == 0:
            raise SpecError(
                "Format: codes have a sign and a mantissa (without one there is no zero), got "
                f"{self.element!r}"
            )
        for part in (self.element, self.scale):
            if ELEMENTS.get(part.name) != part:
                raise SpecError(
                    f"Format: elements are known by name; call register_element first, got {part!r}"
                )
        wanted = RULES[self.rule].scale
        if self.scale.name != wanted:
            raise SpecError(f"Format: rule {self.rule!r} makes {wanted} scales, got {self.scale}")
        if self.block is None and self.rule != "amax":
            raise SpecError(f"Format: rule {self.rule!r} needs blocks, got block None")
        if self.block is not None and not (
            self.block[0] in (1, self.block[1]) and self.block[1] >= 1
        ):
            raise SpecError(f"Format: block must be (1, n) or (n, n), got {self.block}")
        if self.block is not None and self.block[0] * self.block[1] > _MAX_BLOCK:
            raise SpecError(f"Format: a block holds at most 2^20 values, got {self.block}")
        if self.rule == "folded" and not (
            self.block == (1, _FOLDED) and self.element in (E4M3, E5M2)
        ):
            raise SpecError(
                "Format: rule 'folded' goes with elements e4m3 and e5m2 and blocks of 1x128, got "
                f"{self.element} and block {self.block}"
            )
        if self.rule != "amax" and (self.power_of_two or self.eps):
            raise SpecError(f"Format: power_of_two and eps belong to rule amax, got {self.rule!r}")
        if not 0.0 <= self.eps <= FP32.max:
            raise SpecError(f"Format: eps must be finite in FP32 and not negative, got {self.eps}")

    def _check_types(self) -> None:
        for part in (self.element, self.scale):
            if part is not None and not isinstance(part, Element):
                raise SpecError(f"Format: takes Element records (see element), got {part!r}")
        if not isinstance(self.rule, str):
            raise SpecError(f"Format: rule must be a text, got {self.rule!r}")
        # The family stands in the canonical strings, between their separators.
        if not isinstance(self.family, str) or not re.fullmatch(r"[^/;|\n]*", self.family):
            raise SpecError(
                f"Format: family must be a string without / ; or |, got {self.family!r}"
            )
        block: object = self.block
        if block is not None and not (
            isinstance(block, tuple) and len(block) == 2 and all(type(n) is int for n in block)
        ):
            raise SpecError(f"Format: block must be (1, n) or (n, n), got {block!r}")
        is_number = isinstance(self.eps, int | float) and not isinstance(self.eps, bool)
        if not isinstance(self.power_of_two, bool) or not is_number:
            raise SpecError(
                "Format: power_of_two must be a bool and eps a number, got "
                f"{self.power_of_two!r} and {self.eps!r}"
            )
        # One string for one value: that of 1, 1.0 and a NumPy 1.0 would differ.
        object.__setattr__(self, "eps", float(self.eps))

    @property
    def is_identity(self) -> bool:
        """Whether values are stored as they are."""
        return self.rule == "identity"

    @property
    def is_python(self) -> bool:
        """Whether a Codec makes and reads the codes."""
        return self.rule == PYTHON

    @property
    def is_tensor_scaled(self) -> bool:
        """Whether one scale serves the whole tensor."""
        return self.block is None and not (self.is_identity or self.is_python)

    @property
    def needs_tensor_amax(self) -> bool:
        """Whether encoding needs the amax of the whole tensor first."""
        own = RULES.get(self.rule)
        return self.is_tensor_scaled or (own is not None and own.needs_tensor_amax)

    @property
    def is_square(self) -> bool:
        """Whether the transpose of an encoded matrix is the encoding of its transpose."""
        if self.is_python:
            return False
        return self.block is None or self.block[0] == self.block[1]

    @property
    def has_power_of_two_scales(self) -> bool:
        """Whether every block scale is a power of two."""
        own = RULES.get(self.rule)
        return self.power_of_two or (own is not None and own.is_power_of_two)

    @property
    def folded(self) -> Format | None:
        """What `reference.fold_plane` makes of a plane of this format, as a format to encode in.

        None where there is none: it is there for FP8 with 1x32 scales by rule `rceil`.
        """
        is_mx = self.block == (1, _UNFOLDED) and self.rule == "rceil"
        if not is_mx or self.element not in (E4M3, E5M2):
            return None
        return Format(self.element, (1, _FOLDED), FP32, "folded", "float8_block")

    @property
    def unfolded(self) -> Format | None:
        """The format whose planes are folded to planes of this one; None where nothing is."""
        if self.rule != "folded":
            return None
        return Format(self.element, (1, _UNFOLDED), E8M0, "rceil", "mxfp8")

    @property
    def is_bf16_exact(self) -> bool:
        """Whether `code * block scale` has at most BF16's eight significant bits, always."""
        if self.is_identity:
            return self.element is not None and self.element.name == "bf16"
        if self.element is None or self.scale is None:
            return False
        bits = self.element.significant_bits
        if not (self.is_tensor_scaled or self.has_power_of_two_scales):
            # A product of p and q significant bits has at most p + q of them. The scale of a
            # whole tensor does not count: it is applied to the GEMM's result.
            bits += self.scale.significant_bits
        return bits <= 8

    @property
    def storage_dtype(self) -> torch.dtype | None:
        """dtype of the `data` buffer: uint8 for codes; None where the tensor decides."""
        if self.is_identity:
            return self.element.torch_dtype if self.element else None
        return torch.uint8

    def buffers(self, rows: int, cols: int) -> tuple[BufferSpec, ...]:
        """Return the buffers of a plane whose own matrix is `[rows, cols]`, in order.

        Args:
            rows: rows of the plane's matrix (of X transposed for a columnwise plane).
            cols: its columns, the axis along which blocks run; already padded by a transform.
        """
        if self.is_python:
            sizes = checked_sizes(codec_of(self.family), rows, cols)
            named = zip(BUFFER_NAMES, sizes, strict=False)
            return tuple(BufferSpec(name, *size) for name, size in named)
        if self.is_identity:
            return (BufferSpec("data", (rows, cols), self.storage_dtype),)
        per_byte = self.element.codes_per_byte if self.element else 1
        data = BufferSpec("data", (rows, -(-cols // per_byte)), torch.uint8)
        scale_dtype = torch.float32 if self.scale == FP32 else torch.uint8
        if self.block is None:
            shape: tuple[int, ...] = (1,)
        else:
            shape = (-(-rows // self.block[0]), -(-cols // self.block[1]))
        scale = BufferSpec("scale", shape, scale_dtype)
        if RULES[self.rule].needs_tensor_amax:
            return (data, scale, BufferSpec("amax", (1,), torch.float32))
        return (data, scale)

    def bits_per_value(self) -> float:
        """Return the average storage of one value in bits, block scales included."""
        if self.is_identity:
            return float(self.element.bits if self.element else 32)
        if self.is_python:
            side = 1024
            made = self.buffers(side, side)
            nbytes = sum(one.numel * (one.dtype or torch.float32).itemsize for one in made)
            return 8.0 * nbytes / side**2
        bits = float(8 // self.element.codes_per_byte) if self.element else 8.0
        if self.block is not None:
            bits += (32 if self.scale == FP32 else 8) / (self.block[0] * self.block[1])
        return bits

    def __str__(self) -> str:
        """Canonical string, e.g. `e4m3/1x32/e8m0/rceil`; `parse` inverts it."""
        if self.is_identity:
            return f"{self.element or 'same'}/identity/{self.family}"
        if self.is_python:
            return f"codec/{PYTHON}/{self.family}"
        block = "tensor" if self.block is None else f"{self.block[0]}x{self.block[1]}"
        text = f"{self.element}/{block}/{self.scale}/{self.rule}/{self.family}"
        if self.power_of_two:
            text += "/pow2"
        if self.eps:
            text += f"/eps={self.eps!r}"
        return text

    @staticmethod
    def parse(text: str) -> Format:
        """Return the Format whose canonical string is `text`.

        Raises:
            SpecError: the string is malformed or names an unknown element or rule.
        """
        if not isinstance(text, str):
            raise SpecError(f"Format.parse: takes a text, got {type(text).__name__}")
        try:
            parts = text.split("/")
            if parts[1] == "identity":
                own = None if parts[0] == "same" else ELEMENTS[parts[0]]
                return Format(own, None, None, "identity", parts[2])
            if parts[1] == PYTHON:
                return Format(None, None, None, PYTHON, parts[2])
            name, block, scale, rule, family, *options = parts
            power_of_two, eps = False, 0.0
            for option in options:
                if option == "pow2":
                    power_of_two = True
                elif option.startswith("eps="):
                    eps = float(option[4:])
                else:
                    raise ValueError(option)
            size = None
            if block != "tensor":
                block_rows, block_cols = block.split("x")
                size = (int(block_rows), int(block_cols))
            return Format(ELEMENTS[name], size, ELEMENTS[scale], rule, family, power_of_two, eps)
        except (IndexError, KeyError, ValueError) as error:
            if isinstance(error, SpecError):
                raise
            raise SpecError(
                f"Format.parse: not a format's canonical string, got {text!r}"
            ) from error
