"""The one autograd function of all linear modules: three GEMMs between planes.

```
fprop  y  = x  @ w.T   (x.row, w.row)         forward
dgrad  dx = dy @ w     (dy.row, w.col)        backward, if x needs a gradient
wgrad  dw = dy.T @ x   (dy.col, x.col)        backward, if w needs a gradient
```

It works on the planes' buffers and the specs' texts through `torch.ops.hybridq`, so that
`torch.compile(fullgraph=True)` sees ordinary operators. Saved for the backward are the columnwise
planes that it needs, in quantized form, and the random seed; nothing else. Of a columnwise plane
that is not quantized, what it is made of is saved: the tensor, or the rowwise plane to be decoded.

Where the matrix x is made of another one by a prologue (a norm, an activation), that other one
is given as x and saved too, since the prologue's own backward starts from it; what the prologue
makes is not saved, and written to memory only where no fused operation encodes it as it is made.

**Random streams.** One seed per call serves all stochastic planes; each plane has its own Philox
stream, so that equal coordinates of two tensors never share random bytes: gradient 0 (row) and 1
(column), which are the defaults of `encode`, input 2 and 3, weight 4 and 5.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Final, NamedTuple

import torch

from ..kernels.derivatives import StatedFunction
from ..kernels.device import has_autocast, without_autocast
from ..kernels.ops import run_checked_gemm, run_gemm, sum_of_rows
from ..kernels.tangents import refuse_tangents
from ..kernels.watch import nothing_watches
from ..quantizers import draw_seed
from ..recipes import Plan
from .delayed import record_given
from .double_backward import anchor_on, without_derivative
from .few_rows import FewRows
from .kept_weight import Buffers, GivenWeight, KeptWeight
from .main_grad import Into, accumulate
from .operands import encode_input, encode_operand, encode_slot, gemm, saved_columns
from .prologue import Prologue
from .scaling_places import Scales

__all__ = ["linear"]


class _Needs(NamedTuple):
    """Which gradients are wanted; gamma and beta are the weights of a prologue that is a norm."""

    x: bool = False
    w: bool = False
    bias: bool = False
    gamma: bool = False
    beta: bool = False

    @property
    def dgrad(self) -> bool:
        """Whether the gradient goes through the weight."""
        return self.x or self.gamma or self.beta


_NOTHING: Final = _Needs()


class _Call(NamedTuple):
    """What a call is told beside tensors."""

    plan: Plan
    needs: _Needs
    weight: KeptWeight | GivenWeight | None
    prologue: Prologue | None
    into: Into | None = None
    few: FewRows | None = None


@contextmanager
def _ordinary_mode() -> Iterator[None]:
    """Leave the inference mode, and make no graph."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _weight_planes(
    w: torch.Tensor,
    seed: torch.Tensor | None,
    call: _Call,
    scales: Scales | None,
    direct: bool,
) -> tuple[Buffers, Buffers]:
    """Return the rowwise plane of w, and what is saved of it."""
    weight, slot, is_saved = call.weight, call.plan.weight, call.needs.dgrad
    is_plain = slot.col.is_plain
    if weight is not None and weight.has(is_saved and not is_plain):
        row = weight.row
        if isinstance(weight, GivenWeight) and slot.is_delayed and weight.amaxes is not None:
            record_given(weight.amaxes, slot, is_saved and not is_plain, scales)
        if not is_saved or (isinstance(weight, GivenWeight) and weight.is_late):
            return row, []
        if is_plain:
            if slot.saves_row:
                return row, row
            return row, weight.matrix() if isinstance(weight, GivenWeight) else [w]
        return row, weight.col
    # What is kept must count versions, and outlive an inference mode.
    leaves = weight is not None and torch.is_inference_mode_enabled()
    with _ordinary_mode() if leaves else nullcontext():
        row, saved = encode_operand(w, slot, "weight", seed, is_saved, direct, scales)
    if isinstance(weight, KeptWeight):
        weight.fill(row, [] if is_plain else saved)
    return row, saved


