"""Transformer Engine's products of one pair and of many, by its layouts and arguments.

Source: names, order and defaults of arguments: Transformer Engine's `pytorch/cpp_extensions`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from .. import tensor as tensors
from .signatures import only_defaults, options

__all__ = ["general_gemm", "general_grouped_gemm"]

#: At their defaults only.
_OTHERS: Final = options(
    "gelu=False, gelu_in=None, alpha=1.0, beta=None, ub=None, ub_type=None, extra_output=None, "
    "bulk_overlap=False"
)


def general_gemm(
    A: torch.Tensor,
    B: torch.Tensor,
    out_dtype: torch.dtype | None = None,
    quantization_params: Any = None,
    gelu: bool | None = False,
    gelu_in: torch.Tensor | None = None,
    alpha: float = 1.0,
    beta: float | None = None,
    accumulate: bool = False,
    layout: str = "TN",
    out: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    use_split_accumulator: bool = False,
    grad: bool = False,
    ub: Any = None,
    ub_type: Any = None,
    extra_output: torch.Tensor | None = None,
    bulk_overlap: bool = False,
) -> tuple[Any, torch.Tensor | None, None, None]:
    """Return `B @ A.T` (TN), `B @ A` (NN) or `B.T @ A` (NT), and the bias' gradient.

    Any format with any other, as `hybridq.gemm`: of each operand the plane whose blocks run along
    the contraction.

    Args:
        A, B: quantized or plain; B of more than two dimensions is the matrix of its rows.
        out_dtype: of the result; None: that of `out`, else the operands' nominal one.
        quantization_params: a quantizer of the result, or None.
        accumulate: add to `out`.
        layout: one of the three.
        out: to write into, or None.
        bias: `[N]`, added; with `grad` its gradient is returned second, the sum of B's rows.
        use_split_accumulator: has no effect: sums are FP32.
        grad: whether this is a product of a backward.
        gelu, gelu_in, alpha, beta, ub, ub_type, extra_output, bulk_overlap: at their defaults;
            `gelu` may be None, too.

    Returns:
        The product, the gradient of the bias or None, None, None.

    Raises:
        NotImplementedError: one of the last has another value.
        ValueError: another layout, or shapes do not fit.

    Example:
        >>> import torch, hybridq.te as te
        >>> from hybridq.te.pytorch.cpp_extensions import general_gemm
        >>> weight = te.MXFP8Quantizer(te.DType.kFloat8E4M3)(torch.ones(3, 32))
        >>> general_gemm(weight, torch.ones(2, 32))[0].tolist()
        [[32.0, 32.0, 32.0], [32.0, 32.0, 32.0]]
    """
    others = (bool(gelu), gelu_in, float(alpha), beta, ub, ub_type, extra_output, bulk_overlap)
    only_defaults("general_gemm", dict(zip(_OTHERS, others, strict=True)), _OTHERS)
    if layout not in ("TN", "NN", "NT"):
        raise ValueError(f"general_gemm: layout must be TN, NN or NT, got {layout!r}")
    rows = B if B.dim() == 2 else B.reshape(-1, B.shape[-1])
    left = rows.mT if layout[1] == "T" else rows
    right = A if layout[0] == "T" else A.mT
    place = None if out is None else out.view(left.shape[0], right.shape[0])
    own: dict[str, Any] = {"accumulate": accumulate, "out_dtype": out_dtype}
    with torch.no_grad():
        made = tensors.gemm(left, right, bias=None if grad else bias, out=place, **own)
        sums = rows.float().sum(0).to(bias.dtype) if grad and bias is not None else None
    if out is not None:
        made = out
    elif layout[1] == "N" and B.dim() != 2:
        made = made.view(*B.shape[:-1], made.shape[-1])
    return made if quantization_params is None else quantization_params(made), sums, None, None


def general_grouped_gemm(
    A: Sequence[torch.Tensor],
    B: Sequence[torch.Tensor],
    out: Sequence[torch.Tensor],
    quantization_params: Sequence[Any] | None,
    out_dtype: torch.dtype | None,
    layout: str = "TN",
    m_splits: Sequence[int] | None = None,
    gelu: bool = False,
    grad: bool = False,
    accumulate: bool = False,
    bias: Sequence[torch.Tensor] | None = None,
    use_bias: bool = False,
    use_split_accumulator: bool = False,
    D_dtype: Any = None,
    single_output: bool = False,
) -> tuple[Sequence[torch.Tensor], Any, None]:
    """Write the products of `general_gemm` of each pair into `out`, bit for bit.

    Args:
        A, B: as many quantized or plain matrices; groups without rows give zeros.
        out: a tensor for each pair; with `single_output` one, `[sum(m_splits), ...]`.
        out_dtype, use_split_accumulator: have no effect: `out` has a dtype, and sums are FP32.
        layout, grad, accumulate: as for `general_gemm`.
        m_splits: the rows of each pair in a single output.
        bias: of each pair; with `grad` and `use_bias` only their dtypes count.
        use_bias: False: `bias` is not looked at.
        quantization_params, gelu, D_dtype: None, or Nones; False; None.

    Returns:
        `out`, then `bias`, or its gradient for each pair with `grad` and `use_bias`; and None.

    Raises:
        NotImplementedError: one of the last has another value.
        ValueError: a single output without `m_splits`, or as `general_gemm`.
    """
    asked = {"quantization_params": None, "gelu": bool(gelu), "D_dtype": D_dtype}
    asked["quantization_params"] = next((q for q in quantization_params or () if q), None)
    only_defaults(
        "general_grouped_gemm", asked, options("quantization_params=None, gelu=False, D_dtype=None")
    )
    places = list(out)
    if single_output:
        if m_splits is None:
            raise ValueError("general_grouped_gemm: a single output needs m_splits, got None")
        places = list(out[0].split(list(m_splits)))
    biases: list[Any] = [None] * len(places)
    if use_bias:
        biases = list(bias or ([place.new_empty(0) for place in places] if grad else biases))
    own: dict[str, Any] = {"layout": layout, "grad": grad, "accumulate": accumulate}
    sums = [
        general_gemm(a, b, out=place, bias=one, **own)[1]
        for a, b, place, one in zip(A, B, places, biases, strict=True)
    ]
    return out, sums if grad and use_bias else bias, None
