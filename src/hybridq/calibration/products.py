"""The products of a model that a calibration observes: a value for each, with its matrix."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from ..converters import (
    LEAST_WIDTH,
    check_made,
    conversion,
    converters_with,
    kind_of,
    reason_by_name,
)
from ..moe import Experts, ExpertsLayout
from ..nn import GroupedLinear, QuantizedModule
from .stored import Reads, held_values, stored_kind

__all__ = [
    "SHARED",
    "Product",
    "changeable_products",
    "check_in_memory",
    "expert_products",
    "fused_products",
    "parameter_users",
    "plain_name",
    "products",
    "projection_of",
    "unobserved",
]

#: Modules that hold one module, and have no name in a checkpoint.
_WRAPPERS: Final = ("_orig_mod", "_checkpoint_wrapped_module")
#: The number of an expert that is a module of its own: `experts.3.w1`, `experts.expert_3.wi`.
_NUMBERED: Final = re.compile(r"((?:^|\.)\w*experts?\.(?:expert_)?)(\d+)(?=\.|$)")

#: Why a weight is left that two modules hold: what is changed for one changes the other.
SHARED: Final = "its weight is another module's, too"
#: Why a weight is left whose module makes what it is multiplied with itself.
_FUSED: Final = "its module is one of hybridq's that make their operands themselves"


@dataclass(frozen=True, eq=False)
class Product:
    """One product of a model: rows of its input by a matrix `[out, in]`.

    Args:
        name: the module's; of an expert in a stack `"<module>.<parameter>.<expert>"`.
        module: that has the matrix.
        parameter: name of the matrix, or of the stack of matrices.
        expert: number of the matrix in the stack; None: it is no stack.
        is_in_out: the matrix is held as `[in, out]`.
        layout: how a module of experts holds its own; None: it is no such module.
        reads: how the values of the matrix are read.
    """

    name: str
    module: nn.Module
    parameter: str = "weight"
    expert: int | None = None
    is_in_out: bool = False
    layout: ExpertsLayout | None = None
    reads: Reads = held_values

    @property
    def projection(self) -> str:
        """Name that the product has in common with those of the other experts of its layer."""
        return projection_of(self.name if self.expert is None else self.key)

    @property
    def key(self) -> str:
        """Name in a calibration: that of the module, or of the stack."""
        return self.name if self.expert is None else self.name.rpartition(".")[0]

    @property
    def module_type(self) -> str:
        """What roles of a recipe call the module: `"linear"` or `"grouped_linear"`."""
        return "linear" if self.expert is None else "grouped_linear"

    @property
    def is_fused(self) -> bool:
        """Whether the module makes what is multiplied itself, of what it is given."""
        return hasattr(self.module, "product_inputs")

    @property
    def is_part(self) -> bool:
        """Whether ranks have parts of its weight: such a weight can be read, and not replaced."""
        module: Any = self.module
        if getattr(module, "is_parallel", False) or getattr(module, "exchange", None) is not None:
            return True
        return hasattr(getattr(module, self.parameter, None), "full_tensor")

    def weight(self) -> torch.Tensor:
        """Return the values of the matrix, `[out, in]`: decoded, if it is quantized.

        Source: of convolutions, whose patches are the rows, the kernel as a matrix.
        """
        made = self.reads(self.module, self.parameter, self.expert)
        return made.t() if self.is_in_out else made.flatten(1)


def parameter_users(model: nn.Module) -> Counter[int]:
    """Return how many modules hold each parameter of a model, by the parameter's id.

    Args:
        model: any module.
    """
    return Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))


def plain_name(name: str) -> str:
    """Return a module's name without the wrappers of torch.compile and activation checkpoints.

    Args:
        name: of a module in its model.
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def projection_of(name: str) -> str:
    """Return a product's name, with a star for the number of an expert.

    Args:
        name: of a product.

    Example:
        >>> from hybridq.calibration import projection_of
        >>> projection_of("layers.0.mlp.experts.17.down_proj")
        'layers.0.mlp.experts.*.down_proj'
    """
    return _NUMBERED.sub(r"\1*", name)


def products(
    model: nn.Module,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    *,
    also: Iterable[str] = (),
    least_width: int = LEAST_WIDTH,
) -> tuple[Product, ...]:
    """Return the products that `hybridq.convert` quantizes with these arguments, in fixed order.

    It may be asked before `convert` and after.

    Args:
        model: any module.
        filter_fn, also, least_width: as `convert` takes them; the filter is asked of modules that
            are converted already, too.

    Raises:
        TypeError, ValueError: as `convert`.

    Example:
        >>> from torch import nn
        >>> from hybridq.calibration import products
        >>> model = nn.ModuleDict({"up": nn.Linear(8, 16), "lm_head": nn.Linear(16, 8)})
        >>> [(one.name, tuple(one.weight().shape)) for one in products(model)]
        [('up', (16, 8))]
    """
    also = also if isinstance(also, str) else tuple(also)
    named = conversion(model, filter_fn, also=also, least_width=least_width).converted
    among, found = converters_with(also), []
    modules = dict(model.named_modules())
    for name in named:
        module, name = modules[name], plain_name(name)
        kind = kind_of(module, among)
        if kind is None or kind.only_with is not None:
            continue
        # `conversion` asks it of the others.
        is_ours = isinstance(module, QuantizedModule)
        if filter_fn is not None and is_ours and not filter_fn(module, name):
            continue
        layout = kind.layout_of(module)
        if layout is not None:
            found += _of_experts(name, module, layout)
        else:
            found.append(Product(name, module, kind.weights[0], is_in_out=kind.is_in_out))
    skipped = frozenset(also)
    for name, module in modules.items():
        stored = stored_kind(module)
        if stored is None or stored.refusal:
            continue
        name = plain_name(name)
        by_name = reason_by_name(name)
        if filter_fn(module, name) if filter_fn else by_name is None or by_name in skipped:
            if stored.layout is not None:
                found += _of_experts(name, module, stored.layout(module), stored.reads)
            else:
                found.append(Product(name, module, reads=stored.reads))
    return tuple(found)


