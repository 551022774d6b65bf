"""HybridQConfig: what it keeps, what it refuses, and folders that do not fit."""

from __future__ import annotations

import pytest

import hybridq
from hf_models import assert_same, load, saved
from hybridq import QuantizedTensor
from hybridq.integrations.transformers import VERSION, HybridQConfig


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"recipe": "mxpf8"}, ValueError, "got 'mxpf8'; did you mean 'mxfp8'"),
        ({"format": "nvpf4"}, ValueError, "got 'nvpf4'; did you mean 'nvfp4'"),
        ({"format": "bf16"}, ValueError, "weights must be quantized"),
        ({"format": "nvfp4;sr"}, ValueError, "not rounded stochastically"),
        ({"format": "nvfp4", "columnwise": "nvfp5"}, ValueError, "nvfp5"),
        ({}, ValueError, "needs a recipe or a format and not both, got recipe=None, format=None"),
        ({"recipe": "mxfp8", "format": "nvfp4"}, ValueError, "not both, got recipe='mxfp8'"),
        ({"recipe": "mxfp8", "columnwise": "nvfp4"}, ValueError, "columnwise goes with a format"),
        (
            {"recipe": "mxfp8", "weights": "int4"},
            ValueError,
            "must be one of .* got 'int4'",
        ),
        ({"format": "mxfp8", "weights": "high_precision"}, ValueError, "give a recipe"),
        ({"recipe": "mxfp8", "frozen": 1}, ValueError, "frozen must be a bool"),
        ({"recipe": "mxfp8", "version": VERSION + 1}, ValueError, "a newer hybridq may read it"),
        (
            {"recipe": "mxfp8", "bits": 4, "axis": 1},
            TypeError,
            "takes no axis, bits",
        ),
        (
            {"recipe": hybridq.CustomRecipe(lambda role: hybridq.IdentityQuantizer())},
            ValueError,
            "a file says recipes by name",
        ),
        ({"recipe": "mxfp8", "also": ["head"]}, ValueError, "also takes .*, got head"),
        (
            {"recipe": "mxfp8", "modules_to_not_convert": "lm_head"},
            TypeError,
            "modules_to_not_convert must be a collection of texts",
        ),
        ({"recipe": "mxfp8", "also": "heads"}, TypeError, "also must be a collection"),
        ({"recipe": "mxfp8", "least_width": -1}, ValueError, "least_width must not be negative"),
    ],
)
def test_wrong_configurations(arguments, kind, text) -> None:
    with pytest.raises(kind, match=text):
        HybridQConfig(**arguments)


def test_a_recipe_that_has_a_name_may_be_given() -> None:
    assert HybridQConfig(hybridq.recipes.get("nvfp4")).recipe == "nvfp4"
    assert (
        HybridQConfig.from_dict(HybridQConfig("nvfp4").to_dict()).to_dict()
        == HybridQConfig("nvfp4").to_dict()
    )


@pytest.mark.parametrize("way", ["recipe", "file"])
def test_a_recipe_without_a_name_is_kept_as_its_text(way, tmp_path) -> None:
    folder = saved("llama", tmp_path / "plain")
    recipe = hybridq.recipe("mxfp8", dgrad="nvfp4")
    (tmp_path / "own.toml").write_text(recipe.to_toml())
    given = recipe if way == "recipe" else tmp_path / "own.toml"
    model = load(folder, quantization_config=HybridQConfig(given))
    assert model.hf_quantizer.quantization_config.weight_recipe == recipe
    model.save_pretrained(tmp_path / "q")
    (tmp_path / "own.toml").unlink()
    again = load(tmp_path / "q")
    assert again.hf_quantizer.quantization_config.weight_recipe == recipe
    assert_same(model, again)


@pytest.mark.parametrize("kind", ["llama", "tied", "gpt2"])
def test_embeddings_are_stored_quantized(kind, tmp_path) -> None:
    folder = saved(kind, tmp_path / "plain")
    model = load(folder, quantization_config=HybridQConfig("mxfp8", also=["embeddings", "heads"]))
    embedding = model.get_input_embeddings()
    assert isinstance(embedding.weight, QuantizedTensor)
    model.save_pretrained(tmp_path / "q")
    again = load(tmp_path / "q")
    assert_same(model, again)
    for one in (model, again):
        is_tied = one.get_output_embeddings().weight is one.get_input_embeddings().weight
        assert is_tied == (kind != "llama")


def test_a_folder_of_a_later_version_is_refused(tmp_path) -> None:
    folder = saved("llama", tmp_path / "plain")
    load(folder, quantization_config=HybridQConfig("mxfp8")).save_pretrained(tmp_path / "q")
    path = tmp_path / "q" / "config.json"
    text = path.read_text()
    path.write_text(text.replace(f'"version": {VERSION}', f'"version": {VERSION + 1}'))
    with pytest.raises(ValueError, match="a newer hybridq may read it"):
        load(tmp_path / "q")


def test_weights_of_another_shape_are_refused_before_any_is_read(tmp_path) -> None:
    folder = saved("llama", tmp_path / "plain")
    load(folder, quantization_config=HybridQConfig("mxfp8")).save_pretrained(tmp_path / "q")
    path = tmp_path / "q" / "config.json"
    path.write_text(path.read_text().replace('"intermediate_size": 96', '"intermediate_size": 128'))
    with pytest.raises(ValueError, match=r"must have its parameter's shape, got .*\(64, 128\)"):
        load(tmp_path / "q")


def test_weights_that_are_missing_are_quantized_when_they_are_made(tmp_path) -> None:
    from safetensors.torch import load_file, save_file

    folder = saved("llama", tmp_path)
    state = load_file(folder / "model.safetensors")
    del state["model.layers.1.mlp.up_proj.weight"]
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    model, told = load(folder, quantization_config=HybridQConfig("mxfp8"), output_loading_info=True)
    assert told["missing_keys"] == {"model.layers.1.mlp.up_proj.weight"}
    assert isinstance(model.model.layers[1].mlp.up_proj.weight, QuantizedTensor)


def test_weights_are_functions_of_their_files(tmp_path) -> None:
    folder = saved("llama", tmp_path)
    recipe = hybridq.recipe(fprop=("mxfp8", "nvfp4;sr"), dgrad="mxfp8", wgrad="mxfp8")
    with pytest.raises(ValueError, match=r"a weight is a function of its file, .* of model\."):
        load(folder, quantization_config=HybridQConfig(recipe))
    load(folder, quantization_config=HybridQConfig(recipe, weights="high_precision"))
