"""What nn.Module, checkpoints and FSDP2 call on a quantized parameter."""

from __future__ import annotations

import copy
import io
import warnings
import weakref

import pytest
import torch
from torch import nn

import hybridq
from hybridq import QuantizedTensor
from hybridq.tensor import DecodedPart
from tensor_tools import PAIRS, quantized_linear, same_planes


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("swap", [False, True])
def test_state_dict_round_trip(assign, swap) -> None:
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        source, target = quantized_linear(), quantized_linear()
        file = io.BytesIO()
        torch.save(source.state_dict(), file)
        file.seek(0)
        target.load_state_dict(torch.load(file, weights_only=True), assign=assign)
        same_planes(target.weight, source.weight)
        assert isinstance(target.weight, nn.Parameter) and target.weight.requires_grad
        plain = nn.Linear(64, 48)
        target = quantized_linear()
        target.load_state_dict(plain.state_dict(), assign=assign)
        if assign:
            assert type(target.weight) is nn.Parameter
        else:
            same_planes(target.weight, target.weight.quantizer(plain.weight.detach()))
        plain.load_state_dict(source.state_dict(), assign=assign)
        if assign:
            same_planes(plain.weight, source.weight)
        else:
            assert torch.equal(hybridq_values(plain.weight), source.weight.dequantize())
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def hybridq_values(t: torch.Tensor) -> torch.Tensor:
    return t.dequantize() if isinstance(t, QuantizedTensor) else t


def test_module_conversions() -> None:
    model = quantized_linear()
    planes, values = model.weight.detach().clone(), model.weight.dequantize().detach()
    model.weight.grad = torch.ones(48, 64)
    model.to(torch.bfloat16)
    same_planes(model.weight, planes)
    assert model.weight.dtype == torch.bfloat16 == model.weight.grad.dtype == model.bias.dtype
    for convert, dtype in ((model.half, torch.float16), (model.float, torch.float32)):
        convert()
        assert isinstance(model.weight, QuantizedTensor) and model.weight.dtype == dtype
        assert isinstance(model.weight, nn.Parameter)
        x = torch.randn(2, 64, dtype=dtype)
        assert model(x).dtype == dtype
    if torch.equal(values.half().float(), values):  # else half rounded, and was quantized again
        same_planes(model.weight, planes)
    model.cpu()
    same_planes(model.to("cpu").weight, model.weight)
    twin = copy.deepcopy(model)
    same_planes(twin.weight, model.weight)
    assert twin.weight.data_ptr() != model.weight.data_ptr()
    assert torch.equal(twin.weight.grad, model.weight.grad)


@pytest.mark.parametrize("switch", ["swap", "overwrite"])
@pytest.mark.parametrize("options", PAIRS.values(), ids=PAIRS)
def test_conversions_that_replace_parameters_keep_them_quantized(switch, options) -> None:
    """As without torch's switches, to the bit; a dtype that planes cannot have changes nothing."""

    def made(factor: float) -> nn.Linear:
        torch.manual_seed(3)
        model = nn.Linear(64, 48)
        weight = model.weight.detach() * factor
        model.weight = nn.Parameter(hybridq.quantize(weight, **options))
        model.weight.grad = torch.ones(48, 64)
        return model

    set_switch = getattr(torch.__future__, f"set_{switch}_module_params_on_conversion")
    for name in ("half", "bfloat16", "float"):
        for factor in (1.0, 1e-6):  # FP16 rounds the second: such values are quantized again
            want, got = made(factor), made(factor)
            getattr(want, name)()
            set_switch(True)
            try:
                getattr(got, name)()
                assert not isinstance(got.weight.half(), QuantizedTensor)  # no conversion of it
                with pytest.raises(TypeError, match="may be float32, bfloat16 or float16, got"):
                    got.double()
            finally:
                set_switch(False)
            same_planes(got.weight, want.weight)
            assert isinstance(got.weight, nn.Parameter) and got.weight.dtype == want.weight.dtype
            assert got.weight.grad.dtype == want.weight.grad.dtype


@pytest.mark.parametrize("swaps", [False, True])
@pytest.mark.parametrize(
    "move",
    [
        lambda model: model.cpu(),
        lambda model: model.to("meta"),
        lambda model: model.to("meta").to_empty(device="cpu"),
        lambda model: model.to_empty(device="cpu"),
        lambda model: model.bfloat16(),
        lambda model: model.share_memory(),
    ],
)
def test_what_a_caller_wrote_to_a_parameter_stays_on_it(swaps, move) -> None:
    """As on a plain parameter, which such methods only give other data; marks of Megatron's."""
    model = quantized_linear()
    weight = model.weight
    weight.tensor_model_parallel, weight.main_grad = True, torch.zeros(weight.shape)
    main_grad = weight.main_grad
    torch.__future__.set_swap_module_params_on_conversion(swaps)
    try:
        move(model)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert model.weight is weight and type(weight) is type(quantized_linear().weight)
    assert weight.tensor_model_parallel and weight.main_grad is main_grad
    assert not hasattr(weight.detach(), "main_grad")  # a tensor of its own


