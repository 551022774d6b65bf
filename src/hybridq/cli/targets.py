"""What a command runs: a function of the user's that makes a model, or a model of transformers."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ..converters import convert

__all__ = ["TARGET_HELP", "Target", "load_target"]

TARGET_HELP = (
    "FILE.py:FUNCTION or MODULE:FUNCTION, which returns a model and a batch (and a loss of what "
    "the model returns, if it returns none); or a folder of transformers, with --text."
)


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


def load_target(target: str, text: Path | None, tokens: int, device: str) -> Target:
    """Return what a command line names.

    Args:
        target: as `TARGET_HELP` says.
        text: of a model of transformers.
        tokens: of that text which are a batch.
        device: of the model.

    Raises:
        ValueError: there is no such file, function or text, or the function returns something else.
        ImportError: transformers is not installed.
    """
    if Path(target).is_dir():
        return _of_folder(target, text, tokens, device)
    where, colon, name = target.rpartition(":")
    if not colon or not where or not name:
        raise ValueError(
            f"TARGET must be a folder, FILE.py:FUNCTION or MODULE:FUNCTION, got {target!r}"
        )
    function = getattr(_module(where), name, None)
    if not callable(function):
        raise ValueError(f"TARGET must name a function, got {name!r}, which {where} has not")
    made = function()
    if not isinstance(made, tuple) or not 2 <= len(made) <= 3 or not isinstance(made[0], nn.Module):
        raise ValueError(
            f"{name} must return (model, batch) or (model, batch, loss), got {type(made).__name__}"
        )
    model, *rest = made
    return Target(convert(model).to(device), *rest)


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
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").to(device)
    words = AutoTokenizer.from_pretrained(folder)(text.read_text(encoding="utf-8"))["input_ids"]
    ids = torch.tensor([words[:tokens]], dtype=torch.int64, device=device)
    return Target(convert(model), {"input_ids": ids, "labels": ids})
