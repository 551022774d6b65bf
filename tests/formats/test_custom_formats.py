"""Formats that a user describes: an element of their own, other blocks, other rules.

They run on the reference backend, equal the oracle bit for bit, and pass through every layer above.
"""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch

import hybridq
from hybridq.errors import SpecError
from hybridq.formats import (
    DEFAULT_SIGNS,
    ELEMENTS,
    Element,
    Format,
    PlaneSpec,
    element,
    register_element,
    register_format,
)
from oracle import ELEMENTS as ORACLE_ELEMENTS
from oracle import OracleElement
from oracle.bridge import (
    assert_bits_equal,
    assert_planes_equal,
    decode_plane,
    encode_plane,
    expected,
    oracle_spec,
)
from oracle.planes import decode as oracle_decode
from oracle.samples import ALL_KINDS, sample

pytestmark = pytest.mark.usefixtures("registries")

#: The same bit layouts, once as hybridq's records and once as the oracle's.
NEW = {
    "e3m4": (
        Element("e3m4", 8, 3, 4, 3, "ieee"),
        OracleElement("e3m4", 3, 4, 3, nan_code=0x7F, first_special=0x70, inf_code=0x70),
    ),
    "e4m2": (Element("e4m2", 7, 4, 2, 7, "none"), OracleElement("e4m2", 4, 2, 7, nan_code=0x3F)),
    "e2m2": (
        Element("e2m2", 5, 2, 2, 1, "fn"),
        OracleElement("e2m2", 2, 2, 1, nan_code=0xF, first_special=0xF),
    ),
}


@pytest.fixture(autouse=True)
def elements(registries) -> None:
    for mine, theirs in NEW.values():
        register_element(mine)
        ORACLE_ELEMENTS[theirs.name] = theirs


def described() -> dict[str, Format]:
    """Formats that nobody has registered, in every rule."""
    e3m4, e4m2, e2m2 = (ELEMENTS[name] for name in ("e3m4", "e4m2", "e2m2"))
    fp32, e8m0, e4m3 = (element(name) for name in ("fp32", "e8m0", "e4m3"))
    return {
        "1x64": Format(e3m4, (1, 64), fp32, "amax", "mine", power_of_two=True),
        "1x64 fp32 scales": Format(element("e4m3"), (1, 64), fp32, "amax", "mine", eps=1e-3),
        "24x24": Format(e4m2, (24, 24), fp32, "amax", "mine", power_of_two=True),
        "tensor": Format(e3m4, None, fp32, "amax", "mine"),
        "mx floor": Format(e3m4, (1, 32), e8m0, "floor", "mine"),
        "mx even 8x8": Format(e2m2, (8, 8), e8m0, "even", "mine"),
        "mx ceil": Format(e4m2, (1, 20), e8m0, "ceil", "mine"),
        "mx rceil": Format(e2m2, (1, 1), e8m0, "rceil", "mine"),
        "two levels": Format(e3m4, (1, 48), e4m3, "two_level", "mine"),
    }


NAMES = ("1x64", "1x64 fp32 scales", "24x24", "tensor", "mx floor", "mx even 8x8")
NAMES += ("mx ceil", "mx rceil", "two levels")


def specs_of(fmt: Format) -> list[PlaneSpec]:
    specs = [PlaneSpec(fmt), PlaneSpec(fmt, stochastic=True)]
    if fmt.block is None or fmt.block[0] == 1:
        specs.append(PlaneSpec(fmt, signs=DEFAULT_SIGNS))
    if fmt.rule == "two_level":
        specs.append(PlaneSpec(fmt, row_scaled=True))
    return specs


def test_the_list_of_names_is_that_of_the_formats() -> None:
    assert tuple(described()) == NAMES


@pytest.mark.thinned(1)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_described_formats_equal_the_oracle(name: str, kind: str, direction: str, seed) -> None:
    for spec in specs_of(described()[name]):
        x = sample(kind, (35, 70), "bfloat16" if spec.signs is None else "float32", seed)
        options = {"seed": 5} if spec.stochastic else {}
        got = encode_plane(x, spec, direction, **options)
        want = expected(x, spec, direction, **options)
        assert_planes_equal(got, want, f"{spec} {direction}")
        own = x.shape if direction == "rowwise" else x.shape[::-1]
        decoded = oracle_decode(want, oracle_spec(spec), *own)
        assert_bits_equal(decode_plane(got, spec, *own), decoded, str(spec))


