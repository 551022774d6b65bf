"""What `hybridq.te` calls a hybrid, also where both formats are one, and what is read off it."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

import hybridq.te as te
from hybridq.te.common import recipe

E4M3 = te.DType.kFloat8E4M3


def fp8() -> te.Float8CurrentScalingQuantizer:
    return te.Float8CurrentScalingQuantizer(E4M3)


def hybrid(row: Any, col: Any, **options: Any) -> te.HybridQuantizer:
    return te.HybridQuantizer(rowwise_quantizer=row, columnwise_quantizer=col, **options)


def test_a_hybrid_of_one_format_is_a_hybrid_and_has_the_formats_bits() -> None:
    x = torch.randn(64, 32)
    quantizer = hybrid(fp8(), fp8())
    made, plain = quantizer(x), fp8()(x)
    buffer = io.BytesIO()
    torch.save(made, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    for one in (made, made.clone(), made.detach(), made.split(32)[1], made.view(8, 8, 32), loaded):
        assert isinstance(one, te.HybridQuantizedTensor) and isinstance(one, te.QuantizedTensor)
        assert not isinstance(one, te.Float8Tensor)
        assert isinstance(one._quantizer, te.HybridQuantizer)
    assert not isinstance(plain, te.HybridQuantizedTensor) and isinstance(plain, te.Float8Tensor)
    assert torch.equal(loaded.dequantize(), plain.dequantize())
    assert torch.equal(made._rowwise_storage._data, plain._data)
    assert torch.equal(made._columnwise_storage._transpose, plain._transpose)
    copy = te.HybridQuantizedTensor.make_like(made)
    assert copy is not made and isinstance(copy, te.HybridQuantizedTensor)
    assert torch.equal(copy.dequantize(), plain.dequantize())


@pytest.mark.parametrize("usage", [(True, False), (False, True)])
def test_a_hybrid_with_one_plane_is_a_hybrid(usage: tuple[bool, bool]) -> None:
    quantizer = hybrid(fp8(), te.MXFP8Quantizer(E4M3))
    quantizer.set_usage(rowwise=usage[0], columnwise=usage[1])
    made = quantizer(torch.randn(64, 32))
    assert isinstance(made, te.HybridQuantizedTensor)
    sides = (made.rowwise_sub_storage, made.columnwise_sub_storage)
    assert tuple(one is not None for one in sides) == usage
    [side] = [one for one in sides if one is not None]
    assert isinstance(side, (te.Float8Tensor, te.MXFP8Tensor)[usage[1]])
    assert not isinstance(side, te.HybridQuantizedTensor)


def test_parameters_of_a_hybrid_of_one_format_train_with_the_formats_bits() -> None:
    def factory(role: Any) -> Any:
        if role is not None and role.tensor_type == "grad_output":
            return te.Float8CurrentScalingQuantizer(te.DType.kFloat8E5M2)
        return hybrid(fp8(), fp8())

    found = []
    for one in (recipe.CustomRecipe(qfactory=factory), recipe.Float8CurrentScaling()):
        torch.manual_seed(3)
        with te.quantized_model_init(recipe=one):
            layer = te.Linear(32, 48, params_dtype=torch.bfloat16)
        assert isinstance(layer.weight, te.HybridQuantizedTensor) is (not found)
        x = torch.randn(16, 32, dtype=torch.bfloat16, requires_grad=True)
        optimizer = te.optimizers.FusedAdam(layer.parameters(), lr=0.1, master_weights=True)
        with te.autocast(recipe=one):
            y = layer(x)
        y.square().mean().backward()
        optimizer.step()
        found.append((y, x.grad, layer.bias.grad, layer.weight.dequantize()))
    for of_pair, of_format in zip(*found, strict=True):
        assert torch.equal(of_pair, of_format)


def test_the_tensors_of_a_hybrid_are_objects_and_share_its_buffers() -> None:
    made = hybrid(fp8(), te.NVFP4Quantizer())(torch.randn(32, 64))
    row, col = made.rowwise_sub_storage, made.columnwise_sub_storage
    assert made._rowwise_storage is row and made.columnwise_sub_storage is col
    both = (*row.get_data_tensors(), *col.get_data_tensors())
    assert len(made.get_data_tensors()) == len(both) == 4
    assert all(one is other for one, other in zip(made.get_data_tensors(), both, strict=True))
    assert made.detach()._rowwise_storage._data is row._data
    assert row._transpose_invalid and not fp8()(torch.ones(4, 4))._transpose_invalid
    made.update_usage(columnwise_usage=False)
    assert made.columnwise_sub_storage is None and made._rowwise_storage is row


def test_storages_of_columnwise_buffers_know_their_shape() -> None:
    x = torch.randn(3, 64, 32)
    one: Any
    for one in (fp8(), te.MXFP8Quantizer(E4M3), te.NVFP4Quantizer(rowwise=False)):
        one.set_usage(rowwise=False, columnwise=True)
        made = one(x)
        kind = getattr(te, f"{type(made).__name__}Storage")
        again = kind(**made.get_metadata(), fake_dtype=torch.bfloat16)
        assert (again.shape, again.dtype) == (x.shape, torch.bfloat16)
        assert torch.equal(again.dequantize(dtype=torch.float32), made.dequantize())
    made = hybrid(fp8(), te.MXFP8Quantizer(E4M3))(x)
    again = te.HybridQuantizedTensorStorage(**made.get_metadata())
    assert (again.shape, again.dtype) == (x.shape, x.dtype)
    assert torch.equal(again.dequantize(), made.dequantize())
    for kind in (te.HybridQuantizedTensor, te.HybridQuantizedTensorStorage):
        with pytest.raises(TypeError, match="requires a parent HybridQuantizer, got none"):
            kind(rowwise_storage=None, columnwise_storage=None, quantizer=None)
