"""Advice: which formats the slots of a model should have, and why."""

from __future__ import annotations

from .advice import Advice, Advised
from .advising import CANDIDATES, advise

__all__ = ["CANDIDATES", "Advice", "Advised", "advise"]
