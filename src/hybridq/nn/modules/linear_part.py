"""What fused modules share: a linear part with a prologue, and how their weights are made."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ...errors import must_be_one_of
from ...recipes import Recipe
from ...reference import ACTIVATIONS, NORMS
from ..autograd import Activation, Norm, PrologueCall, apply, linear, plain_linear
from .quantized_module import PLAIN, QuantizedModule

__all__ = ["FusedModule", "run_part"]

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
        weight: `[out_features, in_features]`.
        bias: `[out_features]` or None.
        is_first_microbatch: as `Linear.forward` takes it.
        before: what makes the matrix that is multiplied out of x; None: it is x.

    Returns:
        `[..., out_features]`, in x's dtype or torch.autocast's.
    """
    plan = None if recipe is None else module.plan_of(recipe, part)
    into = module._into(weight)
    if plan is None and into is not None:
        plan = PLAIN
        if before is not None:
            x = before.prologue.plain(x, before.gamma, before.beta)
        before = None
    elif plan is None or plan.is_plain:
        if before is not None:
            x = before.prologue.plain(x, before.gamma, before.beta)
        if plan is None or (into is None and not torch.compiler.is_compiling()):
            return plain_linear(x, weight, bias)
        before = None  # compiled, only planes give the eager bits of a linear
    w: torch.Tensor
    b: torch.Tensor | None
    x, w, b = module._cast(x, weight, bias)  # type: ignore[assignment]
    in_features = weight.shape[1]
    module._check(x, w, b, in_features if before is None else before.prologue.columns(in_features))
    scales = module._scales(weight, plan, is_first_microbatch, part)
    kept = module._kept(weight, w.dtype, plan, is_first_microbatch, part)
    if x.dim() == 2:
        return linear(x, w, b, plan, kept, scales, before, into)
    flat = x.unsqueeze(0) if x.dim() == 1 else x.flatten(0, -2)
    y = linear(flat, w, b, plan, kept, scales, before, into)
    return y.view(*x.shape[:-1], weight.shape[0])


class FusedModule(QuantizedModule):
    """Base of modules whose linear parts have prologues, the first of them a norm."""

    layer_norm_weight: nn.Parameter
    layer_norm_bias: nn.Parameter | None
    #: Strings only, so that repr and dynamo have little to do.
    normalization: str
    eps: float
    zero_centered_gamma: bool

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
        if features < 0:
            raise self._error(ValueError, f"in_features must not be negative, got {features}")
        if not 0.0 <= eps < math.inf:
            raise self._error(ValueError, f"eps must be finite and at least 0, got {eps}")
        self.normalization, self.eps = normalization, float(eps)
        self.zero_centered_gamma = bool(zero_centered_gamma)
        self.layer_norm_weight = nn.Parameter(torch.empty(features, **options))
        if normalization == NORMS[0]:
            self.layer_norm_bias = nn.Parameter(torch.empty(features, **options))
        else:
            self.register_parameter("layer_norm_bias", None)
        self._norm = Norm(normalization, self.eps, self.zero_centered_gamma)

    def _make_linear(
        self, prefix: str, out_features: int, in_features: int, bias: bool, options: dict[str, Any]
    ) -> None:
        """Make `<prefix>weight` and `<prefix>bias`, which is None without a bias."""
        if min(in_features, out_features) < 0:
            sizes = f"{in_features} and {out_features}"
            raise self._error(ValueError, f"{prefix}features must not be negative, got {sizes}")
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
        weight = getattr(self, f"{prefix}weight")
        bias = getattr(self, f"{prefix}bias")
        if init_method is not None:
            with torch.no_grad():
                init_method(weight)
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
            raise self._error(TypeError, f"input must be a Tensor, got {type(inp).__name__}")
        if inp.dim() == 0 or inp.shape[-1] != features:
            raise self._error(
                RuntimeError,
                f"the last dimension of the input must be {features}, got shape {tuple(inp.shape)}",
            )
        return inp

    def _normalized(self, x: torch.Tensor, is_plain: bool) -> torch.Tensor:
        """Return the norm of x alone, for callers that want to see it; the bits that are encoded.

        Args:
            x: `[..., features]`.
            is_plain: no recipe quantizes it: it is torch's norm.
        """
        gamma, beta = self.layer_norm_weight, self.layer_norm_bias
        if is_plain:
            return self._norm.plain(x, gamma, beta)
        (x,) = self._cast(x)  # type: ignore[assignment]
        flat = x.unsqueeze(0) if x.dim() == 1 else x.flatten(0, -2)
        return apply(flat, self._norm, gamma, beta).view(x.shape)


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


def activation_of(owner: str, activation: str) -> Activation:
    """Return the prologue of an activation's name.

    Args:
        owner: the class, for the error.
        activation: a name in `reference.ACTIVATIONS`.

    Raises:
        ValueError: it is not.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"{owner}: activation {must_be_one_of(ACTIVATIONS, activation)}")
    return Activation(activation)
