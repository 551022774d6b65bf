"""hybridq.Linear: nn.Linear whose three GEMMs run between quantized planes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...recipes import Plan
from ...recipes.roles import GRAD_INPUT
from ...tensor import is_quantized
from ..autograd import NO_CUTS, Cuts, linear, plain_linear, with_quantized_gradient
from ..weights import Into, plain_weights, prequantized_weight
from .eager_fast_path import eager_forward
from .linear_part import InitMethod, one_dtype
from .quantized_module import PLAIN, QuantizedModule
from .tensor_parallel import Parallel, dtensor_forward, is_dtensor, run_windows

__all__ = ["Linear"]


class Linear(QuantizedModule, nn.Linear):
    """`nn.Linear` that computes under the recipe of `hybridq.autocast`.

    Outside `hybridq.autocast` it is `nn.Linear`, bit for bit where torch's product is fast (see
    docs/reference/numerics.md, "Plain products"). Inside, input, weight and output gradient are
    quantized by the recipe's quantizers, and the forward and both backward GEMMs run between their
    planes. Parameters, initial values and state_dict are those of `nn.Linear`.

    Args:
        in_features, out_features, bias, device, dtype: as for `nn.Linear`; any size, any batch
            shape, no alignment.
        fuse_wgrad_accumulation: the gradient of the weight is added to `weight.main_grad` (a
            tensor that the caller provides, FP32 as a rule) by the GEMM that makes it, and
            `weight.grad` stays as it is. Where the weight has a `grad_added_to_main_grad`, it is
            set, and autograd is given zeros, for hooks. Compiled code adds to the `main_grad` of
            the forward, and sets the mark in the forward.
        init_method: called with the weight to fill it in place, the bias is then zero; None: the
            initial values of `nn.Linear`.
        return_bias: the bias is returned and not added, for a caller that adds it later.
        params_dtype: another name of `dtype`.
        name: qualified name for the roles that a recipe's factory sees. Where it is None,
            `hybridq.convert` fills in the name within the model.

    Under `torch.autocast` input, weight and bias are taken in its dtype, as `nn.Linear` would.

    Raises:
        TypeError: `name` is no string.
        ValueError: `dtype` and `params_dtype` differ.

    Source: `init_method`, `return_bias`, `params_dtype`: Transformer Engine's names and meaning.

    Example:
        >>> import torch, hybridq
        >>> layer = hybridq.Linear(100, 50)
        >>> x = torch.randn(3, 7, 100)
        >>> with hybridq.autocast(recipe="mxfp8_fwd_nvfp4_bwd"):
        ...     y = layer(x)
        >>> y.shape
        torch.Size([3, 7, 50])
    """

    # Class attributes, so that a module whose __class__ `convert` changed has them too.
    return_bias: bool = False
    _init_method: InitMethod | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        fuse_wgrad_accumulation: bool = False,
        init_method: InitMethod | None = None,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        name: str | None = None,
    ) -> None:
        dtype = one_dtype("Linear", dtype, params_dtype)
        if init_method is not None:  # the constructor of `nn.Linear` calls `reset_parameters`
            self.__dict__["_init_method"] = init_method
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        if return_bias:
            self.return_bias = True
        self._take_accumulation(fuse_wgrad_accumulation)
        self._take_name(name)

    def reset_parameters(self) -> None:
        """Set all parameters to the initial values: of `nn.Linear`, or of the `init_method`."""
        with plain_weights(self):
            if self._init_method is None:
                super().reset_parameters()
                return
            with torch.no_grad():
                self._init_method(self.weight)
                if self.bias is not None:
                    self.bias.zero_()

    def forward(
        self,
        input: torch.Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> Any:
        """Return `input @ weight.T + bias`.

        Args:
            input: `[..., in_features]`; planes of a QuantizedTensor that are the ones the recipe
                wants are taken as they are.
            is_first_microbatch: None: the weight is quantized in this forward; and unless
                `hybridq.autocast` says otherwise, in every one. True: it is quantized and kept.
                False: the caller promises that its values are those of the last True, and it is
                taken from there. A weight of other memory, version, shape or dtype, or another
                recipe, is quantized again; a write past autograd (the tensor's data attribute)
                cannot be seen. Without a recipe, and in code that torch compiles or captures,
                nothing is kept.
            fp8_output: whether the result is a QuantizedTensor, made by the recipe's quantizer of
                `output_quantizer_role`, of any format; without a recipe it never is.
            fp8_grad: the same for the gradient of `input` and `grad_input_quantizer_role`.

        Returns:
            `[..., out_features]`, in the input's dtype or torch.autocast's. With `return_bias` a
            tuple of that, without the bias, and the bias or None.

        Raises:
            RuntimeError: features or dtypes do not fit (as for `nn.Linear`).
            TypeError: a dtype that cannot be quantized, or `is_first_microbatch` is no bool.
            RecipeError: the recipe leaves a GEMM without a plane.

        Source: `is_first_microbatch`, `fp8_output`, `fp8_grad`: Transformer Engine's names and
            meaning.
        """
        if self.return_bias:
            given = (input, None, is_first_microbatch, fp8_output, fp8_grad)
            return self._forward(*given), self.bias
        if not (fp8_output or fp8_grad):
            y = eager_forward(self, input, is_first_microbatch)
            if y is not None:
                return y
        return self._forward(input, self.bias, is_first_microbatch, fp8_output, fp8_grad)

    def _forward(
        self,
        input: torch.Tensor,
        bias: torch.Tensor | None,
        is_first_microbatch: bool | None,
        fp8_output: bool,
        fp8_grad: bool,
    ) -> torch.Tensor:
        self._check_first(is_first_microbatch)
        if self.fuse_wgrad_accumulation and is_dtensor(self.weight):
            raise self._error(
                NotImplementedError,
                "fuse_wgrad_accumulation takes weights that a rank has whole, got a DTensor; leave "
                "it off for tensor parallelism",
            )
        recipe, into = self._recipe(), self._into(self.weight)
        if recipe is None:
            if into is not None:
                return self._quantized(input, bias, PLAIN, None, into)
            return plain_linear(input, self.weight, bias)
        plan = self.plan_of(recipe)
        if fp8_grad:
            input = with_quantized_gradient(input, self._boundary_quantizer(recipe, GRAD_INPUT))
        if plan.is_plain and into is None and not torch.compiler.is_compiling():
            # The same bits as the planes would give. Compiled, only the planes give them: a
            # compiler that sees nn.Linear sums the bias's gradient in another order.
            y = plain_linear(input, self.weight, bias)
        else:
            y = self._quantized(input, bias, plan, is_first_microbatch, into)
        return self._quantized_output(y, recipe) if fp8_output else y

    def _quantized(
        self,
        input: torch.Tensor,
        own_bias: torch.Tensor | None,
        plan: Plan,
        is_first_microbatch: bool | None,
        into: Into | None,
    ) -> torch.Tensor:
        given: object = input
        if not isinstance(given, torch.Tensor):
            raise self._error(TypeError, f"input must be a Tensor, got {type(given).__name__}")
        if is_dtensor(self.weight):

            def run(x: Any, weight: Any, bias: Any, parallel: Parallel | None) -> torch.Tensor:
                given = (x, weight, bias, plan, is_first_microbatch, into)
                return self._local(*given, parallel)

            return dtensor_forward(self, given, self.weight, own_bias, run)
        return self._local(given, self.weight, own_bias, plan, is_first_microbatch, into)

    def _local(
        self,
        input: torch.Tensor,
        own: torch.Tensor,
        own_bias: torch.Tensor | None,
        plan: Plan,
        is_first_microbatch: bool | None,
        into: Into | None,
        parallel: Parallel | None = None,
    ) -> torch.Tensor:
        """Return the output of tensors that this rank has: all of them, or its parts."""
        x: torch.Tensor
        weight: torch.Tensor
        bias: torch.Tensor | None
        x, weight, bias = self._cast(input, own, own_bias)  # type: ignore[assignment]
        self._check(x, weight, bias, own.shape[1])
        scales = self._scales(self.weight, plan, is_first_microbatch)
        flat = x
        if x.dim() != 2:
            flat = x.unsqueeze(0) if x.dim() == 1 else x.flatten(0, -2)

        def product(x: Any, weight: Any, bias: Any, cuts: Cuts = NO_CUTS) -> torch.Tensor:
            kept = None
            if cuts.weight is None or is_quantized(own):  # parts of the planes of the whole
                kept = self._kept(own, weight.dtype, plan, is_first_microbatch)
            return linear(x, weight, bias, plan, kept, scales, into=into, cuts=cuts)

        if parallel is not None and is_quantized(own):
            self._check_planes(own, weight.dtype, plan, parallel)
        if parallel is None:
            y = product(flat, weight, bias)
        else:
            y = run_windows(flat, weight, bias, plan, parallel, product)
        return y if x.dim() == 2 else y.view(*x.shape[:-1], own.shape[0])

    def _check_planes(self, own: Any, dtype: torch.dtype, plan: Plan, parallel: Parallel) -> None:
        """Raise where a part's planes are not parts of the planes of the whole, or no windows."""
        storage = own.tensor_storage
        if not storage.comes_and_goes:
            raise self._error(
                NotImplementedError,
                "a weight that tensor parallelism splits must be in high precision, got a "
                f"{type(own).__name__}, whose scales are of its part alone; make the module "
                "outside of quantized_model_init",
            )
        kept = prequantized_weight(storage, plan.weight, dtype)
        if kept is not None and not parallel.has_whole_blocks(plan):
            raise self._error(
                NotImplementedError,
                "each rank must have a multiple of whole blocks of all operands where weights "
                f"travel as planes, got parts of {list(parallel.sizes)}; choose multiples of 128, "
                "or leave prepare_fsdp2 out",
            )
