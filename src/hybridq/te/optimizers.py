"""FusedAdam and FusedSGD over `hybridq.optim`, and operations on lists of tensors.

Source: names, order and defaults of arguments: Transformer Engine's `pytorch/optimizers`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch

from .. import optim
from .multi_tensor import multi_tensor_applier, multi_tensor_l2norm, multi_tensor_scale

__all__ = [
    "FusedAdam",
    "FusedSGD",
    "multi_tensor_applier",
    "multi_tensor_l2norm",
    "multi_tensor_scale",
]

#: How moments of a dtype are held; codes of FP8 are said by the dtype of their bytes.
_MOMENTS: Final = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.uint8: "fp8_block",
}


def _check(owner: str, given: tuple[tuple[str, Any, Any], ...]) -> None:
    """Raise for a value that `hybridq.optim` has nothing like."""
    for name, value, only in given:
        if value not in only:
            raise NotImplementedError(f"{owner}: {name} must be of {only}, got {value!r}")


class FusedAdam(optim.AdamW):
    """`hybridq.optim.AdamW` with Transformer Engine's arguments, on any device.

    Without masters a BF16 parameter is its own, written with stochastic rounding; a quantized or
    FP16 one has a BF16 master. `get_unscaled_state` and `get_scaled_state` are those of AdamW.

    Args:
        params, lr, betas, eps, weight_decay: as for `torch.optim.AdamW`.
        amsgrad: False.
        bias_correction: as `hybridq.optim.AdamW` takes it.
        adam_w_mode: False: weight decay is a part of the gradient, as of `torch.optim.Adam`.
        capturable: as for `torch.optim.AdamW`; without effect where all parameters lie on a CPU,
            on which nothing is captured.
        master_weights: short and quantized parameters have masters of `master_weight_dtype`.
        master_weight_dtype: float32, or bfloat16 (rounded stochastically).
        exp_avg_dtype, exp_avg_sq_dtype: float32, bfloat16, float16 (with a scale for each row), or
            uint8: blocks of E4M3 codes.
        use_decoupled_grad, store_param_remainders: as `hybridq.optim.AdamW` takes them.
        set_grad_none: None or True.

    Raises:
        NotImplementedError: another value; the text names the argument.

    Example:
        >>> import torch, hybridq.te as te
        >>> layer = te.Linear(8, 8, params_dtype=torch.bfloat16)
        >>> optimizer = te.optimizers.FusedAdam(layer.parameters(), lr=0.1, master_weights=True)
        >>> layer(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.state[layer.weight]["master_param"].dtype
        torch.float32
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        set_grad_none: bool | None = None,
    ) -> None:
        _check(
            "FusedAdam",
            (
                ("amsgrad", amsgrad, (False,)),
                ("master_weight_dtype", master_weight_dtype, (torch.float32, torch.bfloat16)),
                ("exp_avg_dtype", exp_avg_dtype, tuple(_MOMENTS)),
                ("exp_avg_sq_dtype", exp_avg_sq_dtype, tuple(_MOMENTS)),
                ("set_grad_none", set_grad_none, (None, True)),
            ),
        )
        if store_param_remainders and not master_weights:
            raise NotImplementedError(
                "FusedAdam: store_param_remainders holds what parameters lack of their masters, "
                "and needs master_weights=True, got False"
            )
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            master_dtype=master_weight_dtype if master_weights else torch.bfloat16,
            moments=(_MOMENTS[exp_avg_dtype], _MOMENTS[exp_avg_sq_dtype]),
            store_param_remainders=store_param_remainders,
            use_decoupled_grad=use_decoupled_grad,
            bias_correction=bias_correction,
            decoupled_weight_decay=adam_w_mode,
            capturable=capturable,
        )
        if all(one.is_cpu for group in self.param_groups for one in group["params"]):
            for group in (self.defaults, *self.param_groups):
                group["capturable"] = False

    def initialize_state(self, param: torch.Tensor, store_param_remainders: bool = False) -> None:
        """Make the state that a parameter has before its first step, in the place of any other.

        Args:
            param: of this optimizer.
            store_param_remainders: of a BF16 parameter what the optimizer was told; of others it
                is not looked at.

        Raises:
            ValueError: it is something else, or `param` is no parameter of the optimizer.
        """
        own = getattr(param, "_local_tensor", param)
        is_plain = not hasattr(type(own), "quantize_")
        if (
            is_plain
            and own.dtype == torch.bfloat16
            and bool(store_param_remainders) != self.defaults["store_param_remainders"]
        ):
            raise ValueError(
                "FusedAdam: store_param_remainders of a BF16 parameter must be the optimizer's own "
                f"{self.defaults['store_param_remainders']}, got {store_param_remainders!r}"
            )
        super().initialize_state(param)

    def set_scaled_state(
        self, param: torch.Tensor, state_name: str, unscaled_state: torch.Tensor
    ) -> None:
        """Hold FP32 values as a moment or the master of a parameter; made first where it has none.

        Args:
            param, state_name, unscaled_state: as `hybridq.optim.AdamW` takes them.

        Raises:
            ValueError: as there.
        """
        if not self.state.get(param):
            super().initialize_state(param)
        super().set_scaled_state(param, state_name, unscaled_state)


class FusedSGD(optim.SGD):
    """`hybridq.optim.SGD` with Transformer Engine's arguments.

    Args:
        params, lr, momentum, dampening, weight_decay, nesterov: as for `torch.optim.SGD`.
        wd_after_momentum: as `hybridq.optim.SGD` takes it.
        materialize_master_grads: has no effect: gradients stay what they are.
        set_grad_none: None or True.

    Raises:
        NotImplementedError: another value; the text names the argument.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool | None = None,
    ) -> None:
        _check("FusedSGD", (("set_grad_none", set_grad_none, (None, True)),))
        own = (lr, momentum, dampening, weight_decay, nesterov)
        super().__init__(params, *own, wd_after_momentum=wd_after_momentum)
