"""DType, the numbers that Transformer Engine calls dtypes by, and tables between them and torch's.

Source: names and values: Transformer Engine's `DType` and `pytorch/constants`.
"""

from __future__ import annotations

from enum import IntEnum
from types import SimpleNamespace
from typing import Any, Final

import torch

from ..formats import Element, element

__all__ = [
    "MXFP8_BLOCK_SCALING_SIZE",
    "NVFP4_BLOCK_SCALING_SIZE",
    "DType",
    "FP8BwdTensorIdx",
    "FP8BwdTensors",
    "FP8FwdTensorIdx",
    "FP8FwdTensors",
    "TE_DType",
    "TE_DType_To_Torch",
    "element_of",
]


class DType(IntEnum):
    """dtypes of buffers and of their codes, equal to Transformer Engine's numbers."""

    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10

    @classmethod
    def cast(cls, dtype: Any) -> DType:
        """Return the DType of a number, of Transformer Engine's own DType, or of a hybridq dtype.

        Args:
            dtype: a DType, whatever `int` takes, a torch dtype, an Element, or the name of one.

        Raises:
            ValueError: there is none.
        """
        if isinstance(dtype, torch.dtype) and dtype in TE_DType:
            return TE_DType[dtype]
        if isinstance(dtype, (str, Element, torch.dtype)):
            return cls[_MEMBERS[element(dtype).name]]
        return cls(int(dtype))


_MEMBERS: Final = {"e4m3": "kFloat8E4M3", "e5m2": "kFloat8E5M2", "e2m1": "kFloat4E2M1"}

#: torch's dtype to the DType.
TE_DType: Final = {
    torch.uint8: DType.kByte,
    torch.int32: DType.kInt32,
    torch.float32: DType.kFloat32,
    torch.float16: DType.kFloat16,
    torch.bfloat16: DType.kBFloat16,
    torch.float8_e4m3fn: DType.kFloat8E4M3,
    torch.float8_e5m2: DType.kFloat8E5M2,
}
#: The DType to torch's dtype.
TE_DType_To_Torch: Final = {number: dtype for dtype, number in TE_DType.items()}

#: Places in a module's `quantizers["scaling_fwd"]`.
FP8FwdTensorIdx: Final = SimpleNamespace(
    GEMM1_INPUT=0,
    GEMM1_WEIGHT=1,
    GEMM1_OUTPUT=2,
    GEMM2_INPUT=3,
    GEMM2_WEIGHT=4,
    GEMM2_OUTPUT=5,
    GEMM3_OUTPUT=8,
)
#: Places in a module's `quantizers["scaling_bwd"]`.
FP8BwdTensorIdx: Final = SimpleNamespace(
    GRAD_OUTPUT1=0,
    GRAD_INPUT1=1,
    GRAD_OUTPUT2=2,
    GRAD_INPUT2=3,
    GRAD_OUTPUT3=4,
    GRAD_INPUT3=5,
)
#: The same places by the names of the compiled module.
FP8FwdTensors: Final = FP8FwdTensorIdx
#: The same places by the names of the compiled module.
FP8BwdTensors: Final = FP8BwdTensorIdx
#: Values that share a scale.
MXFP8_BLOCK_SCALING_SIZE: Final = 32
#: Values that share a scale.
NVFP4_BLOCK_SCALING_SIZE: Final = 16


def element_of(dtype: Any) -> str:
    """Return the name of the element that codes of a DType are.

    Args:
        dtype: as for `DType.cast`.

    Raises:
        ValueError: no codes are of it.
    """
    number = DType.cast(dtype)
    names = {member: name for name, member in _MEMBERS.items()}
    if number.name not in names:
        raise ValueError(f"element_of: must be a dtype of codes, got {number!r}")
    return names[number.name]
