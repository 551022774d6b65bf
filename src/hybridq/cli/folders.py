"""What a command line names of other programs: folders of transformers, texts, and devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ..errors import must_be_one_of

__all__ = ["DTYPES", "check_device", "check_predicts_the_next", "model_of", "tokens_of"]

#: What a model may be loaded in.
DTYPES = ("auto", "bfloat16", "float16", "float32")
_SHOWN = 3


def check_device(device: str) -> None:
    """Raise ValueError unless there is a device of this name here."""
    try:
        torch.empty(0, dtype=torch.uint8, device=device)
    except (AssertionError, RuntimeError) as error:  # of a torch without CUDA; of no GPU, no name
        first = str(error).partition("\n")[0]
        raise ValueError(f"--device must be one that is here, got {device!r} ({first})") from error


def _check_folder(folder: str) -> None:
    """Raise ValueError where a path is no folder; what may be a name at the hub is left alone."""
    parts = Path(folder).parts
    may_be_name = not Path(folder).is_absolute() and len(parts) < 3 and folder[:1] not in (".", "~")
    if not Path(folder).is_dir() and not may_be_name:
        raise ValueError(f"MODEL must be a folder that is there, got {folder!r}")


def tokens_of(folder: str, text: Path) -> list[int]:
    """Return the tokens of a text, by the tokenizer of a folder of transformers.

    Args:
        folder: or the name of a model.
        text: a file, UTF-8.

    Raises:
        ValueError: it cannot be read, is not UTF-8, or has fewer than two tokens; the folder is not
            there, or has no tokenizer that can be read.
    """
    _check_folder(folder)
    try:
        words = text.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        where = f"byte {error.start} is {error.object[error.start]:#04x}"
        raise ValueError(f"text must be UTF-8, got {text}, whose {where}") from error
    except OSError as error:
        raise ValueError(f"text must be a file, got {text} ({error.strerror})") from error
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # of any parser: of JSON, of tokenizers, of the folder's own code
        why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise ValueError(
            f"{folder} must have a tokenizer, got none that is read ({why})"
        ) from error
    found: list[int] = tokenizer(words)["input_ids"]
    if len(found) < 2:
        raise ValueError(f"text must have two tokens or more, got {len(found)} in {text}")
    return found


def model_of(folder: str, dtype: str = "auto") -> Any:
    """Return the model of a folder of transformers, as the class that its config.json names.

    Args:
        folder: or the name of a model; plain, of a `HybridQConfig`, or as any quantizer that
            transformers knows left it.
        dtype: one of `DTYPES`.

    Raises:
        ValueError: another dtype; the folder is not there; it predicts no tokens, or its files lack
            some of its weights.
    """
    _check_folder(folder)
    if dtype not in DTYPES:
        raise ValueError(f"dtype {must_be_one_of(DTYPES, dtype)}")
    from transformers import AutoConfig

    # That which transformers is told of HybridQConfig by.
    from ..integrations.transformers.layout_quantizer import class_of

    kind = class_of(AutoConfig.from_pretrained(folder))
    model, said = kind.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    name, missing = type(model).__name__, sorted(said["missing_keys"])
    if missing:
        more = f" and {len(missing) - _SHOWN} others" if len(missing) > _SHOWN else ""
        raise ValueError(
            f"{folder} must have all weights of {name}, which its config.json names, got none "
            f"for {', '.join(missing[:_SHOWN])}{more}"
        )
    if model.get_output_embeddings() is None:
        raise ValueError(f"{folder} must be a model that predicts tokens, got a {name}")
    return model


def check_predicts_the_next(model: Any) -> None:
    """Raise ValueError unless a model predicts each token of those before it, and of no other."""
    name, config = type(model).__name__, model.config
    if getattr(config, "is_encoder_decoder", False):
        why = "has an encoder, and predicts one text of another"
    elif not model.can_generate():
        why = "fills in tokens of those on both sides"
    elif getattr(config, "is_decoder", True) is False:
        why = "sees the tokens behind, too, as its config.json says is_decoder=false"
    else:
        return
    raise ValueError(
        f"perplexity is of a model that predicts each token of those before it, got a {name}, "
        f"which {why}"
    )
