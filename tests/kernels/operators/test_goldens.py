"""The oracle, and every backend, against what independent implementations computed.

Sources and layout: tests/golden/peers/README.md.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from hybridq.formats import DEFAULT_SIGNS, Format, PlaneSpec
from hybridq.formats import element as named_element
from oracle import ELEMENTS, OracleSpec, cast_nearest, forward_hadamard, operand
from oracle import decode as oracle_decode
from oracle.bridge import (
    assert_bits_equal,
    decode_plane,
    encode_plane,
    encode_planes,
    expected,
    oracle_spec,
    stat_of,
    values_of,
)
from oracle.planes import unpack_nibbles
from oracle.scales import e8m0_round_up, rceil_scale
from places import PEERS

SIGNS = tuple(-1 if DEFAULT_SIGNS >> i & 1 else 1 for i in range(16))


def _files(prefix: str) -> list[str]:
    return sorted(path.stem for path in PEERS.glob(f"{prefix}*.npz"))


QUANTIZED = _files("fp8") + _files("mxfp") + _files("nvfp4")
CASTS = _files("cast")
GEMMS = _files("gemm")


@dataclass(frozen=True)
class Golden:
    """One file: its arrays and options."""

    arrays: dict[str, np.ndarray]
    options: dict

    def tensor(self, name: str) -> torch.Tensor:
        array = self.arrays[name]
        if array.dtype == np.uint16:
            return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
        return torch.from_numpy(array.copy())


def load(name: str) -> Golden:
    with np.load(PEERS / f"{name}.npz") as file:
        arrays = {key: file[key] for key in file.files if key != "meta"}
        meta = json.loads(str(file["meta"]))
    for key in meta.get("info_keys", ()):
        del arrays[key]
    return Golden(arrays, meta["options"])


def make_format(element: str, block: tuple[int, int] | None, rule: str, pow2=False) -> Format:
    scale = {"amax": "fp32", "two_level": "e4m3"}.get(rule, "e8m0")
    family = {"amax": "float8", "two_level": "nvfp4"}.get(rule, "mxfp8")
    return Format(named_element(element), block, named_element(scale), rule, family, pow2)


def specs_of(options: dict) -> dict[str, PlaneSpec]:
    """PlaneSpec per side from a golden's options."""
    family = options["family"]
    special = {}
    if family == "fp8_tensor":
        fmt = make_format(options["element"], None, "amax", options["pow2"])
    elif family == "fp8_block":
        fmt = make_format(options["element"], tuple(options["block"]), "amax", options["pow2"])
    elif family == "mx":
        fmt = make_format(options["element"], (1, 32), options["scale_rule"])
    else:
        fmt = make_format("e2m1", tuple(options["block"]), "two_level")
        special = {
            "tensor_bound": float(options.get("e4m3_max", 448)),
            "four_over_six": options.get("four_over_six"),
            "row_scaled": bool(options.get("row_scaled")),
        }
    signs = None
    if options.get("rht"):
        # The file states its signs; they must be the default ones.
        assert tuple(options.get("rht_signs") or SIGNS) == SIGNS
        signs = DEFAULT_SIGNS
    return {"row": PlaneSpec(fmt, **special), "col": PlaneSpec(fmt, signs=signs, **special)}


def compare_plane(got: dict, golden: Golden, side: str, spec: PlaneSpec) -> None:
    """One plane's buffers with `row_*` or `col_*`, mapped as the README says."""
    if side == "col" and "col_data" not in golden.arrays:
        return  # for information only in row-scaled files: the source cannot make one
    compared = 0
    for name in ("data", "scale", "amax"):
        key = f"{side}_{name}"
        if key not in golden.arrays or name not in got:
            continue
        mine = got[name].numpy() if isinstance(got[name], torch.Tensor) else got[name]
        want = golden.arrays[key]
        if name == "scale" and spec.format.block == (16, 16):
            mine = np.repeat(mine, 16, axis=0)[: want.shape[0]]
        if name == "data" and spec.format.element.name == "e2m1":
            # The source loses the sign of -0: compare codes, where 8 may stand for 0 iff x < 0.
            x = values_of(golden.tensor("x"))
            if side == "col":
                x = x.T if spec.signs is None else values_of(golden.tensor("col_rht"))
            mine, want = (unpack_nibbles(packed, x.shape[1]) for packed in (mine, want))
            assert np.signbit(x)[mine == 8].all()
            mine = np.where((mine == 8) & (want == 0), 0, mine)
        assert_bits_equal(mine, want, key)
        compared += 1
    assert compared >= 2


