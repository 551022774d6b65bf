"""GEMM by the chip's own scaled products: `torch.nn.functional.scaled_mm`.

Any shape works: K and N are padded to what cuBLASLt wants, in the operands, and cut from the
result. What a chip takes is decided here and before the call. Torch would find out late: an MXFP8
product on Hopper fails inside cuBLASLt.

Source: gates and layouts: torch, aten/src/ATen/native/cuda/ScaledBlas.cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from ..errors import BackendError
from ..formats import PlaneSpec
from .device import Chip, chip_of
from .epilogue import finish, only_product
from .native_layout import ceil_to
from .native_views import KINDS, Scaled, pair_reason, rows_later, two_levels, view_reason
from .precision import added_error
from .registry import Backend, Call, register_backend
from .types import GemmArgs, Operand

__all__ = ["NATIVE", "multiply", "native_kind"]

scaled_mm: Any = getattr(torch.nn.functional, "scaled_mm", None)


@dataclass(frozen=True)
class _Gate:
    """Where a kind of scaling runs.

    Args:
        chips: whether a compute capability has it.
        what: those chips in words.
        cuda: lowest version of CUDA.
    """

    chips: Callable[[tuple[int, int]], bool]
    what: str
    cuda: tuple[int, int]


#: In the order in which they are asked.
_GATES: Final = {
    "tensor": _Gate(lambda cc: cc >= (8, 9), "sm_89 and newer", (12, 1)),
    "row": _Gate(lambda cc: cc >= (8, 9), "sm_89 and newer", (12, 1)),
    "block": _Gate(lambda cc: cc[0] == 9, "sm_90 only", (12, 9)),
    "nvfp4": _Gate(lambda cc: cc[0] >= 10, "sm_100 and newer", (12, 8)),
    "mx": _Gate(lambda cc: cc[0] >= 10, "sm_100 and newer", (12, 8)),
}
_NAMES: Final = {
    "tensor": "FP8, one scale per tensor",
    "row": "FP8, one scale per row",
    "block": "FP8, one scale per 1x128 or 128x128",
    "nvfp4": "NVFP4",
    "mx": "MXFP8",
}


def chip_reason(chip: Chip | None, device: str) -> str | None:
    """Return None if `chip` is an NVIDIA GPU that is known well enough, else why not."""
    if device != "cuda":
        return f"runs on NVIDIA GPUs, got {device}"
    if chip is None or chip.capability is None:
        return "the GPU's compute capability is not known here; name one, as sm_90"
    if chip.is_rocm:
        return "is written for NVIDIA GPUs, got ROCm"
    return None


def gate_reason(kind: str, chip: Chip) -> str | None:
    """Return None if `chip` multiplies operands of this kind, else why not."""
    gate = _GATES[kind]
    if chip.capability is None or not gate.chips(chip.capability):
        return f"{_NAMES[kind]}: {gate.what}, got {chip}"
    if chip.cuda is None or chip.cuda < gate.cuda:
        wanted, got = (".".join(map(str, pair)) for pair in (gate.cuda, chip.cuda or (0, 0)))
        return f"{_NAMES[kind]}: needs CUDA {wanted}, torch was built with {got}"
    return None


def native_kind(a: PlaneSpec, b: PlaneSpec, chip: Chip, k: int | None) -> tuple[str | None, str]:
    """Return the kind of scaling in which `chip` multiplies two planes, or None and the reason.

    Args:
        a, b: specs of the operands.
        chip: what multiplies them.
        k: length of the contraction, or None where it is not known.

    Returns:
        `(kind, "")`, or `(None, reason)`. Kinds are tensor, row, block, nvfp4 and mx.
    """
    reason = pair_reason(a, b)
    if reason is not None:
        return None, reason
    misfits, lacks = [], []
    for name in _GATES:
        misfit = view_reason(KINDS[name], a, b, k)
        lack = gate_reason(name, chip)
        if misfit is None and lack is None:
            return name, ""
        if misfit is None and lack is not None:
            lacks.append(lack)
        elif misfit is not None and lack is None:
            misfits.append(misfit)
    # What the chip lacks for planes that would fit says more than planes that fit no kind it has.
    return None, "; ".join(lacks) or misfits[
        -1
    ] if misfits or lacks else f"no scaled product takes them on {chip}"


def exact_reason(call: Call) -> str | None:
    """Return why FP8 and FP4 tensor cores are out of the question, or None."""
    if call.precision == "exact":
        return "precision 'exact' asks for sums in FP32, which FP8 and FP4 tensor cores cut short"
    if call.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"makes float32, bfloat16 and float16, got {call.dtype}"
    return None


def _supports(call: Call) -> str | None:
    reason = chip_reason(call.chip, call.device) or exact_reason(call)
    if reason is not None:
        return reason
    if scaled_mm is None:
        return "this torch has no torch.nn.functional.scaled_mm"
    if call.row is None or call.col is None or call.chip is None:
        return "needs two operands"
    kind, reason = native_kind(call.row, call.col, call.chip, _depth(call))
    return None if kind else reason


def _depth(call: Call) -> int | None:
    return None if call.sizes is None else call.sizes[2]


def _notes(call: Call) -> tuple[str, ...]:
    if call.row is None or call.col is None or call.chip is None:
        return ()
    kind, _ = native_kind(call.row, call.col, call.chip, _depth(call))
    return (
        f"{_NAMES[kind or 'tensor']}, by cuBLASLt",
        added_error(call.chip.capability, is_folded=False),
    )


def _view(operand: Operand, kind: str, rows: int, is_square: bool) -> Scaled:
    def make() -> Scaled:
        return KINDS[kind].view(operand, rows, is_square)

    if operand.kept is None:
        return make()
    return operand.kept.get(f"native {kind} {rows} {is_square}", operand.buffers, make)


def multiply(a: Operand, b: Operand, args: GemmArgs, kind: str) -> torch.Tensor:
    """Return `a @ b.T` of two planes that can be viewed as `kind`, with what follows it.

    Args:
        a, b: the operands.
        args: bias, what to add, dtype of the result.
        kind: a kind of scaling that `native_kind` returns.

    Returns:
        `[M, N]`, contiguous.
    """
    m, n = a.rows, b.rows
    if 0 in (m, n, a.cols):
        empty = a.buffers[0].new_zeros((m, n), dtype=torch.float32)
        return finish(empty, None, None, args)
    rows = (ceil_to(m, KINDS[kind].rows), ceil_to(n, 16))
    right = _view(b, kind, rows[1], True)
    left = _view(a, kind, rows[0], "BlockWise128x128" not in right.recipes)
    if kind == "row" and not (args.out_dtype == torch.bfloat16 and only_product(args)):
        # That product rounds to BF16, so that nothing may follow it.
        left, right = rows_later(left, m), rows_later(right, n)
    if kind == "nvfp4" and not (a.spec.row_scaled or b.spec.row_scaled):
        left, right = two_levels(left), two_levels(right)
    has_factor = left.factor is not None or right.factor is not None
    # cuBLASLt adds a bias of the result's dtype in FP32, before the one rounding.
    bias = args.bias
    takes_bias = (
        kind in ("tensor", "mx", "nvfp4")
        and not has_factor
        and args.accumulate_into is None
        and bias is not None
        and bias.dtype == args.out_dtype != torch.float32
    )
    is_done = not has_factor and (only_product(args) or takes_bias)
    if takes_bias and bias is not None and rows[1] != n:
        bias = torch.nn.functional.pad(bias, (0, rows[1] - n))
    product = _scaled_mm(
        left,
        right,
        bias.contiguous() if takes_bias and bias is not None else None,
        args.out_dtype if is_done else torch.float32,
    )[:m, :n]
    if is_done:
        return product.contiguous()
    return finish(product, left.factor, right.factor, args).contiguous()


def _scaled_mm(
    left: Scaled, right: Scaled, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    scaling, swizzling = torch.nn.functional.ScalingType, torch.nn.functional.SwizzleType
    right_scales = [
        scale.t() if recipe == "RowWise" else scale
        for scale, recipe in zip(right.scales, right.recipes, strict=True)
    ]
    return scaled_mm(
        left.data,
        right.data.t(),
        list(left.scales),
        [getattr(scaling, name) for name in left.recipes],
        right_scales,
        [getattr(scaling, name) for name in right.recipes],
        swizzle_a=[getattr(swizzling, name) for name in left.swizzles] or None,
        swizzle_b=[getattr(swizzling, name) for name in right.swizzles] or None,
        bias=bias,
        output_dtype=dtype,
        # Partial sums are added in FP32 on the way; without that the error is ten times as large.
        use_fast_accum=False,
    )


def _gemm(a: Operand, b: Operand, args: GemmArgs) -> torch.Tensor:
    chip = args.chip or chip_of(a.buffers[0].device)
    kind, reason = native_kind(a.spec, b.spec, chip, a.cols)
    if kind is None:
        raise BackendError(f"gemm: the native backend was chosen but cannot: {reason}")
    return multiply(a, b, args, kind)


#: The backend of the chip's own scaled products, on NVIDIA GPUs.
NATIVE = register_backend(Backend("native", _supports, {"gemm": _gemm}, notes=_notes))
