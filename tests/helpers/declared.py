"""What every run must test: the backends and formats that are declared."""

from __future__ import annotations

import torch

import hybridq
from hybridq.formats import PlaneSpec
from hybridq.kernels import OpQuery, choose

#: Backends that encode CPU tensors, from the registry. `reference` and `cpu` are declared even if
#: one of them failed to register: their tests then fail instead of silently not being there. The
#: CUDA kernels are tested as `emulated` (test_emulated.py) and, on a GPU, by tests/gpu.
_QUERY = OpQuery("encode", "cpu", torch.bfloat16, PlaneSpec.parse("mxfp8"))
BACKENDS: tuple[str, ...] = tuple(
    dict.fromkeys(
        ["reference", "cpu", *(a.backend.name for a in choose(_QUERY).answers if a.reason is None)]
    )
)

#: Every registered format's name.
FORMATS: tuple[str, ...] = tuple(hybridq.formats.names())
