"""Weights whose dtype no quantizer takes are copied, and named."""

from __future__ import annotations

import torch
from safetensors.torch import load_file, save_file

import hybridq
from checkpoint_tools import Notes, convert
from hybridq.ptq import Selection


def test_weights_of_a_dtype_that_is_not_quantized_are_said(tmp_path):
    """FP64, and FP8 whose scales no layout knows; what is no weight by its name is not."""
    torch.manual_seed(0)
    values = {name: torch.randn(64, 64) for name in "abcd"}
    tensors = {f"{name}.up_proj.weight": value for name, value in values.items()}
    tensors["b.up_proj.weight"] = values["b"].double()
    tensors["c.up_proj.weight"] = values["c"].to(torch.float8_e4m3fn)
    tensors["embed_tokens.weight"] = values["d"].double()
    tensors["ids.weight"] = torch.ones(64, 64, dtype=torch.int64)
    path = tmp_path / "in.safetensors"
    save_file(tensors, path)
    words = "and 1 more weights of F64 and F8_E4M3 stay as they are: only tensors of F32"
    for number, layout in enumerate(("", "hybridq", "compressed-tensors")):
        notes, target = Notes(), tmp_path / f"{number}.safetensors"
        if layout:
            hybridq.export(path, target, layout=layout, format="nvfp4", observer=notes)
        else:
            notes = convert(path, target, Selection(hybridq.quantizer("nvfp4", None)))
        said = [one for one in notes.warnings if "stay as they are" in one]
        assert len(said) == 1 and words in said[0] and "'b.up_proj.weight'" in said[0]
        assert load_file(target)["b.up_proj.weight"].dtype == torch.float64
    notes = convert(
        path,
        tmp_path / "3.safetensors",
        Selection(hybridq.quantizer("nvfp4", None), exclude=("[bc]*",)),
    )
    assert not any("stay as they are" in one for one in notes.warnings)
