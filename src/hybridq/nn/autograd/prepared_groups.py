"""What the forward and the backward of groups on the current GPU do not find out again.

Past torch's dispatcher, and for planes without statistics of groups, or with those of FP8: where
groups lie is found by one launch, tokens and matrices are encoded as their products take them, and
what dies with a forward or a backward lies in one allocation. The weights of any recipe are encoded
as one stack.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch

from ... import settings
from ...formats import PlaneSpec
from ...kernels.choice import (
    EncodeRequest,
    GroupedArgs,
    GroupedOperand,
    GroupEncoder,
    Groups,
    Place,
    cached_choice,
)
from ...kernels.inputs import chip_of, is_current, stream_of
from ...kernels.operators import (
    GpuGroupedPlan,
    gpu_grouped_plan,
    group_encoder,
    tokens_as_planned,
)
from ...recipes import Plan, SlotPlan
from ..weights import Buffers
from .product_operands import plan_of_products
from .slot_encoder import SlotEncoder

__all__ = [
    "GroupPlanes",
    "PreparedGroups",
    "PreparedGroupsBackward",
    "prepared_groups",
    "prepared_groups_backward",
]

#: What all features are multiples of, where tile kernels write planes for tensor cores.
_STEP: Final = 16


class GroupPlanes(NamedTuple):
    """Planes of groups.

    Args:
        row, col: buffers of the rowwise and of the columnwise plane, each of a stack `[G, ...]`.
    """

    row: Buffers
    col: Buffers


class _Encoder(NamedTuple):
    """What encodes one slot, with its request, and how many buffers the rowwise plane has."""

    encoder: GroupEncoder
    request: EncodeRequest
    split: int


def _encoder(
    slot: SlotPlan, name: str, with_col: bool, dtype: torch.dtype, device: str
) -> _Encoder | None:
    """Return what encodes the tensors of a slot, or None: several steps do."""
    own = SlotEncoder(slot, name)
    pair, is_weight = own.pair(True, with_col), name == "weight"
    is_plain = pair.is_plain_row or pair.is_plain_col or pair.made.is_decoded()
    if is_plain or slot.is_delayed or slot.amax_group or (with_col and slot.saves_row):
        return None
    request = pair.request(own.rest())
    specs = [PlaneSpec.parse(text).resolve(dtype) if text else None for text in request[:2]]
    for spec, is_row in zip(specs, (True, False), strict=True):
        if spec is None:
            continue
        is_square = spec.format.block is not None and spec.format.block[0] > 1
        if spec.stochastic or spec.scale_layout == "tiles":
            return None
        # Of what needs an amax of its group FP8 with one scale alone has a kernel for the product.
        is_known = not spec.needs_amax or (spec.format.is_tensor_scaled and spec.signs is None)
        if not is_weight and (not is_known or (is_row and is_square)):
            return None
    op = "encode_many" if is_weight else "encode_ragged"
    made = group_encoder(request.row, request.col, dtype, device, op)
    return None if made is None else _Encoder(made, request, pair.split)


class PreparedGroups:
    """The forward of groups under one plan.

    Args:
        plan: of the call, in the specs in which its planes are encoded.
        features: in_features and out_features.
        groups: how many there are, and the tokens of one, as plans distinguish them.
        saves: whether the backward will want the columnwise planes of x and of the weights.
        dtype: of the tensors.
        device: a GPU.

    Attributes:
        plan: the same.
        takes_tokens: the whole forward is prepared; else the weights are, at most.
        takes_weights: the weights are.
    """

    __slots__ = ("_by_group", "_dtype", "_features", "_product", "_w", "_x", "plan", "takes_tokens")

    def __init__(
        self,
        plan: Plan,
        features: tuple[int, int],
        groups: tuple[int, int],
        saves: tuple[bool, bool],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.plan, self._features, self._dtype = plan, features, dtype
        self._w = _encoder(plan.weight, "weight", saves[1], dtype, device.type)
        self._x = _encoder(plan.input, "input", saves[0], dtype, device.type)
        # The backward has the same plan, and so encodes its gradient in the same way.
        grad = _encoder(plan.grad_output, "grad_output", saves[0], dtype, device.type)
        has_backward = True in saves
        self.takes_tokens = None not in (self._w, self._x) and not (has_backward and grad is None)
        self._product: GpuGroupedPlan | None = None
        if self.takes_tokens:
            a, b, (inner, outer) = plan.input.row.spec, plan.weight.row.spec, features
            own = (plan.precision.fprop, (outer, inner), groups, True, device)
            self._product = gpu_grouped_plan(a, b, dtype, *own)
            #: Whether tokens have a scale of each group.
            self._by_group = self._product.a.needs_amax

    @property
    def takes_weights(self) -> bool:
        """Whether the weights are encoded as one stack."""
        return self._w is not None

    def weights(self, weights: Sequence[torch.Tensor]) -> GroupPlanes | None:
        """Return the planes of all weights as one stack; None: no kernel writes them together.

        Args:
            weights: `[out, in]` of each group.
        """
        if self._w is None:
            return None
        encoder, device = self._w.encoder, weights[0].device
        room = encoder.stack_room(len(weights), *weights[0].shape)
        memory = torch.empty(room, dtype=torch.uint8, device=device)
        return self._stack(weights, Place(memory, 0, stream_of(device)))

    def _stack(self, weights: Sequence[torch.Tensor], place: Place) -> GroupPlanes | None:
        encoder, request, split = self._w  # type: ignore[misc]
        made = encoder.stack(weights, request, place)
        return None if made is None else GroupPlanes(made[:split], made[split:])

    def forward(
        self,
        x: torch.Tensor,
        offsets: torch.Tensor,
        weights: Sequence[torch.Tensor],
        bias: torch.Tensor | None,
        row_index: torch.Tensor | None,
    ) -> tuple[torch.Tensor, Buffers, Buffers] | None:
        """Return y, and the columnwise planes of x and of the weights that are saved.

        Args:
            x: `[T, in_features]`, or what `row_index` takes its rows out of.
            offsets: int32 `[G]`.
            weights: `[out_features, in_features]` of each group.
            bias: `[G, out_features]` or None.
            row_index: int64 `[T]`, or None.

        Returns:
            None where a tensor lies so that kernels do not take it.
        """
        device, count, (inner, outer) = x.device, len(weights), self._features
        (encoder, request, split), product = self._x, self._product  # type: ignore[misc]
        tokens = x.shape[0] if row_index is None else row_index.shape[0]
        stream, room = stream_of(device), encoder.token_room(tokens, inner, count)
        end = room + self._w.encoder.stack_room(count, outer, inner)  # type: ignore[union-attr]
        memory = torch.empty(end, dtype=torch.uint8, device=device)
        groups = encoder.places(offsets, tokens, stream)
        if row_index is not None:
            request = request._replace(row_index=row_index)
        made = encoder.tokens(x, groups, request, Place(memory, 0, stream))
        if made is None or product is None:
            return None
        w = self._stack(weights, Place(memory, room, stream))
        if w is None:
            return None
        left = GroupedOperand(made[:split], product.a, tokens, inner, by_group=self._by_group)
        right = GroupedOperand(w.row, product.b, outer, inner, True)
        args = GroupedArgs(groups.ends, tokens, None, bias, None, self._dtype)
        return product.run(left, right, args), made[split:], w.col


class PreparedGroupsBackward:
    """The backward of groups under one plan: both gradients, that of the input for certain.

    Args:
        plan: of the call, in the specs in which its planes are encoded.
        features, groups, dtype, device: as `PreparedGroups` takes them.
        has_wgrad: whether the gradient of the weights is wanted.
    """

    __slots__ = ("_by_group", "_dtype", "_encoder", "_features", "_plans")

    def __init__(
        self,
        plan: Plan,
        features: tuple[int, int],
        groups: tuple[int, int],
        has_wgrad: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._dtype, self._features, grad = dtype, features, plan.grad_output
        self._encoder = _encoder(grad, "grad_output", has_wgrad, dtype, device.type)
        self._plans: list[GpuGroupedPlan] = []
        #: Whether the operands of each product have a scale of each group.
        self._by_group: list[tuple[bool, bool]] = []
        inner, outer = features
        precision = plan.precision
        for texts, how, sizes, is_stack in (
            ((grad.row, plan.weight.col), precision.dgrad, (inner, outer), True),
            ((grad.col, plan.input.col), precision.wgrad, (outer, inner), False),
        ):
            if self._encoder is not None and (is_stack or has_wgrad):
                specs = [one.spec for one in texts]
                own = (dtype, how, sizes, groups, is_stack, device)
                made = gpu_grouped_plan(specs[0], specs[1], *own)
                self._plans.append(made)
                self._by_group.append((made.a.needs_amax, made.b.needs_amax))

    @property
    def is_possible(self) -> bool:
        """Whether the gradient's planes are made at once."""
        return self._encoder is not None

    def encode(self, dy: torch.Tensor, offsets: torch.Tensor) -> tuple[GroupPlanes, Groups] | None:
        """Return the planes of dy, and where its groups lie; None: no kernel reads such a dy.

        Args:
            dy: `[T, out_features]` on the current device.
            offsets: int32 `[G]`.
        """
        encoder, request, split = self._encoder  # type: ignore[misc]
        device, stream = dy.device, stream_of(dy.device)
        room = encoder.token_room(dy.shape[0], dy.shape[1], offsets.shape[0])
        memory = torch.empty(room, dtype=torch.uint8, device=device)
        groups = encoder.places(offsets, dy.shape[0], stream)
        made = encoder.tokens(dy, groups, request, Place(memory, 0, stream))
        return None if made is None else (GroupPlanes(made[:split], made[split:]), groups)

    def dgrad(self, dy: Buffers, w: Buffers, groups: Groups, tokens: int) -> torch.Tensor:
        """Return the gradient of the input.

        Args:
            dy: rowwise plane of the gradient.
            w: columnwise planes of the weights, as one stack.
            groups: where they lie.
            tokens: of all groups.
        """
        (inner, outer), plan = self._features, self._plans[0]
        left = GroupedOperand(dy, plan.a, tokens, outer, by_group=self._by_group[0][0])
        right = GroupedOperand(w, plan.b, inner, outer, True)
        args = GroupedArgs(groups.ends, tokens, None, None, None, self._dtype)
        return plan.run(left, right, args)

    def wgrad(self, dy: Buffers, x: Buffers, groups: Groups, tokens: int) -> torch.Tensor:
        """Return the gradient of the weights `[G, out_features, in_features]`.

        Args:
            dy, x: columnwise planes of the gradient and of the input.
            groups, tokens: as `dgrad` takes them.
        """
        (inner, outer), plan = self._features, self._plans[1]
        of_group = self._by_group[1]
        more = (False, True, False)
        left = GroupedOperand(dy, plan.a, outer, groups.columns, *more, of_group[0])
        right = GroupedOperand(x, plan.b, inner, groups.columns, *more, of_group[1])
        args = GroupedArgs(groups.ends, tokens, groups.padded, None, None, self._dtype)
        return plan.run(left, right, args)


