"""What is said of torch.jit and ONNX: what they cannot script, save or export."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn

from ... import settings
from ..._torch_private import tracing_state
from ...errors import warn_once
from ...tensor import is_quantized

__all__ = ["TorchScript", "tell_of_trace"]

_INSTEAD = "use torch.compile, or torch.export.export for a file (docs/guides/serving.md)"


class TorchScript(nn.Module):
    """Base of `QuantizedModule`: `torch.jit.script` is told that it cannot be compiled."""

    def __prepare_scriptable__(self) -> NoReturn:
        """Raise, where `torch.jit.script` asks for what it should compile in a module's place.

        Raises:
            RuntimeError: always; what to take instead.
        """
        raise RuntimeError(
            "torch.jit.script: modules must be TorchScript, got "
            f"hybridq's {type(self).__name__}, whose forward asks Python for its recipe; {_INSTEAD}"
        )


def _holds_planes(module: Any) -> bool:
    return any(one is not None and is_quantized(one) for one in module._parameters.values())


def tell_of_trace(module: Any) -> None:
    """Warn once, while torch.jit traces, of a module whose trace cannot be saved.

    `torch.jit.save` reads memory that a tensor with planes has not, and ends the process.

    Args:
        module: which is being called, while torch.jit or torch.export traces.

    Raises:
        NotImplementedError: it is traced for ONNX, and multiplies planes.
    """
    if torch.onnx.is_in_onnx_export():
        has_recipe = (module.bound_recipe or settings.current().recipe) is not None
        if has_recipe or _holds_planes(module):
            what = "under a recipe" if has_recipe else "of quantized weights"
            text = (
                "torch.onnx.export: modules must be in high precision, got hybridq's "
                f"{type(module).__name__} {what}, and ONNX has no form for products of planes; "
                "export a plain model that loads hybridq.dequantized_state_dict(model)"
            )
            if tracing_state() is None:  # torch drops the error, tries another way, and fails late
                warn_once("torch.onnx.export", text)
            raise NotImplementedError(text)
    elif tracing_state() is not None and _holds_planes(module):
        warn_once(
            "torch.jit.trace",
            "torch.jit.trace: what is traced can be run and not be saved, since torch.jit.save "
            "reads the memory of quantized weights, which have none, and ends the process; "
            f"{_INSTEAD}",
        )
