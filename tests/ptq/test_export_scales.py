"""Static scales of inputs and KV caches: of a calibration, or as the source has them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import hybridq
from checkpoint_tools import write_sharded
from export_tools import run, stored
from hybridq import Calibration, layouts
from hybridq.report import checkpoint_summary

LAYER = "model.layers.0"
LINEARS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.up_proj")


@pytest.fixture
def source(tmp_path) -> Path:
    torch.manual_seed(6)
    tensors = {f"{LAYER}.{name}.weight": torch.randn(64, 128).bfloat16() for name in LINEARS}
    made = write_sharded(tmp_path / "in", [tensors])
    (made / "config.json").write_text('{"model_type": "none"}')
    return made


def calibrated(**others: float) -> Calibration:
    amaxes = {f"{LAYER}.{name}": {"input": 1.5 + i} for i, name in enumerate(LINEARS)}
    amaxes[f"{LAYER}.self_attn"] = {"k": 7.0, "v": 3.0}
    amaxes |= {name: {"input": value} for name, value in others.items()}
    return Calibration(
        {
            name: {slot: torch.tensor(one) for slot, one in own.items()}
            for name, own in amaxes.items()
        },
        {name: torch.tensor(4) for name in amaxes if "self_attn" not in name[-9:]},
        {"input": "max"},
    )


def assert_caches(found, layout, amaxes, bound=448) -> None:
    """The scales of keys and values, bit for bit, under the layout's names."""
    ends = ("k_scale", "v_scale") if layout != "modelopt" else ("k_proj.k_scale", "v_proj.v_scale")
    for end, amax in zip(ends, amaxes, strict=True):
        got = found[f"{LAYER}.self_attn.{end}"]
        assert got.dtype == torch.float32 and got.numel() == 1
        assert torch.equal(got.reshape(()), torch.tensor(amax) / bound)


def test_caches_of_the_source(source, tmp_path):
    """Kept where the layout has names for them, at any format of the weights; else it is said."""
    given = {"layout": "modelopt", "format": "nvfp4", "calibration": calibrated()}
    for kind, bound in (("fp8", 448), ("nvfp4", 6 * 448)):
        run(source, tmp_path / kind, kv_cache=kind, **given)
        assert_caches(stored(tmp_path / kind), "modelopt", (7.0, 3.0), bound)
        same = {"layout": "modelopt", "format": "mxfp8"}
        run(tmp_path / kind, tmp_path / f"{kind}-mx", **same)
        assert_caches(stored(tmp_path / f"{kind}-mx"), "modelopt", (7.0, 3.0), bound)
        both = json.loads((tmp_path / f"{kind}-mx" / "hf_quant_config.json").read_text())
        assert both["quantization"]["kv_cache_quant_algo"] == kind.upper()
        again = run(
            tmp_path / f"{kind}-mx", tmp_path / f"{kind}-own", layout="hybridq", format="mxfp8"
        )
        assert any("2 scales of inputs and KV caches" in text for text in again.warnings)
    notes = run(tmp_path / "nvfp4", tmp_path / "ct", layout="compressed-tensors")
    assert any("in nvfp4" in text and "no names for such" in text for text in notes.warnings)
    assert not any("k_scale" in name for name in stored(tmp_path / "ct"))
    run(tmp_path / "fp8", tmp_path / "asked", layout="compressed-tensors", kv_cache="fp8")
    assert_caches(stored(tmp_path / "asked"), "compressed-tensors", (7.0, 3.0))
    with pytest.raises(hybridq.CheckpointError, match="source that has them for fp8, got none"):
        run(tmp_path / "nvfp4", tmp_path / "none", layout="compressed-tensors", kv_cache="fp8")
    newer = calibrated()
    newer.amaxes[f"{LAYER}.self_attn"]["k"] = torch.tensor(9.0)
    asked = {**given, "calibration": newer, "kv_cache": "fp8"}
    run(tmp_path / "fp8", tmp_path / "newer", **asked)
    assert_caches(stored(tmp_path / "newer"), "modelopt", (9.0, 3.0))


