"""Which chip multiplies what on FP8 and FP4 tensor cores, asked before a launch.

Torch would find out late: an MXFP8 product on Hopper fails inside cuBLASLt, and a grouped one in a
build without its kernels when it is called.

Source: torch, aten/src/ATen/native/cuda/ScaledBlas.cpp and GroupedBlas.cpp, and the conditions of
its own tests (torch/testing/_internal/common_cuda.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import torch

from ..choice import OpQuery, cached_choice, choose
from ..inputs import Chip

__all__ = [
    "ENOUGH_TOKENS",
    "GATES",
    "GROUPED_GATES",
    "KIND_NAMES",
    "Gate",
    "core_product",
    "exact_reason",
]

#: From so many tokens per group on, it pays to fold a stack in each call. Folding moves two bytes
#: of a code through memory, 2 / 4.3e12 s; a product with T tokens takes 2 T / 1.0e15 s of a code on
#: FP8 tensor cores and 2 T / 3.5e14 s with decoded operands. They meet at T = 125.
ENOUGH_TOKENS: Final = 128


@cached_choice
def core_product(op: str, chip: Chip) -> Callable[..., torch.Tensor] | None:
    """Return the core's own product of FP8 codes with scales of 1x128, where a chip has one.

    Args:
        op: `"multiply_blocks"` or `"multiply_pair"`.
        chip: where the operands are.
    """
    found = choose(OpQuery(op, chip.kind, torch.float32, chip=chip)).chosen
    return None if found is None else found.ops[op]


@dataclass(frozen=True)
class Gate:
    """Where a kind of scaling runs.

    Args:
        chips: whether a compute capability has it.
        what: those chips in words.
        cuda: lowest version of CUDA.
        needs_library: torch has it only if it was built with a library of kernels, MSLK.
    """

    chips: Callable[[tuple[int, int]], bool]
    what: str
    cuda: tuple[int, int]
    needs_library: bool = False

    def reason(self, kind: str, chip: Chip) -> str | None:
        """Return None if `chip` multiplies operands of this kind, else why not."""
        name = KIND_NAMES[kind]
        if chip.capability is None or not self.chips(chip.capability):
            return f"{name}: {self.what}, got {chip}"
        if chip.cuda is None or chip.cuda < self.cuda:
            wanted, got = (".".join(map(str, pair)) for pair in (self.cuda, chip.cuda or (0, 0)))
            return f"{name}: needs CUDA {wanted}, torch was built with {got}"
        if self.needs_library and not _has_library():
            return f"{name}: this torch was built without MSLK, which has the kernels"
        return None


KIND_NAMES: Final = {
    "tensor": "FP8, one scale per tensor",
    "row": "FP8, one scale per row",
    "block": "FP8, one scale per 1x128 or 128x128",
    "nvfp4": "NVFP4",
    "mx": "MXFP8",
}

#: Kinds of `scaled_mm`, in the order in which they are asked.
GATES: Final = {
    "tensor": Gate(lambda cc: cc >= (8, 9), "sm_89 and newer", (12, 1)),
    "row": Gate(lambda cc: cc >= (8, 9), "sm_89 and newer", (12, 1)),
    "block": Gate(lambda cc: cc[0] == 9, "sm_90 only", (12, 9)),
    "nvfp4": Gate(lambda cc: cc[0] >= 10, "sm_100 and newer", (12, 8)),
    "mx": Gate(lambda cc: cc[0] >= 10, "sm_100 and newer", (12, 8)),
}

#: Kinds of `scaled_grouped_mm`. One per row is code for sm_90a, the others are for sm_100a.
GROUPED_GATES: Final = {
    "row": Gate(lambda cc: cc == (9, 0), "groups on sm_90 only", (12, 1)),
    "nvfp4": Gate(lambda cc: cc == (10, 0), "groups on sm_100 only", (12, 8), True),
    "mx": Gate(lambda cc: cc == (10, 0), "groups on sm_100 only", (12, 8), True),
}


@lru_cache(maxsize=1)
def _has_library() -> bool:
    """Whether this torch was built with MSLK (before 2.11: FBGEMM's GenAI kernels).

    A torch without CUDA counts as one that was: there, chips are only asked about.
    """
    built = re.search(r"USE_(MSLK|FBGEMM_GENAI)(?!=(OFF|0))\b", torch.__config__.show())
    return torch.version.cuda is None or built is not None


def exact_reason(query: OpQuery) -> str | None:
    """Return why FP8 and FP4 tensor cores are out of the question, or None."""
    if query.precision == "exact":
        return "precision 'exact' asks for sums in FP32, which FP8 and FP4 tensor cores cut short"
    if query.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"makes float32, bfloat16 and float16, got {query.dtype}"
    return None
