"""What a model says itself of the weights of its checkpoint: which are no linear layer's or matter.

The model is built on the meta device from the checkpoint's `config.json`, by transformers where it
is installed: no weight is read, and no code of the checkpoint is run.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from ..converters.exclusions import reasons
from ..layouts import without_entries
from .found import Found
from .source import CONFIG

__all__ = ["ModelWord", "class_name", "tell_of_unknown", "word_of", "word_of_source"]

_SUFFIX: Final = ".weight"


@dataclass(frozen=True)
class ModelWord:
    """What a model says of its checkpoint.

    Args:
        kept: names of linear layers that keep their precision, to the reason.
        others: names of matrices that are no linear layer's weight, without `.weight`.
        in_model: gives the parameter of the model that a tensor of the checkpoint becomes, or
            becomes a part of.
        parameters: names of the model's parameters.
        model: name of its class.
        ignored: patterns of tensors that it leaves out by intent (layers that predict more tokens).
        reason: why nothing is known of the model; None: it is.
    """

    kept: Mapping[str, str]
    others: frozenset[str]
    in_model: Callable[[str], str]
    parameters: frozenset[str] = frozenset()
    model: str = ""
    ignored: tuple[str, ...] = ()
    reason: str | None = None

    def has_place(self, name: str) -> bool:
        """Return whether the model reads a tensor of this name, or leaves it out by intent.

        Args:
            name: in the checkpoint.
        """
        if not self.parameters or any(re.search(one, name) for one in self.ignored):
            return True
        return self.in_model(name) in self.parameters

    def tell_of_strangers(self, names: Iterable[str]) -> str | None:
        """Return what to say where the model has no place for some weights; None: it has.

        Args:
            names: of weights, as the new checkpoint has them.
        """
        strange = [name for name in names if not self.has_place(name)]
        if not strange:
            return None
        others = f" and {len(strange) - 1} others" if len(strange) > 1 else ""
        return (
            f"transformers' {self.model} has no place for {strange[0]}{others}, "
            "so it does not load the new folder; programs that read these names may"
        )

    def keeps(self, name: str) -> bool:
        """Return whether a weight stays as it is.

        Args:
            name: of the tensor.
        """
        module = name.removesuffix(_SUFFIX)
        return module in self.kept or module in self.others

    def as_dict(self) -> dict[str, Any]:
        """Return what it keeps as JSON has it, to tell whether two are the same."""
        return {"model": sorted({*self.kept, *self.others})}


def nothing_known(reason: str) -> ModelWord:
    """Return the word of a model that cannot be asked.

    Args:
        reason: why.
    """
    return ModelWord({}, frozenset(), _same, reason=reason)


def _same(name: str) -> str:
    return name


def word_of_source(found: Found) -> ModelWord:
    """Return what the model of a checkpoint says, if there is a configuration that names one.

    Args:
        found: the checkpoint.
    """
    if not found.source.is_folder:
        return nothing_known(f"a file has no {CONFIG} beside it")
    return ask_model(found.source.path, found.config)


def tell_of_unknown(word: ModelWord, found: Found, warn: Callable[[str], None]) -> None:
    """Warn where a checkpoint is of a model, and that could not be asked.

    Args:
        word: of the model.
        found: the checkpoint.
        warn: is told.
    """
    if word.reason is not None and found.config.get("architectures"):
        warn(f"what keeps its precision is known by names alone, since {word.reason}")


def ask_model(folder: Path, config: Mapping[str, Any]) -> ModelWord:
    """Return what the model of a checkpoint's folder says.

    Args:
        folder: with its `config.json`.
        config: what that holds.
    """
    if "model_type" not in config:
        return nothing_known(f"there is no {CONFIG} of a model")
    if importlib.util.find_spec("transformers") is None:
        return nothing_known("transformers is not installed")
    library: Any = import_module("transformers")
    names = config.get("architectures")
    if not names:
        return nothing_known(f"{CONFIG} names no class under architectures")
    kind = getattr(library, names[0], None) if isinstance(names[0], str) else None
    if kind is None:
        return nothing_known(f"transformers has no {names[0]}, which {CONFIG} names")
    plain = without_entries(config)
    try:
        with _quiet(), torch.device("meta"):
            model = kind(library.AutoConfig.for_model(**plain))
    except _building_errors() as error:
        first = str(error).partition("\n")[0]
        return nothing_known(f"transformers cannot build {names[0]} ({first})")
    return word_of(model)


def _building_errors() -> tuple[type[Exception], ...]:
    """Return what transformers raises for a configuration that is of no model."""
    hub: Any = import_module("huggingface_hub.errors")
    own = getattr(hub, "StrictDataclassError", ValueError)
    return (own, ValueError, KeyError, TypeError, AttributeError, ImportError, RuntimeError)


def word_of(model: nn.Module) -> ModelWord:
    """Return what a model says of a checkpoint of its weights.

    Args:
        model: on any device.
    """
    to_disk, in_model = _renaming(model)
    kept = {
        to_disk(f"{name}{_SUFFIX}").removesuffix(_SUFFIX): f"{reason}: {text}"
        for name, (reason, text) in reasons(model).items()
    }
    others = {
        to_disk(f"{name}{_SUFFIX}").removesuffix(_SUFFIX)
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, nn.Embedding)
    }
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    own = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    # A checkpoint may be of the model without its head, whose names lack the prefix.
    bare = [name.removeprefix(prefix) for name in own]
    parameters = frozenset((*own, *bare))
    ignored = tuple(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    return ModelWord(kept, frozenset(others), in_model, parameters, class_name(model), ignored)


def class_name(model: nn.Module) -> str:
    """Return the name of a model's class, not of the one that FSDP2 derives from it.

    Args:
        model: any.
    """
    own = type(model)
    derived = [one for one in own.__mro__ if one.__name__ == "FSDPModule"]
    return next(one for one in own.__mro__ if not issubclass(one, tuple(derived))).__name__


def _renaming(model: nn.Module) -> tuple[Callable[[str], str], Callable[[str], str]]:
    """Return what gives a parameter's name in the files that transformers saves, and back."""
    if not hasattr(model, "config") or importlib.util.find_spec("transformers") is None:
        return _same, _same
    loading: Any = import_module("transformers.core_model_loading")
    mapping: Any = import_module("transformers.conversion_mapping")
    known = getattr(model, "_weight_conversions", None)
    if known is None:
        known = mapping.get_model_conversion_mapping(model, add_legacy=False)
        known = [one for one in known if not isinstance(one, loading.PrefixChange)]
    made = [one.reverse_transform() for one in reversed(known)]
    back = [one for one in made if isinstance(one, loading.WeightRenaming)]
    known = deepcopy(known)  # they note what they have matched
    renamings = [one for one in known if isinstance(one, loading.WeightRenaming)]
    converters = [one for one in known if isinstance(one, loading.WeightConverter)]

    def in_model(name: str) -> str:
        renamed = loading.apply_renamings(name, renamings)
        return str(loading.apply_converters(renamed, converters)[0])

    return lambda name: loading.apply_renamings(name, back), in_model


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Build a model without what its class logs and warns of."""
    log = logging.getLogger("transformers")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)
