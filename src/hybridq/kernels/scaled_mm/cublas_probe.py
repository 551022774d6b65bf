"""What cuBLASLt may refuse is tried once: a product of ones, whose result is known.

Source: cuBLAS documentation, "cublasLtMatmul" names the epilogues, and not for which scale modes
each of them is there; Transformer Engine's tests of blockwise products use a bias with them on
Hopper.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["Product", "block_takes_bias"]

#: `(a, b, bias, dtype)` to `a @ b.T + bias` of E4M3 codes whose scales are all one.
Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.dtype], torch.Tensor]

_SIZE = 128
_known: dict[tuple[torch.device, tuple[str, str], torch.dtype], bool] = {}


def block_takes_bias(
    device: torch.device, recipes: tuple[str, str], dtype: torch.dtype, product: Product
) -> bool:
    """Return whether a product with block scales adds a bias here, and adds it rightly.

    Asked once per device, recipes and dtype; while a CUDA graph is captured, what is not known yet
    counts as no, since a question is work of its own.

    Args:
        device: that multiplies.
        recipes: of the scales of the left and of the right operand.
        dtype: of bias and result.
        product: what is tried, with matrices of 128 x 128.
    """
    key = (device, recipes, dtype)
    if key not in _known:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return False
        _known[key] = _adds(device, dtype, product)
    return _known[key]


def _adds(device: torch.device, dtype: torch.dtype, product: Product) -> bool:
    ones = torch.ones(_SIZE, _SIZE, device=device, dtype=torch.float32).to(torch.float8_e4m3fn)
    # 128 and a bias below 128: exact in every dtype of a result.
    bias = torch.arange(_SIZE, device=device, dtype=torch.float32).to(dtype)
    try:
        made = product(ones, ones, bias, dtype)
    # Torch's own checks and cuBLASLt's "not supported".
    except (RuntimeError, ValueError, NotImplementedError):
        return False
    return bool(torch.equal(made.float(), (bias.float() + _SIZE).expand(_SIZE, _SIZE)))
