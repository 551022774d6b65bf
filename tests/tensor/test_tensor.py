"""QuantizedTensor: a torch.Tensor made of planes. Values are held to the planes, bit for bit."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

import hybridq
from hybridq import PlaneError, QuantizedTensor
from hybridq.tensor import DecodedPart
from tensor_tools import PAIRS, same_planes, sharing


@pytest.fixture(params=sorted(PAIRS))
def pair(request) -> QuantizedTensor:
    """A [6, 5, 50] tensor of each kind of pair."""
    return hybridq.quantize(torch.randn(6, 5, 50), **PAIRS[request.param])


@pytest.fixture(params=sorted(PAIRS))
def matrix(request) -> QuantizedTensor:
    """A [30, 50] tensor of each kind of pair."""
    return hybridq.quantize(torch.randn(30, 50), **PAIRS[request.param])


def test_it_is_a_tensor_of_its_nominal_dtype(pair: QuantizedTensor) -> None:
    assert isinstance(pair, torch.Tensor) and isinstance(pair, QuantizedTensor)
    assert pair.shape == (6, 5, 50) and pair.dtype == torch.float32 and pair.device.type == "cpu"
    plain = pair.dequantize()
    assert type(plain) is torch.Tensor and plain.shape == pair.shape
    plane = pair.rowwise or pair.columnwise
    assert torch.equal(plain, plane.dequantize(torch.float32).reshape(6, 5, 50))


def test_marker_classes() -> None:
    x = torch.randn(4, 40)
    for name, kind in (
        ("fp8_e5m2", hybridq.Float8Tensor),
        ("fp8_1x128", hybridq.Float8BlockwiseQTensor),
        ("mxfp8_32x32", hybridq.MXFP8Tensor),
        ("nvfp4", hybridq.NVFP4Tensor),
        ("identity", hybridq.IdentityTensor),
    ):
        assert type(hybridq.quantize(x, name)) is kind
    assert type(hybridq.quantize(x, "mxfp8", columnwise="nvfp4")) is hybridq.HybridQuantizedTensor
    # Two planes of one format, one of them transformed, are not a hybrid.
    assert type(hybridq.quantize(x, "nvfp4", hadamard=True)) is hybridq.NVFP4Tensor


@pytest.mark.parametrize("shape", [(), (7,), (0, 8), (8, 0), (2, 0, 3), (1, 1), (3, 1), (2, 3, 33)])
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "fp8_e4m3", "fp8_128x128", "identity"])
def test_any_shape(shape: tuple[int, ...], name: str) -> None:
    x = torch.randn(shape)
    t = hybridq.quantize(x, name)
    assert t.shape == shape and t.dequantize().shape == shape
    worst = {"nvfp4": 0.4, "identity": 0.0}.get(name, 0.07)
    if x.numel():
        assert (t.dequantize() - x).abs().max() <= worst * x.abs().max()


def test_repr_shows_both_planes(pair: QuantizedTensor) -> None:
    text = repr(pair)
    assert "rowwise=" in text and "columnwise=" in text and type(pair).__name__ in text
    assert "(6, 5, 50)" in text


def test_detach_and_clone(pair: QuantizedTensor) -> None:
    detached = pair.detach()
    first = pair.tensor_storage.first.data
    assert detached.tensor_storage.first.data.data_ptr() == first.data_ptr()
    clone = pair.clone()
    same_planes(clone, pair)
    assert clone.tensor_storage.first.data.data_ptr() != first.data_ptr()
    assert sharing(clone) == sharing(pair) and clone.nbytes == pair.nbytes
    assert clone.quantizer == pair.quantizer and type(clone) is type(pair)


def test_shared_buffers_are_one_object() -> None:
    t = hybridq.quantize(torch.randn(8, 16), "fp8_e4m3")
    assert t.rowwise.scale is t.columnwise.scale
    for other in (t.clone(), copy.deepcopy(t), t.to(torch.bfloat16), t.mT):
        assert other.rowwise.scale is other.columnwise.scale
    same = hybridq.quantize(torch.randn(8, 16), "identity")
    assert same.nbytes == 8 * 16 * 4 == same.clone().nbytes
    assert same.columnwise.data.data_ptr() == same.rowwise.data.data_ptr()


def test_a_quantized_tensor_owns_its_memory() -> None:
    for name in ("identity", "fp32", "mxfp8"):
        x = torch.ones(4, 32)
        t = hybridq.quantize(x, name)
        x.fill_(7.0)
        assert (t.dequantize() == 1.0).all()


def test_to_changes_the_nominal_dtype_only(pair: QuantizedTensor) -> None:
    half = pair.to(torch.bfloat16)
    assert half.dtype == torch.bfloat16 and isinstance(half, QuantizedTensor)
    same_planes(half, pair)
    assert pair.to("cpu") is pair
    for method, dtype in (("float", torch.float32), ("half", torch.float16)):
        plain = getattr(half, method)()
        assert type(plain) is torch.Tensor and plain.dtype == dtype
        assert torch.equal(plain, pair.dequantize(dtype=dtype))


def test_views_of_leading_dimensions(pair: QuantizedTensor) -> None:
    for view in (
        pair.view(30, 50),
        pair.reshape(2, 3, 5, 50),
        pair.view(-1, 50),
        pair.flatten(0, 1),
        pair.reshape(5, 6, -1),
    ):
        assert isinstance(view, QuantizedTensor)
        assert view.tensor_storage.first.data is pair.tensor_storage.first.data
        assert torch.equal(view.dequantize(), pair.dequantize().reshape(view.shape))
    # Another last dimension cuts through blocks: values, not planes.
    other = pair.reshape(25, 60)
    assert isinstance(other, DecodedPart)
    assert torch.equal(other, pair.dequantize().reshape(25, 60))


def test_transposing_swaps_the_planes(matrix: QuantizedTensor) -> None:
    for transposed in (
        matrix.t(),
        matrix.mT,
        matrix.T,
        matrix.transpose(0, 1),
        matrix.permute(1, 0),
    ):
        assert transposed.shape == (50, 30)
        for direction, other in (("rowwise", "columnwise"), ("columnwise", "rowwise")):
            plane, twin = getattr(transposed, direction), getattr(matrix, other)
            assert (plane is None) == (twin is None)
            if plane is not None:
                assert plane.data is twin.data and plane.matrix == twin.matrix
        same_planes(transposed.t(), matrix)
    back = matrix.mT.mT
    assert torch.equal(back.dequantize(), matrix.dequantize())


def test_save_load_pickle_deepcopy(pair: QuantizedTensor) -> None:
    file = io.BytesIO()
    torch.save({"weight": pair, "parameter": torch.nn.Parameter(pair.clone())}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    for other in (
        loaded["weight"],
        loaded["parameter"],
        pickle.loads(pickle.dumps(pair)),
        copy.deepcopy(pair),
    ):
        same_planes(other, pair)
        assert type(other) is type(pair) and other.quantizer == pair.quantizer
        assert sharing(other) == sharing(pair)


def test_flatten_and_unflatten(pair: QuantizedTensor) -> None:
    names, context = pair.__tensor_flatten__()
    inner = {name: getattr(pair, name) for name in names}
    assert all(type(buffer) is torch.Tensor for buffer in inner.values())
    hash(context)
    back = QuantizedTensor.__tensor_unflatten__(inner, context, pair.shape, pair.stride())
    same_planes(back, pair)
    assert sharing(back) == sharing(pair)


def test_prepare_for_saving_and_restore(pair: QuantizedTensor) -> None:
    plain = torch.randn(3)
    flat, entries = hybridq.prepare_for_saving(pair, None, plain)
    assert all(x is None or type(x) is torch.Tensor for x in flat)
    back, nothing, same = hybridq.restore_from_saved(entries, flat)
    same_planes(back, pair)
    assert nothing is None and same is plain


def test_update_usage_drops_derives_or_refuses() -> None:
    x = torch.randn(20, 40)
    t = hybridq.quantize(x, "nvfp4_16x16", columnwise=False)
    t.update_usage(columnwise_usage=True)
    same_planes(t, hybridq.quantize(x, "nvfp4_16x16"))
    t.update_usage(rowwise_usage=False)
    assert t.get_usages() == {"rowwise": False, "columnwise": True}
    t.update_usage(rowwise_usage=True)
    same_planes(t, hybridq.quantize(x, "nvfp4_16x16"))
    lone = hybridq.quantize(x, "mxfp8", columnwise=False)
    with pytest.raises(PlaneError, match="cannot be transposed exactly"):
        lone.update_usage(columnwise_usage=True)
    with pytest.raises(PlaneError, match="at least one plane"):
        lone.update_usage(rowwise_usage=False)
    assert lone.get_usages() == {"rowwise": True, "columnwise": False}


def test_update_usage_refuses_a_plane_that_the_quantizer_makes_of_another_spec() -> None:
    """A write would find a plane that the tensor's quantizer does not make."""
    t = hybridq.quantize(torch.randn(20, 40), "fp8_e4m3", columnwise="fp8_e5m2")
    t.update_usage(rowwise_usage=False)
    with pytest.raises(PlaneError, match=r"makes the rowwise plane e4m3.*it would be e5m2"):
        t.update_usage(rowwise_usage=True)
    assert t.get_usages() == {"rowwise": False, "columnwise": True}
    want = t.quantizer.with_usage(rowwise=False)(t.dequantize().abs())
    same_planes(t.abs_(), want)


