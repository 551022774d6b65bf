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
from itertools import product
from typing import Any, Final, NamedTuple

import torch

from ...kernels.choice import Operand
from ...kernels.inputs import (
    can_bypass_dispatcher,
    has_autocast,
    is_current,
    refuse_tangents,
    without_autocast,
)
from ...kernels.operators import StatedFunction, run_checked_gemm
from ...quantizers import draw_seed
from ...recipes import Plan
from ..delayed_scaling import Scales
from ..weights import Buffers, CachedWeight, Into, PrequantizedWeight
from .cuts import NO_CUTS, Cuts
from .double_backward import anchor_on, without_derivative
from .forward_only import without_backward
from .linear_backward import linear_backward
from .offload import ENTERED, tell_offload
from .operands import PlaneOperand, gemm
from .prepared_linear import PreparedLinear, prepared_for
from .prologue import Prologue, PrologueCall
from .slot_encoder import SlotEncoder, record_given
from .token_planes import send_rows

__all__ = ["eager_linear", "linear"]


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
#: By x, w and bias, without a prologue.
_EAGER: Final = {(*own,): _Needs(*own) for own in product((False, True), repeat=3)}
_EAGER[False, False, False] = _NOTHING
_NO_PROLOGUE: Final = (None, None, None)


class _Call(NamedTuple):
    """What a call is told beside tensors."""

    plan: Plan
    needs: _Needs
    weight: CachedWeight | PrequantizedWeight | None
    prologue: Prologue | None
    into: Into | None = None
    prepared: PreparedLinear | None = None
    cuts: Cuts = NO_CUTS
    saves_input: bool = False  # itself, and not its columnwise plane


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
        if isinstance(weight, PrequantizedWeight) and slot.is_delayed and weight.amaxes is not None:
            record_given(weight.amaxes, slot, is_saved and not is_plain, scales)
        if not is_saved or (isinstance(weight, PrequantizedWeight) and weight.is_late):
            return row, []
        if is_plain:
            if slot.saves_row:
                return row, row
            return row, weight.matrix() if isinstance(weight, PrequantizedWeight) else [w]
        return row, weight.col
    # What is kept must count versions, and outlive an inference mode.
    leaves = weight is not None and torch.is_inference_mode_enabled()
    with _ordinary_mode() if leaves else nullcontext():
        if call.prepared is not None:
            row, saved = call.prepared.weight.operand(w, is_saved, seed)
        else:
            own = () if scales is None else (scales,)
            encoder = SlotEncoder(slot, "weight", seed, direct, own, call.cuts.weight)
            row, saved = encoder.operand(w, is_saved)
    if isinstance(weight, CachedWeight):
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
) -> tuple[torch.Tensor, Buffers, Buffers, list[torch.Tensor], Plan]:
    """Return y, what is saved of the input and of w, what the prologue wants to know, and the plan.

    That is the call's, with the specs in which what is saved was encoded.
    """
    given = isinstance(call.weight, PrequantizedWeight)  # then only its planes are read
    direct = can_bypass_dispatcher(x, None if given else w, bias, seed, gamma, beta)
    if direct and not x.is_cpu and call.cuts is NO_CUTS:
        prepared = prepared_for(call.plan, x.shape[0], w, call.weight is not None)
        call = call._replace(plan=prepared.plan)
        if _is_prepared(x, w, call, prepared):
            w_planes, kept, saves = None, None, (call.needs.w, call.needs.dgrad)
            if call.weight is not None:
                w_planes = _weight_planes(w, seed, call, None, True)
                kept = call.weight.row_kept
            before = None if call.prologue is None else PrologueCall(call.prologue, gamma, beta)
            made = prepared.on_gpu(x, w, bias, seed, saves, w_planes, kept, before)
            return *made, prepared.plan
    plan = call.plan
    own = () if scales is None else (scales,)
    encoder = SlotEncoder(plan.input, "input", seed, direct, own, call.cuts.input)
    known: list[torch.Tensor] = []
    if call.saves_input and call.needs.w:
        (x_row, _), x_saved = encoder.encode(x, True, False), [x]
    elif call.prologue is None:
        x_row, x_saved = encoder.operand(x, call.needs.w)
    else:
        given_norm = (call.prologue, gamma, beta)
        x_row, x_saved, known = encoder.prologue_operand(x, call.needs.w, *given_norm)
    rows, gathered = x.shape[0], call.cuts.gathered
    arriving = None if gathered is None else send_rows(gathered, x_row, plan.input)
    w_row, w_saved = _weight_planes(w, seed, call, scales, direct)
    if gathered is not None and arriving is not None:
        (x_row,), rows = arriving.wait(), rows * gathered.world
    y = gemm(
        PlaneOperand(x_row, plan.input.row.spec, rows),
        PlaneOperand(w_row, plan.weight.row.spec, w.shape[0]),
        w.shape[1],
        bias,
        x.dtype,
        plan.precision.fprop,
        run_checked_gemm if direct else None,
        None if call.weight is None else call.weight.row_kept,
    )
    if call.cuts.scattered is not None:
        y = call.cuts.scattered.scatter(y).wait()
    return y, x_saved, w_saved, known, plan


