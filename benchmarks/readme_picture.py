"""Draw the picture of the README: one tensor with two formats, and what casts take.

`python benchmarks/readme_picture.py` writes docs/images/two-planes.png. Left: a tensor of 96 x 96
values and, of its two planes, how far each decoded value is from the original; computed here, with
the same bits on every machine. Right: recorded times, out of benchmarks/results.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image

import hybridq

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "images" / "two-planes.png"
RECORDED = ROOT / "benchmarks" / "results" / "cpu-quantize-amd-epyc-2026-11-22.json"
TABLE = "quantize, 1 thread"
#: Label in the picture, and case in the recorded table.
CASTS = (
    ("MXFP8", "mxfp8 row, op"),
    ("NVFP4", "nvfp4 row, op"),
    ("MXFP8 + NVFP4 planes", "mxfp8 row + nvfp4 column, op"),
    ("torch, float8_e4m3fn", "torch cast to float8_e4m3fn"),
    ("torchao eager, MXFP8", "torchao mxfp8 eager"),
    ("torchao eager, NVFP4", "torchao nvfp4 eager"),
)
#: Relative error at which the colours of a map end.
LARGEST = 0.3


@dataclass(frozen=True)
class PlaneError:
    """What a plane costs and loses.

    Args:
        title: direction and format.
        bits: bits per value, scales included.
        relative: `|decoded - x| / |x|` of each value, [rows, cols].
        total: `norm(decoded - x) / norm(x)`.
    """

    title: str
    bits: float
    relative: np.ndarray[Any, Any]
    total: float


def tensor() -> torch.Tensor:
    """Return 96 x 96 BF16 values: columns of different size, as channels of activations are."""
    numbers = np.random.default_rng(5)
    columns = np.exp2(numbers.integers(-3, 4, size=96))
    values = numbers.standard_normal((96, 96)) * columns
    return torch.from_numpy(values).to(torch.bfloat16)


def plane_errors(x: torch.Tensor) -> tuple[PlaneError, PlaneError]:
    """Return the errors of both planes of x: MXFP8 rowwise and NVFP4 columnwise."""
    t = hybridq.quantize(x, "mxfp8", columnwise="nvfp4")
    decoded = (t.rowwise.dequantize().double(), t.columnwise.dequantize().double())
    titles = ("rowwise plane: MXFP8, 1x32", "columnwise plane: NVFP4, 16x1")
    exact = x.double()
    return tuple(
        PlaneError(
            title=title,
            bits=8 * plane.nbytes / x.numel(),
            relative=((values - exact).abs() / exact.abs()).numpy(),
            total=float((values - exact).norm() / exact.norm()),
        )
        for title, plane, values in zip(titles, (t.rowwise, t.columnwise), decoded, strict=True)
    )


def cast_times() -> dict[str, float]:
    """Return by label the recorded time of a cast, over that of a copy of its input."""
    table = json.loads(RECORDED.read_text())["tables"][TABLE]
    return {label: table[case]["median"] for label, case in CASTS}


def draw() -> Figure:
    """Return the picture."""
    x = tensor()
    figure = Figure(figsize=(11, 2.7), layout="constrained", facecolor="white")
    maps = figure.subplots(1, 4, gridspec_kw={"width_ratios": (1, 1, 1, 1.25)})
    maps[0].imshow(
        x.float().abs().log2().numpy(), cmap="Greys", interpolation="nearest", vmin=-6, vmax=5
    )
    maps[0].set_title("one tensor: BF16, 96 x 96\n16 bits per value", fontsize=9)
    maps[0].set_xlabel("magnitude: dark is large", fontsize=8)
    for axes, plane in zip(maps[1:3], plane_errors(x), strict=True):
        axes.imshow(plane.relative, cmap="magma_r", interpolation="nearest", vmin=0, vmax=LARGEST)
        axes.set_title(f"{plane.title}\n{plane.bits:.2f} bits per value", fontsize=9)
        axes.set_xlabel(f"error: {plane.total:.1%} of the tensor's norm", fontsize=8)
    for axes in maps[:3]:
        axes.set_xticks([])
        axes.set_yticks([])
    draw_times(maps[3])
    return figure


def draw_times(axes: Any) -> None:
    """Draw the recorded times as bars."""
    times = cast_times()
    colours = ["#b5367a" if "torch" not in label else "#999999" for label in times]
    bars = axes.barh(list(times), list(times.values()), color=colours)
    axes.bar_label(bars, [f"{time:.1f}" for time in times.values()], fontsize=8, padding=2)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlim(0.8, 200)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.tick_params(labelsize=8)
    axes.set_xticks([1, 10, 100], ["1", "10", "100"])
    axes.minorticks_off()
    axes.set_title(
        "time of a cast, in copies of its input\n4096 x 4096, one CPU thread", fontsize=9
    )
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    """Write the picture, in 128 colours."""
    PICTURE.parent.mkdir(exist_ok=True)
    pixels = BytesIO()
    draw().savefig(pixels, dpi=140)
    Image.open(pixels).convert("RGB").quantize(128).save(PICTURE, optimize=True)
    print(f"{PICTURE.relative_to(ROOT)}: {PICTURE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