def test_update_quantized_rewrites_every_plane(matrix: QuantizedTensor) -> None:
    fresh = torch.randn(30, 50)
    want = matrix.quantizer(fresh)
    pointers = [p.data.data_ptr() for p in matrix.tensor_storage.planes]
    version = matrix._version
    assert matrix.quantizer.update_quantized(fresh, matrix) is matrix
    same_planes(matrix, want)
    assert [p.data.data_ptr() for p in matrix.tensor_storage.planes] == pointers
    assert matrix._version > version
    # Also with usages of the quantizer switched off: no plane may keep stale values.
    other = torch.randn(30, 50)
    if matrix.rowwise is not None and matrix.columnwise is not None:
        matrix.quantizer.with_usage(columnwise=False).update_quantized(other, matrix)
        same_planes(matrix, matrix.quantizer(other))


def test_a_write_makes_a_saved_plane_stale_for_autograd() -> None:
    t = hybridq.quantize(torch.randn(8, 32), "mxfp8")
    x = torch.randn(4, 32, requires_grad=True)
    y = hybridq.gemm(x, t, out_dtype=torch.float32)
    t.quantizer.update_quantized(torch.randn(8, 32), t)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_in_place_operations_requantize() -> None:
    x = torch.randn(12, 64)
    t = hybridq.quantize(x, "mxfp8", columnwise="nvfp4")
    before = t.dequantize()
    assert t.add_(1.0) is t
    same_planes(t, t.quantizer(before + 1.0))
    t.copy_(x)
    same_planes(t, t.quantizer(x))
    t.zero_()
    assert (t.dequantize() == 0).all()
    plain = torch.empty(12, 64)
    t.copy_(x)
    assert torch.equal(plain.copy_(t), t.dequantize())
    other = hybridq.quantize(torch.randn(12, 64), "mxfp8", columnwise="nvfp4")
    t.copy_(other)
    same_planes(t, other)


