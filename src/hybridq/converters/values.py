"""Whether a model's parameters have values: not those that a first forward is yet to make."""

from __future__ import annotations

from torch import nn
from torch.nn.parameter import is_lazy

__all__ = ["check_made", "lazy_parameters"]


def lazy_parameters(model: nn.Module) -> tuple[str, ...]:
    """Return the names of parameters that torch's lazy modules make in their first forward.

    Args:
        model: any module.
    """
    return tuple(name for name, one in model.named_parameters() if is_lazy(one))


def check_made(where: str, model: nn.Module) -> None:
    """Raise where a parameter is one that a lazy module has not made yet.

    Args:
        where: name of the function, for the error.
        model: any module.

    Raises:
        ValueError: see above.
    """
    lazy = lazy_parameters(model)
    if lazy:
        raise ValueError(
            f"{where}: parameters must have been made, got {lazy[0]} of a lazy module; call the "
            "model once first"
        )