def changeable_products(
    where: str,
    model: nn.Module,
    filter_fn: Callable[[nn.Module, str], bool] | None,
    also: Iterable[str],
    least_width: int,
) -> tuple[tuple[Product, ...], dict[str, str]]:
    """Return the products whose weights a method may change, and others by name, with why not.

    Args:
        where: name of the method, for the error.
        model: any module.
        filter_fn, also, least_width: as `products` takes them.

    Raises:
        TypeError, ValueError: as `convert`; ValueError: there are none of either kind, or a
            parameter has no values yet, or a weight of theirs is on the meta device.
    """
    also = also if isinstance(also, str) else tuple(also)
    check_made(where, model)
    of = products(model, filter_fn, also=also, least_width=least_width)
    fused = fused_products(model, filter_fn, also=also)
    if not of and not fused:
        raise ValueError(
            f"{where}: the model must have products that hybridq.convert quantizes, got none; "
            "hybridq.conversion(model) says why"
        )
    check_in_memory(where, of)
    return of, {one.key: _FUSED for one in fused}


def check_in_memory(where: str, of: Iterable[Product]) -> None:
    """Raise where a weight is on the meta device: offloaded, or never loaded.

    Args:
        where: name of the function, for the error.
        of: products of a model.

    Raises:
        ValueError: see above.
    """
    for product in of:
        held: Any = getattr(product.module, product.parameter, None)
        if held is not None and held.is_meta:
            raise ValueError(
                f"{where}: weights must be in memory, got {product.name} on the meta device; "
                "load the model without offloading"
            )


def _of_experts(
    name: str, module: nn.Module, layout: ExpertsLayout, reads: Reads = held_values
) -> list[Product]:
    """Return the products of a module of experts, stack by stack."""
    made = []
    experts = getattr(module, layout.down).shape[0]  # of gate and up there may be more, unused
    for parameter in layout.weights:
        stack = f"{name}.{parameter}" if name else parameter
        made += [
            Product(f"{stack}.{e}", module, parameter, e, layout.is_transposed, layout, reads)
            for e in range(experts)
        ]
    return made


def expert_products(name: str, module: nn.Module) -> tuple[Product, ...]:
    """Return the products of a module of experts, stack by stack; none of another module.

    Args:
        name: of the module.
        module: any.
    """
    kind = kind_of(module, converters_with(()))
    layout = None if kind is None else kind.layout_of(module)
    return () if layout is None else tuple(_of_experts(name, module, layout))


def fused_products(
    model: nn.Module,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    *,
    also: Iterable[str] = (),
) -> tuple[Product, ...]:
    """Return the products of hybridq's fused modules, which `convert` has nothing to do with.

    Of `LayerNormLinear` and `LayerNormMLP` a product for each weight, by the names that recipes are
    asked about; of `GroupedLinear` one for each group, as of experts in a stack.

    Args:
        model: any module.
        filter_fn, also: which modules, as `convert` takes them.
    """
    found: list[Product] = []
    skipped = frozenset([also] if isinstance(also, str) else also)
    for path, module in model.named_modules():
        if not isinstance(module, QuantizedModule) or not hasattr(module, "product_inputs"):
            continue
        name = plain_name(path)
        by_name = reason_by_name(name)
        if not (filter_fn(module, name) if filter_fn else by_name is None or by_name in skipped):
            continue
        if isinstance(module, GroupedLinear):
            for g in range(module.num_gemms):
                own = f"{name}.{g}" if name else str(g)
                found.append(Product(own, module, expert=g, reads=_group_matrix))
            continue
        for parameter, part in module.whole_parts.items():
            found.append(Product(".".join(filter(None, (name, part))), module, parameter))
    return tuple(found)


def _group_matrix(module: Any, parameter: str, group: int | None) -> torch.Tensor:
    """Return the matrix of a group of a `GroupedLinear`; see `held_values`."""
    if module.single_grouped_weight:
        return held_values(module, parameter, group)
    return held_values(module, f"{parameter}{group}", None)


def unobserved(model: nn.Module) -> dict[str, str]:
    """Return the modules whose products no calibration sees: name to class, and what helps.

    Those of hybridq that are not seen are given something else than what is multiplied.

    Args:
        model: any module.
    """
    among = converters_with(("embeddings",))
    kinds = {name: (module, stored_kind(module)) for name, module in model.named_modules()}
    refused = {
        name: f"{type(module).__name__}: {kind.refusal}"
        for name, (module, kind) in kinds.items()
        if kind is not None and kind.refusal
    }
    return refused | {
        name: type(module).__name__
        for name, module in model.named_modules()
        if isinstance(module, QuantizedModule)
        and not isinstance(module, Experts)
        and not hasattr(module, "product_inputs")
        and module.weight_parts
        and kind_of(module, among) is None
    }