def _forward(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    gamma: torch.Tensor | None,
    beta: torch.Tensor | None,
    seed: torch.Tensor | None,
    scales: Scales | None,
    call: _Call,
) -> tuple[torch.Tensor, Buffers, Buffers, list[torch.Tensor]]:
    """Return y, what is saved of the input and of w, and what the prologue wants to know."""
    plan = call.plan
    given = isinstance(call.weight, GivenWeight)  # then only its planes are read
    direct = call.few is not None or nothing_watches(
        x, None if given else w, bias, seed, gamma, beta
    )
    w_planes = None
    if call.few is not None:
        if call.weight is not None or call.needs.dgrad:
            w_planes = _weight_planes(w, seed, call, scales, direct)
        kept = None if call.weight is None else call.weight.row_kept
        made = call.few(x, w, bias, seed, call.needs.w, w_planes, kept)
        if made is not None:
            return *made, []
    x_row, x_saved, known = encode_input(
        x, plan.input, seed, call.needs.w, direct, scales, call.prologue, gamma, beta
    )
    w_row, w_saved = w_planes or _weight_planes(w, seed, call, scales, direct)
    y = gemm(
        x_row,
        plan.input.row.spec,
        x.shape[0],
        w_row,
        plan.weight.row.spec,
        w.shape[0],
        w.shape[1],
        bias,
        x.dtype,
        plan.precision.fprop,
        run_checked_gemm if direct else None,
        None if call.weight is None else call.weight.row_kept,
    )
    return y, x_saved, w_saved, known


class _Linear(StatedFunction):
    """`y = p(x) @ w.T + bias` under a Plan; x `[rows, in]`, w `[out, in]`, bias `[out]` or None.

    p is the prologue (None: x itself), gamma and beta `[in]` are its weights if it is a norm.
    """

    second = "refused"

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        gamma: torch.Tensor | None,
        beta: torch.Tensor | None,
        seed: torch.Tensor | None,
        scales: Scales | None,
        call: _Call,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        # Whoever called has left torch.autocast already.
        y, x_saved, w_saved, known = _forward(x, w, bias, gamma, beta, seed, scales, call)
        needs, weight = call.needs, call.weight
        saved = [*x_saved, *w_saved]
        if call.prologue is not None and needs.dgrad:
            saved += [x, *known] if gamma is None else [x, *known, gamma]
        ctx.end = len(saved)
        if seed is not None:
            saved.append(seed)
        anchor = anchor_on(x.device)
        ctx.save_for_backward(*saved, *(() if anchor is None else (anchor,)))
        ctx.plan, ctx.needs, ctx.prologue = call.plan, needs, call.prologue
        ctx.counts = (len(x_saved), len(w_saved), len(known))
        ctx.features = (w.shape[1], w.shape[0])
        ctx.late = ctx.kept = None
        if isinstance(weight, GivenWeight) and weight.is_late:
            ctx.late = weight
        elif weight is not None and needs.dgrad and not call.plan.weight.col.is_plain:
            ctx.kept = weight.col_kept
        ctx.into = call.into
        # Not saved for backward: other backwards write them meanwhile, and may.
        ctx.scales = scales
        return y if anchor is None else (y, anchor)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor, *_: Any) -> tuple[Any, ...]:
        saved = list(ctx.saved_tensors)
        if torch.compiler.is_compiling():
            return (*_backward(ctx, saved, dy), None, None, None)
        anchor = saved.pop()
        with torch.no_grad():
            grads = _backward(ctx, saved, dy)
        if torch.is_grad_enabled():  # create_graph=True
            grads = without_derivative("Linear", (dy, anchor), grads)
        return (*grads, None, None, None)


#: `_Linear.apply` without torch's Python around it, which asks for functorch's transforms.
_apply: Final[Any] = super(torch.autograd.Function, _Linear).apply


