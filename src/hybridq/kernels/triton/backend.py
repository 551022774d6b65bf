"""The `triton` backend: GEMMs that decode packed operands in registers, on NVIDIA GPUs.

It wants two kinds of GEMM and leaves the rest to torch's own product of decoded operands: those
with few rows on one side (they are bound by reading the other operand, which is two to four times
smaller in codes than in BF16), and grouped ones.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, Final

import torch

from ...formats import PlaneSpec
from ..choice import (
    Backend,
    DeviceSupport,
    GemmArgs,
    GroupedArgs,
    GroupedOperand,
    Operand,
    OpQuery,
    register_backend,
)
from ..decoded import row_factors, wants_decoded_groups
from ..inputs import Chip
from .form import form_of, form_reason
from .plan import SMALL, plan_block, plan_gemm, plan_grouped
from .prepared import planner

__all__ = ["TRITON", "block_gemm", "block_gemm_reason", "wants"]

#: Of kernels that multiply in BF16 or FP32, of those that do in FP8, and of those fed by TMA.
_DEVICES, _FP8_DEVICES, _TMA_DEVICES = (
    DeviceSupport(("cuda",), least) for least in ((8, 0), (8, 9), (9, 0))
)
_OUT = (torch.float32, torch.bfloat16, torch.float16)


@lru_cache(maxsize=1)
def _missing() -> str | None:
    return None if find_spec("triton") is not None else "the package triton is not installed"


#: Of Triton: the first that is known to multiply FP32 on sm_100 as it is told to.
_EXACT: Final = (3, 9)


@lru_cache(maxsize=1)
def _triton_version() -> tuple[int, int]:
    try:
        found = re.match(r"(\d+)\.(\d+)", version("triton"))
    except PackageNotFoundError:
        return (0, 0)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _wide_reason(query: OpQuery) -> str | None:
    """Return why an exact product of FP32 operands is not to be had here, or None.

    Triton 3.6 compiles `tl.dot(..., input_precision="ieee")` to TF32 on sm_100; 3.9 does not.
    """
    if query.chip is None or query.chip.capability is None or query.chip.capability[0] != 10:
        return None
    if not any(spec is not None and form_of(spec).is_wide for spec in (query.row, query.col)):
        return None
    got = _triton_version()
    if got >= _EXACT:
        return None
    want, have = (".".join(map(str, pair)) for pair in (_EXACT, got))
    return f"FP32 operands would be cut to TF32 on sm_100 before Triton {want}, got {have}"


def wants(sizes: tuple[int, int, int] | None, a: PlaneSpec, b: PlaneSpec) -> str | None:
    """Return None if a dense GEMM should come here although torch could do it, else why not.

    Args:
        sizes: (M, N, K), or None where they are not known.
        a, b: specs of the operands.
    """
    if sizes is None:
        return f"is for at most {SMALL} rows on one side, and the sizes are not known"
    m, n, _ = sizes
    if min(m, n) > SMALL:
        return f"is for at most {SMALL} rows on one side, got {m} and {n}"
    if (b if n >= m else a).format.is_identity:
        return "gains nothing where the operand with more rows is not packed"
    return None


def _as_read(query: OpQuery) -> OpQuery:
    """Return the query with the specs under which a dense product reads planes of its sizes."""
    a, b, sizes = query.row, query.col, query.sizes
    if query.op != "gemm" or a is None or b is None or sizes is None:
        return query
    return replace(query, row=row_factors(a, sizes[2]), col=row_factors(b, sizes[2]))


def _rounded(query: OpQuery) -> PlaneSpec | None:
    """Return the spec of a dense product's operand that is rounded to BF16 once, or None."""
    specs = (query.row, query.col)
    inexact = [one for one in specs if one is not None and not one.is_bf16_exact]
    if query.op != "gemm" or query.precision == "exact" or query.dtype is not torch.bfloat16:
        return None
    return inexact[0] if len(inexact) == 1 and not inexact[0].format.is_identity else None


def _supports(query: OpQuery) -> str | None:
    reason = _missing()
    if reason is not None:
        return reason
    if query.dtype not in _OUT:
        return f"makes float32, bfloat16 and float16, got {query.dtype}"
    query = _as_read(query)
    if query.row is None or query.col is None:
        return "a GEMM has two operands"
    for name, spec in (("a", query.row), ("b", query.col)):
        # Dense products of FP32 operands are torch's own; grouped ones would wait for the offsets.
        takes_wide = query.op == "grouped_gemm" or spec is _rounded(query)
        reason = form_reason(spec, takes_wide=takes_wide)
        if reason is not None:
            return f"operand {name}: {reason}"
    if query.row.signs != query.col.signs:
        return "one operand is transformed and the other is not"
    return _wide_reason(query) if query.op == "grouped_gemm" else None


