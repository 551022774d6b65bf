"""The training demo end to end, tiny: runs, measures, comparison, report, command line."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import math
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn
from typer.testing import CliRunner

from hybridq.demo import measure, report
from hybridq.demo.compare import DEFAULT_RECIPES, Comparison, SilentObserver
from hybridq.demo.data import load_corpus
from hybridq.demo.model import ModelConfig
from hybridq.demo.progress import ProgressView
from hybridq.demo.train import RecipeResult, Run, TrainConfig
from hybridq.kernels.decoded.plain_gemm import is_slow
from hybridq.nn import Linear
from hybridq_cli.app import app
from products_seen import Products

TINY = TrainConfig(
    model=ModelConfig(layers=1, hidden=32, heads=2, ffn=48, sequence=32),
    batch=2,
    steps=4,
    eval_batches=2,
    eval_points=2,
    lr=1e-2,
)
SIZES = (
    *("--layers", "1", "--hidden", "32", "--heads", "2", "--ffn", "48", "--sequence", "32"),
    *("--batch", "2", "--steps", "4", "--eval-batches", "2", "--eval-points", "2"),
)


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("text")
    for i in range(12):
        (root / f"{i}.txt").write_text(f"the {i}th file says what the others say\n" * 30)
    return root


@pytest.fixture(scope="module")
def corpus(text_folder):
    return load_corpus(text_folder, 32)


@pytest.fixture(scope="module")
def comparison(corpus):
    made = Comparison(TINY, DEFAULT_RECIPES, corpus)
    made.run()
    return made


def finished(run: Run) -> RecipeResult:
    for _ in run.steps():
        pass
    return run.result


# ---- one run


def test_a_run_with_plain_linear_learns(corpus):
    config = TrainConfig(model=TINY.model, batch=4, steps=40, lr=1e-2, eval_batches=2)
    result = finished(Run(config, "bf16", corpus, nn.Linear))
    assert result.status == "finished"
    assert [step for step, _ in result.train_curve] == list(range(1, 41))
    assert result.validation_curve[-1] == (40, result.validation_loss)
    # The text is one sentence over and over: 17 different bytes, ln 17 = 2.8 when none is known.
    assert result.validation_loss < 2.5
    assert result.tokens_per_second > 0


@pytest.mark.usefixtures("fast_products")
def test_without_a_recipe_hybridq_linear_trains_as_plain_linear_does(corpus):
    plain = finished(Run(TINY, "bf16", corpus, nn.Linear))
    ours = finished(Run(TINY, "bf16", corpus))
    assert plain.train_curve == ours.train_curve
    assert plain.validation_curve == ours.validation_curve


def test_every_recipe_sees_the_same_weights_and_batches_and_is_quantized(comparison):
    first = {r.recipe: r.train_curve[0][1] for r in comparison.results}
    assert set(first) == set(DEFAULT_RECIPES)
    for recipe, loss in first.items():
        if recipe != "bf16":
            # The same model on the same bytes: close. Equal would mean nothing was quantized.
            assert loss == pytest.approx(first["bf16"], rel=0.05)
            assert loss != first["bf16"]
    # The forward of the hybrid is that of MXFP8; their updates differ.
    assert first["mxfp8_fwd_nvfp4_bwd"] == first["mxfp8"]
    curves = {r.recipe: r.train_curve for r in comparison.results}
    assert curves["mxfp8_fwd_nvfp4_bwd"] != curves["mxfp8"]


@pytest.mark.parametrize("recipe", ["bf16", "nvfp4"])
def test_a_run_repeats_itself(corpus, recipe):
    # nvfp4 rounds its gradients stochastically, from torch's generator.
    torch.manual_seed(123)
    first = finished(Run(TINY, recipe, corpus))
    torch.manual_seed(321)
    second = finished(Run(TINY, recipe, corpus))
    assert first.train_curve == second.train_curve
    assert first.validation_loss == second.validation_loss


def test_a_loss_that_is_not_finite_ends_the_run(corpus):
    run = Run(TINY, "bf16", corpus, nn.Linear)
    with torch.no_grad():
        run.model.lm_head.weight[0, 0] = math.nan
    result = finished(run)
    assert result.status == "diverged"
    assert result.validation_loss is None
    assert len(result.train_curve) == 1


def test_the_learning_rate_rises_and_falls():
    config = TrainConfig(steps=100, lr=2.0, warmup_fraction=0.1)
    rates = [config.lr_at(step) for step in range(100)]
    assert rates[0] == pytest.approx(0.2)
    assert max(rates) == rates[9] == rates[10] == 2.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert 0 < rates[99] < 0.01


@pytest.mark.parametrize(("steps", "points"), [(1, 1), (4, 2), (7, 3), (3, 9), (250, 5)])
def test_evaluations_are_spread_and_the_last_step_has_one(steps, points):
    config = TrainConfig(steps=steps, eval_points=points)
    chosen = [done for done in range(1, steps + 1) if config.is_eval_step(done)]
    assert len(chosen) == min(points, steps)
    assert chosen[-1] == steps


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"lr": 0.0}, "lr must be positive, got 0.0"),
        ({"lr": math.nan}, "lr must be positive, got nan"),
        ({"warmup_fraction": 2.0}, "warmup_fraction must be in 0..1, got 2.0"),
    ],
)
def test_bad_settings(values, text):
    with pytest.raises(ValueError, match=text):
        TrainConfig(**values)


# ---- measures


def test_saved_bytes_count_a_storage_once_and_no_parameter():
    weight = nn.Parameter(torch.ones(8, 8))
    x = torch.ones(4, 8, requires_grad=True)

    def forward():
        product = x @ weight  # saves x and the parameter
        return (product * product).sum() + product.sin().sum()  # saves one product three times

    assert measure.saved_nbytes(forward, [weight]) == (4 * 8 + 4 * 8) * 4
    assert measure.saved_nbytes(forward) == (4 * 8 + 4 * 8 + 8 * 8) * 4


def test_a_view_counts_with_the_storage_that_it_keeps_alive():
    x = torch.ones(100, requires_grad=True)
    assert measure.saved_nbytes(lambda: ((x * 1.0)[:10] ** 2).sum(), [x]) == 400


def test_activations_are_what_grows_with_the_batch():
    weight = torch.ones(8, 8, requires_grad=True)

    def forward(count):
        # The cast weight is saved too, but is there once, however many samples there are.
        return (torch.ones(count, 8).bfloat16() @ weight.bfloat16()).float().sum()

    assert measure.activation_nbytes(forward, 5) == 5 * 8 * 2


def test_bytes_of_weights_and_activations_are_those_of_the_formats(comparison):
    by_recipe = {r.recipe: r for r in comparison.results}
    weights = 32 * 96 + 32 * 32 + 32 * 96 + 48 * 32
    assert by_recipe["bf16"].weight_nbytes == 2 * weights
    # Two planes of one byte per element, one scale byte per block of 32; the block along the
    # 48 columns of `down` is cut.
    scales = 2 * (32 * 96 + 32 * 32 + 32 * 96) // 32 + 32 * 2 + 48
    assert by_recipe["mxfp8"].weight_nbytes == 2 * weights + scales
    assert by_recipe["nvfp4"].weight_nbytes < 0.65 * by_recipe["bf16"].weight_nbytes
    # Of the activations the inputs of `qkv`, `gate_up` and `down` shrink from 2 bytes a value to
    # 33/32 or 9/16. That of `out` only adds: its BF16 form is the output that attention saves, but
    # where attention is computed again in the backward and saves none.
    kept = 0 if is_slow(torch.bfloat16) else 2
    tokens = TINY.batch * TINY.model.sequence
    saved = {recipe: r.activation_nbytes for recipe, r in by_recipe.items()}
    for recipe, nbytes in (("mxfp8", 33 / 32), ("nvfp4", 9 / 16), ("mxfp8_fwd_nvfp4_bwd", 9 / 16)):
        less = (32 + 32 + 48) * (2 - nbytes) + 32 * (2 - kept - nbytes)
        assert saved["bf16"] - saved[recipe] == tokens * less


# ---- comparison and report


class InterruptAt(SilentObserver):
    """Ctrl-C in the second recipe."""

    def progress(self, recipe, progress):
        if recipe == "mxfp8" and progress.step == 2:
            raise KeyboardInterrupt


def test_an_interrupted_comparison_keeps_what_there_is(corpus):
    made = Comparison(TINY, ("bf16", "mxfp8", "nvfp4"), corpus)
    made.run(InterruptAt())
    assert made.is_interrupted
    assert [(r.recipe, r.status) for r in made.results] == [
        ("bf16", "finished"),
        ("mxfp8", "interrupted"),
    ]
    built = report.build_report(made)
    assert built["is_interrupted"]
    assert built["recipes"][1]["validation_loss"] is None
    assert len(built["recipes"][1]["train_curve"]) == 2
    assert report.verdict(built) == "No recipe could be compared with BF16."


def test_an_error_passes_on_and_the_results_before_it_stay(corpus):
    class Broken(Linear):
        def forward(self, input):
            raise RuntimeError("broken")

    made = Comparison(TINY, ("bf16", "mxfp8"), corpus, Broken)
    with pytest.raises(RuntimeError, match="broken"):
        made.run()
    assert [(r.recipe, r.status) for r in made.results] == [("bf16", "failed")]


def test_report_holds_every_number(comparison, tmp_path):
    json_path, plot_path = report.write_report(report.build_report(comparison), tmp_path)
    loaded = json.loads(json_path.read_text())
    assert [entry["recipe"] for entry in loaded["recipes"]] == list(DEFAULT_RECIPES)
    baseline = loaded["recipes"][0]
    for entry, result in zip(loaded["recipes"], comparison.results, strict=True):
        assert entry["status"] == "finished"
        assert entry["validation_loss"] == result.validation_loss
        gap = 100 * (entry["validation_loss"] / baseline["validation_loss"] - 1)
        assert entry["gap_percent"] == pytest.approx(gap)
        assert entry["tokens_per_second"] > 0
        assert entry["activation_ratio"] == pytest.approx(
            entry["activation_nbytes"] / baseline["activation_nbytes"]
        )
        assert len(entry["train_curve"]) == TINY.steps
    assert loaded["settings"]["model"]["hidden"] == 32
    assert loaded["versions"]["torch"] == torch.__version__
    assert loaded["data"]["digest"] == comparison.corpus.digest
    assert plot_path.read_bytes().startswith(b"\x89PNG")
    # Nothing temporary stays behind.
    assert {path.name for path in tmp_path.iterdir()} == {"report.json", "loss.png"}


def test_report_of_infinite_losses_is_valid_json(corpus, tmp_path):
    result = RecipeResult("bf16", "diverged", None, [(1, math.inf)], [(1, math.nan)])
    made = Comparison(TINY, ("bf16",), corpus, results=[result])
    json_path, _ = report.write_report(report.build_report(made), tmp_path)
    text = json_path.read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    assert json.loads(text)["recipes"][0]["train_curve"] == [[1, None]]


def test_a_report_that_cannot_be_written_leaves_the_old_one(comparison, tmp_path, monkeypatch):
    (tmp_path / "report.json").write_text("old")

    def fail(*args):
        raise OSError("disk is gone")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk is gone"):
        report.write_report(report.build_report(comparison), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
    assert (tmp_path / "report.json").read_text() == "old"


def results_with(losses: dict[str, float | None]) -> list[RecipeResult]:
    return [
        RecipeResult(recipe, "interrupted" if loss is None else "finished", loss)
        for recipe, loss in losses.items()
    ]


@pytest.mark.parametrize(
    ("losses", "text"),
    [
        ({"bf16": 2.0, "mxfp8": 2.05, "nvfp4": 1.9}, "Every recipe is within 3%"),
        ({"bf16": 2.0, "mxfp8": 2.1}, r"More than 3% above BF16's loss: mxfp8 \(\+5.00%\)"),
        ({"bf16": 2.0, "mxfp8": 2.0, "nvfp4": None}, "Without a result: nvfp4"),
        ({"mxfp8": 2.0}, "No recipe could be compared"),
    ],
)
def test_verdict(corpus, losses, text):
    made = Comparison(TINY, tuple(losses), corpus, results=results_with(losses))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "_versions", dict)
        assert re.search(text, report.verdict(report.build_report(made)))


# ---- what is said on the way


def test_without_a_terminal_a_line_comes_every_few_seconds(corpus):
    now = [0.0]
    written: list[float] = []

    class Log(io.StringIO):
        def write(self, text: str) -> int:
            written.append(now[0])
            return super().write(text)

    console = Console(file=Log(), width=100)
    config = dataclasses.replace(TINY, steps=40, eval_points=1, eval_batches=1)
    with ProgressView(console, ["bf16"], 40, lambda: now[0]) as view:
        view.start("bf16")
        for progress in Run(config, "bf16", corpus).steps():
            now[0] += 4.0  # seconds
            view.progress("bf16", progress)
    times = [0.0, *sorted(set(written)), now[0]]
    assert max(b - a for a, b in itertools.pairwise(times)) <= 15.0
    assert len(times) < 30  # and not at every step
    assert "bf16: step 40/40, loss" in console.file.getvalue()


def test_an_estimate_takes_three_steps_of_each_recipe(corpus, monkeypatch):
    steps: list[str] = []
    step = Run._step
    monkeypatch.setattr(
        Run, "_step", lambda self, *args: steps.append(self.recipe) or step(self, *args)
    )
    made = Comparison(TINY, ("bf16", "mxfp8"), corpus)
    seconds = made.estimate()
    assert list(seconds) == ["bf16", "mxfp8"] and min(seconds.values()) > 0
    assert steps == ["bf16"] * 3 + ["mxfp8"] * 3
    assert not made.results

    def interrupt(self, *args):
        raise KeyboardInterrupt

    monkeypatch.setattr(Run, "_step", interrupt)
    assert made.estimate() == {}
    made.run()
    assert made.is_interrupted and not made.results


def test_on_a_cpu_with_slow_products_all_of_a_step_is_multiplied_in_fp32(corpus, slow_products):
    run = Run(TINY, "bf16", corpus)
    x, y = torch.randint(256, (2, 32)), torch.randint(256, (2, 32))
    with Products() as seen:
        run.loss(run.model, x, y).backward()
    assert seen.dtypes == {torch.float32}


# ---- command line


def invoke(*args: str):
    # A wide terminal: error texts are matched, and should not be wrapped.
    return CliRunner().invoke(app, ["train", *args], env={"COLUMNS": "200", "NO_COLOR": "1"})


def test_help_names_every_size():
    text = invoke("--help").output
    options = (
        *("recipes", "data", "data-limit", "out", "device", "threads", "compile", "layers"),
        *("hidden", "heads", "ffn", "sequence", "batch", "steps", "lr", "weight-decay"),
        *("warmup-fraction", "clip", "eval-batches", "eval-points", "seed"),
    )
    for option in options:
        assert f"--{option}" in text


def test_train_command_writes_table_report_and_plot(text_folder, tmp_path):
    out = tmp_path / "deep" / "run"
    result = invoke(
        *SIZES, "--recipes", "bf16, mxfp8", "--data", str(text_folder), "--out", str(out)
    )
    assert result.exit_code == 0, result.output
    assert "nats/byte" in result.output
    assert "Written: " in result.output
    assert re.search(r"Plain products in bfloat16: .*product", result.output)
    how_long = re.search(
        r"It will take about \d+:\d\d .*: bf16 0:\d\d, mxfp8 0:\d\d", result.output
    )
    assert how_long and how_long.end() < result.output.index("bf16: step")
    loaded = json.loads((out / "report.json").read_text())
    assert [entry["recipe"] for entry in loaded["recipes"]] == ["bf16", "mxfp8"]
    assert (out / "loss.png").exists()


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--recipes", "bf16,nope"], "nope"),
        (["--recipes", " , "], "at least one recipe"),
        (["--recipes", "bf16,bf16"], "must be different"),
        (["--device", "toaster"], "'toaster'"),
        (["--device", "cuda:99"], "cuda:99"),
        (["--device", "meta"], "device must be cpu or one of cuda, got 'meta'"),
        (["--device", "mps"], "device must be cpu or one of cuda, got 'mps'"),
        (["--seed", str(2**63)], "seed must be of 64 bits"),
        (["--data", "/does/not/exist"], "existing file or folder"),
        (["--steps", "0"], "--steps"),
        (["--hidden", "30"], "hidden=30"),
        (["--lr", "-1"], "lr must be positive"),
        (["--out", "/dev/null/x"], "folder that can be written"),
    ],
)
def test_bad_options_are_one_clear_message(args, text):
    result = invoke(*args)
    assert result.exit_code == 2
    assert text in result.output
    assert "Traceback" not in result.output
    assert isinstance(result.exception, SystemExit)


def test_ctrl_c_leaves_a_report_and_its_exit_status(text_folder, tmp_path, monkeypatch):
    class View(InterruptAt):
        def __init__(self, *args):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *args):
            return None

    monkeypatch.setattr(import_module("hybridq.cli.train"), "ProgressView", View)
    result = invoke(*SIZES, "--data", str(text_folder), "--out", str(tmp_path))
    assert result.exit_code == 130
    assert json.loads((tmp_path / "report.json").read_text())["is_interrupted"]


def test_without_the_extra_the_command_line_says_what_to_install():
    # None in sys.modules makes the import fail as if the package were not installed.
    code = (
        "import sys, runpy; sys.modules['typer'] = None; sys.argv = ['hybridq'];"
        "runpy.run_module('hybridq', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.strip() == (
        "hybridq: the command line needs typer; pip install hybridq[demo]"
    )


def test_a_plot_without_a_baseline_has_one_panel(comparison):
    """A PNG has its height in bytes 20 to 24: at 120 points per inch, of 7.5 inches or of 4.8."""
    built = report.build_report(comparison)
    heights = []
    for entries in (built["recipes"], built["recipes"][1:]):
        image = report.plot_losses({**built, "recipes": entries})
        heights.append(int.from_bytes(image[20:24], "big"))
    assert heights == [900, 576]
