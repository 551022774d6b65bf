"""LayerNormLinear and RMSNormLinear: a norm and a linear module whose input it is, as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ...recipes.roles import GRAD_INPUT
from ..autograd import with_quantized_gradient
from ..weights import plain_weights
from .constructor_arguments import checked
from .linear_part import FusedModule, InitMethod, one_dtype, run_part
from .marks import mark_again
from .parallel_options import ParallelOptions
from .tensor_parallel import ROW

__all__ = ["LayerNormLinear", "RMSNormLinear"]


class LayerNormLinear(FusedModule):
    """`norm(x) @ weight.T + bias`; under a recipe the norm's result is made in quantized form only.

    Without a recipe it is `F.layer_norm` or `F.rms_norm` and the product of `F.linear`. Under one,
    norm and quantization are one operation, and its numbers are those of
    `docs/reference/numerics.md`.
    Parameters: `layer_norm_weight`, `layer_norm_bias` (LayerNorm only), `weight`, `bias`.

    Args:
        in_features, out_features: any size; any batch shape, no alignment.
        eps: added to the variance, or to the mean of squares.
        init_method: `init_method(weight)` fills the weight in place, biases are then zero; None:
            the numbers that `nn.Linear` would draw.
        bias: whether there is a bias.
        return_bias: the bias is returned and not added, for a caller that adds it later.
        params_dtype: another name of `dtype`.
        normalization: `"LayerNorm"` or `"RMSNorm"`.
        return_layernorm_output: the norm's result is returned too.
        zero_centered_gamma: the norm multiplies with `1 + layer_norm_weight`.
        fuse_wgrad_accumulation: as for `Linear`.
        delay_wgrad_compute: as for `Linear`.
        parallel_mode: `"column"`, as for `Linear`, or None; the norm is of whole tokens on each
            rank, and with `sequence_parallel` of the rank's own.
        tp_group, tp_size, sequence_parallel: as for `Linear`.
        get_rng_state_tracker, rng_tracker_name: the same.
        device, dtype: of the parameters; None: torch's defaults.
        name: qualified name for the roles that a recipe's factory sees. Where it is None,
            `hybridq.convert` fills in the name within the model.

    Under `torch.autocast` and a recipe input, weight and bias are taken in its dtype, the norm's
    weights as they are; sums and products of the norm are FP32.

    Raises:
        ValueError: `normalization` is unknown, `eps` is negative or not finite, or `dtype` and
            `params_dtype` differ.
        TypeError: `name` is no string, a switch no bool, or a size no int.

    Source: names and meanings of the arguments: Transformer Engine's LayerNormLinear.

    Example:
        >>> import torch, hybridq
        >>> layer = hybridq.LayerNormLinear(100, 50, normalization="RMSNorm")
        >>> with hybridq.autocast(recipe="mxfp8_fwd_nvfp4_bwd"):
        ...     y = layer(torch.randn(3, 7, 100))
        >>> y.shape, sorted(layer.state_dict())
        (torch.Size([3, 7, 50]), ['bias', 'layer_norm_weight', 'weight'])
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    @checked
    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        *,
        init_method: InitMethod | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        normalization: str = "LayerNorm",
        return_layernorm_output: bool = False,
        zero_centered_gamma: bool = False,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        parallel_mode: str | None = None,
        sequence_parallel: bool = False,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__()
        dtype = one_dtype(type(self).__name__, dtype, params_dtype)
        options = {"device": device, "dtype": dtype}
        if parallel_mode == ROW:
            raise ValueError(
                f"{type(self).__name__}: parallel_mode must be 'column' or None, since the norm is "
                "of whole tokens, got 'row'"
            )
        ranks = ParallelOptions(
            tp_group, tp_size, sequence_parallel, get_rng_state_tracker, rng_tracker_name
        )
        owner = type(self).__name__
        _, out_features = ranks.split(owner, parallel_mode, in_features, out_features)
        self._take_parallel(ranks, {"": (parallel_mode, out_features)})
        self.in_features, self.out_features = in_features, out_features
        self.return_bias = bool(return_bias)
        self.return_layernorm_output = bool(return_layernorm_output)
        self._init_method = init_method
        self._make_norm(in_features, eps, normalization, zero_centered_gamma, options)
        self._make_linear("", out_features, in_features, bias, options)
        self._mark_parallel()
        self.reset_parameters()
        self._take_accumulation(fuse_wgrad_accumulation, delay_wgrad_compute)
        self._take_name(name)

    def reset_parameters(self) -> None:
        """Set all parameters to their initial values."""
        mark_again(self)
        with plain_weights(self):
            self._reset_norm()
            self._reset_linear("", self._init_method)

    def forward(
        self,
        inp: torch.Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> Any:
        """Return `norm(inp) @ weight.T + bias`.

        Args:
            inp: `[..., in_features]`.
            is_first_microbatch, fp8_output, fp8_grad: as `Linear.forward` takes them.

        Returns:
            `[..., out_features]`, in the input's dtype or torch.autocast's. With `return_bias` a
            tuple of that, without the bias, and the bias or None; with `return_layernorm_output`
            the norm's result `[..., in_features]` is the last of the tuple.

        Raises:
            RuntimeError: features, dtypes or devices do not fit.
            TypeError: a dtype that cannot be quantized, or `is_first_microbatch` is no bool.
            RecipeError: the recipe leaves a GEMM without a plane.
        """
        self._check_first(is_first_microbatch)
        x = self._take_input(inp, self.in_features)
        recipe = self._recipe()
        if recipe is not None and fp8_grad:
            x = with_quantized_gradient(x, self._boundary_quantizer(recipe, GRAD_INPUT))
        first, weight = is_first_microbatch, self.local_parameter("weight")
        bias = None if self.return_bias else self.local_parameter("bias")
        if self.return_layernorm_output:
            seen = self._normalized(x, None if recipe is None else self.plan_of(recipe))
            y = run_part(self, "", recipe, seen, weight, bias, first)
        else:
            seen = None
            y = run_part(self, "", recipe, x, weight, bias, first, self._norm_call())
        if recipe is not None and fp8_output:
            y = self._quantized_output(y, recipe)
        others = ([self.local_parameter("bias")] if self.return_bias else []) + (
            [] if seen is None else [seen]
        )
        return (y, *others) if others else y

    def product_inputs(
        self, inp: torch.Tensor, *rest: object, **options: object
    ) -> dict[tuple[str, int | None], torch.Tensor]:
        """Return what a forward multiplies, in high precision, for those who observe it.

        Args:
            inp: as for `forward`.
            rest, options: its other arguments, which do not count.

        Returns:
            `[..., in_features]`, by the parameter's name and the number of its matrix: `None`.
        """
        del rest, options
        seen = self._normalized(self._take_input(inp, self.in_features), None)
        return {("weight", None): self.whole_inputs("", seen)}

    def extra_repr(self) -> str:
        """Return the sizes and what differs from the defaults, for `repr`."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, eps={self.eps}, "
            f"bias={self.bias is not None}, normalization={self.normalization}"
        )


class RMSNormLinear(LayerNormLinear):
    """`LayerNormLinear` with `normalization="RMSNorm"`.

    Args:
        in_features, out_features, eps: as for `LayerNormLinear`.
        init_method, bias, return_bias, params_dtype, return_layernorm_output: the same.
        zero_centered_gamma, fuse_wgrad_accumulation, delay_wgrad_compute: the same.
        device, dtype, name: the same.
        tp_group, tp_size, parallel_mode, sequence_parallel: the same.
        get_rng_state_tracker, rng_tracker_name: the same.

    Example:
        >>> import torch, hybridq
        >>> layer = hybridq.RMSNormLinear(100, 50, bias=False)
        >>> with hybridq.autocast(recipe="nvfp4"):
        ...     y = layer(torch.randn(2, 100))
        >>> sorted(layer.state_dict())
        ['layer_norm_weight', 'weight']
    """

    @checked
    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        *,
        init_method: InitMethod | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        return_layernorm_output: bool = False,
        zero_centered_gamma: bool = False,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        parallel_mode: str | None = None,
        sequence_parallel: bool = False,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(
            in_features,
            out_features,
            eps,
            init_method=init_method,
            bias=bias,
            return_bias=return_bias,
            params_dtype=params_dtype,
            normalization="RMSNorm",
            return_layernorm_output=return_layernorm_output,
            zero_centered_gamma=zero_centered_gamma,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            delay_wgrad_compute=delay_wgrad_compute,
            tp_group=tp_group,
            tp_size=tp_size,
            parallel_mode=parallel_mode,
            sequence_parallel=sequence_parallel,
            get_rng_state_tracker=get_rng_state_tracker,
            rng_tracker_name=rng_tracker_name,
            device=device,
            dtype=dtype,
            name=name,
        )
