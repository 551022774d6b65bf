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

**Random streams.** One seed per call serves all stochastic planes; each plane has its own Philox
stream, so that equal coordinates of two tensors never share random bytes: gradient 0 (row) and 1
(column), which are the defaults of `encode`, input 2 and 3, weight 4 and 5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Final

import torch

from ..formats import PlaneSpec
from ..kernels import Kept
from ..kernels.device import has_autocast, without_autocast
from ..kernels.ops import run_checked_gemm, run_gemm, sum_of_rows
from ..kernels.types import GemmArgs, Operand
from ..kernels.watch import nothing_watches
from ..quantizers import draw_seed, statistics
from ..recipes import Plan, SlotPlan
from ..storage import encode_pair
from .kept_weight import Buffers, KeptWeight

__all__ = ["STREAMS", "linear"]

#: (rowwise, columnwise) Philox streams of each slot.
STREAMS: Final = {"grad_output": (0, 1), "input": (2, 3), "weight": (4, 5)}


def _encode(
    x: torch.Tensor,
    plan: SlotPlan,
    streams: tuple[int, int],
    seed: torch.Tensor | None,
    with_row: bool,
    with_col: bool,
    direct: bool,
) -> tuple[Buffers, Buffers]:
    """Return the buffers of the wanted planes of x `[rows, cols]`; an unwanted plane has none."""
    col = plan.col if with_col else None
    # An unwanted rowwise plane may still be what the columnwise one is made of.
    is_source = with_col and plan.col_source != "original"
    row = plan.row if with_row or is_source else None
    row_stat = col_stat = None
    if plan.amax_group:
        row_stat, col_stat = statistics(
            x,
            row,
            col,
            group=plan.amax_group,
            col_source=plan.col_source,
            seed=seed,
            row_stream=streams[0],
        )
    return encode_pair(
        x,
        row,
        col,
        row_stat=row_stat,
        col_stat=col_stat,
        seed=seed,
        col_source=plan.col_source,
        keep_row=with_row,
        row_stream=streams[0],
        col_stream=streams[1],
        direct=direct,
    )


def _encode_operand(
    x: torch.Tensor,
    plan: SlotPlan,
    streams: tuple[int, int],
    seed: torch.Tensor | None,
    is_saved: bool,
    direct: bool,
) -> tuple[Buffers, Buffers]:
    """Return the rowwise plane of x, and what `_saved_columns` will want of it."""
    if not (is_saved and plan.col.is_plain):
        return _encode(x, plan, streams, seed, True, is_saved, direct)
    row, _ = _encode(x, plan, streams, seed, True, False, direct)
    return row, row if plan.saves_row else [x]


def _saved_columns(
    saved: Buffers, plan: SlotPlan, rows: int, cols: int, dtype: torch.dtype
) -> Buffers:
    """Return the columnwise plane of a matrix `[rows, cols]` from what was saved of it."""
    if not plan.col.is_plain:
        return saved
    if not plan.saves_row:
        return [saved[0].t()]
    return [torch.ops.hybridq.decode(saved, plan.row.spec, rows, cols, dtype).t()]


def _gemm(
    a: Buffers,
    a_spec: str,
    a_rows: int,
    b: Buffers,
    b_spec: str,
    b_rows: int,
    k: int,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    precision: str,
    run: Callable[..., torch.Tensor] | None,
    kept: Kept | None = None,
) -> torch.Tensor:
    """Return `a @ b.T + bias`: by `run`, past the dispatcher, or else by the operator."""
    if run is not None:
        left = Operand(a, PlaneSpec.parse(a_spec), a_rows, k)
        right = Operand(b, PlaneSpec.parse(b_spec), b_rows, k, kept)
        return run(left, right, GemmArgs(bias, None, dtype, precision))
    return torch.ops.hybridq.gemm(
        a, a_spec, a_rows, b, b_spec, b_rows, k, bias, out_dtype=dtype, precision=precision
    )


@contextmanager
def _ordinary_mode() -> Iterator[None]:
    """Leave the inference mode, and make no graph."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _forward(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    plan: Plan,
    seed: torch.Tensor | None,
    save_x: bool,
    save_w: bool,
    weight: KeptWeight | None,
) -> tuple[torch.Tensor, Buffers, Buffers]:
    """Return y and what is saved of x and w, if it was asked for."""
    direct = nothing_watches(x, w, bias, seed)
    x_row, x_col = _encode_operand(x, plan.input, STREAMS["input"], seed, save_x, direct)
    is_plain = plan.weight.col.is_plain
    if weight is not None and weight.has(save_w and not is_plain):
        w_row, w_col = weight.row, weight.col if save_w else []
        if save_w and is_plain:
            w_col = w_row if plan.weight.saves_row else [w]
    else:
        # What is kept must count versions, and outlive an inference mode.
        leaves = weight is not None and torch.is_inference_mode_enabled()
        with _ordinary_mode() if leaves else nullcontext():
            w_row, w_col = _encode_operand(w, plan.weight, STREAMS["weight"], seed, save_w, direct)
        if weight is not None:
            weight.fill(w_row, [] if is_plain else w_col)
    y = _gemm(
        x_row,
        plan.input.row.spec,
        x.shape[0],
        w_row,
        plan.weight.row.spec,
        w.shape[0],
        x.shape[1],
        bias,
        x.dtype,
        plan.precision.fprop,
        run_checked_gemm if direct else None,
        None if weight is None else weight.row_kept,
    )
    return y, x_col, w_col


class _NoDoubleBackward(torch.autograd.Function):
    """Passes gradients on; its own backward is the error of a second differentiation."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *grads: torch.Tensor | None) -> Any:
        return tuple(None if grad is None else grad.view_as(grad) for grad in grads)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            "hybridq.Linear: double backward is not supported, got a gradient of a gradient of a "
            "quantized GEMM; leave create_graph=False, or compute this part outside "
            "hybridq.autocast"
        )


