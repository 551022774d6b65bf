"""The planes of one call of a linear module, in the specs that its products take on this chip.

Each of the six planes of a linear module goes into one product. Where the product would first make
something else of a plane, as Hopper's does of MXFP8, the plane is encoded as that from the start,
and saved so: as many bytes, the same bits in the product, and nothing between encode and product.
Planes that somebody else has or wants stay what the recipe says: a cached or quantized weight,
planes that travel between ranks, one that the other is made of.
"""

from __future__ import annotations

from typing import Final

import torch

from ...formats import PlaneSpec
from ...kernels.choice import OpQuery, operand_specs
from ...kernels.inputs import Chip
from ...recipes import Plan, SlotPlan

__all__ = ["plan_of_products"]

#: Of each product: the slot and the plane of both operands, and the field of its precision.
_PRODUCTS: Final = (
    (("input", "row"), ("weight", "row"), "fprop"),
    (("grad_output", "row"), ("weight", "col"), "dgrad"),
    (("grad_output", "col"), ("input", "col"), "wgrad"),
)


def plan_of_products(
    plan: Plan,
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    device: str,
    chip: Chip,
    has_weight: bool,
    groups: int | None = None,
) -> Plan:
    """Return `plan` with the specs in which the planes of a call are encoded.

    The backend that is forced now has a say in it.

    Args:
        plan: of the module.
        sizes: rows of the input and of the gradient, whose planes all stay on this device;
            in_features and out_features.
        dtype: of the tensors.
        device: type of their device.
        chip: the device.
        has_weight: the planes of the weight are somebody else's, too.
        groups: how many share the rows, each with a weight of its own; None: there are none.
    """
    rows, inner, outer = sizes
    op = "gemm" if groups is None else "grouped_gemm"
    found: dict[tuple[str, str], PlaneSpec] = {}
    for (first, second, name), size in zip(
        _PRODUCTS, ((rows, outer, inner), (rows, inner, outer), (outer, inner, rows)), strict=True
    ):
        a, b = (
            PlaneSpec.parse(getattr(getattr(plan, slot), side).spec).resolve(dtype)
            for slot, side in (first, second)
        )
        precision = getattr(plan.precision, name)
        average = None if groups is None or name == "wgrad" else -(-rows // groups)
        own = (op, device, dtype, a, b, precision, size, chip, True, groups, average)
        query = OpQuery(*own)
        found[first], found[second] = operand_specs(query)

    def slot(name: str, own: SlotPlan) -> SlotPlan:
        return _slot(own, found[name, "row"], found[name, "col"], dtype)

    return plan._replace(
        input=slot("input", plan.input),
        weight=plan.weight if has_weight else slot("weight", plan.weight),
        grad_output=slot("grad_output", plan.grad_output),
    )


def _slot(slot: SlotPlan, row: PlaneSpec, col: PlaneSpec, dtype: torch.dtype) -> SlotPlan:
    """Return `slot` with other specs; those of other formats where one launch has all planes."""
    if slot.is_delayed or slot.amax_group or slot.col_source != "original":
        return slot
    pairs = ((slot.row, row), (slot.col, col))
    own = [PlaneSpec.parse(plane.spec).resolve(dtype) for plane, _ in pairs]
    new = [spec.format != wanted.format for spec, (_, wanted) in zip(own, pairs, strict=True)]
    if any(new) and not all(
        is_new or plane.is_plain for is_new, (plane, _) in zip(new, pairs, strict=True)
    ):
        return slot  # two launches, one of them for a plane as it is, would read x twice
    made = [
        plane if spec == wanted else wanted.plain_text(dtype)
        for spec, (plane, wanted) in zip(own, pairs, strict=True)
    ]
    return slot._replace(row=made[0], col=made[1])
