"""hybridq.GroupedLinear: the linear layers of experts, each for its own group of tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import nn

from ..recipes import CustomRecipe, Plan, Recipe, bind
from ..recipes.factories import high_precision_factory
from ..recipes.roles import GRAD_INPUT
from ..tensor import is_quantized
from ..tensor.stack import is_stack, split_stack
from .fused import one_dtype
from .grouped_function import Layout, grouped_linear
from .grouped_splits import Splits, group_offsets, host_splits, mixed_linear
from .main_grad import Into, part_of
from .model_init import plain_weights
from .module import QuantizedModule
from .plain_product import plain_linear
from .quantized_output import with_quantized_gradient

__all__ = ["GroupedLinear"]

#: What `role.module_type` says of the module's slots.
_GROUPED: Final = "grouped_linear"
#: Nothing is quantized: what runs outside `hybridq.autocast` where the splits stay on the device.
_PLAIN: Final = bind(CustomRecipe(high_precision_factory), "", _GROUPED)


class GroupedLinear(QuantizedModule):
    """`num_gemms` linear layers of one shape; the g-th computes the g-th group of tokens.

    The result and all gradients are those of a loop of `hybridq.Linear` over the groups (the page
    `docs/grouped-linear.md` says what holds bit for bit): every group is quantized as a tensor of
    its own, with an amax of its own. Outside `hybridq.autocast` nothing is quantized.

    Args:
        num_gemms: how many layers, and so groups, there are.
        in_features, out_features, bias, device, dtype: of each layer, as for `nn.Linear`.
        single_grouped_weight: one parameter `weight` `[num_gemms, out_features, in_features]`
            instead of `weight0`, `weight1`, ... `[out_features, in_features]` each.
        single_grouped_bias: one parameter `bias` `[num_gemms, out_features]` instead of `bias0`,
            `bias1`, ...
        init_method: called with the weight of each layer to fill it in place; None: the initial
            values of `nn.Linear`. Biases are then zero.
        return_bias: the biases are returned and not added, for a caller that adds them later.
        params_dtype: another name of `dtype`.
        fuse_wgrad_accumulation: as for `Linear`, of every weight parameter.
        name: qualified name for the roles that a recipe's factory sees. A recipe that reads names
            is asked for each group, by the name `"<name>.<g>"`, and may answer each differently;
            any other is asked once.

    Raises:
        TypeError: a number is no int, or `name` no string.
        ValueError: `num_gemms` is below 1, a number of features negative, or `dtype` and
            `params_dtype` differ.

    Source: Transformer Engine's GroupedLinear (arguments, parameters and their names).

    Example:
        >>> import torch, hybridq
        >>> experts = hybridq.GroupedLinear(3, 64, 32)
        >>> x = torch.randn(10, 64)  # 4 tokens of the first expert, 6 of the third
        >>> with hybridq.autocast(recipe="mxfp8"):
        ...     y = experts(x, [4, 0, 6])
        >>> y.shape
        torch.Size([10, 32])
    """

    _module_type = _GROUPED

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        fuse_wgrad_accumulation: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__()
        self.num_gemms = self._count("num_gemms", num_gemms, 1)
        self.in_features = self._count("in_features", in_features, 0)
        self.out_features = self._count("out_features", out_features, 0)
        self.use_bias = bool(bias)
        self.single_grouped_weight = bool(single_grouped_weight)
        self.single_grouped_bias = bool(single_grouped_bias)
        self.return_bias = bool(return_bias)
        self._init_method = init_method
        self._weights = dict(self._initial_weights())
        options = {"device": device, "dtype": one_dtype("GroupedLinear", dtype, params_dtype)}
        shape = (self.out_features, self.in_features)
        self._add("weight", shape, self.single_grouped_weight, options)
        if self.use_bias:
            self._add("bias", shape[:1], self.single_grouped_bias, options)
        self.reset_parameters()
        self._take_accumulation(fuse_wgrad_accumulation)
        self._take_name(name)

    def _count(self, what: str, value: object, least: int) -> int:
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"GroupedLinear: {what} must be an int, got {type(value).__name__}")
        if value < least:
            raise ValueError(f"GroupedLinear: {what} must be at least {least}, got {value}")
        return value

    def _add(self, what: str, shape: tuple[int, ...], is_single: bool, options: Any) -> None:
        if is_single:
            whole = torch.empty((self.num_gemms, *shape), **options)
            self.register_parameter(what, nn.Parameter(whole))
            return
        for g in range(self.num_gemms):
            self.register_parameter(f"{what}{g}", nn.Parameter(torch.empty(shape, **options)))

    def _params(self, what: str, is_single: bool) -> list[torch.Tensor]:
        if is_single:
            return [getattr(self, what)]
        return [getattr(self, f"{what}{g}") for g in range(self.num_gemms)]

    def _own_weights(self) -> list[torch.Tensor]:
        """Return the weight parameters: one `[G, out, in]`, or one `[out, in]` per group."""
        return self._params("weight", self.single_grouped_weight)

    def _biases(self) -> list[torch.Tensor]:
        """Return the bias parameters: none, one `[G, out]`, or one `[out]` per group."""
        return self._params("bias", self.single_grouped_bias) if self.use_bias else []

    @property
    def _adds_bias(self) -> bool:
        return self.use_bias and not self.return_bias

    def _each_bias(self) -> list[torch.Tensor]:
        """Return the bias of each group; none where there are none."""
        biases = self._biases()
        return list(biases[0].unbind(0)) if biases and self.single_grouped_bias else biases

    def reset_parameters(self) -> None:
        """Fill all parameters: layer after layer with the values that `nn.Linear` would draw."""
        with plain_weights(self):
            self._fill()

    def _fill(self) -> None:
        weights, biases = self._parts([*self._own_weights(), *self._biases()])
        bound = 1 / math.sqrt(self.in_features) if self.in_features else 0.0
        with torch.no_grad():
            for g, weight in enumerate(weights):
                if self._init_method is not None:
                    self._init_method(weight)
                elif weight.numel():
                    nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
                if biases and self._init_method is not None:
                    biases[g].zero_()
                elif biases:
                    nn.init.uniform_(biases[g], -bound, bound)

    def extra_repr(self) -> str:
        """Return what `repr` says of the module."""
        return (
            f"num_gemms={self.num_gemms}, in_features={self.in_features}, "
            f"out_features={self.out_features}, bias={self.use_bias}"
        )

    def forward(
        self,
        inp: torch.Tensor,
        m_splits: Splits,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> Any:
        """Return each group's tokens times its weight, plus its bias.

        Args:
            inp: `[..., in_features]`, the tokens of group 0 first, then those of group 1, ...
            m_splits: how many tokens each group has, zero included. A list or tuple of ints must
                sum to the tokens. An int32 or int64 tensor `[num_gemms]` on the input's device is
                never read on the host, and so cannot be checked: tokens beyond its sum belong to no
                group, give zeros and get no gradient; sizes out of range count as the nearest
                sensible ones.
            is_first_microbatch: as for `hybridq.Linear`, of all weights.
            fp8_output, fp8_grad: as for `hybridq.Linear`; the result and the gradient are tensors
                of all tokens, quantized as such and not by group.

        Returns:
            `[..., out_features]`, in the input's dtype or torch.autocast's. With `return_bias` a
            tuple of that, without the biases, and a list of the bias of each group.

        Raises:
            ValueError: the splits are not one for each group, negative, or of another sum.
            TypeError: the splits are no ints, or a dtype cannot be quantized.
            RuntimeError: features, dtypes or devices do not fit.
            RecipeError: the recipe leaves a GEMM without a plane.

        Source: names and meaning of the arguments: Transformer Engine; splits on the device: ours.
        """
        self._check_first(is_first_microbatch)
        given: object = inp
        if not isinstance(given, torch.Tensor):
            raise self._error(TypeError, f"input must be a Tensor, got {type(given).__name__}")
        recipe = self._recipe()
        if recipe is not None and fp8_grad:
            inp = with_quantized_gradient(inp, self._boundary_quantizer(recipe, GRAD_INPUT))
        weights = self._own_weights()
        biases = self._biases() if self._adds_bias else []
        own = list(weights)
        cast = self._cast(inp, *weights, *biases)
        x: torch.Tensor = cast[0]  # type: ignore[assignment]
        params: list[torch.Tensor] = list(cast[1:])  # type: ignore[arg-type]
        self._check_params(x, params, recipe is not None)
        flat = x if x.dim() == 2 else x.unsqueeze(0) if x.dim() == 1 else x.flatten(0, -2)
        splits = host_splits(m_splits, self.num_gemms, flat, self._error)
        plans = None if recipe is None else self._plans(recipe)
        is_plain = plans is None or all(plan.is_plain for plan in plans)
        into = self._into_all(own)
        planes = into or (plans and torch.compiler.is_compiling())
        if is_plain and splits is not None and not planes:
            y = self._plain(flat, params, splits)
        else:
            offsets = group_offsets(m_splits, splits, flat)
            y = self._quantized(flat, offsets, params, own, plans, is_first_microbatch, into)
        y = y if x.dim() == 2 else y.view(*x.shape[:-1], self.out_features)
        if recipe is not None and fp8_output:
            y = self._quantized_output(y, recipe)
        return (y, self._each_bias()) if self.return_bias else y

    def _check_params(
        self, x: torch.Tensor, params: Sequence[torch.Tensor], is_quantized: bool
    ) -> None:
        count = self.num_gemms if not self.single_grouped_weight else 1
        if is_quantized:
            bias = params[count] if self._adds_bias else None
            self._check(x, params[0], bias, self.in_features)
        elif x.dim() == 0 or x.shape[-1] != self.in_features:
            raise self._error(
                RuntimeError,
                f"the last dimension of the input must be in_features={self.in_features}, got "
                f"shape {tuple(x.shape)}",
            )
        for param in params:
            if param.dtype != x.dtype or param.device != x.device:
                raise self._error(
                    RuntimeError,
                    "input and parameters must have one dtype and one device, got "
                    f"{x.dtype} on {x.device} and {param.dtype} on {param.device}",
                )

    def _plan_parts(self, recipe: Recipe | None) -> tuple[str, ...]:
        if recipe is None or not recipe.reads_names:
            return ("",)
        return tuple(map(str, range(self.num_gemms)))

    def _plans(self, recipe: Any) -> list[Plan]:
        """Return the plan of each group."""
        if not recipe.reads_names:
            return [self._plan(recipe)] * self.num_gemms
        return [self._plan(recipe, str(g)) for g in range(self.num_gemms)]

    def _plain(
        self, x: torch.Tensor, params: list[torch.Tensor], splits: list[int]
    ) -> torch.Tensor:
        """Return a loop of the product of `torch.nn.functional.linear` over the groups."""
        weights, biases = self._parts(params)
        rows = x.split(splits)
        made = [
            plain_linear(row, weights[g], biases[g] if biases else None)
            for g, row in enumerate(rows)
        ]
        return torch.cat(made)

    def _scales_all(
        self, own: list[torch.Tensor], plans: list[Plan], is_first_microbatch: bool | None
    ) -> tuple[Any, ...]:
        """Return each group's Scales of delayed scaling; None where its plan has no delay."""
        if not any(plan.is_delayed for plan in plans):
            return (None,) * self.num_gemms
        weights = own * self.num_gemms if self.single_grouped_weight else own
        return tuple(
            [
                self._scales(weight, plan, is_first_microbatch, str(g))
                for g, (weight, plan) in enumerate(zip(weights, plans, strict=True))
            ]
        )

    def _initial_weights(self) -> list[tuple[str, str]]:
        if self.single_grouped_weight:
            return [("weight", "")]
        return [(f"weight{g}", str(g)) for g in range(self.num_gemms)]

    def _scaled_weights(self) -> list[tuple[str, torch.Tensor]]:
        weights = self._own_weights()
        if self.single_grouped_weight:
            weights = weights * self.num_gemms
        return [(str(g), weight) for g, weight in enumerate(weights)]

    def _parts(self, params: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the weight and the bias of each group."""
        count = 1 if self.single_grouped_weight else self.num_gemms
        weights, biases = params[:count], params[count:]
        if self.single_grouped_weight:
            weights = split_stack(weights[0])
        if biases and self.single_grouped_bias:
            biases = list(biases[0].unbind(0))
        return weights, biases

    def _into_all(self, own: list[torch.Tensor]) -> tuple[Into | None, ...]:
        """Return where the gradient of each weight parameter is added; empty: nowhere."""
        into = tuple([self._into(weight) for weight in own])
        return into if any(one is not None for one in into) else ()

    def _into_parts(self, into: tuple[Into | None, ...]) -> tuple[Into | None, ...]:
        """Return the same for each group."""
        if not (into and self.single_grouped_weight):
            return into
        whole = into[0]
        return () if whole is None else tuple([part_of(whole, g) for g in range(self.num_gemms)])

    def _quantized(
        self,
        x: torch.Tensor,
        offsets: torch.Tensor,
        params: list[torch.Tensor],
        own: list[torch.Tensor],
        plans: list[Plan] | None,
        is_first_microbatch: bool | None,
        into: tuple[Into | None, ...],
    ) -> torch.Tensor:
        features = (self.in_features, self.out_features)
        if plans is None:
            plans = [_PLAIN] * self.num_gemms
        scales = self._scales_all(own, plans, is_first_microbatch)
        kept = self._kept_all(own, params[0].dtype, plans, is_first_microbatch)
        if any(plan != plans[0] for plan in plans):
            weights, biases = self._parts(params)
            parts = self._into_parts(into)
            given = (plans, features, scales, parts, kept)
            return mixed_linear(x, offsets, weights, biases, *given)
        layout = Layout(
            self.num_gemms,
            self.single_grouped_weight,
            self._adds_bias,
            self.single_grouped_bias,
            features,
        )
        known = scales if plans[0].is_delayed else None
        return grouped_linear(x, offsets, params, layout, plans[0], kept, scales=known, into=into)

    def _kept_all(
        self,
        own: list[torch.Tensor],
        dtype: torch.dtype,
        plans: list[Plan],
        is_first_microbatch: bool | None,
    ) -> tuple[Any, ...]:
        """Return where the planes of each group's weight are, or are kept; empty for nowhere."""
        if torch.compiler.is_compiling():
            return ()
        slot = plans[0].weight
        keeps = not (slot.col.is_plain or slot.is_delayed) and all(p == plans[0] for p in plans)
        if not (keeps or is_stack(own[0]) or any(map(is_quantized, own))):
            return ()
        weights = own
        if self.single_grouped_weight:
            with torch.no_grad():
                weights = split_stack(own[0])
        kept = [
            self._kept(weight, dtype, plan, is_first_microbatch, str(g))
            if keeps or is_quantized(weight)
            else None
            for g, (weight, plan) in enumerate(zip(weights, plans, strict=True))
        ]
        return tuple(kept) if any(one is not None for one in kept) else ()
