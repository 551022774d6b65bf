"""Checkpoints that no layout reads are named; their codes are never handed out as values.

Names, dtypes and shapes are those that the programs write, for one linear of 64x64.
"""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

import hybridq
from hybridq.errors import CheckpointError

INT32, U8, I8, BF16 = torch.int32, torch.uint8, torch.int8, torch.bfloat16
E4M3, E5M2, FNUZ = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz
FP16, FP32 = torch.float16, torch.float32
#: What the error says, `quant_method` of the configuration, and the tensors.
KINDS = {
    "gptq": (
        "GPTQ",
        {"qweight": (INT32, (8, 64)), "qzeros": (INT32, (1, 8)), "g_idx": (INT32, 64)},
    ),
    "awq": ("AWQ", {"qweight": (INT32, (64, 8)), "scales": (FP16, (1, 64))}),
    "bitsandbytes": ("bitsandbytes' FP4", {"weight": (U8, (2048, 1)), "weight.absmax": (FP32, 64)}),
    "bitsandbytes INT8": ("bitsandbytes' INT8", {"weight": (I8, (64, 64)), "SCB": (FP32, 64)}),
    "hqq": ("HQQ", {"W_q": (U8, (32, 64)), "scale": (FP16, (64, 1)), "zero": (FP16, (64, 1))}),
    "exl3": ("EXL3", {"trellis": (torch.int16, (4, 4, 64)), "suh": (FP16, 64), "svh": (FP16, 64)}),
    "mlx": ("MLX", {"weight": (torch.uint32, (64, 8)), "scales": (BF16, (64, 1))}),
    "quanto": ("quanto", {"weight._data": (I8, (64, 64)), "weight._scale": (BF16, (64, 1))}),
    "torchao": (
        "integers of torchao",
        {"_weight_qdata": (I8, (64, 64)), "_weight_scale": (FP32, (64, 1))},
    ),
    "torchao INT4": (
        "integers of torchao",
        {"_weight_qdata": (U8, (64, 32)), "_weight_scale": (BF16, (2, 64))},
    ),
    "torchao tiles": (
        "integers of torchao",
        {"_weight_qdata": (INT32, (8, 1, 32, 4)), "_weight_scale_and_zero": (BF16, (2, 64, 2))},
    ),
    "torchao E5M2": (
        "E5M2 of torchao",
        {"_weight_qdata": (E5M2, (64, 64)), "_weight_scale": (FP32, (64, 1))},
    ),
    "compressed-tensors": (
        "pack-quantized",  # Kimi-K2's
        {"weight_packed": (INT32, (64, 8)), "weight_scale": (BF16, (64, 2))},
    ),
    "compressed-tensors INT8": (
        "INT8",
        {"weight": (I8, (64, 64)), "weight_scale": (BF16, (64, 1))},
    ),
    "compressed-tensors sparse": (
        "sparse matrix",
        {"compressed": (BF16, 2048), "bitmask": (U8, (64, 8))},
    ),
    "compressed-tensors 2:4": (
        "marlin-24",
        {"weight_packed": (U8, (64, 8)), "scale_packed": (BF16, (64, 1)), "meta": (INT32, (64, 2))},
    ),
    "modelopt": ("INT4", {"weight": (U8, (32, 64)), "weight_scale": (FP32, (64, 1))}),
    "quark": ("INT8", {"weight": (I8, (64, 64)), "weight_scale": (FP32, 64)}),
    "fp8": ("E5M2 with", {"weight": (E5M2, (64, 64)), "weight_scale": (FP32, ())}),
    "fp8 of MI300": ("MI300", {"weight": (FNUZ, (64, 64)), "weight_scale": (FP32, ())}),
    "nunchaku": (
        "SVDQuant",
        {"qweight": (I8, (64, 32)), "wscales": (BF16, (1, 64)), "proj_down": (BF16, (64, 16))},
    ),
    "comfyui": (
        "integers",
        {"weight": (I8, (64, 64)), "weight_scale": (FP32, (64, 1)), "comfy_quant": (U8, 8)},
    ),
}
READ = ("compressed-tensors", "modelopt", "quark", "fp8", "torchao")


def folder(path, tensors, config):
    path.mkdir()
    made = {
        f"m.up_proj.{key}": torch.zeros(shape).to(dtype) for key, (dtype, shape) in tensors.items()
    }
    made["m.norm.weight"] = torch.ones(64)
    save_file(made, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


@pytest.mark.parametrize("says", ["nothing", "its method"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_no_layout_reads_is_named(kind, says, tmp_path) -> None:
    what, tensors = KINDS[kind]
    method, config = kind.partition(" ")[0], {"model_type": "llama"}
    match = rf"m\.up_proj\.\S+, .* holds .*{what}.*, and no layout reads that; decode the"
    if says == "its method":
        config["quantization_config"] = {"quant_method": method}
        if method not in READ:
            match = f"got '{method}'; no layout reads this checkpoint; decode it with the program"
    source = folder(tmp_path / "in", tensors, config)
    with pytest.raises(CheckpointError, match=match):
        hybridq.load_checkpoint(source)
    with pytest.raises(CheckpointError, match=match):
        hybridq.export(source, tmp_path / "out", layout="bf16")
    with pytest.raises(CheckpointError, match=match):
        hybridq.convert_checkpoint(source, tmp_path / "out", "nvfp4")
    assert not (tmp_path / "out").exists()


def test_plain_tensors_of_such_names_are_read(tmp_path) -> None:
    """Names alone are no codes: a weight in BF16 beside a scale of its own, a table of bytes."""
    tensors = {
        "weight": (BF16, (64, 64)),
        "scales": (BF16, 64),
        "compressed": (BF16, 8),
        "meta": (FP32, 4),
        "trellis": (torch.int16, 4),
    }
    source = folder(tmp_path / "in", tensors, {"model_type": "llama"})
    read = hybridq.load_checkpoint(source)
    assert {name.rpartition(".")[2] for name in read} == set(tensors)
    assert all(type(one) is torch.Tensor for one in read.values())


@pytest.mark.parametrize("dtype", [FP32, torch.float8_e8m0fnu])
def test_deepseek_v4_without_a_configuration(dtype, tmp_path) -> None:
    """Its codes came back as they are, without the scales that stand beside them."""
    codes = torch.randn(256, 128).to(E4M3)
    scale = torch.tensor([[0.5], [4.0]])
    tensors = {"layers.0.attn.wq_a.weight": codes, "layers.0.attn.wq_a.scale": scale.to(dtype)}
    save_file(tensors, tmp_path / "a.safetensors")
    read = hybridq.load_checkpoint(tmp_path / "a.safetensors")
    want = codes.double() * scale.double().repeat_interleave(128, 0)
    made = read["layers.0.attn.wq_a.weight"].rowwise.dequantize(FP32).double()
    assert list(read) == ["layers.0.attn.wq_a.weight"] and torch.equal(made, want)
