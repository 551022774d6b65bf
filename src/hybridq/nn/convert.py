"""convert: turn the nn.Linear modules of any model into hybridq.Linear, in place."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Final

from torch import nn

from .. import settings
from ..recipes import install
from .fused_sequential import FusedSequential
from .linear import Linear
from .model_init import quantize_weights
from .module import QuantizedModule
from .pretrained import saves_decoded

__all__ = ["convert", "default_filter", "keeps_precision"]

#: Names of projections whose precision matters more than their time: the output projection onto
#: the vocabulary, and whatever picks the experts of a mixture. `gate_proj` is neither.
_LEFT_ALONE: Final = re.compile(r"lm_head|gate|shared_expert_gate|(.*_)?router(_.*)?")


def keeps_precision(name: str) -> bool:
    """Return whether a component of a qualified name says that its precision matters most.

    Such are `lm_head`, `gate`, `shared_expert_gate`, and what has the word `router` in it.

    Args:
        name: of a module in its model.
    """
    return any(_LEFT_ALONE.fullmatch(part) for part in name.split("."))


def default_filter(module: nn.Module, name: str) -> bool:
    """Return whether `convert` turns `module` by default.

    Everything but modules with a component of their qualified name that is `lm_head`, `gate`,
    `shared_expert_gate`, or has the word `router` in it (`router`, `moe_router`,
    `router.classifier`). `gate_proj`, `gate_up_proj` and the like are converted.

    Args:
        module: an `nn.Linear`.
        name: its qualified name in the model.
    """
    return not keeps_precision(name)


def convert(
    model: nn.Module,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    *,
    fuse: bool = False,
) -> nn.Module:
    """Turn every `nn.Linear` in `model` into a `hybridq.Linear`, in place, and return `model`.

    The module objects stay the same, only their class changes: parameters (tied ones too), names,
    hooks, optimizers that hold them, and references elsewhere in the model all stay valid. Every
    module of hybridq in the model, new or not, learns its qualified name for the roles of recipes,
    unless it was constructed with a `name=`.

    Args:
        model: any module; may itself be an `nn.Linear`.
        filter_fn: `filter_fn(module, qualified_name) -> bool`, asked for every `nn.Linear`; False
            leaves it alone. It replaces `default_filter`, which leaves `lm_head` and routers
            alone.
        fuse: turn every `nn.Sequential` into a `FusedSequential`, which runs a norm or an
            activation and the linear module after it as one step.

    Only modules whose type is exactly `nn.Linear` are turned: a subclass (another library's
    quantized linear, `NonDynamicallyQuantizableLinear`, a parametrized module) has its own forward
    or its own reasons. With `fuse` the same holds of `nn.Sequential`. Keys of the state_dict stay
    what they were with and without `fuse`; a norm that runs as part of a linear module has the
    numbers of `docs/numerics.md`, which differ from torch's in the last bit of some values.

    Raises:
        TypeError: `model` is no module, or `filter_fn` is not callable.

    Example:
        >>> import hybridq
        >>> from torch import nn
        >>> model = nn.ModuleDict({"up": nn.Linear(8, 16), "lm_head": nn.Linear(16, 8)})
        >>> [type(m).__module__.split(".")[0] for m in hybridq.convert(model).values()]
        ['hybridq', 'torch']
    """
    given: object = model
    if not isinstance(given, nn.Module):
        is_class = isinstance(given, type) and issubclass(given, nn.Module)
        hint = "; pass an instance, not the class" if is_class else ""
        raise TypeError(f"convert: model must be an nn.Module, got {type(given).__name__}{hint}")
    chosen = default_filter if filter_fn is None else filter_fn
    if not callable(chosen):
        raise TypeError(
            "convert: filter_fn must be callable, filter_fn(module, name) -> bool, got "
            f"{type(filter_fn).__name__}"
        )
    install()
    found = [(name, module) for name, module in model.named_modules()]
    # First all answers, then all changes: a filter that raises leaves the model as it was.
    turned = [m for name, m in found if type(m) is nn.Linear and chosen(m, name)]
    for module in turned:
        module.__class__ = Linear
    for _, module in found if fuse else ():
        if type(module) is nn.Sequential:
            module.__class__ = FusedSequential
    for name, module in found:
        saves_decoded(type(module))
        if isinstance(module, QuantizedModule):
            module._set_name(name)
    if settings.current().model_init is not None:
        _quantize(model, turned)
    return model


def _quantize(model: nn.Module, turned: list[nn.Linear]) -> None:
    """Quantize the weights of these modules, but those that another module uses too."""
    users = Counter(id(one) for m in model.modules() for one in m.parameters(recurse=False))
    for module in turned:
        if users[id(module.weight)] == 1:
            quantize_weights(module, [("weight", "")])