def ulp_distance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Distance in float32 steps; both signs of zero coincide."""

    def ordered(values):
        bits = np.ascontiguousarray(values, dtype=np.float32).view(np.int32).astype(np.int64)
        return np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)

    return np.abs(ordered(a) - ordered(b))


def compare_decode(got: np.ndarray, golden: Golden, spec: PlaneSpec) -> None:
    want = golden.arrays["row_deq"]
    if spec.format.rule == "two_level":
        assert ulp_distance(got, want).max(initial=0) <= 3
    else:
        assert_bits_equal(got, want, "row_deq")


def test_goldens_are_there():
    counts = {"fp8": 25, "mxfp8": 24, "mxfp6": 16, "mxfp4": 8, "nvfp4": 36}
    counts |= {"cast": 5, "gemm": 8, "e8m0": 1}
    assert {prefix: len(_files(prefix)) for prefix in counts} == counts


@pytest.mark.parametrize("name", QUANTIZED)
def test_oracle_equals_golden(name):
    golden = load(name)
    x = golden.tensor("x")
    specs = specs_of(golden.options)
    for side, direction in (("row", "rowwise"), ("col", "columnwise")):
        got = expected(x, specs[side], direction)
        compare_plane(got, golden, side, specs[side])
        if side == "row" and "row_deq" in golden.arrays:
            decoded = oracle_decode(got, oracle_spec(specs[side]), *x.shape)
            compare_decode(decoded, golden, specs[side])
    if "col_rht" in golden.arrays:
        transformed = forward_hadamard(values_of(x).T, DEFAULT_SIGNS)
        assert_bits_equal(transformed, golden.tensor("col_rht"), "col_rht")


@pytest.mark.parametrize("name", QUANTIZED)
def test_backend_equals_golden(name, backend):
    golden = load(name)
    x = golden.tensor("x")
    specs = specs_of(golden.options)
    row, col = encode_planes(x, specs["row"], specs["col"])
    compare_plane(row, golden, "row", specs["row"])
    compare_plane(col, golden, "col", specs["col"])
    if "row_amax" in golden.arrays:
        amax = torch.ops.hybridq.amax(x, str(specs["row"]), "rowwise")
        assert_bits_equal(amax, golden.arrays["row_amax"], "amax op", any_nan=False)
    if "row_deq" in golden.arrays:
        compare_decode(decode_plane(row, specs["row"], *x.shape).numpy(), golden, specs["row"])


@pytest.mark.parametrize("name", CASTS)
def test_oracle_equals_golden_casts(name):
    golden = load(name)
    element = ELEMENTS[golden.options["element"]]
    bits = np.arange(1 << 16, dtype=np.uint16)
    values = (bits.astype(np.uint32) << 16).view(np.float32)
    counted = np.ones(1 << 16, dtype=bool)
    counted[golden.arrays["bf16_nan"]] = False
    codes = cast_nearest(values, element)
    assert_bits_equal(codes[counted], golden.arrays["bf16_codes"][counted], "bf16 casts")
    assert (codes[~counted] == element.nan_code).all()
    assert_bits_equal(cast_nearest(golden.arrays["f32"], element), golden.arrays["f32_codes"])


@pytest.mark.parametrize("name", [name for name in CASTS if name[-4:] in ("e4m3", "e5m2")])
def test_backend_equals_golden_casts(name, backend):
    """amax = fmax from outside makes the multiplier 1: encode is then the bare cast."""
    golden = load(name)
    element = ELEMENTS[golden.options["element"]]
    spec = PlaneSpec(make_format(element.name, None, "amax"))
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    x = bits.view(torch.bfloat16).view(256, 256)
    want = golden.arrays["bf16_codes"].copy()
    want[golden.arrays["bf16_nan"]] = element.nan_code
    for tensor, codes in (
        (x, want.reshape(256, 256)),
        (golden.tensor("f32")[None], golden.arrays["f32_codes"][None]),
    ):
        plane = encode_plane(tensor, spec, stat=stat_of(element.max))
        assert plane["scale"].item() == 1.0
        assert_bits_equal(plane["data"], codes, name)


def test_oracle_equals_golden_e8m0_table():
    golden = load("e8m0_table")
    assert_bits_equal(e8m0_round_up(golden.arrays["ratio"]), golden.arrays["ratio_byte"])
    amax = (np.arange(1 << 15, dtype=np.uint32) << 16).view(np.float32)
    for name in ("e4m3", "e5m2"):
        byte, _ = rceil_scale(amax, ELEMENTS[name])
        assert_bits_equal(byte, golden.arrays[f"amax_byte_{name}"], name)


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_backend_equals_golden_e8m0_table(element, backend):
    """All 32,768 BF16 amax values, one block of 32 each."""
    golden = load("e8m0_table")
    x = torch.zeros(1 << 15, 32, dtype=torch.bfloat16)
    x[:, 5] = torch.arange(1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    plane = encode_plane(x, PlaneSpec(make_format(element, (1, 32), "rceil")))
    assert_bits_equal(plane["scale"][:, 0], golden.arrays[f"amax_byte_{element}"], element)


def _gemm_specs(golden: Golden) -> dict[str, PlaneSpec]:
    options = golden.options
    family = options["family"]
    specs = {}
    for index, side in enumerate("ab"):
        if family == "nvfp4":
            one = {"family": family, **options[side]}
        elif family == "mx":
            one = {**options, "element": options["element"][index]}
        else:
            one = {**options, "block": options["block"][index]}
        specs[side] = specs_of(one)["col" if options.get("columnwise") else "row"]
    return specs


def _gemm_direction(golden: Golden) -> str:
    return "columnwise" if golden.options.get("columnwise") else "rowwise"


def _own_matrix(x: torch.Tensor, direction: str) -> torch.Tensor:
    return x if direction == "rowwise" else x.T


@pytest.mark.parametrize("name", GEMMS)
def test_oracle_equals_golden_gemm(name):
    """The FP64 product of the oracle's operands is the golden's truth, but for FP64 rounding."""
    golden = load(name)
    specs, direction = _gemm_specs(golden), _gemm_direction(golden)
    operands = []
    for side in "ab":
        x = golden.tensor(side)
        plane = expected(x, specs[side], direction)
        values, factor = operand(plane, oracle_spec(specs[side]), *_own_matrix(x, direction).shape)
        operands.append(values.astype(np.float64) * np.float64(factor))
    product = operands[0] @ operands[1].T
    truth = golden.arrays["truth"]
    magnitude = np.abs(operands[0]) @ np.abs(operands[1]).T
    # The truth multiplies its FP32 factors in another order: a few ulp of FP32 per product.
    assert (np.abs(product - truth) <= magnitude * 4 * 2.0**-24).all()


@pytest.mark.parametrize("name", GEMMS)
def test_backend_equals_golden_gemm(name, backend):
    """Within `K * 2^-24 * sum |a||b|`, plus the roundings of factors and of the FP32 output."""
    golden = load(name)
    specs, direction = _gemm_specs(golden), _gemm_direction(golden)
    sides, magnitudes = [], []
    for side in "ab":
        x = golden.tensor(side)
        rows, k = _own_matrix(x, direction).shape
        plane = encode_plane(x, specs[side], direction)
        sides.append(([plane[key] for key in plane], str(specs[side]), rows))
        values, factor = operand(
            {key: value.numpy() for key, value in plane.items()}, oracle_spec(specs[side]), rows, k
        )
        magnitudes.append(np.abs(values.astype(np.float64)) * np.float64(factor))
    got = torch.ops.hybridq.gemm(*sides[0], *sides[1], k, out_dtype=torch.float32)
    bound = magnitudes[0] @ magnitudes[1].T * (k + 4) * 2.0**-24
    error = np.abs(got.double().numpy() - golden.arrays["truth"])
    assert (error <= bound).all(), f"{(error / np.maximum(bound, 1e-300)).max()} of the bound"


def test_signs_are_the_documented_ones():
    """numerics.md spells them: + + + - + - - - - - - + - + - -."""
    text = "".join("+" if sign > 0 else "-" for sign in SIGNS)
    assert text == "+++-+------+-+--"
    assert OracleSpec("e2m1", (1, 16), "two_level", signs=DEFAULT_SIGNS).signs == 0xD7E8
