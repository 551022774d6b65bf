"""Folders of torchao, loaded as quantized tensors with their own codes and scales."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import hybridq.integrations.transformers as ours
from hf_models import assert_same, load, logits, quantized, saved
from hybridq.errors import CheckpointError
from layout_folders import is_quantized
from torchao_files import KINDS, SWIZZLED, metadata_of, write_torchao


@pytest.fixture
def folder(tmp_path):
    """A model whose weights are of every kind, one after the other; and what they decode to."""
    plain = load_file(saved("wide", tmp_path / "plain") / "model.safetensors")
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    cases = [*((kind, False) for kind in KINDS), *((kind, True) for kind in SWIZZLED)]
    names = [name for name, value in plain.items() if is_quantized(name, value)]
    weights = {name: (*cases[n % len(cases)], plain[name]) for n, name in enumerate(names)}
    assert len(weights) >= len(cases)
    left = {name: value for name, value in plain.items() if name not in weights}
    values = write_torchao(tmp_path / "m", weights, config, left)
    (tmp_path / "decoded").mkdir()
    made = {name: value.float() for name, value in {**left, **values}.items()}
    save_file(made, tmp_path / "decoded" / "model.safetensors", {"format": "pt"})
    (tmp_path / "decoded" / "config.json").write_text(json.dumps(config))
    return tmp_path / "m"


def test_it_is_loaded_as_quantized_tensors(folder, tmp_path) -> None:
    model, told = ours.load(folder, output_loading_info=True, dtype=torch.float32)
    assert not any(told.values())
    own, decoded = quantized(model), load(tmp_path / "decoded", dtype=torch.float32)
    assert len(own) >= len(KINDS) + len(SWIZZLED)
    for name, value in decoded.named_parameters():
        mine = model.get_parameter(name).detach()
        mine = mine.dequantize(dtype=torch.float32) if name in own else mine
        torch.testing.assert_close(mine, value.detach(), rtol=2.0**-22, atol=0.0, msg=name)
    said = logits(decoded)
    assert (logits(model) - said).norm() <= 1e-5 * said.norm()
    model.save_pretrained(tmp_path / "again")
    assert_same(model, load(tmp_path / "again"))


def test_what_it_cannot_load_is_named(folder) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"must say the class of .*, got nothing"):
        ours.load(folder)
    old = {
        name.replace("._weight_", ".weight:") if "._weight_" in name else f"{name}:_data": value
        for name, value in tensors.items()
    }
    names = {name.partition(":")[0] for name in old}
    save_file(old, path, metadata_of({}, dict.fromkeys(names)))
    with pytest.raises(CheckpointError, match=r"must be those of torchao 0\.15 or later, got .*:"):
        ours.load(folder)
    path.unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"must be safetensors, got pytorch_model\.bin; save"):
        ours.load(folder)


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_stacks_of_experts(kind, tmp_path) -> None:
    """GPT-OSS keeps them as `[E, in, out]`, and torchao makes scales along the last axis."""
    plain = load_file(saved(kind, tmp_path / "plain") / "model.safetensors")
    model = load(tmp_path / "plain")
    state = {name: one.detach() for name, one in model.state_dict().items()}
    names = [name for name, one in state.items() if one.dim() == 3 and "bias" not in name]
    weights = {name: ("mxfp8", False, state[name]) for name in names}
    left = {name: one for name, one in plain.items() if "experts" not in name}
    left |= {name: one for name, one in state.items() if "experts" in name and "bias" in name}
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    values = write_torchao(tmp_path / "m", weights, config, left)
    assert names
    if kind == "gpt_oss":
        with pytest.raises(CheckpointError, match=r"must lie along the inputs of products, got"):
            ours.load(tmp_path / "m")
        return
    made = ours.load(tmp_path / "m", dtype=torch.float32)
    own = quantized(made)
    assert set(own) == set(names)
    for name in names:
        value = own[name].detach().dequantize(dtype=torch.float32)
        assert torch.equal(value.double(), values[name])
