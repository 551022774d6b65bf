"""What a rank encodes of its window, against the planes of the whole: the same bytes."""

from __future__ import annotations

import math

import pytest
import torch

import hybridq
from cut_ranks import check, parts_of
from hybridq import PlaneSpec
from hybridq.errors import PlaneError
from hybridq.kernels.choice import DECODED, EncodeRequest
from hybridq.shards import Cut, common_unit, cut, encode_cut

FORMATS = hybridq.formats.names()
#: Parts of the dimension that is dealt out: aligned for all, inside of blocks, an empty one.
SIZES = {"aligned": (128, 256), "cut": (37, 0, 5, 94), "odd": (68, 68), "thin": (1, 1, 31)}
OTHER = 51


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("name", FORMATS)
def test_the_bytes_are_those_of_the_whole(name, sizes, dim) -> None:
    dtype = torch.bfloat16
    spec = PlaneSpec.parse(name).resolve(dtype)
    text = spec.plain_text(dtype)
    torch.manual_seed(0)
    shape = (sum(sizes), OTHER) if dim == 0 else (OTHER, sum(sizes))
    x = torch.randn(shape).mul(torch.randn(shape).exp()).to(dtype)
    unit = common_unit([(text, dim), (text, 1 - dim)])
    made, cuts, reductions = parts_of(x, sizes, dim, unit, text, text)
    row = torch.ops.hybridq.encode(x, spec.text, "")
    col = torch.ops.hybridq.encode(x, "", spec.text)
    takes = text.needs_amax or text.row_scaled
    takes = takes or any(sum(sizes[:n]) % unit for n in range(1, len(sizes)))
    assert reductions <= int(takes)
    for (rows, cols), one in zip(made, cuts, strict=True):
        if not text.is_plain:
            check(row, rows, spec, dim, one, lambda n: (n, OTHER) if dim == 0 else (OTHER, n))
            check(col, cols, spec, 1 - dim, one, lambda n: (OTHER, n) if dim == 0 else (n, OTHER))


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("pair", [("mxfp8_32x32", "nvfp4_16x16"), ("fp8_128x128", "mxfp8_32x32")])
def test_square_blocks_of_two_sizes(pair, dim) -> None:
    """A boundary cuts blocks of both planes, which have different largest values."""
    dtype, sizes = torch.bfloat16, SIZES["cut"]
    specs = [PlaneSpec.parse(name).resolve(dtype) for name in pair]
    texts = [spec.plain_text(dtype) for spec in specs]
    shape = (sum(sizes), OTHER) if dim == 0 else (OTHER, sum(sizes))
    x = torch.randn(shape).mul(torch.randn(shape).exp()).to(dtype)
    unit = common_unit([(texts[0], dim), (texts[1], 1 - dim)])
    made, cuts, _ = parts_of(x, sizes, dim, unit, *texts)
    row = torch.ops.hybridq.encode(x, specs[0].text, "")
    col = torch.ops.hybridq.encode(x, "", specs[1].text)
    for (rows, cols), one in zip(made, cuts, strict=True):
        check(row, rows, specs[0], dim, one, lambda n: (n, OTHER) if dim == 0 else (OTHER, n))
        check(col, cols, specs[1], 1 - dim, one, lambda n: (OTHER, n) if dim == 0 else (n, OTHER))


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(
    "pair", [("mxfp8", "nvfp4"), ("nvfp4", "fp8_e4m3"), ("fp8_block", "mxfp8")]
)
def test_windows_multiply_as_the_whole(pair, dim) -> None:
    """Sums over ranks of products over windows, decoded in FP64, are the product of the whole."""
    sizes, dtype = (68, 69), torch.float32
    texts = [PlaneSpec.parse(name).resolve(dtype).plain_text(dtype) for name in pair]
    unit = common_unit([(text, axis) for text in texts for axis in (0, 1)])
    torch.manual_seed(1)
    a, b = torch.randn(40, 137), torch.randn(24, 137)
    made = [
        parts_of(x, sizes, 1, unit, text, None)[0] for x, text in zip((a, b), texts, strict=True)
    ]
    total = torch.zeros(40, 24, dtype=torch.float64)
    for rank in range(2):
        cols = Cut("group", rank, sizes, 1, unit).padded(torch.zeros(1, sizes[rank]), 1).shape[1]
        one, two = (
            torch.ops.hybridq.decode(planes[rank][0], text.spec, len(x), cols, dtype).double()
            for planes, text, x in zip(made, texts, (a, b), strict=True)
        )
        total += one @ two.T
    whole = [
        torch.ops.hybridq.decode(
            torch.ops.hybridq.encode(x, text.spec, ""), text.spec, len(x), 137, dtype
        ).double()
        for x, text in zip((a, b), texts, strict=True)
    ]
    assert torch.allclose(total, whole[0] @ whole[1].T, rtol=1e-12, atol=1e-12)


