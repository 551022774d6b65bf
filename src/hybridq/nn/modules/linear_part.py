"""What fused modules share: a linear part with a prologue, and how their weights are made."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from ..._log import log_once
from ...errors import must_be_one_of
from ...recipes import Plan, Recipe
from ...reference import ACTIVATIONS, NORMS
from ...shards import TokenGather
from ...storage import TensorStorage
from ...tensor import is_quantized
from ..autograd import (
    GATES,
    NO_CUTS,
    Activation,
    Cuts,
    Gate,
    Norm,
    PrologueCall,
    WatchedProduct,
    apply,
    gate_of,
    linear,
    needs_of,
    plain_linear,
    tell,
    watcher,
)
from ..weights import Into, foreign_weight, say_in_graph
from .dealt_parameters import reset_dealt
from .input_errors import NESTED, no_tensor, quantized_elsewhere
from .parallel_weights import SplitTogether
from .quantized_module import PLAIN, QuantizedModule
from .quantized_parts import decoded_or_kept
from .rank_agreement import compare_ranks
from .tensor_parallel import (
    COLUMN,
    ROW,
    Parallel,
    dtensor_forward,
    is_dtensor,
    run_windows,
    sharing_group,
    whole_input,
)
from .token_sums import sums_under
from .written_options import Check, finite_eps, settled, switch

__all__ = ["FusedModule", "has_plain_backward", "run_part"]

#: Fills a tensor in place: `init_method(weight)`.
InitMethod = Callable[[torch.Tensor], Any]


def run_part(
    module: QuantizedModule,
    part: str,
    recipe: Recipe | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    is_first_microbatch: bool | None = None,
    before: PrologueCall | None = None,
) -> torch.Tensor:
    """Return `p(x) @ weight.T + bias` of one linear part of a module, under its recipe.

    Without a recipe, or with one that leaves the part alone, it is torch's own norm or activation
    and torch's own linear, bit for bit where that is fast (docs/reference/numerics.md, "Plain
    products").

    Args:
        module: whose name, plans and cached weights are used.
        part: of the module, "" if it has one only.
        recipe: what `module._recipe()` gave.
        x: `[..., in_features]`; of a gated activation `[..., 2 * in_features]`.
        weight: `[out_features, in_features]`; this rank's part, where the module has
            `parallel[part]`.
        bias: `[out_features]` or None.
        is_first_microbatch: as `Linear.forward` takes it.
        before: what makes the matrix that is multiplied out of x; None: it is x.

    Returns:
        `[..., out_features]`, in x's dtype or torch.autocast's.
    """
    parallel, first = module.parallel.get(part) if module.is_parallel else None, is_first_microbatch
    if parallel is None:
        own = _Part(module, part, weight, bias, first)
        return _run(own, recipe, x, before)
    if parallel.rank < 0:
        raise module._error(
            RuntimeError, "call set_tensor_parallel_group with the ranks' group before the forward"
        )
    if module.token_sums is not None:
        parallel = parallel._replace(sums=sums_under(module, recipe))
    plan = None if recipe is None else module.plan_of(recipe, part)
    compare_ranks(module, part, plan, parallel.group, x)
    if parallel.mode == ROW:
        bias = module.of_all_tokens(bias)
    if parallel.mode == COLUMN:
        if before is not None:  # its weights' gradients are those of the whole
            x, before = _prologue(module, plan, x, before), None
        tokens = parallel.tokens(plan, x.shape)
        own = _Part(module, part, weight, bias, first, parallel, module.stepped(part), tokens)
        return _run(own, recipe, parallel.enter(x) if tokens is None else x, None)
    tokens = parallel.tokens(plan, x.shape)
    own = _Part(module, part, weight, None, first, parallel, module.stepped(part), tokens)
    y = _run(own, recipe, x, before)
    if tokens is None:
        y = parallel.leave(y)
    return y if bias is None else y + bias.to(y.dtype)


class _Part(NamedTuple):
    """One linear part in one forward."""

    module: QuantizedModule
    name: str
    weight: torch.Tensor
    bias: torch.Tensor | None
    is_first: bool | None
    parallel: Parallel | None = None
    parameter: torch.Tensor | None = None  # of which the weight is this rank's part
    tokens: TokenGather | None = None  # how those are dealt out whose planes travel


def _prologue(
    module: QuantizedModule, plan: Plan | None, x: torch.Tensor, before: PrologueCall
) -> torch.Tensor:
    """Return the matrix that a prologue makes, with the bits that would be encoded."""
    if plan is None or plan.is_plain:
        return before.prologue.plain(x, before.gamma, before.beta)
    (x,) = module._cast(x)  # type: ignore[assignment]
    flat = _flat(x)
    return apply(flat, *before).view(*x.shape[:-1], -1)


def _flat(x: torch.Tensor) -> torch.Tensor:
    """Return `[..., features]` as a matrix."""
    if x.dim() == 2:
        return x
    return x.unsqueeze(0) if x.dim() == 1 else x.flatten(0, -2)


def _run(
    own: _Part, recipe: Recipe | None, x: torch.Tensor, before: PrologueCall | None
) -> torch.Tensor:
    """Return the product of tensors that this rank has, or of DTensors."""
    module, weight, bias = own.module, own.weight, own.bias
    plan = None if recipe is None else module.plan_of(recipe, own.name)
    is_dealt = module.is_dealt or is_dtensor(weight)
    if (module.fuse_wgrad_accumulation or module.delay_wgrad_compute) and is_dealt:
        raise module._error(
            NotImplementedError,
            "fuse_wgrad_accumulation and delay_wgrad_compute take weights that a rank has whole, "
            "got a DTensor; leave them off for tensor parallelism",
        )
    if is_dtensor(x) and (group := sharing_group(weight)):
        compare_ranks(module, own.name, plan, group, x)
    into = module._into(weight, own.is_first)
    if plan is None and into is not None:
        plan = PLAIN
        if before is not None:
            x = before.prologue.plain(x, before.gamma, before.beta)
        before = None
    elif plan is None or plan.is_plain:
        if before is not None:
            x = before.prologue.plain(x, before.gamma, before.beta)
        if plan is None or (into is None and not torch.compiler.is_compiling()):
            y = plain_linear(whole_input(x, weight) if is_dtensor(weight) else x, weight, bias)
            if watcher() is not None and not is_dtensor(weight):
                _tell(own, plan, x, weight, y, None, None)
            return y
        before = None  # compiled, only planes give the eager bits of a linear
    if before is not None and has_plain_backward(plan, x, before):
        # Nothing of the matrix between is quantized but for the forward, and nothing is gained by
        # one step; so every gradient has the bits of the plain module's.
        x, before = before.prologue.plain(x, before.gamma, before.beta), None
    if not is_dtensor(weight):
        if is_dtensor(x):
            raise module._error(
                RuntimeError,
                "the input is a DTensor, and so must be the weight, got a plain one; parallelize "
                "the module, or give it x.to_local()",
            )
        return _product(own, plan, x, before, into)
    if before is not None:
        x = _prologue(module, plan, x, before)

    def run(
        x: Any, weight: Any, bias: Any, parallel: Parallel | None, tokens: TokenGather | None
    ) -> torch.Tensor:
        local = own._replace(
            weight=weight, bias=bias, parallel=parallel, parameter=own.weight, tokens=tokens
        )
        return _product(local, plan, x, None, None)

    return dtensor_forward(module, x, weight, bias, plan, run, sums_under(module, recipe))


def has_plain_backward(plan: Plan, x: torch.Tensor, before: PrologueCall) -> bool:
    """Return whether a backward multiplies what it would multiply without a recipe.

    Then a norm or an activation is torch's own, in a step of its own.

    Args:
        plan: of the product.
        x: the input of the norm or activation.
        before: it.
    """
    slots = (plan.input.col, plan.weight.col, plan.grad_output.row, plan.grad_output.col)
    if plan.is_forward_only or not all(one.is_plain for one in slots):
        return False
    if plan.input.saves_row or plan.weight.saves_row or is_quantized(x):
        return False
    return all(one is None or one.dtype == x.dtype for one in (before.gamma, before.beta))


def _product(
    own: _Part, plan: Plan, x: torch.Tensor, before: PrologueCall | None, into: Into | None
) -> torch.Tensor:
    """Return the product of tensors that this rank has: all of them, or its parts."""
    module, weight, is_first = own.module, own.weight, own.is_first
    w: torch.Tensor
    b: torch.Tensor | None
    foreign = foreign_weight(weight)
    if foreign is not None:
        raise module._error(TypeError, quantized_elsewhere(foreign))
    x, w, b = module._cast(x, weight, own.bias)  # type: ignore[assignment]
    in_features = weight.shape[1]
    module._check(x, w, b, in_features if before is None else before.prologue.columns(in_features))
    parameter = weight if own.parameter is None else own.parameter
    scales = module._scales(parameter, plan, is_first, own.name)
    flat = _flat(x)

    def product(x: Any, w: Any, b: Any, cuts: Cuts = NO_CUTS) -> torch.Tensor:
        kept = None
        if cuts.weight is None or is_quantized(weight):  # parts of the planes of the whole
            kept = module._kept(weight, w.dtype, plan, is_first, own.name)
            if kept is None and torch.compiler.is_compiling() and is_quantized(w):
                # In a graph `encode` takes its planes as they are. Eagerly what is not kept holds
                # values, gathered in high precision, which are cut like any other.
                cuts = cuts._replace(weight=None)
                for name, part in module.weight_parts.items():
                    held = getattr(module, name)  # dynamo reads no attribute of what it views
                    if part == own.name and is_quantized(held):
                        say_in_graph(module, held, plan.weight, w.dtype)
        saves = module.save_original_input and _may_encode_again(own, plan, fused, cuts)
        return linear(x, w, b, plan, kept, scales, fused, into, cuts, saves)

    fused = before
    if own.parallel is None:
        y = product(flat, w, b)
    else:
        if is_quantized(weight):
            w = decoded_or_kept(module, weight, w, plan, own.parallel)
        cut, _ = own.parallel.cut(plan)
        if any(cut.lacks()):
            if into is not None:
                raise module._error(
                    NotImplementedError,
                    "fuse_wgrad_accumulation takes parts of whole blocks, got sizes "
                    f"{list(own.parallel.sizes)} for blocks of {cut.unit}; leave it off",
                )
            if before is not None and own.parallel.mode == ROW:
                flat, fused = _prologue(module, plan, flat, before), None
        y = run_windows(flat, w, b, plan, own.parallel, own.tokens, product)
        if own.tokens is not None:
            return y.view(*own.parallel.leading(x.shape), weight.shape[0])
    if watcher() is not None:
        _tell(own, plan, flat, w, y, scales, fused)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], weight.shape[0])


def _tell(
    own: _Part,
    plan: Plan | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    y: torch.Tensor,
    scales: Any,
    before: PrologueCall | None,
) -> None:
    """Show a product to what watches."""

    def matrix() -> torch.Tensor:
        made = x.detach()
        if before is not None:
            made = _prologue(own.module, plan, made, before)
        return _flat(made.dequantize() if is_quantized(made) else made).detach()

    def weights() -> list[torch.Tensor]:
        return [(weight.dequantize() if is_quantized(weight) else weight).detach()]

    def held() -> list[TensorStorage | None]:
        given: Any = weight
        return [given.tensor_storage if is_quantized(given) else None]

    made_of = (x,) if before is None else (x, before.gamma, before.beta)
    needs = needs_of(made_of, [own.weight if own.parameter is None else own.parameter])
    given = (own.module, own.name, [plan], matrix, weights, y, [scales])
    tell(watcher(), WatchedProduct(*given, held=held, needs=needs))


def _may_encode_again(own: _Part, plan: Plan, fused: PrologueCall | None, cuts: Cuts) -> bool:
    """Return whether a backward can make the input's columnwise plane of the input; say if not."""
    slot = plan.input
    if slot.col.is_plain:  # made of the input, or of its rowwise plane, as it is
        return False
    if fused is None and cuts == NO_CUTS and not (slot.is_delayed or slot.amax_group):
        return True
    if not torch.compiler.is_compiling():
        log_once(
            "save_original_input",
            f"{type(own.module).__name__}: save_original_input has no effect where the input's "
            "scales follow from earlier steps or other ranks: planes are saved",
        )
    return False