def test_a_model_is_saved_and_loaded_whole() -> None:
    model = quantized_linear()
    model.weight.tag = "kept"
    twin = copy.deepcopy(model)
    assert twin.weight.tag == "kept" and isinstance(twin.weight, nn.Parameter)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    same_planes(loaded.weight, model.weight)
    assert isinstance(loaded.weight, nn.Parameter) and len(list(loaded.parameters())) == 2


def test_swap_tensors() -> None:
    a = nn.Parameter(hybridq.quantize(torch.randn(8, 32), "mxfp8"))
    b = nn.Parameter(hybridq.quantize(torch.randn(4, 64), "nvfp4", columnwise=False))
    one, two = a.detach().clone(), b.detach().clone()
    torch.utils.swap_tensors(a, b)
    same_planes(a, two)
    same_planes(b, one)
    assert type(a) is hybridq.NVFP4Tensor and a.shape == (4, 64)
    plain = nn.Parameter(torch.ones(2))
    torch.utils.swap_tensors(a, plain)
    assert type(a) is nn.Parameter and isinstance(plain, QuantizedTensor)


def test_parametrizations_and_functional_call() -> None:
    model = quantized_linear()
    x = torch.randn(2, 64)
    other = hybridq.quantize(torch.randn(48, 64), "mxfp8")
    got = torch.func.functional_call(model, {"weight": other}, (x,))
    assert torch.equal(got, nn.functional.linear(x, other, model.bias))
    vector = nn.utils.parameters_to_vector(model.parameters())
    assert vector.shape == (48 * 64 + 48,)
    nn.utils.vector_to_parameters(torch.zeros_like(vector), model.parameters())
    assert isinstance(model.weight, QuantizedTensor) and not model.weight.dequantize().any()


def test_distributed_checkpoint_round_trip(tmp_path) -> None:
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    source, target = quantized_linear(), quantized_linear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": source.state_dict()}, checkpoint_id=tmp_path / "c", no_dist=True)
        state = {"model": target.state_dict()}
        dcp.load(state, checkpoint_id=tmp_path / "c", no_dist=True)
    target.load_state_dict(state["model"])
    same_planes(target.weight, source.weight)


def test_the_calls_of_fsdp2_on_a_parameter() -> None:
    """What FSDPParam._init_sharded_param does, for every rank of four and of three."""
    x = torch.randn(128, 64)
    for options in PAIRS.values():
        for ranks in (4, 3):
            param = nn.Parameter(hybridq.quantize(x, **options))
            with torch.no_grad():
                chunks = list(torch.chunk(param, ranks, dim=0))
                for shard in chunks:
                    padded = param.new_zeros(chunks[0].size())
                    window = padded.narrow(0, 0, shard.size(0))
                    if isinstance(window, DecodedPart):
                        with pytest.raises(RuntimeError, match="would not reach the tensor"):
                            window.copy_(shard)
                        continue
                    window.copy_(shard)
                    flat = padded.cpu().view(-1)
                    local = padded.narrow(0, 0, shard.size(0))
                    assert flat.numel() == padded.numel() and local.is_contiguous()
                    assert isinstance(padded, QuantizedTensor)
                    if ranks == 4 and isinstance(shard, QuantizedTensor):
                        assert isinstance(local, QuantizedTensor)
                        same_planes(local, shard)
                assert chunks[0].new_empty(0).numel() == 0


def converted_linear() -> hybridq.Linear:
    with hybridq.quantized_model_init("mxfp8"):
        return hybridq.Linear(64, 48)


MOVES = {
    "to": lambda m: m.to("cpu"),
    "dtype": lambda m: m.to(torch.float32),
    "float": lambda m: m.float(),
    "cpu": lambda m: m.cpu(),
}


@pytest.mark.parametrize("move", MOVES)
def test_a_move_that_changes_nothing_leaves_a_quantized_parameter_as_it_is(move: str) -> None:
    """As a plain one: between forward and backward, and with a weak reference to it."""
    layer, x = converted_linear(), torch.randn(4, 64)
    weight, found = layer.weight, []
    for moves in (False, True):
        layer.zero_grad()
        with hybridq.autocast(recipe="mxfp8"):
            loss = layer(x).square().sum()
        if moves:
            reference = weakref.ref(weight)
            assert MOVES[move](layer) is layer
            assert reference() is layer.weight
        loss.backward()
        found.append(weight.grad)
    assert layer.weight is weight and torch.equal(*found)


def test_a_move_that_changes_something_still_does() -> None:
    layer = converted_linear()
    values = layer.weight.detach().dequantize()
    assert layer.bfloat16().weight.dtype == torch.bfloat16
    assert torch.equal(layer.weight.detach().dequantize(), values.bfloat16())
    assert layer.to("meta").weight.device.type == "meta"
    shared = converted_linear().share_memory()
    assert shared.weight.rowwise.data.is_shared()
