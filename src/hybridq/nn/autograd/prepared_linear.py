"""What a linear module's forward under one plan does not find out again."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ... import settings
from ...formats import PlaneSpec
from ...kernels.choice import (
    EncodeRequest,
    GemmArgs,
    Operand,
    Place,
    PlacedEncoder,
    Prologue,
    cached_choice,
)
from ...kernels.cpu import SKINNY_ROWS
from ...kernels.inputs import Chip, OperandCache, can_cache, chip_of, stream_of
from ...kernels.operators import (
    GemmPlan,
    GpuGemmPlan,
    encode_plan,
    gemm_plan,
    given_statistic,
    gpu_gemm_plan,
    placed_encoders,
    run_encode,
    skinny_gemm,
)
from ...recipes import STATIC, Plan, SlotPlan
from ...storage import Plane
from ..weights import Buffers
from .product_operands import plan_of_products
from .prologue import PrologueCall
from .slot_encoder import STREAMS, SlotEncoder

__all__ = ["PreparedLinear", "prepared_for"]


class PreparedSlot:
    """`SlotEncoder.operand` of one slot whose requests are made once, past the dispatcher.

    Args:
        plan: of the slot; the rowwise plane is quantized, and no statistic comes from outside.
        slot: `"input"` or `"weight"`.
        device: type of the tensors' device.

    Attributes:
        dying: by whether the columnwise plane will be wanted, the spec strings of the planes that
            are made at once if the rowwise one dies with the forward, `""` for no plane; None where
            they are made in two steps, or the rowwise one is saved.
        is_plain_col: the columnwise plane is not quantized.
    """

    __slots__ = (
        "_device",
        "_given",
        "_is_decoded",
        "_is_seeded",
        "_requests",
        "_saves_row",
        "_split",
        "dying",
        "is_plain_col",
    )

    def __init__(self, plan: SlotPlan, slot: str, device: str) -> None:
        self._device = device
        encoder = SlotEncoder(plan, slot)
        pairs = [encoder.pair(True, with_col) for with_col in (False, True)]
        #: Without and with a columnwise plane.
        self._requests = [pair.request(encoder.rest()) for pair in pairs]
        #: Whether a plane is rounded stochastically, and so a request has a seed.
        self._is_seeded = any(
            text and PlaneSpec.parse(text).stochastic
            for text in (self._requests[1].row, self._requests[1].col)
        )
        self._split = pairs[0].split
        #: Whether the columnwise plane is made of what the rowwise one decodes to.
        self._is_decoded = self._requests[1].is_decoded()
        #: A tensor that statistics were given in, its version, and the request with them.
        self._given: tuple[torch.Tensor | None, int, EncodeRequest] = (None, 0, self._requests[0])
        self.is_plain_col, self._saves_row = plan.col.is_plain, plan.saves_row
        self.dying: list[tuple[str, str] | None] = [(self._requests[0].row, "")]
        if self.is_plain_col:
            self.dying.append(None if self._saves_row else self.dying[0])
        else:
            both = (self._requests[1].row, self._requests[1].col)
            self.dying.append(None if self._is_decoded else both)

    def with_statistic(self, x: torch.Tensor, amax: torch.Tensor) -> EncodeRequest:
        """Return the request for the rowwise plane of x, scaled by a statistic that was given.

        Args:
            x: `[rows, cols]`, checked.
            amax: FP32 `[1]`, plain, and the same tensor in most calls.
        """
        known, version, request = self._given
        if known is not amax or version != amax._version:
            request = self._requests[0]
            spec = PlaneSpec.parse(request.row).resolve(x.dtype)
            stat = given_statistic(x.shape[0], spec, amax, "encode")
            request = request._replace(row_stat=stat)
            self._given = (amax, amax._version, request)
        return request

    def operand(
        self, x: torch.Tensor, is_saved: bool, seed: torch.Tensor | None
    ) -> tuple[Buffers, Buffers]:
        """Return the rowwise plane of x, and what is saved of it.

        Args:
            x: `[rows, cols]`, checked.
            is_saved: whether the columnwise plane will be wanted.
            seed: int64 `[1]` where a plane is rounded stochastically.
        """
        with_col = is_saved and not self.is_plain_col
        request = self._requests[with_col]
        if seed is not None:
            request = request._replace(seed=seed)
        if with_col and self._is_decoded:
            made = run_encode(x, request)
        else:
            plan = encode_plan(request.row, request.col, x.dtype, self._device)
            made = (plan.at_once or plan)(x, request)
        row = made[: self._split]
        if with_col or not is_saved:
            return row, made[self._split :]
        return row, row if self._saves_row else [x]

    def operand_in(
        self,
        x: torch.Tensor,
        is_saved: bool,
        seed: torch.Tensor | None,
        encoder: PlacedEncoder,
        place: Place,
        prologue: Prologue | None = None,
    ) -> tuple[Buffers, Buffers]:
        """Return `operand` with the rowwise plane in memory that is given.

        Args:
            x, is_saved, seed: as `operand` takes them.
            encoder: of `dying[is_saved]`.
            place: where the plane goes.
            prologue: what makes the matrix out of x; then what it knows of the rows follows what
                is saved.
        """
        with_col = is_saved and not self.is_plain_col
        request = self._requests[with_col]
        if seed is not None and self._is_seeded:
            request = request._replace(seed=seed)
        made = encoder.encode(x, request, place, prologue)
        if with_col or not is_saved or prologue is not None:
            return made[: self._split], made[self._split :]
        return made, [x]


class PreparedLinear:
    """The forward under one plan, for plain tensors of one dtype on one kind of device.

    Args:
        plan: of the module.
        dtype: of input, weight and bias.
        device: type of their device, a CPU or a GPU.

    Attributes:
        plan, dtype, device: the same.
        is_possible: both are quantized, and no plane's statistics come from outside of the tensor.
        takes_planes: weights may be planes that are there, and the input as it is.
        is_static: the input's statistic is given, not found.
        input, weight: how the tensors of these slots are encoded.
        weight_spec: of the weight's rowwise plane.
    """

    __slots__ = (
        "_column",
        "device",
        "dtype",
        "input",
        "is_possible",
        "is_static",
        "plan",
        "takes_planes",
        "weight",
        "weight_spec",
    )

    def __init__(self, plan: Plan, dtype: torch.dtype, device: str = "cpu") -> None:
        self.plan, self.dtype, self.device = plan, dtype, device
        slot, weight = plan.input, plan.weight
        self.is_static = plan.is_forward_only and slot.row_delay == STATIC
        is_outside = bool((plan.is_delayed and not self.is_static) or slot.amax_group)
        self.takes_planes = not (is_outside or plan.is_stochastic or weight.row.is_plain)
        is_outside = is_outside or bool(weight.amax_group)
        is_outside = is_outside or self.is_static
        self.is_possible = not (is_outside or slot.row.is_plain or weight.row.is_plain)
        self.input = PreparedSlot(slot, "input", device)
        self.weight = PreparedSlot(weight, "weight", device)
        self.weight_spec = PlaneSpec.parse(weight.row.spec).resolve(dtype)
        #: What is made of the input for the backward; None where that is another step.
        self._column = None
        if not slot.col.is_plain and slot.col_source == "original":
            self._column = slot.col.spec

    def skinny(
        self,
        x: torch.Tensor,
        w: torch.Tensor | Operand,
        bias: torch.Tensor | None,
        seed: torch.Tensor | None,
        saves_x: bool,
        amax: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Buffers] | None:
        """Return y and what is saved of x, made in one call of the core; None: not done.

        Args:
            x: `[rows, k]`.
            w: the weight, which is quantized on the way, and nothing of it is saved; or its
                rowwise plane.
            bias, seed: as for `linear_function.linear`.
            saves_x: the backward will want x's columnwise plane.
            amax: FP32 `[1]`, what x is scaled by, as kernels take it; None: its own.
        """
        plan, column = self.plan, self._column if saves_x else ""
        if column is None or not 0 < x.shape[0] <= SKINNY_ROWS:
            return None
        specs = (plan.input.row.spec, column, plan.weight.row.spec)
        product = skinny_gemm(*specs, self.dtype, bias is not None, plan.precision.fprop)
        return None if product is None else product(x, w, bias, seed, STREAMS["input"][1], amax)

    def fitting(self, plane: Plane | None) -> Plane | None:
        """Return the rowwise plane of a quantized weight if `with_plane` takes it, else None.

        Args:
            plane: of any spec; or None.
        """
        if plane is None or not self.takes_planes or plane.spec != self.weight_spec:
            return None
        return plane

    def with_plane(
        self,
        x: torch.Tensor,
        w: Plane,
        bias: torch.Tensor | None,
        amax: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return `x @ w.T + bias` where no gradient is wanted.

        Args:
            x: `[rows, k]`.
            w: a plane that is `fitting`.
            bias: `[n]`, or None.
            amax: FP32 `[1]`, which x is scaled by if `is_static`.
        """
        buffers, shape = w.tensors, w.matrix
        if self.plan.input.row.is_plain:
            row = [x]
        else:
            request = None if amax is None else self.input.with_statistic(x, amax)
            stat = None if request is None else request.row_stat
            weight = Operand(buffers, self.weight_spec, *shape)
            made = self.skinny(x, weight, bias, None, False, stat)
            if made is not None:
                return made[0]
            if request is not None:
                row = encode_plan(request.row, "", x.dtype, "cpu").scaled(x, request)
            else:
                row = self.input.operand(x, False, None)[0]
        cache = w.ready if can_cache(w.data) else None
        (a, b, multiply), args = self.product(bias)
        n, k = shape
        return multiply(Operand(row, a, x.shape[0], k), Operand(buffers, b, n, k, cache), args)

    def product(self, bias: torch.Tensor | None) -> tuple[GemmPlan, GemmArgs]:
        """Return how the rowwise planes are multiplied, and what that takes beside them.

        Args:
            bias: `[n]`, or None.
        """
        plan = self.plan
        precision = plan.precision.fprop
        texts = (plan.input.row.spec, plan.weight.row.spec)
        found = gemm_plan(*texts, self.dtype, precision, bias is None)
        return found, GemmArgs(bias, None, self.dtype, precision)

    def on_gpu(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        seed: torch.Tensor | None,
        saves: tuple[bool, bool],
        w_planes: tuple[Buffers, Buffers] | None = None,
        cache: OperandCache | None = None,
        before: PrologueCall | None = None,
    ) -> tuple[torch.Tensor, Buffers, Buffers, Buffers]:
        """Return y, and what is saved of x and of w, on the current GPU.

        What dies with the forward, the rowwise planes, lies in one allocation; what is saved for
        the backward in one for each plane, so that none keeps another alive.

        Args:
            x: `[rows, k]`; what the prologue takes.
            w: `[n, k]`.
            bias, seed: as for `linear_function.linear`.
            saves: whether the backward will want the columnwise planes of x and of w.
            w_planes: of w, and what is saved of it, where they are there; or None.
            cache: where what is made of the weight's plane is kept, or None.
            before: what makes the matrix that is multiplied out of x, or None.

        Returns:
            At last what the prologue's backward wants to know.
        """
        (n, k), rows, device = w.shape, x.shape[0], x.device
        has_planes, forced = w_planes is not None, settings.current().backend
        own = (saves, has_planes, before is not None, device, forced)
        product, encoders, room, end, nbytes = _in_size(self, (rows, n, k), *own)
        prologue, work, known = None, None, list[torch.Tensor]()
        if before is not None and encoders is not None:
            prologue = before.prologue.of_backends(x, before.gamma, before.beta)
            encoders = None if prologue is None else encoders
        if encoders is None:
            if before is None:
                x_row, x_saved = self.input.operand(x, saves[0], seed)
            else:
                encoder = SlotEncoder(self.plan.input, "input", seed, True)
                x_row, x_saved, known = encoder.prologue_operand(x, saves[0], *before)
            w_row, w_saved = w_planes or self.weight.operand(w, saves[1], seed)
        else:
            memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
            stream = stream_of(device)
            place = Place(memory, 0, stream)
            given = (saves[0], seed, encoders[0], place, prologue)
            x_row, x_saved = self.input.operand_in(x, *given)
            if w_planes is None:
                place = Place(memory, room, stream)
                w_planes = self.weight.operand_in(w, saves[1], seed, encoders[1], place)
            if prologue is not None and prologue.gamma is not None:
                x_saved, known = x_saved[:-2], x_saved[-2:]
            w_row, w_saved = w_planes
            work = Place(memory, end, stream)
        args = GemmArgs(bias, None, x.dtype, self.plan.precision.fprop, product.chip, None, work)
        left, right = Operand(x_row, product.a, rows, k), Operand(w_row, product.b, n, k, cache)
        return product.run(left, right, args), x_saved, w_saved, known

    def on_chip(self, rows: int, w: torch.Tensor, has_weight: bool) -> PreparedLinear:
        """Return `prepared_for` of the plan, for tensors of this dtype.

        Args:
            rows, w, has_weight: as `prepared_for` takes them.
        """
        forced = settings.current().backend
        return _on_chip(self, rows, w.shape, w.device, has_weight, forced)


