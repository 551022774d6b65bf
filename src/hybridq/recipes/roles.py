"""QuantizerRole: what a factory is told about the slot that it makes a quantizer for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = [
    "GRAD_INPUT",
    "GRAD_OUTPUT",
    "INPUT",
    "LINEAR",
    "OUTPUT",
    "SLOTS",
    "WEIGHT",
    "QuantizerRole",
]

#: The module types that a module of hybridq reports.
LINEAR: Final = "linear"

INPUT: Final = "input"
WEIGHT: Final = "weight"
GRAD_OUTPUT: Final = "grad_output"
#: The slots of a linear module, in the order in which a factory is asked.
SLOTS: Final = (INPUT, WEIGHT, GRAD_OUTPUT)
#: The slots at its boundary, of tensors that stay quantized on their way to another module.
OUTPUT: Final = "output"
GRAD_INPUT: Final = "grad_input"


@dataclass(frozen=True)
class QuantizerRole:
    """The slot of a module that a quantizer is for.

    Args:
        module_type: kind of the module: `"linear"`; empty if unknown.
        tensor_type: kind of the tensor: `"input"`, `"weight"` or `"grad_output"`; `"output"` or
            `"grad_input"` where that is to stay quantized; empty if unknown.
        name: qualified name of the module in its model (`"blocks.0.attention.qkv"`), as
            `hybridq.convert` or the module's `name=` gave it; empty if it has none.

    Raises:
        TypeError: a field is not a string.

    Source: Transformer Engine's QuantizerRole (same fields, order and defaults).
    """

    module_type: str = ""
    tensor_type: str = ""
    name: str = ""

    def __post_init__(self) -> None:
        for field in ("module_type", "tensor_type", "name"):
            value = getattr(self, field)
            if not isinstance(value, str):
                raise TypeError(
                    f"QuantizerRole: {field} must be a string, got {type(value).__name__}"
                )

    @property
    def is_gradient(self) -> bool:
        """Whether the tensor is a gradient, which wants range more than precision."""
        return self.tensor_type.startswith("grad_")

    def __str__(self) -> str:
        where = self.name or "an unnamed module"
        return f"{self.module_type or 'unknown'} slot {self.tensor_type or 'unknown'!r} of {where}"