def _is_prepared(x: torch.Tensor, w: torch.Tensor, call: _Call, prepared: PreparedLinear) -> bool:
    """Return whether a forward on a GPU, past the dispatcher, is the prepared one."""
    return (
        prepared.is_possible
        and not call.saves_input
        and is_current(x.device)
        and x.numel() != 0 != w.numel()
    )


def _prepared_forward(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    seed: torch.Tensor | None,
    call: _Call,
    prepared: PreparedLinear,
) -> tuple[torch.Tensor, Buffers, Buffers, Plan]:
    """Return y, what is saved of the input and of w, and the plan that this is encoded by.

    All of it past the dispatcher.
    """
    weight, needs, w_planes = call.weight, call.needs, None
    if weight is not None:
        w_planes = _weight_planes(w, seed, call, None, True)
    if prepared.device != "cpu":
        cache = None if weight is None else weight.row_kept
        prepared = prepared.on_chip(x.shape[0], w, weight is not None)
        saves = (needs.w, needs.x)
        y, *saved, _ = prepared.on_gpu(x, w, bias, seed, saves, w_planes, cache)
        return y, saved[0], saved[1], prepared.plan
    if w_planes is None and needs.x:
        w_planes = prepared.weight.operand(w, True, seed)
    given: torch.Tensor | Operand = w
    if w_planes is not None:
        given = Operand(w_planes[0], prepared.weight_spec, *w.shape)
    made = prepared.skinny(x, given, bias, seed, needs.w)
    if made is not None:
        return *made, [] if w_planes is None else w_planes[1], prepared.plan
    x_row, x_saved = prepared.input.operand(x, needs.w, seed)
    w_row, w_saved = w_planes or prepared.weight.operand(w, False, seed)
    cache = None if weight is None else weight.row_kept
    (a, b, multiply), args = prepared.product(bias)
    rows, (n, k) = x.shape[0], w.shape
    y = multiply(Operand(x_row, a, rows, k), Operand(w_row, b, n, k, cache), args)
    return y, x_saved, w_saved, prepared.plan


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
        known: list[torch.Tensor] = []
        if call.prepared is not None:
            given = _prepared_forward(x, w, bias, seed, call, call.prepared)
            y, x_saved, w_saved, plan = given
        else:
            y, x_saved, w_saved, known, plan = _forward(x, w, bias, gamma, beta, seed, scales, call)
        needs, weight = call.needs, call.weight
        saved = [*x_saved, *w_saved]
        if ENTERED:
            tell_offload(x_saved, w_saved if weight is None else ())
        if call.prologue is not None and needs.dgrad:
            saved += [x, *known] if gamma is None else [x, *known, gamma]
        ctx.end = len(saved)
        if seed is not None:
            saved.append(seed)
        anchor = anchor_on(x.device)
        ctx.save_for_backward(*saved, *(() if anchor is None else (anchor,)))
        ctx.has_anchor = anchor is not None
        ctx.plan, ctx.needs, ctx.prologue = plan, needs, call.prologue
        ctx.counts = (len(x_saved), len(w_saved), len(known))
        ctx.features = (w.shape[1], w.shape[0])
        ctx.late = ctx.kept = ctx.planes = None
        if isinstance(weight, PrequantizedWeight) and not torch.compiler.is_compiling():
            ctx.planes = weight
        if isinstance(weight, PrequantizedWeight) and weight.is_late:
            ctx.late = weight
        elif weight is not None and needs.dgrad and not call.plan.weight.col.is_plain:
            ctx.kept = weight.col_kept
        ctx.into, ctx.cuts, ctx.saves_input = call.into, call.cuts, call.saves_input
        # Not saved for backward: other backwards write them meanwhile, and may.
        ctx.scales = scales
        return y if anchor is None else (y, anchor)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor, *_: Any) -> tuple[Any, ...]:
        saved = list(ctx.saved_tensors)
        # Compiled autograd compiles the backward of an eager forward, too, which left an anchor.
        anchor = saved.pop() if ctx.has_anchor else None
        if ctx.planes is not None and not torch.compiler.is_compiling():
            num_x, num_w, _ = ctx.counts
            ctx.planes.check_saved(saved[num_x : num_x + num_w])
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return (*linear_backward(ctx, saved, dy), None, None, None)
        with torch.no_grad():  # create_graph=True
            grads = linear_backward(ctx, saved, dy)
        return (*without_derivative("Linear", (dy, anchor), grads), None, None, None)