@pytest.mark.parametrize(
    ("layout", "fmt", "name", "bound", "inverse"),
    [
        ("modelopt", "nvfp4", "input_scale", 6 * 448, False),
        ("modelopt", "fp8_tensor", "input_scale", 448, False),
        ("compressed-tensors", "nvfp4", "input_global_scale", 6 * 448, True),
        ("compressed-tensors", "fp8_tensor", "input_scale", 448, False),
        ("compressed-tensors", "fp8_channel", "input_scale", 448, False),
    ],
)
def test_inputs_of_a_calibration(layout, fmt, name, bound, inverse, source, tmp_path):
    calibrated().save(tmp_path / "c.safetensors")
    options = {"layout": layout, "format": fmt, "kv_cache": "fp8"}
    run(source, tmp_path / "q", calibration=tmp_path / "c.safetensors", **options)
    found = stored(tmp_path / "q")
    for i, linear in enumerate(LINEARS):
        amax, divisor = torch.tensor(1.5 + i), torch.tensor(float(bound))
        want = divisor / amax if inverse else amax / divisor
        got = found[f"{LAYER}.{linear}.{name}"]
        assert got.dtype == torch.float32 and torch.equal(got.reshape(()), want)
    assert_caches(found, layout, (7.0, 3.0))
    said = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    assert said["kv_cache_scheme"]["num_bits"] == 8
    groups = said["config_groups"]["group_0"]
    assert groups["input_activations"]["dynamic"] in (False, "local")
    if layout == "modelopt":
        both = json.loads((tmp_path / "q" / "hf_quant_config.json").read_text())["quantization"]
        assert both["kv_cache_quant_algo"] == "FP8"
        assert both["quant_algo"] == ("NVFP4" if fmt == "nvfp4" else "FP8")
    # Scales of a quantized source are carried over, and go when it is decoded.
    other = "compressed-tensors" if layout == "modelopt" else "modelopt"
    if fmt != "fp8_channel":
        notes = run(tmp_path / "q", tmp_path / "other", layout=other)
        assert not any("KV caches" in text for text in notes.warnings)
        again = stored(tmp_path / "other")
        assert_caches(again, other, (7.0, 3.0))
        said = json.loads((tmp_path / "other" / "config.json").read_text())
        assert said["quantization_config"]["kv_cache_scheme"]["num_bits"] == 8
        own = (
            "input_global_scale"
            if (other, fmt) == ("compressed-tensors", "nvfp4")
            else "input_scale"
        )
        got = again[f"{LAYER}.mlp.up_proj.{own}"].reshape(())
        want = bound / 4.5 if own == "input_global_scale" else 4.5 / bound
        assert float(got) == pytest.approx(want, rel=2.0**-22)
    run(tmp_path / "q", tmp_path / "plain", layout="bf16")
    assert set(stored(tmp_path / "plain")) == {f"{LAYER}.{one}.weight" for one in LINEARS}


def test_another_calibration_is_another_job(source, tmp_path):
    options = {"layout": "modelopt", "format": "nvfp4"}
    run(source, tmp_path / "q", calibration=calibrated(), **options)
    run(source, tmp_path / "q", calibration=calibrated(), **options)
    with pytest.raises(hybridq.CheckpointError, match="calibration was"):
        run(source, tmp_path / "q", calibration=calibrated(other=2.0), **options)
    with pytest.raises(hybridq.CheckpointError, match="other arguments"):
        run(source, tmp_path / "q", **options)


def test_an_amax_that_is_missing_is_named(source, tmp_path):
    own = calibrated()
    lacking = {name: one for name, one in own.amaxes.items() if "up_proj" not in name}
    lacking = Calibration(lacking, own.tokens, own.observers)
    options = {"layout": "modelopt", "format": "nvfp4"}
    with pytest.raises(hybridq.CheckpointError, match=r"layers\.0\.mlp\.up_proj has no amax"):
        run(source, tmp_path / "q", calibration=lacking, **options)
    run(
        source,
        tmp_path / "q",
        calibration=lacking,
        exclude=("*up_proj*",),
        **options,
        overwrite=True,
    )
    with pytest.raises(hybridq.CheckpointError, match="need a calibration"):
        run(source, tmp_path / "kv", kv_cache="fp8", **options)
    with pytest.raises(hybridq.SpecError, match="kv_cache of modelopt must be one of fp8"):
        run(source, tmp_path / "kv", kv_cache="fp9", calibration=own, **options)


def test_without_a_calibration_inputs_are_dynamic_or_stay(source, tmp_path):
    run(source, tmp_path / "q", layout="compressed-tensors", format="fp8_tensor")
    said = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    assert said["config_groups"]["group_0"]["input_activations"]["dynamic"] is True
    assert not any("input" in name for name in stored(tmp_path / "q"))
    run(source, tmp_path / "nv", layout="modelopt", format="nvfp4")
    said = json.loads((tmp_path / "nv" / "hf_quant_config.json").read_text())["quantization"]
    assert said["quant_algo"] == "W4A16_NVFP4"


