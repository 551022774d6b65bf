"""hybridq.GroupedLinear: the linear layers of experts, each for its own group of tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import nn

from ..errors import RecipeError
from ..recipes import CustomRecipe, Plan, bind
from ..recipes.factories import high_precision_factory
from .function import linear
from .grouped_function import Layout, grouped_linear
from .grouped_splits import Splits, group_offsets, host_splits, mixed_linear
from .module import QuantizedModule

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
            values of `nn.Linear`.
        name: qualified name for the roles that a recipe's factory sees. A recipe that reads names
            is asked for each group, by the name `"<name>.<g>"`, and may answer each differently;
            any other is asked once.

    Raises:
        TypeError: a number is no int, or `name` no string.
        ValueError: `num_gemms` is below 1, or a number of features negative.

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
    #: Not one by one: what gathers or keeps weights by name leaves groups alone.
    _weights: Mapping[str, str] = MappingProxyType({})

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
        self._init_method = init_method
        options = {"device": device, "dtype": dtype}
        shape = (self.out_features, self.in_features)
        self._add("weight", shape, self.single_grouped_weight, options)
        if self.use_bias:
            self._add("bias", shape[:1], self.single_grouped_bias, options)
        self.reset_parameters()
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

    def reset_parameters(self) -> None:
        """Fill all parameters: layer after layer with the values that `nn.Linear` would draw."""
        weights, biases = self._parts([*self._own_weights(), *self._biases()])
        bound = 1 / math.sqrt(self.in_features) if self.in_features else 0.0
        with torch.no_grad():
            for g, weight in enumerate(weights):
                if self._init_method is not None:
                    self._init_method(weight)
                elif weight.numel():
                    nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
                if biases:
                    nn.init.uniform_(biases[g], -bound, bound)

    def extra_repr(self) -> str:
        """Return what `repr` says of the module."""
        return (
            f"num_gemms={self.num_gemms}, in_features={self.in_features}, "
            f"out_features={self.out_features}, bias={self.use_bias}"
        )

    def forward(
        self, inp: torch.Tensor, m_splits: Splits, is_first_microbatch: bool | None = None
    ) -> torch.Tensor:
        """Return each group's tokens times its weight, plus its bias.

        Args:
            inp: `[..., in_features]`, the tokens of group 0 first, then those of group 1, ...
            m_splits: how many tokens each group has, zero included. A list or tuple of ints must
                sum to the tokens. An int32 or int64 tensor `[num_gemms]` on the input's device is
                never read on the host, and so cannot be checked: tokens beyond its sum belong to no
                group, give zeros and get no gradient; sizes out of range count as the nearest
                sensible ones.
            is_first_microbatch: as for `hybridq.Linear`, of all weights.

        Returns:
            `[..., out_features]`, in the input's dtype or torch.autocast's.

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
        weights, biases = self._own_weights(), self._biases()
        own = list(weights)
        cast = self._cast(inp, *weights, *biases)
        x: torch.Tensor = cast[0]  # type: ignore[assignment]
        params: list[torch.Tensor] = list(cast[1:])  # type: ignore[arg-type]
        recipe = self._recipe()
        self._check_params(x, params, recipe is not None)
        flat = x if x.dim() == 2 else x.unsqueeze(0) if x.dim() == 1 else x.flatten(0, -2)
        splits = host_splits(m_splits, self.num_gemms, flat, self._error)
        plans = None if recipe is None else self._plans(recipe)
        is_plain = plans is None or all(plan.is_plain for plan in plans)
        if plans is not None and any(plan.is_delayed for plan in plans):
            y = self._delayed(flat, params, splits, plans, is_first_microbatch)
            return y if x.dim() == 2 else y.view(*x.shape[:-1], self.out_features)
        if is_plain and splits is not None and not (plans and torch.compiler.is_compiling()):
            y = self._plain(flat, params, splits)
        else:
            offsets = group_offsets(m_splits, splits, flat)
            y = self._quantized(flat, offsets, params, own, plans, is_first_microbatch)
        return y if x.dim() == 2 else y.view(*x.shape[:-1], self.out_features)

    def _check_params(
        self, x: torch.Tensor, params: Sequence[torch.Tensor], is_quantized: bool
    ) -> None:
        count = self.num_gemms if not self.single_grouped_weight else 1
        if is_quantized:
            bias = params[count] if self.use_bias else None
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

    def _plans(self, recipe: Any) -> list[Plan]:
        """Return the plan of each group."""
        if not recipe.reads_names:
            return [self._plan(recipe)] * self.num_gemms
        return [self._plan(recipe, str(g)) for g in range(self.num_gemms)]

    def _plain(
        self, x: torch.Tensor, params: list[torch.Tensor], splits: list[int]
    ) -> torch.Tensor:
        """Return a loop of `torch.nn.functional.linear` over the groups."""
        weights, biases = self._parts(params)
        rows = x.split(splits)
        made = [
            nn.functional.linear(row, weights[g], biases[g] if biases else None)
            for g, row in enumerate(rows)
        ]
        return torch.cat(made)

    def _delayed(
        self,
        x: torch.Tensor,
        params: list[torch.Tensor],
        splits: list[int] | None,
        plans: list[Plan],
        is_first_microbatch: bool | None,
    ) -> torch.Tensor:
        """Return a loop over the groups, each with a history of its own."""
        if splits is None:
            raise self._error(
                RecipeError,
                "with delayed scaling every group has its own history, which only a loop over the "
                "groups can keep; give m_splits as a list of ints, or take current scaling",
            )
        weights, biases = self._parts(params)
        made = []
        for g, rows in enumerate(x.split(splits)):
            scales = self._scales(weights[g], plans[g], is_first_microbatch, str(g))
            bias = biases[g] if biases else None
            made.append(linear(rows, weights[g], bias, plans[g], None, scales))
        return torch.cat(made)

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
            weights = list(weights[0].unbind(0))
        if biases and self.single_grouped_bias:
            biases = list(biases[0].unbind(0))
        return weights, biases

    def _quantized(
        self,
        x: torch.Tensor,
        offsets: torch.Tensor,
        params: list[torch.Tensor],
        own: list[torch.Tensor],
        plans: list[Plan] | None,
        is_first_microbatch: bool | None,
    ) -> torch.Tensor:
        features = (self.in_features, self.out_features)
        if plans is None:
            plans = [_PLAIN] * self.num_gemms
        if any(plan != plans[0] for plan in plans):
            return mixed_linear(x, offsets, *self._parts(params), plans, features)
        layout = Layout(
            self.num_gemms,
            self.single_grouped_weight,
            self.use_bias,
            self.single_grouped_bias,
            features,
        )
        kept = self._kept_all(own, params[0].dtype, plans[0], is_first_microbatch)
        return grouped_linear(x, offsets, params, layout, plans[0], kept)

    def _kept_all(
        self,
        own: list[torch.Tensor],
        dtype: torch.dtype,
        plan: Plan,
        is_first_microbatch: bool | None,
    ) -> tuple[Any, ...]:
        """Return where the planes of each group's weight are kept; empty for nowhere."""
        if torch.compiler.is_compiling() or plan.weight.col.is_plain:
            return ()
        weights = own
        if self.single_grouped_weight:
            weights = list(own[0].detach().unbind(0))
        kept = [
            self._kept(weight, dtype, plan, is_first_microbatch, str(g))
            for g, weight in enumerate(weights)
        ]
        return tuple(kept) if any(one is not None for one in kept) else ()
