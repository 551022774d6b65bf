"""torchao: MX formats, NVFP4 and FP8 per tensor, by its plain PyTorch functions.

Source: https://github.com/pytorch/ao, prototype/mx_formats and float8.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torchao
from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated
from torchao.prototype.mx_formats import mx_tensor, nvfp4_tensor
from torchao.prototype.mx_formats.constants import DTYPE_FP6_E2M3, DTYPE_FP6_E3M2

from ..case import Array, Buffers, Case

__all__ = ["ADAPTER"]

_ELEMENTS: dict[str, Any] = {
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "e2m1": torch.float4_e2m1fn_x2,
    "e3m2": DTYPE_FP6_E3M2,
    "e2m3": DTYPE_FP6_E2M3,
}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
#: Options that none of torchao's functions has.
_OPTIONS = ("stochastic", "eps", "four_over_six", "row_scaled")


def _family(case: Case) -> str:
    """Return which of torchao's functions a case is for: mx, nvfp4, fp8, or "" for none."""
    spec = case.spec
    if spec["scale"] == "e8m0" and spec["block"] == [1, 32]:
        return "mx"
    if spec["rule"] == "two_level" and spec["block"] == [1, 16] and spec["tensor_bound"] == 448:
        return "nvfp4"
    if spec["rule"] == "amax" and spec["block"] is None:
        return "fp8"
    return ""


def _mode(case: Case) -> mx_tensor.ScaleCalculationMode:
    return mx_tensor.ScaleCalculationMode(case.spec["rule"])


class _TorchAO:
    name = f"torchao {torchao.__version__}"

    def supports(self, case: Case) -> str | None:
        if case.kind not in ("encode", "decode"):
            return "no public function for a bare element, or for a product on a CPU"
        family = _family(case)
        if not family:
            return "has no such format without Triton"
        chosen = [name for name in _OPTIONS if case.spec.get(name)]
        if chosen or case.spec["signs"] is not None or case.source is not None:
            return f"has no {', '.join(chosen) or 'transform or dequantized source'}"
        if not np.prod(case.shape):
            return "takes no empty tensors"
        if family != "fp8" and case.matrix[1] % case.spec["block"][1]:
            return "takes whole blocks only"
        if case.kind == "decode" and family == "fp8":
            return "divides by the encode scale, which a plane does not hold"
        if case.kind == "encode" and case.dtype not in _DTYPES:
            return f"takes no {case.dtype}"
        return None

    def encode(self, x: Array, case: Case) -> Buffers:
        own = torch.from_numpy(case.own).to(_DTYPES[case.dtype])
        return getattr(self, f"_{_family(case)}")(own, case)

    def _mx(self, own: torch.Tensor, case: Case) -> Buffers:
        scale, data = mx_tensor.to_mx(own, _ELEMENTS[case.spec["element"]], 32, _mode(case))
        return {"data": data.view(torch.uint8).numpy(), "scale": scale.view(torch.uint8).numpy()}

    def _nvfp4(self, own: torch.Tensor, case: Case) -> Buffers:
        amax = own.abs().max()
        factor = nvfp4_tensor.per_tensor_amax_to_scale(amax)
        scale, data = nvfp4_tensor.nvfp4_quantize(own, 16, factor)
        stored = {"data": data.view(torch.uint8), "scale": scale.view(torch.uint8)}
        made = {name: buffer.numpy().reshape(len(own), -1) for name, buffer in stored.items()}
        return made | {"amax": amax.float().reshape(1).numpy()}

    def _fp8(self, own: torch.Tensor, case: Case) -> Buffers:
        dtype = _ELEMENTS[case.spec["element"]]
        scale = tensor_to_scale(own, dtype, round_scales_to_power_of_2=case.spec["power_of_two"])
        data = to_fp8_saturated(own.float() * scale, dtype).view(torch.uint8)
        return {"data": data.numpy(), "scale": (1.0 / scale).reshape(1).numpy()}

    def decode(self, buffers: Buffers, case: Case) -> Array:
        tensors = {name: torch.from_numpy(buffer.copy()) for name, buffer in buffers.items()}
        data, scale = tensors["data"], tensors["scale"]
        if _family(case) == "nvfp4":
            factor = nvfp4_tensor.per_tensor_amax_to_scale(tensors["amax"].reshape(()))
            made = nvfp4_tensor.NVFP4Tensor(
                data, scale.view(torch.float8_e4m3fn), 16, torch.float32, factor
            )
            return made.dequantize(torch.float32).numpy()
        kind = _ELEMENTS[case.spec["element"]]
        if isinstance(kind, torch.dtype) and kind != torch.float4_e2m1fn_x2:
            data = data.view(kind)
        scales = scale.view(torch.float8_e8m0fnu)
        return mx_tensor.to_dtype(data, scales, kind, 32, torch.float32).numpy()


ADAPTER = _TorchAO()
