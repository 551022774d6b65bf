"""Loading what a state_dict of quantized shards holds: decoded values, quantized again."""

from __future__ import annotations

import pytest
import torch

import hybridq
from hybridq import formats

#: Recipes whose columnwise plane of weights is made of the values beside the rowwise one.
FROM_THE_VALUES = {"mxfp8"}
RECIPES = (
    *("mxfp8", "nvfp4", "fp8_current", "fp8_block", "mxfp8_fwd_nvfp4_bwd", "nvfp4_1d_weight"),
    *("nvfp4_fwd_mxfp8_bwd", "fp8_block_fwd_mxfp8_bwd"),
    *("mxfp8_fwd_high_precision_bwd", "high_precision_fwd_mxfp8_bwd"),
)


def matrices(dtype: torch.dtype) -> list[torch.Tensor]:
    """Normal, of many magnitudes, with an outlier, with zeros, tiny."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 70, 84, generator=generator)
    spread = x[1] * torch.exp2(torch.randint(-12, 12, (70, 84), generator=generator).float())
    x[2, 3, 5], x[3, :33], x[3, :, 7] = 3e4, 0.0, 0.0
    return [one.to(dtype) for one in (x[0], spread, x[2], x[3], x[0] * 2.0**-30)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", formats.names())
def test_a_rowwise_plane_has_the_same_values_again(name, dtype) -> None:
    quantizer = hybridq.quantizer(name, columnwise=False)
    for number, x in enumerate(matrices(dtype)):
        values = quantizer(x).dequantize()
        again = quantizer(values).dequantize()
        assert torch.equal(again, values), f"matrix {number}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "fp8", "fp8_block", "mxfp4"])
def test_planes_of_a_master_change_by_a_step_of_the_dtype_at_most(name, dtype) -> None:
    """An FP32 scale of the tensor is no value of a short parameter: then its amax is rounded."""
    generator = torch.Generator().manual_seed(0)
    masters = torch.randn(20, 70, 84, generator=generator) * 0.1
    parameter = hybridq.quantizer(name, columnwise=False)(masters[0].to(dtype))
    steps = []
    for master in masters:
        parameter.quantize_(master)
        values = parameter.dequantize()
        again = parameter.quantize_(values).dequantize()
        steps.append((again.view(torch.int16).int() - values.view(torch.int16).int()).abs().max())
    has_tensor_scale = name in ("nvfp4", "fp8")
    assert max(steps) == (1 if has_tensor_scale else 0)


@pytest.mark.parametrize("recipe", RECIPES)
def test_pairs_have_the_same_values_again_but_for_two_of_the_same_tensor(recipe) -> None:
    with hybridq.quantized_model_init(recipe):
        weight = hybridq.Linear(84, 70, dtype=torch.bfloat16).weight.detach()
    is_same = True
    for x in matrices(torch.bfloat16):
        weight.copy_(x)
        before = weight.clone()
        weight.copy_(before.dequantize())
        for plane, own in zip(
            weight.tensor_storage.planes, before.tensor_storage.planes, strict=True
        ):
            kept = torch.equal(plane.dequantize(torch.float32), own.dequantize(torch.float32))
            assert kept or plane.direction == "columnwise", plane
            is_same = is_same and kept
    assert is_same == (recipe not in FROM_THE_VALUES)