def test_a_columnwise_plane_of_the_decoded_rowwise_one() -> None:
    sizes, dtype = (37, 31), torch.bfloat16
    row = PlaneSpec.parse("mxfp8").resolve(dtype).plain_text(dtype)
    col = PlaneSpec.parse("nvfp4").resolve(dtype).plain_text(dtype)
    x = torch.randn(OTHER, 68, dtype=dtype)
    unit = common_unit([(row, 1), (col, 0)])
    made, cuts, reductions = parts_of(x, sizes, 1, unit, row, col, DECODED)
    assert reductions == 2
    whole = torch.ops.hybridq.encode(x, row.spec, col.spec, col_source=DECODED)
    for (rows, cols), one in zip(made, cuts, strict=True):
        spec = PlaneSpec.parse(row.spec)
        check(whole[: row.num_buffers], rows, spec, 1, one, lambda n: (OTHER, n))
        check(
            whole[row.num_buffers :], cols, PlaneSpec.parse(col.spec), 0, one, lambda n: (n, OTHER)
        )


def test_nan_and_infinity_reach_the_other_rank() -> None:
    dtype = torch.float32
    text = PlaneSpec.parse("fp8_block").resolve(dtype).plain_text(dtype)
    for bad in (math.nan, math.inf):
        x = torch.ones(4, 100)
        x[1, 90] = bad
        made, _, _ = parts_of(x, (50, 50), 1, common_unit([(text, 1)]), text, None)
        whole = torch.ops.hybridq.encode(x, text.spec, "")
        assert torch.equal(made[0][0][1].view(torch.uint8), whole[1].view(torch.uint8))


def test_an_amax_group_is_reduced_over_too(monkeypatch) -> None:
    """One amax is of both groups, and blocks that are cut are of the ranks of the cut alone."""
    text = PlaneSpec.parse("nvfp4").resolve(torch.float32).plain_text(torch.float32)
    x = torch.randn(4, 40)
    asked = []

    def reduce(amax: torch.Tensor, name: str) -> torch.Tensor:
        asked.append((name, amax.clone()))
        return torch.full_like(amax, 100.0)

    monkeypatch.setattr(cut, "group_amax", reduce)
    monkeypatch.setattr(cut, "functional_all_reduce", lambda bits, op, group: bits)
    one = Cut("group", 0, (40, 24), 1, 16)
    rows, _ = encode_cut(one.padded(x, 1), text, None, EncodeRequest(), one, "others")
    assert [(name, amax.item()) for name, amax in asked] == [("others", x.abs().max().item())]
    want = torch.ops.hybridq.encode(one.padded(x, 1), text.spec, "", torch.tensor([100.0]))
    assert all(map(torch.equal, rows, want))


def test_what_mixes_values_of_two_ranks_is_refused() -> None:
    text = PlaneSpec.parse("nvfp4;rht").resolve(torch.float32).plain_text(torch.float32)
    one = Cut("group", 0, (20, 12), 1, 16)
    with pytest.raises(PlaneError, match=r"cut at multiples of 16, since a Hadamard.*\[20, 12\]"):
        encode_cut(one.padded(torch.ones(4, 20), 1), text, None, EncodeRequest(), one)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", ["mxfp8;sr", "nvfp4;sr"])
def test_random_bits_are_those_of_the_place(name, dim) -> None:
    """Also where a part needs nothing of other ranks but to know where it is."""
    sizes, dtype = (64, 128), torch.bfloat16
    text = PlaneSpec.parse(name).resolve(dtype).plain_text(dtype)
    shape = (192, OTHER) if dim == 0 else (OTHER, 192)
    x = torch.randn(shape, dtype=dtype)
    assert Cut("group", 0, sizes, dim, 32).is_seen(text)
    made, _, reductions = parts_of(x, sizes, dim, 32, text, None)
    assert reductions == int(text.needs_amax)
    whole = torch.ops.hybridq.encode(x, text.spec, "", seed=torch.tensor([7]))
    step = text.codes_per_byte if dim == 1 else 1
    codes = torch.cat([rows[0] for (rows, _) in made], dim)
    assert torch.equal(codes, whole[0]) and codes.shape[dim] == 192 // step


@pytest.mark.parametrize("dim", [0, 1])
def test_values_of_the_decoded_rowwise_plane(dim) -> None:
    """A columnwise plane in high precision that is made of the rowwise one is not the original."""
    sizes, dtype = (64, 64), torch.bfloat16
    row = PlaneSpec.parse("nvfp4").resolve(dtype).plain_text(dtype)
    plain = PlaneSpec.plain(dtype).plain_text(dtype)
    x = torch.randn((128, 64) if dim == 0 else (64, 128), dtype=dtype)
    made, _, _ = parts_of(x, sizes, dim, 16, row, plain, DECODED)
    codes = torch.ops.hybridq.encode(x, row.spec, "")
    seen = torch.ops.hybridq.decode(codes, row.spec, *x.shape, dtype)
    assert torch.equal(torch.cat([cols[0] for _, cols in made], 1 - dim), seen.t())
