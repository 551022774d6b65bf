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
from ...kernels.inputs import (
    can_bypass_dispatcher,
    refuse_batched,
    refuse_tangents,
    without_autocast,
)
from ...kernels.operators import StatedFunction
from ...recipes import Plan, SlotPlan
from ..delayed_scaling import Scales
from ..weights import (
    Buffers,
    CachedWeight,
    Into,
    PrequantizedWeight,
)
from .double_backward import anchor_on, without_derivative
from .forward_only import without_backward
from .grouped_products import (
    Layout,
    Side,
    each,
    late_gradients,
    rows_product,
    weight_gradients,
)
from .grouped_tokens import encode_tokens
from .grouped_weights import WeightPlanes, weight_columns, weight_planes
from .offload import ENTERED, tell_offload
from .prepared_groups import (
    PreparedGroups,
    PreparedGroupsBackward,
    prepared_groups,
    prepared_groups_backward,
)
from .prologue import Activation
from .slot_encoder import SlotEncoder
from .token_routes import GradientPlane, MadePlane, TokenRows, sum_of_rows

__all__ = ["GroupedCall", "Layout", "draw_seeds", "grouped_linear"]


def draw_seeds(groups: int, device: torch.device) -> torch.Tensor:
    """Return a seed for each group, int64 `[G]`: on a CPU those that G single draws give."""
    return torch.randint(-(2**63), 2**63 - 1, (groups,), dtype=torch.int64, device=device)


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
) -> tuple[torch.Tensor, Buffers, WeightPlanes, Plan]:
    """Return y, the columnwise planes of x and the weights that were asked for, and the plan.

    That is the call's, with the specs in which what is saved was encoded.
    """
    save_x, save_w = saves
    plan, layout, rows = call.plan, call.layout, call.rows
    weights, biases = _split(params, layout)
    bias = None
    if biases:
        bias = biases[0] if layout.is_single_bias else torch.stack(biases)
    given, x = x.dtype, x.to(params[0].dtype)
    w = None
    prepared = _prepared(x, offsets, params, call, saves)
    if prepared is not None and prepared.takes_tokens:
        if call.activation is not None:
            x, call = call.activation.run(x, None, None)[0], call._replace(activation=None)
        row_index = None if rows is None else rows.tokens
        done = prepared.forward(x, offsets, weights, bias, row_index)
        if done is not None:
            y, x_col, w_cols = done
            return y, x_col, WeightPlanes([], w_cols), prepared.plan
    elif prepared is not None:
        stack = prepared.weights(weights)
        w = None if stack is None else WeightPlanes(*stack)
    rest = (call.seeds, False, call.scales or ())
    encoder = SlotEncoder(plan.input, "input", *rest)
    row_index = None if rows is None else rows.tokens
    ready = None if rows is None or x.dtype != given else _ready(rows, plan.input)
    if ready is not None:
        x_row = ready
        own = SlotEncoder(plan.input.of_original(), "input", *rest)
        _, x_col = encode_tokens(x, offsets, own, False, save_x, row_index)
    else:
        x_row, x_col = encode_tokens(x, offsets, encoder, True, save_x, row_index, call.activation)
    tokens = x.shape[0] if row_index is None else row_index.shape[0]
    if w is None:
        w = weight_planes(weights, SlotEncoder(plan.weight, "weight", *rest), save_w, call.kept)
    y = rows_product(
        Side(x_row, plan.input.row.spec),
        Side(w.rows, plan.weight.row.spec),
        (tokens, layout.features[1], layout.features[0]),
        offsets,
        bias,
        x.dtype,
        plan.precision.fprop,
        _caches(call.kept, False),
    )
    return y, x_col, w, plan


