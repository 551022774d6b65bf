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
    "consolidated": (
        ("qscale_weight", "qscale_act", torch.bfloat16),
        {"quant_method": "fp8", "activation_scheme": "static"},
        "mistral",
    ),
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


def powers(shape: tuple[int, ...]) -> torch.Tensor:
    """Scales that are powers of two, from 2^-9 to 2^-4."""
    return torch.exp2(torch.randint(-9, -3, shape).float())


@pytest.mark.parametrize("scales", ["bytes", "e8m0", "fp32"])
@pytest.mark.parametrize("block", [128, 32])
def test_deepseek_v4(block, scales, tmp_path) -> None:
    """FP8 with a scale for each square, experts of packed FP4 with one for each 32 of a row.

    Decoded in FP64 here, by the table of E2M1.
    """
    if block == 32 and scales == "fp32":
        pytest.skip("V4.1 has powers of two alone")
    folder = tmp_path / "in"
    folder.mkdir()

    def stored(scale):
        if scales == "fp32":
            return scale
        made = scale.to(torch.float8_e8m0fnu)
        return made.view(torch.uint8) if scales == "bytes" else made

    dense = (torch.randn(256, 384) * 100.0).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    dense_scale = powers((256 // block, 384 // block))
    packed = torch.randint(-128, 128, (64, 48), dtype=torch.int8)
    expert_scale = powers((64, 3))
    bf16 = torch.randn(16, 384).bfloat16()
    tensors = {
        "layers.0.attn.wq_a.weight": dense,
        "layers.0.attn.wq_a.scale": stored(dense_scale),
        "layers.0.ffn.experts.0.w1.weight": packed,
        "layers.0.ffn.experts.0.w1.scale": expert_scale.to(torch.float8_e8m0fnu),
        "layers.0.ffn.gate.weight": bf16,
    }
    save_file(tensors, folder / "model.safetensors")
    said = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [block, block]}
    config = {"model_type": "deepseek_v4", "torch_dtype": "bfloat16", "expert_dtype": "fp4"}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": said}))
    read = hybridq.load_checkpoint(folder)
    wanted = dense.double() * dense_scale.double().repeat_interleave(block, 0).repeat_interleave(
        block, 1
    )
    own = read["layers.0.attn.wq_a.weight"]
    assert own.rowwise.spec.format.block == (block, block)
    assert torch.equal(own.rowwise.dequantize(torch.float32).double(), wanted)
    e2m1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]).double()
    codes = torch.stack([packed & 15, (packed.view(torch.uint8) >> 4).view(torch.int8)], -1)
    codes = codes.flatten(-2).long()
    values = torch.where(codes >= 8, -e2m1[codes % 8], e2m1[codes % 8])
    values = values * expert_scale.double().repeat_interleave(32, 1)
    expert = read["layers.0.ffn.experts.0.w1.weight"]
    assert torch.equal(expert.rowwise.dequantize(torch.float32).double(), values)
    assert torch.equal(read["layers.0.ffn.gate.weight"], bf16)
    # Other programs' readers: DeepSeek's own names again, and those of compressed-tensors.
    hybridq.export(folder, tmp_path / "out", layout="deepseek-v4", observer=Notes())
    after = load_file(tmp_path / "out" / "model.safetensors")
    for name in ("layers.0.attn.wq_a.weight", "layers.0.ffn.experts.0.w1.weight"):
        assert torch.equal(after[name].view(torch.uint8), tensors[name].view(torch.uint8))
    assert torch.equal(after["layers.0.attn.wq_a.scale"].float(), dense_scale)
    again = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert (again["weight_block_size"], again["expert_dtype"]) == ([block, block], "fp4")


