"""Modules of other libraries that keep weights in few bits themselves, and how to read them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from ..converters import library_module
from ..moe import ExpertsLayout
from ..nn import QuantizedModule
from ..tensor import is_quantized

__all__ = ["Reads", "StoredKind", "held_values", "stored_kind"]

#: `reads(module, parameter, expert)`: the values of a matrix, as the module holds it.
Reads = Callable[[Any, str, int | None], torch.Tensor]


def held_values(module: Any, parameter: str, expert: int | None) -> torch.Tensor:
    """Return the values of a parameter, or of one matrix of a stack; decoded, if it is quantized.

    Args:
        module: any.
        parameter: its name.
        expert: number of the matrix; None: it is no stack.
    """
    if expert is None and isinstance(module, QuantizedModule):
        return module.whole_parameter(parameter)
    own = getattr(module, parameter).detach()
    if hasattr(own, "full_tensor"):  # a shard of FSDP2, whose ranks all come here
        own = own.full_tensor()
    if expert is not None:
        own = own[expert]
    made: torch.Tensor = own.dequantize() if is_quantized(own) else own
    return made


@dataclass(frozen=True)
class StoredKind:
    """A kind of module with weights in few bits that are no QuantizedTensor.

    Args:
        takes: `takes(module)`, whether a module is of the kind.
        reads: the values of a matrix.
        layout: `layout(module)`, how it holds experts; None: it is a linear layer.
        refusal: why it cannot be read; empty if it can.
    """

    takes: Callable[[nn.Module], bool]
    reads: Reads = held_values
    layout: Callable[[Any], ExpertsLayout] | None = None
    refusal: str = ""


#: A library, and the module of hybridq whose `STORED` knows its classes.
_LIBRARIES: Final = (("transformers", "hybridq.integrations.transformers.stored_weights"),)


def stored_kind(module: nn.Module) -> StoredKind | None:
    """Return the kind of a module of a library that is there; None: it is of none.

    Args:
        module: any.
    """
    for library, name in _LIBRARIES:
        for kind in getattr(library_module(library, name), "STORED", ()):
            if kind.takes(module):
                found: StoredKind = kind
                return found
    return None
