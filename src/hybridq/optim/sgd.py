"""hybridq.optim.SGD: torch's SGD on masters of high precision."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch
from torch.optim.sgd import sgd

from .base import Base
from .masters import (
    MASTER,
    has_master,
    is_low,
    is_updated_itself,
    local,
    sharded_like,
)

__all__ = ["SGD"]

_BUFFER: Final = "momentum_buffer"
_MASTERS: Final = (torch.float32, torch.bfloat16)


class SGD(Base, torch.optim.SGD):  # type: ignore[misc]
    """`torch.optim.SGD` whose arithmetic is FP32, for parameters of any precision.

    Masters, quantized parameters, `main_grad`, sharded parameters and writes are those of
    `hybridq.optim.AdamW`. The momentum is FP32. Of FP32 parameters the bits are torch's.

    Args:
        params, lr, momentum, dampening, weight_decay, nesterov: as for `torch.optim.SGD`.
        maximize, foreach, fused: the same.
        wd_after_momentum: weight decay is no part of the gradient that the momentum averages, but
            subtracted from the weight by itself, `lr * weight_decay * weight`.
        master_dtype: as for `hybridq.optim.AdamW`.

    Raises:
        ValueError: `master_dtype` is another dtype, or a number is out of range.

    Source: the arithmetic is torch's; `wd_after_momentum`: NVIDIA apex's FusedSGD.

    Example:
        >>> import torch, hybridq
        >>> layer = hybridq.Linear(64, 32, dtype=torch.bfloat16)
        >>> optimizer = hybridq.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
        >>> layer(torch.ones(4, 64, dtype=torch.bfloat16)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.state[layer.weight]["master_param"].dtype
        torch.float32
    """

    #: Told to those who look for optimizers that leave gradients in `main_grad` alone.
    takes_main_grad: Final = True
    _where = "SGD"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        wd_after_momentum: bool = False,
        master_dtype: torch.dtype = torch.float32,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        if master_dtype not in _MASTERS:
            raise ValueError(f"SGD: master_dtype must be float32 or bfloat16, got {master_dtype}")
        self._own = {"wd_after_momentum": bool(wd_after_momentum), "master_dtype": master_dtype}
        super().__init__(
            params,
            lr,
            momentum,
            dampening,
            weight_decay,
            nesterov,
            maximize=maximize,
            foreach=foreach,
            fused=fused,
        )
        self.defaults.update(self._own)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters; it may have options of its own.

        Args:
            param_group: as for torch's optimizers.

        Raises:
            ValueError: its `master_dtype` is neither float32 nor bfloat16.
        """
        for name, value in self._own.items():
            param_group.setdefault(name, value)
        if param_group["master_dtype"] not in _MASTERS:
            raise ValueError(
                f"SGD: master_dtype must be float32 or bfloat16, got {param_group['master_dtype']}"
            )
        super().add_param_group(param_group)

    def step_group(self, group: dict[str, Any]) -> None:
        """Update the parameters of a group together.

        Args:
            group: of `param_groups`.

        Raises:
            RuntimeError: a gradient is sparse, or in two places.
        """
        given, grads, buffers = [], [], []
        for parameter in group["params"]:
            grad = self.gradient_of(parameter, group, "SGD")
            if grad is None:
                continue
            if grad.is_sparse:
                raise RuntimeError("SGD: gradients must be dense, got a sparse one")
            own, state = local(parameter), self.state[parameter]
            if is_low(own):
                own.quantizer_for_write("SGD")
            dtype = own.dtype if is_updated_itself(own) else torch.float32
            values = own.detach()
            if has_master(own, group["master_dtype"]):
                values = self.master_of(parameter, group)
            given.append((parameter, values.to(dtype), state))
            grads.append(grad.to(dtype))
            buffers.append(local(state[_BUFFER]) if state.get(_BUFFER) is not None else None)
        if not given:
            return
        found_inf = getattr(self, "found_inf", None)  # of a scaler: the step is left out
        decay, values_of_all = group["weight_decay"], [values for _, values, _ in given]
        if group["wd_after_momentum"] and decay:
            if found_inf is not None:
                decay = decay * (1.0 - found_inf)
            for values in values_of_all:
                values.mul_(1.0 - float(group["lr"]) * decay)
            decay = 0.0
        is_first = any(buffer is None for buffer in buffers)
        sgd(
            values_of_all,
            grads,
            buffers,
            has_sparse_grad=False,
            foreach=group["foreach"],
            fused=group["fused"],
            grad_scale=getattr(self, "grad_scale", None),
            found_inf=found_inf,
            weight_decay=decay,
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
        )
        # torch's kernel makes a first momentum, and does not write it in a step that is left out.
        is_kept = not (is_first and found_inf is not None and bool(found_inf))
        if group["momentum"] and is_kept:
            for (parameter, _, state), buffer in zip(given, buffers, strict=True):
                if buffer is not None and _BUFFER not in state:
                    state[_BUFFER] = sharded_like(buffer, parameter)
        self.write(given)

    # ---- state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for name, value in (("wd_after_momentum", False), ("master_dtype", torch.float32)):
            self.defaults.setdefault(name, value)
            for group in self.param_groups:
                group.setdefault(name, value)
        self._own = {name: self.defaults[name] for name in ("wd_after_momentum", "master_dtype")}
        self.take_all_saved()

    def take_saved(self, parameter: Any, given: dict[str, Any], group: dict[str, Any]) -> None:
        """Take the momentum and the master as they were saved.

        Args:
            parameter, given, group: as the base says.
        """
        if is_updated_itself(parameter):
            return
        for name, dtype in ((_BUFFER, torch.float32), (MASTER, group["master_dtype"])):
            if given.get(name) is not None:
                self.state[parameter][name] = given[name].to(parameter.device, dtype)
