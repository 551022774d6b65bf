"""Products of plain matrices on a CPU: torch's own where it has a fast one, else that of FP32.

torch multiplies BF16 and FP16 by oneDNN where oneDNN has instructions for them. Elsewhere it takes
loops of its own that need 4 to 40 times as long as its FP32 product. There an FP32 product of the
same operands, rounded once, has the same values: both sum exact products in FP32, in an order of
their own. This is the one place where that is decided, by what oneDNN says of itself: so the way
depends on the machine and on `ONEDNN_MAX_CPU_ISA` alone, and every process of a run takes the same.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from ..._log import log_once
from ...errors import is_first

__all__ = [
    "ProductWay",
    "advise",
    "give_no_advice",
    "is_slow",
    "plain_product",
    "product_ways",
    "slow_advice",
    "slow_reason",
]

#: What oneDNN says whether it multiplies a dtype; an operator that this torch lacks says no.
_QUESTIONS: Final = {
    torch.bfloat16: "_is_mkldnn_bf16_supported",
    torch.float16: "_is_mkldnn_fp16_supported",
}
#: Up to so many rows, and with the contraction last in both operands, torch's loop reads short
#: operands once, which takes less than making long ones of them.
_FEW: Final = 2


def _has_product(name: str) -> bool:
    ask = getattr(torch.ops.mkldnn, name, None)
    return ask is not None and bool(ask())


# Asked once, and not in a call: dynamo does not trace the question.
_SLOW: frozenset[torch.dtype] = frozenset(
    dtype for dtype, name in _QUESTIONS.items() if not _has_product(name)
)


def is_slow(dtype: torch.dtype, device: str = "cpu") -> bool:
    """Return whether torch has no fast product of this dtype on this machine's CPU.

    Args:
        dtype: of both operands and the result.
        device: type of their device; only a CPU's products can be slow.
    """
    return device == "cpu" and dtype in _SLOW


def slow_reason(dtype: torch.dtype) -> str | None:
    """Return None if torch's product of this dtype on the CPU is fast, else why it is not."""
    if dtype not in _SLOW:
        return None
    return f"oneDNN has no {_name(dtype)} product for this CPU, and torch's own loops are slow"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def slow_advice(dtype: torch.dtype) -> str:
    """Return what is slow where torch's products of this dtype are, and what helps."""
    name = _name(dtype)
    return (
        f"torch's own {name} products are slow on this CPU, for which oneDNN has none; hybridq's "
        f"modules take FP32 products with the same values, but what else multiplies in {name} "
        "(nn.Linear, torch.matmul, attention of torch) takes many times as long as in float32: "
        "make such layers hybridq.Linear, which without a recipe is nn.Linear, or keep them in "
        "float32 (torch.autocast off)"
    )


def advise(dtype: torch.dtype, device: str = "cpu") -> None:
    """Log once in this process if torch's own products of this dtype are slow.

    Args:
        dtype: in which a module computes.
        device: type of the device on which it does.
    """
    if is_slow(dtype, device) and not torch.compiler.is_compiling():
        log_once(_key(dtype), slow_advice(dtype))


def give_no_advice() -> None:
    """Have `advise` say nothing in this process: for a program that says it in its own words."""
    for dtype in _QUESTIONS:
        is_first(_key(dtype))


def _key(dtype: torch.dtype) -> str:
    return f"slow products of {dtype}"


class ProductWay(NamedTuple):
    """How products of one dtype are made on this machine's CPU.

    Args:
        dtype: its name.
        is_fast: whether torch's own product is.
        reason: why it is not; "" where it is.
        ours: what hybridq's modules and `hybridq.gemm` take for plain operands.
    """

    dtype: str
    is_fast: bool
    reason: str
    ours: str


def product_ways() -> tuple[ProductWay, ...]:
    """Return how plain products of float32, bfloat16 and float16 are made on this CPU."""
    ways = []
    for dtype in (torch.float32, *_QUESTIONS):
        name, reason = _name(dtype), slow_reason(dtype)
        own = f"torch's {name} product"
        ours = own if reason is None else f"FP32 product, rounded once to {name}"
        ways.append(ProductWay(name, reason is None, reason or "", ours))
    return tuple(ways)


def plain_product(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return `a @ b.T + bias`: exact products summed in FP32, rounded once to the operands' dtype.

    Args:
        a: `[M, K]`.
        b: `[N, K]`, of the same dtype and device. torch.autocast is off.
        bias: `[N]`, the same, or None.
    """
    if not is_slow(a.dtype, a.device.type) or (
        a.shape[0] <= _FEW and _has_k_last(a) and _has_k_last(b)
    ):
        return torch.nn.functional.linear(a, b, bias)
    left, right = a.to(torch.float32), b.to(torch.float32)
    if bias is None:
        return torch.mm(left, right.t()).to(a.dtype)
    return torch.addmm(bias.to(torch.float32), left, right.t()).to(a.dtype)


def _has_k_last(matrix: torch.Tensor) -> bool:
    return matrix.stride(1) == 1 or matrix.shape[1] <= 1
