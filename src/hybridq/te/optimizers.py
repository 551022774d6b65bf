"""FusedAdam over `hybridq.optim.AdamW`, FusedSGD over torch's SGD.

Source: names, order and defaults of arguments: Transformer Engine's `pytorch/optimizers`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .. import optim
from ..tensor import is_quantized

__all__ = ["FusedAdam", "FusedSGD"]


class FusedAdam(optim.AdamW):
    """`hybridq.optim.AdamW` with Transformer Engine's arguments: on any device, with masters.

    Args:
        params, lr, betas, eps, weight_decay: as for `torch.optim.AdamW`.
        amsgrad: False.
        bias_correction, adam_w_mode: True.
        capturable: as for `torch.optim.AdamW`.
        master_weights: must be True where a parameter is quantized, BF16 or FP16, which are not
            updated without one here.
        master_weight_dtype: float32, or bfloat16 (rounded stochastically).
        exp_avg_dtype, exp_avg_sq_dtype: both float32, or both bfloat16.
        use_decoupled_grad, store_param_remainders: False.
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
        moments = {torch.float32: "fp32", torch.bfloat16: "bf16"}
        known = exp_avg_dtype == exp_avg_sq_dtype and exp_avg_dtype in moments
        for name, value, default in (
            ("amsgrad", amsgrad, False),
            ("bias_correction", bias_correction, True),
            ("adam_w_mode", adam_w_mode, True),
            ("use_decoupled_grad", use_decoupled_grad, False),
            ("store_param_remainders", store_param_remainders, False),
            ("set_grad_none", set_grad_none is False, False),
            ("exp_avg_dtype and exp_avg_sq_dtype", known, True),
        ):
            if value is not default:
                raise NotImplementedError(
                    f"FusedAdam: {name} must be as hybridq.optim.AdamW has it (see its docs), got "
                    "another value"
                )
        self.master_weights = master_weights
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            master_dtype=master_weight_dtype,
            moments=moments[exp_avg_dtype],
            capturable=capturable,
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; `torch.optim.Optimizer` calls it for the first ones, too.

        Args:
            param_group: as torch takes it.

        Raises:
            NotImplementedError: a short or quantized parameter without `master_weights`.
        """
        super().add_param_group(param_group)
        if not self.master_weights:
            _refuse_short(self, "master_weights must be True")


def _refuse_short(optimizer: Any, rule: str) -> None:
    for parameter in optimizer.param_groups[-1]["params"]:
        if is_quantized(parameter) or parameter.dtype in (torch.bfloat16, torch.float16):
            raise NotImplementedError(
                f"{type(optimizer).__name__}: {rule} for parameters that are quantized, BF16 or "
                f"FP16, got {parameter.dtype}"
            )


class FusedSGD(torch.optim.SGD):
    """`torch.optim.SGD` with Transformer Engine's arguments, for FP32 parameters.

    Args:
        params, lr, momentum, dampening, weight_decay, nesterov: as for `torch.optim.SGD`.
        wd_after_momentum: False.
        materialize_master_grads: has no effect: there are no masters.
        set_grad_none: None or True.

    Raises:
        NotImplementedError: another value, or a parameter that is not FP32.
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
        if wd_after_momentum or set_grad_none is False:
            raise NotImplementedError(
                "FusedSGD: wd_after_momentum must be False and set_grad_none True, got "
                f"{wd_after_momentum} and {set_grad_none}"
            )
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; `torch.optim.Optimizer` calls it for the first ones, too.

        Args:
            param_group: as torch takes it.

        Raises:
            NotImplementedError: a parameter is short or quantized; `hybridq.optim` has masters.
        """
        super().add_param_group(param_group)
        _refuse_short(self, "there are no masters, use FusedAdam or hybridq.optim.Muon")