def test_e3m4_is_the_field_s_own() -> None:
    """Every code decodes, and every BF16 value within the range casts, as in ml_dtypes."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    codes = np.arange(256, dtype=np.uint8)
    theirs = codes.view(ml_dtypes.float8_e3m4).astype(np.float32)
    fmt = described()["tensor"]
    plane = {"data": torch.from_numpy(codes[None].copy()), "scale": torch.ones(1)}
    assert_bits_equal(decode_plane(plane, PlaneSpec(fmt), 1, 256)[0], theirs, "decode")
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    values = values[values.abs() <= 15.5]
    got = encode_plane(values[None], PlaneSpec(fmt), stat=torch.tensor([15.5]))["data"][0]
    want = values.float().numpy().astype(ml_dtypes.float8_e3m4).view(np.uint8)
    assert_bits_equal(got, want, "cast")


@pytest.mark.parametrize("name", NAMES)
def test_described_formats_pass_through_every_layer(name: str) -> None:
    fmt = described()[name]
    x, w = torch.randn(24, 96), torch.randn(48, 96)
    t = hybridq.quantize(x, fmt, columnwise="mxfp8")
    assert PlaneSpec.parse(str(t.rowwise.spec)) == t.rowwise.spec == PlaneSpec(fmt)
    assert Format.parse(str(fmt)) == fmt
    bound = 2.0**-fmt.element.mantissa_bits  # half a unit, with a scale up to twice too large
    assert (t.dequantize() - x).norm() <= bound * x.norm()
    for other in ("mxfp8", "nvfp4", fmt, "bf16"):
        b = hybridq.quantize(w, other)
        want = t.dequantize().double() @ b.dequantize().double().t()
        y = hybridq.gemm(t, b, out_dtype=torch.float32)
        room = 100 * 2.0**-24 * (t.dequantize().abs() @ b.dequantize().abs().t())
        assert ((y - want).abs() <= room + (2.0**-8 * want.abs() if other == "bf16" else 0)).all()
    again = pickle.loads(pickle.dumps(t))
    assert torch.equal(again.dequantize(), t.dequantize())
    assert torch.equal(copy.deepcopy(t).dequantize(), t.dequantize())
    if fmt.is_square:
        both = hybridq.quantize(x, fmt)
        derived = both.rowwise.derive()
        assert torch.equal(derived.data, both.columnwise.data)
        assert torch.equal(derived.dequantize(), both.columnwise.dequantize())


@pytest.mark.parametrize("name", NAMES)
def test_a_model_trains_in_a_described_format(name: str) -> None:
    fmt = described()[name]
    layer = hybridq.Linear(72, 40)
    x = torch.randn(16, 72, requires_grad=True)
    recipe = hybridq.CustomRecipe(qfactory=lambda role: hybridq.quantizer(fmt))
    with hybridq.autocast(recipe=recipe):
        y = layer(x)
    y.square().mean().backward()
    want = torch.nn.functional.linear(x, layer.weight, layer.bias)
    assert (y - want).norm() < 0.3 * want.norm()
    for grad in (x.grad, layer.weight.grad, layer.bias.grad):
        assert torch.isfinite(grad).all() and grad.abs().sum() > 0


def test_a_registered_format_is_known_by_its_name() -> None:
    fmt = described()["1x64"]
    register_format("fp8_e3m4_1x64", fmt, summary="mine", source="here", limits="many")
    assert "fp8_e3m4_1x64" in hybridq.formats.names()
    x = torch.randn(8, 130)
    assert hybridq.quantize(x, "fp8_e3m4_1x64").rowwise.spec == PlaneSpec(fmt)
    assert torch.ops.hybridq.encode(x, "fp8_e3m4_1x64", "")[1].shape == (8, 3)
    assert register_format("fp8_e3m4_1x64", fmt) is fmt  # once more is no error
    with pytest.raises(hybridq.SpecError, match="the name 'fp8_e3m4_1x64' is taken"):
        register_format("fp8_e3m4_1x64", replace(fmt, power_of_two=False))


def test_the_backend_is_explained_and_a_forced_one_says_why_not() -> None:
    spec = PlaneSpec(described()["1x64"])
    explanation = hybridq.explain("encode", spec)
    assert explanation.chosen == "reference" and "e3m4" in str(explanation)
    with hybridq.backend("cpu"), pytest.raises(hybridq.BackendError, match="e3m4"):
        hybridq.quantize(torch.randn(4, 64), spec)


def test_compiled_code_takes_a_described_format() -> None:
    text = str(PlaneSpec(described()["mx floor"]))

    def run(x: torch.Tensor) -> torch.Tensor:
        buffers = torch.ops.hybridq.encode(x, text, "")
        return torch.ops.hybridq.decode(buffers, text, x.shape[0], x.shape[1], torch.float32)

    x = torch.randn(9, 70)
    assert torch.equal(torch.compile(run, fullgraph=True, backend="aot_eager")(x), run(x))


UNKNOWN = Element("e3m3", 7, 3, 3, 3, "none")


@pytest.mark.parametrize(
    "make,message",
    [
        (lambda: Element("e9m0", 10, 9, 0, 255), "bits must be 2 to 8"),
        (lambda: Element("e3m4", 8, 4, 4, 3), r"must be 8, got 1 \+ 4 \+ 4"),
        (lambda: Element("E3M4", 8, 3, 4, 3), "lower-case"),
        (lambda: Element("e5m2huge", 8, 5, 2, -120), "every value must be an FP32 number"),
        (lambda: Element("e5m2tiny", 8, 5, 2, 200), "every value must be an FP32 number"),
        (lambda: register_element(Element("e3m4", 8, 3, 4, 4)), "'e3m4' is taken"),
        (
            lambda: Format(UNKNOWN, (1, 32), element("e8m0"), "rceil", "mine"),
            "call register_element first",
        ),
        (
            lambda: Format(element("e8m0"), (1, 32), element("fp32"), "amax", "mine"),
            "codes have a sign and a mantissa",
        ),
        (
            lambda: Format(element("bf16"), (1, 32), element("fp32"), "amax", "mine"),
            "at most 8 bits",
        ),
        (
            lambda: Format(element("e4m3"), (1, 32), element("fp32"), "floor", "mine"),
            "makes e8m0 scales, got fp32",
        ),
        (lambda: Format(element("e4m3"), None, element("e8m0"), "even", "mine"), "needs blocks"),
        (
            lambda: Format(element("e4m3"), (2, 32), element("e8m0"), "even", "mine"),
            r"must be \(1, n\) or \(n, n\)",
        ),
        (
            lambda: PlaneSpec(described()["two levels"], four_over_six="mae"),
            "element e2m1, got 'two_level' and e3m4",
        ),
        (
            lambda: PlaneSpec(
                Format(element("e2m1"), (12, 12), element("e4m3"), "two_level", "mine"),
                four_over_six="mae",
            ),
            "side must be a power of two",
        ),
    ],
)
def test_records_that_contradict_themselves_say_why(make, message: str) -> None:
    with pytest.raises(hybridq.SpecError, match=message):
        make()


@pytest.mark.parametrize("name", [None, 5, b"x", ["x"], "", "Upper", "a/b", "a;sr", "a b"])
def test_a_name_that_no_text_can_hold_is_refused(name) -> None:
    known = hybridq.formats.names()
    with pytest.raises(hybridq.SpecError, match="register_format: name must be"):
        register_format(name, hybridq.formats.format("mxfp8"))
    with pytest.raises(hybridq.SpecError, match="register_format: takes a Format"):
        register_format("fresh", "mxfp8")
    with pytest.raises(hybridq.SpecError, match="register_element: takes an Element"):
        register_element(name)
    assert hybridq.formats.names() == known


@pytest.mark.parametrize(
    "changes",
    [
        {"family": "a/b"},
        {"family": "a;b"},
        {"family": "a|b"},
        {"family": None},
        {"block": (1.0, 32.0)},
        {"block": (1,)},
        {"block": (1, 214748364832)},
        {"block": (1025, 1025)},
        {"block": 32},
        {"element": "e4m3"},
        {"scale": "e8m0"},
        {"rule": None},
        {"eps": "a"},
        {"power_of_two": 3},
    ],
)
def test_fields_of_a_wrong_kind_are_refused(changes) -> None:
    with pytest.raises(hybridq.SpecError, match="Format: "):
        replace(hybridq.formats.format("mxfp8"), **changes)


def test_an_identity_format_takes_no_option() -> None:
    for option in ({"eps": 1.0}, {"power_of_two": True}):
        with pytest.raises(hybridq.SpecError, match="an identity format has no block"):
            replace(hybridq.formats.format("bf16"), **option)


def test_an_eps_that_fp32_cannot_hold_is_refused() -> None:
    with pytest.raises(hybridq.SpecError, match="eps must be finite in FP32"):
        hybridq.Float8CurrentScalingQuantizer(amax_epsilon=1e39)


@pytest.mark.parametrize(
    "fields",
    [
        (None, 8, 4, 3, 7),
        ("e9m9", 3, 3, -1, 0),
        ("e9m9", 8.0, 4, 3, 7),
        ("e9m9", 8, 4, 3, 7, "fn", None),
    ],
)
def test_fields_of_an_element_of_a_wrong_kind_are_refused(fields) -> None:
    with pytest.raises(hybridq.SpecError, match="Element: "):
        Element(*fields)


def test_a_layout_of_scales_is_an_option_of_rows_of_blocks() -> None:
    spec = PlaneSpec.parse("fp8_1x128;scales=down")
    assert spec.scale_layout == "down" and PlaneSpec.parse(spec.text) == spec
    assert spec.buffers(130, 300) == PlaneSpec.parse("fp8_1x128").buffers(130, 300)
    tiles = PlaneSpec.parse("nvfp4;rht;scales=tiles")
    assert [b.shape for b in tiles.buffers(130, 70)] == [(130, 40), (2 * 2 * 512,), (1,)]
    square = PlaneSpec.parse("nvfp4_16x16;scales=tiles")  # the scales of each row
    assert [b.shape for b in square.buffers(130, 70)] == [(130, 35), (2 * 2 * 512,), (1,)]
    assert not square.is_derivable and PlaneSpec.parse("nvfp4_16x16").is_derivable
    wrong = ("fp8_1x128;scales=up", "fp8_128x128;scales=down", "mxfp8;scales=down")
    for text in (*wrong, "fp8_1x128;scales=tiles", "fp8_128x128;scales=tiles"):
        with pytest.raises(SpecError, match="scale_layout"):
            PlaneSpec.parse(text)


def finite_values(own: Element) -> list[float]:
    """The finite magnitudes of a layout, by its definition."""
    top, ones = (1 << own.exponent_bits) - 1, (1 << own.mantissa_bits) - 1
    found = []
    for field in range(top + 1):
        for mantissa in range(ones + 1):
            is_nan = own.specials == "fn" and (field, mantissa) == (top, ones)
            if is_nan or (own.specials == "ieee" and field == top):
                continue
            fraction = mantissa / (ones + 1)
            if field:
                found.append((1 + fraction) * 2.0 ** (field - own.bias))
            else:
                found.append(fraction * 2.0 ** (1 - own.bias))
    return found


@pytest.mark.parametrize("specials", ["ieee", "fn", "none"])
@pytest.mark.parametrize("bits", range(3, 9))
def test_the_largest_value_of_every_layout(bits: int, specials: str) -> None:
    """Where the one exponent bit marks inf and NaN, subnormals alone are finite."""
    for exponent_bits in range(1, bits - 1):
        for bias in {0, (1 << exponent_bits - 1) - 1}:
            widths = (bits, exponent_bits, bits - 1 - exponent_bits, bias)
            name = "x".join(["x", *map(str, widths), specials])
            own = register_element(Element(name, *widths, specials))
            largest = max(finite_values(own))
            assert own.max == largest
            assert 2.0**own.emax <= largest < 2.0 ** (own.emax + 1)
            x = torch.tensor([[1.0, -0.6, 0.3, -1.0, 0.0]])
            for rule, scale in (("amax", "fp32"), ("rceil", "e8m0")):
                t = hybridq.quantize(x, Format(own, (1, 5), element(scale), rule, "own"))
                unit = (t.dequantize() / t.rowwise.scale).abs().flatten().tolist()
                if rule == "amax":  # each value is near one of the layout
                    gaps = [min(abs(one - value) for value in finite_values(own)) for one in unit]
                    assert max(gaps) <= 2.0**-22 * largest
                    assert unit[0] == pytest.approx(largest, rel=2.0**-22)
                assert t.dequantize().isfinite().all()
