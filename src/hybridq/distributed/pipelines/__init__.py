"""Stages of a pipeline: planes between stages, weights kept, histories of a stage's own ranks."""

from __future__ import annotations

from .make_stage import formats_of, pipeline_stage
from .plane_payload import PlanePayload
from .wire_formats import Formats

__all__ = ["Formats", "PlanePayload", "formats_of", "pipeline_stage"]
