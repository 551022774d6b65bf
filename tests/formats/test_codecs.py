"""Codecs: formats whose codes Python makes and reads, against NumPy, through every layer."""

from __future__ import annotations

import io
import logging

import numpy as np
import pytest
import torch

import hybridq
from hybridq.formats import Codec, CodedMatrix, Format, PlaneSpec, register_codec

pytestmark = pytest.mark.usefixtures("registries")


class Int8Rows(Codec):
    """Signed 8-bit integers, one FP32 scale per row."""

    def buffers(self, rows, cols):
        return [((rows, cols), torch.int8), ((rows, 1), torch.float32)]

    def encode(self, matrix):
        values = matrix.to(torch.float32)
        scale = values.abs().amax(1, keepdim=True) / 127
        safe = torch.where(scale == 0, 1.0, scale)
        return [torch.round(values / safe).to(torch.int8), scale]

    def decode(self, buffers, rows, cols):
        return buffers[0].to(torch.float32) * buffers[1]


class Int8Product(Int8Rows):
    """The same, multiplied as integers."""

    def __init__(self) -> None:
        self.calls = 0

    def product(self, a: CodedMatrix, b: CodedMatrix):
        self.calls += 1
        if a.codec is not self or b.codec is not self:
            return None
        sums = a.buffers[0].to(torch.int32) @ b.buffers[0].to(torch.int32).t()
        return sums.to(torch.float32) * a.buffers[1] * b.buffers[1].t()


def rounded(matrix: np.ndarray) -> np.ndarray:
    """What Int8Rows keeps of a matrix, by NumPy in FP64."""
    scale = (np.abs(matrix).max(1, keepdims=True).astype(np.float32) / np.float32(127)).astype(
        np.float32
    )
    return np.rint(matrix / scale).astype(np.float64) * scale.astype(np.float64)


@pytest.fixture
def int8() -> Format:
    return register_codec("int8_rows", Int8Rows(), summary="mine", source="here")


def matrices() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(6, 40), torch.randn(10, 40), torch.randn(6, 10)


def layer_of(w: torch.Tensor) -> hybridq.Linear:
    layer = hybridq.Linear(w.shape[1], w.shape[0], bias=False)
    with torch.no_grad():
        layer.weight.copy_(w)
    return layer


def recipe_of(fmt: Format) -> hybridq.CustomRecipe:
    return hybridq.CustomRecipe(qfactory=lambda role: hybridq.quantizer(fmt))


def trained(layer, x, dy, recipe, call=None) -> list[torch.Tensor]:
    own = x.clone().requires_grad_()
    layer.weight.grad = None
    with hybridq.autocast(recipe=recipe):
        y = layer(own) if call is None else call(layer, own)
    y.backward(dy)
    return [y.detach(), own.grad, layer.weight.grad.clone()]


@pytest.mark.parametrize("codec", [Int8Rows, Int8Product])
def test_the_three_products_of_a_layer_are_those_of_numpy(codec) -> None:
    x, w, dy = matrices()
    own = codec()
    found = trained(layer_of(w), x, dy, recipe_of(register_codec("int8_here", own)))
    nx, nw, ny = (one.numpy() for one in (x, w, dy))
    wanted = (
        rounded(nx) @ rounded(nw).T,
        rounded(ny) @ rounded(nw.T).T,
        rounded(ny.T) @ rounded(nx.T).T,
    )
    for got, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(got.numpy(), want, rtol=2e-6, atol=2e-5)
    assert getattr(own, "calls", 3) == 3


def test_a_product_is_asked_with_any_other_plane_and_adds_what_follows(int8: Format) -> None:
    codec = Int8Product()
    fmt = register_codec("int8_product", codec)
    x, w, dy = matrices()
    a, b = hybridq.quantize(x, fmt), hybridq.quantize(w, "mxfp8")
    bias, out = torch.randn(10), dy.clone()
    made = hybridq.gemm(a, b, bias=bias, out=out, accumulate=True)
    want = dy.double() + a.dequantize().double() @ b.dequantize().double().t() + bias.double()
    assert made is out and codec.calls == 1
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
    assert "codec      can" in str(hybridq.explain("gemm", a, b))
    assert "-> torch      can" in str(hybridq.explain("gemm", hybridq.quantize(x, int8), b))
    with hybridq.backend("reference"):
        own = hybridq.gemm(a, b, out_dtype=torch.float32)
    torch.testing.assert_close(own, hybridq.gemm(a, b, out_dtype=torch.float32))


