"""Which modules that could be converted keep their precision, and why: what `convert` asks.

A model's own word comes first, by the names that Hugging Face's, timm's and torchvision's models
give it (no such library is imported), then the names of modules, then their sizes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from inspect import signature
from typing import Any, Final

from torch import nn

from ..errors import names_in, suggestion
from .converter import Converter
from .table import converter_of, converters_with

__all__ = [
    "LEAST_WIDTH",
    "REASONS",
    "adapted",
    "keeps_precision",
    "kept_in_fp32",
    "reason_by_name",
    "reasons",
]

#: What a reason is called in `convert(also=...)`, and what it means.
REASONS: Final = {
    "heads": "a last projection, onto a vocabulary or classes: its errors are the result's",
    "routers": "it picks the experts of a mixture, where an error picks another",
    "adapters": "a factor of a low-rank adapter, which is small beside what it is added to",
    "kept_in_fp32": "the model lists it among those that it keeps in FP32",
    "narrow": "too few features for anything to be gained",
    "embeddings": "a table of rows, which no product reads: only its memory becomes less",
}
#: The attribute of a model that lists weights that are another parameter's.
_TIED: Final = "_tied_weights_keys"
#: Fewer input or output features than this gain nothing: a tile of tensor cores is 8 wide at least,
#: and quantizing the input takes longer than the product.
LEAST_WIDTH: Final = 8

#: Components of qualified names. `gate_proj` is neither a head nor a router.
_COMPONENTS: Final = {
    "heads": re.compile(
        r"lm_head|embed_out|output_projection|vocab_projector|classifier|classification_head|score"
        r"|qa_outputs|pooler|seq_relationship|class_embed|bbox_embed|ctc_head|to_logits"
        r"|cls_score|cls_logits|bbox_pred|mask_fcn_logits|regression_head"
    ),
    "routers": re.compile(r"gate|shared_expert_gate|(.*_)?router(_.*)?"),
    "adapters": re.compile(r"lora_(A|B|a|b|down|up|embedding_A|embedding_B)|prompt_encoder"),
}
#: Heads whose name alone is used for other things: whole qualified names.
_WHOLE: Final = re.compile(r"output|heads\.head|(.*\.)?cls\.predictions(\..*)?")
#: What torchvision's models call theirs, which have no method that returns it.
_TORCHVISION_HEADS: Final = ("fc", "head")


def reason_by_name(name: str, features: tuple[int, int] | None = None) -> str | None:
    """Return which of `REASONS` a module's qualified name gives, or None.

    A `gate` that makes more features than it takes is that of a gated activation: a router makes
    one for each expert.

    Args:
        name: of a module in its model.
        features: input and output features; None: the name decides alone.
    """
    parts = name.split(".")
    if features is not None and features[0] < features[1]:
        parts = [part for part in parts if part != "gate"]
    # `router.classifier` is a router's.
    for reason in ("routers", "heads", "adapters"):
        if any(_COMPONENTS[reason].fullmatch(part) for part in parts):
            return reason
    return "heads" if _WHOLE.fullmatch(name) else None


def keeps_precision(name: str, features: tuple[int, int] | None = None) -> bool:
    """Return whether a qualified name says that a module's precision matters most.

    Args:
        name, features: as for `reason_by_name`.
    """
    return reason_by_name(name, features) is not None


def reasons(
    model: nn.Module,
    also: Iterable[str] = (),
    least_width: int = LEAST_WIDTH,
    among: Iterable[Converter] | None = None,
) -> dict[str, tuple[str, str]]:
    """Return the modules that keep their precision: by name, which reason, and how known.

    Args:
        model: any module.
        also: reasons that count for nothing, of `REASONS`.
        least_width: fewer input or output features are too few.
        among: converters, whose modules are looked at; None: those that `also` lets.

    Raises:
        TypeError: `also` is a single string, or `least_width` no int.
        ValueError: `also` names no reason, or `least_width` is negative.
    """
    skipped = _checked(also, least_width)
    among = converters_with(skipped) if among is None else tuple(among)
    names: dict[int, list[str]] = {}
    kinds: dict[int, Converter] = {}
    candidates: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules(remove_duplicate=False):
        if id(module) in names:
            names[id(module)].append(name)
            continue
        kind = None if module is model else converter_of(module, among)  # itself is meant
        if kind is not None and (kind.keeps is None or kind.keeps(module) is None):
            names[id(module)], kinds[id(module)] = [name], kind
            candidates.append((name, module))
    found: dict[str, tuple[str, str]] = {}

    def note(name: str, reason: str, text: str) -> None:
        if reason not in skipped:
            found.setdefault(name, (reason, text))

    for module, reason, text in _own_word(model, kinds):
        for name in names.get(id(module), ())[:1]:
            if kinds[id(module)].only_with is None or reason == "kept_in_fp32":
                note(name, reason, text)
    mixtures = _mixtures(model)
    for name, module in candidates:
        if kinds[id(module)].only_with is not None:
            continue
        features = kinds[id(module)].features_of(module)
        for one in names[id(module)]:
            by_name = reason_by_name(one, None if _owner_of_gate(one) in mixtures else features)
            if by_name is not None:
                note(name, by_name, f"the name {one}")
        if features is not None and min(features) < least_width:
            note(name, "narrow", f"{features[0]} to {features[1]} features")
    return {name: found[name] for name, _ in candidates if name in found}


def _mixtures(model: nn.Module) -> set[str]:
    """Return the names of the modules that have experts, as their children are called."""
    split = (name.rpartition(".") for name, _ in model.named_modules(remove_duplicate=False))
    return {owner for owner, _, last in split if "expert" in last.lower()}


def _owner_of_gate(name: str) -> str | None:
    """Return the module that has the `gate` that a module is, or is inside of; None: it is none."""
    parts = name.split(".")
    return ".".join(parts[: parts.index("gate")]) if "gate" in parts else None


def kept_in_fp32(model: nn.Module) -> dict[int, str]:
    """Return what a model's own lists keep in FP32: the attribute by the id of each module.

    Args:
        model: any module.
    """
    found: dict[int, str] = {}
    for module in model.modules():
        lists = _kept_lists(module)
        inside = dict(module.named_modules()) if lists else {}
        for attribute, patterns in lists:
            for own, one in inside.items():
                if own and _matches(own, one._parameters, patterns):
                    found.setdefault(id(one), attribute)
    return found


def _checked(also: Iterable[str], least_width: object) -> frozenset[str]:
    skipped = frozenset(names_in("convert: also", also))
    unknown = sorted(map(str, skipped - set(REASONS)))
    if unknown:
        raise ValueError(
            f"convert: also takes {', '.join(REASONS)}, got {', '.join(unknown)}"
            f"{suggestion(unknown[0], REASONS)}"
        )
    if not isinstance(least_width, int) or isinstance(least_width, bool):
        raise TypeError(f"convert: least_width must be an int, got {type(least_width).__name__}")
    if least_width < 0:
        raise ValueError(f"convert: least_width must not be negative, got {least_width}")
    return skipped


def _own_word(
    model: nn.Module, kinds: dict[int, Converter]
) -> Iterator[tuple[nn.Module, str, str]]:
    """Yield what a model, and the models inside it, say of their modules."""
    embedded = {
        id(module.weight): name
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding)
    }
    others = Counter(
        id(one)
        for module in model.modules()
        if not isinstance(module, nn.Embedding)
        for one in module.parameters(recurse=False)
    )
    for module in model.modules():
        kind = kinds.get(id(module))
        for weight in () if kind is None else kind.weights:
            name = embedded.get(id(module._parameters.get(weight)))
            if name is not None:
                yield module, "heads", f"its weight is that of the embedding {name}"
        for method in ("get_output_embeddings", "get_classifier"):
            for head in _asked(module, method):
                yield from ((one, "heads", f"{method}()") for one in head.modules())
        if type(module).__module__.startswith("torchvision.models."):
            for name in _TORCHVISION_HEADS:
                child = module._modules.get(name)
                if child is not None and id(child) in kinds:
                    yield child, "heads", f"{name} of torchvision's {type(module).__name__}"
        for one, count in _onto_labels(module, kinds):
            yield one, "heads", f"its {count} features are the labels of the configuration"
        if isinstance(module, nn.AdaptiveLogSoftmaxWithLoss):
            yield from ((one, "heads", "of an adaptive softmax") for one in module.modules())
        for name, child in _beside_base(module):
            yield from ((one, "adapters", f"{name} beside a base_layer") for one in child.modules())
        lists = _kept_lists(module)
        inside = dict(module.named_modules()) if lists else {}
        for attribute, patterns in lists:
            for own, one in inside.items():
                kind = kinds.get(id(one))
                if kind is not None and _matches(own, kind.weights, patterns):
                    yield one, "kept_in_fp32", attribute
        for one in _tied_heads(module, kinds, others):
            yield one, "heads", _TIED


def _onto_labels(
    module: nn.Module, kinds: Mapping[int, Converter]
) -> Iterator[tuple[nn.Module, int]]:
    """Yield a Hugging Face model's own children that make its labels, or one more for none of them.

    Its blocks lie deeper, so that a width of theirs is no number of labels.
    """
    labels = getattr(getattr(module, "config", None), "num_labels", None)
    if not hasattr(module, "base_model_prefix") or not isinstance(labels, int):
        return
    for child in module.children():
        kind = kinds.get(id(child))
        features = None if kind is None else kind.features_of(child)
        if features is not None and features[1] in (labels, labels + 1):
            yield child, features[1]


def _tied_heads(
    module: nn.Module, kinds: dict[int, Converter], others: Mapping[int, int]
) -> Iterator[nn.Module]:
    """Yield the modules that a model's list of tied weights ties to an embedding.

    Blocks of a decoder that share their weights are in such lists too, and are no heads.

    Args:
        module: with the list; one without yields nothing.
        kinds: of the modules that could be converted.
        others: of each parameter, by its id, how many modules that are no embedding hold it.
    """
    listed = getattr(module, _TIED, None)
    if isinstance(listed, str | bytes) or not isinstance(listed, Iterable):
        return
    # From transformers 5 on a dict of targets and what they are tied to; before, the targets.
    sources = listed if isinstance(listed, Mapping) else dict.fromkeys(listed)
    inside = dict(module.named_modules()) if sources else {}
    for target, source in sources.items():
        if not isinstance(target, str):
            continue
        held = [
            isinstance(one, nn.Embedding)
            for own, one in inside.items()
            if isinstance(source, str)
            and one._parameters
            and _matches(own, one._parameters, [source])
        ]
        for own, one in inside.items():
            kind = kinds.get(id(one))
            if kind is None or not _matches(own, kind.weights, [target]):
                continue
            weights = [one._parameters.get(name) for name in kind.weights]
            # Of a source that is not said, what the weight is tied to now.
            if all(held) if held else not any(others[id(w)] > 1 for w in weights if w is not None):
                yield one


def _has_adapters(module: nn.Module) -> bool:
    """Return whether a module is an adapter's layer, as PEFT makes them."""
    return hasattr(module, "adapter_layer_names") and "base_layer" in module._modules


