"""Models in memory, written in other programs' layouts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hybridq
from checkpoint_tools import INDEX, Notes, digests
from export_tools import assert_same, run, stored
from hybridq.ptq import in_memory


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


def test_the_second_name_of_a_tied_weight_is_told(tmp_path):
    """A model of transformers ties it when it is loaded; any other loader must be told."""
    model = mlp()
    model["down_proj"].weight = model["up_proj"].weight
    options = {"layout": "compressed-tensors", "format": "mxfp8"}
    said = run(model, tmp_path / "tied", **options).warnings
    assert "down_proj.weight" not in stored(tmp_path / "tied")
    told = [one for one in said if "tied weights are written once" in one]
    assert len(told) == 1
    assert "without down_proj.weight (of up_proj.weight)" in told[0]

    model["down_proj"].weight = nn.Parameter(model["up_proj"].weight.detach().clone())
    said = run(model, tmp_path / "two", **options).warnings
    found = stored(tmp_path / "two")
    assert not any("tied" in one for one in said)
    names = ("down_proj.weight", "up_proj.weight")
    first, second = (found[name].view(torch.uint8) for name in names)
    assert torch.equal(first, second)

    hf_models = pytest.importorskip("hf_models")
    said = run(hf_models.make("tied"), tmp_path / "known", **options).warnings
    assert not any("tied weights" in one for one in said)


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


def test_static_scales_come_of_the_calibration(tmp_path):
    model = mlp().eval()
    x = [torch.randn(4, 128).bfloat16()]
    found = hybridq.calibrate(model, lambda inside: [one(x[0]) for one in inside.values()])
    hybridq.quantize_model(model, "nvfp4_1d_weight", found)
    notes = run(model, tmp_path / "without", layout="modelopt", format="nvfp4")
    assert any("static scales of the inputs of 3 modules" in text for text in notes.warnings)
    assert not any("input_scale" in name for name in stored(tmp_path / "without"))
    options = {"layout": "modelopt", "format": "nvfp4", "calibration": found}
    notes = run(model, tmp_path / "with", **options)
    assert not any("static scales" in text for text in notes.warnings)
    own = stored(tmp_path / "with")["up_proj.input_scale"]
    assert torch.equal(own.reshape(()), x[0].abs().max().float() / 2688)


class Stops(Notes):
    """Is interrupted when the shard of that number is begun."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.left = at

    def shard(self, name: str, what: str) -> None:
        self.left -= what == "converting"
        if self.left < 0:
            raise KeyboardInterrupt
        super().shard(name, what)


def test_a_second_export_into_the_folder_is_the_first_or_refused(tmp_path):
    options = {"layout": "modelopt", "format": "mxfp8"}
    run(mlp(), tmp_path / "q", **options)
    before = digests(tmp_path / "q")
    assert run(mlp(), tmp_path / "q", **options).outcome.num_kept == 1
    assert digests(tmp_path / "q") == before
    other = mlp()
    with torch.no_grad():
        other["up_proj"].weight[3, 5] += 1
    with pytest.raises(hybridq.CheckpointError, match=r"the model's .* has changed .* overwrite"):
        run(other, tmp_path / "q", **options)
    run(other, tmp_path / "q", **options, overwrite=True)
    assert digests(tmp_path / "q") != before


