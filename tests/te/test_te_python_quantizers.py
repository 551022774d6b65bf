"""Quantizers that a user writes in Python, with Transformer Engine's base class.

One is of a paper: NF4, 4-bit NormalFloat with one absmax per block of values (Dettmers et al.,
"QLoRA", arXiv:2305.14314, section 3). Its oracle is NumPy's, with the code book of the paper's
appendix E.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import sys
from statistics import NormalDist
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hybridq.te.pytorch.custom_recipes.quantization import GEMMType

import hybridq
import hybridq.te as te
from hybridq.formats.codec import known_codecs
from hybridq.te.common import recipe

#: Appendix E of the paper.
NF4 = np.array(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ]
)
BLOCK = 64


def oracle(matrix: np.ndarray) -> np.ndarray:
    """What NF4 keeps of a matrix, blocks along rows."""
    rows, cols = matrix.shape
    padded = np.zeros((rows, -(-cols // BLOCK) * BLOCK))
    padded[:, :cols] = matrix
    blocks = padded.reshape(-1, BLOCK)
    largest = np.abs(blocks).max(1, keepdims=True)
    ratio = np.divide(blocks, largest, out=np.zeros_like(blocks), where=largest > 0)
    codes = np.abs(ratio[..., None] - NF4).argmin(-1)
    return (NF4[codes] * largest).reshape(padded.shape)[:, :cols]


def code_book() -> torch.Tensor:
    """The quantiles of a normal distribution that the code book is made of, scaled to 1."""
    offset, normal = (1 - 1 / 32 + 1 - 1 / 30) / 2, NormalDist()
    upper = [normal.inv_cdf(0.5 + (offset - 0.5) * i / 8) for i in range(1, 9)]
    lower = [-normal.inv_cdf(0.5 + (offset - 0.5) * i / 7) for i in range(7, 0, -1)]
    made = torch.tensor([*lower, 0.0, *upper], dtype=torch.float64)
    return (made / made.abs().max()).float()


@dataclasses.dataclass
class NF4Tensor(te.QuantizedTensorStorage):
    """Codes, one to a byte, and the scales of blocks."""

    data: torch.Tensor
    scale: torch.Tensor
    cols: int
    quantizer: Any

    def dequantize(self, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        values = self.quantizer.book[self.data.long()] * self.scale
        return values.flatten(1)[:, : self.cols].to(dtype or torch.float32)


class NF4Quantizer(te.Quantizer):
    """As a user of Transformer Engine writes it."""

    custom = True

    def __init__(self) -> None:
        super().__init__(rowwise=True, columnwise=True)
        self.book = code_book()

    def quantize_impl(self, tensor: torch.Tensor) -> NF4Tensor:
        flat = tensor.reshape(-1, tensor.shape[-1]).float()
        cols = flat.shape[1]
        blocks = torch.nn.functional.pad(flat, (0, -cols % BLOCK)).unflatten(1, (-1, BLOCK))
        scale = blocks.abs().amax(-1, keepdim=True)
        ratio = blocks / torch.where(scale == 0, 1.0, scale)
        middle = (self.book[1:] + self.book[:-1]) / 2
        data = torch.bucketize(ratio, middle).to(torch.uint8)
        return NF4Tensor(data, scale, cols, self)


class Int8Tensor:
    """What has no base class, and no dequantize of its own."""

    def __init__(self, data: torch.Tensor, scale: torch.Tensor) -> None:
        self.data, self.scale = data, scale


class Int8Quantizer(te.Quantizer):
    """Integers with a product of their own, and a dequantize at the quantizer."""

    seen: ClassVar[list[Any]] = []

    def __init__(self) -> None:
        super().__init__(rowwise=True, columnwise=True)

    def quantize(self, tensor: torch.Tensor, **kwargs: Any) -> Int8Tensor:
        scale = tensor.float().abs().amax().view(1) / 127
        return Int8Tensor((tensor / scale).round().to(torch.int8), scale)

    def dequantize(self, tensor: torch.Tensor, scale: torch.Tensor, dtype=None) -> torch.Tensor:
        return (tensor.float() * scale).to(dtype or torch.float32)

    def qgemm(self, qx, qw, m_params, out_dtype, sx, sw, bias=None, **more) -> torch.Tensor:
        assert bias is None and more["gemm_type"] is GEMMType.FPROP
        assert m_params.use_split_accumulator and isinstance(more["qresult_x"], Int8Tensor)
        self.seen.append((tuple(qx.shape), tuple(qw.shape)))
        return ((qx.int() @ qw.int().t()).float() * sx * sw).to(out_dtype)


class Doubled(te.MXFP8Quantizer):
    """Derived from a quantizer of a format: of twice the values."""

    def quantize_impl(self, tensor: torch.Tensor) -> Any:
        return super().quantize_impl(tensor * 2)


class Signs(te.Quantizer):
    """Makes plain values."""

    def quantize_impl(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.sign()


def custom(make) -> recipe.CustomRecipe:
    return recipe.CustomRecipe(qfactory=lambda role: make())


def trained(layer, own_recipe, call=None) -> list[torch.Tensor]:
    torch.manual_seed(1)
    x = torch.randn(5, 72, requires_grad=True)
    layer.zero_grad()
    with te.autocast(recipe=own_recipe):
        y = layer(x) if call is None else call(layer, x)
    dy = torch.randn(y.shape)
    y.backward(dy)
    return [x.detach(), dy, y.detach(), x.grad, *(p.grad.clone() for p in layer.parameters())]


def linear() -> te.Linear:
    torch.manual_seed(0)
    return te.Linear(72, 24, bias=False, init_method=torch.nn.init.normal_)


def test_the_code_book_is_that_of_the_paper() -> None:
    np.testing.assert_allclose(code_book().numpy(), NF4, atol=2e-6)


def test_nf4_trains_a_layer_as_numpy_says() -> None:
    layer = linear()
    x, dy, y, dx, dw = (one.double().numpy() for one in trained(layer, custom(NF4Quantizer)))
    w = layer.weight.detach().double().numpy()
    np.testing.assert_allclose(y, oracle(x) @ oracle(w).T, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(dx, oracle(dy) @ oracle(w.T).T, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(dw, oracle(dy.T) @ oracle(x.T).T, rtol=1e-4, atol=1e-4)
    held = NF4Quantizer()(torch.tensor(x))
    assert isinstance(held, NF4Tensor) and isinstance(held, te.QuantizedTensorStorage)
    assert not isinstance(held, te.QuantizedTensor)
    np.testing.assert_allclose(held.dequantize().numpy(), oracle(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(NF4Quantizer, marks=pytest.mark.more),
        lambda: te.HybridQuantizer(
            rowwise_quantizer=NF4Quantizer(),
            columnwise_quantizer=te.MXFP8Quantizer(te.DType.kFloat8E4M3),
        ),
    ],
    ids=["nf4", "hybrid"],
)
def test_recomputed_and_compiled_it_has_the_same_bits(make) -> None:
    for layer in (linear(), te.LayerNormLinear(72, 24)):
        eager = trained(layer, custom(make))
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        for call in (
            lambda one, x: te.checkpoint(one, x, use_reentrant=False),
            lambda one, x, run=compiled: run(x),
        ):
            got = trained(layer, custom(make), call)
            assert all(torch.equal(a, b) for a, b in zip(got, eager, strict=True))


def test_a_product_of_its_own_is_asked_three_times() -> None:
    layer, seen = linear(), Int8Quantizer.seen
    seen.clear()
    x, dy, y, dx, dw = trained(layer, custom(Int8Quantizer))
    assert seen == [((5, 72), (24, 72)), ((5, 24), (72, 24)), ((24, 5), (72, 5))]

    def kept(matrix: torch.Tensor) -> torch.Tensor:
        scale = matrix.abs().max().float() / 127
        return torch.round(matrix / scale).double() * scale.double()

    w = layer.weight.detach()
    for got, want in (
        (y, kept(x) @ kept(w).T),
        (dx, kept(dy) @ kept(w)),
        (dw, kept(dy).T @ kept(x)),
    ):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    # Beside another format its planes are decoded.
    trained(layer, recipe.CustomRecipe(qfactory=beside))
    assert len(seen) == 3


def beside(role: Any) -> Any:
    if role is not None and role.tensor_type == "weight":
        return Int8Quantizer()
    return te.MXFP8Quantizer(te.DType.kFloat8E4M3)


def test_quantized_tensors_and_values_may_be_what_it_makes() -> None:
    layer = linear()
    x, _, y, _, _ = trained(layer, custom(lambda: Doubled(te.DType.kFloat8E4M3)))
    want = hybridq.gemm(
        hybridq.quantize(2 * x, "mxfp8"),
        hybridq.quantize(2 * layer.weight.detach(), "mxfp8"),
        out_dtype=torch.float32,
    )
    torch.testing.assert_close(y, want)
    x, _, y, _, _ = trained(layer, custom(lambda: Signs(rowwise=True, columnwise=True)))
    assert torch.equal(y, x.sign() @ layer.weight.detach().sign().T)


def test_a_module_reads_out_the_users_own_class() -> None:
    layer = linear()
    trained(layer, custom(NF4Quantizer))
    found = layer.quantizers["scaling_fwd"][0]
    assert isinstance(found, NF4Quantizer) and found.custom
    assert torch.equal(found.book, code_book())


def test_what_it_cannot_do_says_so() -> None:
    with pytest.raises(NotImplementedError, match="Quantizer: quantizes nothing by itself"):
        te.Quantizer(rowwise=True, columnwise=False)(torch.ones(2, 2))
    layer = te.GroupedLinear(2, 72, 24)
    with (
        te.autocast(recipe=custom(NF4Quantizer)),
        pytest.raises(ValueError, match="a codec is given whole matrices"),
    ):
        layer(torch.ones(4, 72), [2, 2])

    class Mute(te.Quantizer):
        def quantize_impl(self, tensor: torch.Tensor) -> Int8Tensor:
            return Int8Tensor(tensor.sign(), tensor[:1, 0])

    with pytest.raises(TypeError, match="what it makes must have dequantize"):
        trained(linear(), custom(lambda: Mute(rowwise=True, columnwise=True)))


def test_a_class_that_asks_its_base_counts_what_it_makes() -> None:
    class Counting(te.IdentityQuantizer):
        def quantize_impl(self, tensor: torch.Tensor) -> Any:
            calls.append(tensor.dtype)
            return super().quantize_impl(tensor)

    calls: list[torch.dtype] = []
    layer = te.Linear(32, 16, params_dtype=torch.bfloat16)
    x = torch.randn(8, 32, dtype=torch.bfloat16)
    plain = layer(x)
    with te.autocast(recipe=recipe.CustomRecipe(qfactory=lambda role: Counting())):
        assert torch.equal(layer(x), plain)
    assert torch.bfloat16 in calls


def test_a_factory_may_return_a_quantizer_with_the_callers_scale() -> None:
    """The products are those of values rounded with the scale; each tensor's amax is recorded."""
    elements = {"grad_output": te.DType.kFloat8E5M2}
    scales = {"input": 16.0, "weight": 64.0, "grad_output": 4.0}
    made = {
        slot: te.Float8Quantizer(
            torch.full((1,), scale), torch.zeros(1), elements.get(slot, te.DType.kFloat8E4M3)
        )
        for slot, scale in scales.items()
    }

    def factory(role: Any) -> Any:
        return te.IdentityQuantizer() if role is None else made[role.tensor_type]

    def kept(tensor: torch.Tensor, slot: str) -> torch.Tensor:
        dtype = torch.float8_e5m2 if slot in elements else torch.float8_e4m3fn
        top = torch.finfo(dtype).max
        return (tensor * scales[slot]).clamp(-top, top).to(dtype).float() / scales[slot]

    layer = te.Linear(32, 48, bias=False)
    x, dy = torch.randn(16, 32, requires_grad=True), torch.randn(16, 48)
    with te.autocast(recipe=recipe.CustomRecipe(qfactory=factory)):
        y = layer(x)
    y.backward(dy)
    kept_x, kept_w = kept(x.detach(), "input"), kept(layer.weight.detach(), "weight")
    kept_dy = kept(dy, "grad_output")
    for got, want in (
        (y, kept_x @ kept_w.T),
        (x.grad, kept_dy @ kept_w),
        (layer.weight.grad, kept_dy.T @ kept_x),
    ):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-5)
    seen = {"input": x, "weight": layer.weight, "grad_output": dy}
    for slot, tensor in seen.items():
        assert made[slot].amax.item() == tensor.abs().max().item()
    assert isinstance(layer.quantizers["scaling_fwd"][0], te.Float8Quantizer)
    both = te.HybridQuantizer(
        rowwise_quantizer=made["input"].copy(),
        columnwise_quantizer=te.MXFP8Quantizer(te.DType.kFloat8E4M3),
    )
    tensor = both(x.detach())
    assert torch.equal(tensor.dequantize(), kept_x)
    assert isinstance(tensor._quantizer.rowwise_quantizer, te.Float8Quantizer)


