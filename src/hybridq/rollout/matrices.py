"""Which matrices a module multiplies with, what a reader calls them, and their planes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ..direction import ROWWISE
from ..errors import SpecError
from ..formats import PlaneSpec
from ..kernels.choice import EncodeRequest
from ..layouts import Layout, Scheme, StoredWeight
from ..moe import Experts
from ..nn import QuantizedModule
from ..quantizers import with_statistics
from ..recipes import Recipe, SlotPlan
from ..storage import Plane, PlanePair, encode_pair
from ..storage.build import named_buffers
from ..tensor import is_quantized
from ..tensor.stack import split_stack, split_transposed

__all__ = ["Matrix", "Named", "Weight", "bias_parts", "weights_of"]


@dataclass(frozen=True)
class Named:
    """Some rows of a matrix, under the name that a reader has for them.

    Args:
        name: of the weight.
        first, step, rows: the rows.
    """

    name: str
    first: int
    step: int
    rows: int


@dataclass(frozen=True)
class Matrix:
    """A matrix `[out, in]` that a module multiplies with.

    Args:
        part: of the module, as its recipe is asked about it.
        index: which of a stack it is; None: the weight is a matrix.
        slot: how the forward quantizes it.
        named: what a reader has of it.
    """

    part: str
    index: int | None
    slot: SlotPlan
    named: tuple[Named, ...]


@dataclass(frozen=True)
class Weight:
    """A parameter of a module, as matrices that are quantized.

    Args:
        module: whose parameter it is.
        parameter: its name there.
        name: of a stack of all matrices, for layouts that hold such.
        shape: of each matrix, `[out, in]`.
        matrices: all of them.
    """

    module: QuantizedModule
    parameter: str
    name: str
    shape: tuple[int, int]
    matrices: tuple[Matrix, ...]

    def spec(self, matrix: Matrix, dtype: torch.dtype) -> PlaneSpec:
        """Return the spec of the rowwise plane of one of the matrices."""
        return PlaneSpec.parse(matrix.slot.row.spec).resolve(dtype)

    def stored(self, layout: Layout, dtype: torch.dtype) -> list[tuple[StoredWeight, Matrix]]:
        """Return what the weight becomes in a layout, and of which matrix; from shapes alone.

        Args:
            layout: the reader's.
            dtype: in which the forward takes it.

        Raises:
            SpecError: the layout cannot hold it.
        """
        if self.is_stack_of(layout):
            spec = self.spec(self.matrices[0], dtype)
            stored = layout.stored(self.name, spec, (len(self.matrices), *self.shape))
            return [(stored, self.matrices[0])]
        return [
            (layout.stored(one.name, self.spec(matrix, dtype), (one.rows, self.shape[1])), matrix)
            for matrix in self.matrices
            for one in matrix.named
        ]

    def is_stack_of(self, layout: Layout) -> bool:
        """Return whether it is one stack in a layout."""
        return layout.holds_stacks and self.matrices[0].index is not None

    def tensors(
        self, layout: Layout, dtype: torch.dtype | None, names: Callable[[str], str]
    ) -> Iterator[Callable[[], dict[str, torch.Tensor]]]:
        """Yield what makes the tensors of the reader's file, one matrix after the other.

        Args:
            layout: the reader's.
            dtype: that torch.autocast casts weights to; None: they stay in their own.
            names: makes the reader's name out of a weight's.
        """
        if self.is_stack_of(layout):
            yield partial(self._whole, layout, dtype, names)
            return
        for matrix in self.matrices:
            yield partial(self._named, layout, dtype, names, matrix)

    def _whole(
        self, layout: Layout, dtype: torch.dtype | None, names: Callable[[str], str]
    ) -> dict[str, torch.Tensor]:
        planes = [self.plane(matrix, dtype) for matrix in self.matrices]
        shape = (len(planes), *self.shape)
        return layout.stored(names(self.name), planes[0].spec, shape).encode(planes)

    def _named(
        self,
        layout: Layout,
        dtype: torch.dtype | None,
        names: Callable[[str], str],
        matrix: Matrix,
    ) -> dict[str, torch.Tensor]:
        plane = self.plane(matrix, dtype)
        made: dict[str, torch.Tensor] = {}
        for one in matrix.named:
            stored = layout.stored(names(one.name), plane.spec, (one.rows, plane.cols))
            made |= stored.encode([_rows(stored.scheme, plane, one)])
        return made

    def plane(self, matrix: Matrix, dtype: torch.dtype | None) -> Plane:
        """Return the rowwise plane of a matrix as the forward has it.

        Args:
            matrix: of this weight.
            dtype: that torch.autocast casts weights to; None: it stays in its own.
        """
        value = self._value(matrix)
        own = value.dtype if dtype is None else dtype
        spec = self.spec(matrix, own)
        if is_quantized(value):
            storage = value.tensor_storage  # type: ignore[attr-defined]
            if storage.spec(ROWWISE) == spec:
                plane: Plane = storage.plane(ROWWISE)
                return plane
            value = value.dequantize()  # the recipe has other planes: the forward does so, too
        return _encoded(self.module, matrix, value.detach().to(own))

    def _value(self, matrix: Matrix) -> torch.Tensor:
        weight: Any = getattr(self.module, self.parameter)
        is_transposed = self.module.holds_transposed
        if matrix.index is None:
            return weight.t() if is_transposed else weight
        split = split_transposed if is_transposed else split_stack
        return split(weight)[matrix.index]


def bias_parts(
    module: nn.Module, name: str, found: Mapping[str, Weight], layout: Layout
) -> list[tuple[str, int, slice]]:
    """Return what a reader calls the biases of experts whose matrices have names of their own.

    Args:
        module: any.
        name: of a parameter.
        found: the weights of the module that the forward quantizes.
        layout: the reader's.

    Returns:
        Names, with the expert and the columns of the parameter `[E, out]` that each one is; nothing
        of a parameter that stays as it is.
    """
    if not isinstance(module, Experts):
        return []
    own = module.experts_layout
    pairs = (*zip(own.first_biases, own.first, strict=True), (own.down_bias, own.down))
    weight = found.get(next((one for bias, one in pairs if bias == name), ""))
    if weight is None or weight.is_stack_of(layout):
        return []
    return [
        (
            f"{one.name.removesuffix('weight')}bias",
            matrix.index or 0,
            slice(one.first, one.first + one.step * one.rows, one.step),
        )
        for matrix in weight.matrices
        for one in matrix.named
    ]


def _encoded(module: QuantizedModule, matrix: Matrix, x: torch.Tensor) -> Plane:
    """Return the rowwise plane that the module's forward makes of x `[out, in]`."""
    slot, stat = matrix.slot, None
    if slot.row_delay:
        stat = module.weight_statistics(matrix.part)[1][:1]
    rest = EncodeRequest(row_stat=stat)
    if slot.amax_group:
        rest = with_statistics(rest, x, slot.row, None, slot.amax_group)
    buffers, _ = encode_pair(x, PlanePair.of(slot.row, None), rest)
    spec = PlaneSpec.parse(slot.row.spec)
    return Plane(spec, ROWWISE, x.shape[0], x.shape[1], named_buffers(spec, buffers))


