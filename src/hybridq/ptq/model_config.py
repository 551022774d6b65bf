"""What `config.json` of a converted checkpoint says of its weights, for libraries of models.

Hugging Face's libraries read the entry `quantization_config` of a model's configuration and ask
the quantizer of that name, which `hybridq.integrations.transformers` registers. Where nobody has
imported that, transformers (5.23) warns that it does not know the name, goes on, and takes the
weights for missing: the model would be random. A second entry stops it. `transformers_weights`
names the file that holds the weights, and is looked at after the quantizer has seen the
configuration: ours takes the entry away. Without it transformers refuses what is no file's name,
and prints it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from ..layouts import said_of, without_entries
from ..recipes import get
from ..recipes.as_text import text_of
from .select import Selection

__all__ = [
    "CONFIG_VERSION",
    "FILE_ENTRY",
    "METHOD",
    "QUANTIZATION",
    "REFUSAL",
    "in_fp32",
    "says_quantized",
    "value_dtype",
    "with_quantization",
    "without_quantization",
]

#: What the entry calls the method.
METHOD: Final = "hybridq"
#: Version of its fields. A reader refuses a later one.
CONFIG_VERSION: Final = 1
#: The entry of a configuration that names the file of weights, and what ours says there.
FILE_ENTRY: Final = "transformers_weights"
REFUSAL: Final = "import hybridq.integrations.transformers before from_pretrained"
#: The entry that says how the weights are quantized.
QUANTIZATION: Final = "quantization_config"
#: The part of a configuration of several models that is of the one for text.
_TEXT: Final = "text_config"
#: What a configuration calls its tensors' dtype.
_DTYPES: Final = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def with_quantization(config: Mapping[str, Any], selection: Selection) -> dict[str, Any] | None:
    """Return a model's configuration with what is said of quantization; None: it stays as it is.

    It stays where it is no model's, says something already, or nothing can be said: a recipe that
    no file can say, or a quantizer without a rowwise plane.

    Args:
        config: what `config.json` holds.
        selection: what is quantized, and how.
    """
    made: dict[str, Any] = {"quant_method": METHOD, "version": CONFIG_VERSION}
    quantizer = selection.quantizer
    if "model_type" not in config or says_quantized(config):
        return None
    if selection.recipe is not None:
        try:
            made["recipe"] = text_of(get(selection.recipe))
        except ValueError:  # of a function of the caller's own
            return None
    elif quantizer is not None and quantizer.makes_rowwise:
        made["format"] = str(quantizer.rowwise)
        made["columnwise"] = str(quantizer.columnwise) if quantizer.makes_columnwise else None
    else:
        return None
    return {FILE_ENTRY: REFUSAL, **config, QUANTIZATION: made}


def value_dtype(config: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype that a model's weights have when they are not quantized.

    Args:
        config: of the model; BF16 where it says nothing.
    """
    for own in (config, config.get(_TEXT)):
        if isinstance(own, Mapping):
            said = own.get("dtype", own.get("torch_dtype"))
            if isinstance(said, str) and said in _DTYPES:
                return _DTYPES[said]
    return torch.bfloat16


def in_fp32(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's configuration, and those of its parts, with FP32 where it says a dtype.

    Args:
        config: what `config.json` holds.
    """
    made: dict[str, Any] = {}
    for key, one in config.items():
        is_dtype = key in ("dtype", "torch_dtype") and isinstance(one, str) and one in _DTYPES
        made[key] = "float32" if is_dtype else in_fp32(one) if isinstance(one, Mapping) else one
    return made


def says_quantized(config: Mapping[str, Any]) -> bool:
    """Return whether a model's configuration, or that of a part, says how it is quantized.

    Args:
        config: what `config.json` holds.
    """
    return said_of(config) is not None


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's configuration without what it, or that of a part, says of quantization.

    Args:
        config: what `config.json` holds.
    """
    made = without_entries(config)
    if made.get(FILE_ENTRY) == REFUSAL:
        del made[FILE_ENTRY]
    return made
