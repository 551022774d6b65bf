"""convert: turn the nn.Linear modules of any model into hybridq.Linear, in place."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final

from torch import nn

from .. import settings
from ..errors import HybridQWarning
from ..recipes import install
from .conversion import conversion
from .fused_sequential import FusedSequential
from .left_alone import LEAST_WIDTH, keeps_precision, reasons
from .linear import Linear
from .model_init import quantize_weights
from .module import QuantizedModule
from .pretrained import saves_decoded

__all__ = ["convert", "default_filter"]

_LOGGER: Final = logging.getLogger("hybridq")


def default_filter(module: nn.Module, name: str) -> bool:
    """Return whether the name of `module` lets `convert` turn it: no head, router or adapter's.

    Left alone are modules with a component of their qualified name that is `lm_head`, `embed_out`,
    `output_projection`, `vocab_projector`, `classifier`, `classification_head`, `score`,
    `qa_outputs`, `pooler` or `seq_relationship`; `gate`, `shared_expert_gate`, or has the word
    `router` in it; `lora_A` or `lora_B`; what is below `cls.predictions`, and the model's own
    `output`. `gate_proj`, `gate_up_proj` and the like are converted.

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
    also: Iterable[str] = (),
    least_width: int = LEAST_WIDTH,
) -> nn.Module:
    """Turn every `nn.Linear` in `model` into a `hybridq.Linear`, in place, and return `model`.

    The module objects stay the same, only their class changes: parameters (tied ones too), names,
    hooks, optimizers that hold them, and references elsewhere in the model all stay valid. Every
    module of hybridq in the model, new or not, learns its qualified name for the roles of recipes,
    unless it was constructed with a `name=`.

    Args:
        model: any module; may itself be an `nn.Linear`.
        filter_fn: `filter_fn(module, qualified_name) -> bool`, asked for every `nn.Linear`; False
            leaves it alone. It decides alone: nothing below is asked then.
        fuse: turn every `nn.Sequential` into a `FusedSequential`, which runs a norm or an
            activation and the linear module after it as one step.
        also: reasons that count for nothing: `"heads"`, `"routers"`, `"adapters"`,
            `"kept_in_fp32"`, `"narrow"`.
        least_width: modules with fewer input or output features are left alone: a tile of tensor
            cores is 8 wide at least, and quantizing the input takes longer than the product.

    Left alone are, by the model's own word, what `get_output_embeddings()` or `get_classifier()`
    returns, whose weight is an embedding's, and what `_tied_weights_keys`,
    `_keep_in_fp32_modules` or `_keep_in_fp32_modules_strict` names; by their names, heads, routers
    and low-rank adapters (see `default_filter`); and narrow modules. `hybridq.conversion(model)`
    says which and why, and so does a line of the logger `hybridq` (level INFO). It is a
    HybridQWarning where, without a filter, nothing was converted, or less than what lies in weights
    of modules that are no `nn.Linear`.

    Only modules whose type is exactly `nn.Linear` are turned: a subclass (another library's
    quantized linear, `NonDynamicallyQuantizableLinear`, a parametrized module) has its own forward
    or its own reasons. With `fuse` the same holds of `nn.Sequential`. Keys of the state_dict stay
    what they were with and without `fuse`; a norm that runs as part of a linear module has the
    numbers of `docs/numerics.md`, which differ from torch's in the last bit of some values.

    Raises:
        TypeError: `model` is no module, `filter_fn` is not callable, or `also` is one string.
        ValueError: `also` names no reason, or `least_width` is negative.

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
    if filter_fn is not None and not callable(filter_fn):
        raise TypeError(
            "convert: filter_fn must be callable, filter_fn(module, name) -> bool, got "
            f"{type(filter_fn).__name__}"
        )
    install()
    found = [(name, module) for name, module in model.named_modules()]
    # First all answers, then all changes: a filter that raises leaves the model as it was.
    also = also if isinstance(also, str) else tuple(also)
    kept = reasons(model, also, least_width)
    linear = [(name, m) for name, m in found if type(m) is nn.Linear]
    if filter_fn is None:
        turned = [m for name, m in linear if name not in kept]
    else:
        turned = [m for name, m in linear if filter_fn(m, name)]
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
    if linear or not any(isinstance(m, QuantizedModule) for _, m in found):
        kinds = {name: type(m) for name, m in linear}  # as they are now
        left = [name for name, kind in kinds.items() if kind is nn.Linear]
        _tell(model, left, filter_fn, also, least_width)
    return model


def _tell(
    model: nn.Module,
    left: list[str],
    filter_fn: Callable[[nn.Module, str], bool] | None,
    also: Iterable[str],
    least_width: int,
) -> None:
    """Say what was converted and what not: in the log, or by a warning where it is little."""
    # The filter was asked once for each module; its answers are not asked for again.
    answers = None if filter_fn is None else lambda _, name: name not in left
    made = conversion(model, answers, also=also, least_width=least_width)
    text = f"convert: {made.summary}; see hybridq.conversion(model)"
    converted, _, others = made.elements
    if filter_fn is not None or (converted and converted >= others):
        _LOGGER.info(text)
    else:
        warnings.warn(text, HybridQWarning, stacklevel=3)


def _quantize(model: nn.Module, turned: list[nn.Linear]) -> None:
    """Quantize the weights of these modules, but those that another module uses too."""
    users = Counter(id(one) for m in model.modules() for one in m.parameters(recurse=False))
    for module in turned:
        if users[id(module.weight)] == 1:
            quantize_weights(module, [("weight", "")])