@pytest.mark.parametrize("quantized", [False, True])
def test_a_stopped_export_goes_on(quantized, tmp_path, monkeypatch):
    """Siblings lie in different files: what was read of either counts."""
    monkeypatch.setattr(in_memory, "_SHARD_NBYTES", 40_000)
    model = mlp()
    if quantized:
        model = hybridq.quantize_model(model.eval(), "nvfp4")
    options = {"layout": "modelopt", "format": "nvfp4"}
    run(model, tmp_path / "whole", **options)
    count = len(list((tmp_path / "whole").glob("*.safetensors")))
    assert count == (1 if quantized else 3)
    for at in range(count):
        target = tmp_path / f"q{at}"
        with pytest.raises(KeyboardInterrupt):
            hybridq.export(model, target, observer=Stops(at), **options)
        assert not (target / INDEX).exists()
        assert run(model, target, **options).outcome.num_kept == at
        mine, want = digests(target), digests(tmp_path / "whole")
        assert {k: v for k, v in mine.items() if "convert/" not in k} == {
            k: v for k, v in want.items() if "convert/" not in k
        }
    # A tensor of a file that is finished, and one whose amax it shares, in a file that is not.
    for name in () if quantized else ("gate_proj", "up_proj"):
        target = tmp_path / name
        with pytest.raises(KeyboardInterrupt):
            hybridq.export(model, target, observer=Stops(1), **options)
        with torch.no_grad():
            model[name].weight.mul_(2)
        with pytest.raises(hybridq.CheckpointError, match="has changed since"):
            run(model, target, **options)
        with torch.no_grad():
            model[name].weight.div_(2)
        assert run(model, target, **options).outcome.num_kept == 1


def test_what_has_no_values_is_refused(tmp_path):
    with torch.device("meta"):
        model = mlp()
    with pytest.raises(hybridq.CheckpointError, match="on the meta device"):
        run(model, tmp_path / "q", layout="modelopt", format="mxfp8")
    assert not (tmp_path / "q").exists()


class Adapted(nn.Module):
    """As PEFT makes them: a linear layer with adapters beside it."""

    adapter_layer_names = ("lora_A", "lora_B")

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(64, 32)


def test_wrappers_are_taken_off_and_adapters_refused(tmp_path):
    """Files have the names of the model itself, and are the same."""
    model = mlp()
    run(model, tmp_path / "plain", layout="modelopt", format="mxfp8")
    run(torch.compile(model), tmp_path / "compiled", layout="modelopt", format="mxfp8")
    for file in sorted((tmp_path / "plain").iterdir()):
        if file.is_file():
            assert file.read_bytes() == (tmp_path / "compiled" / file.name).read_bytes()
    with pytest.raises(hybridq.CheckpointError, match=r"1 has adapters .* merge_and_unload\(\)"):
        run(nn.Sequential(mlp(), Adapted()), tmp_path / "q", layout="modelopt", format="mxfp8")
    assert not (tmp_path / "q").exists()


def test_a_part_made_for_one_rank_is_refused(tmp_path):
    """Its parameters are plain: a rank's part was written under the whole weight's name."""
    made = hybridq.Linear(64, 128, tp_size=2, parallel_mode="column", bias=False)
    assert made.weight.shape == (64, 64)
    model = nn.Sequential(nn.Sequential(made))
    for target in (model, torch.compile(model)):
        with pytest.raises(hybridq.CheckpointError, match=r"export: 0\.0 is made for one rank of"):
            hybridq.export(target, tmp_path / "x", layout="hybridq", format="mxfp8")
    assert not (tmp_path / "x").exists()
    whole = nn.Sequential(hybridq.Linear(64, 128, tp_size=1, parallel_mode="column", bias=False))
    assert hybridq.export(whole, tmp_path / "y", layout="hybridq", format="mxfp8")


def test_a_weight_that_a_layout_cannot_scale_is_named(tmp_path):
    """NVFP4 of compressed-tensors divides by a second-level scale: FP32 has none for this amax."""
    model = mlp(torch.float32)
    with torch.no_grad():
        model["down_proj"].weight.mul_(1e-40)
    options = {"layout": "compressed-tensors", "format": "nvfp4"}
    with pytest.raises(hybridq.CheckpointError, match=r"'down_proj.weight_global_scale': .* amax"):
        run(model, tmp_path / "q", **options)
    run(model, tmp_path / "other", **options, exclude=["down_proj.*"])
    assert torch.equal(stored(tmp_path / "other")["down_proj.weight"], model["down_proj"].weight)
