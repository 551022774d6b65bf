"""Layer norm and RMS norm of the rows of a matrix, in FP32 operations of a stated order.

Source: ours; docs/reference/numerics.md, "Norms". The formulas are those of arXiv:1607.06450 and
arXiv:1910.07467; the order of the sums is one that a warp, vectors and plain loops can share.
"""

from __future__ import annotations

import torch

from .rounding import round_values

__all__ = ["NORMS", "PARTIALS", "norm", "row_sums"]

#: Kinds of norms; the first subtracts the mean.
NORMS = ("LayerNorm", "RMSNorm")
#: Partial sums of a row; a power of two.
PARTIALS = 256


def row_sums(values: torch.Tensor) -> torch.Tensor:
    """Return FP32 `[rows]`: the sum of each row, in the one order that all backends add in.

    Element j is added to partial sum `j % 256`, in order of j and from +0 on; then the partial
    sums are folded in halves: 128 sums of partials i and i + 128, 64 of those, down to one.

    Args:
        values: FP32 `[rows, cols]`.

    Source: ours.
    """
    rows, cols = values.shape
    # What is missing adds +0 to a partial sum, which changes none: none of them is -0.
    padded = torch.nn.functional.pad(values, (0, -cols % PARTIALS))
    partial = torch.zeros(rows, PARTIALS, dtype=torch.float32, device=values.device)
    for chunk in padded.reshape(rows, padded.shape[1] // PARTIALS, PARTIALS).unbind(1):
        partial = partial + chunk
    while partial.shape[1] > 1:
        half = partial.shape[1] // 2
        partial = partial[:, :half] + partial[:, half:]
    return partial[:, 0]


def norm(
    x: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor | None,
    eps: float,
    kind: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the normalized rows of x in its dtype, and each row's mean and `1 / sqrt(var + eps)`.

    LayerNorm: `d = x - mean(x)`, `rstd = 1 / sqrt(mean(d * d) + eps)`, `y = (d * rstd) * gamma`,
    plus beta if there is one. RMSNorm: the same with x for d, without beta. Every operation is
    rounded to FP32 by itself, y at last to the dtype of x.

    Args:
        x: `[rows, cols]` float32, bfloat16 or float16.
        gamma: FP32 `[cols]`; a zero-centered weight has had its 1 added.
        beta: FP32 `[cols]` or None.
        eps: rounded to FP32.
        kind: `"LayerNorm"` or `"RMSNorm"`.

    Returns:
        y `[rows, cols]` of x's dtype; mean, FP32 `[rows]`, or `[0]` for RMSNorm; rstd, FP32
        `[rows]`.

    Source: docs/reference/numerics.md, "Norms".
    """
    values = x.to(torch.float32)

    def scalar(value: float) -> torch.Tensor:
        # Tensors, since torch may multiply with the inverse of a number instead of dividing by it.
        return torch.tensor(value, dtype=torch.float32, device=x.device)

    count, small = scalar(float(x.shape[1])), scalar(eps)
    mean = values.new_empty(0)
    if kind == "LayerNorm":
        mean = row_sums(values) / count
        values = values - mean[:, None]
    variance = row_sums(values * values) / count
    # torch's FP32 square root may be a unit off (MKL's vector one is). FP64's rounded to FP32 is
    # right even then: no root of an FP32 value lies within 2^-50 of where two of them meet.
    rstd = scalar(1.0) / torch.sqrt((variance + small).to(torch.float64)).to(torch.float32)
    y = (values * rstd[:, None]) * gamma
    if beta is not None:
        y = y + beta
    return round_values(y, x.dtype), mean, rstd
