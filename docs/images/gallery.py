"""Draws the pictures of docs/gallery.md that no benchmark records.

`python docs/images/gallery.py` draws all of them, with names only those. Inputs are made from fixed
seeds, so that they show the same on every machine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

import hybridq

FOLDER = Path(__file__).parent


def hybrid_tensor() -> Figure:
    """Return what `hybridq.show` draws of one tensor with an MXFP8 and an NVFP4 plane."""
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    x[:, 40] *= 30.0  # a feature with outliers
    tensor = hybridq.quantize(x, "mxfp8", columnwise="nvfp4")
    return hybridq.show(tensor, original=x).figure()


def model_errors() -> Figure:
    """Return what `hybridq.show` draws of a model's weights under a recipe."""
    return hybridq.show(_model(), recipe="mxfp8_fwd_nvfp4_bwd").figure()


def spoiled_layer() -> Figure:
    """Return errors that `hybridq.report` measures, of a model with one spoiled projection."""
    model = _model()
    with torch.no_grad():
        model[4].weight[:, 17] *= 200.0  # one input feature
    batch = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    found = hybridq.report(
        *(model, batch, ["fp8", "mxfp8", "nvfp4"]), loss=lambda y: y.square().mean(), gemms=False
    )
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    formats = [name for name in found.formats() if name != "bf16"]
    rows = [row for row in found.rows() if row.tensor == "weight" and row.direction == "rowwise"]
    layers = list(dict.fromkeys(row.layer for row in rows))
    for place, name in enumerate(formats):
        error = {r.layer: r.statistics.bulk_error or 0.0 for r in rows if r.format == name}
        at = [index + 0.8 * place / len(formats) for index in range(len(layers))]
        values = [error.get(layer, 0.0) for layer in layers]
        axes.bar(at, values, 0.75 / len(formats), label=name)
    axes.set_xticks([index + 0.3 for index in range(len(layers))], [f"layer {x}" for x in layers])
    axes.set_ylabel("relative error of values that are no outliers")
    axes.set_title("Weights, rowwise planes: layer 4 has one input feature 200 times as large")
    axes.legend()
    return figure


def block_scales() -> Figure:
    """Return histograms of the exponents of block scales: gradients against inputs."""
    model = _model()
    batch = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    found = hybridq.report(
        *(model, batch), recipe="mxfp8", loss=lambda y: y.square().mean(), gemms=False
    )
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots()
    for place, tensor in enumerate(("input", "weight", "grad_output")):
        counts: dict[int, int] = {}
        for row in found.rows():
            if row.tensor == tensor and row.direction == "rowwise":
                for exponent, count in row.statistics.scales.items():
                    counts[exponent] = counts.get(exponent, 0) + count
        whole = sum(counts.values())
        at = [exponent + 0.3 * (place - 1) for exponent in counts]
        axes.bar(at, [count / whole for count in counts.values()], 0.28, label=tensor)
    axes.set_xlabel("exponent of a block's scale")
    axes.set_ylabel("share of blocks")
    axes.set_title("MXFP8: what range the scales of each tensor take")
    axes.legend()
    return figure


def _model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = [torch.nn.Linear(64, 96), torch.nn.GELU()]
    layers += [torch.nn.Linear(96, 96), torch.nn.GELU(), torch.nn.Linear(96, 96), torch.nn.GELU()]
    return hybridq.convert(torch.nn.Sequential(*layers, torch.nn.Linear(96, 32)))


#: Pictures by the names of their files.
PICTURES: dict[str, Callable[[], Any]] = {
    "hybrid-tensor": hybrid_tensor,
    "model-errors": model_errors,
    "spoiled-layer": spoiled_layer,
    "block-scales": block_scales,
}


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"of {', '.join(PICTURES)}; all, if none")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="that they are written to")
    given = parser.parse_args()
    unknown = [name for name in given.names if name not in PICTURES]
    if unknown:
        sys.exit(f"gallery: a name must be one of {', '.join(PICTURES)}, got {unknown[0]}")
    for name in given.names or PICTURES:
        PICTURES[name]().savefig(given.folder / f"{name}.png", dpi=80)


if __name__ == "__main__":
    main()
