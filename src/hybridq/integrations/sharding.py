"""What accelerate's FSDP2 must find done before it shards a model, so that planes travel."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..distributed import prepare_fsdp2
from ..tensor import is_quantized

__all__ = ["prepare_for_sharding", "reason_against"]


def reason_against(state: Any) -> str | None:
    """Return why weights cannot travel as planes under accelerate's state; None: they can.

    Args:
        state: an AcceleratorState under FSDP2.
    """
    if state.fsdp_plugin.cpu_ram_efficient_loading:
        return "only rank 0 has loaded the weights (cpu_ram_efficient_loading=True)"
    return None


def prepare_for_sharding(model: nn.Module, state: Any) -> None:
    """Let the weights of a model travel as planes once accelerate has sharded it.

    Under mixed precision accelerate makes trained parameters FP32 before it shards them: it is done
    here, while they are plain tensors.

    Args:
        model: not sharded yet.
        state: an AcceleratorState under FSDP2.
    """
    if state.mixed_precision != "no":
        for parameter in model.parameters():
            is_short = parameter.dtype != torch.float32 and not is_quantized(parameter)
            if parameter.requires_grad and is_short:
                parameter.data = parameter.data.to(torch.float32)
    prepare_fsdp2(model)
