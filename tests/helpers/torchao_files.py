"""Files as torchao writes them, made by hand: names, metadata and swizzled scales."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from layout_cases import plane_of, swizzled

E8M0, E4M3 = torch.float8_e8m0fnu, torch.float8_e4m3fn
#: Format, spec string of the plane, class, and what the class says.
KINDS = {
    "fp8_tensor": ("fp8_e4m3", "Float8Tensor", {}),
    "fp8_channel": ("e4m3/1x{cols}/fp32/amax/float8_block", "Float8Tensor", {}),
    "fp8_block": ("e4m3/128x128/fp32/amax/float8_block", "Float8Tensor", {}),
    "fp8_group": ("e4m3/1x64/fp32/amax/float8_block", "Float8Tensor", {}),
    "mxfp8": ("mxfp8", "MXTensor", {"block_size": 32, "elem_dtype": "float8_e4m3fn"}),
    "mxfp4": ("mxfp4", "MXTensor", {"block_size": 32, "elem_dtype": "float4_e2m1fn_x2"}),
    "nvfp4": ("nvfp4", "NVFP4Tensor", {"block_size": 16}),
    "nvfp4_single": ("nvfp4", "NVFP4Tensor", {"block_size": 16}),
}
SWIZZLED = ("mxfp8", "mxfp4", "nvfp4", "nvfp4_single")


def torchao_weight(
    name: str, kind: str, weight: torch.Tensor, is_swizzled: bool = False
) -> tuple[dict[str, torch.Tensor], dict[str, str], torch.Tensor]:
    """The tensors of a weight, what the metadata says of it, and its values in FP64."""
    spec, kind_class, said = KINDS[kind]
    plane = plane_of(spec, weight)
    parent, _, leaf = name.rpartition(".")
    block = plane.spec.format.block or tuple(weight.shape)
    parts = {"qdata": plane.data, "scale": plane.scale}
    values = plane.dequantize(torch.float32).double()
    if kind.startswith("fp8"):
        parts = {"qdata": plane.data.view(E4M3), "scale": plane.scale}
        parts["scale"] = parts["scale"].reshape(-(-weight.shape[0] // block[0]), -1)
        said = {"block_size": list(block)}
    else:
        parts["scale"] = plane.scale.view(E4M3 if kind.startswith("nvfp4") else E8M0)
        said = {**said, "is_swizzled_scales": is_swizzled}
        if is_swizzled:
            parts["scale"] = swizzled(parts["scale"])
    if kind == "mxfp8":
        parts["qdata"] = plane.data.view(E4M3)
    if kind.startswith("nvfp4"):
        factor = plane.amax / torch.full_like(plane.amax, 2688.0)
        if kind == "nvfp4":
            parts["per_tensor_scale"] = factor.reshape(())
        else:
            values = values / factor.double()
    if "elem_dtype" in said:
        said["elem_dtype"] = {"_type": "torch.dtype", "_data": said["elem_dtype"]}
    about = {"_type": kind_class, "_data": said, "_tensor_data_names": list(parts)}
    tensors = {f"{parent}._{leaf}_{part}": one.contiguous() for part, one in parts.items()}
    return tensors, {name: json.dumps(about)}, values


def torchao_stack(
    name: str, kind: str, weight: torch.Tensor, is_swizzled: bool = False
) -> tuple[dict[str, torch.Tensor], dict[str, str], torch.Tensor]:
    """The same of a stack of matrices: its tensors are theirs, one after the other."""
    each = [torchao_weight(name, kind, one, is_swizzled) for one in weight]
    tensors = {key: torch.stack([one[0][key] for one in each]) for key in each[0][0]}
    said = json.loads(each[0][1][name])
    if isinstance(said["_data"]["block_size"], list):
        said["_data"]["block_size"].insert(0, 1)
    return tensors, {name: json.dumps(said)}, torch.stack([one[2] for one in each])


def metadata_of(classes: dict[str, str], plain: dict[str, torch.Tensor]) -> dict[str, str]:
    """The metadata of a file with these weights and plain tensors."""
    said = {**classes, **{name: json.dumps({"_type": "Tensor"}) for name in plain}}
    return {**said, "tensor_names": json.dumps(list(said)), "format": "pt"}


def write_torchao(
    folder: Path,
    weights: dict[str, tuple[str, bool, torch.Tensor]],
    config: dict[str, Any] | None = None,
    plain: dict[str, torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """A folder with these weights (kind, whether swizzled, values), and what they decode to."""
    tensors, classes, values = {}, {}, {}
    for name, (kind, is_swizzled, weight) in weights.items():
        make = torchao_weight if weight.dim() == 2 else torchao_stack
        own, said, values[name] = make(name, kind, weight, is_swizzled)
        tensors |= own
        classes |= said
    plain = {"model.norm.weight": torch.linspace(0.0, 1.0, 8)} if plain is None else plain
    folder.mkdir()
    save_file(tensors | plain, folder / "model.safetensors", metadata_of(classes, plain))
    said = {"quant_method": "torchao", "quant_type": {"default": {}}}
    made = {**(config or {"model_type": "llama"}), "quantization_config": said}
    (folder / "config.json").write_text(json.dumps(made), encoding="utf-8")
    return values
