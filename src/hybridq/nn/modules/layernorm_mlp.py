"""LayerNormMLP: a norm, a linear module, an activation and a second linear module, as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from ...recipes.roles import GRAD_INPUT
from ...tensor import is_quantized
from ..autograd import Activation, Gate, PrologueCall, with_quantized_gradient
from ..weights import plain_weights, takes_separate_names
from .constructor_arguments import checked
from .linear_part import FusedModule, InitMethod, activation_of, one_dtype, run_part
from .marks import mark_again
from .parallel_options import ParallelOptions
from .tensor_parallel import COLUMN, ROW
from .written_options import Check

__all__ = ["LayerNormMLP"]


def _take_activation(module: Any, name: str, value: Any) -> Any:
    """Return a new name or new parameters of an activation, which forwards compute from now on."""
    own = module.__dict__
    given = {"activation": None, "activation_params": None, **own, name: value}
    if given["activation"] is None:  # the parameters stand before the name
        return value
    kind = type(module).__name__
    made = activation_of(kind, given["activation"], given["activation_params"])
    was = own.get("_activation", made)
    if was.columns(1) != made.columns(1):
        known = "a gated one" if was.columns(1) == 2 else "one without a gate"
        raise ValueError(
            f"{kind}: activation must stay {known}, as the columns of fc1 are, got {value!r}; make "
            "another module"
        )
    own["_activation"] = made
    return value


class LayerNormMLP(FusedModule):
    """`fc2(activation(fc1(norm(x))))`; under a recipe norm and activation make planes only.

    Saved for the backward are x, the result of fc1, and the planes that the four backward GEMMs
    need; neither the norm's result nor the activation's. Without a recipe all steps are torch's
    own (docs/reference/numerics.md, "Plain products"). Parameters: `layer_norm_weight`,
    `layer_norm_bias` (LayerNorm only), `fc1_weight`, `fc1_bias`, `fc2_weight`, `fc2_bias`.

    Args:
        hidden_size: columns of the input and of the output.
        ffn_hidden_size: columns between the two linear parts; fc1 of a gated activation makes
            twice as many.
        eps: added to the variance, or to the mean of squares.
        return_bias: the bias of fc2 is returned and not added.
        init_method: `init_method(weight)` fills the weight of fc1 in place, its bias is then zero;
            None: the numbers that `nn.Linear` would draw.
        bias: whether both parts have a bias.
        normalization: `"LayerNorm"` or `"RMSNorm"`.
        activation: `"gelu"` (tanh form), `"relu"`, `"srelu"` (squared), `"silu"`, `"qgelu"`, or a
            gated one, which multiplies the second half of fc1's result with the function of the
            first: `"geglu"`, `"reglu"`, `"sreglu"`, `"swiglu"`, `"qgeglu"`; `"glu"` (a sigmoid);
            `"clamped_swiglu"`, whose halves are limited.
        activation_params: of `"clamped_swiglu"`, what differs from `{"limit": 7.0, "alpha": 1.702,
            "glu_linear_offset": 1.0}`: `u * sigmoid(alpha * u) * (v + glu_linear_offset)` of
            `u = min(first, limit)` and `v = clamp(second, -limit, limit)`.
        output_layer_init_method: as `init_method`, of fc2.
        params_dtype: another name of `dtype`.
        return_layernorm_output: the norm's result is returned too.
        zero_centered_gamma: the norm multiplies with `1 + layer_norm_weight`.
        fuse_wgrad_accumulation: as for `Linear`.
        delay_wgrad_compute: as for `Linear`.
        set_parallel_mode: fc1 is column parallel and fc2 row parallel; of a gated activation each
            rank has its part of both halves, one behind the other.
        tp_group, tp_size, sequence_parallel: as for `Linear`.
        get_rng_state_tracker, rng_tracker_name: the same.
        device, dtype: of the parameters; None: torch's defaults.
        name: qualified name; the roles that a recipe's factory sees are of `<name>.fc1` and
            `<name>.fc2`. Where it is None, `hybridq.convert` fills in the name within the model.

    Raises:
        ValueError: `activation` or `normalization` is unknown, `eps` is negative or not finite, or
            `dtype` and `params_dtype` differ.
        TypeError: `name` is no string, a switch no bool, or a size no int.

    Source: names and meanings of the arguments: Transformer Engine's LayerNormMLP.

    Example:
        >>> import torch, hybridq
        >>> mlp = hybridq.LayerNormMLP(64, 160, activation="swiglu", bias=False)
        >>> with hybridq.autocast(recipe="mxfp8"):
        ...     y = mlp(torch.randn(3, 7, 64))
        >>> y.shape, mlp.fc1_weight.shape
        (torch.Size([3, 7, 64]), torch.Size([320, 64]))
    """

    weight_parts: Mapping[str, str] = {"fc1_weight": "fc1", "fc2_weight": "fc2"}
    _written_options: ClassVar[Mapping[str, Check]] = {
        "activation": _take_activation,
        "activation_params": _take_activation,
    }
    _activation: Activation | Gate
    fc1_weight: nn.Parameter
    fc1_bias: nn.Parameter | None
    fc2_weight: nn.Parameter
    fc2_bias: nn.Parameter | None

    @checked
    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        *,
        return_bias: bool = False,
        init_method: InitMethod | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        activation_params: Mapping[str, float] | None = None,
        output_layer_init_method: InitMethod | None = None,
        params_dtype: torch.dtype | None = None,
        return_layernorm_output: bool = False,
        zero_centered_gamma: bool = False,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        set_parallel_mode: bool = False,
        sequence_parallel: bool = False,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__()
        owner = type(self).__name__
        self.activation_params, self.activation = activation_params, activation
        options = {"device": device, "dtype": one_dtype(owner, dtype, params_dtype)}
        ranks = ParallelOptions(
            tp_group, tp_size, sequence_parallel, get_rng_state_tracker, rng_tracker_name
        )
        modes = (COLUMN, ROW) if set_parallel_mode else (None, None)
        if set_parallel_mode:
            ffn_hidden_size = ranks.share(owner, "ffn_hidden_size", ffn_hidden_size)
        parts = (self._activation.columns(ffn_hidden_size), ffn_hidden_size)
        self._take_parallel(ranks, {"fc1": (modes[0], parts[0]), "fc2": (modes[1], parts[1])})
        self.hidden_size, self.ffn_hidden_size = hidden_size, ffn_hidden_size
        self.return_bias = bool(return_bias)
        self.return_layernorm_output = bool(return_layernorm_output)
        self._init_methods = (init_method, output_layer_init_method)
        self._make_norm(hidden_size, eps, normalization, zero_centered_gamma, options)
        width = self._activation.columns(ffn_hidden_size)
        self._make_linear("fc1_", width, hidden_size, bias, options)
        self._make_linear("fc2_", hidden_size, ffn_hidden_size, bias, options)
        halves = {} if width == ffn_hidden_size else dict.fromkeys(("gate", "up"), ffn_hidden_size)
        takes_separate_names(self, halves, "fc1_")
        self._mark_parallel()
        self.reset_parameters()
        self._take_accumulation(fuse_wgrad_accumulation, delay_wgrad_compute)
        self._take_name(name)

    def reset_parameters(self) -> None:
        """Set all parameters to their initial values."""
        mark_again(self)
        with plain_weights(self):
            self._reset_norm()
            for prefix, init_method in zip(("fc1_", "fc2_"), self._init_methods, strict=True):
                self._reset_linear(prefix, init_method)

    def forward(
        self,
        inp: torch.Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> Any:
        """Return `fc2(activation(fc1(norm(inp))))`.

        Args:
            inp: `[..., hidden_size]`.
            is_first_microbatch, fp8_output, fp8_grad: as `Linear.forward` takes them.

        Returns:
            `[..., hidden_size]`, in the input's dtype or torch.autocast's. With `return_bias` a
            tuple of that, without the bias of fc2, and that bias or None; with
            `return_layernorm_output` the norm's result is the last of the tuple.

        Raises:
            RuntimeError: features, dtypes or devices do not fit.
            TypeError: a dtype that cannot be quantized, or `is_first_microbatch` is no bool.
            RecipeError: the recipe leaves a GEMM without a plane.
        """
        self._check_first(is_first_microbatch)
        x = self._take_input(inp, self.hidden_size)
        recipe = self._recipe()
        if recipe is not None and fp8_grad:
            x = with_quantized_gradient(x, self._boundary_quantizer(recipe, GRAD_INPUT))
        first, weight, bias = (
            is_first_microbatch,
            self.local_parameter("fc1_weight"),
            self.local_parameter("fc1_bias"),
        )
        seen = None
        if self.return_layernorm_output:
            seen = self._normalized(x, None if recipe is None else self.plan_of(recipe, "fc1"))
            hidden = run_part(self, "fc1", recipe, seen, weight, bias, first)
        else:
            hidden = run_part(self, "fc1", recipe, x, weight, bias, first, self._norm_call())
        bias = None if self.return_bias else self.local_parameter("fc2_bias")
        act = None
        if isinstance(self._activation, Gate):
            hidden = self._activation.plain(hidden)
        else:
            act = PrologueCall(self._activation)
        y = run_part(
            self, "fc2", recipe, hidden, self.local_parameter("fc2_weight"), bias, first, act
        )
        if recipe is not None and fp8_output:
            y = self._quantized_output(y, recipe)
        own = [self.of_all_tokens(self.local_parameter("fc2_bias"))] if self.return_bias else []
        others = own + ([] if seen is None else [seen])
        return (y, *others) if others else y

    def product_inputs(
        self, inp: torch.Tensor, *rest: object, **options: object
    ) -> dict[tuple[str, int | None], torch.Tensor]:
        """Return what a forward multiplies, in high precision, for those who observe it.

        Args:
            inp: as for `forward`.
            rest, options: its other arguments, which do not count.

        Returns:
            `[..., hidden_size]` of fc1 and `[..., ffn_hidden_size]` of fc2, by the parameter's name
            and the number of its matrix: `None`. Over ranks those of a whole module, for which all
            of them ask.
        """
        del rest, options
        weight: torch.Tensor = self.local_parameter("fc1_weight")
        plain = weight.dequantize() if is_quantized(weight) else weight
        seen = self._normalized(self._take_input(inp, self.hidden_size), None)
        seen = self.whole_inputs("fc1", seen)
        hidden = torch.nn.functional.linear(seen, plain, self.local_parameter("fc1_bias"))
        acted = self.whole_inputs("fc2", self._activation.plain(hidden, None, None))
        return {("fc1_weight", None): seen, ("fc2_weight", None): acted}

    def extra_repr(self) -> str:
        """Return the sizes and what differs from the defaults, for `repr`."""
        return (
            f"hidden_size={self.hidden_size}, ffn_hidden_size={self.ffn_hidden_size}, "
            f"eps={self.eps}, bias={self.fc2_bias is not None}, "
            f"normalization={self.normalization}, activation={self.activation}"
        )