def forget_texts() -> None:
    """Empty what is looked up by a text or a spec: each has up to 4,096 entries."""
    for name, module in list(sys.modules.items()):  # not by gc: inductor freezes what it knows
        if name.startswith("hybridq."):
            for one in vars(module).values():
                if type(one) is functools._lru_cache_wrapper:
                    one.cache_clear()
    gc.collect()


def test_codecs_of_the_callers_scales_go_with_factory_planes_and_quantizer() -> None:
    def run(layer: Any, x: torch.Tensor) -> Any:
        def factory(role: Any) -> Any:
            scale = torch.full((1,), 4.0)
            return te.Float8Quantizer(scale, torch.zeros(1), te.DType.kFloat8E4M3)

        with te.autocast(recipe=recipe.CustomRecipe(qfactory=factory)):
            layer(x).sum().backward()
        return factory

    forget_texts()
    before = set(known_codecs())
    layer, x = te.Linear(32, 32, bias=False), torch.randn(8, 32)
    factory = run(layer, x)
    forget_texts()
    made = set(known_codecs()) - before
    assert len(made) == 3
    with te.autocast(recipe=recipe.CustomRecipe(qfactory=factory)):  # its plan knows them by name
        layer(x).sum().backward()
    assert set(known_codecs()) - before == made
    del factory, layer
    forget_texts()
    assert set(known_codecs()) == before

    quantizer = te.HybridQuantizer(
        rowwise_quantizer=te.Float8Quantizer(torch.ones(1), torch.zeros(1), te.DType.kFloat8E4M3),
        columnwise_quantizer=te.IdentityQuantizer(),
    )
    tensor = quantizer(x)
    values = tensor.dequantize()
    del quantizer
    forget_texts()
    assert len(known_codecs()) == len(before) + 1
    assert torch.equal(tensor.dequantize(), values)
    del tensor
    forget_texts()
    assert set(known_codecs()) == before
