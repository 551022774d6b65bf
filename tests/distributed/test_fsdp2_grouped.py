"""FSDP2 of GroupedLinear, bit for bit: see `fsdp2_grouped_program.py` for what each rank runs."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

import hybridq
from hybridq.distributed import GatheredWeight, QuantizedWeight, Shards, prepare_fsdp2
from hybridq.distributed.parameters import Ranks, StackedGatherCall
from hybridq.estimate.parameter_sizes import parameter_sizes
from hybridq.formats import PlaneSpec
from hybridq.recipes import bind, get
from hybridq.shards import UniformShards
from hybridq.tensor.stack import QuantizedStack
from rank_runs import needs_gloo, run

PROGRAM = "fsdp2_grouped_program.py"


@needs_gloo
def test_recipes_and_alignments(tmp_path) -> None:
    names = ("matrix=uneven", "wire", "encoded_once", "transforms")
    run(2, tmp_path / "store", *names, program=PROGRAM)


@needs_gloo
def test_quantized_parameters_and_ranks_that_differ(tmp_path) -> None:
    names = ("quantized=cut", "quantized_stacks=uneven", "unlike_ranks")
    run(2, tmp_path / "store", *names, program=PROGRAM)


@needs_gloo
@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_more_quantized_stacks(world, tmp_path) -> None:
    """Four ranks share five matrices: one of them has none."""
    names = ("quantized_stacks", "more_quantized_stacks") if world == 2 else ()
    names = names or ("quantized_stacks=uneven", "more_quantized_stacks")
    run(world, tmp_path / "store", *names, program=PROGRAM)


@needs_gloo
@pytest.mark.slow
def test_sizes_policies_and_checkpoints(tmp_path) -> None:
    names = ("matrix", "quantized", "sizes_and_groups", "policies", "state", "more_recipes")
    run(2, tmp_path / "store", *names, program=PROGRAM, timeout=900)


@needs_gloo
@pytest.mark.slow
def test_four_ranks(tmp_path) -> None:
    names = ("matrix", "quantized", "hsdp", "sizes_and_groups", "state", "transforms")
    run(4, tmp_path / "store", *names, program=PROGRAM, timeout=1200)


# ---- without other processes


def test_what_is_prepared() -> None:
    for single, count in ((False, 3), (True, 1)):
        layer = hybridq.GroupedLinear(3, 64, 32, single_grouped_weight=single)
        before = {name: one.clone() for name, one in layer.state_dict().items()}
        assert prepare_fsdp2(prepare_fsdp2(layer)) is layer
        kinds = [type(one) for one in layer.parameters()]
        assert kinds.count(GatheredWeight) == count and kinds.count(nn.Parameter) == 3
        state = layer.state_dict()
        assert all(type(one) is torch.Tensor for one in state.values())
        assert all(torch.equal(before[name], one) for name, one in state.items())
        # For everything but FSDP2 they are the tensors that they hold.
        x = torch.randn(8, 64)
        with hybridq.autocast(recipe="mxfp8"):
            layer(x, [3, 0, 5]).sum().backward()
        assert all(one.grad is not None for one in layer.parameters())
    with hybridq.quantized_model_init("mxfp8"):
        layer = prepare_fsdp2(hybridq.GroupedLinear(3, 64, 32))
    assert [type(one) for one in layer.parameters()].count(QuantizedWeight) == 3
    with hybridq.quantized_model_init("mxfp8"):
        layer = hybridq.GroupedLinear(3, 64, 32, single_grouped_weight=True)
    planes = layer.weight.tensor_storage
    values = layer.weight.dequantize().detach()
    layer = prepare_fsdp2(layer)
    assert type(layer.weight) is QuantizedWeight
    assert torch.equal(layer.weight.dequantize(), values)
    assert all(a is b for a, b in zip(layer.weight.held.planes, planes.planes, strict=True))
    empty = prepare_fsdp2(hybridq.GroupedLinear(3, 0, 32, single_grouped_weight=True))
    assert type(empty.weight) is nn.Parameter


def test_a_rank_sends_the_planes_of_its_own_matrices() -> None:
    """Each matrix's planes, byte for byte those of the matrix alone; five of them on two ranks."""
    torch.manual_seed(0)
    x = torch.randn(5, 36, 40).bfloat16()
    x[1] *= 1000  # an amax that the others must not see
    for recipe in ("mxfp8", "nvfp4", "fp8_current", "mxfp8_fwd_nvfp4_bwd"):
        slot = bind(get(recipe), "", "grouped_linear").weight
        slots = (slot, slot, None, slot, slot)
        call = StackedGatherCall(slots, Ranks(None, 0, 2), x.shape, x.dtype, None, None, "forward")
        assert not call.is_even and call.shards == Shards((3, 2), 36 * 40)
        plan = call.plan(True, True, "")
        parts = x.split(3)
        payloads = torch.stack([plan.pack(part, rank) for rank, part in enumerate(parts)])
        assert payloads.shape == (2, plan.payload)
        found = [p.unpack(own) for p, own in zip(plan.parts, plan.split(payloads), strict=True)]
        with hybridq.quantized_model_init(recipe):
            alone = hybridq.Linear(40, 36, bias=False, dtype=torch.bfloat16)
        for number, storage in enumerate(found):
            if number == 2:
                assert torch.equal(storage.first.data, x[2])
                continue
            with torch.no_grad():
                alone.weight.copy_(x[number])
            for plane in alone.weight.tensor_storage.planes:
                mine = storage.plane(plane.direction)
                assert mine.spec == plane.spec
                for name, buffer in plane.buffers.items():
                    assert torch.equal(mine.buffers[name], buffer), (recipe, number, name)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("world", [2, 3, 4, 7])
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "fp8_current", "nvfp4_1d_weight"])
def test_matrices_that_are_encoded_alike_travel_buffer_by_buffer(recipe, world, transposed) -> None:
    """Five of them: the bytes of each alone, in memory of the size that plans of runs count."""
    torch.manual_seed(0)
    x = torch.randn(5, 36, 40).bfloat16()
    slot = bind(get(recipe), "", "grouped_linear").weight
    specs = (PlaneSpec.parse(one.spec) for one in (slot.row, slot.col))
    quantizer = hybridq.Quantizer(*specs, slot.col_source)
    given = (x.shape, x.dtype, None, None, "forward")
    call = StackedGatherCall((slot,) * 5, Ranks(None, 0, world), *given, is_transposed=transposed)
    for wanted in ((True, False), (False, True)):
        plan = call.plan(*wanted, "")
        assert isinstance(plan, UniformShards) and plan.num_amaxes == 0 and not plan.reduced
        counts = list(call.shards.sizes)
        payloads = torch.stack([plan.pack(x.split(counts)[r], r) for r in range(world)])
        assert payloads.shape == (world, plan.payload)
        storage = plan.unpack(payloads)
        held = sum(plane.data.untyped_storage().nbytes() for plane in storage.planes)
        assert held == plan.held_nbytes
        sizes = parameter_sizes(x.shape, x.dtype, world, x.dtype, (slot,) * 5, True)
        if not transposed:
            assert sizes.planes(True)[wanted[1]] >= held  # and what is derived of it
        matrix = x.mT if transposed else x
        for number, (planes, own) in enumerate(zip(plan.each(payloads), matrix, strict=True)):
            alone = quantizer.quantize(own.contiguous()).tensor_storage
            for plane in planes:
                for name, buffer in alone.plane(plane.direction).buffers.items():
                    assert torch.equal(plane.buffers[name], buffer), (number, name)


