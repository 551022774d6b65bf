"""The scheme of `export` into high precision: what is quantized is written as it decodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch

from ..errors import CheckpointError
from .decoding import decoded
from .draft import CheckpointScheme, Draft, copied
from .found import HF_QUANT_CONFIG, Found, Weight
from .header import dtype_name
from .model_config import in_fp32, without_quantization
from .record import without_records
from .source import Shard
from .training import RECORD

__all__ = ["PLAIN_LAYOUTS", "PlainScheme"]

#: Names of `layout` that mean no layout of planes.
PLAIN_LAYOUTS: Final = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}


class PlainScheme(CheckpointScheme):
    """What `export` makes of a quantized checkpoint in high precision.

    Args:
        found: the source.
        dtype: of the weights that were quantized; all others stay as they are.

    Raises:
        CheckpointError: nothing in the source is quantized.
    """

    def __init__(self, found: Found, dtype: torch.dtype) -> None:
        if not found.weights:
            raise CheckpointError(
                f"export: {found.source.path} holds nothing quantized, so there is nothing to "
                "decode"
            )
        self._found = found
        self._dtype = dtype

    def drafts(self, shard: Shard) -> list[Draft]:
        """Return what becomes of the tensors of a file.

        Args:
            shard: the file.
        """
        made = []
        for item in self._found.items(shard):
            if isinstance(item, Weight):
                entry = replace(item.entry, dtype=dtype_name(self._dtype))
                made.append(decoded(replace(item, entry=entry)))
            else:
                made.append(copied(item))
        return made

    def metadata(self, shard: Shard, drafts: Sequence[Draft]) -> Mapping[str, str]:
        """Return the source's metadata without what said how it was quantized.

        Args:
            shard: the source's file.
            drafts: what becomes of it.
        """
        del drafts
        return {"format": "pt", **without_records(shard.header.metadata)}

    def identity(self) -> Mapping[str, Any]:
        """Return what tells this export from another one."""
        return {"layout": dtype_name(self._dtype)}

    def config(self, config: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the model's configuration without what is said of quantization.

        Where weights are decoded to FP32 it says so: they were loaded in the dtype of before.

        Args:
            config: what `config.json` holds.
        """
        plain = without_quantization(config)
        return in_fp32(plain) if self._dtype == torch.float32 else plain

    def replaces(self) -> Sequence[str]:
        """Return the names of configurations that say how the source is quantized."""
        return (HF_QUANT_CONFIG, RECORD)
