"""The backward of the linear modules' autograd function: dgrad, wgrad, and what else is needed."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ...kernels.inputs import can_bypass_dispatcher, refuse_batched, without_autocast
from ...kernels.operators import run_gemm, sum_of_rows
from .cuts import NO_CUTS
from .operands import PlaneOperand, gemm
from .prepared_backward import prepared_backward
from .slot_encoder import SlotEncoder, late_columns, saved_columns
from .token_planes import gather_pair, send_saved
from .weight_gradient import late_gradient, weight_gradient

__all__ = ["linear_backward"]


def linear_backward(
    ctx: Any, saved: list[torch.Tensor], dy: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of x, w, bias, gamma and beta, those that are needed.

    Args:
        ctx: of the forward.
        saved: what it saved, in its order.
        dy: gradient of the output, `[rows, out_features]`.
    """
    plan, needs = ctx.plan, ctx.needs
    num_x, num_w, num_known = ctx.counts
    x_saved, w_saved = saved[:num_x], saved[num_x : num_x + num_w]
    start = saved[num_x + num_w : ctx.end]  # of the prologue's backward
    seed = saved[ctx.end] if len(saved) > ctx.end else None
    in_features, out_features = ctx.features
    gathered, scattered = ctx.cuts.gathered, ctx.cuts.scattered
    rows = dy.shape[0] if scattered is None else dy.shape[0] * scattered.world
    dx = dw = dbias = dgamma = dbeta = None
    with without_autocast(dy.device.type):
        grad = plan.grad_output
        direct = can_bypass_dispatcher(dy, *saved)
        if not direct:
            refuse_batched("hybridq.Linear", dy)
        # Saved tensors may have been through a user's hooks, so they are checked.
        run = run_gemm if direct else None
        own = () if ctx.scales is None else (ctx.scales,)
        x_arrives = dx_arrives = None
        if gathered is not None and needs.w:  # under the first product
            x_arrives = send_saved(gathered, x_saved, plan.input)
        ready = work = None
        if direct and not (dy.is_cpu or own) and ctx.cuts is NO_CUTS:
            sizes = (dy.shape[0], in_features, out_features)
            ready = prepared_backward(plan, sizes, (needs.dgrad, needs.w), dy)
        if ready is not None:
            dy_row, dy_col, work = ready.encode(dy, seed)
        else:
            encoder = SlotEncoder(grad, "grad_output", seed, direct, own, ctx.cuts.grad_output)
            dy_row, dy_col = encoder.encode(dy, needs.dgrad, needs.w)
        if scattered is not None:
            dy_row, dy_col = gather_pair(scattered, dy, dy_row, dy_col, grad)
        if ctx.scales is not None and ctx.scales.notes is not None:
            # A gradient that is added elsewhere leaves none to be taken away.
            ctx.scales.notes.tell(needs.w and ctx.into is None)
        if needs.dgrad:
            kept = ctx.kept
            if ctx.late is not None:
                of_weight = SlotEncoder(plan.weight, "weight", seed, direct, cut=ctx.cuts.weight)
                size = (out_features, in_features)
                w_saved, kept = late_columns(ctx.late, of_weight, *size, dy.dtype)
            w_col = saved_columns(w_saved, plan.weight, out_features, in_features, dy.dtype)
            if ready is not None:
                dx = ready.dgrad(dy_row, w_col, kept, work)
            else:
                dx = gemm(
                    PlaneOperand(dy_row, grad.row.spec, rows),
                    PlaneOperand(w_col, plan.weight.col.spec, in_features),
                    out_features,
                    None,
                    dy.dtype,
                    plan.precision.dgrad,
                    run,
                    kept,
                )
            if gathered is not None:  # under the second product
                dx_arrives = gathered.scatter(dx)
        if needs.w:
            if x_arrives is not None:
                (x_saved,) = x_arrives.wait()
            if ctx.saves_input:  # the bits that the forward would have made: seeds are its
                again = SlotEncoder(plan.input, "input", seed, direct)
                x_saved = again.encode(x_saved[0], False, True)[1]
            given = (plan, ctx.into, x_saved, (rows, in_features, out_features), dy.dtype)
            if ready is not None and ctx.into is None:
                dw = ready.wgrad(dy_col, x_saved, work)
            elif ctx.into is None or ctx.into.late is None:
                dw = weight_gradient(dy_col, run, *given)
            else:
                ctx.into.late.put((ctx.into,), partial(late_gradient, dy_col, *given))
        if needs.bias:
            dbias = sum_of_rows(dy) if direct else torch.ops.hybridq.bias_grad(dy)
        if dx_arrives is not None:
            dx = dx_arrives.wait()
        if ctx.prologue is not None and dx is not None:
            x, known, gamma = start[0], start[1 : 1 + num_known], start[1 + num_known :]
            dx, dgamma, dbeta = ctx.prologue.backward(
                dx, x, gamma[0] if gamma else None, known, (needs.x, needs.gamma, needs.beta)
            )
    return dx, dw, dbias, dgamma, dbeta
