"""Models that run forwards alone: one plane of each weight, a recipe of their own; perplexity."""

from __future__ import annotations

from .perplexity import Perplexity, perplexity, windows
from .quantize import quantize_model
from .static_amax import static_amax

__all__ = ["Perplexity", "perplexity", "quantize_model", "static_amax", "windows"]