def test_compiled_and_recomputed_they_have_the_same_bits(int8: Format) -> None:
    x, w, dy = matrices()
    layer, recipe = layer_of(w), recipe_of(int8)
    eager = trained(layer, x, dy, recipe)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    again = trained(layer, x, dy, recipe, lambda _, own: compiled(own))
    recomputed = trained(layer, x, dy, recipe, lambda one, own: hybridq.checkpoint(one, own))
    for got in (again, recomputed):
        assert all(torch.equal(a, b) for a, b in zip(got, eager, strict=True))


def test_the_codes_are_what_is_saved_for_the_backward(int8: Format) -> None:
    x, w, _ = matrices()
    saved: list[torch.Tensor] = []

    def pack(one: torch.Tensor) -> torch.Tensor:
        saved.append(one)
        return one

    layer = layer_of(w)
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one),
        hybridq.autocast(recipe=recipe_of(int8)),
    ):
        layer(x.requires_grad_())
    assert [one.dtype for one in saved if one.numel()] == [
        *(torch.int8, torch.float32),
        *(torch.int8, torch.float32),
    ]


def test_tensors_are_saved_viewed_written_and_half_of_a_hybrid(int8: Format) -> None:
    x, _, _ = matrices()
    t = hybridq.quantize(x, int8, columnwise="mxfp8")
    wanted = rounded(x.numpy())
    np.testing.assert_allclose(t.dequantize().numpy(), wanted, rtol=1e-6)
    file = io.BytesIO()
    torch.save(t, file)
    file.seek(0)
    assert torch.equal(torch.load(file).dequantize(), t.dequantize())
    assert torch.equal(t[1:4].dequantize(), t.dequantize()[1:4])
    assert torch.equal(t.mT.dequantize(), t.dequantize().mT)
    with torch.no_grad():
        t.copy_(-x)
    np.testing.assert_allclose(t.dequantize().numpy(), -wanted, rtol=1e-6)
    assert PlaneSpec.parse(t.rowwise.spec.text) == t.rowwise.spec
    assert hybridq.formats.format("int8_rows") == int8
    assert int8.bits_per_value() == pytest.approx(8 + 32 / 1024)
    # What is empty has codes, too.
    assert hybridq.quantize(torch.zeros(0, 40), int8).dequantize().shape == (0, 40)


def test_it_is_differentiable_straight_through(int8: Format) -> None:
    x = torch.randn(3, 8, requires_grad=True)
    hybridq.quantize(x, int8).dequantize().mul(2.0).sum().backward()
    assert torch.equal(x.grad, torch.full((3, 8), 2.0))


def test_no_fallback_is_said(int8: Format, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="hybridq"):
        hybridq.gemm(hybridq.quantize(torch.randn(4, 8), int8), torch.randn(2, 8))
    assert not caplog.records


class Wrong(Int8Rows):
    def encode(self, matrix):
        return [matrix.to(torch.float16), matrix.abs().amax(1, keepdim=True)]


class Narrow(Int8Rows):
    def decode(self, buffers, rows, cols):
        return buffers[0][:1].float()


class Many(Int8Rows):
    def buffers(self, rows, cols):
        return [((rows, cols), torch.int8)] * 4


