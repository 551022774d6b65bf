"""FP8 codes of BF16 under power-of-two scales: the 16-bit integers against the FP32 path.

Both planes of a matrix come from one rounding of x; a vector with a result that is subnormal in the
element is made anew, and a tile with an infinite, NaN or tiny block is left to FP32. A view with a
gap between its columns takes the general path, which is held to the slow model. So here: every BF16
value under amaxes whose scales put it above, at and below each of these borders.
"""

from __future__ import annotations

import pytest
import torch

from core_tools import SPECS, encode_pair, same_bytes, sample, using_variant
from hybridq import _core

PAIRS = [
    ("mxfp8", "mxfp8"),
    ("mxfp8_e5m2", "mxfp8_e5m2"),
    ("mxfp8", "mxfp8_e5m2"),
    ("mxfp8_e5m2_ceil", "mxfp8_floor"),
    ("mxfp8_32x32", "mxfp8_even"),
    ("fp8_1x128", "mxfp8_32x32_floor"),
    ("mxfp8", "fp8_1x128"),
    ("mxfp8", None),
    (None, "mxfp8_e5m2"),
    ("fp8_1x128", "nvfp4"),
]
#: Exponent fields of block amaxes. A base ends at 2^-104 (E4M3) and 2^-88 (E5M2), about.
FIELDS = [0, 1, 2, *range(18, 28), *range(34, 44), 60, 100, *range(124, 130), 200, 253, 254]
#: Mantissas: powers of two, 448 and 57344 (1.75) with their neighbours, the largest.
MANTISSAS = [0x01, 0x00, 0x5F, 0x60, 0x61, 0x7F]
BLOCK, COLS = 32, 512


@pytest.fixture(params=_core.build_info()["tables"])
def variant(request):
    with using_variant(request.param):
        yield request.param


def from_bits(bits: torch.Tensor) -> torch.Tensor:
    return bits.to(torch.int16).view(torch.bfloat16)


def gapped(x: torch.Tensor) -> torch.Tensor:
    wide = torch.full((x.shape[0], 2 * x.shape[1]), 7.0, dtype=x.dtype)
    wide[:, ::2] = x
    return wide[:, ::2]


def planes(x: torch.Tensor, row: str | None, col: str | None) -> list:
    specs = [None if name is None else SPECS[name] for name in (row, col)]
    stat = torch.tensor([x.float().abs().nan_to_num().max().item()])
    stats = tuple(stat if spec is not None and spec.needs_amax else None for spec in specs)
    return encode_pair(x, *specs, stats=stats)


def agrees(x: torch.Tensor, row: str | None, col: str | None) -> list:
    """Both paths write the same planes of x; return them."""
    got, want = planes(x, row, col), planes(gapped(x), row, col)
    for one, other in zip(got, want, strict=True):
        assert (one is None and other is None) or same_bytes(one, other), (row, col)
    return got


def under(largest: int, magnitudes: torch.Tensor) -> torch.Tensor:
    """Values of both signs up to `largest` (bits) in blocks of 32 that each hold it, [n, 512]."""
    kept = magnitudes[magnitudes <= largest]
    kept = torch.cat([kept, kept | 0x8000])
    kept = kept[torch.randperm(len(kept), generator=torch.Generator().manual_seed(largest))]
    per_row = COLS // BLOCK * (BLOCK - 1)
    rows = -(-len(kept) // per_row)
    body = torch.zeros(rows * per_row, dtype=torch.int64)
    body[: len(kept)] = kept
    blocks = torch.full((rows, COLS // BLOCK, BLOCK), largest)
    blocks[:, :, 1:] = body.view(rows, -1, BLOCK - 1)
    return from_bits(blocks.view(rows, COLS))


@pytest.mark.thinned(1, few=8)
@pytest.mark.parametrize(("row", "col"), PAIRS, ids=str)
def test_every_magnitude_near_the_borders_of_every_scale(row, col, variant):
    """Per maximum: all magnitudes of its 18 binades and of 6 about E5M2's subnormals, and 0."""
    everything = torch.arange(0x7F80)
    found = set()
    for field in FIELDS:
        for mantissa in MANTISSAS:
            largest = (field << 7) | mantissa
            below = (largest >> 7) - (everything >> 7)
            near = (below <= 18) | ((below >= 29) & (below <= 34)) | (everything < 0x90)
            x = under(largest, everything[near])
            for one in (x, x.T.contiguous()):
                got = agrees(one, row, col)
                found |= {code for plane in got if plane for code in plane[0].unique().tolist()}
    # The data reached subnormal codes of both signs, normal ones and the largest.
    assert {0x00, 0x01, 0x07, 0x08, 0x7B, 0x80, 0x81, 0x87, 0x88, 0xFB} <= found


@pytest.mark.parametrize(("row", "col"), PAIRS, ids=str)
def test_every_value_under_some_scales(row, col, variant):
    """All 65,536 values, NaN and infinities too: shuffled, and under a few finite amaxes."""
    order = torch.randperm(1 << 16, generator=torch.Generator().manual_seed(5))
    agrees(from_bits(order).view(-1, COLS), row, col)
    for largest in (0x3F80, 0x43E0, 0x477F, 0x7F7F):
        x = under(largest, torch.arange(0x7F80))
        agrees(x, row, col)
        agrees(x.T.contiguous(), row, col)


@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7FC0, 0xFF81, 0x0001, 0x8000, 0x0B80])
def test_one_block_that_has_no_base(bits, variant):
    """Infinity, NaN, a tiny maximum or zeros in one block change the codes of that block alone."""
    plain = sample(200, 1100, torch.bfloat16, special=False)
    x = plain.clone()
    x[64:96, 512:544] = 0
    x[70, 520] = from_bits(torch.tensor([bits]))
    for row, col in PAIRS[:5]:
        got, base = agrees(x, row, col), planes(plain, row, col)
        changed = (got[0][0] != base[0][0]).nonzero()
        assert len(changed)
        assert changed[:, 0].min() >= 64 and changed[:, 0].max() < 96
        assert changed[:, 1].min() >= 512 and changed[:, 1].max() < 544


@pytest.mark.parametrize("shape", [(1, 1), (3, 31), (17, 33), (64, 64), (65, 95), (129, 577)])
def test_odd_tails_with_subnormals_in_them(shape, variant):
    """Ragged units: every other element far below its neighbours, down to zero."""
    x = sample(*shape, torch.bfloat16, special=False).float()
    scale = torch.arange(x.numel()).view(shape) % 5
    x = (x * torch.exp2(-6.0 * scale)).bfloat16()
    x[:, -1:] = -0.0
    for row, col in PAIRS:
        agrees(x, row, col)
        if shape[1] > 1:
            agrees(x[:, 1:], row, col)


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2_pow2"])
def test_planes_with_one_scale_share_their_codes(name, variant):
    """One scale for the tensor: the columnwise codes are the rowwise ones, transposed."""
    spec = SPECS[name]
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for shape in ((1, 1), (17, 33), (64, 64), (130, 577)):
            for last in (1.0, 0.0, float("inf"), float("nan")):
                x = sample(*shape, dtype, special=False)
                x[-1, -1] = last
                stats = (torch.tensor([x.float().abs().max().item()]),) * 2
                row, col = encode_pair(x, spec, spec, stats=stats)
                assert torch.equal(row[0].T, col[0])
                for got, want in zip(
                    (row, col), encode_pair(gapped(x), spec, spec, stats=stats), strict=True
                ):
                    assert same_bytes(got, want)
