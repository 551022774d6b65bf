"""Folders of small models as other programs write them, and the model of their decoded weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

import hybridq
from hf_models import saved
from hybridq import layouts
from hybridq.direction import ROWWISE
from hybridq.storage import Plane

#: What is no linear layer, or stays as it is.
_PLAIN = (
    *("embed", "shared.weight", "lm_head", "norm", "router"),
    *("mlp.gate.weight", "block_sparse_moe.gate"),
)


def is_quantized(name: str, value: torch.Tensor) -> bool:
    """Whether a tensor of a plain folder is quantized."""
    return value.dim() in (2, 3) and not any(part in name for part in _PLAIN) and "bias" not in name


def _shared(tensors: dict[str, torch.Tensor]) -> None:
    """Give gate and up one largest value, so that they have one second-level scale."""
    for name in list(tensors):
        for gate, up in (("gate_proj", "up_proj"), (".w1.", ".w3.")):
            if gate in name:
                other = name.replace(gate, up)
                top = max(tensors[name].abs().max(), tensors[other].abs().max())
                tensors[name][0, 0] = tensors[other][0, 0] = top


def _one_plane(spec: Any, x: torch.Tensor) -> Plane:
    made = hybridq.Quantizer(spec, None).quantize(x).tensor_storage.rowwise
    assert made is not None and made.direction == ROWWISE
    return made


def written(
    kind: str, folder: Path, layout: str, scheme: str, shares: bool = True, **says: Any
) -> dict[str, Plane]:
    """Write `folder` in a layout, and `folder-decoded` beside it; return the planes by name.

    Args:
        kind: of the model; of no meaning where `folder-plain` is there already.
        folder: does not exist.
        layout, scheme: of `hybridq.layouts`.
        shares: gate and up have one second-level scale.
        says: what `quantization_config` of the layout takes.
    """
    from safetensors.torch import load_file

    plain = folder.with_name(folder.name + "-plain")
    if not plain.exists():
        saved(kind, plain)
    own = layouts.get(layout)
    of = own.scheme(scheme)
    tensors = load_file(plain / "model.safetensors")
    if shares:
        _shared(tensors)
    planes: dict[str, Plane] = {}
    schemes, kept = {}, []
    made, decoded = dict(tensors), {name: one.float() for name, one in tensors.items()}
    for name, value in tensors.items():
        holds = own.holds_stacks if value.dim() == 3 else own.holds_matrices
        if not (is_quantized(name, value) and holds):
            if value.dim() == 2 and "embed" not in name:
                kept.append(name.removesuffix(".weight"))
            continue
        # GPT-OSS has [E, in, out] in memory and in plain files, and [E, out, in] in this layout.
        x = value.mT if value.dim() == 3 else value
        each = [
            _one_plane(of.stored_spec(x.shape[-1]), one) for one in (x if x.dim() == 3 else [x])
        ]
        stored = own.stored(name, each[0].spec, tuple(x.shape))
        del made[name]
        made |= {key: one.contiguous() for key, one in stored.encode(each).items()}
        back = torch.stack([one.dequantize() for one in each])
        decoded[name] = back.mT.contiguous() if x.dim() == 3 else back[0]
        planes |= {f"{name}#{n}" if x.dim() == 3 else name: one for n, one in enumerate(each)}
        module = name.removesuffix(".weight")
        schemes[module] = of
        if of.input is not None and says.get("inputs") == "static":
            made[of.input.file_name(module)] = of.input.write(torch.tensor(3.5))
        if says.get("kv_cache") and name.endswith(("k_proj.weight", "v_proj.weight")):
            slot = name.rpartition("_proj")[0][-1]
            attention = module.rpartition(".")[0]
            for part in own.kv[says["kv_cache"]]:
                if part.slot == slot:
                    made[part.file_name(attention)] = part.write(torch.tensor(7.0))
    _folder(plain, folder, made, own.quantization_config(schemes, kept, **says))
    beside = own.hf_quant_json(schemes, kept, **says)
    if beside is not None:
        (folder / "hf_quant_config.json").write_text(json.dumps(beside))
    _folder(plain, folder.with_name(folder.name + "-decoded"), decoded, None)
    return planes


def _folder(plain: Path, folder: Path, tensors: dict[str, torch.Tensor], config: Any) -> None:
    from safetensors.torch import save_file

    folder.mkdir()
    says = json.loads((plain / "config.json").read_text())
    if config is not None:
        says["quantization_config"] = config
    (folder / "config.json").write_text(json.dumps(says))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