class _Sized(NamedTuple):
    """What the forward on a GPU of one size does not find out again.

    Args:
        product: of the rowwise planes.
        encoders: of input and weight, whose rowwise planes lie in one allocation; None: they are
            made in several steps.
        room, end, nbytes: bytes of that allocation: where the weight's plane begins, where what
            dies with the product does, and all.
    """

    product: GpuGemmPlan
    encoders: tuple[PlacedEncoder, PlacedEncoder] | None
    room: int = 0
    end: int = 0
    nbytes: int = 0


@cached_choice
def _in_size(
    prepared: PreparedLinear,
    sizes: tuple[int, int, int],
    saves: tuple[bool, bool],
    has_planes: bool,
    is_mapped: bool,
    device: torch.device,
    forced: str | None,
) -> _Sized:
    """Return it for sizes (rows, n, k), and what `PreparedLinear.on_gpu` takes."""
    del forced  # what `gpu_gemm_plan` and `placed_encoders` ask for
    (rows, n, k), plan, dtype = sizes, prepared.plan, prepared.dtype
    texts = (plan.input.row.spec, plan.weight.row.spec)
    product = gpu_gemm_plan(*texts, dtype, plan.precision.fprop, sizes, device)
    specs = prepared.input.dying[saves[0]]
    own = None if has_planes else prepared.weight.dying[saves[1]]
    if is_mapped and saves[0] and prepared.input.is_plain_col:
        specs = None
    if specs is None or (own is None and not has_planes):
        return _Sized(product, None)
    found = placed_encoders(specs, own, dtype, prepared.device, is_mapped)
    if found is None:
        return _Sized(product, None)
    room = found[0].room(rows, k)
    end = room if has_planes else room + found[1].room(n, k)
    return _Sized(product, found, room, end, end + product.room)


