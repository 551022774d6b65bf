"""Overflows of gradients, which must be seen behind a message: by a GradScaler, or by a clip."""

from __future__ import annotations

import torch

__all__ = ["mark_overflows_"]

_NAN = float("nan")


def mark_overflows_(gradient: torch.Tensor, quantizer: object) -> None:
    """Replace infinities by NaN in place where a gradient is about to be quantized.

    Under a scale of the whole tensor (FP8, NVFP4) an infinity saturates, and decodes to a finite
    value. A NaN stays one in every format.

    Args:
        gradient: floating, any shape.
        quantizer: of the message; None: values go as they are.

    Source: ours.
    """
    if quantizer is not None:
        torch.nan_to_num_(gradient, nan=_NAN, posinf=_NAN, neginf=_NAN)
