"""Weights that hold planes of other formats than a recipe multiplies: what that costs is said."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from ..._log import log_once
from ...formats import PlaneSpec
from ...quantizers import Quantizer
from ...recipes import QuantizerRole, SlotPlan, get, names
from ...storage import TensorStorage
from ...tensor.in_graph import runs_at_once
from .weight_cache import PrequantizedWeight, prequantized_weight

__all__ = ["planes_held", "say_other_planes"]

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
    found = prequantized_weight(weight.tensor_storage, slot, dtype, whole)
    if found is None:
        say_other_planes(module, part, weight, slot, dtype)
    return found


def say_other_planes(
    module: Any, part: str, weight: Any, slot: SlotPlan, dtype: torch.dtype
) -> None:
    """Log once that a quantized weight is decoded and quantized again, if it is.

    Args:
        module, part: that it belongs to, for the message. In a graph the name is not read: dynamo
            guards what it reads.
        weight: quantized. Of planes in high precision, as FSDP2 gathers some, nothing is said. In a
            graph the module's parameter, which may hold the transpose.
        slot: of the recipe, for the weight.
        dtype: that planes in high precision are wanted in.
    """
    in_graph, where = torch.compiler.is_compiling(), type(module).__name__
    name = "" if in_graph else module.part_name(part)
    where = f"{where} {name}" if name else where
    is_transposed = in_graph and module.holds_transposed
    asked = (slot.row.spec, slot.col.spec, str(dtype))
    _say(weight.quantizer.text, asked, where, in_graph, is_transposed)


@runs_at_once
def _say(held: str, asked: _Asked, where: str, in_graph: bool, is_transposed: bool) -> None:
    """Log it, of strings alone; in a graph if the rowwise planes differ.

    Args:
        held: the weight's quantizer, its text.
        asked: specs of the recipe's planes, and the name of the dtype.
        where: the module.
        in_graph: nobody has compared the planes.
        is_transposed: the quantizer is that of the transpose.
    """
    planes, said = _texts(held, asked, in_graph, is_transposed)
    if said:
        log_once(f"other planes:{planes}", f"{where}: {said}")


@lru_cache(maxsize=256)
def _texts(held: str, asked: _Asked, in_graph: bool, is_transposed: bool) -> tuple[str, str]:
    """Return what planes are held, and what is to be said of it; or "" twice."""
    own: Quantizer | None = Quantizer.parse(held)
    if is_transposed and own is not None:
        own = own.mirrored()
    if own is None or own.rowwise is None or own.rowwise.format.is_identity:
        return "", ""
    row, col, dtype = asked
    of_dtype = getattr(torch, dtype.rpartition(".")[2])
    wanted = [PlaneSpec.parse(one).resolve(of_dtype) for one in (row, col)]
    if in_graph and own.rowwise == wanted[0]:
        return "", ""
    planes = _pair(own.rowwise, own.columnwise)
    takers = [name for name in names() if _takes(name, own)]
    advice = f"compute under a recipe that takes them ({', '.join(takers)}), or " if takers else ""
    return planes, (
        f"its weight holds planes of {planes}, and the recipe asks for {_pair(*wanted)}: it is "
        "decoded and quantized again in each product, which takes longer, and rounds twice; "
        f"{advice}quantize it for this recipe (quantized_model_init, convert-checkpoint --recipe)"
    )


def _pair(row: PlaneSpec, col: PlaneSpec | None) -> str:
    """Return both specs as one text, or the one that there is."""
    if col is None or col == row:
        return row.short_text
    return f"{row.short_text} | {col.short_text}"


def _takes(name: str, own: Quantizer) -> bool:
    """Return whether the recipe of that name multiplies planes such as these."""
    wanted = get(name).quantizer(QuantizerRole("linear", "weight", ""))
    has_columns = own.columnwise is None or own.columnwise == wanted.columnwise
    return own.rowwise == wanted.rowwise and has_columns
