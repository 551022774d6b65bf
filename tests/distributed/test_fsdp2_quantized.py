"""FSDP2 with quantized parameters, bit for bit: see `fsdp2_quantized_program.py`."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import hybridq
from hybridq.distributed import QuantizedWeight, prepare_fsdp2
from hybridq.distributed.agreement.fingerprint import Fingerprint
from rank_runs import needs_gloo, run

PROGRAM = "fsdp2_quantized_program.py"


@needs_gloo
@pytest.mark.parametrize(
    ("world", "what"),
    [
        (2, "matrix=some"),
        pytest.param(2, "matrix", marks=pytest.mark.slow),
        pytest.param(4, "matrix", marks=pytest.mark.slow),
    ],
)
def test_every_recipe_and_alignment(world, what, tmp_path) -> None:
    run(world, tmp_path / "store", what, program=PROGRAM)


@needs_gloo
def test_optimizers_policies_memory_and_checkpoints(tmp_path) -> None:
    names = ("optimizers", "policies", "first_inference", "wire", "state", "refused")
    run(2, tmp_path / "store", *names, program=PROGRAM)


@needs_gloo
def test_states_saved_aside_and_ignored_parameters(tmp_path) -> None:
    run(2, tmp_path / "store", f"saved_aside={tmp_path}", "ignored", program=PROGRAM)


@needs_gloo
@pytest.mark.parametrize("names", ["recipes", "modules", "other_recipes traffic experts"])
def test_frozen_bases_of_adapters(names, tmp_path) -> None:
    run(2, tmp_path / "store", *names.split(), program="fsdp2_frozen_program.py")


@needs_gloo
@pytest.mark.slow
def test_frozen_bases_of_adapters_on_four_ranks_and_compiled(tmp_path) -> None:
    run(2, tmp_path / "two", "compiled", program="fsdp2_frozen_program.py")
    run(4, tmp_path / "four", "recipes", "modules", program="fsdp2_frozen_program.py")


@needs_gloo
@pytest.mark.more
def test_two_dimensional_mesh(tmp_path) -> None:
    run(4, tmp_path / "store", "hsdp", program=PROGRAM)


def prepared(recipe: str = "mxfp8_fwd_nvfp4_bwd") -> tuple[nn.Parameter, nn.Parameter]:
    """A prepared parameter and the one that it was made of."""
    with hybridq.quantized_model_init(recipe):
        layer = hybridq.Linear(64, 48)
    other = copy.deepcopy(layer)
    assert prepare_fsdp2(prepare_fsdp2(layer)) is layer
    return layer.weight, other.weight


def test_reads_see_the_decoded_values() -> None:
    weight, other = prepared()
    assert type(weight) is QuantizedWeight and isinstance(weight, nn.Parameter)
    values = other.dequantize().detach()
    assert torch.equal(weight.detach() + 0, values) and torch.equal(weight.dequantize(), values)
    assert torch.equal(torch.zeros(48, 64).copy_(weight.detach()), values)
    assert torch.equal(weight.detach()[3:9] * 2, values[3:9] * 2)
    copied = weight.detach().clone()
    assert type(copied) is torch.Tensor and torch.equal(copied, values)
    assert type(torch.empty_like(weight)) is type(weight.dequantize()[0]) is torch.Tensor
    with pytest.raises(RuntimeError, match="decoded"):
        weight.detach()[:, 3].zero_()  # a copy: the write would be lost
    assert weight.detach().tolist() == values.tolist()
    assert (weight.detach().numpy() == values.numpy()).all()
    with torch.inference_mode():
        assert type(weight.narrow(0, 0, 48)) is QuantizedWeight
    assert type(torch.zeros_like(weight)) is torch.Tensor and not torch.zeros_like(weight).any()
    assert weight.detach().to(torch.float16).dtype == torch.float16
    assert torch.equal(weight.detach().double(), values.double())
    assert torch.equal(weight.view(-1).view(48, 64).dequantize(), values)
    assert "QuantizedWeight(shape=(48, 64)" in repr(weight)


@needs_gloo
def test_shards_that_nobody_prepared_are_refused() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with hybridq.quantized_model_init("mxfp8"):
            model = nn.Sequential(hybridq.Linear(64, 48))
        fully_shard(model)
        with pytest.raises(RuntimeError, match=r"parameter \[48, 64\] must be prepared"):
            model(torch.randn(4, 64))
    finally:
        dist.destroy_process_group()


def test_what_is_refused() -> None:
    weight, _ = prepared()
    with torch.no_grad(), pytest.raises(RuntimeError, match="cannot be written before fully_shard"):
        weight.mul_(2)
    with torch.no_grad(), pytest.raises(ValueError, match=r"shape \(48, 64\), got \(3, 64\)"):
        weight.quantize_(torch.ones(3, 64))
    other = nn.Linear(64, 48)
    other.weight = nn.Parameter(hybridq.quantize(other.weight.detach(), "mxfp8"))
    with pytest.raises(NotImplementedError, match=r"m.weight \[48, 64\] is quantized, and only"):
        prepare_fsdp2(nn.ModuleDict({"m": other}))

    def factory(role: hybridq.QuantizerRole) -> hybridq.Quantizer:
        return hybridq.NVFP4Quantizer(stochastic_rounding=role.tensor_type == "weight")

    with hybridq.quantized_model_init(hybridq.CustomRecipe(factory)):
        stochastic = hybridq.Linear(64, 48)
    with pytest.raises(
        NotImplementedError, match=r"\[48, 64\] cannot be held.*stochastic rounding"
    ):
        prepare_fsdp2(nn.ModuleDict({"m": stochastic}))


def test_ranks_compare_what_parameters_are_held_as() -> None:
    """Before and after `prepare_fsdp2`; another rank may have made its model otherwise."""
    found = []
    for recipe in ("mxfp8", "nvfp4"):
        with hybridq.quantized_model_init(recipe):
            model = nn.Sequential(hybridq.Linear(64, 32))
        before = Fingerprint.of(model, None, (2,))
        prepare_fsdp2(model)
        found.append((before, Fingerprint.of(model, None, (2,))))
    for one, other in zip(*found, strict=True):
        number = one.first_difference(other)
        texts = one.line(number)[1], other.line(number)[1]
        assert "0.weight [32, 64] torch.float32" in texts[0]
        assert "mxfp8" in texts[0] and "nvfp4" in texts[1], texts
