"""Weights for rollouts: the planes of the trainer's forward, in the layouts that readers know.

See docs/guides/rollouts.md.
"""

from __future__ import annotations

from .push import quantization_config, weights

__all__ = ["quantization_config", "weights"]
