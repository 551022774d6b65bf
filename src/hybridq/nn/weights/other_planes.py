"""Weights that hold planes of other formats than a recipe multiplies: what that costs is said."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from ..._log import log_once
from ...direction import COLUMNWISE, ROWWISE
from ...formats import PlaneSpec
from ...quantizers import Quantizer
from ...recipes import QuantizerRole, SlotPlan, get, names
from ...storage import TensorStorage
from ...tensor.in_graph import runs_at_once
from .weight_cache import PrequantizedWeight, prequantized_weight

__all__ = ["planes_held", "say_in_graph"]

_Asked = tuple[str, str, str]


def planes_held(
    module: Any,
    part: str,
    weight: Any,
    slot: SlotPlan,
    dtype: torch.dtype,
    whole: TensorStorage | None = None,
) -> PrequantizedWeight | None:
    """Return the planes of a quantized weight, or None, and say so, where `slot` wants others.

    Args:
        module, part: that the weight belongs to.
        weight: quantized.
        slot: how the recipe quantizes it.
        dtype: that it is wanted in: of a plane that is not quantized.
        whole: of the stack that the weight is a matrix of; None: it is none.
    """
    storage: TensorStorage = weight.tensor_storage
    found = prequantized_weight(storage, slot, dtype, whole, weight)
    row = storage.spec(ROWWISE) if found is None else None
    if row is not None:
        name = module.part_name(part)
        where = f"{type(module).__name__} {name}" if name else type(module).__name__
        _tell(where, row, storage.spec(COLUMNWISE), (slot.row.spec, slot.col.spec, str(dtype)))
    return found


def say_in_graph(module: Any, weight: Any, slot: SlotPlan, dtype: torch.dtype) -> None:
    """Log once that a graph decodes a quantized weight and quantizes it again, if it does.

    The module's name is not read: dynamo guards what it reads.

    Args:
        module: that the weight belongs to, for the message.
        weight: the module's parameter, quantized.
        slot: of the recipe, for the weight.
        dtype: that planes in high precision are wanted in.
    """
    if weight.quantizer is not None:
        asked = (slot.row.spec, slot.col.spec, str(dtype))
        _compare(weight.quantizer.text, asked, type(module).__name__, module.holds_transposed)


@runs_at_once
def _compare(held: str, asked: _Asked, where: str, is_transposed: bool) -> None:
    """Log it, of strings alone, if the rowwise planes differ.

    Args:
        held: the weight's quantizer, its text.
        asked: specs of the recipe's planes, and the name of the dtype.
        where: the module.
        is_transposed: the quantizer is that of the transpose.
    """
    own: Quantizer | None = Quantizer.parse(held)
    if is_transposed and own is not None:
        own = own.mirrored()
    if own is not None and own.rowwise is not None and own.rowwise != _wanted(asked)[0]:
        _tell(where, own.rowwise, own.columnwise, asked)


def _tell(where: str, row: PlaneSpec, col: PlaneSpec | None, asked: _Asked) -> None:
    """Log once what is held, and asked for.

    Args:
        where: the module.
        row, col: specs of the planes that are held. Of a weight in high precision, as FSDP2 gathers
            some, nothing is said.
        asked: specs of the recipe's planes, and the name of the dtype.
    """
    if not row.format.is_identity:
        log_once(f"other planes:{_pair(row, col)}", f"{where}: {_text(row, col, asked)}")


def _wanted(asked: _Asked) -> tuple[PlaneSpec, PlaneSpec]:
    """Return the specs of the planes that are asked for."""
    row, col, dtype = asked
    own = getattr(torch, dtype.rpartition(".")[2])
    return PlaneSpec.parse(row).resolve(own), PlaneSpec.parse(col).resolve(own)


@lru_cache(maxsize=256)
def _text(row: PlaneSpec, col: PlaneSpec | None, asked: _Asked) -> str:
    """Return what is said of planes."""
    takers = [name for name in names() if _takes(name, row, col)]
    advice = f"compute under a recipe that takes them ({', '.join(takers)}), or " if takers else ""
    return (
        f"its weight holds planes of {_pair(row, col)}, and the recipe asks for "
        f"{_pair(*_wanted(asked))}: it is decoded and quantized again in each product, which takes "
        f"longer, and rounds twice; {advice}quantize it for this recipe (quantized_model_init, "
        "convert-checkpoint --recipe)"
    )


def _pair(row: PlaneSpec, col: PlaneSpec | None) -> str:
    """Return both specs as one text, or the one that there is."""
    if col is None or col == row:
        return row.short_text
    return f"{row.short_text} | {col.short_text}"


def _takes(name: str, row: PlaneSpec, col: PlaneSpec | None) -> bool:
    """Return whether the recipe of that name multiplies planes such as these."""
    wanted = get(name).quantizer(QuantizerRole("linear", "weight", ""))
    return row == wanted.rowwise and col in (None, wanted.columnwise)
