"""Experts of transformers whose weights are frozen: one plane, and nothing of it is saved."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hybridq
from hybridq.recipes import get

pytest.importorskip("transformers")


def test_frozen_experts_have_the_bits_of_a_decoded_source() -> None:
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    sizes = MixtralConfig(hidden_size=64, intermediate_size=96, num_local_experts=3)
    sizes._experts_implementation = "grouped_mm"

    def made(frozen: bool) -> nn.Module:
        torch.manual_seed(0)
        model = nn.ModuleDict({"experts": MixtralExperts(sizes)}).bfloat16()
        with torch.no_grad():
            for one in model.parameters():
                # Rows of values too far apart for E4M3: what rounds to zero differs by direction.
                one.normal_(std=0.2).mul_(torch.logspace(-6, 6, one.shape[-1]))
        with hybridq.quantized_model_init("mxfp8", enabled=frozen, frozen=frozen):
            return hybridq.convert(model).requires_grad_(False)["experts"]

    x = torch.randn(40, 64).bfloat16()
    index, weights = torch.randint(0, 3, (40, 2)), torch.rand(40, 2).bfloat16()

    def run(experts: nn.Module, recipe: object) -> tuple[list[torch.Tensor], int]:
        own, saved = x.clone().requires_grad_(), []
        with (
            torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
            hybridq.autocast(recipe=recipe),
        ):
            y = experts(own, index, weights)
        y.float().square().sum().backward()
        return [y.detach(), own.grad], sum(t.nbytes for t in saved if t.dtype == torch.uint8)

    frozen = made(True)
    assert frozen.gate_up_proj.columnwise is None and not frozen.gate_up_proj.requires_grad
    mine, saved = run(frozen, "mxfp8")
    assert saved == 0
    recipe = get("mxfp8").with_choices(columnwise_source="rowwise_dequantized")
    assert all(map(torch.equal, mine, run(made(False), recipe)[0]))
    original = run(made(False), "mxfp8")[0]
    assert torch.equal(mine[0], original[0]) and not torch.equal(mine[1], original[1])
