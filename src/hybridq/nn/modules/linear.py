"""hybridq.Linear: nn.Linear whose three GEMMs run between quantized planes."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from ...recipes.roles import GRAD_INPUT
from ..autograd import with_quantized_gradient
from ..weights import plain_weights
from .constructor_arguments import checked
from .dealt_parameters import reset_dealt
from .eager_fast_path import eager_forward
from .input_errors import no_tensor
from .linear_part import InitMethod, one_dtype, run_part
from .marks import mark_again
from .parallel_options import ParallelOptions
from .quantized_module import QuantizedModule
from .tensor_parallel import ROW

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
            set, and autograd is given zeros, for hooks; with a true `overwrite_main_grad` of the
            weight the gradient is written there, and not added. Compiled code adds to the
            `main_grad` of the forward, and sets the mark in the forward.
        delay_wgrad_compute: a backward makes no gradient of the weight; `backward_dw()` does, once
            for each backward (docs/guides/modules.md).
        save_original_input: the input itself is saved for the backward, which encodes its
            columnwise plane then, with the same bits: less memory where the input is saved anyway,
            such as by several modules. Not with delayed scaling, amaxes over ranks, or tensor
            parallelism, where planes are saved, and that is logged once.
        init_method: called with the weight to fill it in place, the bias is then zero; None: the
            initial values of `nn.Linear`.
        return_bias: the bias is returned and not added, for a caller that adds it later.
        params_dtype: another name of `dtype`.
        tp_group, tp_size: the process group of the ranks that have the weight's parts, or how many
            they are, if `set_tensor_parallel_group` brings it later.
        parallel_mode: `"column"`: each rank has rows of the weight, `[out_features / size,
            in_features]`, and makes as many features; `"row"`: columns of it, takes as many
            features, and the output is the sum over ranks. None: the weight is whole.
        sequence_parallel: the input of a column parallel module, and the output of a row parallel
            one, are this rank's part of the tokens, along the first dimension.
        get_rng_state_tracker, rng_tracker_name: the first returns what has `fork(name)`, a context
            in which initial values of parts are drawn; without it torch's generator must differ
            between ranks. Biases are zero then, and a row parallel weight has the range of the
            whole.
        name: qualified name for the roles that a recipe's factory sees. Where it is None,
            `hybridq.convert` fills in the name within the model.

    Under `torch.autocast` input, weight and bias are taken in its dtype, as `nn.Linear` would.

    Raises:
        TypeError: `name` is no string, a switch no bool, or a size no int.
        ValueError: a size is negative; `dtype` and `params_dtype` differ; ranks do not divide the
            features.

    Source: names and meanings of the arguments that `nn.Linear` has not: Transformer Engine.

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

    @checked
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        init_method: InitMethod | None = None,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
        parallel_mode: str | None = None,
        sequence_parallel: bool = False,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        name: str | None = None,
    ) -> None:
        dtype = one_dtype("Linear", dtype, params_dtype)
        ranks = ParallelOptions(
            tp_group, tp_size, sequence_parallel, get_rng_state_tracker, rng_tracker_name
        )
        in_features, out_features = ranks.split("Linear", parallel_mode, in_features, out_features)
        own = in_features if parallel_mode == ROW else out_features
        self._take_parallel(ranks, {"": (parallel_mode, own)})
        if init_method is not None:  # the constructor of `nn.Linear` calls `reset_parameters`
            self.__dict__["_init_method"] = init_method
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        if return_bias:
            self.return_bias = True
        self._mark_parallel()
        self._take_accumulation(fuse_wgrad_accumulation, delay_wgrad_compute)
        if save_original_input:
            self.save_original_input = True
        self._take_name(name)

    def reset_parameters(self) -> None:
        """Set all parameters to the initial values: of `nn.Linear`, or of the `init_method`."""
        mark_again(self)
        if self.is_dealt:
            fill = self._init_method or partial(nn.init.kaiming_uniform_, a=math.sqrt(5))
            return reset_dealt(self, "weight", fill, "bias")
        with plain_weights(self), self.drawing.drawing(), torch.no_grad():
            if self._init_method is None:
                super().reset_parameters()
            else:
                self._init_method(self.weight)
            if self.is_parallel:
                self.parallel[""].as_of_whole(self.weight, self._init_method)
            if self.bias is not None and (self.is_parallel or self._init_method is not None):
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
            return self._forward(*given), self.local_parameter("bias")
        if not (fp8_output or fp8_grad or self.is_parallel):
            y = eager_forward(self, input, is_first_microbatch)
            if y is not None:
                return y
        return self._forward(
            input, self.local_parameter("bias"), is_first_microbatch, fp8_output, fp8_grad
        )

    def _forward(
        self,
        input: torch.Tensor,
        bias: torch.Tensor | None,
        is_first_microbatch: bool | None,
        fp8_output: bool,
        fp8_grad: bool,
    ) -> torch.Tensor:
        self._check_first(is_first_microbatch)
        recipe = self._recipe()
        given: object = input
        if not isinstance(given, torch.Tensor):
            raise self._error(TypeError, no_tensor(given))
        if recipe is not None and fp8_grad:
            input = with_quantized_gradient(input, self._boundary_quantizer(recipe, GRAD_INPUT))
        y = run_part(
            self, "", recipe, input, self.local_parameter("weight"), bias, is_first_microbatch
        )
        return self._quantized_output(y, recipe) if recipe is not None and fp8_output else y
