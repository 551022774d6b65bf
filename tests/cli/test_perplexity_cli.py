"""hybridq perplexity: a folder of transformers and a text."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

import hf_models
import hybridq
from hybridq.serving import perplexity
from hybridq_cli.app import app

tokenizers = pytest.importorskip("tokenizers")
RUNNER = CliRunner()
TEXT = " ".join(f"w{i * 13 % 90}" for i in range(70))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = hf_models.saved("llama", tmp_path_factory.mktemp("model"))
    hf_models.save_tokenizer(made)
    (made / "text.txt").write_text(TEXT)
    return made


def ask(folder, *options: str):
    return RUNNER.invoke(app, ["perplexity", str(folder), str(folder / "text.txt"), *options])


def test_it_is_what_the_function_finds(folder) -> None:
    result = ask(folder, "--recipe", "mxfp8", "--window", "16", "--stride", "4", "--json")
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    ids = torch.tensor([2 + i * 13 % 90 for i in range(70)])
    model = hf_models.load(folder).eval()
    want = perplexity(model, ids, window=16, stride=4)
    assert said["as it is"]["value"] == want.value and said["as it is"]["tokens"] == 69
    hybridq.quantize_model(model, "mxfp8")
    want = perplexity(model, ids, window=16, stride=4)
    assert said["mxfp8"]["value"] == want.value != said["as it is"]["value"]


def test_a_calibration_and_a_table(folder, tmp_path) -> None:
    found = hybridq.calibrate(hf_models.load(folder), [hf_models.IDS])
    found.save(tmp_path / "amaxes.safetensors")
    options = ("--calibration", str(tmp_path / "amaxes.safetensors"), "--window", "16")
    result = ask(folder, "--recipe", "nvfp4", "--recipe", "fp8_current", *options)
    assert result.exit_code == 0, result.output
    assert "69 tokens in windows of 16, 8 apart" in result.output
    assert all(name in result.output for name in ("as it is", "nvfp4", "fp8_current"))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--recipe", "nvfp5"), "nvfp4"),
        (("--window", "1"), "window must be at least 2"),
        (("--calibration", "nowhere.safetensors"), "nowhere"),
    ],
)
def test_wrong_options(folder, options, text) -> None:
    result = ask(folder, *options)
    assert result.exit_code == 2 and text in result.output
