"""Models on the meta device, whose modules get memory where their initial values are set."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import hybridq
import hybridq.te as te
from hybridq.te import ops
from hybridq.te.module import TransformerEngineBaseModule

MAKE: dict[str, Any] = {
    "Linear": lambda **o: te.Linear(64, 32, **o),
    "LayerNormLinear": lambda **o: te.LayerNormLinear(64, 32, **o),
    "LayerNormMLP": lambda **o: te.LayerNormMLP(64, 96, activation="swiglu", **o),
    "GroupedLinear": lambda **o: te.GroupedLinear(2, 64, 32, **o),
    "LayerNorm": lambda **o: te.LayerNorm(64, zero_centered_gamma=True, **o),
    "RMSNorm": lambda **o: te.RMSNorm(64, **o),
    "TransformerLayer": lambda **o: te.TransformerLayer(
        64, 96, 4, qk_norm_type="RMSNorm", output_layernorm=True, **o
    ),
    "ops.Linear": lambda **o: ops.Linear(64, 32, **o),
    "ops.GroupedLinear": lambda **o: ops.GroupedLinear(2, 64, 32, **o),
    "ops.LayerNorm": lambda **o: ops.LayerNorm(64, **o),
    "ops.RMSNorm": lambda **o: ops.RMSNorm(64, **o),
    "ops.Bias": lambda **o: ops.Bias(64, **o),
}


def reset(model: torch.nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


@pytest.mark.parametrize("kind", MAKE)
def test_reset_parameters_gives_memory_and_the_values_of_a_seed(kind: str) -> None:
    model = MAKE[kind](device="meta")
    assert all(one.is_meta for one in model.parameters())
    for module in model.modules() if "ops" not in kind else ():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters(defer_init=True)
    assert all(one.is_meta for one in model.parameters())
    with torch.device("meta"):  # which is torch's default device then
        reset(model)
    assert all(one.is_meta for one in model.parameters())
    torch.manual_seed(0)
    reset(model)
    other = MAKE[kind]()
    torch.manual_seed(0)
    reset(other)
    for (name, own), wanted in zip(model.named_parameters(), other.parameters(), strict=True):
        assert own.device.type == "cpu" and own.requires_grad, name
        assert torch.equal(own, wanted), name


@pytest.mark.parametrize("recipe", ["MXFP8BlockScaling", "NVFP4BlockScaling", "DelayedScaling"])
def test_weights_are_quantized_as_they_get_memory(recipe: str) -> None:
    own = getattr(te.common.recipe, recipe)()
    with te.quantized_model_init(recipe=own, preserve_high_precision_init_val=True):
        model = te.LayerNormMLP(64, 96, device="meta")
    model.reset_parameters()
    for weight in (model.fc1_weight, model.fc2_weight):
        values = weight.get_high_precision_init_val()
        assert values.std().item() == pytest.approx(0.023, rel=0.1)
        assert torch.equal(weight.dequantize(), weight._quantizer(values).dequantize())


def test_norms_are_those_of_hybridq_with_their_signature() -> None:
    for own, theirs in ((te.LayerNorm, hybridq.nn.LayerNorm), (te.RMSNorm, hybridq.nn.RMSNorm)):
        assert issubclass(own, theirs)
        assert inspect.signature(own) == inspect.signature(theirs)
    model = torch.nn.Sequential(te.LayerNorm(64), te.Linear(64, 32))
    fused = hybridq.nn.FusedSequential(*model)
    x = torch.randn(4, 64)
    with te.autocast(recipe=te.common.recipe.MXFP8BlockScaling()):
        assert torch.equal(fused(x), model(x))


def test_a_model_is_sharded_first_and_filled_after() -> None:
    """Transformer Engine's example of FSDP2, in own words, and one line more: the preparation."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with te.quantized_model_init(preserve_high_precision_init_val=True):
            options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "device": "meta"}
            layers = [te.TransformerLayer(64, 96, 4, **options) for _ in range(2)]
        model = hybridq.distributed.prepare_fsdp2(torch.nn.Sequential(*layers))
        mesh = DeviceMesh("cpu", [0])
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        for module in model.modules():
            if isinstance(module, TransformerEngineBaseModule):
                module.reset_parameters()
        optimizer = te.optimizers.FusedAdam(model.parameters(), lr=1e-3, master_weights=True)
        masters = 0
        for parameter in model.parameters():
            optimizer.initialize_state(parameter, store_param_remainders=False)
            local = parameter.to_local()
            assert local.device.type == "cpu"
            if hasattr(type(local), "quantize_"):  # the master is what was quantized
                own = optimizer.get_unscaled_state(parameter, "master_param").to_local()
                quantizer = te.MXFP8Quantizer(te.DType.kFloat8E4M3)
                assert torch.equal(quantizer(own).dequantize(), local.dequantize())
                assert not torch.equal(own, local.dequantize())
                masters += 1
        assert masters == 8
        x, losses = torch.randn(8, 2, 64), []
        for _ in range(3):
            optimizer.zero_grad(set_to_none=True)
            with te.autocast():
                loss = (model(x) - 1).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[2] < losses[1] < losses[0]
    finally:
        dist.destroy_process_group()


MARKS = "tensor_model_parallel partition_dim partition_stride sequence_parallel"
MARKED: dict[str, Any] = {
    "column": lambda **o: te.Linear(64, 32, parallel_mode="column", tp_size=2, **o),
    "row": lambda **o: te.Linear(64, 32, parallel_mode="row", tp_size=2, **o),
    "LayerNormLinear": lambda **o: te.LayerNormLinear(
        64, 32, parallel_mode="column", tp_size=2, **o
    ),
    "LayerNormMLP": lambda **o: te.LayerNormMLP(64, 96, set_parallel_mode=True, tp_size=2, **o),
    "RMSNorm": lambda **o: te.RMSNorm(64, **o),
    "TransformerLayer": lambda **o: te.TransformerLayer(
        64, 96, 4, set_parallel_mode=True, tp_size=2, output_layernorm=True, **o
    ),
}


@pytest.mark.parametrize("empties", [False, True])
@pytest.mark.parametrize("name", MARKED)
def test_parameters_that_are_parts_say_so_after_they_got_memory(name: str, empties: bool) -> None:
    """Megatron-Core counts a part's norm on every rank, and sums what saw a rank's own tokens."""

    def seen(model: torch.nn.Module) -> dict[str, Any]:
        return {
            key: {mark: getattr(one, mark, None) for mark in MARKS.split()}
            for key, one in model.named_parameters()
        }

    want = seen(MARKED[name](sequence_parallel=True))
    model = MARKED[name](sequence_parallel=True, device="meta")
    if empties:
        model.to_empty(device="cpu")
    reset(model)
    assert seen(model) == want
    assert any(one["tensor_model_parallel"] or one["sequence_parallel"] for one in want.values())
