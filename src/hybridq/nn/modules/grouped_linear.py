"""hybridq.GroupedLinear: the linear layers of experts, each for its own group of tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from ...recipes import Recipe
from ...recipes.roles import GRAD_INPUT
from ...tensor.stack import split_stack
from ..autograd import Layout, plain_linear, with_quantized_gradient
from ..weights import plain_weights
from .constructor_arguments import checked
from .group_sizes import Splits, group_offsets, host_splits
from .grouped_module import GroupedModule, GroupedParameters, is_shown_plain
from .input_errors import no_tensor
from .linear_part import one_dtype
from .marks import mark_again
from .written_options import Check, settled

__all__ = ["GroupedLinear"]


class GroupedLinear(GroupedModule):
    """`num_gemms` linear layers of one shape; the g-th computes the g-th group of tokens.

    The result and all gradients are those of a loop of `hybridq.Linear` over the groups (the page
    `docs/guides/grouped-linear.md` says what holds bit for bit): every group is quantized as a
    tensor of its own, with an amax of its own. Outside `hybridq.autocast` nothing is quantized.

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
        delay_wgrad_compute: as for `Linear`.
        name: qualified name for the roles that a recipe's factory sees. A recipe that reads names
            is asked for each group, by the name `"<name>.<g>"`, and may answer each differently;
            any other is asked once.

    Raises:
        TypeError: a number is no int, a switch no bool, or `name` no string.
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

    _written_options: ClassVar[Mapping[str, Check]] = dict.fromkeys(
        ("num_gemms", "single_grouped_weight", "single_grouped_bias", "use_bias"), settled
    )

    @checked
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
        delay_wgrad_compute: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__()
        if num_gemms < 1:
            raise ValueError(f"GroupedLinear: num_gemms must be at least 1, got {num_gemms}")
        self.num_gemms = num_gemms
        self.in_features, self.out_features = in_features, out_features
        self.use_bias = bool(bias)
        self.single_grouped_weight = bool(single_grouped_weight)
        self.single_grouped_bias = bool(single_grouped_bias)
        self.return_bias = bool(return_bias)
        self._init_method = init_method
        self.weight_parts = dict(self.initial_weights())
        options = {"device": device, "dtype": one_dtype("GroupedLinear", dtype, params_dtype)}
        shape = (self.out_features, self.in_features)
        self._add("weight", shape, self.single_grouped_weight, options)
        if self.use_bias:
            self._add("bias", shape[:1], self.single_grouped_bias, options)
        self.reset_parameters()
        self._take_accumulation(fuse_wgrad_accumulation, delay_wgrad_compute)
        self._take_name(name)

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
        mark_again(self)
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
        taken: object = inp
        if not isinstance(taken, torch.Tensor):
            raise self._error(TypeError, no_tensor(taken))
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
        plans = None if recipe is None else self._group_plans(recipe, self.num_gemms)
        is_plain = plans is None or all(plan.is_plain for plan in plans)
        into = self._into_all(own, is_first_microbatch)
        planes = into or (plans and torch.compiler.is_compiling()) or is_shown_plain()
        if is_plain and splits is not None and not planes:
            y = self._plain(flat, params, splits)
        else:
            offsets = group_offsets(m_splits, splits, flat)
            layout = self._layout()
            given = GroupedParameters(params, own, layout, plans, is_first_microbatch, into)
            y = self._grouped_product(flat, offsets, given)
        y = y if x.dim() == 2 else y.view(*x.shape[:-1], self.out_features)
        if recipe is not None and fp8_output:
            y = self._quantized_output(y, recipe)
        return (y, self._each_bias()) if self.return_bias else y

    def product_inputs(
        self, inp: torch.Tensor, m_splits: Splits, *rest: object, **options: object
    ) -> dict[tuple[str, int | None], torch.Tensor]:
        """Return what a forward multiplies, in high precision, for those who observe it.

        Args:
            inp, m_splits: as for `forward`.
            rest, options: its other arguments, which do not count.

        Returns:
            The tokens of each group, `[tokens, in_features]`, by `"weight"` and the group's number.
        """
        del rest, options
        sizes = m_splits.tolist() if isinstance(m_splits, torch.Tensor) else list(m_splits)
        flat = inp.reshape(-1, self.in_features)[: sum(sizes)]
        return {("weight", g): rows for g, rows in enumerate(flat.split(sizes))}

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

    def parts_of(self, recipe: Recipe | None) -> tuple[str, ...]:
        return self.matrix_parts("", self.num_gemms, recipe)

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

    def initial_weights(self) -> list[tuple[str, str]]:
        if self.single_grouped_weight:
            return [("weight", "")]
        return [(f"weight{g}", str(g)) for g in range(self.num_gemms)]

    def scaled_weights(self) -> list[tuple[str, torch.Tensor]]:
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

    def _layout(self) -> Layout:
        """Return how the parameters are given."""
        return Layout(
            self.num_gemms,
            self.single_grouped_weight,
            self._adds_bias,
            self.single_grouped_bias,
            (self.in_features, self.out_features),
        )
