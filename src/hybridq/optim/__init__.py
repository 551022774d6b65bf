"""Optimizers that keep high-precision values of parameters that are quantized or short."""

from __future__ import annotations

from .adamw import AdamW
from .muon import Muon
from .sgd import SGD

__all__ = ["SGD", "AdamW", "Muon"]