@pytest.mark.parametrize("scale_shape", [(4,), (4, 1, 1), (4, 2, 1)], ids=str)
def test_stacks_of_experts(scale_shape, tmp_path) -> None:
    """As Mistral Small 4 has them: one tensor for all experts, with scales for each of them."""
    folder = tmp_path / "in"
    folder.mkdir()
    name = "model.layers.0.mlp.experts.gate_up_proj"
    codes = (torch.randn(4, 256, 128) * 100.0).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    scale = (torch.rand(scale_shape) + 0.5) / 100.0
    down = torch.randn(4, 128, 128).bfloat16()
    save_file(
        {
            name: codes,
            f"{name}_scale_inv": scale,
            name.replace("gate_up", "down"): down,
        },
        folder / "model.safetensors",
    )
    is_blocks = len(scale_shape) == 3 and scale_shape[1] == 2
    said = {"quant_method": "fp8", "weight_block_size": [128, 128] if is_blocks else None}
    config = {"model_type": "mistral4", "torch_dtype": "bfloat16", "quantization_config": said}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    wide = scale.double().reshape(4, -1, 1)
    wanted = codes.double() * wide.repeat_interleave(256 // wide.shape[1], 1)
    read = hybridq.load_checkpoint(folder)[name]
    assert [tuple(one.shape) for one in read] == [(256, 128)] * 4
    for one, value in zip(read, wanted, strict=True):
        made = one.rowwise.dequantize(torch.float32).double()
        assert (made - value).abs().max() <= 2.0**-24 * value.abs().max()
    # Layouts without stacks get each expert's matrices, with the same codes.
    hybridq.export(folder, tmp_path / "out", layout="compressed-tensors", observer=Notes())
    after = load_file(tmp_path / "out" / "model.safetensors")
    for i in range(4):
        at = f"model.layers.0.mlp.experts.{i}"
        for half, own in enumerate(("gate_proj", "up_proj")):
            rows = slice(128 * half, 128 * half + 128)
            found = after[f"{at}.{own}.weight"]
            assert torch.equal(found.view(torch.uint8), codes[i, rows].view(torch.uint8))
            value = found.double() * after[f"{at}.{own}.weight_scale"].double().reshape(-1, 1)
            assert torch.equal(value, wanted[i, rows])


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
        with pytest.raises(CheckpointError, match=r"quark cannot tell what|no layout reads that"):
            hybridq.load_checkpoint(folder)


#: Where a configuration says it, beside or instead of its own entry.
PLACES = {
    "own": lambda said: {"quantization_config": said},
    "text": lambda said: {"text_config": {"quantization_config": said}},
    "thinker": lambda said: {"thinker_config": {"text_config": {"quantization_config": said}}},
    "language": lambda said: {"language_config": {"quantization_config": said}},
    "old": lambda said: {"compression_config": said},
    "old without a method": lambda said: {
        "compression_config": {key: one for key, one in said.items() if key != "quant_method"}
    },
    "both": lambda said: {
        "quantization_config": said,
        "language_config": {"quantization_config": {**said, "quant_method": "none of them"}},
    },
}


@pytest.mark.parametrize("method", ["compressed-tensors", "compressed_tensors"])
@pytest.mark.parametrize("place", PLACES)
def test_a_configuration_says_it_in_one_of_its_parts(place, method, tmp_path) -> None:
    """`weight_scale` alone could be of four layouts. No target says what the source was."""
    folder = tmp_path / "in"
    folder.mkdir()
    codes = (torch.randn(64, 32) * 100.0).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    scale = torch.rand(64, 1).bfloat16()
    tensors = {"a.up_proj.weight": codes, "a.up_proj.weight_scale": scale}
    save_file(tensors, folder / "model.safetensors")
    config = {"model_type": "m", **PLACES[place]({"quant_method": method, "format": "x"})}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    want = codes.double() * scale.double()
    made = hybridq.load_checkpoint(folder)["a.up_proj.weight"].rowwise.dequantize(torch.float32)
    assert (made.double() - want).abs().max() <= 2.0**-24 * want.abs().max()
    for layout in ("bf16", "quark"):
        hybridq.export(folder, tmp_path / layout, layout=layout)
        text = (tmp_path / layout / "config.json").read_text()
        said = json.loads(text).get("quantization_config")
        assert (said or {}).get("quant_method") == {"bf16": None}.get(layout, layout)
        assert "compress" not in text and "none of them" not in text
        assert text.count("quantization_config") == (0 if layout == "bf16" else 1)
    values = load_file(tmp_path / "bf16" / "model.safetensors")["a.up_proj.weight"]
    assert torch.equal(values, want.bfloat16())


@pytest.mark.parametrize("method", ["fp8", "compressed-tensors", "modelopt", "quark", "mxfp4"])
def test_a_configuration_of_weights_that_are_not_quantized_is_told(method, tmp_path) -> None:
    """As of a checkpoint that was decoded, and whose config.json was copied as it was."""
    (tmp_path / "in").mkdir()
    weight = torch.randn(64, 64).bfloat16()
    save_file({"a.up_proj.weight": weight}, tmp_path / "in" / "model.safetensors")
    config = {"model_type": "m", "quantization_config": {"quant_method": method}}
    (tmp_path / "in" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.warns(hybridq.errors.HybridQWarning, match="says that weights are quantized"):
        read = hybridq.load_checkpoint(tmp_path / "in")
    assert torch.equal(read["a.up_proj.weight"], weight)
    with pytest.warns(hybridq.errors.HybridQWarning, match="and none of its tensors is; they are"):
        hybridq.export(tmp_path / "in", tmp_path / "out", layout="quark", format="mxfp4")
    said = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert said["quant_method"] == "quark"


@pytest.mark.parametrize("kind", KINDS)
def test_scales_of_inputs_that_are_not_carried_over_are_told(kind, tmp_path) -> None:
    """Of some weights alone, or into a layout that has none."""
    written(tmp_path / "in", kind)
    notes = Notes()
    hybridq.export(tmp_path / "in", tmp_path / "v4", layout="quark", format="mxfp4", observer=notes)
    (text,) = [one for one in notes.warnings if "scales of inputs" in one]
    assert text.startswith("3 scales of inputs") and "quark says no static inputs" in text
    (_, end, _), _, own = KINDS[kind]
    tensors = load_file(tmp_path / "in" / "model.safetensors")
    del tensors[f"model.layers.0.mlp.up_proj.{end}"]
    save_file(tensors, tmp_path / "in" / "model.safetensors")
    for layout in (own, "compressed-tensors"):
        notes = Notes()
        hybridq.export(tmp_path / "in", tmp_path / layout, layout=layout, observer=notes)
        (text,) = [one for one in notes.warnings if "scales of inputs" in one]
        assert text.startswith("2 scales of inputs")
        assert "the source has none for model.layers.0.mlp.up_proj" in text
        made = load_file(tmp_path / layout / "model.safetensors")
        assert not any("input" in name or "act" in name for name in made)


def test_hybridqs_own_layout_needs_a_format(tmp_path) -> None:
    written(tmp_path / "in", "quark")
    with pytest.raises(hybridq.SpecError, match="the layout hybridq needs a format or a recipe, w"):
        hybridq.export(tmp_path / "in", tmp_path / "out", layout="hybridq")
    hybridq.export(tmp_path / "in", tmp_path / "out", layout="hybridq", format="fp8_e4m3")
    name = "model.layers.0.mlp.up_proj.weight"
    before, after = (hybridq.load_checkpoint(tmp_path / one)[name] for one in ("in", "out"))
    assert torch.equal(before.rowwise.data, after.rowwise.data)


@pytest.mark.parametrize("block", [(128, 128), None])
@pytest.mark.parametrize("rows", [512, 384, 160])
def test_halves_of_a_stack_keep_their_own_scales(rows, block, tmp_path) -> None:
    """A checkpoint whose only scales are those of stacks; gate and up may share a block of 128."""
    (tmp_path / "in").mkdir()
    codes = (torch.randn(2, rows, 256) * 100.0).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    shape = (2,) if block is None else (2, -(-rows // 128), 2)
    scale = torch.rand(shape) + 0.125
    wide = scale.reshape(2, 1, 1) if block is None else scale.repeat_interleave(128, 1)[:, :rows]
    wide = wide if block is None else wide.repeat_interleave(128, 2)
    want = codes.double() * wide.double()
    name = "layers.0.mlp.experts.gate_up_proj"
    tensors = {name: codes, f"{name}_scale_inv": scale}
    save_file(tensors, tmp_path / "in" / "model.safetensors")
    config = {"model_type": "m", "quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "in" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    hybridq.export(tmp_path / "in", tmp_path / "plain", layout="fp32")
    made = load_file(tmp_path / "plain" / "model.safetensors")[name].double()
    assert (made - want).abs().max() <= 2.0**-24 * want.abs().max()
    given = {} if block is None else {"format": "fp8_block"}
    shares = block is not None and rows // 2 % 128 != 0
    hybridq.export(tmp_path / "in", tmp_path / "out", layout="compressed-tensors", **given)
    hybridq.export(tmp_path / "out", tmp_path / "again", layout="fp32")
    made = load_file(tmp_path / "again" / "model.safetensors")
    for expert in range(2):
        for half, own in enumerate(("gate_proj", "up_proj")):
            mine = made[f"layers.0.mlp.experts.{expert}.{own}.weight"].double()
            value = want[expert, half * rows // 2 : (half + 1) * rows // 2]
            if shares:  # encoded anew, from what they decode to: one rounding to E4M3
                assert ((mine - value).abs() <= 2.0**-4 * value.abs() + 2.0**-9).all()
                continue
            assert (mine - value).abs().max() <= 2.0**-23 * want.abs().max()
