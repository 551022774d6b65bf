"""Weights that transformers keeps in few bits itself, for calibrations: DeepSeek's FP8 and FP4.

Source: transformers 5.23, integrations/finegrained_fp8.py: codes `[..., N, K]` in E4M3, or two E2M1
codes in each byte, the even column in the low half; `<name>_scale_inv` has a factor for each block.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn

from ...calibration import StoredKind
from ...moe import ExpertsLayout

__all__ = ["STORED"]

_HOME: Final = "transformers.integrations.finegrained_fp8"
_MXFP4_HOME: Final = "transformers.integrations.mxfp4"
#: Columns of a block of FP4 codes, each row of which has scales of its own.
_FP4_COLS: Final = 32
_ONE: Final = 127  # E8M0's code of 1


def _is(module: nn.Module, name: str, home: str = _HOME) -> bool:
    return (type(module).__module__, type(module).__name__) == (home, name)


def _read(module: Any, parameter: str, expert: int | None) -> torch.Tensor:
    """Return the values of a weight, FP32: codes times the factor of their block."""
    codes = getattr(module, parameter).detach()
    factors = getattr(module, f"{parameter}_scale_inv").detach()
    if expert is not None:
        codes, factors = codes[expert], factors[expert]
    if codes.dtype in (torch.float32, torch.bfloat16, torch.float16):
        return codes
    is_fp4 = codes.dtype == torch.int8
    values = _fp4(codes) if is_fp4 else codes.float()
    block = (1, _FP4_COLS) if is_fp4 else module.block_size
    factors = factors.float()
    if factors.dim() < 2:
        return values * factors
    for axis, size in enumerate(values.shape):
        # Without blocks a factor is of the whole tensor, or of gate and of up.
        count = factors.shape[axis]
        width = -(-size // count) if block is None else block[axis]
        factors = factors.repeat_interleave(width, axis).narrow(axis, 0, size)
    return values * factors


def _fp4(codes: torch.Tensor) -> torch.Tensor:
    """Return the values of packed E2M1 codes, `[N, 2 * bytes]`."""
    rows, cols = codes.shape[0], 2 * codes.shape[1]
    ones = torch.full((rows, -(-cols // _FP4_COLS)), _ONE, dtype=torch.uint8, device=codes.device)
    planes = [codes.contiguous().view(torch.uint8), ones]
    values: torch.Tensor = torch.ops.hybridq.decode(planes, "mxfp4", rows, cols, torch.float32)
    return values


def _gated(module: Any, h: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = module._apply_gate(h)
    return made


def _activated(module: Any, h: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = module.act_fn(h)
    return made


def _layout(module: Any) -> ExpertsLayout:
    if module.has_gate:
        return ExpertsLayout(activation=_gated)
    return ExpertsLayout("up_proj", has_gate=False, activation=_activated)


STORED: Final = (
    StoredKind(lambda module: _is(module, "FP8Linear"), _read),
    StoredKind(lambda module: _is(module, "FP8Experts"), _read, _layout),
    StoredKind(
        lambda module: _is(module, "Mxfp4GptOssExperts", _MXFP4_HOME),
        refusal="its kernels keep weights in an order of their own; load the model with "
        "Mxfp4Config(dequantize=True)",
    ),
)