def _backward(
    ctx: Any, saved: list[torch.Tensor], dy: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of x, w, bias, gamma and beta, those that are needed."""
    plan, needs = ctx.plan, ctx.needs
    num_x, num_w, num_known = ctx.counts
    x_saved, w_saved = saved[:num_x], saved[num_x : num_x + num_w]
    start = saved[num_x + num_w : ctx.end]  # of the prologue's backward
    seed = saved[ctx.end] if len(saved) > ctx.end else None
    in_features, out_features = ctx.features
    rows = dy.shape[0]
    dx = dw = dbias = dgamma = dbeta = None
    with without_autocast(dy.device.type):
        grad = plan.grad_output
        direct = nothing_watches(dy, *saved)
        # Saved tensors may have been through a user's hooks, so they are checked.
        run = run_gemm if direct else None
        dy_row, dy_col = encode_slot(
            dy, grad, "grad_output", seed, needs.dgrad, needs.w, direct, ctx.scales
        )
        if ctx.scales is not None and ctx.scales.notes is not None:
            # A gradient that is added elsewhere leaves none to be taken away.
            ctx.scales.notes.tell(needs.w and ctx.into is None)
        if needs.dgrad:
            kept = ctx.kept
            if ctx.late is not None:
                w_saved, kept = ctx.late.saved(plan.weight)
            dx = gemm(
                dy_row,
                grad.row.spec,
                rows,
                saved_columns(w_saved, plan.weight, out_features, in_features, dy.dtype),
                plan.weight.col.spec,
                in_features,
                out_features,
                None,
                dy.dtype,
                plan.precision.dgrad,
                run,
                kept,
            )
        if needs.w:
            x_col = saved_columns(x_saved, plan.input, rows, in_features, dy.dtype)
            specs = (grad.col.spec, plan.input.col.spec)
            if ctx.into is not None:
                dw = accumulate(
                    ctx.into, dy_col, specs[0], x_col, specs[1], rows, plan.precision.wgrad
                )
            else:
                dw = gemm(
                    dy_col,
                    specs[0],
                    out_features,
                    x_col,
                    specs[1],
                    in_features,
                    rows,
                    None,
                    dy.dtype,
                    plan.precision.wgrad,
                    run,
                )
        if needs.bias:
            dbias = sum_of_rows(dy) if direct else torch.ops.hybridq.bias_grad(dy)
        if ctx.prologue is not None and dx is not None:
            x, known, gamma = start[0], start[1 : 1 + num_known], start[1 + num_known :]
            dx, dgamma, dbeta = ctx.prologue.backward(
                dx, x, gamma[0] if gamma else None, known, (needs.x, needs.gamma, needs.beta)
            )
    return dx, dw, dbias, dgamma, dbeta


def linear(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    plan: Plan,
    weight: KeptWeight | GivenWeight | None = None,
    scales: Scales | None = None,
    prologue: Prologue | None = None,
    gamma: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    into: Into | None = None,
    few: FewRows | None = None,
) -> torch.Tensor:
    """Return `p(x) @ w.T + bias` with every GEMM between the planes that `plan` names.

    Args:
        x: `[rows, in_features]`, float32, bfloat16 or float16; of a gated activation twice as
            many columns.
        w: `[out_features, in_features]`, the same dtype.
        bias: `[out_features]`, the same dtype, or None.
        plan: what `hybridq.recipes.bind` made.
        weight: where the planes of w are, or are kept, to be taken from there or put there; or
            None.
        scales: of the module's state, where `plan.is_delayed`.
        prologue: what makes the matrix that is multiplied out of x; None: x is that matrix.
        gamma, beta: `[in_features]`, float32, bfloat16 or float16: a norm's weights, or None.
        into: where the gradient of w is added; None: it is returned.
        few: what may make y of few rows in one step, with the same bits; or None. With it the
            caller has asked whether anything watches, or autocasts.

    Returns:
        `[rows, out_features]` in x's dtype.

    Raises:
        NotImplementedError: a tensor has a tangent of forward-mode differentiation.
    """
    refuse_tangents("hybridq.Linear", x, w, bias, gamma, beta)
    # Drawn whether or not there will be a backward: a reentrant checkpoint runs its forward
    # without gradients, and its recomputation must find the generator in the same state.
    seed = draw_seed(x.device) if plan.is_stochastic else None
    needs = _NOTHING
    if torch.is_grad_enabled():
        needs = _Needs(
            x.requires_grad,
            w.requires_grad,
            bias is not None and bias.requires_grad,
            gamma is not None and gamma.requires_grad,
            beta is not None and beta.requires_grad,
        )
    given = (x, w, bias, gamma, beta, seed, scales, _Call(plan, needs, weight, prologue, into, few))
    if few is None and (torch.compiler.is_compiling() or has_autocast(x.device.type)):
        with without_autocast(x.device.type):
            return _run(*given)
    return _run(*given)


def _run(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    gamma: torch.Tensor | None,
    beta: torch.Tensor | None,
    seed: torch.Tensor | None,
    scales: Scales | None,
    call: _Call,
) -> torch.Tensor:
    if any(call.needs):
        # The short way has asked what `Function.apply` asks.
        apply = _Linear.apply if call.few is None else _apply
        made: Any = apply(x, w, bias, gamma, beta, seed, scales, call)
        return made if torch.compiler.is_compiling() else made[0]
    return _forward(x, w, bias, gamma, beta, seed, scales, call)[0]
