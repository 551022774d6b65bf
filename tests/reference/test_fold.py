"""Fold against a scalar model: Python numbers and ml_dtypes' casts, no code of hybridq's but names.

`tests/kernels/choice/test_precision_error.py` measures what folding costs a product.
"""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from gemm_cases import decoded, make
from hybridq import reference
from hybridq.errors import SpecError
from hybridq.formats import DEFAULT_SIGNS, PlaneSpec, element, format
from hybridq.formats.base import Format
from hybridq.kernels import folded_backend as backend_fold
from hybridq.kernels.choice.arguments import Operand

TYPES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
}
LIFT = {"e4m3": 0, "e5m2": 0, "e2m1": 6, "e2m3": 5, "e3m2": 4}
NAMES = [
    "mxfp8",
    "mxfp8_e5m2",
    "mxfp8_32x32",
    "mxfp8_e5m2_32x32",
    "mxfp4",
    "mxfp6_e2m3",
    "mxfp6_e3m2",
]


def table(name: str) -> np.ndarray:
    """FP64 value of every code, by ml_dtypes."""
    bits = element(name).bits
    return np.arange(1 << bits, dtype=np.uint8).view(TYPES[name]).astype(np.float64)


def model(
    codes: np.ndarray, scale: np.ndarray, name: str, block: tuple[int, int], height: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """Codes, FP64 scales and how many changed, one value after another."""
    values, target = table(name), TYPES["e5m2" if name == "e5m2" else "e4m3"]
    rows, cols = codes.shape
    down, right = math.ceil(rows / height), math.ceil(cols / 128)
    out, scales, changed = np.zeros_like(codes), np.zeros((down, right)), 0
    for i in range(down):
        for j in range(right):
            at = [
                (r, c)
                for r in range(i * height, min(rows, (i + 1) * height))
                for c in range(j * 128, min(cols, (j + 1) * 128))
            ]
            bytes_ = {int(scale[r // block[0], c // block[1]]) for r, c in at}
            top = max((b for b in bytes_ if b != 255), default=0)
            scales[i, j] = 2.0 ** (top - 127 - LIFT[name])
            for r, c in at:
                byte, value = int(scale[r // block[0], c // block[1]]), values[codes[r, c]]
                if byte == 255 or math.isnan(value):
                    out[r, c] = 0x7F
                elif math.isinf(value):
                    out[r, c] = codes[r, c]
                else:
                    shifted = value * 2.0 ** (byte - top + LIFT[name])
                    made = np.array(shifted).astype(target)
                    out[r, c] = made.view(np.uint8)
                    changed += float(made) != shifted
    return out, scales, changed


def hold(codes: np.ndarray, scale: np.ndarray, spec: PlaneSpec, height: int) -> reference.Folded:
    """Fold a plane, hold it to the model, return it."""
    rows, cols = codes.shape
    known = spec.format.element
    data = reference.pack(torch.from_numpy(codes), known)
    buffers = [data.contiguous(), torch.from_numpy(scale)]
    made = reference.fold_plane(buffers, spec, rows, cols, height)
    want = model(codes, scale, known.name, spec.format.block, height)
    np.testing.assert_array_equal(made.codes.numpy(), want[0])
    np.testing.assert_array_equal(made.scale.double().numpy(), want[1])
    assert made.changed.tolist() == [want[2]] and made.changed.dtype == torch.int64
    return made


@pytest.mark.parametrize("name", ["mxfp8", "mxfp8_e5m2", "mxfp4", "mxfp6_e2m3", "mxfp6_e3m2"])
def test_every_code_at_every_distance(name: str) -> None:
    """Each row has one block of the largest scale; the others hold all codes, d binades below."""
    spec = PlaneSpec(format(name))
    bits = spec.format.element.bits
    every = np.arange(256, dtype=np.uint8) & ((1 << bits) - 1)
    for first in range(0, 256, 96):
        part = np.resize(every[first : first + 96], 96)
        codes = np.tile(np.concatenate([np.zeros(32, np.uint8), part]), (41, 1))
        scale = np.full((41, 4), 150, dtype=np.uint8)
        scale[:, 1:] -= np.arange(41, dtype=np.uint8)[:, None]
        hold(codes, scale, spec, 1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 130), (7, 300), (37, 64), (0, 5), (5, 0)])
def test_shapes_and_blocks(name: str, shape: tuple[int, int], seed: int) -> None:
    random = np.random.default_rng(seed)
    spec = PlaneSpec(format(name))
    block, bits = spec.format.block, spec.format.element.bits
    codes = random.integers(0, 1 << bits, shape, dtype=np.uint8)
    blocks = (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
    hold(codes, random.integers(100, 112, blocks, dtype=np.uint8), spec, 1)


@pytest.mark.parametrize("name", ["mxfp8", "mxfp8_32x32", "mxfp4"])
def test_squares(name: str, seed: int) -> None:
    random = np.random.default_rng(seed)
    spec = PlaneSpec(format(name))
    block, bits = spec.format.block, spec.format.element.bits
    codes = random.integers(0, 1 << bits, (150, 140), dtype=np.uint8)
    blocks = (-(-150 // block[0]), -(-140 // block[1]))
    hold(codes, random.integers(100, 112, blocks, dtype=np.uint8), spec, 128)


def test_blocks_of_another_width() -> None:
    wide = PlaneSpec(Format(element("e4m3"), (1, 64), element("e8m0"), "rceil", "mxfp8"))
    codes = np.arange(256, dtype=np.uint8).reshape(2, 128)
    hold(codes, np.array([[120, 125], [130, 120]], dtype=np.uint8), wide, 1)


@pytest.mark.parametrize("name", ["mxfp8", "mxfp8_e5m2", "mxfp4"])
def test_corner_cases_of_scales(name: str) -> None:
    """NaN blocks do not raise the group's scale; byte 0 and 254; all NaN; zero blocks."""
    spec = PlaneSpec(format(name))
    bits = spec.format.element.bits
    codes = np.tile(np.arange(128, dtype=np.uint8) & ((1 << bits) - 1), (6, 1))
    codes[5] = np.tile(np.array([0, 1 << (bits - 1)], dtype=np.uint8), 64)  # zeros of both signs
    scale = np.array(
        [
            [255, 120, 121, 119],
            [255, 255, 255, 255],
            [0, 0, 0, 0],
            [254, 254, 253, 250],
            [0, 254, 1, 2],
            [0, 90, 255, 0],
        ],
        dtype=np.uint8,
    )
    made = hold(codes, scale, spec, 1)
    target = backend_fold.folded_spec(spec).format.element
    values = reference.decode_codes(made.codes, target)
    assert values[0, :32].isnan().all() and values[1].isnan().all()
    signs = torch.from_numpy(codes[5] != 0)
    assert torch.equal(values[5, :64].signbit(), signs[:64]) and not values[5, :64].any()
    assert made.scale[2, 0] == 2.0 ** (-127 - LIFT[str(spec.format.element)])  # a subnormal


def test_infinities_stay_infinite() -> None:
    spec = PlaneSpec(format("mxfp8_e5m2"))
    codes = np.array([[0x7C, 0xFC, 0x7D, 0x3C]], dtype=np.uint8)
    made = hold(codes, np.array([[100]], dtype=np.uint8), spec, 1)
    assert made.codes.tolist() == [[0x7C, 0xFC, 0x7F, 0x3C]] and made.changed.item() == 0


def test_narrow_elements_fold_exactly_while_scales_are_close() -> None:
    """E2M1 is raised by 2^6: its 0.5 stays a multiple of E4M3's 2^-9 down to 14 binades below."""
    x = torch.randn(64, 1024) * 2.0 ** torch.randint(-7, 8, (64, 32)).repeat_interleave(32, 1)
    plane = make(x, "mxfp4")
    made = reference.fold_plane(plane.tensors, plane.spec, 64, 1024)
    spread = plane.scale.reshape(64, 8, 4).int()
    assert int((spread.amax(2) - spread.amin(2)).max()) in (13, 14, 15, 16)
    close = (spread.amax(2) - spread.amin(2) <= 14).repeat_interleave(128, 1)
    values = reference.decode_codes(made.codes, element("e4m3")).double()
    values = values * made.scale.double().repeat_interleave(128, 1)
    assert torch.equal(values[close], torch.from_numpy(decoded(plane))[close])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("height", [1, 128])
def test_a_folded_plane_is_a_plane(name: str, height: int) -> None:
    """Its spec says all that decoding needs; errors stay below `s / max` of the group's amax."""
    x = torch.randn(130, 260) * torch.logspace(-2, 2, 260)
    plane = make(x, name)
    operand = Operand(plane.tensors, plane.spec, *plane.matrix)
    made = backend_fold.fold(operand, height)
    spec = backend_fold.folded_spec(plane.spec, height)
    again = torch.ops.hybridq.decode(
        [made.codes, made.scale.contiguous()], spec.text, *plane.matrix, torch.float32
    ).double()
    want = torch.from_numpy(decoded(plane))
    target = spec.format.element
    limit = target.min_subnormal / target.max
    for r in range(0, 130, height):
        for c in range(0, 260, 128):
            part = (slice(r, r + height), slice(c, c + 128))
            error = (again[part] - want[part]).abs().max()
            # With squares it is the amax of all rows that share a scale.
            side = plane.spec.format.block[0]
            top = slice(r // side * side, (r + height - 1) // side * side + side)
            assert error <= limit * want[top, part[1]].abs().max()
    assert made.changed.item() == int((again != want).sum())


def test_a_transforms_padding_is_folded_too() -> None:
    spec = PlaneSpec(format("mxfp8"), False, DEFAULT_SIGNS)
    plane = make(torch.randn(3, 90), spec)
    made = reference.fold_plane(plane.tensors, spec, 3, 90)
    assert made.codes.shape == (3, 96)
    want, scales, changed = model(plane.data.numpy(), plane.scale.numpy(), "e4m3", (1, 32), 1)
    np.testing.assert_array_equal(made.codes.numpy(), want)
    assert (
        made.changed.item() == changed and made.scale.double().numpy().tolist() == scales.tolist()
    )


@pytest.mark.parametrize("name", ["mxfp8", "mxfp8_e5m2"])
@pytest.mark.parametrize("shape", [(1, 1), (7, 300), (64, 256), (0, 5), (5, 0)])
def test_rule_folded_encodes_what_fold_makes_of_the_plane(
    name: str, shape: tuple[int, int]
) -> None:
    spec = PlaneSpec(format(name))
    folded = PlaneSpec(spec.format.folded)
    assert folded.format.unfolded == spec.format and PlaneSpec.parse(folded.text) == folded
    x = torch.randn(shape) * torch.exp2(torch.randint(-20, 20, (1, shape[1])).float())
    if x.numel() > 100:
        x[0, 70], x[1, 3], x[2, 40:80] = torch.nan, torch.inf, 0.0
    made = reference.fold_plane(reference.encode_plane(x, spec), spec, *shape)
    codes, scale = reference.encode_plane(x, folded)
    assert torch.equal(codes, made.codes) and torch.equal(scale, made.scale)
    read = reference.decode_plane([codes, scale], folded, *shape, torch.float32)
    assert read.shape == shape


def test_rule_folded_goes_with_fp8_and_groups_of_128() -> None:
    for name, block in (("e4m3", (1, 64)), ("e4m3", (128, 128)), ("e2m1", (1, 128))):
        with pytest.raises(SpecError, match="rule 'folded' goes with"):
            Format(element(name), block, element("fp32"), "folded", "float8_block")
    assert format("mxfp4").folded is format("mxfp8_32x32").folded is format("mxfp8").unfolded