def test_experts_by_the_names_of_their_stacks(tmp_path):
    """A mixture on disk has a matrix for each expert; its calibration has stacks."""
    hf_models = pytest.importorskip("hf_models")
    model = hf_models.make("mixtral")
    model.save_pretrained(tmp_path / "in")
    found = hybridq.calibrate(model, [{"input_ids": hf_models.IDS}])
    for source in (tmp_path / "in", model):
        out = tmp_path / ("own" if source is model else "files")
        run(source, out, layout="modelopt", format="nvfp4", calibration=found)
        scales = stored(out)
        stack = found.amax("model.layers.0.mlp.experts.gate_up_proj", "input")
        own = scales["model.layers.0.block_sparse_moe.experts.2.w3.input_scale"]
        assert torch.equal(own, stack.reshape(()) / 2688)


def test_what_of_a_calibration_is_not_written_is_said(tmp_path):
    """Attentions that it has not seen, and formats whose inputs have no static scale."""
    torch.manual_seed(6)
    layers = (LAYER, "model.layers.1")
    tensors = {f"{one}.{n}.weight": torch.randn(64, 128) for one in layers for n in LINEARS}
    source = write_sharded(tmp_path / "in", [tensors])
    (source / "config.json").write_text('{"model_type": "none"}')
    own = calibrated(**{f"{layers[1]}.{name}": 2.0 for name in LINEARS})
    given = {"calibration": own, "format": "nvfp4", "layout": "modelopt"}
    notes = run(source, tmp_path / "kv", kv_cache="fp8", **given)
    (text,) = [one for one in notes.warnings if "keys and values" in one]
    assert f"of 1 attentions ({layers[1]}.self_attn, ...)" in text
    assert not any("has no effect" in one for one in notes.warnings)
    scaled = [name for name in stored(tmp_path / "kv") if name.endswith(("k_scale", "v_scale"))]
    assert len(scaled) == 2 and all(LAYER in name for name in scaled)

    mixed = hybridq.recipes.ByName([("*.up_proj", "mxfp8")], default="nvfp4_1d_weight")
    for number, options in enumerate(
        (
            {"layout": "modelopt", "format": "mxfp8"},
            {"layout": "fine-grained-fp8", "format": "fp8_block"},
            {"layout": "compressed-tensors", "recipe": mixed},  # NVFP4 alone would have them
        )
    ):
        notes = run(source, tmp_path / str(number), calibration=own, **options)
        (text,) = [one for one in notes.warnings if "has no effect" in one]
        assert f"{options['layout']} says no static scales" in text
    with pytest.raises(hybridq.SpecError, match="fine-grained-fp8 has no names for scales of KV"):
        run(source, tmp_path / "f", kv_cache="fp8", calibration=own, **options | FINE)


FINE = {"layout": "fine-grained-fp8", "recipe": None, "format": "mxfp8"}


@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors", "quark", "auto-fp8"])
def test_a_scale_for_each_head_stands_for_the_largest(layout, source, tmp_path):
    """As compressed-tensors writes them for its strategy `attn_head`: `[heads, 1, 1]`."""
    given = {"layout": "compressed-tensors", "format": "fp8_tensor", "kv_cache": "fp8"}
    run(source, tmp_path / "one", calibration=calibrated(), **given)
    path = next((tmp_path / "one").glob("*.safetensors"))
    tensors = load_file(path)
    scales = {"k": torch.tensor([0.5, 2.0, 0.25]), "v": torch.tensor([0.125, 0.0625, 0.5])}
    for slot, value in scales.items():
        tensors[f"{LAYER}.self_attn.{slot}_scale"] = value.reshape(3, 1, 1)
    save_file(tensors, path, {"format": "pt"})
    found = checkpoint_summary(tmp_path / "one").caches
    assert sorted((one.slot, one.amax) for one in found) == [("k", 896.0), ("v", 224.0)]
    notes = run(tmp_path / "one", tmp_path / "out", layout=layout)
    assert any("2 scales of inputs and KV caches" in text for text in notes.warnings)
    kinds = layouts.get(layout).kv["fp8"]
    made = stored(tmp_path / "out")
    for part in kinds:
        value = made[part.file_name(f"{LAYER}.self_attn")]
        assert value.shape == part.shape and value.item() == scales[part.slot].max().item()
    tensors[f"{LAYER}.self_attn.k_scale"] = torch.ones(0)
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(hybridq.CheckpointError, match="must have a value"):
        checkpoint_summary(tmp_path / "one")
    with pytest.raises(hybridq.CheckpointError, match="must have a value"):
        run(tmp_path / "one", tmp_path / "none", layout=layout)