def adapted(model: nn.Module) -> list[str]:
    """Return the names of modules that have adapters beside them, as PEFT makes them.

    Args:
        model: any.
    """
    return [name for name, one in model.named_modules() if _has_adapters(one)]


def _beside_base(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return what an adapter's layer, as PEFT makes them, has beside the module that it adapts."""
    if not _has_adapters(module):
        return []
    return [(name, one) for name, one in module.named_children() if name != "base_layer"]


def _asked(module: nn.Module, method: str) -> tuple[nn.Module, ...]:
    """Return the modules that a model's method returns, none where it has no such, or no answer.

    Models that are distilled have two heads (timm's DeiT), and return both.
    """
    function: Any = getattr(module, method, None)
    if not callable(function):
        return ()
    try:
        signature(function).bind()
    except (TypeError, ValueError):  # it takes arguments: another method of that name
        return ()
    try:
        made = function()
    except NotImplementedError:  # a base class that leaves it to others
        return ()
    every: Iterable[object] = made if isinstance(made, tuple | list) else (made,)
    return tuple(one for one in every if isinstance(one, nn.Module))


def _kept_lists(module: nn.Module) -> list[tuple[str, list[str]]]:
    """Return the lists of what a model keeps in FP32: the attribute, and the patterns."""
    found = []
    for attribute in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"):
        names = getattr(module, attribute, None)
        if isinstance(names, str | bytes) or not isinstance(names, Iterable):
            continue
        patterns = [one for one in names if isinstance(one, str)]
        if patterns:
            found.append((attribute, patterns))
    return found


def _matches(name: str, weights: Iterable[str], patterns: list[str]) -> bool:
    """Return whether a list names a weight of a module: its key, or a component of its name."""
    keys = [f"{name}.{weight}" if name else weight for weight in weights]
    for pattern in patterns:
        if pattern in name.split("."):
            return True
        if any(re.fullmatch(rf"(.*\.)?(?:{pattern})(\..*)?", key) for key in keys):
            return True
    return False
