"""A converter: how one kind of module becomes one of hybridq's, as a value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..moe import Experts, ExpertsLayout
from ..nn import QuantizedModule

__all__ = ["Converter"]


@dataclass(frozen=True)
class Converter:
    """How `hybridq.convert` converts one kind of module, in place.

    Names, shapes and keys of parameters stay what they are, and so do the bits that the module
    computes without a recipe.

    Args:
        name: of the kind, as reports call it: `"nn.Linear"`.
        takes: the class, exactly, since a subclass may have a forward of its own; or
            `takes(module) -> bool`.
        makes: the class of hybridq that the module gets; with `apply`, that class or a base of it.
        apply: `apply(module)` converts it in place, where another class alone does not; None:
            `module.__class__ = makes`.
        weights: names of its parameters that are matrices or stacks of them.
        is_in_out: whether its matrices are `[in, out]`; else `[out, in]`, as `nn.Linear` has them.
        features: `features(module)`, the input and output features of its narrowest product; None:
            those of the first weight's last two dimensions.
        keeps: `keeps(module)`, why a module of this kind stays as it is, or None.
        only_with: a reason of `convert(also=)`: the kind is converted only where `also` names it.
            Such a kind meets no product: it is not counted among what could be converted, and is
            neither a head nor a router, and never too narrow.

        layout: `layout(module)`, how a module that is not converted holds its experts; None: the
            kind is of no experts.

    Raises:
        TypeError: `makes` is no class of QuantizedModule.
        ValueError: no name.

    Example:
        >>> import hybridq
        >>> from torch import nn
        >>> class Dense(nn.Linear):
        ...     pass
        >>> kind = hybridq.converters.Converter("Dense", Dense, hybridq.Linear)
        >>> kind.takes_module(Dense(64, 32)), kind.features_of(Dense(64, 32))
        (True, (64, 32))
    """

    name: str
    takes: type[nn.Module] | Callable[[nn.Module], bool]
    makes: type[QuantizedModule]
    apply: Callable[[Any], object] | None = None
    weights: tuple[str, ...] = ("weight",)
    is_in_out: bool = False
    features: Callable[[Any], tuple[int, int] | None] | None = None
    keeps: Callable[[Any], str | None] | None = None
    only_with: str | None = None
    layout: Callable[[Any], ExpertsLayout | None] | None = None

    def __post_init__(self) -> None:
        if not self.name or not isinstance(self.name, str):
            raise ValueError(f"Converter: name must be a string of some letters, got {self.name!r}")
        if not (isinstance(self.makes, type) and issubclass(self.makes, QuantizedModule)):
            raise TypeError(
                f"Converter: makes must be a class derived from hybridq.nn.QuantizedModule, got "
                f"{self.makes!r}"
            )

    def takes_module(self, module: nn.Module) -> bool:
        """Return whether a module is of this kind, and not converted yet.

        Args:
            module: any.
        """
        if isinstance(self.takes, type):
            return type(module) is self.takes
        return not isinstance(module, QuantizedModule) and bool(self.takes(module))

    def made(self, module: nn.Module) -> bool:
        """Return whether a module is one that this makes.

        Args:
            module: any.
        """
        if self.apply is None:
            return type(module) is self.makes
        return isinstance(module, self.makes)

    def convert(self, module: nn.Module) -> None:
        """Convert a module of this kind in place.

        Args:
            module: one that `takes_module`.

        Raises:
            TypeError: what `apply` has made of it is no `makes`.
        """
        if self.apply is None:
            module.__class__ = self.makes
            return
        self.apply(module)
        if not isinstance(module, self.makes):
            raise TypeError(
                f"convert: apply of the converter {self.name!r} must make a "
                f"{self.makes.__name__} of the module in place, got {type(module).__name__}"
            )

    def layout_of(self, module: nn.Module) -> ExpertsLayout | None:
        """Return how a module holds its experts; None: it has none.

        Args:
            module: of this kind, converted or not.
        """
        if isinstance(module, Experts):
            return module.experts_layout
        return None if self.layout is None else self.layout(module)

    def features_of(self, module: nn.Module) -> tuple[int, int] | None:
        """Return the input and output features of a module's narrowest product; None: not known.

        Args:
            module: of this kind, converted or not.
        """
        if self.features is not None:
            return self.features(module)
        weight = module._parameters.get(self.weights[0]) if self.weights else None
        if weight is None or weight.dim() < 2:
            return None
        out, into = weight.shape[-2:]
        return (out, into) if self.is_in_out else (into, out)
