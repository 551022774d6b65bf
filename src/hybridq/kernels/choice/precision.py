"""How exact a GEMM has to be, and the figures behind the answer.

| name | meaning |
| --- | --- |
| `exact` | operands exact, products summed in FP32 |
| `fast` | may use FP8 and FP4 tensor cores, if their added error is below BF16's rounding |
| `auto` | the fastest of the two |

On a CPU all three are the exact path. The bound is the rounding of a BF16 result whatever the dtype
of the result: an FP32 gradient sum is no reason to leave the tensor cores, and a caller to whom it
is says `exact`.

Figures, relative to the result's RMS, for K = 4096 and normally distributed operands; each is
recomputed by `tests/kernels/choice/test_precision_error.py`, and none was measured on a chip yet:

- rounding of a BF16 result: 1.7e-3.
- FP8 tensor cores of Hopper: 1.3e-4 with partial sums added in FP32 every 128. Modelled, as
  published for this unit: the products of one instruction and the sum so far are aligned to the
  largest and cut at 13 fraction bits. Other chips are assumed to be no worse.
- folding an MX plane: 6.4e-7, and at most 2^-17.8 of a group's amax per E4M3 code.
"""

from __future__ import annotations

from typing import Final

from ...errors import must_be_one_of

__all__ = [
    "BF16_ROUNDING",
    "FOLD_LIMIT",
    "FOLD_RMS",
    "PRECISIONS",
    "TENSOR_CORE_RMS",
    "added_error",
    "check_precision",
]

#: Values of an argument `precision`; docs/reference/gemm.md says what each allows.
PRECISIONS: Final = ("auto", "exact", "fast")

#: RMS of rounding to BF16, relative to the RMS of what is rounded.
BF16_ROUNDING: Final = 1.7e-3
#: RMS error of Hopper's FP8 tensor cores with promotion every 128, relative; modelled.
TENSOR_CORE_RMS: Final = 1.3e-4
#: RMS error that folding an MXFP8 plane adds to a product, relative.
FOLD_RMS: Final = 6.4e-7
#: Largest error of a folded E4M3 code as a share of its group's amax: 2^-10 / 224.
FOLD_LIMIT: Final = 2.0**-10 / 224


def check_precision(precision: str, where: str) -> str:
    """Return `precision`, or raise ValueError in the name of `where`."""
    if precision not in PRECISIONS:
        raise ValueError(f"{where}: precision {must_be_one_of(PRECISIONS, precision)}")
    return precision


def added_error(capability: tuple[int, int] | None, is_folded: bool) -> str:
    """Return what a product on FP8 or FP4 tensor cores adds to the exact one's error, in words.

    Args:
        capability: of the chip; the model is Hopper's, and taken for granted elsewhere.
        is_folded: an operand was folded.
    """
    whose = "modelled" if capability and capability[0] == 9 else "Hopper's model, assumed here"
    text = f"added error about {TENSOR_CORE_RMS:.1e} of the result's RMS ({whose})"
    if is_folded:
        text += f", of which folding {FOLD_RMS:.1e}"
    return f"{text}; rounding to BF16 is {BF16_ROUNDING:.1e}"
