"""Pairs of planes and comparisons that the tests of QuantizedTensor share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

import hybridq
from hybridq import QuantizedTensor

#: Every way in which the two planes of a tensor may relate.
PAIRS = {
    "uniform": {"rowwise": "mxfp8"},
    "hybrid": {"rowwise": "mxfp8", "columnwise": "nvfp4", "hadamard": True},
    "derivable": {"rowwise": "fp8_128x128"},
    "packed derivable": {"rowwise": "nvfp4_16x16"},
    "one scale": {"rowwise": "fp8_e4m3"},
    "square": {"rowwise": "mxfp8_32x32"},
    "transformed": {"rowwise": "nvfp4", "columnwise": "nvfp4", "hadamard": True},
    "identity": {"rowwise": "bf16"},
    "half identity": {"rowwise": "mxfp8", "columnwise": "fp32"},
    "from decoded": {
        "rowwise": "nvfp4",
        "columnwise": "mxfp8",
        "columnwise_source": "rowwise_dequantized",
    },
    "rowwise only": {"rowwise": "nvfp4", "columnwise": False},
    "columnwise only": {"rowwise": None, "columnwise": "mxfp8_e5m2"},
}


def same_planes(a: QuantizedTensor, b: QuantizedTensor) -> None:
    """Assert equal specs and equal bytes of both planes."""
    for direction in ("rowwise", "columnwise"):
        first, second = getattr(a, direction), getattr(b, direction)
        assert (first is None) == (second is None)
        if first is None:
            continue
        assert first.spec == second.spec and first.matrix == second.matrix
        for name, buffer in first.buffers.items():
            assert torch.equal(buffer, second.buffers[name]), (direction, name)


def sharing(t: QuantizedTensor) -> int:
    """Number of distinct memories behind all buffers."""
    planes = t.tensor_storage.planes
    return len({b.untyped_storage().data_ptr() for p in planes for b in p.buffers.values()})


def quantized_linear(options: Mapping[str, Any] = PAIRS["hybrid"]) -> nn.Linear:
    """Return torch's Linear(64, 48) whose weight is a quantized parameter."""
    model = nn.Linear(64, 48)
    model.weight = nn.Parameter(hybridq.quantize(model.weight.detach(), **options))
    return model
