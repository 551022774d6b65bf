"""Quantizers and tensors of the door: changed, copied, compared, read and made of buffers."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch

import hybridq
import hybridq.te as te

E4M3, E5M2 = te.DType.kFloat8E4M3, te.DType.kFloat8E5M2

#: Each class with the arguments of Transformer Engine, and what hybridq makes.
MADE = {
    "fp8": (
        lambda: te.Float8CurrentScalingQuantizer(E5M2, "cpu", force_pow_2_scales=True),
        lambda: hybridq.Float8CurrentScalingQuantizer("e5m2", force_pow_2_scales=True),
    ),
    "block 1D": (
        lambda: te.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True, block_scaling_dim=1),
        lambda: hybridq.Float8BlockQuantizer("e4m3", block_scaling_dim=1),
    ),
    "block 2D": (
        lambda: te.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True),
        lambda: hybridq.Float8BlockQuantizer("e4m3"),
    ),
    "mxfp8": (lambda: te.MXFP8Quantizer(E4M3), lambda: hybridq.MXFP8Quantizer("e4m3")),
    "mxfp8 2D": (
        lambda: te.MXFP8Quantizer(E4M3, with_2d_quantization=True),
        lambda: hybridq.MXFP8Quantizer("e4m3", with_2d_quantization=True),
    ),
    "nvfp4": (te.NVFP4Quantizer, hybridq.NVFP4Quantizer),
    "nvfp4 rht": (
        lambda: te.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True),
        lambda: hybridq.NVFP4Quantizer(with_rht=True),
    ),
    "nvfp4 2D": (
        lambda: te.NVFP4Quantizer(with_2d_quantization=True),
        lambda: hybridq.NVFP4Quantizer(with_2d_quantization=True),
    ),
    "nvfp4 rows": (
        lambda: te.NVFP4Quantizer(row_scaled_nvfp4=True),
        lambda: hybridq.NVFP4Quantizer(row_scaled_nvfp4=True),
    ),
    "identity": (te.IdentityQuantizer, hybridq.IdentityQuantizer),
    "hybrid": (
        lambda: te.HybridQuantizer(
            rowwise_quantizer=te.MXFP8Quantizer(E4M3),
            columnwise_quantizer=te.NVFP4Quantizer(),
            columnwise_source="rowwise_dequantized",
        ),
        lambda: hybridq.HybridQuantizer(
            rowwise_quantizer=hybridq.MXFP8Quantizer("e4m3"),
            columnwise_quantizer=hybridq.NVFP4Quantizer(),
            columnwise_source="rowwise_dequantized",
        ),
    ),
}


def values(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    ours, others = a.tensor_storage.flatten()[0], b.tensor_storage.flatten()[0]
    return len(ours) == len(others) and all(map(torch.equal, ours, others))


@pytest.mark.parametrize("kind", MADE)
def test_tensors_are_those_of_hybridqs_quantizer(kind: str) -> None:
    own, plain = (make() for make in MADE[kind])
    assert own.frozen == plain
    x = values(48, 80)
    made = own(x)
    assert equal(made, plain(x)) and made.quantizer == plain
    again = te.quantizer_of(plain)
    assert type(again) is type(own) and again.frozen == plain
    assert type(made._quantizer) is type(own) and made._quantizer.frozen == plain
    empty = own.make_empty((48, 80), dtype=torch.bfloat16)
    assert type(empty) is type(made) and empty.dtype == torch.bfloat16
    own.update_quantized(x, own.make_empty((48, 80)), noop_flag=torch.ones(1))
    target = own.make_empty((48, 80))
    assert not equal(own.update_quantized(x, target, noop_flag=torch.ones(1)), made)
    assert equal(own.update_quantized(x, target, noop_flag=torch.zeros(1)), made)
    assert equal(own.multi_quantize([x])[0], made)


@pytest.mark.parametrize("kind", MADE)
def test_quantizers_change_and_copies_are_apart(kind: str) -> None:
    own = MADE[kind][0]()
    other = own.copy()
    other.optimize_for_gemm = True
    own.set_usage(columnwise=False)
    assert own.get_usages() == {"rowwise": True, "columnwise": False}
    assert other.get_usages() == {"rowwise": True, "columnwise": True}
    assert own(values(32, 32)).columnwise is None
    assert other(values(32, 32)).columnwise is not None
    assert copy.deepcopy(own).frozen == own.frozen == pickle.loads(pickle.dumps(own)).frozen


def test_values_are_compared_by_content() -> None:
    one, other = te.MXFP8Quantizer(E4M3), te.MXFP8Quantizer(E4M3)
    assert one == other and hash(one) == hash(other)
    other.dtype = E5M2
    assert one != other and te.IdentityQuantizer() != te.IdentityQuantizer()


def test_a_hybrid_owns_its_two() -> None:
    row, col = te.Float8CurrentScalingQuantizer(E4M3, "cpu"), te.NVFP4Quantizer()
    made = te.HybridQuantizer(rowwise_quantizer=row, columnwise_quantizer=col)
    assert row.get_usages() == {"rowwise": True, "columnwise": False}
    assert col.get_usages() == {"rowwise": False, "columnwise": True}
    apart = made.copy()
    assert apart.rowwise_quantizer is not row
    row.dtype = E5M2
    assert made(values(8, 32))._rowwise_storage._fp8_dtype == E5M2
    assert apart(values(8, 32))._rowwise_storage._fp8_dtype == E4M3
    made.with_amax_reduction = True
    assert row.with_amax_reduction and col.with_amax_reduction and not apart.with_amax_reduction
    col.with_amax_reduction = False
    with pytest.raises(ValueError, match="with_amax_reduction must be one for both"):
        _ = made.with_amax_reduction
    with pytest.raises(ValueError, match="requires distinct rowwise and columnwise"):
        te.HybridQuantizer(rowwise_quantizer=row, columnwise_quantizer=row)
    with pytest.raises(ValueError, match="columnwise_source"):
        te.HybridQuantizer(
            rowwise_quantizer=row, columnwise_quantizer=col, columnwise_source="dequantized"
        )
    with pytest.raises(TypeError, match="two quantizers of te, got str"):
        te.HybridQuantizer(rowwise_quantizer="mxfp8", columnwise_quantizer=col)


def test_the_callers_scale_and_amax() -> None:
    scale, amax = torch.full((1,), 32.0), torch.zeros(1)
    own = te.Float8Quantizer(scale, amax, E4M3)
    x = values(16, 32)
    made = own(x)
    assert float(amax) == float(x.abs().max())
    assert torch.equal(made._scale_inv, 1.0 / scale)
    want = (x * 32.0).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    assert torch.equal(made._data.view(torch.float8_e4m3fn).float(), want.float())
    assert made._quantizer.scale is scale
    own.calibrate(4.0 * x)
    assert float(amax) == float(4.0 * x.abs().max())


def test_a_quantizer_of_ones_own() -> None:
    class Counting(te.IdentityQuantizer):
        calls = 0

        def quantize_impl(self, tensor: torch.Tensor) -> torch.Tensor:
            type(self).calls += 1
            return super().quantize_impl(tensor)

    own = Counting()
    assert torch.equal(own(values(4, 8)).dequantize(), values(4, 8)) and Counting.calls == 1


def test_numbers_of_dtypes() -> None:
    assert te.DType.cast(7) is E4M3 is te.DType.cast("e4m3") is te.DType.cast(torch.float8_e4m3fn)
    assert te.TE_DType[torch.bfloat16] == 6 and te.DType.cast("e2m1") == 10
    assert te.TE_DType_To_Torch[E5M2] is torch.float8_e5m2
    with pytest.raises(ValueError, match="dtype of codes"):
        te.MXFP8Quantizer(te.DType.kByte)(values(4, 32))


@pytest.mark.parametrize(
    ("cls", "names"),
    [
        ("Float8Quantizer", "scale amax fp8_dtype rowwise columnwise"),
        (
            "Float8CurrentScalingQuantizer",
            "fp8_dtype device rowwise columnwise use_existing_amax with_amax_reduction "
            "amax_reduction_group force_pow_2_scales amax_epsilon scale amax",
        ),
        (
            "Float8BlockQuantizer",
            "fp8_dtype rowwise columnwise amax_epsilon force_pow_2_scales block_scaling_dim",
        ),
        ("MXFP8Quantizer", "fp8_dtype rowwise columnwise with_2d_quantization"),
        (
            "NVFP4Quantizer",
            "fp4_dtype rowwise columnwise with_amax_reduction amax_reduction_group with_rht "
            "with_post_rht_amax with_2d_quantization stochastic_rounding row_scaled_nvfp4 "
            "nvfp4_use_4over6 nvfp4_e4m3_max nvfp4_4over6_err_mode with_random_sign_mask",
        ),
        ("HybridQuantizer", "rowwise_quantizer columnwise_quantizer columnwise_source"),
        ("IdentityQuantizer", "dtype rowwise columnwise"),
    ],
)
def test_arguments_of_quantizers(cls: str, names: str) -> None:
    assert list(inspect.signature(getattr(te, cls)).parameters) == names.split()


# ---- tensors

KINDS = {
    "fp8": te.Float8Tensor,
    "block 1D": te.Float8BlockwiseQTensor,
    "block 2D": te.Float8BlockwiseQTensor,
    "mxfp8": te.MXFP8Tensor,
    "mxfp8 2D": te.MXFP8Tensor,
    "nvfp4": te.NVFP4Tensor,
    "nvfp4 rht": te.NVFP4Tensor,
    "nvfp4 2D": te.NVFP4Tensor,
    "nvfp4 rows": te.NVFP4Tensor,
    "identity": te.IdentityTensor,
    "hybrid": te.HybridQuantizedTensor,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(160, 288), (2, 48, 64), (3, 40)])
def test_tensors_are_made_of_the_buffers_they_show(kind: str, shape: tuple[int, ...]) -> None:
    made = MADE[kind][0]()(values(*shape))
    cls = KINDS[kind]
    assert isinstance(made, cls) and isinstance(made, te.QuantizedTensor)
    others = [one for one in KINDS.values() if one is not cls]
    assert not any(isinstance(made, one) for one in others)
    again = cls(made.shape, made.dtype, **made.get_metadata())
    assert type(again) is type(made) and equal(again, made)
    assert again.quantizer == made.quantizer
    with torch.no_grad():
        again.copy_(2.0 * values(*shape))
    assert torch.equal(again.dequantize(), MADE[kind][0]()(2.0 * values(*shape)).dequantize())


def up(n: int, to: int) -> int:
    return -(-n // to) * to


def test_scales_lie_as_transformer_engine_pads_them() -> None:
    """Shapes: its `get_scale_shape`, read off its source and listed in this project's notes."""
    m, k = 160, 288
    x = values(m, k)
    one = MADE["block 1D"][0]()(x)
    assert one._rowwise_scale_inv.shape == (3, m) and one._columnwise_scale_inv.shape == (2, k)
    two = MADE["block 2D"][0]()(x)
    assert two._rowwise_scale_inv.shape == (2, 4) and two._columnwise_scale_inv.shape == (3, 4)
    mx = MADE["mxfp8"][0]()(x)
    assert mx._rowwise_scale_inv.shape == (up(m, 128), up(k // 32, 4))
    assert mx._columnwise_scale_inv.shape == (up(m // 32, 4), up(k, 128))
    assert mx.get_metadata()["columnwise_data"].shape == (m, k)
    nv = MADE["nvfp4 2D"][0]()(x)
    assert nv._rowwise_scale_inv.shape == (up(m, 128), up(k // 16, 4))
    assert nv._columnwise_scale_inv.shape == (up(k, 128), up(m // 16, 4))
    assert nv.get_metadata()["columnwise_data"].shape == (k, m // 2)


def test_padded_scales_decode_the_codes() -> None:
    """Each value is its code times the scale that Transformer Engine's layout has for it."""
    m, k = 64, 96
    x = values(m, k)
    made = MADE["mxfp8"][0]()(x).get_metadata()
    codes = made["rowwise_data"].view(torch.float8_e4m3fn).float()
    scale = 2.0 ** (made["rowwise_scale_inv"][:m, : k // 32].float() - 127.0)
    rowwise = codes * scale.repeat_interleave(32, 1)
    assert torch.equal(rowwise, hybridq.quantize(x, "mxfp8").dequantize())
    codes = made["columnwise_data"].view(torch.float8_e4m3fn).float()
    scale = 2.0 ** (made["columnwise_scale_inv"][: m // 32, :k].float() - 127.0)
    columnwise = codes * scale.repeat_interleave(32, 0)
    assert torch.equal(columnwise, hybridq.quantize(x.t().contiguous(), "mxfp8").dequantize().t())


def test_sides_of_a_hybrid_are_tensors() -> None:
    made = MADE["hybrid"][0]()(values(32, 64))
    row, col = made.rowwise_sub_storage, made.columnwise_sub_storage
    assert isinstance(row, te.MXFP8TensorStorage) and isinstance(col, te.NVFP4TensorStorage)
    assert torch.equal(row.dequantize(), made.dequantize()) and col.get_usages()["columnwise"]
    assert row.get_data_tensors()[1] is None
    assert row.get_data_tensors(True, False).data_ptr() == made.rowwise.data.data_ptr()
    made.update_usage(rowwise_usage=False)
    assert made.rowwise_sub_storage is None
    with pytest.raises(TypeError, match="requires a parent HybridQuantizer"):
        te.HybridQuantizedTensor((1, 1), torch.bfloat16, rowwise_storage=None)


def test_buffers_that_do_not_fit_are_refused() -> None:
    made = MADE["mxfp8"][0]()(values(32, 64)).get_metadata()
    with pytest.raises(ValueError, match=r"data of a rowwise plane .* 4096 values .* got"):
        te.MXFP8Tensor((64, 64), torch.float32, **made)
    with pytest.raises(ValueError, match="needs its scale, got None"):
        te.MXFP8Tensor((32, 64), torch.float32, **{**made, "rowwise_scale_inv": None})
    with pytest.raises(ValueError, match="needs the data"):
        te.MXFP8Tensor((32, 64), torch.float32)
    with pytest.raises(TypeError, match=r"unknown arguments, got .'data'."):
        te.MXFP8Tensor((32, 64), torch.float32, data=None, **made)
    with pytest.raises(ValueError, match="'shape' must be no attribute"):
        hybridq.tensor.add_readouts({"shape": property(lambda self: None)})


def test_the_quantizer_of_a_tensor_is_replaced() -> None:
    made = te.MXFP8Quantizer(E4M3)(values(32, 64))
    other = te.MXFP8Quantizer(E4M3, columnwise=False)
    made.update_quantizer(other)
    assert made.quantizer == other.frozen
    made.quantizer = None
    with pytest.raises(RuntimeError, match="must have a quantizer"):
        made.update_quantizer(other)


def test_internal_tensors_are_storages() -> None:
    own = te.MXFP8Quantizer(E4M3)
    own.internal = True
    made = own(values(4, 32))
    assert isinstance(made, te.MXFP8TensorStorage) and not isinstance(made, te.MXFP8Tensor)
    assert isinstance(made, te.QuantizedTensorStorage)
    own.internal = False
    assert isinstance(own(values(4, 32)), te.MXFP8Tensor)
    assert issubclass(te.MXFP8Tensor, te.MXFP8Tensor)
    assert not issubclass(te.MXFP8Tensor, te.NVFP4Tensor)


def test_what_quantizers_say_of_themselves() -> None:
    fp8, nvfp4 = te.Float8CurrentScalingQuantizer(E4M3), te.NVFP4Quantizer()
    assert fp8.supports_only_rowwise_all_gather() and not nvfp4.supports_only_rowwise_all_gather()
    hybrid = MADE["hybrid"][0]()
    assert hybrid.supports_only_rowwise_all_gather()
    assert not hybrid.allows_save_original_input_for_backward()
    assert fp8.allows_save_original_input_for_backward() and fp8.is_quantizable(values(3, 5))
    assert fp8.is_requantization_safe() and hybrid.is_requantization_safe()
    assert not te.NVFP4Quantizer(stochastic_rounding=True).is_requantization_safe()
    kinds = [one._get_compatible_recipe().__name__ for one in (fp8, nvfp4, hybrid)]
    assert kinds == ["Float8CurrentScaling", "NVFP4BlockScaling", "CustomRecipe"]


def test_identity_has_the_dtype_of_its_quantizer() -> None:
    own = te.IdentityQuantizer(dtype=torch.bfloat16)
    x = torch.randn(4, 8)
    made = own(x)
    assert made.dtype == made.dequantize().dtype == torch.bfloat16
    assert torch.equal(made.dequantize(), x.to(torch.bfloat16))
    assert own.make_empty((2, 4), dtype=torch.float32).dtype == torch.bfloat16
    assert te.IdentityQuantizer().make_empty((2, 4), dtype=torch.float16).dtype == torch.float16


def test_masters_of_one_rank_may_be_parts_and_weights_lie_anywhere() -> None:
    from hybridq.te.pytorch.tensor.utils import (
        cast_master_weights_to_fp8,
        post_all_gather_processing,
        quantize_master_weights,
    )

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        group = torch.distributed.group.WORLD
        for quantizer in (te.MXFP8Quantizer(E4M3), te.NVFP4Quantizer(), te.IdentityQuantizer()):
            weight = quantizer(torch.zeros(32, 64, dtype=torch.bfloat16))
            master = torch.randn(32, 64)
            quantize_master_weights([weight], [master.view(-1)], [0], group)
            post_all_gather_processing([weight])
            assert torch.equal(weight.dequantize(), quantizer(master.bfloat16()).dequantize())
            # The older name, as Megatron-Core calls it.
            given = {"manual_post_all_gather_processing": True}
            cast_master_weights_to_fp8([weight], [2 * master.view(-1)], [0], group, **given)
            twice = quantizer(2 * master.bfloat16()).dequantize()
            assert torch.equal(weight.dequantize(), twice)
            before = weight.dequantize()
            quantize_master_weights([weight, weight], [master.view(-1)[9:], None], [9, None], group)
            wanted = torch.cat([before.view(-1)[:9], master.bfloat16().view(-1)[9:]])
            wanted = quantizer(wanted.view(32, 64)).dequantize()
            assert torch.equal(weight.dequantize(), wanted)
        weight.clear()
        with pytest.raises(ValueError, match=r"a weight \[32, 64\] must have a plane"):
            quantize_master_weights([weight], [master.view(-1)], [0], group)
        with pytest.raises(NotImplementedError, match="fsdp_shard_model_weights must be None"):
            quantize_master_weights([weight], [master], [0], group, [None])
    finally:
        torch.distributed.destroy_process_group()


def test_tensors_say_what_their_nvfp4_quantizer_was() -> None:
    for options in (
        {},
        {"row_scaled_nvfp4": True, "columnwise": False},
        {"nvfp4_use_4over6": True, "nvfp4_e4m3_max": 256},
    ):
        quantizer = te.NVFP4Quantizer(**options)
        made = quantizer(values(32, 64))
        assert made._row_scaled_nvfp4 is quantizer.row_scaled_nvfp4
        assert made._nvfp4_use_4over6 is quantizer.nvfp4_use_4over6
        assert made._nvfp4_e4m3_max == quantizer.nvfp4_e4m3_max
    assert not hasattr(te.MXFP8Quantizer(E4M3)(values(32, 32)), "_row_scaled_nvfp4")
