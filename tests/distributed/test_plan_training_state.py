"""A whole training state, counted tensor by tensor, beside what `hybridq.distributed.plan` says."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hybridq
from hybridq.distributed import Sharding, plan

TOKENS = 64


def transformer() -> nn.Module:
    torch.manual_seed(0)
    options = {"params_dtype": torch.bfloat16, "normalization": "RMSNorm", "activation": "swiglu"}
    return nn.ModuleList(hybridq.TransformerLayer(128, 320, 4, **options) for _ in range(2))


@pytest.mark.parametrize("moments", ["fp32", "bf16", "fp8_block"])
@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_parameters_gradients_and_optimizer_are_the_plans(recipe, quantized, moments) -> None:
    planned = plan(
        transformer(),
        recipe,
        Sharding(1, "ddp", param_dtype=None),
        masters=True,
        quantized_params=quantized,
        moments=moments,
        tokens=TOKENS,
    )
    with hybridq.quantized_model_init(recipe, enabled=quantized):
        model = transformer()
    optimizer = hybridq.optim.AdamW(model.parameters(), moments=moments)

    def forward() -> torch.Tensor:
        y = torch.randn(TOKENS, 1, 128, dtype=torch.bfloat16, requires_grad=True)
        with hybridq.autocast(recipe=recipe):
            for layer in model:
                y = layer(y)
        return y.sum()

    forward().backward()
    optimizer.step()
    report = hybridq.memory_report(model, forward, optimizer=optimizer)
    want = {one.what: one.nbytes for one in planned.memory}
    assert report.nbytes("parameters") == want["parameters"]
    assert report.nbytes("gradients") == want["gradients"]
    assert report.nbytes("optimizer") == want["optimizer"]
    # Planes that linears save: inputs', and weights' that are quantized in each forward. Beside
    # them norms, activations and attention save values in high precision, FP32 statistics, seeds.
    saved = report.by_dtype("saved").get(torch.uint8, 0)
    planes = want["inputs saved by linears"] + want.get("weights kept for the backward", 0)
    assert 0.85 * planes < saved <= planes


def test_short_moments_belong_to_our_optimizer() -> None:
    with pytest.raises(ValueError, match="plan: moments must be"):
        plan(transformer(), "mxfp8", Sharding(1), moments="fp8")
    with pytest.raises(ValueError, match="short moments are those of"):
        plan(transformer(), "mxfp8", Sharding(1), moments="bf16")
    with pytest.raises(ValueError, match="got moments='bf16' with sgd"):
        plan(transformer(), "mxfp8", Sharding(1), moments="bf16", optimizer="sgd", masters=True)
