"""Post-training quantization of checkpoints: safetensors in, safetensors with planes out.

See docs/guides/checkpoints.md. Needs the package safetensors (`pip install hybridq[checkpoints]`).
"""

from __future__ import annotations

from .convert import convert_checkpoint
from .export_checkpoint import export
from .load import Checkpoint, load_checkpoint
from .measure import PlaneError
from .observer import Observer
from .options import ConvertOptions
from .outcome import Conversion, TensorResult
from .record import Record
from .select import DEFAULT_EXCLUDE, DEFAULT_INCLUDE, Selection

__all__ = [
    "DEFAULT_EXCLUDE",
    "DEFAULT_INCLUDE",
    "Checkpoint",
    "Conversion",
    "ConvertOptions",
    "Observer",
    "PlaneError",
    "Record",
    "Selection",
    "TensorResult",
    "convert_checkpoint",
    "export",
    "load_checkpoint",
]