def stack() -> tuple[QuantizedStack, list[torch.Tensor]]:
    """Three matrices of different formats, and what they decode to."""
    torch.manual_seed(0)
    made = [hybridq.quantize(torch.randn(20, 36), one) for one in ("mxfp8", "nvfp4", "fp8_e4m3")]
    storages = [one.tensor_storage for one in made]
    return QuantizedStack.make(storages, torch.float32), [one.dequantize() for one in made]


def test_a_stack_reads_as_its_decoded_values() -> None:
    weight, matrices = stack()
    whole = torch.stack(matrices)
    assert weight.shape == (3, 20, 36) and weight.dtype == torch.float32
    assert torch.equal(weight + 0, whole) and torch.equal(weight[:2], whole[:2])
    assert torch.equal(whole + weight, whole * 2)
    for made in (weight.detach(), weight.to(torch.bfloat16), weight.view(3, 20, 36)):
        assert torch.equal(made.float() if made.dtype != torch.float32 else made + 0, whole)
    for index in (0, 1, 2, -1):
        assert weight[index].tensor_storage is weight.storages[index]
        assert torch.equal(weight[index].dequantize(), matrices[index])
    with pytest.raises(IndexError):
        weight[3]
    assert [one.tensor_storage for one in weight.unbind()] == list(weight.storages)
    assert "QuantizedStack(shape=(3, 20, 36)" in repr(weight)
    file = io.BytesIO()
    torch.save(weight, file)
    file.seek(0)
    assert torch.equal(torch.load(file), whole)


def test_a_stack_cannot_be_written_or_compiled() -> None:
    weight, _ = stack()
    with pytest.raises(RuntimeError, match=r"stack of quantized matrices cannot be written"):
        weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"leave hybridq.distributed.prepare_fsdp2 out"):
        weight.__tensor_flatten__()


def test_gradients_of_a_stack_are_those_of_plain_weights() -> None:
    """The module takes the planes of each group, with quantizers of its own for each."""

    def factory(role: hybridq.QuantizerRole) -> hybridq.Quantizer:
        names = ("mxfp8", "nvfp4", "fp8_e4m3")
        return hybridq.quantizer(names[int(role.name.rpartition(".")[2])])

    layer = hybridq.GroupedLinear(3, 36, 20, single_grouped_weight=True, name="m")
    twin = copy.deepcopy(layer)
    quantizers = [hybridq.quantizer(one) for one in ("mxfp8", "nvfp4", "fp8_e4m3")]
    storages = [
        quantizer.quantize(matrix.detach()).tensor_storage
        for quantizer, matrix in zip(quantizers, layer.weight, strict=True)
    ]
    layer.weight = nn.Parameter(QuantizedStack.make(storages, torch.float32))
    x = torch.randn(11, 36)
    outcomes = []
    for one in (layer, twin):
        own = x.clone().requires_grad_()
        with hybridq.autocast(recipe=hybridq.CustomRecipe(factory)):
            y = one(own, [4, 0, 7])
        y.square().sum().backward()
        outcomes.append((y.detach(), own.grad, one.weight.grad, one.bias0.grad))
    assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))