def test_other_operations_dequantize() -> None:
    t = hybridq.quantize(torch.randn(12, 64), "mxfp8")
    plain = t.dequantize()
    assert torch.equal(t + 1, plain + 1)
    assert torch.equal(torch.nn.functional.silu(t), torch.nn.functional.silu(plain))
    assert torch.equal(t[:, ::2], plain[:, ::2])
    assert torch.equal(torch.stack([t, t]), torch.stack([plain, plain]))
    zeros = torch.zeros_like(t)
    assert type(zeros) is torch.Tensor and zeros.shape == t.shape and not zeros.any()


def test_products_use_the_planes() -> None:
    w = hybridq.quantize(torch.randn(24, 64), "mxfp8", columnwise="nvfp4")
    x = torch.randn(5, 64)
    assert torch.equal(torch.nn.functional.linear(x, w), hybridq.gemm(x, w))
    dy = torch.randn(5, 24)
    assert torch.equal(dy @ w, hybridq.gemm(dy, w.mT))
    assert not torch.equal(dy @ w, dy @ w.dequantize()), "the columnwise plane is another format"
    bias = torch.randn(24)
    assert torch.equal(torch.nn.functional.linear(x, w, bias), hybridq.gemm(x, w, bias=bias))


def test_gradients_pass_straight_through() -> None:
    x = torch.randn(6, 40, requires_grad=True)
    t = hybridq.quantize(x, "nvfp4")
    assert t.requires_grad and t.grad_fn is not None
    weight = torch.randn(6, 40)
    (t.dequantize() * weight).sum().backward()
    assert torch.equal(x.grad, weight)


