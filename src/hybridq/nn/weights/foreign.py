"""Weights that another library has quantized: tensors whose operators are that library's own."""

from __future__ import annotations

from typing import Final

import torch

from ...tensor import is_quantized

__all__ = ["foreign_weight"]

#: Libraries that quantize weights by a tensor class, which knows none of hybridq's operators.
_LIBRARIES: Final = frozenset({"torchao", "bitsandbytes", "optimum", "hqq", "transformer_engine"})
_OWN: Final = (torch.Tensor, torch.nn.Parameter)


def foreign_weight(weight: torch.Tensor | None) -> str | None:
    """Return whose tensor a weight is, such as `"torchao's Int8Tensor"`; None: nobody else's.

    Args:
        weight: a parameter, or None.
    """
    if weight is None or type(weight) in _OWN or is_quantized(weight):
        return None
    kind = type(weight)
    library = kind.__module__.partition(".")[0]
    return f"{library}'s {kind.__name__}" if library in _LIBRARIES else None
