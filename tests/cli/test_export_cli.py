"""`hybridq export`: what it prints and how it ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import hybridq
from hybridq_cli.app import app

RUNNER = CliRunner()


@pytest.fixture
def source(tmp_path) -> Path:
    torch.manual_seed(3)
    weights = {"mlp.up_proj.weight": torch.randn(64, 96).bfloat16(), "mlp.b": torch.ones(3)}
    save_file(weights, tmp_path / "in.safetensors")
    return tmp_path / "in.safetensors"


def run(*args: object):
    return RUNNER.invoke(app, ["export", *map(str, args)])


def test_it_exports_and_says_what_it_did(source, tmp_path):
    report, out = tmp_path / "report.json", tmp_path / "out.safetensors"
    done = run(source, out, "--layout", "modelopt", "--format", "nvfp4", "--report", report)
    assert done.exit_code == 0, done.output
    assert "1 quantized, 1 copied" in done.stdout and "worst relative error" in done.stdout
    assert "known by names alone" in done.stderr.replace("\n", " ")
    x = load_file(source)["mlp.up_proj.weight"]
    found = load_file(out)
    plane = hybridq.quantize(x, "nvfp4").rowwise
    assert torch.equal(found["mlp.up_proj.weight"], plane.data)
    assert json.loads(report.read_text())["num_quantized"] == 1
    again = tmp_path / "plain.safetensors"
    assert run(out, again, "--layout", "bf16", "--quiet").exit_code == 0
    assert torch.equal(load_file(again)["mlp.up_proj.weight"], plane.dequantize(torch.bfloat16))


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        (("--layout", "model-opt"), 2, "did you mean 'modelopt'"),
        (("--layout", "modelopt"), 1, "a format or a recipe is needed"),
        (("--layout", "modelopt", "--format", "mxfp4"), 1, "cannot hold mlp.up_proj.weight"),
        (("--layout", "modelopt", "--format", "fp8_tensor"), 2, "needs a calibration"),
        (("--layout", "bf16", "--format", "mxfp4"), 2, "takes no other choice"),
        (("--layout", "bf16"), 1, "holds nothing quantized"),
        (("--layout", "modelopt", "--format", "mxfp5"), 2, "did you mean 'mxfp8'"),
        (("--layout", "modelopt", "--format", ""), 2, "must be one of"),
        (("--layout", "modelopt", "--format", "nvfp4", "--kv-cache", "fp9"), 2, "one of fp8"),
        (("--layout", "modelopt", "--recipe", "nope"), 2, "recipe: must be one of"),
        (("--layout", "modelopt", "--recipe", "/nope.toml"), 2, "must be a file that can be read"),
        (
            ("--layout", "modelopt", "--format", "nvfp4", "--from", "compressed-tensors"),
            1,
            "no weight in the layout compressed-tensors",
        ),
        (
            ("--layout", "modelopt", "--format", "nvfp4", "--from", "hybridq"),
            1,
            "no weight in the layout hybridq",
        ),
        (("--layout", "modelopt", "--format", "nvfp4", "--memory", "1"), 2, "memory must be"),
    ],
)
def test_one_line_for_what_is_refused(options, status, words, source, tmp_path):
    done = run(source, tmp_path / "out.safetensors", *options)
    assert done.exit_code == status, done.output
    lines = [line for line in done.stderr.splitlines() if not line.startswith("warning")]
    assert len(lines) == 1 and lines[0].startswith("hybridq: ") and words in lines[0], done.stderr
    assert not (tmp_path / "out.safetensors").exists()
