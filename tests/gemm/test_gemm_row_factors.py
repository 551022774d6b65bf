"""A scale that serves a whole row of an operand is a factor of the product's rows or columns.

Held to the bound of every product around an FP64 product of what the oracle decodes.
"""

from __future__ import annotations

import pytest
import torch

import hybridq
from core_tools import using_variant
from gemm_cases import check, check_all_ways, decoded, make
from hybridq.formats import PlaneSpec
from hybridq.kernels.cpu import core, product_reason

#: (M, N, K): few rows, which read codes, and many; a K that nothing divides.
SHAPES = ((1, 37, 96), (8, 33, 131), (40, 48, 160), (300, 20, 64))
OTHERS = ("bf16", "fp32", "fp16", "mxfp8", "nvfp4", "fp8_e4m3", "fp8_1x128", "nvfp4;rows")
VARIANTS = () if core is None else tuple(core.build_info()["variants"])


def by_row(k: int, element: str = "e4m3", wider: int = 0) -> str:
    return f"{element}/1x{k + wider}/fp32/amax/float8_block"


def matrix(rows: int, cols: int) -> torch.Tensor:
    """Rows of sizes far apart."""
    return torch.randn(rows, cols) * torch.logspace(-6, 5, rows)[:, None]


def plane(x: torch.Tensor, name: str):
    plain = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return make(x.to(plain[name]) if name in plain else x, name)


@pytest.mark.parametrize("other", [*OTHERS, "row", "e5m2 row"])
def test_any_pair_on_either_side(other: str) -> None:
    for i, (m, n, k) in enumerate(SHAPES):
        names = {"row": by_row(k, wider=i), "e5m2 row": by_row(k, "e5m2")}
        x, w = torch.randn(m, k), plane(matrix(n, k), by_row(k))
        first = plane(x if other in ("fp16", "nvfp4") else matrix(m, k), names.get(other, other))
        check_all_ways(first, w)
        check_all_ways(w, first)


@pytest.mark.parametrize("variant", VARIANTS)
def test_all_variants_of_the_kernels(variant: str) -> None:
    with using_variant(variant):
        for m, n, k in SHAPES:
            a, w = plane(torch.randn(m, k), "bf16"), plane(matrix(n, k), by_row(k))
            check(hybridq.gemm(a, w, out_dtype=torch.float32), decoded(a), decoded(w))


def test_kept_operands_are_those_of_the_codes() -> None:
    """A third product reads what was kept, and a decode does not."""
    w = plane(matrix(24, 64), by_row(64))
    for _ in range(3):
        a = plane(torch.randn(300, 64), "bf16")
        check(hybridq.gemm(a, w, out_dtype=torch.float32), decoded(a), decoded(w))
    values = torch.ops.hybridq.decode(w.tensors, w.spec.text, 24, 64, torch.float32)
    assert torch.equal(values.double(), torch.from_numpy(decoded(w)))


def test_nan_and_infinity_stay_in_their_rows() -> None:
    """An infinity is encoded as the largest value."""
    x = matrix(5, 64)
    x[1, 3], x[3, 0] = torch.nan, torch.inf
    w = plane(x, by_row(64))
    rest = [0, 2, 3, 4]
    for m in (2, 40):
        a = plane(torch.ones(m, 64), "bf16")
        y = hybridq.gemm(a, w, out_dtype=torch.float32)
        assert y[:, 1].isnan().all()
        check(y[:, rest], decoded(a), decoded(w)[rest])


@pytest.mark.skipif(product_reason() is not None, reason=str(product_reason()))
def test_bits_are_those_of_the_codes_product_times_the_scale() -> None:
    """Where the CPU has a BF16 product nothing is rounded before the scale."""
    m, n, k = 40, 48, 160
    a, w = plane(torch.randn(m, k), "bf16"), plane(matrix(n, k), by_row(k))
    codes = w.data.view(torch.float8_e4m3fn).to(torch.bfloat16)
    plain = hybridq.gemm(a, plane(codes, "bf16"), out_dtype=torch.float32)
    scale = dict(w.buffers)["scale"].view(1, -1)
    assert torch.equal(hybridq.gemm(a, w, out_dtype=torch.float32), plain * scale)


def test_what_is_said_of_it() -> None:
    said = str(hybridq.explain("gemm", "bf16", by_row(64), device="cpu"))
    assert "a scale that serves a whole row is a factor of the result" in said


def test_specs() -> None:
    spec = PlaneSpec.parse(by_row(64))
    own = spec.by_row(64)
    assert own.scale_layout == "factors" and own.has_row_factors and own.is_bf16_exact
    assert not spec.has_row_factors and not spec.is_bf16_exact
    assert spec.by_row(65) is spec and own.by_row(64) is own
    assert PlaneSpec.parse(own.text) == own and own.buffers(3, 64) == spec.buffers(3, 64)
    for name in ("mxfp8", "nvfp4", "fp8_128x128", "fp8_e4m3", "bf16"):
        assert PlaneSpec.parse(name).by_row(16) == PlaneSpec.parse(name)
    for text in (
        "fp8_e4m3;scales=factors",
        "mxfp8;scales=factors",
        by_row(64) + ";sr;scales=factors",
    ):
        with pytest.raises(hybridq.SpecError, match="scale"):
            PlaneSpec.parse(text)


def test_blocks_that_are_no_rows_are_refused() -> None:
    """Of several scales in a row only the first would count."""
    spec = by_row(64) + ";scales=factors"
    x = torch.randn(4, 128)
    with pytest.raises(hybridq.SpecError, match="as wide as the matrix"):
        torch.ops.hybridq.encode(x, spec, "")
    plane_of_blocks = torch.ops.hybridq.encode(x, by_row(64), "")
    with pytest.raises(hybridq.SpecError, match="as wide as the matrix"):
        torch.ops.hybridq.decode(plane_of_blocks, spec, 4, 128, torch.float32)
