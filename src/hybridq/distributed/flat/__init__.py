"""Parameters that every rank holds whole, of masters that are dealt out in flat order."""

from __future__ import annotations

from .flat_codes import FlatCodes
from .master_weights import post_all_gather_processing, quantize_master_weights

__all__ = ["FlatCodes", "post_all_gather_processing", "quantize_master_weights"]
