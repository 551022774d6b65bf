"""hybridq report and hybridq advise: of a function in a file, and of a folder of transformers."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import hf_models
import hybridq
from hybridq.cli.targets import load_target
from hybridq_cli.app import app

RUNNER = CliRunner()
CODE = """
import torch

def made():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    return model, torch.randn(32, 64), lambda y: y.square().mean()

def nested():
    model, batch, loss = made()
    return model, {"input": batch}, loss

def nothing():
    return 3
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "own_model.py"
    path.write_text(CODE)
    return path


def test_a_report_of_a_function(file: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    options = ("--recipe", "mxfp8", "--format", "nvfp4", "--html", str(page))
    result = RUNNER.invoke(app, ["report", f"{file}:made", *options, "--json"])
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    torch.manual_seed(0)
    model = hybridq.convert(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)))
    batch = torch.randn(32, 64)
    want = hybridq.report(model, batch, ["nvfp4"], recipe="mxfp8", loss=lambda y: y.square().mean())
    assert said == json.loads(want.to_json())
    assert "<table id='slots'" in page.read_text()
    shown = RUNNER.invoke(app, ["report", f"{file}:made", *options, "--rows", "3", "--by", "amax"])
    assert "3 worst of 10 planes, in the run" in shown.output


def test_advice_is_written_to_a_file(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "recipe.toml"
    options = ("--candidate", "mxfp8", "--prefer", "memory", "--budget", "1", "--out", str(out))
    result = RUNNER.invoke(app, ["advise", f"{file}:made", *options, "--plan-for", "h200"])
    assert result.exit_code == 0, result.output
    assert "planned by its data sheet" in result.output
    found = hybridq.recipes.load(out)
    assert found == hybridq.recipe(fprop="mxfp8", dgrad="mxfp8", wgrad="mxfp8")


def test_a_batch_that_is_a_mapping_goes_to_the_device(file: Path) -> None:
    options = ("--recipe", "mxfp8", "--json", "--device", "cpu")
    said = [RUNNER.invoke(app, ["report", f"{file}:{n}", *options]) for n in ("made", "nested")]
    assert said[0].exit_code == 0 and said[0].stdout == said[1].stdout, said[1].output
    moved = [load_target(f"{file}:{n}", None, None, "meta") for n in ("made", "nested")]
    assert moved[0].data.is_meta and moved[1].data["input"].is_meta
    assert all(one.is_meta for one in moved[1].model.parameters())


@pytest.mark.slow
def test_a_report_of_a_folder_of_transformers(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    folder = hf_models.saved("llama", tmp_path)
    hf_models.save_tokenizer(folder)
    text = folder / "text.txt"
    text.write_text(" ".join(f"w{i * 13 % 90}" for i in range(70)))
    options = ("--text", str(text), "--tokens", "16", "--recipe", "nvfp4", "--json")
    result = RUNNER.invoke(app, ["report", str(folder), *options])
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    layers = {row["layer"] for row in said["slots"]}
    assert "model.layers.0.self_attn.q_proj" in layers and said["loss"] > 0
    assert {row["tensor"] for row in said["slots"]} == {"input", "weight", "grad_output"}


def test_a_folder_is_loaded_as_the_class_that_it_names(tmp_path: Path) -> None:
    """Of an encoder and a decoder both are there, and a model without such labels is named."""
    pytest.importorskip("tokenizers")
    transformers = hf_models.transformers
    sizes = {"vocab_size": 96, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 1}
    config = transformers.T5Config(**sizes, num_heads=4, decoder_start_token_id=0)
    made = transformers.T5ForConditionalGeneration(config)
    made.save_pretrained(tmp_path)
    hf_models.save_tokenizer(tmp_path)
    (tmp_path / "text.txt").write_text("w1 w2 w3 w4 w5")
    own = load_target(str(tmp_path), tmp_path / "text.txt", 4, "cpu")
    assert type(own.model).__name__ == "T5ForConditionalGeneration"
    assert own.data["labels"].tolist() == [[3, 4, 5, 6]]
    with torch.no_grad():
        want = made.eval()(**own.data).loss
        assert torch.equal(own.model.eval()(**own.data).loss, want)
    transformers.T5EncoderModel(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="predicts tokens, got a T5EncoderModel"):
        load_target(str(tmp_path), tmp_path / "text.txt", 4, "cpu")


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("{}:absent", "must name a function, got 'absent'"),
        ("{}:nothing", "must return"),
        ("{}", "must be a folder, FILE.py:FUNCTION or MODULE:FUNCTION"),
        ("absent.py:made", "must name a file that is there"),
        ("no_such_module:made", "must name a module"),
    ],
)
def test_mistakes_are_named(file: Path, target: str, text: str) -> None:
    for command in ("report", "advise"):
        result = RUNNER.invoke(app, [command, target.format(file)])
        assert result.exit_code == 2 and text in result.output
    options = {
        "--text": ("--text is for a folder of transformers", str(file)),
        "--tokens": ("--tokens is for a folder of transformers", "7"),
        "--device": ("must be one that is here, got 'foo'", "foo"),
    }
    if not torch.cuda.is_available():
        options[" --device"] = ("must be one that is here, got 'cuda'", "cuda")
    for option, (said, value) in options.items():
        result = RUNNER.invoke(app, ["report", f"{file}:made", option.strip(), value])
        assert result.exit_code == 2 and said in " ".join(result.output.split()), result.output
    for command, option in (("report", "--html"), ("advise", "--out")):
        for path, said in ((file.parent / "no" / "x", "and is not"), (file.parent, "got the")):
            result = RUNNER.invoke(app, [command, f"{file}:made", option, str(path)])
            assert result.exit_code == 2 and said in " ".join(result.output.split()), result.output
    folder = RUNNER.invoke(app, ["report", str(file.parent)])
    assert folder.exit_code == 2 and "needs --text" in folder.output


def test_a_model_on_the_meta_device_is_named(tmp_path: Path) -> None:
    (tmp_path / "on_meta.py").write_text(
        "import torch\n\ndef made():\n    with torch.device('meta'):\n"
        "        return torch.nn.Linear(64, 64), torch.ones(4, 64), torch.sum\n"
    )
    for command in ("report", "advise"):
        result = RUNNER.invoke(app, [command, f"{tmp_path / 'on_meta.py'}:made"])
        said = " ".join(result.output.split())
        assert result.exit_code == 2 and "got weight on the meta device" in said, said


@pytest.mark.parametrize("is_there", [False, True])
def test_a_file_that_cannot_be_written_is_named_first(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    page = tmp_path / "page.html"
    if is_there:
        page.touch()
    shut = page if is_there else tmp_path
    monkeypatch.setattr("os.access", lambda path, mode: mode != os.W_OK or Path(path) != shut)
    for command, option in (("report", "--html"), ("advise", "--out")):
        result = RUNNER.invoke(app, [command, f"{file}:made", option, str(page)])
        said = " ".join(result.output.split())
        assert result.exit_code == 2 and "must be a file that can be" in said, said