#: `_Linear.apply` without torch's Python around it, which asks for functorch's transforms.
_apply: Final[Any] = super(torch.autograd.Function, _Linear).apply


def linear(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    plan: Plan,
    weight: CachedWeight | PrequantizedWeight | None = None,
    scales: Scales | None = None,
    before: PrologueCall | None = None,
    into: Into | None = None,
    cuts: Cuts = NO_CUTS,
    saves_input: bool = False,
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
        before: what makes the matrix that is multiplied out of x; None: x is that matrix.
        into: where the gradient of w is added; None: it is returned.
        cuts: how x, w and the gradient lie over ranks; then they are windows (`shards.Cut`).
        saves_input: x itself is saved, and its columnwise plane encoded in the backward; not where
            a scale follows from other steps or ranks.

    Returns:
        `[rows, out_features]` in x's dtype.

    Raises:
        NotImplementedError: a tensor has a tangent, or is in a transform of torch.func.
    """
    prologue, gamma, beta = _NO_PROLOGUE if before is None else before
    refuse_tangents("hybridq.Linear", x, w, bias, gamma, beta)
    # Drawn whether or not there will be a backward: a reentrant checkpoint runs its forward
    # without gradients, and its recomputation must find the generator in the same state.
    seed = draw_seed(x.device) if plan.is_stochastic else None
    needs = _NOTHING
    if torch.is_grad_enabled() and not plan.is_forward_only:
        needs = _Needs(
            x.requires_grad,
            w.requires_grad,
            bias is not None and bias.requires_grad,
            gamma is not None and gamma.requires_grad,
            beta is not None and beta.requires_grad,
        )
    given = (
        x,
        w,
        bias,
        gamma,
        beta,
        seed,
        scales,
        _Call(plan, needs, weight, prologue, into, None, cuts, saves_input),
    )
    if plan.is_forward_only:
        with torch.no_grad(), without_autocast(x.device.type):
            y = _run(*given)
        return without_backward("Linear", y, x, w, bias, gamma, beta)
    if torch.compiler.is_compiling() or has_autocast(x.device.type):
        with without_autocast(x.device.type):
            return _run(*given)
    return _run(*given)


def _run(*given: Any) -> torch.Tensor:
    """Return what the function makes of these arguments: by autograd where a gradient is wanted."""
    if not any(given[-1].needs):
        return _forward(*given)[0]
    made: Any = _Linear.apply(*given)
    return made if torch.compiler.is_compiling() else made[0]


def eager_linear(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    prepared: PreparedLinear,
    weight: CachedWeight | None,
) -> torch.Tensor:
    """Return what `linear` does, with the same bits, of tensors of which the caller has asked all.

    They are plain and on a CPU or the current GPU, the dispatcher may be bypassed, and
    torch.autocast is off.

    Args:
        x, w, bias, weight: as `linear` takes them.
        prepared: under the module's plan, for their dtype.
    """
    plan = prepared.plan
    seed = draw_seed(x.device) if plan.is_stochastic else None
    if torch.is_grad_enabled():
        has_grad = bias is not None and bias.requires_grad
        needs = _EAGER[x.requires_grad, w.requires_grad, has_grad]
        if needs is not _NOTHING:
            call = _Call(plan, needs, weight, None, None, prepared)
            return _apply(x, w, bias, None, None, seed, None, call)[0]
    call = _Call(plan, _NOTHING, weight, None, None, prepared)
    return _prepared_forward(x, w, bias, seed, call, prepared)[0]