class _Linear(torch.autograd.Function):
    """`y = x @ w.T + bias` under a Plan; x `[rows, in]`, w `[out, in]`, bias `[out]` or None."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        seed: torch.Tensor | None,
        plan: Plan,
        needs: tuple[bool, bool, bool],
        weight: KeptWeight | None,
    ) -> torch.Tensor:
        # Whoever called has left torch.autocast already.
        y, x_col, w_col = _forward(x, w, bias, plan, seed, needs[1], needs[0], weight)
        saved = [*x_col, *w_col]
        if seed is not None:
            saved.append(seed)
        ctx.save_for_backward(*saved)
        ctx.plan, ctx.needs = plan, needs
        ctx.counts = (len(x_col), len(w_col))
        ctx.features = (x.shape[1], w.shape[0])
        ctx.kept = None if weight is None or plan.weight.col.is_plain else weight.col_kept
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        if torch.compiler.is_compiling():
            return (*_backward(ctx, dy), None, None, None, None)
        with torch.no_grad():
            grads = _backward(ctx, dy)
        if torch.is_grad_enabled():  # create_graph=True
            # The gradients depend on x and w even where dy depends on nothing: the anchor makes
            # every second derivative an error, and none of them silently zero.
            anchor = torch.empty(0, device=dy.device, requires_grad=True)
            grads = _NoDoubleBackward.apply(anchor, *grads)
        return (*grads, None, None, None, None)


def _backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of x, w and bias, those that are needed."""
    plan, (x_needed, w_needed, bias_needed) = ctx.plan, ctx.needs
    saved = list(ctx.saved_tensors)
    num_x, num_w = ctx.counts
    x_col, w_col = saved[:num_x], saved[num_x : num_x + num_w]
    seed = saved[num_x + num_w] if len(saved) > num_x + num_w else None
    in_features, out_features = ctx.features
    rows = dy.shape[0]
    dx = dw = dbias = None
    with without_autocast(dy.device.type):
        grad = plan.grad_output
        direct = nothing_watches(dy, *saved)
        # Saved tensors may have been through a user's hooks, so they are checked.
        run = run_gemm if direct else None
        streams = STREAMS["grad_output"]
        dy_row, dy_col = _encode(dy, grad, streams, seed, x_needed, w_needed, direct)
        if x_needed:
            dx = _gemm(
                dy_row,
                grad.row.spec,
                rows,
                _saved_columns(w_col, plan.weight, out_features, in_features, dy.dtype),
                plan.weight.col.spec,
                in_features,
                out_features,
                None,
                dy.dtype,
                plan.precision.dgrad,
                run,
                ctx.kept,
            )
        if w_needed:
            dw = _gemm(
                dy_col,
                grad.col.spec,
                out_features,
                _saved_columns(x_col, plan.input, rows, in_features, dy.dtype),
                plan.input.col.spec,
                in_features,
                rows,
                None,
                dy.dtype,
                plan.precision.wgrad,
                run,
            )
        if bias_needed:
            dbias = sum_of_rows(dy) if direct else torch.ops.hybridq.bias_grad(dy)
    return dx, dw, dbias


def linear(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    plan: Plan,
    weight: KeptWeight | None = None,
) -> torch.Tensor:
    """Return `x @ w.T + bias` with every GEMM between the planes that `plan` names.

    Args:
        x: `[rows, in_features]`, float32, bfloat16 or float16.
        w: `[out_features, in_features]`, the same dtype.
        bias: `[out_features]`, the same dtype, or None.
        plan: what `hybridq.recipes.bind` made.
        weight: where the planes of w are kept, to be taken from there or put there; or None.

    Returns:
        `[rows, out_features]` in x's dtype.
    """
    # Drawn whether or not there will be a backward: a reentrant checkpoint runs its forward
    # without gradients, and its recomputation must find the generator in the same state.
    seed = draw_seed(x.device) if plan.is_stochastic else None
    needs = (False, False, False)
    if torch.is_grad_enabled():
        has_bias = bias is not None and bias.requires_grad
        needs = (x.requires_grad, w.requires_grad, has_bias)
    if torch.compiler.is_compiling() or has_autocast(x.device.type):
        with without_autocast(x.device.type):
            return _run(x, w, bias, plan, seed, needs, weight)
    return _run(x, w, bias, plan, seed, needs, weight)


def _run(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    plan: Plan,
    seed: torch.Tensor | None,
    needs: tuple[bool, bool, bool],
    weight: KeptWeight | None,
) -> torch.Tensor:
    if any(needs):
        return _Linear.apply(x, w, bias, seed, plan, needs, weight)
    return _forward(x, w, bias, plan, seed, False, False, weight)[0]
