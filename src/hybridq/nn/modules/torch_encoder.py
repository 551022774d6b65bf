"""torch's encoder layers, which in evaluation multiply by their children's weights themselves.

`nn.TransformerEncoderLayer` and `nn.TransformerEncoder` have a way for evaluation without gradients
that calls no child: under a recipe it would quantize nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from torch import nn

from ... import settings

__all__ = ["ENCODERS", "TorchEncoder", "TorchEncoderLayer"]


class TorchEncoderLayer(nn.TransformerEncoderLayer):
    """`nn.TransformerEncoderLayer` that calls its children under `hybridq.autocast`.

    Outside of it, it is torch's, bit for bit. `hybridq.convert` makes it of torch's layers.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what torch's layer returns.

        Args:
            args, kwargs: as torch's layer takes them.
        """
        with _without(self, "activation_relu_or_gelu"):
            return super().forward(*args, **kwargs)


class TorchEncoder(nn.TransformerEncoder):
    """`nn.TransformerEncoder` whose layers get no nested tensors under `hybridq.autocast`.

    Only the way that calls no child takes them. Outside of it, it is torch's, bit for bit.
    `hybridq.convert` makes it of torch's encoders.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what torch's encoder returns.

        Args:
            args, kwargs: as torch's encoder takes them.
        """
        with _without(self, "use_nested_tensor"):
            return super().forward(*args, **kwargs)


@contextmanager
def _without(module: nn.Module, attribute: str) -> Iterator[None]:
    """Let a module's attribute, which allows the way past its children, be false under a recipe."""
    was = getattr(module, attribute, None)
    if not was or (settings.current().recipe is None and not _has_own_recipe(module)):
        yield
        return
    setattr(module, attribute, False)
    try:
        yield
    finally:
        setattr(module, attribute, was)


def _has_own_recipe(module: nn.Module) -> bool:
    """Return whether a child computes under a recipe that it was given."""
    return any(getattr(one, "bound_recipe", None) is not None for one in module.modules())


#: What each class becomes whose children are converted.
ENCODERS: Final = {
    nn.TransformerEncoderLayer: TorchEncoderLayer,
    nn.TransformerEncoder: TorchEncoder,
}
