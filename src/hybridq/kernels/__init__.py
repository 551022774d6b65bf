"""Operations, their backends and the choice between them."""

from __future__ import annotations

from . import (
    backend_cpu,
    backend_cuda,
    backend_fold,
    backend_native,
    backend_reference,
    backend_torch,
    derivatives,
    ops,
    ops_by_group,
    ops_delayed,
    ops_fused,
    ops_fused_backward,
    ops_grouped,
    ops_many,
    ops_ragged,
)
from .device import Chip, chip_of, described
from .kept import Kept, NeverKept, kept_nbytes
from .precision import PRECISIONS, check_precision
from .registry import (
    Backend,
    Call,
    Choice,
    Decision,
    backends,
    candidates,
    decide,
    register_backend,
    select,
)
from .triton import backend as backend_triton

__all__ = [
    "PRECISIONS",
    "Backend",
    "Call",
    "Chip",
    "Choice",
    "Decision",
    "Kept",
    "NeverKept",
    "backend_cpu",
    "backend_cuda",
    "backend_fold",
    "backend_native",
    "backend_reference",
    "backend_torch",
    "backend_triton",
    "backends",
    "candidates",
    "check_precision",
    "chip_of",
    "decide",
    "derivatives",
    "described",
    "kept_nbytes",
    "ops",
    "ops_by_group",
    "ops_delayed",
    "ops_fused",
    "ops_fused_backward",
    "ops_grouped",
    "ops_many",
    "ops_ragged",
    "register_backend",
    "select",
]