def test_a_quantized_parameter_trains_with_a_plain_optimizer() -> None:
    w = torch.nn.Parameter(hybridq.quantize(torch.randn(16, 32), "mxfp8"))
    assert isinstance(w, torch.nn.Parameter) and isinstance(w, QuantizedTensor)
    optimizer = torch.optim.SGD([w], lr=0.5)
    x, before = torch.randn(3, 32), w.dequantize().detach()
    torch.nn.functional.linear(x, w).sum().backward()
    assert w.grad.shape == w.shape and type(w.grad) is torch.Tensor
    want = before - 0.5 * w.grad
    optimizer.step()
    same_planes(w, w.quantizer(want))


def test_compile_takes_a_quantized_tensor() -> None:
    t = hybridq.quantize(torch.randn(8, 64), "mxfp8", columnwise="nvfp4")
    x = torch.randn(3, 64)

    def run(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, t) + t.dequantize().sum()

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, t), run(x, t))


def test_a_tensor_without_quantizer_refuses_writes() -> None:
    made = hybridq.quantize(torch.randn(4, 32), "mxfp8", columnwise="nvfp4")
    lone = QuantizedTensor.make(made.tensor_storage, made.shape, made.dtype)
    with pytest.raises(PlaneError, match="has no quantizer"):
        lone.add_(1.0)
    same_planes(lone, made)


def test_a_tensor_that_lost_a_plane_is_of_the_class_of_the_rest() -> None:
    t = hybridq.quantize(torch.randn(4, 64), "mxfp8", "nvfp4")
    assert isinstance(t, hybridq.HybridQuantizedTensor)
    t.update_usage(columnwise_usage=False)
    assert type(t) is hybridq.MXFP8Tensor is type(t.detach())
    assert isinstance(torch.nn.Parameter(t), torch.nn.Parameter)


def test_copy_takes_a_number_and_refuses_what_is_not_strided() -> None:
    t = hybridq.quantize(torch.randn(4, 64), "mxfp8")
    assert torch.equal(t.copy_(3).dequantize(), torch.full((4, 64), 3.0))
    before = t.dequantize()
    with pytest.raises(TypeError, match="copy_: source must be strided"):
        t.copy_(torch.eye(4, 64).to_sparse())
    with pytest.raises(TypeError, match="data: must be a tensor"):
        t.data = 3
    assert torch.equal(t.dequantize(), before)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_products_with_sparse_matrices_take_the_values(layout) -> None:
    t, bias = hybridq.quantize(torch.randn(32, 64), "mxfp8"), torch.randn(64)
    values, dense = t.dequantize(), torch.randn(8, 32).relu()
    sparse = dense.to_sparse(layout=layout)
    for product in (
        lambda b: sparse @ b,
        lambda b: torch.mm(sparse, b),
        lambda b: torch.sparse.mm(sparse, b),
        lambda b: torch.addmm(bias, sparse, b),
    ):
        torch.testing.assert_close(product(t), product(values), rtol=0, atol=0)
    torch.testing.assert_close(sparse @ t, dense @ values)
    torch.testing.assert_close(torch.mm(t.t(), sparse.t()), values.t() @ dense.t())


def test_a_product_of_wrong_dimensions_is_torchs_own_error() -> None:
    t = hybridq.quantize(torch.randn(64), "mxfp8")
    with pytest.raises(RuntimeError):
        torch.addmm(torch.zeros(5), t, torch.zeros(64, 5))


def test_lazily_negated_tensors_are_what_they_mean() -> None:
    """`z.conj().imag` is a view with a bit that torch resolves, but not inside a subclass."""
    values = torch.randn(8, 32)
    negated = torch.complex(values, -values).conj().imag
    assert negated.is_neg() and torch.equal(negated, values)
    wanted = hybridq.quantize(values, "mxfp8")
    t = hybridq.quantize(torch.zeros(8, 32), "mxfp8")
    t.copy_(negated)
    assert torch.equal(t.dequantize(), wanted.dequantize())
    assert torch.equal(hybridq.quantize(negated, "mxfp8").dequantize(), wanted.dequantize())
    torch.testing.assert_close(negated @ t.t(), values @ wanted.t())
    torch.testing.assert_close(t + negated, wanted + values)
    negated.copy_(t)
    assert torch.equal(negated, wanted.dequantize())


@pytest.mark.parametrize("name", ["float", "half", "bfloat16"])
def test_conversions_take_a_memory_format(name) -> None:
    x = torch.randn(2, 3, 4, 32)
    t = hybridq.quantize(x, "mxfp8")
    made = getattr(t, name)(memory_format=torch.channels_last)
    assert made.stride() == getattr(x, name)(memory_format=torch.channels_last).stride()
    assert torch.equal(made, getattr(t, name)())
