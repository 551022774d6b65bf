"""FP32 scales of blocks along K multiply sums of codes, on CPUs with a BF16 product of vectors.

Held to the bound of every product around an FP64 product of what the oracle decodes, whichever way
the machine takes; the way itself where the CPU has it.
"""

from __future__ import annotations

import pytest
import torch

import hybridq
from core_tools import using_variant
from gemm_cases import check, check_all_ways, decoded, make
from hybridq.formats import PlaneSpec
from hybridq.kernels.choice import GemmArgs
from hybridq.kernels.cpu import BlockScales, core, multiply, product_reason
from hybridq.kernels.decoded import decoded_gemm
from hybridq.kernels.decoded.block_scales import blocks_reason

SQUARES = "e4m3/128x128/fp32/amax/float8_block"
ROWS = "e4m3/1x128/fp32/amax/float8_block"
NARROW = "e5m2/1x64/fp32/amax/float8_block"
#: (M, N, K): tails of tiles, of blocks and of what is packed at a time, an odd K, one block.
MANY = ((9, 49, 257), (40, 130, 160), (33, 96, 4500), (300, 20, 128), (17, 5, 77))
#: Those that read codes as they lie.
FEW = ((1, 37, 300), (3, 50, 128), (7, 33, 65), (8, 18, 161), (2, 4, 31))
SHAPES = (*MANY, *FEW)
VARIANTS = () if core is None else tuple(core.build_info()["variants"])
BF16 = PlaneSpec.parse("bf16")
REASON = blocks_reason(BF16, PlaneSpec.parse(SQUARES))
needs_blocks = pytest.mark.skipif(REASON is not None, reason=str(REASON))


def matrix(rows: int, cols: int) -> torch.Tensor:
    """Blocks of sizes far apart."""
    sizes = torch.logspace(-4, 4, -(-cols // 64)).repeat_interleave(64)[:cols]
    return torch.randn(rows, cols) * sizes * torch.logspace(-3, 3, rows)[:, None]


def plane(x: torch.Tensor, name: str):
    return make(x.bfloat16() if name == "bf16" else x, name)


PAIRS = [
    ("bf16", SQUARES),
    ("bf16", ROWS),
    ("mxfp8", SQUARES),
    ("nvfp4", ROWS),
    ("fp8_e4m3", SQUARES),
    (ROWS, SQUARES),
    (NARROW, "bf16"),
    (ROWS, "nvfp4;rows"),
    ("fp32", SQUARES),
    (NARROW, ROWS),
    ("bf16", "e4m3/1x256/fp32/amax/float8_block"),
    ("bf16", "e4m3/256x256/fp32/amax/float8_block"),
]


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_any_pair(pair: tuple[str, str]) -> None:
    for m, n, k in SHAPES:
        first, second = (
            torch.randn(rows, k) if "nvfp4" in one else matrix(rows, k)
            for rows, one in zip((m, n), pair, strict=True)
        )
        check_all_ways(plane(first, pair[0]), plane(second, pair[1]))


@pytest.mark.parametrize("variant", VARIANTS)
def test_all_variants_of_the_kernels(variant: str) -> None:
    with using_variant(variant):
        for m, n, k in SHAPES:
            a, b = plane(matrix(m, k), "bf16"), plane(matrix(n, k), SQUARES)
            check(hybridq.gemm(a, b, out_dtype=torch.float32), decoded(a), decoded(b))


@needs_blocks
def test_it_is_that_product_and_keeps_codes(monkeypatch) -> None:
    """What is kept is half of FP32, and no operand of another product."""
    seen = []
    whole = decoded_gemm.BlocksProduct.__call__

    def noted(self, *given):
        seen.append(given[0].rows)
        return whole(self, *given)

    monkeypatch.setattr(decoded_gemm.BlocksProduct, "__call__", noted)
    b = plane(matrix(130, 256), SQUARES)
    for m in (8, 9, 40):
        for _ in range(3):
            a = plane(matrix(m, 256), "bf16")
            check(hybridq.gemm(a, b, out_dtype=torch.float32), decoded(a), decoded(b))
    assert set(seen) == {9, 40}
    assert b.ready.nbytes == 130 * 256 * 2
    wide = plane(matrix(40, 256), "fp32")
    check(hybridq.gemm(wide, b, out_dtype=torch.float32), decoded(wide), decoded(b))


@needs_blocks
def test_no_bit_depends_on_threads_or_on_other_rows() -> None:
    a, b = plane(matrix(70, 500), "bf16"), plane(matrix(96, 500), SQUARES)
    before = torch.get_num_threads()
    try:
        made = []
        for count in (1, 2):
            torch.set_num_threads(count)
            made.append(hybridq.gemm(a, b, out_dtype=torch.float32))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*made)
    part = plane(decoded_rows(a, 11), "bf16")
    assert torch.equal(hybridq.gemm(part, b, out_dtype=torch.float32), made[0][:11])


def decoded_rows(one, count: int) -> torch.Tensor:
    return one.data[:count].float()


def test_nan_stays_in_its_block() -> None:
    x = matrix(150, 256)
    x[1, 3] = torch.nan
    a, b = plane(torch.ones(40, 256), "bf16"), plane(x, SQUARES)
    y = hybridq.gemm(a, b, out_dtype=torch.float32)
    wanted = torch.from_numpy(decoded(b)).isnan().any(1)
    assert torch.equal(y.isnan().any(0), wanted) and wanted[:128].any() and not wanted[128:].any()


def test_a_value_that_leaves_the_range_takes_the_other_way() -> None:
    """A subnormal of the exact operand would count as zero in BF16 instructions."""
    x = torch.randn(40, 256)
    x[3] *= 2.0**-126
    a, b = plane(x, "mxfp8"), plane(matrix(96, 256), SQUARES)
    check(hybridq.gemm(a, b, out_dtype=torch.float32), decoded(a), decoded(b))


@pytest.mark.skipif(product_reason() is not None, reason=str(product_reason()))
def test_the_products_own_errors() -> None:
    a, b = torch.ones(9, 256).bfloat16(), torch.ones(7, 256).bfloat16()
    args = GemmArgs(None, None, torch.float32)
    scales = torch.tensor([[2.0, 3.0]]).repeat(9, 1)
    made = multiply(a, b, None, None, args, BlockScales(128, scales, None))
    assert torch.equal(made, torch.full((9, 7), 5.0 * 128))
    for wrong in (BlockScales(96, scales, None), BlockScales(128, scales[:5], None)):
        with pytest.raises(ValueError, match="scale"):
            multiply(a, b, None, None, args, wrong)


def test_what_is_said_of_it() -> None:
    said = str(hybridq.explain("gemm", "bf16", SQUARES, device="cpu"))
    assert ("scales multiply the sums of each block" in said) == (REASON is None)
    for a, b, why in (
        ("bf16", "mxfp8", "BF16 holds both"),
        ("bf16", "e4m3/1x32/fp32/amax/float8_block", "64 columns"),
        (NARROW, ROWS, "differ"),
        ("fp32", ROWS, "does not hold operand a"),
    ):
        if REASON is None:
            assert why in str(blocks_reason(PlaneSpec.parse(a), PlaneSpec.parse(b)))
