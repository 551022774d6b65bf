"""hybridq perplexity: a folder of transformers and a text."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

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


def test_a_model_of_nan_is_null_in_json(folder, tmp_path) -> None:
    made = tmp_path / "model"
    shutil.copytree(folder, made)
    model = hf_models.load(folder)
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    model.save_pretrained(made)
    result = ask(made, "--window", "16", "--json")
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)["as it is"]
    assert said["value"] is None and said["nll"] is None and said["tokens"] == 69


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


@pytest.mark.parametrize("name", ["./lamma", "out/models/lamma", "/nowhere/lamma", "~/lamma"])
def test_a_folder_that_is_not_there_is_not_asked_of_the_hub(name, folder) -> None:
    result = RUNNER.invoke(app, ["perplexity", name, str(folder / "text.txt")])
    said = " ".join(result.output.split())
    assert result.exit_code == 2 and f"must be a folder that is there, got '{name}'" in said


def test_a_broken_tokenizer_is_named_and_a_recipe_is_read_before_it(folder, tmp_path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer.json").write_text("no JSON")
    result = ask(tmp_path)
    said = "".join(result.output.split())
    assert result.exit_code == 2 and "must have a tokenizer, got none".replace(" ", "") in said
    assert str(tmp_path) in said
    result = ask(tmp_path, "--recipe", "nvfp5")
    assert result.exit_code == 2 and "nvfp5" in result.output and "tokenizer" not in result.output


def saved_as(name: str, folder, **options):
    """A folder of a model of two layers of the class `name`, with a tokenizer and a text."""
    transformers = hf_models.transformers
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    kind(kind.config_class(**hf_models.GROUPED, **options)).save_pretrained(folder)
    hf_models.save_tokenizer(folder)
    (folder / "text.txt").write_text(TEXT)
    return folder


BART = {"d_model": 64, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("BartForConditionalGeneration", BART, "which has an encoder"),
        ("BertForMaskedLM", {}, "which fills in tokens of those on both sides"),
        ("BertLMHeadModel", {}, "as its config.json says is_decoder=false"),
        ("LlamaModel", {}, "must be a model that predicts tokens, got a LlamaModel"),
        ("LlamaForSequenceClassification", {}, "must be a model that predicts tokens"),
    ],
)
def test_models_that_predict_no_next_token_are_refused(name, options, text, tmp_path) -> None:
    """AutoModelForCausalLM makes something of each: a decoder alone, or a head of its own."""
    sides = ("encoder_", "decoder_")
    more = {f"{side}{key}": 2 for side in sides for key in ("layers", "attention_heads")}
    result = ask(saved_as(name, tmp_path, **({**options, **more} if options else {})))
    assert result.exit_code == 2 and text in " ".join(result.output.split()), result.output


def test_a_folder_without_all_weights_is_refused(tmp_path) -> None:
    made = saved_as("LlamaModel", tmp_path)
    path = made / "config.json"
    path.write_text(path.read_text().replace('"LlamaModel"', '"LlamaForCausalLM"'))
    result = ask(made)
    assert result.exit_code == 2
    assert "all weights of LlamaForCausalLM" in result.output and "lm_head.weight" in result.output


def test_quantized_folders_have_their_own_weights(folder, tmp_path) -> None:
    """In a process that has not loaded hybridq's quantizer, transformers drew weights anew."""
    from hybridq.integrations.transformers import HybridQConfig

    model = hf_models.load(folder, quantization_config=HybridQConfig("nvfp4")).eval()
    model.save_pretrained(tmp_path)
    hf_models.save_tokenizer(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT)
    ids = torch.tensor([2 + i * 13 % 90 for i in range(70)])
    want = perplexity(model, ids, window=16).value
    options = ("--window", "16", "--json")
    code = "from hybridq_cli import main; main()"
    arguments = ["perplexity", str(tmp_path), str(tmp_path / "text.txt"), *options]
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert json.loads(done.stdout)["as it is"]["value"] == want


def test_texts_and_devices_are_named(folder, tmp_path) -> None:
    text = tmp_path / "own.txt"
    for content, said in (
        (b"caf\xe9 w1", "must be UTF-8, got"),
        (b"w1", "two tokens or more, got 1"),
        (b"", "two tokens or more, got 0"),
    ):
        text.write_bytes(content)
        result = RUNNER.invoke(app, ["perplexity", str(folder), str(text)])
        assert result.exit_code == 2 and said in " ".join(result.output.split())
    for options, said in (
        (("--device", "foo"), "--device must be one that is here, got 'foo'"),
        (("--dtype", "int8"), "dtype must be one of auto, bfloat16, float16, float32, got 'int8'"),
    ):
        result = ask(folder, *options)
        assert result.exit_code == 2 and said in " ".join(result.output.split())