def _leaves(query: OpQuery) -> str | None:
    if query.op == "grouped_gemm":
        return wants_decoded_groups(query)
    if query.op != "gemm" or query.row is None or query.col is None:
        return None
    return wants(query.sizes, query.row, query.col)


def _notes(query: OpQuery) -> tuple[str, ...]:
    query = _as_read(query)
    notes = ["operands decoded in registers, BF16 product with FP32 accumulation"]
    if _rounded(query) is not None:
        notes.append(
            "BF16 does not hold one operand, which is rounded once: that adds as much as the "
            "rounding of the result (precision 'exact' does not)"
        )
    elif any(spec is not None and form_of(spec).is_wide for spec in (query.row, query.col)):
        notes = ["operands decoded in registers to FP32, FP32 product"]
    if query.op == "grouped_gemm":
        notes.append("group ends stay on the device; groups without tokens give zeros")
    return tuple(notes)


def _launcher() -> Any:
    return import_module(".launch", __package__)  # Triton is imported with the first product


def _gemm(a: Operand, b: Operand, args: GemmArgs) -> torch.Tensor:
    result, launches = plan_gemm(a, b, args)
    _launcher().run(launches, result.device)
    return result


def _grouped_gemm(a: GroupedOperand, b: GroupedOperand, args: GroupedArgs) -> torch.Tensor:
    for operand in (a, b):
        if not (b.is_stack or operand.is_padded or operand.spec.format.is_identity):
            raise ValueError(
                "grouped_gemm: a quantized plane whose contraction runs over tokens must be "
                f"padded, got {operand.spec}"
            )
    result, launches = plan_grouped(a, b, args)
    _launcher().run(launches, result.device)
    return result


def block_gemm_reason(
    elements: tuple[str, str], chip: Chip | None, is_grouped: bool = False
) -> str | None:
    """Return None if `block_gemm`, or `grouped_block_gemm`, runs on this chip, else why not.

    Args:
        elements: names of the elements of a and b.
        chip: the device of the operands.
        is_grouped: it is a product of groups.
    """
    for name, element in zip("ab", elements, strict=True):
        if element not in ("e4m3", "e5m2"):
            return f"operand {name} must be e4m3 or e5m2, got {element}"
    devices = _TMA_DEVICES if is_grouped else _FP8_DEVICES
    return devices.reason("cuda" if chip is None else chip.kind, chip) or _missing()


def block_gemm(
    a_data: torch.Tensor,
    a_scale: torch.Tensor,
    b_data: torch.Tensor,
    b_scale: torch.Tensor,
    elements: tuple[str, str],
    *,
    b_is_square: bool,
    args: GemmArgs,
) -> torch.Tensor:
    """Return `a @ b.T` by FP8 tensor cores: sums of 128 products, scaled and added in FP32.

    Args:
        a_data, b_data: uint8 codes `[M, K]`, `[N, K]`, the last axis contiguous.
        a_scale: FP32 `[M, ceil(K / 128)]`, any strides.
        b_scale: FP32 `[N, ceil(K / 128)]`, or `[ceil(N / 128), ceil(K / 128)]` if b_is_square.
        elements: names of the elements of a and b, e4m3 or e5m2.
        b_is_square: b has one scale per 128x128 instead of 1x128.
        args: bias, what to add, dtype of the result.

    Returns:
        `[M, N]`. FP8 tensor cores keep about 13 fraction bits within each sum of 128, so this is no
        exact product: see docs/reference/numerics.md on precision.

    Source: DeepSeek-V3 technical report, section 3.3.2 (arXiv:2412.19437), for promotion per 128.
    """
    planned = plan_block(a_data, a_scale, b_data, b_scale, elements, b_is_square, args)
    _launcher().run(planned[1], planned[0].device)
    return planned[0]


#: The backend of GEMMs in Triton, on NVIDIA GPUs.
TRITON = register_backend(
    Backend(
        "triton",
        _supports,
        {"gemm": _gemm, "grouped_gemm": _grouped_gemm},
        devices=_DEVICES,
        leaves=_leaves,
        priority=30,
        notes=_notes,
        planner=planner,
    )
)