def prepared_groups(
    plan: Plan,
    features: tuple[int, int],
    tokens: int,
    groups: int,
    saves: tuple[bool, bool],
    like: torch.Tensor,
) -> PreparedGroups | None:
    """Return the forward of groups on a GPU, as far as it is prepared, or None: nothing of it is.

    Args:
        plan: of the module.
        features: in_features and out_features.
        tokens, groups: how many there are.
        saves: as `PreparedGroups` takes them.
        like: a tensor of the call's dtype, on a GPU.
    """
    device = like.device
    if 0 in (tokens, groups, *features) or not is_current(device):
        return None
    sizes = (groups, tokens_as_planned(tokens, groups))
    own = (like.dtype, device, settings.current().backend)
    return _forward(plan, features, sizes, saves, *own)


@cached_choice
def _forward(
    plan: Plan,
    features: tuple[int, int],
    groups: tuple[int, int],
    saves: tuple[bool, bool],
    dtype: torch.dtype,
    device: torch.device,
    forced: str | None,
) -> PreparedGroups | None:
    del forced  # what `select` asks for
    if not any(size % _STEP for size in features):
        count, average = groups
        sizes = (count * average, *features)
        own = plan_of_products(plan, sizes, dtype, device.type, chip_of(device), False, count)
        made = PreparedGroups(own, features, groups, saves, dtype, device)
        if made.takes_tokens:
            return made
    made = PreparedGroups(plan, features, groups, saves, dtype, device)
    return made if made.takes_tokens or made.takes_weights else None


