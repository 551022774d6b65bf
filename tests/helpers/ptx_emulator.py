"""Runs the few PTX instructions of `hybridq.kernels.triton.ptx` on arrays of registers.

Source: PTX ISA 8.5, sections 9.7.1 (integer), 9.7.4 (half precision: fma), 9.7.8 (logic, prmt).
"""

from __future__ import annotations

import re

import numpy as np


def _bf16_to_fp64(bits: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # signaling NaNs
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def _nearest_bf16(values: np.ndarray) -> np.ndarray:
    """Round FP64 to BF16 bits, to nearest even; a NaN becomes the canonical one, 0x7fff."""
    _, exponent = np.frexp(values)
    unit = np.ldexp(1.0, np.maximum(exponent - 8, -133))
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = np.rint(values / unit) * unit
        narrow = rounded.astype(np.float32)  # exact, or beyond the range: infinity
    bits = (narrow.view(np.uint32) >> 16).astype(np.uint32)
    return np.where(np.isnan(values), 0x7FFF, bits)


def _fma_bf16x2(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """`a * b + c` of both halves: exact in FP64 where c is a zero, then rounded once."""
    halves = []
    for shift in (0, 16):
        x, y, z = (_bf16_to_fp64(v >> np.uint32(shift) & np.uint32(0xFFFF)) for v in (a, b, c))
        assert (z == 0).all()
        with np.errstate(invalid="ignore"):
            halves.append(_nearest_bf16(x * y + z))
    return (halves[0] | halves[1] << np.uint32(16)).astype(np.uint32)


def _permute(a: np.ndarray, b: np.ndarray, selector: int) -> np.ndarray:
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    out = np.zeros_like(a)
    for i in range(4):
        pick = selector >> 4 * i & 15
        assert pick < 8  # sign replication is not used
        out |= (both >> np.uint64(8 * pick) & np.uint64(255)).astype(np.uint32) << np.uint32(8 * i)
    return out


def run(text: str, **registers: np.ndarray) -> dict[str, np.ndarray]:
    """Return all registers after running `text`.

    Args:
        text: one block in braces, one instruction per line.
        registers: uint32 arrays of one shape; `r0` stands for `$0`, and so on.
    """
    shape = next(iter(registers.values())).shape
    values = {f"${name[1:]}": register.astype(np.uint32) for name, register in registers.items()}

    def get(word: str) -> np.ndarray:
        if re.match(r"^(0x)?[0-9a-f]+$", word) and word[0].isdigit():
            return np.full(shape, int(word, 0), dtype=np.uint32)
        return values[word]

    for line in text.strip().removeprefix("{").removesuffix("}").strip().splitlines():
        name, _, rest = line.strip().removesuffix(";").partition(" ")
        if name == ".reg":
            continue
        if name == "mov.b32" and rest.startswith("{"):
            low, high, source = re.findall(r"[$\w]+", rest)
            values[low] = get(source) & np.uint32(0xFFFF)
            values[high] = get(source) >> np.uint32(16)
            continue
        target, *words = (word.strip() for word in rest.split(","))
        args = [get(word) for word in words]
        if name == "prmt.b32":
            values[target] = _permute(args[0], args[1], int(words[2], 0))
            continue
        values[target] = {
            "mov.b32": lambda a: a,
            "and.b32": lambda a, b: a & b,
            "or.b32": lambda a, b: a | b,
            "add.u32": lambda a, b: a + b,
            "shl.b32": lambda a, b: a << b,
            "shr.u32": lambda a, b: a >> b,
            "mul.lo.u32": lambda a, b: a * b,
            "mad.lo.u32": lambda a, b, c: a * b + c,
            "fma.rn.bf16x2": _fma_bf16x2,
        }[name](*args)
    return values
