"""`general_gemm`, and codes that are moved to other memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hybridq.te.pytorch.cpp_extensions.gemm import general_gemm
from hybridq.te.pytorch.tensor.utils import replace_raw_data

import hybridq.te as te

E4M3 = te.DType.kFloat8E4M3
QUANTIZERS = {
    "plain": lambda x: x,
    "mxfp8": te.MXFP8Quantizer(E4M3),
    "hybrid": te.HybridQuantizer(
        rowwise_quantizer=te.Float8CurrentScalingQuantizer(E4M3),
        columnwise_quantizer=te.NVFP4Quantizer(),
    ),
}


def side(tensor: Any, name: str) -> torch.Tensor:
    """What a product reads of an operand, in FP64."""
    if not isinstance(tensor, te.QuantizedTensor):
        return tensor.double()
    return getattr(tensor, f"{name}_sub_storage").dequantize().double()


@pytest.mark.parametrize("a", sorted(QUANTIZERS))
@pytest.mark.parametrize("b", sorted(QUANTIZERS))
def test_each_layout_reads_the_planes_of_its_contraction(a: str, b: str) -> None:
    weight, x = QUANTIZERS[a](torch.randn(48, 64)), QUANTIZERS[b](torch.randn(3, 16, 64))
    dy = QUANTIZERS[b](torch.randn(32, 48))
    rows = x.reshape(48, 64) if b == "plain" else QUANTIZERS[b](x.dequantize().view(48, 64))
    bias = torch.randn(48)
    y, nothing, *rest = general_gemm(weight, x, bias=bias)
    wanted = side(x, "rowwise").view(48, 64) @ side(weight, "rowwise").T + bias
    assert y.shape == (3, 16, 48) and nothing is None and rest == [None, None]
    torch.testing.assert_close(y.view(48, 48).double(), wanted, rtol=1e-5, atol=1e-4)
    dx = general_gemm(weight, dy, layout="NN", grad=True)[0]
    wanted = side(dy, "rowwise") @ side(weight, "columnwise")
    torch.testing.assert_close(dx.double(), wanted, rtol=1e-5, atol=1e-4)
    inp = QUANTIZERS[a](torch.randn(32, 64))
    out = torch.ones(48, 64)
    own, sums, *_ = general_gemm(
        inp, dy, layout="NT", grad=True, bias=bias, out=out, accumulate=True
    )
    wanted = side(dy, "columnwise").T @ side(inp, "columnwise") + 1
    assert own is out
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-4)
    values = dy if b == "plain" else dy.dequantize()
    torch.testing.assert_close(sums, values.sum(0), rtol=1e-5, atol=1e-5)
    assert general_gemm(weight, rows, torch.bfloat16)[0].dtype == torch.bfloat16


def test_results_may_be_quantized_and_what_is_not_there_raises() -> None:
    weight, x = torch.randn(32, 64), torch.randn(32, 64)
    quantizer = te.MXFP8Quantizer(E4M3)
    made = general_gemm(weight, x, quantization_params=quantizer)[0]
    assert torch.equal(made.dequantize(), quantizer(x @ weight.T).dequantize())
    for given in ({"gelu": True}, {"alpha": 2.0}, {"bulk_overlap": True}, {"ub": 1}):
        with pytest.raises(NotImplementedError, match=f"{next(iter(given))} must be"):
            general_gemm(weight, x, **given)
    with pytest.raises(ValueError, match="layout must be TN, NN or NT, got 'TT'"):
        general_gemm(weight, x, layout="TT")


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
def test_a_router_of_megatron_core_calls_it_with_no_gelu_as_none(out_dtype: Any) -> None:
    """Its three products of BF16 operands, in FP32 or not, against FP64."""
    others: dict[str, Any] = dict.fromkeys(
        ("quantization_params", "gelu", "gelu_in", "out", "ub", "ub_type", "extra_output")
    )
    others |= {"accumulate": False, "use_split_accumulator": False, "bulk_overlap": False}
    weight, x = torch.randn(4, 64).bfloat16(), torch.randn(8, 64).bfloat16()
    bias, dy = torch.randn(4).bfloat16(), torch.randn(8, 4)
    y = general_gemm(weight, x, out_dtype=out_dtype, layout="TN", bias=bias, **others)[0]
    dx = general_gemm(weight, dy, out_dtype=out_dtype, layout="NN", grad=True, **others)[0]
    dw = general_gemm(x, dy, out_dtype=out_dtype, layout="NT", grad=True, **others)[0]
    w64, x64, dy64 = weight.double(), x.double(), dy.double()
    for got, wanted in (
        (y, x64 @ w64.T + bias.double()),
        (dx, dy64 @ w64),
        (dw, dy64.T @ x64),
    ):
        assert got.dtype == out_dtype
        tight = 1e-5 if out_dtype == torch.float32 else 1e-2
        torch.testing.assert_close(got.double(), wanted, rtol=tight, atol=8 * tight)


@pytest.mark.parametrize("name", ["mxfp8", "hybrid", "identity"])
def test_codes_move_and_values_stay(name: str) -> None:
    quantizer = {**QUANTIZERS, "identity": te.IdentityQuantizer()}[name]
    tensor = quantizer(torch.randn(32, 64))
    values, columnwise = tensor.dequantize(), tensor.columnwise.dequantize()
    memory = torch.empty(2 * 32 * 64, dtype=tensor.rowwise.data.dtype)
    place = memory[2048:]
    replace_raw_data(tensor, place)
    assert tensor.rowwise.data.data_ptr() == place.data_ptr()
    assert torch.equal(tensor.dequantize(), values)
    assert torch.equal(tensor.columnwise.dequantize(), columnwise)
    tensor.quantize_(torch.zeros(32, 64))
    assert not place.any()
    with pytest.raises(ValueError, match="replace_raw_data: new_raw_data must be contiguous"):
        replace_raw_data(tensor, memory)
