"""What is said of inputs that no module can take."""

from __future__ import annotations

from typing import Final

import torch

__all__ = ["NESTED", "no_tensor", "quantized_elsewhere"]

NESTED: Final = "input must be no nested tensor, got one; give its values (`x.values()`)"


def no_tensor(given: object) -> str:
    """Return what is said of an input that is no Tensor.

    Args:
        given: the input.
    """
    text = f"input must be a Tensor, got {type(given).__name__}"
    if not isinstance(given, torch.fx.Proxy):
        return text
    return (
        f"{text}; torch.fx.symbolic_trace runs modules with values that are none yet: let the "
        "is_leaf_module of your torch.fx.Tracer return True for this module, or use "
        "torch.export.export"
    )


def quantized_elsewhere(foreign: str) -> str:
    """Return what is said of a weight that another library has quantized.

    Args:
        foreign: whose tensor it is.
    """
    return (
        "weight must be in high precision or hybridq's own, to be quantized by a recipe, got "
        f"{foreign}; run the module without a recipe, or let one library quantize it"
    )
