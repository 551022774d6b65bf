"""Folders of `hybridq.convert_checkpoint` in transformers, by its own mapping of keys."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings

import pytest
import torch

import hybridq
from hf_models import assert_same, load, logits, quantized, saved
from hybridq.integrations.transformers import HybridQConfig


@pytest.fixture(autouse=True)
def quiet():
    """That a mixture's experts stay in high precision is said by `convert`, and tested there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hybridq.HybridQWarning)
        yield


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mixtral", "qwen3_moe", "gpt2"])
def test_a_converted_checkpoint_is_loaded(kind, tmp_path) -> None:
    """On disk a mixture has a matrix for each expert; in memory one tensor for all."""
    folder = saved(kind, tmp_path / "plain")
    hybridq.convert_checkpoint(folder, tmp_path / "q", "mxfp8")
    model, told = load(tmp_path / "q", output_loading_info=True)
    assert not any(told.values())
    (tmp_path / "q" / "config.json").write_bytes((folder / "config.json").read_bytes())
    said = load(tmp_path / "q", quantization_config=HybridQConfig(format="mxfp8"))
    assert_same(model, said)  # a folder whose config.json says nothing
    names = set(quantized(model))
    assert names
    experts = {name for name, _ in model.named_parameters() if "experts" in name}
    assert experts <= names  # the planes of each expert's matrices, put together
    plain = load(folder)
    for name, parameter in plain.named_parameters():
        mine = model.get_parameter(name).detach()
        if name in names:
            assert mine.shape == parameter.shape
            mine = mine.dequantize()
        if "experts" in name:  # each expert's matrices were quantized by themselves
            parts = [hybridq.quantize(one, "mxfp8").dequantize() for one in parameter.detach()]
            assert torch.equal(mine, torch.stack(parts)), name
        elif name not in names:
            assert torch.equal(mine, parameter), name
    model.save_pretrained(tmp_path / "again")
    assert_same(model, load(tmp_path / "again"))
    assert torch.equal(logits(model), logits(load(tmp_path / "again")))


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8"])
def test_planes_that_cannot_be_put_together_are_decoded(recipe, tmp_path) -> None:
    """Those of gate and up with amaxes of their own, or with blocks across 48 of 96 rows."""
    folder = saved("qwen3_moe", tmp_path / "plain")
    hybridq.convert_checkpoint(folder, tmp_path / "q", hybridq.ptq.Selection(recipe=recipe))
    model = load(tmp_path / "q")
    found = quantized(model)
    checkpoint = hybridq.load_checkpoint(tmp_path / "q")
    for name, value in model.named_parameters():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        parts = ["down"] if name.endswith("down_proj") else ["gate", "up"]
        own = name.rpartition(".")[0]
        each = [
            torch.cat([checkpoint[f"{own}.{n}.{one}_proj.weight"].dequantize() for one in parts])
            for n in range(4)
        ]
        assert torch.equal(value.detach().to(torch.bfloat16), torch.stack(each))
        assert (name in found) == (parts == ["down"])


@pytest.mark.parametrize("selection", ["spec", "pair", "recipe", "file"])
def test_config_json_says_how_a_checkpoint_was_converted(selection, tmp_path) -> None:
    folder = saved("llama", tmp_path / "plain")
    (tmp_path / "own.toml").write_text(hybridq.recipe("mxfp8", dgrad="nvfp4").to_toml())
    asked = {
        "file": hybridq.ptq.Selection(recipe=str(tmp_path / "own.toml")),
        "spec": "nvfp4_16x16;4o6=mse;bound=256",
        "pair": hybridq.quantizer("mxfp8", columnwise="nvfp4"),
        "recipe": hybridq.ptq.Selection(recipe="mxfp8_fwd_nvfp4_bwd"),
    }[selection]
    hybridq.convert_checkpoint(folder, tmp_path / "q", asked)
    (tmp_path / "own.toml").unlink()
    model = load(tmp_path / "q")
    names = set(quantized(model))
    assert len(names) == 14
    checkpoint = hybridq.load_checkpoint(tmp_path / "q")
    for name in names:
        mine, its = model.get_parameter(name), checkpoint[name]
        assert torch.equal(mine.rowwise.data, its.rowwise.data)
        assert mine.quantizer.text == its.quantizer.text
    says = json.loads((tmp_path / "q" / "config.json").read_text())
    del says["quantization_config"], says["transformers_weights"]
    assert says == json.loads((folder / "config.json").read_text())


def test_no_recipe_without_a_name_is_said(tmp_path) -> None:
    """Nor is what stands there already replaced."""
    folder = saved("llama", tmp_path / "plain")
    recipe = hybridq.CustomRecipe(lambda role: hybridq.MXFP8Quantizer())
    hybridq.convert_checkpoint(folder, tmp_path / "a", hybridq.ptq.Selection(recipe=recipe))
    path = folder / "config.json"
    assert (tmp_path / "a" / "config.json").read_bytes() == path.read_bytes()
    path.write_text(path.read_text().replace("{", '{"quantization_config": {},', 1))
    hybridq.convert_checkpoint(folder, tmp_path / "b", "mxfp8")
    assert (tmp_path / "b" / "config.json").read_bytes() == path.read_bytes()


@pytest.mark.more
def test_transformers_refuses_what_only_hybridq_reads(tmp_path) -> None:
    """Without hybridq's quantizer it would warn, and give the model random weights."""
    folder = saved("llama", tmp_path / "plain")
    hybridq.convert_checkpoint(folder, tmp_path / "q", "mxfp8")
    code = (
        "import sys, transformers\n"
        "for own in (transformers.AutoModelForCausalLM, transformers.LlamaForCausalLM):\n"
        "    try:\n"
        "        own.from_pretrained(sys.argv[1])\n"
        "    except ValueError as error:\n"
        "        print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "q")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.count("import hybridq.integrations.transformers before from_pretrained") == 2
    model = load(tmp_path / "q")
    assert quantized(model)
    model.save_pretrained(tmp_path / "again")
    assert quantized(load(tmp_path / "again"))
