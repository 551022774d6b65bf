"""Copies, factories and facts of a quantized parameter, and what sets its data."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import hybridq
from hybridq import PlaneError, QuantizedTensor
from tensor_tools import PAIRS, same_planes


def test_copy_between_everything() -> None:
    x = torch.randn(32, 64)
    kinds = {name: hybridq.quantize(x, **options) for name, options in PAIRS.items()}
    for source in kinds.values():
        for target in kinds.values():
            mine = target.clone()
            mine.copy_(source)
            alike = (
                mine.tensor_storage.flatten()[1] == source.tensor_storage.flatten()[1]
                and mine.quantizer == source.quantizer
            )
            same_planes(mine, source if alike else mine.quantizer(source.dequantize()))
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            plain = torch.empty(32, 64, dtype=dtype).copy_(source)
            assert torch.equal(plain, source.dequantize().to(dtype))
        mine = source.clone()
        mine.copy_(torch.arange(64))  # broadcast, of another dtype
        same_planes(mine, mine.quantizer(torch.arange(64.0).expand(32, 64)))
    with pytest.raises(RuntimeError):
        kinds["uniform"].copy_(torch.zeros(5, 5))


def test_factories_make_plain_tensors_but_two(weight) -> None:
    """`new_zeros` and `empty_like` on another device are quantized; operators never fill such."""
    for made, shape in (
        (weight.new_zeros(7, 32), (7, 32)),
        (weight.new_zeros([0]), (0,)),
        (weight.new_zeros(size=(2, 3, 32), dtype=torch.bfloat16), (2, 3, 32)),
        (torch.empty_like(weight, device="meta"), (48, 64)),
        (torch.empty_like(torch.empty_like(weight, device="meta"), device="cpu"), (48, 64)),
    ):
        assert isinstance(made, QuantizedTensor) and made.shape == shape
        assert made.get_usages() == weight.get_usages() and made.quantizer == weight.quantizer
        if made.device.type != "meta":
            assert not made.dequantize().any()
            made.fill_(1.0)
    assert weight.new_zeros(3, dtype=torch.int64).dtype == torch.int64
    for plain in (
        torch.empty_like(weight),
        weight.new_empty(4, 32),
        torch.ops.aten.new_zeros(weight, [4, 32]),
        torch.zeros_like(weight),
        torch.ones_like(weight),
        torch.full_like(weight, 2.0),
        torch.randn_like(weight),
        weight.new_ones(4),
        weight.new_full((2,), 3.0),
        weight.new_tensor([1.0]),
    ):
        assert type(plain) is torch.Tensor and plain.dtype == torch.float32


def test_as_strided_of_the_same_geometry(weight) -> None:
    same = weight.as_strided(weight.size(), weight.stride())
    assert isinstance(same, QuantizedTensor)
    same_planes(same, weight)
    part = weight.detach()[32:]  # in torch, strides of a view count from the start of the whole
    for one, size, stride, offset in (
        (weight, (2, 2), (1, 1), None),
        (weight, weight.size(), weight.stride(), 64),
        (part, (2, 64), (64, 1), None),
        (weight[:, 1], (24,), (1,), 0),
        (weight.t(), (64, 48), (1, 64), None),
    ):
        with pytest.raises(RuntimeError, match="as_strided: a"):
            one.detach().as_strided(size, stride, offset)


def test_plain_facts(weight) -> None:
    assert weight.numel() == 48 * 64 and weight.stride() == (64, 1) and weight.is_contiguous()
    assert weight.element_size() == 4 and weight.is_floating_point() and weight.ndim == 2
    assert isinstance(weight, nn.Parameter) and isinstance(weight, torch.Tensor)
    assert len({weight, weight}) == 1 and weight in {weight} and {weight: 1}[weight] == 1
    other = weight.detach().clone()
    assert torch.equal(weight, other) and torch.allclose(weight, other)
    assert not torch.equal(weight, other + 1)
    assert (weight == other).all() and weight.isfinite().all()
    assert weight.detach().requires_grad_().requires_grad
    assert weight.tolist() == weight.dequantize().tolist()
    assert weight.detach().numpy().shape == (48, 64)
    assert weight.contiguous() is weight and weight.cpu() is weight
    assert weight.data_ptr() != other.data_ptr() and weight.data_ptr() == weight.data.data_ptr()
    assert not weight.is_shared()
    moved = weight.to("cpu", copy=True)
    same_planes(moved, weight)
    assert moved.data_ptr() != weight.data_ptr()
    for dtype in (torch.float64, torch.int32):
        plain = weight.detach().to(dtype)
        assert type(plain) is torch.Tensor and torch.equal(plain, weight.dequantize().to(dtype))


def test_is_pinned_says_no_without_an_accelerator_and_pin_memory_pins(weight) -> None:
    assert not weight.is_pinned()
    if not torch.cuda.is_available():
        pytest.skip("pin_memory needs an accelerator, and this machine has none")
    pinned = weight.pin_memory()
    assert pinned.is_pinned()
    same_planes(pinned, weight)


def test_the_storage_of_the_wrapper_is_not_readable(weight) -> None:
    with pytest.raises(RuntimeError):
        weight.untyped_storage().data_ptr()
    with pytest.raises(RuntimeError, match="async_save and others that copy that memory"):
        weight.untyped_storage().clone()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed")
def test_a_staged_copy_of_a_state_says_what_to_give(weight) -> None:
    """What `torch.distributed.checkpoint.async_save` does before it writes."""
    stager = pytest.importorskip("torch.distributed.checkpoint._state_dict_stager")
    layer = hybridq.Linear(*reversed(weight.shape), bias=False)
    layer.weight = torch.nn.Parameter(weight.detach(), requires_grad=False)
    with pytest.raises(RuntimeError, match=r"give them hybridq\.dequantized_state_dict\(model\)"):
        stager.StateDictStager().stage(layer.state_dict())
    plain = hybridq.dequantized_state_dict(layer)
    staged = stager.StateDictStager().stage(plain)
    assert torch.equal(staged["weight"], weight.dequantize())


def test_dlpack_gives_the_decoded_values(weight) -> None:
    t, want = weight.detach(), weight.dequantize().detach()
    made = torch.from_dlpack(t)
    assert type(made) is torch.Tensor and torch.equal(made, want)
    assert torch.equal(torch.utils.dlpack.from_dlpack(t), want)
    assert (np.from_dlpack(t) == want.numpy()).all()
    assert t.__dlpack_device__() == want.__dlpack_device__()
    part, cut = t[:, 2:9], want[:, 2:9]
    assert torch.equal(torch.from_dlpack(part), cut)
    assert (np.from_dlpack(part) == cut.numpy()).all()
    for one in (t, part):
        with pytest.raises(BufferError, match="copy"):
            torch.from_dlpack(one, copy=False)
    with pytest.raises(BufferError, match="require gradient"):
        torch.from_dlpack(weight)


def test_what_reads_memory_itself_is_refused(weight) -> None:
    for one in (weight.detach(), weight.detach()[:, 2:9]):
        with pytest.raises(RuntimeError, match="data pointer"):
            torch.utils.dlpack.to_dlpack(one)
    assert not hasattr(weight, "__cuda_array_interface__")


def test_meta_device(weight) -> None:
    meta = weight.to("meta")
    assert isinstance(meta, QuantizedTensor) and meta.device.type == "meta"
    model = nn.Linear(64, 48, bias=False, device="meta")
    model.weight = nn.Parameter(meta)
    model.to_empty(device="cpu")
    assert isinstance(model.weight, QuantizedTensor) and model.weight.device.type == "cpu"
    model.load_state_dict({"weight": weight})
    same_planes(model.weight, weight)


def test_setting_data(weight) -> None:
    alias = weight.detach()
    before = weight.clone().detach()
    values = torch.randn(48, 64)
    weight.data = values  # plain: quantized by its quantizer, into new memory
    assert isinstance(weight, QuantizedTensor) and isinstance(weight, nn.Parameter)
    same_planes(weight, weight.quantizer(values))
    same_planes(alias, before)
    weight.data = before  # quantized: its planes, shared
    same_planes(weight, before)
    assert weight.data_ptr() == before.data_ptr() and weight.requires_grad
    other = hybridq.quantize(torch.randn(5, 32).bfloat16(), "nvfp4", columnwise=False)
    weight.data = other  # of any kind, shape and dtype
    assert type(weight) is hybridq.NVFP4Tensor and weight.shape == (5, 32)
    assert weight.dtype == torch.bfloat16
    same_planes(weight, other)
    weight.data.zero_()
    assert not weight.dequantize().any() and not other.dequantize().any()


def test_setting_data_refuses() -> None:
    t = hybridq.quantize(torch.randn(8, 32), "mxfp8")
    with pytest.raises(ValueError, match="quantize it first"):
        t.data = torch.zeros(8, 31)
    lone = QuantizedTensor.make(t.tensor_storage, t.shape, t.dtype)
    with pytest.raises(PlaneError, match="no quantizer"):
        lone.data = torch.zeros(8, 32)
    with pytest.raises(ValueError, match=r"weight\.quantizer\.quantize\(value\)"):
        t.data = torch.ones(9, 32)
    t.data = t.quantizer.quantize(torch.ones(9, 32))  # as it says
    assert torch.equal(t.dequantize(), torch.ones(9, 32))
