"""What quantized tensors elsewhere cannot do, one test per row of that list: here it works."""

from __future__ import annotations

import pytest
import torch

import hybridq
from hybridq import QuantizedTensor
from tensor_tools import PAIRS, same_planes


def test_row_05_any_quantizer_makes_what_a_product_gives() -> None:
    a, b = torch.randn(32, 64), torch.randn(48, 64)
    product = hybridq.gemm(hybridq.quantize(a, "mxfp8"), hybridq.quantize(b, "nvfp4"))
    for options in PAIRS.values():
        quantizer = hybridq.quantizer(**options)
        out = quantizer.make_empty((32, 48))
        same_planes(quantizer.quantize(product, out=out), quantizer(product))
    bf16 = hybridq.quantizer("bf16")(product)
    assert isinstance(bf16, hybridq.IdentityTensor)


@pytest.mark.parametrize("fmt", ["fp8_e4m3", "fp8_128x128", "nvfp4", "mxfp8"])
def test_row_07_a_tensor_may_have_the_columnwise_plane_only(fmt) -> None:
    x = torch.randn(64, 48)
    both = hybridq.quantize(x, fmt)
    lone = hybridq.quantize(x, None, columnwise=fmt)
    assert lone.get_usages() == {"rowwise": False, "columnwise": True}
    assert all(
        torch.equal(mine, theirs)
        for mine, theirs in zip(lone.columnwise.tensors, both.columnwise.tensors, strict=True)
    )
    lone.mul_(2.0)
    same_planes(lone, lone.quantizer(both.columnwise.dequantize() * 2.0))


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp8", "fp8_1x128"])
def test_row_08_a_columnwise_plane_alone_dequantizes(fmt) -> None:
    x = torch.randn(37, 50)
    t = hybridq.quantize(x, None, columnwise=fmt)
    assert torch.equal(
        t.dequantize(), hybridq.quantize(x.t(), fmt, columnwise=False).dequantize().t()
    )
    assert torch.equal(t.dequantize_rows([3, 36]), t.dequantize()[[3, 36]])


@pytest.mark.parametrize("kind", sorted(PAIRS))
def test_row_09_and_10_every_pair_is_sharded_plane_by_plane(kind) -> None:
    t = hybridq.quantize(torch.randn(256, 128), **PAIRS[kind])
    shards = t.chunk(2)
    assert all(shard.get_usages() == t.get_usages() for shard in shards)
    same_planes(torch.cat(shards), t)


@pytest.mark.parametrize("rows", [1, 7, 33, 130])
def test_row_11_a_shard_may_have_any_number_of_rows(rows) -> None:
    x = torch.randn(rows, 64)
    for options in PAIRS.values():
        t = hybridq.quantize(x, **options)
        parts = t.chunk(4)
        values = [p.dequantize() if isinstance(p, QuantizedTensor) else p for p in parts]
        assert torch.equal(torch.cat(values), t.dequantize())
        assert t.new_zeros(parts[0].shape).shape == parts[0].shape


def test_row_17_a_gather_of_row_shards_moves_planes_and_not_values() -> None:
    x = torch.randn(128, 64)
    quantizer = hybridq.quantizer("mxfp8", "nvfp4")
    bare = [hybridq.prepare_for_saving(part) for part in map(quantizer, x.chunk(4))]
    moved = [[buffer.clone() for buffer in buffers] for buffers, _ in bare]  # what a wire carries
    shards = [
        hybridq.restore_from_saved(one, b)[0] for (_, one), b in zip(bare, moved, strict=True)
    ]
    whole = torch.cat(shards)
    assert torch.equal(whole.rowwise.data, quantizer(x).rowwise.data)
    assert sum(b.numel() * b.element_size() for one in moved for b in one) < x.numel() * 2


def test_row_21_small_and_strided_buffers_are_copied_like_all_others() -> None:
    """Offloading is a copy of every unique buffer, whatever its size or strides."""
    t = hybridq.quantize(torch.randn(64, 64), "mxfp8", columnwise="nvfp4")[16:48].mT
    assert not all(buffer.is_contiguous() for p in t.tensor_storage.planes for buffer in p.tensors)
    away = t.to("cpu", copy=True)
    same_planes(away, t)
    assert away.nbytes == t.nbytes
    tensors, entries = hybridq.prepare_for_saving(t)
    back = hybridq.restore_from_saved(entries, [tensor.clone() for tensor in tensors])
    same_planes(back[0], t)
    assert len(back) == 1


def test_row_25_values_come_from_the_rowwise_plane_and_an_update_leaves_none_stale() -> None:
    x, y = torch.randn(32, 64), torch.randn(32, 64)
    quantizer = hybridq.quantizer("mxfp8", "nvfp4")
    t = quantizer(x)
    assert torch.equal(t.dequantize(), t.rowwise.dequantize())
    quantizer.with_usage(columnwise=False).update_quantized(y, t)
    same_planes(t, quantizer(y))


def test_row_25_a_derived_plane_is_updated_too() -> None:
    x, y = torch.randn(32, 64), torch.randn(32, 64)
    t = hybridq.quantize(x, "mxfp8_32x32", columnwise=False)
    t.update_usage(columnwise_usage=True)
    t.copy_(y)
    same_planes(t, hybridq.quantize(y, "mxfp8_32x32"))


def test_row_27_and_28_everything_is_on_the_device_of_the_data() -> None:
    x = torch.randn(32, 64)
    for options in PAIRS.values():
        t = hybridq.quantize(x, **options)
        assert t.device == x.device == t.tensor_storage.first.device
        assert t.dequantize().device == x.device
        meta = hybridq.quantizer(**options).make_empty((3, 32), device="meta")
        assert meta.device.type == "meta" == meta.tensor_storage.first.device.type
