"""What of Transformer Engine belongs to no framework: the recipes."""

from __future__ import annotations

from . import recipe
from .recipe import Format

__all__ = ["Format", "recipe"]
