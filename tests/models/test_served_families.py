"""quantize_model on every family: a plain call has the bits of frozen planes under the recipe."""

from __future__ import annotations

import warnings

import pytest
import torch

pytest.importorskip("transformers", minversion="5.0")

import hybridq
from models.checks import tensors_of
from models.families import FAMILIES, Family


@pytest.mark.more
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@torch.no_grad()
def test_a_family_is_served(family: Family) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hybridq.HybridQWarning)  # of models that are mostly plain
        with hybridq.quantized_model_init("mxfp8", frozen=True):
            twin = hybridq.convert(family.build().eval()).requires_grad_(False)
        model = hybridq.quantize_model(family.build().eval(), "mxfp8")
    batch = family.batch(twin)
    plain = tensors_of(dict(family.build().eval()(**batch)))
    torch.manual_seed(1)
    with hybridq.autocast(recipe="mxfp8"):
        want = tensors_of(dict(twin(**batch)))
    torch.manual_seed(1)
    found = tensors_of(dict(model(**batch)))
    assert len(found) == len(want) and all(map(torch.equal, found, want))
    assert not all(map(torch.equal, found, plain)), "something is quantized"
