"""Grouped GEMM over planes: the public door of `kernels.operators.grouped_gemm`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import settings
from ..errors import SpecError
from ..formats import PlaneSpec
from ..kernels import check_precision
from ..kernels.ragged import TOKEN_PAD
from ..storage import Plane

__all__ = ["grouped_planes", "stacked"]


def stacked(buffers: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return `[G, ...]` of G equal tensors: a view if they lie one after the other, else a copy."""
    first = buffers[0]
    if torch.compiler.is_compiling():  # where memory lies cannot be asked in a trace
        return torch.stack(list(buffers))
    size = first.numel()
    is_row = all(
        buffer.untyped_storage()._cdata == first.untyped_storage()._cdata
        and buffer.storage_offset() == first.storage_offset() + group * size
        and buffer.is_contiguous()
        for group, buffer in enumerate(buffers)
    )
    if not is_row or first.requires_grad:
        return torch.stack(list(buffers))
    shape = (len(buffers), *first.shape)
    return torch.as_strided(first, shape, (size, *first.stride()))


def _stack(
    b: Sequence[Plane] | torch.Tensor, groups: int
) -> tuple[tuple[int, int], PlaneSpec, list[torch.Tensor]]:
    """Return the own matrix, the spec and the buffers `[G, ...]` of one plane per group."""
    if len(b) != groups:
        raise ValueError(
            f"grouped_gemm: there must be one b for each of the {groups} groups of offsets, "
            f"got {len(b)}"
        )
    if isinstance(b, torch.Tensor):
        return (b.shape[1], b.shape[2]), PlaneSpec.plain(b.dtype), [b]
    if not b:
        raise ValueError(
            "grouped_gemm: without groups, b must be a plain [0, N, K], which says how wide the "
            "result is, got no plane"
        )
    spec, width = b[0].spec, b[0].matrix
    # By text: torch.compile may hold the numbers in a spec as symbols.
    if any(plane.spec.text != spec.text or plane.matrix != width for plane in b):
        raise SpecError(
            "grouped_gemm: the planes of all groups must have one spec and one shape, got "
            f"{', '.join(sorted({f'{p.spec} {p.matrix}' for p in b}))}"
        )
    return width, spec, [stacked([plane.buffers[name] for plane in b]) for name in b[0].buffers]


def grouped_planes(
    a: Plane,
    b: Plane | Sequence[Plane] | torch.Tensor,
    offsets: torch.Tensor,
    *,
    tokens: int | None = None,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
    out_dtype: torch.dtype | None = None,
    precision: str | None = None,
) -> torch.Tensor:
    """Return one product per group of tokens: `[T, N]`, or `[G, M, N]` contracted over tokens.

    Args:
        a: plane whose own matrix is `[T, K]`, or `[M, tokens]`.
        b: one plane `[N, K]` per group, or all of them as a plain tensor `[G, N, K]`; or one plane
            `[N, tokens]` for all.
        offsets: int32 `[G]` on the planes' device: where each group of tokens ends.
        tokens: how many tokens there are, if both planes are padded and it cannot be seen.
        bias: `[G, N]`, with one plane per group.
        out, accumulate, out_dtype, precision: as in `gemm_planes`.

    Raises:
        ValueError: shapes, devices or the number of groups do not fit.
        SpecError: the planes of b differ in their specs.
        TypeError: a dtype is not float32, bfloat16 or float16, or what has to be a tensor is none.
    """
    for what, tensor in (("offsets", offsets), ("bias", bias), ("out", out)):
        is_given = tensor is not None or what == "offsets"
        if is_given and not isinstance(tensor, torch.Tensor):
            raise TypeError(f"grouped_gemm: {what} must be a tensor, got {type(tensor).__name__}")
    chosen = check_precision(precision or settings.precision(), "grouped_gemm")
    (rows, k), groups = a.matrix, offsets.shape[0] if offsets.dim() else 0
    if isinstance(b, Plane):
        is_stack, width, spec, buffers = False, b.matrix, b.spec, b.tensors
        padded = [not plane.spec.format.is_identity for plane in (a, b)]
        if tokens is None:
            known = [p.matrix[1] for p, has_pad in zip((a, b), padded, strict=True) if not has_pad]
            # The most tokens whose padded plane has k columns.
            most = k - TOKEN_PAD * groups + (TOKEN_PAD - 1)
            tokens = known[0] if known else max(most, 0)
    else:
        is_stack = True
        width, spec, buffers = _stack(b, groups)
        padded, tokens = [False, False], rows
        if k != width[1]:
            raise ValueError(
                "grouped_gemm: both operands must have the same contraction length, got "
                f"{k} and {width[1]}"
            )
    operands = (a.tensors, a.spec.text, (rows, k), buffers, spec.text, width, offsets, tokens, bias)
    options = {"is_stack": is_stack, "a_padded": padded[0], "b_padded": padded[1]}
    if out is None:
        if accumulate:
            raise ValueError("grouped_gemm: accumulate needs out, got None")
        dtype = torch.bfloat16 if out_dtype is None else out_dtype
        if not any(dtype is one for one in (torch.float32, torch.bfloat16, torch.float16)):
            raise TypeError(
                f"grouped_gemm: out dtype must be float32, bfloat16 or float16, got {dtype!r}"
            )
        return torch.ops.hybridq.grouped_gemm(
            *operands, **options, out_dtype=dtype, precision=chosen
        )
    if out_dtype is not None and out_dtype != out.dtype:
        raise TypeError(f"grouped_gemm: out_dtype must be out's {out.dtype}, got {out_dtype}")
    torch.ops.hybridq.grouped_gemm_(
        out, *operands, **options, accumulate=accumulate, precision=chosen
    )
    return out
