"""The mixture of experts on several ranks: torchrun, the losses of one rank, and what travels."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from hybridq_cli.app import app

pytest.importorskip("transformers", minversion="5.0")
pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
    reason="this torch has no gloo",
)


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("".join(f"the {i}th line says what the others say\n" for i in range(400)))
    return file


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dispatch", "ratio"),
    [("mxfp8", 0.52), pytest.param("nvfp4", 0.30, marks=pytest.mark.slow)],
)
def test_ranks_and_one_rank_come_to_the_same_loss(text, dispatch, ratio) -> None:
    sizes = {"layers": 1, "hidden": 128, "heads": 2, "ffn": 128, "sequence": 32, "experts": 4}
    numbers = sizes | {"batch": 4, "steps": 4, "eval-batches": 2, "eval-points": 1}
    options = [word for name, value in numbers.items() for word in (f"--{name}", str(value))]
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    command = [*launcher, "-m", "hybridq", "train-experts", *options, "--data", str(text)]
    done = subprocess.run(
        [sys.executable, *command, "--dispatch", dispatch],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d\d\.\d% of the linear FLOPs are quantized", done.stdout), done.stdout
    found = [float(one) for one in re.findall(r"│\s+(\d\.\d{3}) │", done.stdout)]
    assert found[0] == 1.0 and found[1] <= ratio, done.stdout


def test_bad_input_is_told(text) -> None:
    for options, told in (
        (["--recipe", "mxpf8"], "mxfp8"),
        (["--dispatch", "nope"], "value for --dispatch: format: must be one of"),
        (["--dispatch", "fp8"], "scales are of one row each"),
        (["--experts", "2", "--top", "3"], "top at least 1 and at most experts"),
        (["--data", str(text), "--steps", "1"], "must run under torchrun"),
    ):
        result = CliRunner().invoke(app, ["train-experts", *options], env={"COLUMNS": "400"})
        assert result.exit_code == 2 and told in result.output, result.output


def test_every_rank_must_have_an_expert(text, monkeypatch) -> None:
    """Told before the first of three runs, on all ranks."""
    module = importlib.import_module("hybridq.cli.train_experts")
    left = []
    monkeypatch.setattr(module, "_join", lambda *given: (3, 0))
    monkeypatch.setattr(module, "_leave", lambda: left.append(True))
    options = ["--data", str(text), "--experts", "2", "--steps", "1"]
    result = CliRunner().invoke(app, ["train-experts", *options], env={"COLUMNS": "400"})
    assert result.exit_code == 2 and left, result.output
    assert "every rank must have an expert, got experts=2 on 3 ranks" in result.output