def prepared_for(plan: Plan, rows: int, w: torch.Tensor, has_weight: bool) -> PreparedLinear:
    """Return the forward on a GPU whose planes are encoded as their products take them.

    Args:
        plan: of the module.
        rows: of the input and of the gradient, whose planes all stay on this device.
        w: `[out_features, in_features]`, on a GPU.
        has_weight: the planes of the weight are somebody else's, too.
    """
    outer, inner = w.shape
    own = (w.dtype, w.device.type, chip_of(w.device), has_weight, settings.current().backend)
    return _prepared(plan, (rows, inner, outer), *own)


@cached_choice
def _prepared(
    plan: Plan,
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    device: str,
    chip: Chip,
    has_weight: bool,
    forced: str | None,
) -> PreparedLinear:
    del forced  # what `plan_of_products` asks for
    own = plan_of_products(plan, sizes, dtype, device, chip, has_weight)
    return PreparedLinear(own, dtype, device)


@cached_choice
def _on_chip(
    prepared: PreparedLinear,
    rows: int,
    shape: torch.Size,
    device: torch.device,
    has_weight: bool,
    forced: str | None,
) -> PreparedLinear:
    """Return `prepared_for`, of a key that is looked up faster: no plan and no chip."""
    outer, inner = shape
    own = (prepared.dtype, device.type, chip_of(device), has_weight, forced)
    return _prepared(prepared.plan, (rows, inner, outer), *own)
