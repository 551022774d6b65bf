"""The autograd function of grouped linear modules: three grouped GEMMs between ragged planes.

```
fprop  y[g]  = x[g]  @ w[g].T    (x.row,  w[g].row)        forward
dgrad  dx[g] = dy[g] @ w[g]      (dy.row, w[g].col)        backward, if x needs a gradient
wgrad  dw[g] = dy[g].T @ x[g]    (dy.col, x.col)           backward, if a weight needs a gradient
```

x[g] are the rows of x that group g has: `offsets` on the device says where each group ends, and
nothing here reads it. Every group is quantized as a tensor of its own (`by_group`), so that the
results are those of one linear module per group. Random streams are those of `linear`; each group
has a seed of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch

from ...kernels import OperandCache
from ...kernels.inputs import can_bypass_dispatcher, refuse_tangents, without_autocast
from ...kernels.operators import StatedFunction, run_grouped_gemm
from ...kernels.ragged import capacity
from ...recipes import Plan, SlotPlan
from ...tensor.stack import split_stack, split_transposed
from ..delayed_scaling import Scales
from ..weights import (
    Buffers,
    CachedWeight,
    Into,
    PrequantizedWeight,
    accumulate_groups,
    given_to_autograd,
    target_of,
)
from .double_backward import anchor_on, without_derivative
from .forward_only import without_backward
from .grouped_tokens import encode_tokens
from .grouped_weights import WeightPlanes, weight_columns, weight_planes
from .offload import ENTERED, tell_offload
from .prologue import Activation
from .slot_encoder import SlotEncoder
from .token_routes import GradientPlane, MadePlane, TokenRows, sum_of_rows

__all__ = ["GroupedCall", "Layout", "draw_seeds", "grouped_linear"]


class Layout(NamedTuple):
    """How the parameters of a grouped linear module are given.

    Attributes:
        groups: how many there are.
        is_single: the weights are one tensor `[G, out, in]`, else one `[out, in]` each.
        has_bias: there are biases.
        is_single_bias: they are one tensor `[G, out]`, else one `[out]` each.
        features: (in_features, out_features).
        is_transposed: the one tensor of weights is `[G, in, out]`.
    """

    groups: int
    is_single: bool
    has_bias: bool
    is_single_bias: bool
    features: tuple[int, int]
    is_transposed: bool = False

    def matrices(self, weight: torch.Tensor) -> list[torch.Tensor]:
        """Return the matrices `[out, in]` of the one tensor that the weights are.

        Args:
            weight: as the module holds it.
        """
        return split_transposed(weight) if self.is_transposed else split_stack(weight)


def draw_seeds(groups: int, device: torch.device) -> torch.Tensor:
    """Return a seed for each group, int64 `[G]`: on a CPU those that G single draws give."""
    return torch.randint(-(2**63), 2**63 - 1, (groups,), dtype=torch.int64, device=device)


class _Side(NamedTuple):
    """One side of a product: the buffers of its planes, and their spec."""

    buffers: Buffers
    spec: str


def _rows_product(
    a: _Side,
    b: _Side,
    shape: tuple[int, int, int],
    offsets: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    precision: str,
    caches: Sequence[OperandCache] = (),
) -> torch.Tensor:
    """Return `[T, N]`: the rows of each group with its own matrix `[N, K]`; shape is (T, N, K).

    `caches`: of b's planes, one for each group; none: nothing is kept of them.
    """
    tokens, n, k = shape
    rows = a.buffers[0].shape[0]
    operands = (*a, (rows, k), *b, (n, k), offsets, tokens, bias)
    options: dict[str, Any] = {
        "is_stack": True,
        "a_padded": rows != tokens,  # rows with square blocks
        "out_dtype": dtype,
        "precision": precision,
    }
    if caches and can_bypass_dispatcher(*a.buffers, *b.buffers, offsets, bias):
        return run_grouped_gemm(*operands, **options, cache=caches[0].of_stack(caches))
    made: torch.Tensor = torch.ops.hybridq.grouped_gemm(*operands, **options)
    return made


def _caches(
    kept: Sequence[CachedWeight | PrequantizedWeight | None], is_columns: bool
) -> tuple[OperandCache, ...]:
    """Return where what is made of the weights' planes is kept; empty where one keeps nothing.

    Of a weight that is quantized only the rowwise plane is sure to be there.
    """
    found: list[OperandCache] = []
    for one in kept:
        cache = None
        if isinstance(one, CachedWeight):
            cache = one.col_kept if is_columns else one.row_kept
        elif one is not None and not is_columns:
            cache = one.row_kept
        if cache is None:
            return ()
        found.append(cache)
    return tuple(found)


class GroupedCall(NamedTuple):
    """What a grouped product is told beside its tokens and parameters.

    Attributes:
        layout: how many parameters there are, and how they are given.
        plan: what `hybridq.recipes.bind` made.
        kept: where the planes of each group's weight are, or are kept, to be taken from there or
            put there; empty for nowhere.
        seeds: int64 `[G]` of stochastic planes; None draws them.
        scales: of each group's state, where `plan.is_delayed`.
        into: where the gradient of each weight parameter is added, None for one that needs none;
            empty: they are returned.
        rows: the tokens that are multiplied, in the order of their groups: those of x are read
            where they are. The result is that of `take_rows(x, rows)`, and so are the gradients.
            None: x itself.
        activation: what is multiplied is what it makes of x, of the parameters' dtype; not with
            `rows`. None: x.
        arriving: the place of the gradient's plane, where that arrives quantized.
    """

    layout: Layout
    plan: Plan
    kept: tuple[CachedWeight | PrequantizedWeight | None, ...] = ()
    seeds: torch.Tensor | None = None
    scales: tuple[Scales, ...] | None = None
    into: tuple[Into | None, ...] = ()
    rows: TokenRows | None = None
    activation: Activation | None = None
    arriving: GradientPlane | None = None


def _forward(
    x: torch.Tensor,
    offsets: torch.Tensor,
    params: Sequence[torch.Tensor],
    call: GroupedCall,
    saves: tuple[bool, bool],
) -> tuple[torch.Tensor, Buffers, WeightPlanes]:
    """Return y, and the columnwise planes of x and those of the weights that were asked for."""
    save_x, save_w = saves
    plan, layout, rows = call.plan, call.layout, call.rows
    weights, biases = _split(params, layout)
    rest = (call.seeds, False, call.scales or ())
    given, x = x.dtype, x.to(params[0].dtype)
    encoder = SlotEncoder(plan.input, "input", *rest)
    row_index = None if rows is None else rows.tokens
    ready = None if rows is None or x.dtype != given else _ready(rows, plan.input)
    if ready is not None:
        x_row = ready
        own = SlotEncoder(plan.input.of_original, "input", *rest)
        _, x_col = encode_tokens(x, offsets, own, False, save_x, row_index)
    else:
        x_row, x_col = encode_tokens(x, offsets, encoder, True, save_x, row_index, call.activation)
    tokens = x.shape[0] if row_index is None else row_index.shape[0]
    w = weight_planes(weights, SlotEncoder(plan.weight, "weight", *rest), save_w, call.kept)
    bias = None
    if biases:
        bias = biases[0] if layout.is_single_bias else torch.stack(biases)
    y = _rows_product(
        _Side(x_row, plan.input.row.spec),
        _Side(w.rows, plan.weight.row.spec),
        (tokens, layout.features[1], layout.features[0]),
        offsets,
        bias,
        x.dtype,
        plan.precision.fprop,
        _caches(call.kept, False),
    )
    return y, x_col, w


def _ready(rows: TokenRows, slot: SlotPlan) -> Buffers | None:
    """Return the rowwise plane that the product takes, of one that is there; None: it is another.

    Args:
        rows: of the tokens.
        slot: of the input.
    """
    made = rows.made
    if made is None or not _takes_made(slot) or slot.row.spec != made.spec:
        return None
    return made.rows(rows.tokens)


def _takes_made(slot: SlotPlan) -> bool:
    """Return whether a slot's rowwise plane may be one that was made elsewhere."""
    return not (slot.is_delayed or slot.amax_group)


