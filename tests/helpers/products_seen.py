"""What torch is asked to multiply, and in which dtypes."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_PRODUCTS: Final = frozenset(("mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "dot", "linear"))


class Products(TorchDispatchMode):
    """Notes the dtypes of every product of torch that runs inside, attention included."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.name().partition("::")[2].partition(".")[0]
        if name in _PRODUCTS or "scaled_dot_product" in name:
            self.dtypes |= {arg.dtype for arg in args[:3] if isinstance(arg, torch.Tensor)}
        return func(*args, **(kwargs or {}))
