"""What is said of torch.jit: modules that it cannot script, and traces that it cannot save."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn

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


def tell_of_trace(module: Any) -> None:
    """Warn once, while torch.jit traces, of a module whose trace cannot be saved.

    `torch.jit.save` reads memory that a tensor with planes has not, and ends the process.

    Args:
        module: which is being called.
    """
    if any(one is not None and is_quantized(one) for one in module._parameters.values()):
        warn_once(
            "torch.jit.trace",
            "torch.jit.trace: what is traced can be run and not be saved, since torch.jit.save "
            "reads the memory of quantized weights, which have none, and ends the process; "
            f"{_INSTEAD}",
        )