def _split(
    params: Sequence[torch.Tensor], layout: Layout
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the weight of each group, and the biases as they are given."""
    if layout.is_single:
        return layout.matrices(params[0]), list(params[1:])
    return list(params[: layout.groups]), list(params[layout.groups :])


class _GroupedLinear(StatedFunction):
    """`y[g] = x[g] @ w[g].T + bias[g]` under a Plan; params as `Layout` says."""

    second = "refused"

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        offsets: torch.Tensor,
        seeds: torch.Tensor | None,
        plan: Plan,
        layout: Layout,
        needs: tuple[bool, bool, bool],
        kept: tuple[CachedWeight | PrequantizedWeight | None, ...],
        scales: tuple[Scales, ...] | None,
        into: tuple[Into | None, ...],
        row_index: torch.Tensor | None,
        inverse: torch.Tensor | None,
        made: MadePlane | None,
        activation: Activation | None,
        arriving: GradientPlane | None,
        *params: torch.Tensor,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        rows = None
        if row_index is not None and inverse is not None:
            rows = TokenRows(row_index, inverse, made)
        call = GroupedCall(layout, plan, kept, seeds, scales, rows=rows, activation=activation)
        y, x_col, w = _forward(x, offsets, params, call, (needs[1], needs[0]))
        # What a gradient goes back through before the product: no more than one of the two.
        through = inverse if activation is None else x
        saved = [offsets, through if needs[0] else None, *x_col, *w.cols]
        if ENTERED:
            tell_offload(x_col, () if any(kept) else w.cols)
        if seeds is not None:
            saved.append(seeds)
        anchor = anchor_on(x.device)
        ctx.save_for_backward(*saved, *(() if anchor is None else (anchor,)))
        ctx.plan, ctx.layout, ctx.needs, ctx.into = plan, layout, needs, into
        ctx.counts, ctx.late = (len(x_col), len(w.cols)), w.late
        ctx.caches = () if w.late or plan.weight.saves_row else _caches(kept, True)
        ctx.activation, ctx.dtype, ctx.arriving = activation, x.dtype, arriving
        if arriving is not None and _takes_made(plan.grad_output):
            arriving.spec = plan.grad_output.row.spec
        # Not saved for backward: other backwards write them meanwhile, and may.
        ctx.scales = scales
        return y if anchor is None else (y, anchor)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor, *_: Any) -> tuple[Any, ...]:
        offsets, through, *saved = ctx.saved_tensors
        if torch.compiler.is_compiling():
            grads = _backward(ctx, offsets, saved, dy, through)
        else:
            anchor = saved.pop()
            with torch.no_grad():
                grads = _backward(ctx, offsets, saved, dy, through)
            if torch.is_grad_enabled():  # create_graph=True
                grads = without_derivative("GroupedLinear", (dy, anchor), grads)
        return (grads[0], *[None] * 13, *grads[1:])


def _backward(
    ctx: Any,
    offsets: torch.Tensor,
    saved: list[torch.Tensor],
    dy: torch.Tensor,
    through: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of x and of all params, None for those that are not needed.

    `through`: what an activation in front was given, or the rows of each token, or None.
    """
    plan, layout, (x_needed, w_needed, bias_needed) = ctx.plan, ctx.layout, ctx.needs
    num_x, num_w = ctx.counts
    x_col, w_col = saved[:num_x], saved[num_x : num_x + num_w]
    seeds = saved[num_x + num_w] if len(saved) > num_x + num_w else None
    in_features, out_features = layout.features
    grad, tokens = plan.grad_output, dy.shape[0]
    dx = dbias = None
    weights: tuple[torch.Tensor | None, ...] = _each(None, layout.groups, layout.is_single)
    with without_autocast(dy.device.type):
        scales = ctx.scales
        encoder = SlotEncoder(grad, "grad_output", seeds, False, scales or ())
        ready = None if ctx.arriving is None else ctx.arriving.take(dy)
        if ready is not None:
            encoder = SlotEncoder(grad.of_original, "grad_output", seeds)
        made = encode_tokens(dy, offsets, encoder, x_needed and ready is None, w_needed)
        dy_row, dy_col = made if ready is None else (ready, made[1])
        for own in scales or ():
            if own.notes is not None:
                own.notes.tell(w_needed)
        if x_needed:
            of_weights = SlotEncoder(plan.weight, "weight", seeds)
            w_col = weight_columns(w_col, ctx.late, of_weights, layout.features, dy.dtype)
            dx = _rows_product(
                _Side(dy_row, grad.row.spec),
                _Side(w_col, plan.weight.col.spec),
                (tokens, in_features, out_features),
                offsets,
                None,
                dy.dtype,
                plan.precision.dgrad,
                ctx.caches,
            )
            if through is not None:
                dx = _through(ctx, dx, through)
        if w_needed:
            given = (plan, layout, ctx.into, dy_col, x_col, offsets, tokens, dy.dtype)
            late = next((one.late for one in ctx.into if one is not None), None)
            if late is None:
                weights = _weight_gradients(*given)
            else:
                late.put(ctx.into, partial(_late_gradients, *given))
        if bias_needed:
            dbias = torch.ops.hybridq.bias_grad_ragged(dy, offsets)
    biases = _each(dbias, layout.groups, layout.is_single_bias) if layout.has_bias else ()
    return (dx, *weights, *biases)


def _through(ctx: Any, dx: torch.Tensor, through: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient of what the forward was given, from that of what it multiplied."""
    if ctx.activation is None:
        return sum_of_rows(dx, through, ctx.dtype)
    needs = (True, False, False)
    grad: torch.Tensor | None = ctx.activation.backward(dx, through, None, [], needs)[0]
    return grad


def _late_gradients(*given: Any) -> tuple[torch.Tensor | None, ...]:
    """Return what `_weight_gradients` does, outside of a backward."""
    with without_autocast(given[5].device.type):
        return _weight_gradients(*given)


def _weight_gradients(
    plan: Plan,
    layout: Layout,
    into: tuple[Into | None, ...],
    dy_col: Buffers,
    x_col: Buffers,
    offsets: torch.Tensor,
    tokens: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradient of each weight parameter, or what autograd is given instead."""
    in_features, out_features = layout.features
    grad, padded = plan.grad_output, capacity(tokens, layout.groups)
    sides = [plane.num_buffers > 1 for plane in (grad.col, plan.input.col)]
    left = (dy_col, grad.col.spec, (out_features, padded if sides[0] else tokens))
    right = (x_col, plan.input.col.spec, (in_features, padded if sides[1] else tokens))
    if layout.is_transposed:  # x.T @ dy: a gradient that lies in memory as the weights do
        left, right, sides = right, left, sides[::-1]
    operands = (*left, *right, offsets, tokens)
    options = {"is_stack": False, "a_padded": sides[0], "b_padded": sides[1]}
    precision = plan.precision.wgrad
    target = next((one for one in into if one is not None and one.main_grad is not None), None)
    if target is not None and layout.is_single:
        torch.ops.hybridq.grouped_gemm_(
            target_of(target), *operands, accumulate=True, precision=precision, **options
        )
        return (given_to_autograd(target),)
    if target is not None:
        dtype = torch.float32
    dw = torch.ops.hybridq.grouped_gemm(*operands, out_dtype=dtype, precision=precision, **options)
    return (
        accumulate_groups(into, dw)
        if target is not None
        else _each(dw, layout.groups, layout.is_single)
    )


def _each(grad: torch.Tensor | None, count: int, is_single: bool) -> tuple[Any, ...]:
    if is_single:
        return (grad,)
    return (None,) * count if grad is None else tuple(grad[g] for g in range(count))


def grouped_linear(
    x: torch.Tensor, offsets: torch.Tensor, params: Sequence[torch.Tensor], call: GroupedCall
) -> torch.Tensor:
    """Return `x[g] @ w[g].T + bias[g]` of each group g, every GEMM between the plan's planes.

    Args:
        x: `[T, in_features]`, float32, bfloat16 or float16; tokens of group 0 first.
            With `call.rows` in any order, and of any of these dtypes.
        offsets: int32 `[G]` on x's device: where each group ends.
        params: the weights and then the biases, as `call.layout` says, in x's dtype.
        call: the rest.

    Returns:
        `[T, out_features]` in the parameters' dtype; tokens of no group give zeros.

    Raises:
        NotImplementedError: a tensor has a tangent of forward-mode differentiation.
    """
    plan, layout, rows = call.plan, call.layout, call.rows
    refuse_tangents("hybridq.GroupedLinear", x, *params)
    if call.seeds is None and plan.is_stochastic:
        call = call._replace(seeds=draw_seeds(layout.groups, x.device))
    needs = (False, False, False)
    num_weights = 1 if layout.is_single else layout.groups
    if torch.is_grad_enabled() and not plan.is_forward_only:
        needs = (
            x.requires_grad,
            any(one.requires_grad for one in params[:num_weights]),
            any(one.requires_grad for one in params[num_weights:]),
        )
    with without_autocast(x.device.type):
        if any(needs):
            given = (x, offsets, call.seeds, plan, layout, needs, call.kept, call.scales, call.into)
            taken = (None, None, None) if rows is None else rows
            last = (call.activation, call.arriving)
            made: Any = _GroupedLinear.apply(*given, *taken, *last, *params)
            return made if torch.compiler.is_compiling() else made[0]
        with torch.no_grad() if plan.is_forward_only else nullcontext():
            y, _, _ = _forward(x, offsets, params, call, (False, False))
    if not plan.is_forward_only:
        return y
    return without_backward("GroupedLinear", y, x, *params)
