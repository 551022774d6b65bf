"""Collector: watches the products of a run, and adds up what each format loses of their tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ..._torch_private import graph_task_id
from ...direction import COLUMNWISE, ROWWISE, Direction
from ...formats import PlaneSpec
from ...gemm import CONTRACT, Gemm
from ...kernels.inputs import HIGH_PRECISION, wide
from ...nn.autograd import WatchedProduct, WatchedTensor
from ...recipes import Plan, QuantizerRole, Recipe, SlotPlan, bind
from ...recipes.boundary import boundary_quantizer
from ...recipes.gemm_words import word
from ...storage import Plane, TensorStorage
from .rows import BadValue, ProductShape, ProductStatistics, SlotRow, first_position, joined
from .slot_statistics import ExpertLoss, made_planes, measure_plane, rowwise_plane

__all__ = ["Collector", "Wanted"]

_FPROP, _DGRAD, _WGRAD = CONTRACT
_PLAIN_SPEC: Final = PlaneSpec.parse("identity")
_PLAIN: Final = _PLAIN_SPEC.plain_text()


class Wanted(NamedTuple):
    """What a report is asked for.

    Attributes:
        formats: what-if, by label: of all planes one spec, or a recipe.
        gemms: whether products are computed again, exactly and with each format.
        backward: whether gradients are measured.
    """

    formats: Mapping[str, PlaneSpec | Recipe]
    gemms: bool = True
    backward: bool = True


class _Variant(NamedTuple):
    plan: Plan
    in_run: bool


class _Group(NamedTuple):
    """The tensors of one group of a product in its forward."""

    x: torch.Tensor
    weight: Callable[[], torch.Tensor]
    held: Callable[[], TensorStorage | None]
    variants: Sequence[_Variant]
    scales: Any
    rows: slice
    needs: tuple[bool, bool]
    number: int | None


class _Name(NamedTuple):
    layer: str
    role: str


_SlotKey = tuple[str, str, Direction, str, bool]


class Collector:
    """A product watcher that measures all it is shown.

    Args:
        model: whose modules are measured, by their names.
        wanted: formats and what else.
    """

    sees_plain = True

    def __init__(self, model: nn.Module, wanted: Wanted) -> None:
        self.wanted = wanted
        self.names = {id(module): name for name, module in model.named_modules()}
        self.slots: dict[_SlotKey, SlotRow] = {}
        self.products: dict[tuple[str, str, str, bool], ProductStatistics] = {}
        self.shapes: dict[str, ProductShape] = {}
        self.first_bad: BadValue | None = None
        #: A layer whose gradient was to come; empty: none was, or there has been one.
        self.awaits_backward = ""
        self._has_backward = False
        self._is_trained = any(one.requires_grad for one in model.parameters())
        self.order = 0
        #: Of what is measured now: the group, and its first row.
        self._group: tuple[int | None, int] = (None, 0)

    def __call__(self, product: WatchedProduct) -> Callable[[torch.Tensor], None] | None:
        """Measure the forward of a product; return what measures its gradient.

        What is no module of the model is not measured: a loop may run others, as a teacher's.
        """
        if id(product.module) not in self.names:
            return None
        wants_gradient = self.wanted.backward and product.result.requires_grad
        is_again = graph_task_id() != -1  # a recomputation: the forward has been seen
        if is_again and not wants_gradient:
            return None
        name = self._name(product)
        if self.wanted.backward and not self._has_backward and not self.awaits_backward:
            is_off = self._is_trained and not torch.is_grad_enabled()
            if wants_gradient or is_off:
                self.awaits_backward = name.layer or "the model"
        x = product.matrix().detach()
        _check_dtype(name, x)
        x = x.reshape(-1, x.shape[-1])
        x = x.clone() if wants_gradient else x
        groups = self._groups(product, name, x)
        if not is_again:
            self._shape(product, name, x)
            for group in groups:
                self._forward(name, group)
            self._result(name, product)
        if not wants_gradient:
            return None

        def see_gradient(grad: torch.Tensor) -> None:
            self._has_backward, self.awaits_backward = True, ""
            self._backward(name, groups, grad.detach())

        return see_gradient

    def see_tensor(self, seen: WatchedTensor) -> None:
        """Measure an operand of quantized attention."""
        if id(seen.module) not in self.names:
            return
        if not self.wanted.backward if seen.is_gradient else graph_task_id() != -1:
            return  # a gradient that is not asked for, or a recomputation
        own = seen.module.name
        name = _Name(self.names[id(seen.module)], str(own))
        _check_dtype(name, seen.values)
        x = seen.values.reshape(-1, seen.values.shape[-1])
        self.order += 1
        self._group = (None, 0)
        measured: set[str] = set()
        for quantizer, in_run in self._quantizers(seen):
            spec = _PLAIN_SPEC if quantizer is None else quantizer
            if in_run:
                self._look_for_bad(name, seen.tensor, x, ROWWISE, _block(spec, x))
            if spec.text in measured:
                continue
            measured.add(spec.text)
            plane = rowwise_plane(x, spec)
            label = "bf16" if plane.spec.format.is_identity else word(plane.spec)
            statistics = measure_plane(x, plane)
            given = (ROWWISE, label, in_run, statistics, self.order)
            self._add(SlotRow(name.layer, name.role, seen.tensor, *given))
            if in_run and statistics.bad_outputs:
                self._made_bad(name, seen.tensor, x, plane)

    def _quantizers(self, seen: WatchedTensor) -> Iterator[tuple[PlaneSpec | None, bool]]:
        """Yield the spec of the run's own rowwise plane, and what-if ones; None: it is plain."""
        yield seen.quantizer.rowwise, True
        for one in self.wanted.formats.values():
            if isinstance(one, PlaneSpec):
                yield one, False
            elif one.quantizes_attention:
                role = QuantizerRole("dpa", seen.role, str(seen.module.name))
                yield boundary_quantizer(one, role).rowwise, False

    # ---- names, groups, formats

    def _name(self, product: WatchedProduct) -> _Name:
        module: Any = product.module
        own = self.names[id(module)]
        layer = f"{own}.{product.part}" if own and product.part else own or product.part
        return _Name(layer, module.part_name(product.part) if module.name else "")

    def _shape(self, product: WatchedProduct, name: _Name, x: torch.Tensor) -> None:
        weights = product.weights()
        out, into = weights[0].shape
        kind: Any = product.module
        known = self.shapes.get(name.layer)
        rows = (*(() if known is None else known.rows), x.shape[0])
        size, plan = (into, out), product.plans[0]
        made = ProductShape(*name, kind.module_type, rows, size, len(weights), plan)
        self.shapes[name.layer] = made

    def _groups(self, product: WatchedProduct, name: _Name, x: torch.Tensor) -> list[_Group]:
        copies = None
        if dist.is_available() and dist.is_initialized():
            # Gathered parameters have no memory between a forward and its backward.
            copies = [one.detach().clone() for one in product.weights()]
        ends = [x.shape[0]] if product.offsets is None else product.offsets.tolist()
        plans = list(product.plans) * (len(ends) if len(product.plans) == 1 else 1)
        scales = list(product.scales) or [None]
        scales *= len(ends) if len(scales) == 1 else 1
        by_plan: dict[Any, list[_Variant]] = {}
        made, start = [], 0
        for g, end in enumerate(ends):
            rows = slice(start, end)
            start = end
            if rows.start == rows.stop:
                continue
            plan = plans[g]
            if plan not in by_plan:
                by_plan[plan] = self._variants(plan, name, product)
            weight = _weight(product, g, copies)
            held = partial(product.held_by, g)
            given = (x[rows], weight, held, by_plan[plan], scales[g], rows, product.needs)
            made.append(_Group(*given, None if product.offsets is None else product.numbers[g]))
        return made

    def _variants(self, plan: Plan | None, name: _Name, product: WatchedProduct) -> list[_Variant]:
        """Return the run's own plan, and what-if ones."""
        kind: Any = product.module
        own = _plan_of(_PLAIN) if plan is None else plan
        found = [_Variant(own, True)]
        for one in self.wanted.formats.values():
            if isinstance(one, Recipe):
                found.append(_Variant(bind(one, name.role, kind.module_type), False))
            else:
                found.append(_Variant(_plan_of(one.plain_text()), False))
        return found

    # ---- measuring

    def _forward(self, name: _Name, group: _Group) -> None:
        weight = group.weight()
        x = self._planes(name, group, "input", group.x, ROWWISE)
        w = self._planes(name, group, "weight", weight, ROWWISE)
        self._gemm(name, group, _FPROP, (group.x, x), (weight, w))

    def _backward(self, name: _Name, groups: Sequence[_Group], grad: torch.Tensor) -> None:
        """Measure the products of a gradient that the run makes: those that are needed."""
        for group in groups:
            if group.rows.stop > grad.shape[0]:
                continue  # over ranks of tensor parallelism, of whose tokens this is a part
            dy = grad if len(groups) == 1 and len(grad) == len(group.x) else grad[group.rows]
            dgrad, wgrad = group.needs
            if dgrad:
                weight = group.weight()
                rowwise = self._planes(name, group, "grad_output", dy, ROWWISE)
                w = self._planes(name, group, "weight", weight, COLUMNWISE)
                self._gemm(name, group, _DGRAD, (dy, rowwise), (weight.t(), w))
            if wgrad:
                columnwise = self._planes(name, group, "grad_output", dy, COLUMNWISE)
                x = self._planes(name, group, "input", group.x, COLUMNWISE)
                self._gemm(name, group, _WGRAD, (dy.t(), columnwise), (group.x.t(), x))
            if not (dgrad or wgrad):  # a bias alone is trained
                self.order += 1
                self._group = (group.number, group.rows.start)
                self._look_for_bad(name, "grad_output", dy, ROWWISE, (1, 1))

    def _planes(
        self, name: _Name, group: _Group, slot: str, x: torch.Tensor, direction: Direction
    ) -> list[Plane | None]:
        """Return the plane of each variant, measured; None: it is the tensor as it is."""
        self.order += 1
        self._group = (group.number, group.rows.start)
        own: SlotPlan = getattr(group.variants[0].plan, slot)
        text = (own.row if direction == ROWWISE else own.col).spec
        self._look_for_bad(name, slot, x, direction, _block(PlaneSpec.parse(text), x))
        held = group.held() if slot == "weight" else None
        found: list[Plane | None] = []
        measured: set[tuple[str, str]] = set()
        for variant in group.variants:
            plan: SlotPlan = getattr(variant.plan, slot)
            scales = group.scales if variant.in_run else None
            kept = held if variant.in_run else None
            plane = made_planes(x, plan, slot, [direction], scales, kept)[direction]
            is_plain = plane.spec.format.is_identity and plan.col_source == "original"
            found.append(None if is_plain else plane)
            seen = (plane.spec.text, plan.col_source if direction == COLUMNWISE else "original")
            if seen in measured:
                continue
            measured.add(seen)
            label = "bf16" if plane.spec.format.is_identity else word(plane.spec)
            statistics = measure_plane(x, plane)
            row = SlotRow(*name, slot, direction, label, variant.in_run, statistics, self.order)
            if group.number is not None:
                row = replace(row, experts={group.number: ExpertLoss.of(statistics)})
            self._add(row)
            if variant.in_run and statistics.bad_outputs:
                self._made_bad(name, slot, x, plane)
        return found

    def _add(self, row: SlotRow) -> None:
        key = (row.layer, row.tensor, row.direction, row.format, row.in_run)
        known = self.slots.get(key)
        self.slots[key] = row if known is None else joined((known, row))

    def _gemm(
        self,
        name: _Name,
        group: _Group,
        gemm: Gemm,
        a: tuple[torch.Tensor, Sequence[Plane | None]],
        b: tuple[torch.Tensor, Sequence[Plane | None]],
    ) -> None:
        """Add what each variant's planes add to a product `a @ b.T` of the matrices."""
        if not self.wanted.gemms or a[0].shape[1] != b[0].shape[1]:
            return
        plain = [wide(one) for one in (a[0], b[0])]
        exact = plain[0] @ plain[1].t()
        signal = float(exact.square().sum())
        seen: set[str] = set()
        for variant, one, other in zip(group.variants, a[1], b[1], strict=True):
            label = _pair(one, other)
            if label in seen:
                continue
            seen.add(label)
            noise = 0.0
            if one is not None or other is not None:
                left = plain[0] if one is None else _own(one)
                right = plain[1] if other is None else _own(other)
                noise = float((left @ right.t() - exact).square().sum())
            row = ProductStatistics(name.layer, gemm.name, label, variant.in_run, noise, signal)
            key = (name.layer, gemm.name, label, variant.in_run)
            known = self.products.get(key)
            self.products[key] = row if known is None else known + row

    # ---- values that are not finite

    def _look_for_bad(
        self,
        name: _Name,
        tensor: str,
        x: torch.Tensor,
        direction: Direction,
        block: tuple[int, int],
    ) -> None:
        if self.first_bad is not None:
            return
        bad = ~x.isfinite()
        if bool(bad.any()):
            self._note(name, tensor, direction, first_position(bad), x, block, False)

    def _made_bad(self, name: _Name, tensor: str, x: torch.Tensor, plane: Plane) -> None:
        if self.first_bad is None:
            values = plane.dequantize()
            bad = x.isfinite() & ~values.isfinite()
            block = _block(plane.spec, x)
            at = first_position(bad)
            self._note(name, tensor, plane.direction, at, values, block, True)

    def _result(self, name: _Name, product: WatchedProduct) -> None:
        if self.first_bad is not None:
            return
        self._group = (None, 0)
        y = product.result.detach()
        flat = y.reshape(-1, y.shape[-1])
        bad = ~flat.isfinite()
        if not bool(bad.any()):
            return
        for own, one in product.module.named_parameters(recurse=False):
            if "bias" in own and type(one.data) is torch.Tensor:  # added after the product
                row = one.detach().reshape(1, -1)
                self._look_for_bad(name, own, row, ROWWISE, (1, 1))
        if self.first_bad is None:
            self._note(name, "output", ROWWISE, first_position(bad), flat, (1, 1), True)

    def _note(
        self,
        name: _Name,
        tensor: str,
        direction: Direction,
        at: tuple[int, int],
        values: torch.Tensor,
        block: tuple[int, int],
        is_made: bool,
    ) -> None:
        own = at if direction == ROWWISE else at[::-1]
        place = (own[0] // block[0], own[1] // block[1])
        value = str(float(values[at]))
        number, first = self._group
        if tensor != "weight":  # of all groups' rows
            at = (at[0] + first, at[1])
        given = (name.layer, tensor, direction, place, at, value, is_made, self.order)
        self.first_bad = BadValue(*given, group=number)


def _check_dtype(name: _Name, x: torch.Tensor) -> None:
    """Raise where no format takes the tensors of a layer."""
    if x.dtype not in HIGH_PRECISION:
        raise TypeError(
            f"report: {name.layer or '(model)'}: a tensor that is quantized must be float32, "
            f"bfloat16 or float16, got {x.dtype}; cast the model first, as by model.float()"
        )


def _block(spec: PlaneSpec, x: torch.Tensor) -> tuple[int, int]:
    """Return rows and columns of a block of a plane: of the whole where it has one scale."""
    if spec.format.is_identity:
        return (1, 1)
    return spec.format.block or (max(x.shape), max(x.shape))


def _weight(
    product: WatchedProduct, group: int, copies: Sequence[torch.Tensor] | None
) -> Callable[[], torch.Tensor]:
    """Return what gives a group's weight, in the backward too."""
    if copies is not None:
        return lambda: copies[group]
    return lambda: product.weights()[group]


def _plan_of(text: Any) -> Plan:
    """Return the plan in which all planes are alike, each made of the tensor as it is."""
    slot = SlotPlan(text, text, "original", "")
    return Plan(slot, slot, slot, text.is_stochastic, text.is_plain)


def _own(plane: Plane) -> torch.Tensor:
    """Return the values of a plane's own matrix."""
    values = plane.dequantize() if plane.direction == ROWWISE else plane.dequantize().t()
    return wide(values)


def _pair(a: Plane | None, b: Plane | None) -> str:
    words = ["bf16" if one is None else word(one.spec) for one in (a, b)]
    return words[0] if words[0] == words[1] else " x ".join(words)
