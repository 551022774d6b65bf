"""The README's picture and its figures are those that were recorded."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from places import BENCHMARKS, ROOT

sys.path.insert(0, str(BENCHMARKS))

import readme_picture

README = (ROOT / "README.md").read_text()


def medians(file: str, table: str) -> dict[str, Any]:
    recorded = json.loads((BENCHMARKS / "results" / file).read_text())
    return {case: figures["median"] for case, figures in recorded["tables"][table].items()}


@pytest.mark.parametrize(
    "row,file,table,cases",
    [
        (
            "cast to MXFP8, to NVFP4",
            "cpu-quantize-amd-epyc-2026-11-22.json",
            "quantize, 1 thread",
            (
                *("mxfp8 row, op", "nvfp4 row, op", "torchao mxfp8 eager", "torchao nvfp4 eager"),
                "torch cast to float8_e4m3fn",
            ),
        ),
        (
            "GEMM 4096^3",
            "cpu-products-layers-amd-epyc-2026-11-21.json",
            "products, 1 thread",
            ("mxfp8 x mxfp8", "nvfp4 x nvfp4"),
        ),
        (
            "`Linear`, forward and backward",
            "cpu-products-layers-amd-epyc-2026-11-21.json",
            "layers, 1 thread",
            ("mxfp8 forward and backward", "nvfp4 forward and backward"),
        ),
    ],
)
def test_figures_of_the_readme_are_recorded(
    row: str, file: str, table: str, cases: tuple[str, ...]
) -> None:
    [line] = [line for line in README.splitlines() if line.startswith(f"| {row}")]
    found = medians(file, table)
    for case in cases:
        assert f"{found[case]:.2f}" in line, case


def test_the_picture_has_the_planes_errors() -> None:
    row, column = readme_picture.plane_errors(readme_picture.tensor())
    assert (row.bits, f"{row.total:.1%}") == (8.25, "2.7%")
    assert (round(column.bits, 2), f"{column.total:.1%}") == (4.5, "9.7%")
    [line] = [line for line in README.splitlines() if line.startswith("| what `Linear` saves")]
    assert f"{row.bits / 16:.2f}, {column.bits / 16:.2f} of the bytes" in line
    assert readme_picture.PICTURE.is_file()


def test_the_picture_has_the_recorded_times() -> None:
    times = readme_picture.cast_times()
    assert times["MXFP8"] == 1.162
    assert times["torchao eager, NVFP4"] == 76.786
