"""The families of transformers that are tried, and those that the default tests try."""

from __future__ import annotations

from .decoders import DECODERS
from .encoders import ENCODERS
from .family import Family
from .hybrids import HYBRIDS

__all__ = ["DEFAULT", "FAMILIES", "Family"]

FAMILIES: tuple[Family, ...] = (*DECODERS, *HYBRIDS, *ENCODERS)
#: The families of the default tests.
DEFAULT = (
    "Llama",
    "Gemma 3",
    "GPT-2",
    "Mixtral",
    "Qwen3-MoE",
    "DeepSeek-V3",
    "GPT-OSS",
    "Llama 4",
    "Nemotron-H",
    "BERT",
    "T5",
    "ViT",
    "Whisper",
)
