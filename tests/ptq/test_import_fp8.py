"""FP8 checkpoints with one scale per tensor, written here by hand as others publish them."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import hybridq
from checkpoint_tools import Notes
from hybridq.errors import CheckpointError

#: Who writes it: names of the scales of weight and input, their dtype, the configuration.
KINDS = {
    "mistral": (
        ("weight_scale_inv", "activation_scale", torch.bfloat16),
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        "fine-grained-fp8",
    ),
    "autofp8": (
        ("weight_scale", "input_scale", torch.float32),
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        "auto-fp8",
    ),
    "quark": (
        ("weight_scale", "input_scale", torch.bfloat16),
        {"quant_method": "quark", "exclude": ["lm_head"], "export": {"kv_cache_group": []}},
        "quark",
    ),
}
LINEARS = ("self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")


def written(folder, kind) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Write a checkpoint; return its weights in FP64 and the scales of inputs, by module."""
    (weight_scale, input_scale, dtype), config, _ = KINDS[kind]
    folder.mkdir()
    tensors, values, inputs = {"lm_head.weight": torch.randn(32, 64).bfloat16()}, {}, {}
    for i, part in enumerate(LINEARS):
        module = f"model.layers.0.{part}"
        shape = ((64, 64), (192, 64), (64, 192))[i]
        codes = (torch.randn(shape) * 100.0).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
        scale = torch.tensor(0.01 * (i + 1)).to(dtype)
        tensors[f"{module}.weight"], tensors[f"{module}.{weight_scale}"] = codes, scale
        tensors[f"{module}.{input_scale}"] = torch.tensor(0.125 * (i + 1)).to(dtype)
        values[f"{module}.weight"] = codes.double() * scale.double()
        inputs[module] = 0.125 * (i + 1)
    save_file(tensors, folder / "model.safetensors")
    said = {"model_type": "llama", "torch_dtype": "bfloat16", "quantization_config": config}
    (folder / "config.json").write_text(json.dumps(said), encoding="utf-8")
    return values, inputs


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_codes_times_scales(kind, tmp_path) -> None:
    values, _ = written(tmp_path / "in", kind)
    read = hybridq.load_checkpoint(tmp_path / "in")
    for name, value in values.items():
        own = read[name]
        assert own.rowwise.spec.format.block is None, "one scale for the tensor"
        made = own.rowwise.dequantize(torch.float32).double()
        assert (made - value).abs().max() <= 2.0**-24 * value.abs().max()
        assert torch.equal(own.rowwise.data.view(torch.float8_e4m3fn).double() == 0.0, value == 0.0)
    assert not isinstance(read["lm_head.weight"], hybridq.QuantizedTensor)


@pytest.mark.parametrize(
    "target", ["compressed-tensors", "modelopt", *(k[2] for k in KINDS.values())]
)
@pytest.mark.parametrize("kind", KINDS)
def test_codes_and_scales_go_on_to_other_layouts(kind, target, tmp_path) -> None:
    """Codes byte for byte; scales of weights and inputs in FP32, the latter rounded once more."""
    values, inputs = written(tmp_path / "in", kind)
    (weight_scale, _, _), _, _ = KINDS[kind]
    notes = Notes()
    hybridq.export(tmp_path / "in", tmp_path / "out", layout=target, observer=notes)
    before = load_file(tmp_path / "in" / "model.safetensors")
    after = load_file(tmp_path / "out" / "model.safetensors")
    ends = {k[2]: k[0][:2] for k in KINDS.values()}
    own_weight, own_input = ends.get(target, ("weight_scale", "input_scale"))
    for name in values:
        module = name.removesuffix(".weight")
        assert torch.equal(before[name].view(torch.uint8), after[name].view(torch.uint8))
        scale = after[f"{module}.{own_weight}"]
        assert scale.dtype == torch.float32
        assert scale.item() == before[f"{module}.{weight_scale}"].float().item()
        own = after[f"{module}.{own_input}"].item()
        assert abs(own / inputs[module] - 1.0) <= 2.0**-23
    said = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    if target in ("auto-fp8", "fine-grained-fp8"):
        assert said["activation_scheme"] == "static"
    if target == "quark":
        assert said["global_quant_config"]["input_tensors"]["is_dynamic"] is False
    assert not any("scales of inputs" in one for one in notes.warnings)


def test_quarks_other_formats_are_refused(tmp_path) -> None:
    """FP6, MXFP8 and NVFP4 have the same names: nothing of them is taken for MXFP4 or FP8."""
    e4m3, u8 = torch.float8_e4m3fn, torch.uint8
    others = {
        "mxfp6": {
            "weight": torch.zeros(64, 48, dtype=u8),
            "weight_scale": torch.zeros(64, 2, dtype=u8),
        },
        "mxfp8": {
            "weight": torch.zeros(64, 64).to(e4m3),
            "weight_scale": torch.zeros(64, 2, dtype=u8),
        },
        "nvfp4": {
            "weight": torch.zeros(64, 32, dtype=u8),
            "weight_scale": torch.ones(64, 4).to(e4m3),
        },
        "int8": {"weight": torch.zeros(64, 64, dtype=torch.int8), "weight_scale": torch.ones(64)},
    }
    for name, tensors in others.items():
        folder = tmp_path / name
        written(folder, "quark")
        save_file(
            {f"model.layers.0.mlp.up_proj.{key}": one for key, one in tensors.items()},
            folder / "model.safetensors",
        )
        with pytest.raises(CheckpointError, match="quark cannot tell what"):
            hybridq.load_checkpoint(folder)
