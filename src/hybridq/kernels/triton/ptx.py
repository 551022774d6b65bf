"""PTX that decodes two codes to BF16, from an element's numbers.

Triton handles bytes one at a time and multiplies BF16 one at a time; here the two codes of a byte
or of a 16-bit word share a register, three to four instructions per code. A code's sign, exponent
and mantissa are moved to where BF16 has them, which gives the value times a power of two, and one
`fma.rn.bf16x2` with an addend of -0 (that keeps the sign of zero, and keeps subnormals) takes that
power back, exactly. It exists from sm_80 on; `mul.bf16x2` only from sm_90.

A special code is found by adding one unit to the mantissa (or the exponent): only from there does a
carry run past the exponent field, and the carry fills the rest of BF16's exponent with ones.

Source: PTX ISA, prmt, fma; the bit tricks are ours.
"""

from __future__ import annotations

from typing import Final

from ...formats import Element

__all__ = ["SCALE", "decode_asm"]

_SIGNS: Final = 0x80008000
#: `$0 = $1 * $2` for a pair of BF16.
SCALE: Final = f"""{{
.reg .b32 zero;
mov.b32 zero, {_SIGNS:#x};
fma.rn.bf16x2 $0, $1, $2, zero;
}}"""


def _pair(half: int) -> int:
    return half << 16 | half


def decode_asm(element: Element) -> str:
    """Return PTX that decodes `$2`, two codes, to BF16: `$0` the one in the lower bits, `$1`.

    Args:
        element: a signed element with a mantissa, of 4 to 8 bits. Elements of 4 bits lie in a byte,
            others in the bytes of a 16-bit word; bits of `$2` above that are zeros or ignored.
    """
    magnitude = (1 << (element.bits - 1)) - 1
    low = 7 - element.mantissa_bits  # where BF16 has the magnitude's lowest bit
    magnitudes = _pair(magnitude << low)
    lines = [
        "{",
        ".reg .b32 sign, rest, carry, power, zero;",
        f"mov.b32 power, {_pair((254 - element.bias) << 7):#x};",
        f"mov.b32 zero, {_SIGNS:#x};",
    ]
    if element.codes_per_byte == 2:
        # One product shifts both codes, each into its half.
        spread = 1 | 1 << (16 - element.bits)
        lines += [
            f"mul.lo.u32 sign, $2, {spread << (16 - element.bits):#x};",
            f"mul.lo.u32 rest, $2, {spread << low:#x};",
        ]
    else:
        # Each byte to the top of its half; what is shifted beyond a half is masked.
        lines += [
            "prmt.b32 sign, $2, 0, 0x1404;",
            f"shr.u32 rest, sign, {8 - low};",
            f"shl.b32 sign, sign, {8 - element.bits};",
        ]
    lines += [f"and.b32 sign, sign, {_SIGNS:#x};", f"and.b32 rest, rest, {magnitudes:#x};"]
    if element.specials != "none":
        unit = 7 if element.specials == "ieee" else low
        top = 7 + element.exponent_bits
        lines += [
            f"add.u32 carry, rest, {_pair(1 << unit):#x};",
            f"and.b32 carry, carry, {_pair(1 << top):#x};",
            f"mad.lo.u32 rest, carry, {(1 << (15 - top)) - 1}, rest;",
        ]
    lines += [
        "or.b32 rest, rest, sign;",
        "fma.rn.bf16x2 rest, rest, power, zero;",
        "mov.b32 {$0, $1}, rest;",
        "}",
    ]
    return "\n".join(lines)
