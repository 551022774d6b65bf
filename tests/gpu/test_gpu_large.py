"""Shapes that only a GPU runs in a test's time: large, tall, and beyond 32-bit offsets."""

from __future__ import annotations

import pytest
import torch

import hybridq
import kernel_cases as cases
from hybridq.kernels.choice import EncodeRequest

_OPTIONS = cases.option_specs()
LARGE = {
    **{name: cases.plain_specs()[name] for name in ("mxfp8", "nvfp4", "fp8_e4m3", "mxfp4")},
    **{name: cases.plain_specs()[name] for name in ("fp8_1x128", "fp8_128x128", "nvfp4_16x16")},
    **{name: _OPTIONS[name] for name in ("nvfp4 rht sr", "nvfp4 rows", "nvfp4 mae")},
}


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("shape", [(4096, 4096), (8192, 3000)], ids=str)
def test_large_matrices(kernels, shape, name) -> None:
    x = cases.matrix(*shape, torch.bfloat16, 1, "normal")
    cases.check_encode(kernels, x, LARGE[name], None)
    cases.check_encode(kernels, x, None, LARGE[name])
    cases.check_decode(kernels, x[:1024], LARGE[name])


@pytest.mark.parametrize("name", ["mxfp8 | nvfp4 rht sr", "nvfp4 sr | nvfp4 rht sr"])
def test_large_hybrid_pairs(kernels, name) -> None:
    x = cases.matrix(4096, 4096, torch.bfloat16, 2, "normal")
    cases.check_encode(kernels, x, *cases.pairs()[name])


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "fp8_128x128", "mxfp4", "nvfp4 rows"])
def test_more_tiles_of_rows_than_a_second_grid_axis_holds(kernels, name) -> None:
    """A tile has 128 rows: 65,536 tiles and one more. With 8 columns most of a tile is outside."""
    x = cases.matrix(128 * 65_536 + 5, 8, torch.bfloat16, 3, "normal")
    cases.check_encode(kernels, x, LARGE[name], None)
    cases.check_encode(kernels, x, None, LARGE[name])


def _needs(gigabytes: int) -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < gigabytes * 1e9:
        pytest.skip(f"needs {gigabytes} GB of free GPU memory, got {free / 1e9:.0f}")


def test_more_than_two_to_the_31_elements(kernels) -> None:
    _needs(20)
    rows, cols = (1 << 16) + 1, 1 << 15
    spec = cases.plain_specs()["mxfp8"]
    x = torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16)
    assert x.numel() == (1 << 31) + (1 << 15)
    data, scale = kernels.ops["encode"](x, spec, None, EncodeRequest())
    decoded = kernels.ops["decode"]([data, scale], spec, rows, cols, torch.bfloat16)
    for start in (0, 32767, rows - 40):
        part = x[start : start + 40].cpu()
        want = cases.cpu_ops()["encode"](part, spec, None, EncodeRequest())
        for buffer, expected in zip((data, scale), want, strict=True):
            cases.assert_same(buffer[start : start + 40], expected, f"rows from {start}")
        values = cases.cpu_ops()["decode"](want, spec, *part.shape, torch.bfloat16)
        cases.same_values(decoded[start : start + 40], values, f"decoded rows from {start}")
    amax = hybridq.kernels.choice.registry._backends["cuda"].ops["amax"](x, spec)
    assert float(amax) == float(x.abs().max())


def test_columns_of_more_than_two_to_the_31_elements(kernels) -> None:
    _needs(20)
    rows, cols = (1 << 16) + 32, 1 << 15
    spec = cases.plain_specs()["mxfp8"]
    x = torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16)
    data, scale = kernels.ops["encode"](x, None, spec, EncodeRequest())
    for start in (0, 32768, rows - 32):
        part = x[start : start + 32].cpu()
        want = cases.cpu_ops()["encode"](part, None, spec, EncodeRequest())
        cases.assert_same(data[:, start : start + 32], want[0], f"columns' rows from {start}")
        cases.assert_same(scale[:, start // 32 :][:, :1], want[1], f"scales from {start}")
