"""What a command runs: a function of the user's that makes a model, or a model of transformers."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from inspect import signature
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from ..converters import convert
from ..report.precision.running import check_model
from .folders import check_device, model_of, tokens_of

__all__ = ["TARGET_HELP", "Target", "load_target"]

TARGET_HELP = (
    "FILE.py:FUNCTION or MODULE:FUNCTION, which returns a model and a batch (and a loss of what "
    "the model returns, if it returns none); or a folder of transformers, with --text."
)


#: Of a text, if nobody says how many.
_TOKENS: Final = 256


class Target(NamedTuple):
    """A model, and how it is run.

    Attributes:
        model: any module, converted where it was not.
        data: a batch, or a function of the model.
        loss: of what the model returns, or None.
    """

    model: nn.Module
    data: Any
    loss: Any = None


def load_target(target: str, text: Path | None, tokens: int | None, device: str) -> Target:
    """Return what a command line names.

    Args:
        target: as `TARGET_HELP` says.
        text: of a model of transformers.
        tokens: of that text which are a batch; None: 256.
        device: of the model, and of the tensors of a batch.

    Raises:
        ValueError: there is no such file, function, text or device, a function is given a text, or
            it returns something else, or a model on the meta device.
        ImportError: transformers is not installed.
    """
    check_device(device)
    if Path(target).is_dir():
        return _of_folder(target, text, _TOKENS if tokens is None else tokens, device)
    where, colon, name = target.rpartition(":")
    if not colon or not where or not name:
        raise ValueError(
            f"TARGET must be a folder, FILE.py:FUNCTION or MODULE:FUNCTION, got {target!r}"
        )
    if text is not None or tokens is not None:
        said = "--text" if text is not None else "--tokens"
        raise ValueError(f"{said} is for a folder of transformers: {target} has a batch of its own")
    function = getattr(_module(where), name, None)
    if not callable(function):
        raise ValueError(f"TARGET must name a function, got {name!r}, which {where} has not")
    made = function()
    if not isinstance(made, tuple) or not 2 <= len(made) <= 3 or not isinstance(made[0], nn.Module):
        raise ValueError(
            f"{name} must return (model, batch) or (model, batch, loss), got {type(made).__name__}"
        )
    model, batch, *loss = made
    check_model(name, model)
    return Target(convert(model).to(device), _moved(batch, device), *loss)


def _moved(batch: Any, device: str) -> Any:
    """Return a batch with its tensors on a device."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {name: _moved(one, device) for name, one in batch.items()}
    if type(batch) in (tuple, list):
        return type(batch)(_moved(one, device) for one in batch)
    return batch


def _module(where: str) -> Any:
    if not where.endswith(".py"):
        try:
            return import_module(where)
        except ModuleNotFoundError as error:
            raise ValueError(f"TARGET must name a module, got {where!r} ({error})") from error
    path = Path(where)
    spec = spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ValueError(f"TARGET must name a file that is there, got {where!r}")
    module = module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module


def _of_folder(folder: str, text: Path | None, tokens: int, device: str) -> Target:
    """Return a model of transformers, and the first tokens of a text."""
    if text is None:
        raise ValueError("a folder of transformers needs --text, got none")
    words = tokens_of(folder, text)
    model = model_of(folder)
    if "labels" not in signature(type(model).forward).parameters:
        raise ValueError(
            f"a folder must be of a model whose forward takes labels, got a "
            f"{type(model).__name__}; name a function that returns it, a batch and a loss"
        )
    ids = torch.tensor([words[:tokens]], dtype=torch.int64, device=device)
    return Target(convert(model.to(device)), {"input_ids": ids, "labels": ids})
