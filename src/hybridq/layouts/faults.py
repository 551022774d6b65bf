"""What readers are known to get wrong, by version: said to who writes for them.

Each was seen with the versions named; tests show that they still are there, and fail when they are
mended.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from .stored import StoredWeight

__all__ = ["FAULTS", "Fault", "faults_of"]

_READER: Final = "transformers 5.23 and 5.24"
_EXPERT: Final = re.compile(r"(.*\.)?experts\.\d+\..*")


def _is_expert(weight: StoredWeight) -> bool:
    return _EXPERT.fullmatch(weight.name) is not None


def _is_uneven(weight: StoredWeight) -> bool:
    rows, cols = weight.matrix
    return rows % 128 != 0 or cols % 128 != 0


def _any(weight: StoredWeight) -> bool:
    return True


@dataclass(frozen=True)
class Fault:
    """Something that a reader gets wrong.

    Args:
        layout: name of the layout.
        schemes: names of its schemes; none: all.
        concerns: whether it happens to a weight.
        reader: program and version.
        text: what happens, and what helps.
        dtypes: of weights, before they are quantized, to which it happens; none: all.
    """

    layout: str
    schemes: tuple[str, ...]
    concerns: Callable[[StoredWeight], bool]
    reader: str
    text: str
    dtypes: tuple[torch.dtype, ...] = ()

    def __str__(self) -> str:
        return f"{self.reader}: {self.text}"


#: All that are known.
FAULTS: Final = (
    Fault(
        "compressed-tensors",
        ("nvfp4",),
        _is_expert,
        _READER,
        "decodes experts in NVFP4 without their global scale: the model is silently wrong there",
    ),
    Fault(
        "compressed-tensors",
        ("mxfp8",),
        _is_expert,
        _READER,
        "fails to convert experts in MXFP8; the layout fine-grained-fp8 with mxfp8 is read",
    ),
    Fault(
        "compressed-tensors",
        ("fp8_tensor", "fp8_channel", "fp8_block"),
        _any,
        _READER,
        "rounds scales of FP8 to the model's dtype, in BF16 by up to 2^-8 of them; with "
        "CompressedTensorsConfig(dequantize=True) weights are right",
    ),
    Fault(
        "compressed-tensors",
        ("nvfp4", "mxfp8", "mxfp4"),
        _any,
        _READER,
        "decodes to BF16 whatever the model's dtype is, so that its first forward fails unless "
        "that is BF16 too; load it with dtype=torch.bfloat16",
        (torch.float32, torch.float16),
    ),
    Fault(
        "fine-grained-fp8",
        (),
        _any,
        "transformers before 5.24",
        "decodes to the dtype of the files, so that the first forward of a model loaded in another "
        "fails; leave dtype out, or export the model in BF16",
        (torch.float32, torch.float16),
    ),
    Fault(
        "fine-grained-fp8",
        ("fp8_block",),
        _is_uneven,
        _READER,
        "decodes a matrix whose rows or columns are no multiple of 128 with blocks of another "
        "size, or not at all",
    ),
    Fault(
        "auto-fp8",
        (),
        _any,
        _READER,
        "looks for scales under other names, and takes codes for values; the layout "
        "fine-grained-fp8 with fp8_tensor is read",
    ),
    Fault(
        "mlx",
        (),
        _is_expert,
        "mlx-lm 0.32",
        "puts the weights of experts together and, in some models (qwen3_moe, qwen3_next, minimax, "
        "nemotron_h), not their scales: it says that it received parameters not in the model; "
        "leave their experts out (exclude='*.experts.*')",
    ),
    Fault(
        "modelopt",
        (),
        _any,
        _READER,
        "does not know the layout by itself: it warns, and takes codes for values",
    ),
)


def faults_of(
    layout: str, weight: StoredWeight, dtype: torch.dtype = torch.bfloat16
) -> tuple[Fault, ...]:
    """Return what readers get wrong with a weight.

    Args:
        layout: name of the layout that it is written in.
        weight: as it is written.
        dtype: of the weight before it was quantized.
    """
    return tuple(
        one
        for one in FAULTS
        if one.layout == layout
        and (not one.schemes or weight.scheme.name in one.schemes)
        and (not one.dtypes or dtype in one.dtypes)
        and one.concerns(weight)
    )