def prepared_groups_backward(
    plan: Plan, features: tuple[int, int], groups: int, has_wgrad: bool, dy: torch.Tensor
) -> PreparedGroupsBackward | None:
    """Return what makes the gradients of groups, or None: their backward is the general one.

    Args:
        plan: in whose specs the forward has encoded.
        features: in_features and out_features.
        groups: how many there are.
        has_wgrad: whether the gradient of the weights is wanted.
        dy: `[T, out_features]` on a GPU.
    """
    if 0 in (dy.shape[0], groups, *features) or not is_current(dy.device):
        return None
    sizes = (groups, tokens_as_planned(dy.shape[0], groups))
    own = (dy.dtype, dy.device, settings.current().backend)
    return _backward(plan, features, sizes, has_wgrad, *own)


@cached_choice
def _backward(
    plan: Plan,
    features: tuple[int, int],
    groups: tuple[int, int],
    has_wgrad: bool,
    dtype: torch.dtype,
    device: torch.device,
    forced: str | None,
) -> PreparedGroupsBackward | None:
    del forced  # what `select` asks for
    if plan.weight.saves_row or plan.weight.col.is_plain or (has_wgrad and plan.input.col.is_plain):
        return None
    made = PreparedGroupsBackward(plan, features, groups, has_wgrad, dtype, device)
    return made if made.is_possible else None