class FusedModule(SplitTogether, QuantizedModule):
    """Base of modules whose linear parts have prologues, the first of them a norm."""

    layer_norm_weight: nn.Parameter
    layer_norm_bias: nn.Parameter | None
    normalization: str
    eps: float
    zero_centered_gamma: bool
    _written_options: ClassVar[Mapping[str, Check]] = {
        "normalization": settled,
        "eps": finite_eps,
        "zero_centered_gamma": switch,
    }

    def _make_norm(
        self,
        features: int,
        eps: float,
        normalization: str,
        zero_centered_gamma: bool,
        options: dict[str, Any],
    ) -> None:
        """Make the norm's parameters; RMSNorm has no bias."""
        if normalization not in NORMS:
            raise self._error(
                ValueError, f"normalization must be {' or '.join(NORMS)}, got {normalization!r}"
            )
        self.normalization, self.eps = normalization, eps
        self.zero_centered_gamma = zero_centered_gamma
        self.layer_norm_weight = nn.Parameter(torch.empty(features, **options))
        if normalization == NORMS[0]:
            self.layer_norm_bias = nn.Parameter(torch.empty(features, **options))
        else:
            self.register_parameter("layer_norm_bias", None)

    def _make_linear(
        self, prefix: str, out_features: int, in_features: int, bias: bool, options: dict[str, Any]
    ) -> None:
        """Make `<prefix>weight` and `<prefix>bias`, which is None without a bias."""
        weight = nn.Parameter(torch.empty(out_features, in_features, **options))
        self.register_parameter(f"{prefix}weight", weight)
        own = nn.Parameter(torch.empty(out_features, **options)) if bias else None
        self.register_parameter(f"{prefix}bias", own)

    def _reset_norm(self) -> None:
        nn.init.constant_(self.layer_norm_weight, 0.0 if self.zero_centered_gamma else 1.0)
        if self.layer_norm_bias is not None:
            nn.init.zeros_(self.layer_norm_bias)

    def _reset_linear(self, prefix: str, init_method: InitMethod | None) -> None:
        """Draw one linear part's parameters as `nn.Linear` does, or as the caller says."""
        if self.is_dealt:
            fill = init_method or partial(nn.init.kaiming_uniform_, a=math.sqrt(5))
            return reset_dealt(self, f"{prefix}weight", fill, f"{prefix}bias")
        weight = getattr(self, f"{prefix}weight")
        bias = getattr(self, f"{prefix}bias")
        parallel = self.parallel.get(self.weight_parts[f"{prefix}weight"])
        if init_method is not None or parallel is not None:
            with torch.no_grad(), self.drawing.drawing():
                if init_method is not None:
                    init_method(weight)
                else:
                    nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
                if parallel is not None:
                    parallel.as_of_whole(weight, init_method)
                if bias is not None:
                    bias.zero_()
            return
        # The same numbers as nn.Linear draws, from the same state of the generator.
        nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
        if bias is not None:
            bound = 1 / math.sqrt(weight.shape[1]) if weight.shape[1] > 0 else 0
            nn.init.uniform_(bias, -bound, bound)

    def _take_input(self, inp: object, features: int) -> torch.Tensor:
        """Return the input as a Tensor that the norm can take, or raise."""
        if not isinstance(inp, torch.Tensor):
            raise self._error(TypeError, no_tensor(inp))
        if inp.is_nested and inp.layout == torch.strided:  # which has no shape
            raise self._error(TypeError, NESTED)
        if inp.dim() == 0 or inp.shape[-1] != features:
            raise self._error(
                RuntimeError,
                f"the last dimension of the input must be {features}, got shape {tuple(inp.shape)}",
            )
        return inp

    def _norm_call(self) -> PrologueCall:
        """Return the norm, in front of a product."""
        gamma, beta = (
            self.local_parameter("layer_norm_weight"),
            self.local_parameter("layer_norm_bias"),
        )
        norm = Norm(self.normalization, self.eps, self.zero_centered_gamma)
        if self.sums_gradients:
            return PrologueCall(norm, self.of_all_tokens(gamma), self.of_all_tokens(beta))
        return PrologueCall(norm, gamma, beta)

    def _normalized(self, x: torch.Tensor, plan: Plan | None) -> torch.Tensor:
        """Return the norm of x alone, for callers that want to see it; the bits that are encoded.

        Args:
            x: `[..., features]`.
            plan: of the product behind it; None: no recipe quantizes it.
        """
        before = self._norm_call()
        is_plain = plan is None or plan.is_plain
        if plan is not None and not (is_plain or self.is_parallel):
            is_plain = has_plain_backward(plan, x, before)
        return _prologue(self, None if is_plain else plan, x, before)


