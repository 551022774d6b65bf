"""A quantized parameter of each kind of pair."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hybridq
from tensor_tools import PAIRS


@pytest.fixture(params=sorted(PAIRS))
def weight(request) -> nn.Parameter:
    """A [48, 64] parameter of each kind of pair."""
    return nn.Parameter(hybridq.quantize(torch.randn(48, 64), **PAIRS[request.param]))
