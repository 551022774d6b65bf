"""A user's own class of experts, for `hybridq.convert`."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..moe import Experts, ExpertsLayout, as_experts, reason_against
from .converter import Converter
from .table import register_converter

__all__ = ["register_experts"]


def register_experts(kind: type[nn.Module], layout: ExpertsLayout) -> Converter:
    """Let `hybridq.convert` convert modules of a class of experts; return the converter.

    Args:
        kind: the class, exactly.
        layout: how it holds its experts.

    Raises:
        TypeError: `kind` is no class of modules, or `layout` no ExpertsLayout.
        ValueError: the class is registered with another layout.

    Example:
        >>> import torch, hybridq
        >>> class Own(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.up = torch.nn.Parameter(torch.randn(4, 32, 16))
        ...         self.down = torch.nn.Parameter(torch.randn(4, 16, 32))
        >>> layout = hybridq.moe.ExpertsLayout("up", "down", has_gate=False)
        >>> kind = hybridq.converters.register_experts(Own, layout)
        >>> isinstance(hybridq.convert(torch.nn.ModuleList([Own()]))[0], hybridq.moe.Experts)
        True
    """
    given: object = kind
    if not (isinstance(given, type) and issubclass(given, nn.Module)):
        raise TypeError(
            f"register_experts: kind must be a class derived from nn.Module, got {given!r}"
        )
    how: object = layout
    if not isinstance(how, ExpertsLayout):
        raise TypeError(
            f"register_experts: layout must be an ExpertsLayout, got {type(how).__name__}"
        )
    return register_converter(
        Converter(
            f"{kind.__module__}.{kind.__qualname__}",
            kind,
            Experts,
            _Apply(layout),
            weights=layout.weights,
            features=layout.features,
            keeps=_Keeps(layout),
            layout=_LayoutOf(layout),
        )
    )


class _Apply:
    """Converts a module; equal where the layout is."""

    def __init__(self, layout: ExpertsLayout) -> None:
        self.layout = layout

    def __call__(self, module: Any) -> None:
        as_experts(module, self.layout)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.layout == self.layout

    def __hash__(self) -> int:
        return hash((type(self), self.layout))


class _Keeps(_Apply):
    """Says why a module stays as it is."""

    def __call__(self, module: Any) -> str | None:  # type: ignore[override]
        return reason_against(module, self.layout)


class _LayoutOf(_Apply):
    """Says how every module of the class holds its experts."""

    def __call__(self, module: Any) -> ExpertsLayout:  # type: ignore[override]
        return self.layout
