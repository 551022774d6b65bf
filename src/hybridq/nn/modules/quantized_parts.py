"""Quantized weights that are parts: how each rank makes its planes, and which planes are taken.

A part of whole blocks has planes of its own, which are the parts of the planes of the whole weight
if the amax of the tensor is that of all ranks: the quantizer of such a part reduces it over the
tensor-parallel group, whenever the part is written.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ...formats import PlaneSpec
from ...quantizers import Quantizer
from ...recipes import Plan
from ...storage import TensorStorage
from ...tensor.in_graph import runs_at_once
from ..weights import prequantized_weight
from .tensor_parallel import COLUMN, Parallel

__all__ = ["decoded_or_kept", "of_part", "reason_against_part"]


def _planes(quantizer: Quantizer) -> list[tuple[PlaneSpec, int]]:
    """Return each plane, and by how much the axis of its own matrix is shifted."""
    pairs = ((quantizer.rowwise, 0), (quantizer.columnwise, 1))
    return [(spec, shift) for spec, shift in pairs if spec is not None]


def _needs_group(quantizer: Quantizer) -> bool:
    """Return whether a plane is scaled by an amax of all ranks."""
    return any(spec.needs_tensor_amax for spec, _ in _planes(quantizer))


def reason_against_part(parallel: Parallel, plan: Plan, quantizer: Quantizer) -> str | None:
    """Return why a part of a weight cannot live in low precision; None: it can. The same on ranks.

    Args:
        parallel: how the weight lies over ranks.
        plan: under which it computes.
        quantizer: of its slot, without a group.
    """
    what = "rows" if parallel.mode == COLUMN else "columns"
    if not parallel.has_whole_blocks(plan):
        unit = parallel.cut(plan)[0].unit
        return (
            f"each rank must have a multiple of {unit} {what} of it, since blocks of the recipe "
            f"would lie on two ranks, got {list(parallel.sizes)}"
        )
    axis = 0 if parallel.mode == COLUMN else 1
    planes = _planes(quantizer)
    if any(spec.stochastic for spec, _ in planes):
        return "the random bits of its rounding belong to places in the whole weight"
    if any(spec.row_scaled and axis ^ shift == 1 for spec, shift in planes):
        return "a plane has an amax for each row, of which each rank would have a part"
    if not _needs_group(quantizer):
        return None
    if parallel.rank < 0:
        return "its amax is that of all ranks: give the constructor their group, tp_group="
    if quantizer.amax_group not in (None, parallel.group):
        return (
            "its recipe reduces amaxes over another group than the tensor-parallel one; leave "
            "amax_reduction_group out"
        )
    return None


def of_part(quantizer: Quantizer, group: str) -> Quantizer:
    """Return the quantizer of a part: its amax is that of all ranks.

    Args:
        quantizer: of the whole weight.
        group: name of the process group of the ranks that have the parts.
    """
    return replace(quantizer, amax_group=group) if _needs_group(quantizer) else quantizer


@runs_at_once
def _takes_planes(quantizer: str, row: str, col: str, group: str) -> bool:
    """Return whether a graph takes the planes of a part as they are; else they are made anew.

    Args:
        quantizer: of the weight, its text.
        row, col: specs of the slot's planes.
        group: name of the tensor-parallel group.
    """
    own = Quantizer.parse(quantizer)
    is_same = own.rowwise == PlaneSpec.parse(row) and own.columnwise == PlaneSpec.parse(col)
    return is_same and (own.amax_group == group or not _needs_group(own))


def decoded_or_kept(module: Any, weight: Any, w: Any, plan: Plan, parallel: Parallel) -> Any:
    """Return a quantized part as it is multiplied: its planes, or values to be quantized anew.

    Args:
        module: whose weight it is, for errors.
        weight: the module's part, a QuantizedTensor.
        w: the same in the dtype of the product.
        plan: under which the part computes.
        parallel: how the weight lies over ranks.

    Raises:
        NotImplementedError: its planes are not parts of the planes of the whole, or no windows.
    """
    if torch.compiler.is_compiling():
        slot = plan.weight
        takes = _takes_planes(weight.quantizer.text, slot.row.spec, slot.col.spec, parallel.group)
        return w if takes and parallel.has_whole_blocks(plan) else w.dequantize()
    storage: TensorStorage = weight.tensor_storage
    if prequantized_weight(storage, plan.weight, w.dtype) is None:
        # Another recipe's planes; a frozen weight's gradient goes nowhere.
        return w if storage.comes_and_goes else w.dequantize()
    if not storage.comes_and_goes:
        quantizer = weight.own_quantizer
        group = getattr(quantizer, "amax_group", None)
        if any(plane.spec.needs_tensor_amax for plane in storage.planes) and (
            group is None or group != parallel.group
        ):
            raise module._error(
                NotImplementedError,
                "the amax of a quantized weight that tensor parallelism splits must be that of "
                f"all ranks, got a {type(weight).__name__} whose quantizer reduces it over "
                f"{'no group' if group is None else f'the group {group!r}'}; make the module with "
                "tp_group= inside quantized_model_init, or split it by "
                "hybridq.distributed.ColwiseParallel or RowwiseParallel",
            )
    if parallel.has_whole_blocks(plan):
        return w
    fix = (
        "or leave prepare_fsdp2 out"
        if storage.comes_and_goes
        else "or make the module outside of quantized_model_init"
    )
    raise module._error(
        NotImplementedError,
        "each rank must have a multiple of whole blocks of all operands where planes of weights "
        f"are taken as they are, got parts of {list(parallel.sizes)}; choose multiples of 128, "
        f"{fix}",
    )
