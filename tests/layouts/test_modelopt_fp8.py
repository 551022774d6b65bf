"""ModelOpt's FP8 beside NVFP4: rows and blocks, in the shapes of published checkpoints."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file

import hybridq
from hybridq.errors import CheckpointError

E4M3 = torch.float8_e4m3fn


def codes(rows: int, cols: int) -> torch.Tensor:
    return torch.randn(rows, cols).mul(40).to(E4M3)


def folder(path, tensors, said):
    path.mkdir()
    save_file({**tensors, "model.norm.weight": torch.ones(8)}, path / "model.safetensors")
    config = {"model_type": "llama", "quantization_config": {"quant_method": "modelopt", **said}}
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


def blocks(scale: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    return scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :cols]


@pytest.mark.parametrize(
    ("name", "dims"), [("weight_scale", 4), ("weight_scale", 2), ("weight_scale_inv", 2)]
)
def test_blocks_beside_nvfp4(name, dims, tmp_path) -> None:
    """As vLLM documents it, as the script for Kimi K3, and as the draft layers of Qwen3.8."""
    expert, attention = "model.layers.0.mlp.experts.0.up_proj", "model.layers.0.self_attn.o_proj"
    scale, own = torch.rand(2, 3) + 0.5, codes(256, 384)
    shape = (2, 1, 3, 1) if dims == 4 else (2, 3)
    nvfp4 = hybridq.layouts.MODELOPT.stored(
        f"{expert}.weight", hybridq.quantize(torch.randn(64, 64), "nvfp4").rowwise.spec, (64, 64)
    )
    plane = hybridq.quantize(torch.randn(64, 64), "nvfp4").rowwise
    tensors = {
        **nvfp4.encode([plane]),
        f"{attention}.weight": own,
        f"{attention}.{name}": scale.reshape(shape),
    }
    layers = {
        expert: {"quant_algo": "NVFP4", "group_size": 16},
        attention: {"quant_algo": "FP8_PB_WO", "group_size": 128},
    }
    said = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    source = folder(tmp_path / "in", tensors, said)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read = hybridq.load_checkpoint(source)
    assert sorted(read) == sorted([f"{expert}.weight", f"{attention}.weight", "model.norm.weight"])
    wanted = own.float() * blocks(scale, 256, 384)
    assert torch.equal(read[f"{attention}.weight"].rowwise.dequantize(torch.float32), wanted)
    assert torch.equal(read[f"{expert}.weight"].rowwise.data, plane.data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hybridq.export(source, tmp_path / "out", layout="modelopt")
    out = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(out[f"{attention}.weight_scale"], scale.reshape(2, 1, 3, 1))
    made = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())["quantization"]
    assert made["quant_algo"] == "MIXED_PRECISION"
    assert made["quantized_layers"][attention] == {"quant_algo": "FP8_PB_WO", "group_size": 128}


@pytest.mark.parametrize("shape", [(48,), (48, 1)])
def test_a_scale_per_row(shape, tmp_path) -> None:
    own, scale = codes(48, 64), torch.rand(48) + 0.5
    tensors = {"m.q_proj.weight": own, "m.q_proj.weight_scale": scale.reshape(shape)}
    source = folder(tmp_path / "in", tensors, {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"})
    read = hybridq.load_checkpoint(source)["m.q_proj.weight"]
    assert torch.equal(read.rowwise.dequantize(torch.float32), own.float() * scale[:, None])


def test_mxfp4_is_read(tmp_path) -> None:
    plane = hybridq.quantize(torch.randn(48, 64), "mxfp4").rowwise
    tensors = {
        "m.q_proj.weight": plane.data.view(torch.uint8).reshape(48, 32),
        "m.q_proj.weight_scale": plane.scale.view(torch.uint8),
        "m.q_proj.input_scale": torch.tensor(0.5),
    }
    source = folder(tmp_path / "in", tensors, {"quant_algo": "W4A8_MXFP4_FP8", "group_size": 32})
    read = hybridq.load_checkpoint(source)["m.q_proj.weight"]
    assert torch.equal(read.rowwise.dequantize(torch.float32), plane.dequantize())
    with pytest.raises(CheckpointError, match="mxfp4 is read, and not written"):
        hybridq.export(source, tmp_path / "out", layout="modelopt")


def test_blocks_need_rows_and_columns_of_128(tmp_path) -> None:
    tensors = {f"m.{n}_proj.weight": torch.randn(n, 128).bfloat16() for n in (256, 320)}
    save_file(tensors, tmp_path / "in.safetensors")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        hybridq.export(
            tmp_path / "in.safetensors", tmp_path / "o.safetensors", layout="modelopt",
            format="fp8_block",
        )  # fmt: skip
    assert any("rows in multiples of 128" in str(one.message) for one in told)
    found = load_file(tmp_path / "o.safetensors")
    assert found["m.256_proj.weight"].dtype == E4M3
    assert found["m.320_proj.weight"].dtype == torch.bfloat16