def _prepared(
    x: torch.Tensor,
    offsets: torch.Tensor,
    params: Sequence[torch.Tensor],
    call: GroupedCall,
    saves: tuple[bool, bool],
) -> PreparedGroups | None:
    """Return what is prepared of a forward on a GPU; None: nothing, or it is a general one."""
    rows, layout = call.rows, call.layout
    if x.is_cpu or call.kept or call.scales or call.arriving is not None or layout.is_transposed:
        return None
    if rows is not None and rows.made is not None:
        return None
    row_index = None if rows is None else rows.tokens
    if not can_bypass_dispatcher(x, offsets, *params, row_index):
        return None
    tokens = x.shape[0] if row_index is None else row_index.shape[0]
    return prepared_groups(call.plan, layout.features, tokens, layout.groups, saves, x)


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
        y, x_col, w, own = _forward(x, offsets, params, call, (needs[1], needs[0]))
        # What a gradient goes back through before the product: no more than one of the two.
        through = inverse if activation is None else x
        saved = [offsets, through if needs[0] else None, *x_col, *w.cols]
        if ENTERED:
            tell_offload(x_col, () if any(kept) else w.cols)
        if seeds is not None:
            saved.append(seeds)
        anchor = anchor_on(x.device)
        ctx.save_for_backward(*saved, *(() if anchor is None else (anchor,)))
        ctx.has_anchor = anchor is not None
        ctx.plan, ctx.layout, ctx.needs, ctx.into = own, layout, needs, into
        ctx.counts, ctx.late = (len(x_col), len(w.cols)), w.late
        # No rows are left of weights that were prepared with tokens: they died with the product.
        ctx.is_prepared = not w.rows
        ctx.planes = ()
        if kept and not torch.compiler.is_compiling():
            ctx.planes = tuple(one for one in kept if isinstance(one, PrequantizedWeight))
        ctx.caches = ()
        if kept and not (w.late or plan.weight.saves_row):
            ctx.caches = _caches(kept, True)
        ctx.activation, ctx.dtype, ctx.arriving = activation, x.dtype, arriving
        if arriving is not None and _takes_made(plan.grad_output):
            arriving.spec = plan.grad_output.row.spec
        # Not saved for backward: other backwards write them meanwhile, and may.
        ctx.scales = scales
        return y if anchor is None else (y, anchor)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor, *_: Any) -> tuple[Any, ...]:
        offsets, through, *rest = ctx.saved_tensors
        saved = list(rest)  # torch 2.10 traces what a star takes as a tuple
        # Compiled autograd compiles the backward of an eager forward, too, which left an anchor.
        anchor = saved.pop() if ctx.has_anchor else None
        if not torch.compiler.is_compiling():
            num_x, num_w = ctx.counts
            for one in ctx.planes:
                one.check_saved(saved[num_x : num_x + num_w])
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            grads = _backward(ctx, offsets, saved, dy, through)
        else:
            with torch.no_grad():  # create_graph=True
                grads = _backward(ctx, offsets, saved, dy, through)
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
    refuse_batched("hybridq.GroupedLinear", dy)
    plan, layout, (x_needed, w_needed, bias_needed) = ctx.plan, ctx.layout, ctx.needs
    num_x, num_w = ctx.counts
    x_col, w_col = saved[:num_x], saved[num_x : num_x + num_w]
    seeds = saved[num_x + num_w] if len(saved) > num_x + num_w else None
    in_features, out_features = layout.features
    grad, tokens = plan.grad_output, dy.shape[0]
    dx = dbias = None
    weights: tuple[torch.Tensor | None, ...] = each(None, layout.groups, layout.is_single)
    with without_autocast(dy.device.type):
        scales = ctx.scales
        prepared = _prepared_backward(ctx, dy, (offsets, *saved))
        found = None if prepared is None else prepared.encode(dy, offsets)
        if prepared is not None and found is not None:
            (dy_row, dy_col), groups = found
        else:
            prepared = groups = None
            dy_row, dy_col = _gradient_planes(ctx, dy, offsets, seeds)
        for own in scales or ():
            if own.notes is not None:
                own.notes.tell(w_needed)
        if x_needed:
            of_weights = SlotEncoder(plan.weight, "weight", seeds)
            w_col = weight_columns(w_col, ctx.late, of_weights, layout.features, dy.dtype)
            if prepared is not None and groups is not None:
                dx = prepared.dgrad(dy_row, w_col, groups, tokens)
            else:
                dx = rows_product(
                    Side(dy_row, grad.row.spec),
                    Side(w_col, plan.weight.col.spec),
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
            if prepared is not None and groups is not None and not any(ctx.into):
                dw = prepared.wgrad(dy_col, x_col, groups, tokens)
                weights = each(dw, layout.groups, layout.is_single)
            elif late is None:
                weights = weight_gradients(*given)
            else:
                late.put(ctx.into, partial(late_gradients, *given))
        if bias_needed:
            dbias = torch.ops.hybridq.bias_grad_ragged(dy, offsets)
    biases = each(dbias, layout.groups, layout.is_single_bias) if layout.has_bias else ()
    return (dx, *weights, *biases)


def _gradient_planes(
    ctx: Any, dy: torch.Tensor, offsets: torch.Tensor, seeds: torch.Tensor | None
) -> tuple[Buffers, Buffers]:
    """Return the planes of the output's gradient that are needed, by groups."""
    grad, (x_needed, w_needed, _) = ctx.plan.grad_output, ctx.needs
    encoder = SlotEncoder(grad, "grad_output", seeds, False, ctx.scales or ())
    ready = None if ctx.arriving is None else ctx.arriving.take(dy)
    if ready is not None:
        encoder = SlotEncoder(grad.of_original(), "grad_output", seeds)
    made = encode_tokens(dy, offsets, encoder, x_needed and ready is None, w_needed)
    return made if ready is None else (ready, made[1])


def _prepared_backward(
    ctx: Any, dy: torch.Tensor, saved: Sequence[torch.Tensor]
) -> PreparedGroupsBackward | None:
    """Return what is prepared of a backward on a GPU, if the forward was; None: nothing."""
    if not ctx.is_prepared or dy.is_cpu or not ctx.needs[0]:
        return None
    if not can_bypass_dispatcher(dy, *saved):
        return None
    layout = ctx.layout
    return prepared_groups_backward(ctx.plan, layout.features, layout.groups, ctx.needs[1], dy)


def _through(ctx: Any, dx: torch.Tensor, through: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient of what the forward was given, from that of what it multiplied."""
    if ctx.activation is None:
        return sum_of_rows(dx, through, ctx.dtype)
    needs = (True, False, False)
    grad: torch.Tensor | None = ctx.activation.backward(dx, through, None, [], needs)[0]
    return grad


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
        NotImplementedError: a tensor has a tangent, or is in a transform of torch.func.
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
            True in [one.requires_grad for one in params[:num_weights]],
            True in [one.requires_grad for one in params[num_weights:]],
        )
    with without_autocast(x.device.type):
        if any(needs):
            given = (x, offsets, call.seeds, plan, layout, needs, call.kept, call.scales, call.into)
            taken = (None, None, None) if rows is None else rows
            last = (call.activation, call.arriving)
            made: Any = _GroupedLinear.apply(*given, *taken, *last, *params)
            return made if torch.compiler.is_compiling() else made[0]
        with torch.no_grad() if plan.is_forward_only else nullcontext():
            y = _forward(x, offsets, params, call, (False, False))[0]
    if not plan.is_forward_only:
        return y
    return without_backward("GroupedLinear", y, x, *params)
