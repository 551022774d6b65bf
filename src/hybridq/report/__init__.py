"""Reports about tensors and about the installation; nothing here is imported by training code."""

from __future__ import annotations

from .doctor import Diagnosis, Route, diagnose
from .measure import Codes, ErrorMap, Scales
from .show import PlaneView, TensorView, show
from .text import Table, render

__all__ = [
    "Codes",
    "Diagnosis",
    "ErrorMap",
    "PlaneView",
    "Route",
    "Scales",
    "Table",
    "TensorView",
    "diagnose",
    "render",
    "show",
]