def _rows(scheme: Scheme, plane: Plane, named: Named) -> Plane:
    """Return some rows of a plane, in the blocks of a reader's file."""
    if named.rows == plane.rows:
        return plane
    held = scheme.as_stored(plane)
    if named.step > 1:
        index = (
            torch.arange(named.rows, dtype=torch.int64, device=plane.device) * named.step
            + named.first
        )
        made: Plane | None = held.take_rows(index) if held.unit(0) == 1 else None
    else:
        made = held.part(0, named.first, named.first + named.rows)
    if made is None:
        raise SpecError(
            f"rollout: {named.name} shares blocks with its sibling, since {named.rows} rows are no "
            f"multiple of {held.unit(0)}: readers want each by itself; take a recipe whose weights "
            "have blocks of one row"
        )
    return made


def weights_of(
    module: QuantizedModule, path: str, recipe: Recipe, first_expert: int
) -> dict[str, Weight]:
    """Return the parameters of a module that its forward quantizes, by name.

    Args:
        module: any of hybridq's.
        path: its name in the model.
        recipe: of the forward.
        first_expert: number of the first of its experts.

    Raises:
        SpecError: a weight is rounded stochastically, so that no two forwards have the same planes.
    """
    made = {}
    for name, part in module.weight_parts.items():
        weight = module._parameters.get(name)
        if weight is None or weight.dim() not in (2, 3):
            continue
        count = weight.shape[0] if weight.dim() == 3 else 1
        parts = module.matrix_parts(part, count, recipe) if weight.dim() == 3 else (part,)
        parts = parts * count if len(parts) < count else parts
        slots = [module.plan_of(recipe, one).weight for one in parts]
        if all(slot.row.is_plain for slot in slots):
            continue
        out, into = weight.shape[-2:][:: -1 if module.holds_transposed else 1]
        matrices = []
        for number, (one, slot) in enumerate(zip(parts, slots, strict=True)):
            _check(slot, path)
            index = number if weight.dim() == 3 else None
            named = _named(module, path, name, part, index, out, first_expert)
            where = f"{part}.{number}" if index is not None and part else str(number)
            matrices.append(Matrix(one if index is None else where, index, slot, named))
        made[name] = Weight(module, name, f"{path}.{name}", (out, into), tuple(matrices))
    return made


def _check(slot: SlotPlan, path: str) -> None:
    if slot.row.is_plain:
        raise SpecError(
            f"rollout: the recipe leaves some matrices of {path} in high precision and not others; "
            "a reader has one format for all experts of a layer"
        )
    if PlaneSpec.parse(slot.row.spec).stochastic:
        raise SpecError(
            f"rollout: weights of {path} are rounded stochastically, anew in every forward; take a "
            "recipe that rounds weights to nearest"
        )


def _named(
    module: QuantizedModule,
    path: str,
    name: str,
    part: str,
    index: int | None,
    out: int,
    first_expert: int,
) -> tuple[Named, ...]:
    """Return what a reader has of a matrix, and under which names."""
    parent = f"{path}." if path else ""
    if index is None:
        inner = f"{part}." if part else ""
        return (Named(f"{parent}{inner}weight", 0, 1, out),)
    number = index + first_expert
    if not isinstance(module, Experts):
        inner = f"{part}." if part else ""
        return (Named(f"{parent}{inner}{number}.weight", 0, 1, out),)
    layout = module.experts_layout
    if name != layout.gate_up or not layout.has_gate:
        return (Named(f"{parent}{number}.{name}.weight", 0, 1, out),)
    half, step = out // 2, 1 if layout.is_concatenated else 2
    second = half if layout.is_concatenated else 1
    return tuple(
        Named(f"{parent}{number}.{own}.weight", first, step, half)
        for own, first in (("gate_proj", 0), ("up_proj", second))
    )
