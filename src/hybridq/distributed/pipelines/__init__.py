"""Stages of a pipeline: planes between stages, weights kept, histories of a stage's own ranks."""

from __future__ import annotations

from .make_stage import pipeline_stage
from .plane_payload import PlanePayload

__all__ = ["PlanePayload", "pipeline_stage"]