def test_what_does_not_fit_is_said_by_name(int8: Format) -> None:
    x = torch.randn(4, 8)
    with pytest.raises(ValueError, match=r"Wrong.encode: must make .* as its buffers\(\) says"):
        hybridq.quantize(x, register_codec("wrong", Wrong()))
    with pytest.raises(ValueError, match=r"Narrow.decode: must return \[4, 8\], got \[1, 8\]"):
        hybridq.quantize(x, register_codec("narrow", Narrow())).dequantize()
    with pytest.raises(hybridq.SpecError, match=r"Many.buffers: must be one to 3"):
        hybridq.quantize(x, register_codec("many", Many()))
    with pytest.raises(hybridq.SpecError, match="takes a Codec, got int"):
        register_codec("number", 3)
    with pytest.raises(hybridq.SpecError, match="the name 'int8_rows' is taken"):
        register_codec("int8_rows", Int8Rows())
    with pytest.raises(hybridq.SpecError, match="call register_codec first, got 'nobody'"):
        PlaneSpec.parse("codec/python/nobody")
    with pytest.raises(hybridq.SpecError, match="takes no rounding mode and no transform"):
        PlaneSpec(int8, stochastic=True)
    with pytest.raises(hybridq.SpecError, match="has nothing but its name"):
        Format(None, (1, 4), None, "python", "int8_rows")
    grouped = hybridq.GroupedLinear(2, 8, 4)
    with (
        hybridq.autocast(recipe=recipe_of(int8)),
        pytest.raises(ValueError, match="a codec is given whole matrices, and no groups of tokens"),
    ):
        grouped(x, [2, 2])


def replaced(**methods) -> Codec:
    """A codec with a mistake in one method."""
    return type("Mistaken", (Int8Rows,), methods)()


@pytest.mark.parametrize(
    ("methods", "kind", "text"),
    [
        ({"encode": lambda _, m: None}, TypeError, "encode: must return a list of tensors, got N"),
        ({"encode": lambda _, m: m}, TypeError, "encode: must return a list of tensors, got Te"),
        (
            {"encode": lambda _, m: [1.0]},
            TypeError,
            r"encode: must return a list of tensors, got \['fl",
        ),
        (
            {"buffers": lambda _, rows, cols: [((rows, cols), torch.int8)] * (1 + (rows > 2))},
            hybridq.SpecError,
            r"buffers: must be as many for every size, got 2 of \[4, 8\] and 1 before",
        ),
        ({"decode": lambda *_: None}, TypeError, r"decode: must return a tensor \[4, 8\], got N"),
        ({"product": lambda *_: "y"}, TypeError, r"product: must return a tensor \[4, 2\], got s"),
        (
            {"encode": lambda self, m: Int8Rows.encode(self, m.mul_(2))},
            RuntimeError,
            "encode: must not write into its arguments",
        ),
        (
            {"decode": lambda _, b, rows, cols: b[1].mul_(2).expand(rows, cols)},
            RuntimeError,
            "decode: must not write into its arguments",
        ),
        (
            {"product": lambda _, a, b: a.buffers[1].mul_(2) @ b.buffers[1].t()},
            RuntimeError,
            "product: must not write into its arguments",
        ),
    ],
)
def test_mistakes_in_a_method_are_said_by_its_name(methods, kind, text, registries) -> None:
    x = torch.randn(4, 8)
    # What is known of a format is known by its name, for the life of the process.
    own = register_codec(f"mistaken_{len(text)}_{next(iter(methods))}", replaced(**methods))
    with pytest.raises(kind, match=f"Mistaken.{text}"):
        t = hybridq.quantize(x, own)
        if "product" in methods:
            hybridq.gemm(t, hybridq.quantize(torch.randn(2, 8), own))
        t.dequantize()


def test_a_codec_without_a_method_is_refused(registries) -> None:
    whole = {name: getattr(Int8Rows, name) for name in ("encode", "decode")}
    for name in whole:
        half = type("Half", (Codec,), {key: one for key, one in whole.items() if key != name})()
        with pytest.raises(hybridq.SpecError, match=f"register_codec: Half must have {name}"):
            register_codec("half", half)
        assert "half" not in hybridq.formats.names()


def test_a_format_that_is_not_listed_has_no_name() -> None:
    own = register_codec("hidden", Int8Rows(), is_listed=False)
    assert "hidden" not in hybridq.formats.names()
    assert hybridq.quantize(torch.ones(2, 4), own).rowwise.spec.text == "codec/python/hidden"
