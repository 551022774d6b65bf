"""Files of one module, whose names have no dot, of other parameters, and of nothing."""

from __future__ import annotations

import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file

import hybridq
from hybridq import layouts
from hybridq.errors import CheckpointError
from hybridq.tensor import is_quantized

CASES = [
    (name, scheme.name)
    for name in layouts.names()
    for scheme in layouts.get(name).schemes
    if layouts.get(name).holds_matrices
]


def exported(weights, layout: str, scheme: str, folder):
    save_file(weights, folder / "in.safetensors")
    given = {"layout": layout, "format": scheme, "include": ["*weight"]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hybridq.export(folder / "in.safetensors", folder / "out.safetensors", **given)
    return folder / "out.safetensors"


@pytest.mark.parametrize("module", ["", "a."])
@pytest.mark.parametrize(("layout", "scheme"), CASES)
def test_codes_are_never_values(layout, scheme, module, tmp_path) -> None:
    """Where no configuration says whose they are, and nothing else is in the file."""
    torch.manual_seed(0)
    weights = {f"{module}weight": torch.randn(128, 128).bfloat16()}
    if (layout, scheme) == ("modelopt", "fp8_tensor"):
        pytest.skip("needs a calibration, by names of modules")
    file = exported(weights, layout, scheme, tmp_path)
    told = hybridq.load_checkpoint(file, layout)
    assert list(told) == list(weights)
    [(name, weight)] = told.items()
    try:
        found = hybridq.load_checkpoint(file)
    except CheckpointError as error:
        assert "names could mean" in str(error)
        return
    assert list(found) == list(weights)
    assert is_quantized(found[name])
    assert torch.equal(found[name].dequantize(), weight.dequantize())


def test_integers_of_one_module_are_named(tmp_path) -> None:
    tensors = {"weight": torch.zeros(8, 8, dtype=torch.int8), "weight_scale": torch.ones(8, 1)}
    save_file(tensors, tmp_path / "in.safetensors")
    with pytest.raises(CheckpointError, match=r"'weight', .* holds integers"):
        hybridq.load_checkpoint(tmp_path / "in.safetensors")


def test_a_scale_of_another_shape_makes_no_values_of_codes(tmp_path) -> None:
    codes = torch.randn(64, 64).to(torch.float8_e4m3fn)
    tensors = {"weight": codes, "weight_scale": torch.ones(3, 3)}
    save_file(tensors, tmp_path / "in.safetensors")
    with pytest.raises(CheckpointError, match="cannot tell what"):
        hybridq.load_checkpoint(tmp_path / "in.safetensors", "comfyui")


@pytest.mark.parametrize("name", ["table", "pos.table", "a.weight_norm", "weight.x"])
def test_a_description_stands_beside_the_weight(name, tmp_path) -> None:
    """Of a parameter whose name does not end in `.weight`, too."""
    torch.manual_seed(0)
    save_file({name: torch.randn(32, 32)}, tmp_path / "in.safetensors")
    given = {"layout": "comfyui", "format": "mxfp8", "include": [name]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hybridq.export(tmp_path / "in.safetensors", tmp_path / "out.safetensors", **given)
    parts = ("weight", "weight_scale", "comfy_quant")
    assert sorted(load_file(tmp_path / "out.safetensors")) == sorted(f"{name}.{p}" for p in parts)


@pytest.mark.parametrize("rows", [0, 64])
@pytest.mark.parametrize(("layout", "scheme"), CASES)
def test_a_matrix_of_nothing_is_written_or_refused(layout, scheme, rows, tmp_path) -> None:
    if (layout, scheme) == ("modelopt", "fp8_tensor"):
        pytest.skip("needs a calibration, by names of modules")
    weights = {"a.weight": torch.empty(rows, 0 if rows else 128, dtype=torch.bfloat16)}
    try:
        file = exported(weights, layout, scheme, tmp_path)
    except CheckpointError as error:
        assert "has one scale per row" in str(error)
        return
    read = hybridq.load_checkpoint(file, layout)["a.weight"]
    assert is_quantized(read)
    assert read.shape == weights["a.weight"].shape
