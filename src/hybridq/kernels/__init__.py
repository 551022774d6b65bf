"""Operations, their backends and the choice between them."""

from __future__ import annotations

from . import backend_cpu, backend_reference, backend_torch, derivatives, ops
from .registry import Backend, Call, Choice, backends, candidates, register_backend, select

__all__ = [
    "Backend",
    "Call",
    "Choice",
    "backend_cpu",
    "backend_reference",
    "backend_torch",
    "backends",
    "candidates",
    "derivatives",
    "ops",
    "register_backend",
    "select",
]
