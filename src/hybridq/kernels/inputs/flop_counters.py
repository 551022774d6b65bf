"""Operations of products, told to torch's FlopCounterMode, which takes unknown operators for none.

Loading torch's module of it takes longer than loading hybridq. So it is told when a call meets a
mode and the module is there. Under such a mode torch runs compiled code eagerly.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final

import torch

from ..._torch_private import dispatch_modes

__all__ = ["PRODUCT_FLOPS", "tell_flop_counters"]


def _dense(*operands: Any) -> int:
    """Rows of a, rows of b, and what they have in common."""
    return 2 * int(operands[2]) * int(operands[5]) * int(operands[6])


def _grouped(*operands: Any, is_stack: bool) -> int:
    """Of rows of tokens `[T, K]` by planes `[N, K]`; else of planes `[M, T]` and `[N, T]`."""
    own = operands[2][1] if is_stack else operands[2][0]
    return 2 * int(operands[7]) * int(own) * int(operands[5][0])


def _gemm(*args: Any, **_: Any) -> int:
    return _dense(*args)


def _gemm_into(*args: Any, **_: Any) -> int:
    return _dense(*args[1:])


def _grouped_gemm(*args: Any, is_stack: bool, **_: Any) -> int:
    return _grouped(*args, is_stack=is_stack)


def _grouped_gemm_into(*args: Any, is_stack: bool, **_: Any) -> int:
    return _grouped(*args[1:], is_stack=is_stack)


#: Floating-point operations of a call of each operator that multiplies, by its name, asked with
#: the operator's arguments; a multiplication and an addition are two.
PRODUCT_FLOPS: Final[dict[str, Callable[..., int]]] = {
    "gemm": _gemm,
    "gemm_": _gemm_into,
    "grouped_gemm": _grouped_gemm,
    "grouped_gemm_": _grouped_gemm_into,
}
for _count in PRODUCT_FLOPS.values():
    _count._get_raw = True  # type: ignore[attr-defined]  # asked with tensors, not with shapes


def tell_flop_counters() -> None:
    """Have torch's counters, and those that count this call, know hybridq's products."""
    module: Any = sys.modules.get("torch.utils.flop_counter")
    if module is None:
        return
    counters = [getattr(mode, "counter", None) for mode in dispatch_modes()]
    for counter in (module, *counters):
        known = getattr(counter, "flop_registry", None)
        if isinstance(known, dict):
            for name, count in PRODUCT_FLOPS.items():
                known.setdefault(getattr(torch.ops.hybridq, name), count)