def one_dtype(
    owner: str, dtype: torch.dtype | None, params_dtype: torch.dtype | None
) -> torch.dtype | None:
    """Return the dtype of parameters, which two arguments name.

    Args:
        owner: the class, for the error.
        dtype: torch's name of the argument.
        params_dtype: Transformer Engine's.

    Raises:
        ValueError: they differ.
    """
    if dtype is not None and params_dtype is not None and dtype != params_dtype:
        raise ValueError(
            f"{owner}: dtype and params_dtype are two names of one thing, got {dtype} and "
            f"{params_dtype}"
        )
    return params_dtype if dtype is None else dtype


def activation_of(
    owner: str, activation: str, params: Mapping[str, float] | None = None
) -> Activation | Gate:
    """Return the prologue of an activation's name, or a gate, which stands by itself.

    Args:
        owner: the class, for the error.
        activation: a name in `reference.ACTIVATIONS`, or of `GATES`.
        params: of a gate, what differs from its defaults.

    Raises:
        ValueError: there is no such name or parameter.
    """
    gate = gate_of(owner, activation, params)
    if gate is not None:
        return gate
    if activation not in ACTIVATIONS:
        names = (*ACTIVATIONS, *GATES)
        raise ValueError(f"{owner}: activation {must_be_one_of(names, activation)}")
    return Activation(activation)
