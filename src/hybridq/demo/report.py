"""What a comparison leaves behind: a table, `report.json` and `loss.png`."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import platform
import sys
import tempfile
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.table import Table

from .._files import write_whole
from ..kernels.decoded import product_ways
from .compare import Comparison
from .model import OWN
from .train import BASELINE, RecipeResult
from .variants import PLAIN

EXPECTED_GAP_PERCENT = 3.0
"""Largest gap to BF16 that is expected of every recipe."""

_PACKAGES = ("hybridq", "torch", "numpy", "matplotlib", "rich", "typer")


def build_report(comparison: Comparison) -> dict[str, Any]:
    """Every number of a comparison, with the settings and versions that it was made with.

    Returns:
        A tree that JSON can hold. ``recipes`` is a list of ``{recipe, status, validation_loss,
        gap_percent, tokens_per_second, weight_nbytes, ..., train_curve, validation_curve}``. A
        number that does not exist (an interrupted run's loss, infinity) is None.
    """
    config, corpus = comparison.config, comparison.corpus
    baseline = next((r for r in comparison.results if r.recipe == BASELINE), None)
    report: dict[str, Any] = _jsonable(
        {
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "command": sys.argv,
            "is_interrupted": comparison.is_interrupted,
            "settings": dataclasses.asdict(config),
            "data": {
                "source": corpus.source,
                "digest": corpus.digest,
                "is_truncated": corpus.is_truncated,
                "train_nbytes": corpus.train.numel(),
                "validation_nbytes": corpus.validation.numel(),
                "num_train_files": len(corpus.train_files),
                "num_validation_files": len(corpus.validation_files),
            },
            "versions": _versions(),
            "machine": _machine(config.device),
            "plain_products": {way.dtype: way.ours for way in product_ways()},
            "recipes": [_entry(result, baseline) for result in comparison.results],
        }
    )
    return report


def _entry(result: RecipeResult, baseline: RecipeResult | None) -> dict[str, Any]:
    entry = dataclasses.asdict(result)
    entry["gap_percent"] = None
    entry["weight_ratio"] = entry["activation_ratio"] = None
    if baseline is not None:
        if result.validation_loss is not None and baseline.validation_loss:
            entry["gap_percent"] = 100 * (result.validation_loss / baseline.validation_loss - 1)
        if baseline.weight_nbytes:
            entry["weight_ratio"] = result.weight_nbytes / baseline.weight_nbytes
        if baseline.activation_nbytes:
            entry["activation_ratio"] = result.activation_nbytes / baseline.activation_nbytes
    return entry


def build_table(report: dict[str, Any]) -> Table:
    """The closing table of a report; 80 columns wide at most with the default recipes."""
    table = Table(
        title=f"Trained on: {report['data']['source']}{_modules(report)}{_experts(report)}",
        caption="weights: the projections' planes for forward and backward; saved activations: all "
        "that autograd keeps between them",
        box=SIMPLE_HEAD,
        pad_edge=False,
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("\nrecipe", no_wrap=True)
    for heading in (
        "validation\nnats/byte",
        "gap to\nBF16",
        "\ntokens/s",
        "weights\nvs BF16",
        "saved act.\nvs BF16",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for entry in report["recipes"]:
        loss, gap = entry["validation_loss"], entry["gap_percent"]
        speed = entry["tokens_per_second"]
        is_baseline = entry["recipe"] == BASELINE
        table.add_row(
            entry["recipe"],
            entry["status"] if loss is None else f"{loss:.4f}",
            "-" if gap is None or is_baseline else f"{gap:+.2f}%",
            "-" if speed is None else f"{speed:,.0f}",
            _size(entry["weight_nbytes"], None if is_baseline else entry["weight_ratio"]),
            _size(entry["activation_nbytes"], None if is_baseline else entry["activation_ratio"]),
        )
    return table


def _modules(report: dict[str, Any]) -> str:
    """Which modules the model was made of, where they are not the separate ones."""
    modules = report["settings"].get("modules", PLAIN)
    return "" if modules == PLAIN else f", {modules} modules"


def _experts(report: dict[str, Any]) -> str:
    """A line of the table's title that names a mixture of experts; empty for a dense model."""
    sizes = report["settings"]["model"]
    if not sizes["experts"]:
        return ""
    whose = "" if sizes["family"] == OWN else f" (transformers' {sizes['family']})"
    return (
        f"\nMixture of experts{whose}: top {sizes['top']} of {sizes['experts']}, in grouped GEMMs"
    )


def quantized_shares(report: dict[str, Any]) -> str:
    """One line: how much of the linear layers' work each recipe quantizes; empty without one."""
    shares = {entry["recipe"]: entry["quantized_share"] for entry in report["recipes"]}
    known = {recipe: share for recipe, share in shares.items() if share}
    if not known:
        return ""
    if len(set(known.values())) == 1:
        each = f"{100 * next(iter(known.values())):.1f}% under every recipe"
    else:
        each = ", ".join(f"{recipe} {100 * share:.1f}%" for recipe, share in known.items())
    return f"Quantized of the linear layers' operations (head and routers are not): {each}."


def verdict(report: dict[str, Any]) -> str:
    """One sentence: is every recipe as close to BF16 as expected?"""
    gaps = {e["recipe"]: e["gap_percent"] for e in report["recipes"] if e["recipe"] != BASELINE}
    known = {recipe: gap for recipe, gap in gaps.items() if gap is not None}
    if not known:
        return "No recipe could be compared with BF16."
    far = [f"{r} ({g:+.2f}%)" for r, g in known.items() if g > EXPECTED_GAP_PERCENT]
    missing = [recipe for recipe in gaps if recipe not in known]
    if not far and not missing:
        return f"Every recipe is within {EXPECTED_GAP_PERCENT:g}% of BF16's loss."
    parts = []
    if far:
        parts.append(f"More than {EXPECTED_GAP_PERCENT:g}% above BF16's loss: {', '.join(far)}.")
    if missing:
        parts.append(f"Without a result: {', '.join(missing)}.")
    return " ".join(parts)


def write_report(report: dict[str, Any], folder: Path) -> tuple[Path, Path]:
    """Write ``report.json`` and ``loss.png`` into ``folder``, each in one atomic step.

    Returns:
        The two paths.

    Raises:
        OSError: the folder cannot be written.
    """
    text = json.dumps(report, indent=1, allow_nan=False) + "\n"
    json_path, plot_path = folder / "report.json", folder / "loss.png"
    write_whole(json_path, text.encode())
    write_whole(plot_path, plot_losses(report))
    return json_path, plot_path


def prepare_folder(folder: Path) -> None:
    """Create ``folder`` and write to it once, before hours of training and not after them.

    Raises:
        OSError: it cannot be created or written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def plot_losses(report: dict[str, Any]) -> bytes:
    """The loss curves as a PNG: training losses thin and smoothed, validation losses marked.

    Curves of good recipes lie on top of each other, so a second panel shows each one's distance
    from the baseline in percent, if that was run.
    """
    entries = report["recipes"]
    baseline = next((entry for entry in entries if entry["recipe"] == BASELINE), None)
    size = (9, 4.8) if baseline is None else (9, 7.5)
    figure = Figure(figsize=size, dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    if baseline is None:  # nothing to measure a distance from
        panels = [figure.subplots()]
    else:
        panels = [*figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))]
    upper, lower = panels[0], panels[-1]
    for index, entry in enumerate(entries):
        color = f"C{index}"
        label = entry["recipe"]
        if entry["validation_loss"] is not None:
            label += f" ({entry['validation_loss']:.4f})"
        for kind, style in _CURVES.items():
            curve = _curve(entry, kind)
            name = label if kind == "validation_curve" else None
            upper.plot(list(curve), list(curve.values()), color=color, label=name, **style)
            if baseline is None:
                continue
            reference = _curve(baseline, kind)
            gap = {s: 100 * (v / reference[s] - 1) for s, v in curve.items() if reference.get(s)}
            lower.plot(list(gap), list(gap.values()), color=color, **style)
    upper.set_ylabel("loss in nats/byte")
    upper.set_title("validation (dots) and smoothed training loss")
    if baseline is not None:
        lower.set_ylabel(f"gap to {BASELINE} in %")
    lower.set_xlabel("step")
    for axes in panels:
        axes.grid(alpha=0.3)
    if entries:
        upper.legend(title="recipe (final validation loss)")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


#: How each curve of an entry is drawn.
_CURVES: dict[str, dict[str, Any]] = {
    "train_curve": {"linewidth": 0.8, "alpha": 0.6},
    "validation_curve": {"linewidth": 1.2, "marker": "o", "markersize": 4},
}


def _curve(entry: dict[str, Any], kind: str) -> dict[int, float]:
    """Step to loss, training losses smoothed; what is not finite is left out."""
    points = [(step, loss) for step, loss in entry[kind] if loss is not None]
    losses = [loss for _, loss in points]
    if kind == "train_curve":
        losses = _smooth(tuple(losses))
    return dict(zip((step for step, _ in points), losses, strict=True))


def _smooth(values: tuple[float, ...], window: int = 10) -> list[float]:
    """Mean of the last ``window`` values: looks back only, so the curves stay causal."""
    return [
        math.fsum(values[max(0, i + 1 - window) : i + 1]) / min(window, i + 1)
        for i in range(len(values))
    ]


def _size(nbytes: int, ratio: float | None) -> str:
    """The share of BF16's bytes; the bytes themselves for BF16, or where it was not run."""
    return f"{nbytes / 2**20:.2f} MiB" if ratio is None else f"{ratio:.2f}x"


def _jsonable(value: Any) -> Any:
    """``value`` with what JSON cannot hold (nan, infinity) as None."""
    if isinstance(value, dict):
        return {key: _jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    versions["torch"] = torch.__version__  # with the build's suffix
    return versions


def _machine(device: str) -> dict[str, Any]:
    machine: dict[str, Any] = {
        "platform": platform.platform(),
        "processor": _processor_name(),
        "num_threads": torch.get_num_threads(),
        "device": device,
    }
    if torch.device(device).type == "cuda":
        machine["gpu"] = torch.cuda.get_device_name(device)
    return machine


def _processor_name() -> str:
    """Linux names the CPU only in a file; other systems through ``platform``."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
