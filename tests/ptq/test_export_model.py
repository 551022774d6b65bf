"""Models in memory, written in other programs' layouts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hybridq
from checkpoint_tools import digests
from export_tools import assert_same, run, stored


def mlp(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(1)
    names = ("gate_proj", "up_proj", "down_proj")
    return nn.ModuleDict({name: nn.Linear(128, 128) for name in names}).to(dtype)


def test_the_same_as_of_its_files(tmp_path):
    hf_models = pytest.importorskip("hf_models")
    for kind in ("mixtral", "tied", "gpt_oss"):
        model = hf_models.make(kind)
        model.save_pretrained(tmp_path / kind)
        own, of_files = tmp_path / f"{kind}-own", tmp_path / f"{kind}-files"
        options = {"layout": "compressed-tensors", "format": "mxfp8"}
        run(model, own, **options)
        run(tmp_path / kind, of_files, **options)
        assert_same(stored(own), stored(of_files))
        names = ("config.json", "generation_config.json")
        for name in names:
            assert (own / name).exists() == (of_files / name).exists()
        said = [digests(one)["config.json"] for one in (own, of_files)]
        assert said[0] == said[1], kind


def test_planes_that_are_there_stay(tmp_path):
    """Of a fake amax, so that nothing else gives these codes."""
    model = mlp()
    stat = torch.tensor([9.0])
    spec = hybridq.PlaneSpec.parse("nvfp4")
    planes = {}
    for name, module in model.items():
        x = module.weight.detach()
        buffers = torch.ops.hybridq.encode(x, spec.text, "", stat)
        named = zip((one.name for one in spec.buffers(1, 1)), buffers, strict=True)
        planes[name] = hybridq.Plane(spec, "rowwise", 128, 128, named)
        made = hybridq.QuantizedTensor.make(
            hybridq.TensorStorage(planes[name], None),
            (128, 128),
            x.dtype,
            quantizer=hybridq.quantizer("nvfp4", None),
        )
        module.weight = nn.Parameter(made)
    notes = run(model, tmp_path / "q", layout="modelopt", format="nvfp4")
    found = stored(tmp_path / "q")
    for name, plane in planes.items():
        assert torch.equal(found[f"{name}.weight"], plane.data)
        assert torch.equal(found[f"{name}.weight_scale_2"] * 2688, stat[0])
    assert not any("scales of their own" in text for text in notes.warnings)
    run(model, tmp_path / "mx", layout="modelopt", format="mxfp8")
    want = hybridq.quantize(planes["up_proj"].dequantize(), "mxfp8").rowwise
    assert torch.equal(stored(tmp_path / "mx")["up_proj.weight"].view(torch.uint8), want.data)
    run(model, tmp_path / "plain", layout="bf16")
    want = planes["down_proj"].dequantize(torch.bfloat16)
    assert torch.equal(stored(tmp_path / "plain")["down_proj.weight"], want)


def test_a_quantized_mixture(tmp_path):
    """Stacks of experts that are quantized keep their codes under each expert's names."""
    hf_models = pytest.importorskip("hf_models")
    model = hf_models.make("mixtral")
    plain = tmp_path / "plain"
    model.save_pretrained(plain)
    from hybridq.integrations.transformers import HybridQConfig

    held = hf_models.load(plain, quantization_config=HybridQConfig(format="mxfp8"))
    assert any("experts" in name for name in hf_models.quantized(held))
    run(held, tmp_path / "own", layout="compressed-tensors", format="mxfp8")
    run(plain, tmp_path / "files", layout="compressed-tensors", format="mxfp8")
    assert_same(stored(tmp_path / "own"), stored(tmp_path / "files"))


def test_a_second_export_into_the_folder_is_refused(tmp_path):
    options = {"layout": "modelopt", "format": "mxfp8"}
    run(mlp(), tmp_path / "q", **options)
    with pytest.raises(hybridq.CheckpointError, match="start anew with overwrite"):
        run(mlp(), tmp_path / "q", **options)
    run(mlp(), tmp_path / "q", **options, overwrite=True)


def test_what_has_no_values_is_refused(tmp_path):
    with torch.device("meta"):
        model = mlp()
    with pytest.raises(hybridq.CheckpointError, match="on the meta device"):
        run(model, tmp_path / "q", layout="modelopt", format="mxfp8")
    assert not (tmp_path / "q").exists()
