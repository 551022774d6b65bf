"""convert: turn the modules of any model that multiply matrices into hybridq's, in place."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from .. import settings
from .._log import LOGGER
from ..errors import check_bools, is_first, names_in, warn, warn_once
from ..nn import FusedSequential, QuantizedModule
from ..nn.modules import ENCODERS
from ..nn.weights import saves_decoded, would_quantize
from ..recipes import install
from .conversion import Conversion, check_model, conversion, keep_report
from .converter import Converter
from .exclusions import LEAST_WIDTH, keeps_precision, reason_by_name, reasons
from .table import converter_of, converters, converters_with, reason_to_leave, tell_libraries
from .values import lazy_parameters

__all__ = ["convert", "convert_modules", "default_filter"]


def default_filter(module: nn.Module, name: str) -> bool:
    """Return whether the name of `module` lets `convert` turn it: no head, router or adapter's.

    Left alone are modules with a component of their qualified name that is `lm_head`, `embed_out`,
    `output_projection`, `vocab_projector`, `classifier`, `classification_head`, `score`,
    `qa_outputs`, `pooler`, `seq_relationship`, `class_embed`, `bbox_embed`, `ctc_head`,
    `to_logits`, `cls_score`, `cls_logits`, `bbox_pred`, `mask_fcn_logits` or `regression_head`;
    `gate`, `shared_expert_gate`, or has the word `router` in it; `lora_A`, `lora_B` (or `_a`, `_b`,
    `_down`, `_up`); what is below `cls.predictions`, and the model's own `output` or `heads.head`.
    `gate_proj`, `gate_up_proj` and the like are converted, and a `gate` that makes more features
    than it takes, as that of a gated activation does. `convert` leaves such a one beside experts
    alone, too.

    Args:
        module: of a kind that `convert` knows.
        name: its qualified name in the model.
    """
    kind = converter_of(module, converters())
    return not keeps_precision(name, None if kind is None else kind.features_of(module))


def convert(
    model: nn.Module,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    *,
    fuse: bool = False,
    also: Iterable[str] = (),
    least_width: int = LEAST_WIDTH,
) -> nn.Module:
    """Turn the modules in `model` that multiply by a matrix into hybridq's, in place; return it.

    An `nn.Linear` becomes a `hybridq.Linear`; the other kinds are those of
    `hybridq.converters.converters()`, to which `hybridq.register_converter` adds a user's own. The
    module objects stay the same, only their class changes: parameters (tied ones too), names,
    hooks, optimizers that hold them, and references elsewhere in the model all stay valid. Every
    module of hybridq in the model, new or not, learns its qualified name for the roles of recipes,
    unless it was constructed with a `name=`.

    Args:
        model: any module; may itself be an `nn.Linear`.
        filter_fn: `filter_fn(module, qualified_name) -> bool`, asked for every module of a kind
            that is converted; False leaves it alone. It decides alone: nothing below is asked then.
        fuse: turn every `nn.Sequential` into a `FusedSequential`, which runs a norm or an
            activation and the linear module after it as one step.
        also: reasons that count for nothing: `"heads"`, `"routers"`, `"adapters"`,
            `"kept_in_fp32"`, `"narrow"`; and `"embeddings"`, whose tables are converted only so.
        least_width: modules with fewer input or output features are left alone: a tile of tensor
            cores is 8 wide at least, and quantizing the input takes longer than the product.

    Left alone are, by the model's own word, what `get_output_embeddings()` or `get_classifier()`
    returns, whose weight is an embedding's, what `_tied_weights_keys` ties to an embedding, and
    what `_keep_in_fp32_modules` or `_keep_in_fp32_modules_strict` names; by their names, heads,
    routers and low-rank adapters (see `default_filter`); and narrow modules.
    `hybridq.summary(model)` says which and why, and so does a line of the logger `hybridq` (level
    INFO). It is a HybridQWarning, once for a class of models, where without a filter less than half
    of the weights of matrix products was converted.

    A class that derives from `nn.Linear` and leaves its forward alone is converted, too, into one
    that derives from `hybridq.Linear` and from it. Other classes are taken exactly: what derives
    from them, a linear layer with a forward of its own (another library's quantized one), and a
    parametrized module stay. With `fuse` the same holds of `nn.Sequential`. Keys of the state_dict
    stay what they were with and without `fuse`; a norm that runs as part of a linear module has the
    numbers of `docs/reference/numerics.md`, which differ from torch's in the last bit of some
    values.

    Raises:
        TypeError: `model` is no module, `filter_fn` is not callable, `also` is one string or no
            collection, `fuse` is no bool, or a weight that `quantized_model_init` is to quantize
            is FP64. The model is as it was then.
        ValueError: `also` names no reason, or `least_width` is negative.

    Example:
        >>> import hybridq
        >>> from torch import nn
        >>> model = nn.ModuleDict({"up": nn.Linear(8, 16), "lm_head": nn.Linear(16, 8)})
        >>> [type(m).__module__.split(".")[0] for m in hybridq.convert(model).values()]
        ['hybridq', 'torch']
    """
    missed = convert_modules(model, filter_fn, fuse=fuse, also=also, least_width=least_width)
    if missed:
        warn_once(
            "convert.converted_before",
            f"convert: weights of {len(missed)} modules stay in high precision, as of "
            f"{missed[0].name or type(missed[0]).__name__!r}: they were hybridq's before, and "
            "quantized_model_init is for what is made or converted inside of it; convert the model "
            "there the first time, or load its state_dict into one that was made there",
        )
    return model


def convert_modules(
    model: nn.Module,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    *,
    fuse: bool = False,
    also: Iterable[str] = (),
    least_width: int = LEAST_WIDTH,
) -> list[QuantizedModule]:
    """Convert as `convert` does, whose arguments and errors these are.

    Returns:
        Modules that were hybridq's before, and have plain weights that the surrounding
        `quantized_model_init` would quantize; none outside of one.
    """
    check_model("convert", model, filter_fn)
    check_bools("convert", fuse=fuse)
    lazy = lazy_parameters(model)
    if lazy:
        warn(
            f"convert: lazy modules stay torch's own, since they are not made yet, got {lazy[0]}"
            f"{' and others' if len(lazy) > 1 else ''}; call the model once, and convert it then",
        )
    install()
    found = [(name, module) for name, module in model.named_modules()]
    # First all answers, then all changes: a filter that raises leaves the model as it was.
    also = names_in("convert: also", also)
    among = converters_with(also)
    kept = reasons(model, also, least_width, among)
    known = [(name, m, kind) for name, m in found if (kind := _convertible(m, among)) is not None]
    if filter_fn is None:
        chosen = [(m, kind) for name, m, kind in known if name not in kept]
    else:
        chosen = [(m, kind) for name, m, kind in known if filter_fn(m, name)]
    ours: list[QuantizedModule] = []
    missed: list[QuantizedModule] = []
    shared: set[int] = set()
    with _restored_on_error([module for _, module in found]):
        for module, kind in chosen:
            kind.convert(module)
        for _, module in found if fuse else ():
            if type(module) is nn.Sequential:
                module.__class__ = FusedSequential
        for _, module in found:
            _call_children(module)
        for name, module in found:
            saves_decoded(type(module))
            if isinstance(module, QuantizedModule):
                module.set_name(name)
        if settings.current().model_init is not None:
            ours = [module for module, _ in chosen if isinstance(module, QuantizedModule)]
            shared = _shared(model)
            missed = _missed([module for _, module in found], ours)
        for one in ours:
            one.check_initial_weights(but=shared)
    for one in ours:
        one.quantize_initial_weights(but=shared)
    left = {name for name, m, _ in known if not isinstance(m, QuantizedModule)}
    # The filter was asked once for each module; its answers are not asked for again.
    answers = None if filter_fn is None else lambda _, name: name not in left
    made = conversion(model, answers, also=also, least_width=least_width)
    keep_report(model, made)
    if known or not any(isinstance(m, QuantizedModule) for _, m in found):
        _tell(model, made, filter_fn is None)
        if filter_fn is None and "routers" not in also:
            _tell_of_gates(made)
    tell_libraries(model)
    return missed


def _missed(found: Iterable[nn.Module], new: list[QuantizedModule]) -> list[QuantizedModule]:
    """Return what was hybridq's before, and has plain weights that the region would quantize.

    Args:
        found: modules of the model.
        new: those that became hybridq's now.
    """
    is_new = {id(one) for one in new}
    ours = [m for m in found if isinstance(m, QuantizedModule) and id(m) not in is_new]
    return [one for one in ours if would_quantize(one, one.initial_weights())]


def _call_children(module: nn.Module) -> None:
    """Have a module of torch's that may pass its children by call them, if some are hybridq's."""
    makes = ENCODERS.get(type(module))
    if makes is not None and any(isinstance(one, QuantizedModule) for one in module.modules()):
        module.__class__ = makes


def _convertible(module: nn.Module, among: tuple[Converter, ...]) -> Converter | None:
    """Return the converter that can turn a module; None: nobody can."""
    kind = converter_of(module, among)
    return None if kind is None or reason_to_leave(module, kind) is not None else kind


def _tell(model: nn.Module, made: Conversion, is_own_choice: bool) -> None:
    """Say what was converted and what not: in the log, or by a warning where it is little.

    A class of models is warned of once; torch's containers are models of any kind.
    """
    text = f"convert: {made.summary}; see hybridq.summary(model)"
    is_little = is_own_choice and 2 * made.elements[0] < max(sum(made.elements), 1)
    kind = type(model)
    key = f"{kind.__module__}.{kind.__qualname__}"
    if kind.__module__.split(".")[0] == "torch":
        key = text
    if is_little and is_first(f"convert:{key}"):
        warn(text)
    else:
        LOGGER.info(text)


def _tell_of_gates(made: Conversion) -> None:
    """Log which modules are called as routers are, and are none by what they make."""
    gates = [name for name in made.converted if reason_by_name(name) == "routers"]
    if gates:
        some = ", ".join(gates[:4]) + (f" and {len(gates) - 4} more" if len(gates) > 4 else "")
        LOGGER.info(f"convert: {some}: more features out than in, so no router, whatever its name")


def _shared(model: nn.Module) -> set[int]:
    """Return the ids of parameters that several modules use, which are not quantized."""
    users = Counter(id(one) for m in model.modules() for one in m.parameters(recurse=False))
    return {one for one, count in users.items() if count > 1}


@contextmanager
def _restored_on_error(modules: list[nn.Module]) -> Iterator[None]:
    """Give modules their classes and what they hold back after an error inside.

    Nothing may be quantized inside: values in high precision would be kept until the end.
    """
    before = [
        (one, type(one), {k: _held(v) for k, v in vars(one).items()}, vars(one)) for one in modules
    ]
    try:
        yield
    except BaseException:
        for one, kind, held, now in before:
            one.__class__ = kind
            for name in now.keys() - held.keys():
                del now[name]
            for name, value in held.items():
                own = now.get(name)
                if isinstance(own, dict) and type(value) is type(own):
                    own.clear()
                    own.update(value)
                else:
                    now[name] = value
        raise


def _held(value: Any) -> Any:
    """Return what a module's attribute is, or a copy of it where it is a dict."""
    return copy.copy(value) if type(value) in (dict, OrderedDict) else value
