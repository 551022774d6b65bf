"""What layouts say in configurations, and how checkpoints are recognized."""

from __future__ import annotations

import json

import pytest

from hybridq import layouts
from hybridq.errors import CheckpointError, SpecError
from hybridq.layouts import matching

LINEARS = ("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj")
NAME_OF_CT = layouts.COMPRESSED_TENSORS.name
ALL = [
    (name, one.name)
    for name in layouts.names()
    for one in layouts.get(name).schemes
    if layouts.get(name).methods  # ComfyUI's tensors say it, and MLX's words are other ones
]


@pytest.mark.parametrize(("name", "scheme"), ALL)
def test_configurations_are_json_and_are_recognized(name, scheme) -> None:
    layout = layouts.get(name)
    schemes = dict.fromkeys(LINEARS, layout.scheme(scheme))
    for inputs in ("", *layout.scheme(scheme).inputs):
        for kv in (None, *layout.kv):
            made = layout.quantization_config(schemes, ["lm_head"], inputs=inputs, kv_cache=kv)
            assert json.loads(json.dumps(made)) == made
            own = [part.file_name("a.weight") for part in layout.scheme(scheme).parts]
            assert layouts.detect({"quantization_config": made}, own) is layout
            assert "lm_head" in json.dumps(made)
            said = layout.hf_quant_json(schemes, ["lm_head"], inputs=inputs, kv_cache=kv)
            assert json.loads(json.dumps(said)) == said


def test_modelopt_files() -> None:
    """What ModelOpt 0.47 writes for the same model, but for keys that say None."""
    layout = layouts.get("modelopt")
    schemes = dict.fromkeys(LINEARS, layout.scheme("nvfp4"))
    said = layout.hf_quant_json(schemes, ["lm_head"], inputs="static", kv_cache="fp8")
    assert said == {
        "producer": {"name": "modelopt", "version": "0.47.0"},
        "quantization": {
            "quant_algo": "NVFP4",
            "group_size": 16,
            "kv_cache_quant_algo": "FP8",
            "exclude_modules": ["lm_head"],
        },
    }
    made = layout.quantization_config(schemes, ["lm_head"], inputs="static", kv_cache="fp8")
    assert made["quant_algo"] == "NVFP4" and made["quant_method"] == "modelopt"
    assert made["kv_cache_scheme"] == {"dynamic": False, "num_bits": 8, "type": "float"}
    weights = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    group = {"input_activations": weights, "weights": weights, "targets": ["Linear"]}
    assert made["config_groups"] == {"group_0": group}
    alone = layout.quantization_config(schemes)
    assert alone["quant_algo"] == "W4A16_NVFP4"
    assert "input_activations" not in alone["config_groups"]["group_0"]


def test_two_schemes_name_their_modules() -> None:
    for name in ("modelopt", "compressed-tensors"):
        layout = layouts.get(name)
        schemes = dict(zip(LINEARS, map(layout.scheme, ("nvfp4", "mxfp8")), strict=True))
        groups = layout.quantization_config(schemes)["config_groups"].values()
        assert [group["targets"] for group in groups] == [[one] for one in LINEARS]
    said = layouts.get("modelopt").hf_quant_json(
        dict(zip(LINEARS, map(layouts.get("modelopt").scheme, ("nvfp4", "mxfp8")), strict=True))
    )
    assert said is not None and said["quantization"]["quant_algo"] == "MIXED_PRECISION"
    fine = layouts.get("fine-grained-fp8")
    both = dict(zip(LINEARS, fine.schemes[:2], strict=True))
    with pytest.raises(SpecError, match="one block size for all weights"):
        fine.quantization_config(both)
    deepseek = layouts.get("deepseek-v4")
    own = map(deepseek.scheme, ("fp8_block", "mxfp8_32x32"))
    with pytest.raises(SpecError, match="one block size for all weights in FP8"):
        deepseek.quantization_config(dict(zip(LINEARS, own, strict=True)))
    own = map(deepseek.scheme, ("mxfp8_32x32", "mxfp4"))
    said = deepseek.quantization_config(dict(zip(LINEARS, own, strict=True)))
    assert (said["weight_block_size"], said["expert_dtype"]) == ([32, 32], "fp4")


def test_what_readers_do_not_know_is_refused() -> None:
    layout = layouts.get("modelopt")
    own = {LINEARS[0]: layout.scheme("fp8_tensor")}
    with pytest.raises(SpecError, match="inputs of fp8_tensor in modelopt must be one of static"):
        layout.quantization_config(own, inputs="dynamic")
    with pytest.raises(SpecError, match="kv_cache of modelopt must be one of fp8, nvfp4"):
        layout.quantization_config(own, kv_cache="int8")
    with pytest.raises(SpecError, match="needs a quantized linear"):
        layout.quantization_config({})


@pytest.mark.parametrize(
    ("name", "kept", "taken"),
    [
        ("modelopt", "model.layers.1.mlp.gate", "model.layers.1.mlp.gate_proj"),
        ("modelopt", "model.layers.1.mlp.gate", "model.layers.1.mlp.up_proj"),
        ("modelopt", "model.layers.1", "model.layers.10.mlp.up_proj"),
        ("compressed-tensors", "re:.*mlp.*", "model.layers.0.mlp.up_proj"),
        ("fine-grained-fp8", "model.layers.1", "model.layers.1.mlp.up_proj"),
        ("fine-grained-fp8", "up_proj", "model.layers.1.mlp.up_proj"),
    ],
)
def test_exclusions_that_take_more_are_refused(name, kept, taken) -> None:
    layout = layouts.get(name)
    schemes = {taken: layout.schemes[0]}
    with pytest.raises(CheckpointError, match="would leave out"):
        layout.quantization_config(schemes, [kept])


def test_matching_is_the_readers_own() -> None:
    compressed = pytest.importorskip("compressed_tensors.utils.match")
    transformers = pytest.importorskip("transformers.quantizers.quantizers_utils")
    names = [
        "head",
        "model.layers.1.mlp.gate",
        "model.layers.1.mlp.gate_proj",
        "model.layers.11.mlp.gate_proj",
        "model.layers.1.mlp.experts.0.up_proj",
    ]
    entries = [
        *names,
        "re:.*gate$",
        "re:model",
        "model.layers.1",
        "gate_proj",
        "model.*.mlp",
        "a|b",
    ]
    for entry in entries:
        for name in names:
            if "|" not in entry:
                own = matching.by_name_or_pattern(entry, name)
                assert own == compressed.match_name(name, entry), (entry, name)
            if not entry.startswith("re:"):
                kept = not transformers.should_convert_module(name, [entry])
                assert matching.by_start_or_end(entry, name) == kept, (entry, name)


def test_detection_by_names() -> None:
    found = {
        "a.weight_packed": "compressed-tensors",
        "a.weight_scale_2": "modelopt",
        "a.weight_scale_inv": "fine-grained-fp8",
        "a.qscale_weight": "mistral",
        "mlp.experts.down_proj_blocks": "gpt-oss-mxfp4",
        "a.weight.rowwise.data": "hybridq",
    }
    for tensor, name in found.items():
        layout = layouts.detect(None, ["a.weight", tensor])
        assert layout is not None and layout.name == name
    assert layouts.detect({"model_type": "llama"}, ["a.weight"]) is None
    assert layouts.detect({}, ["a.weight"], {"quantization": {}}) is layouts.MODELOPT
    blocks = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    inner = {"text_config": {"quantization_config": blocks}}
    assert layouts.detect(inner, ["a.weight"]) is layouts.FINE_GRAINED_FP8
    with pytest.raises(CheckpointError, match="no configuration says which"):
        layouts.detect({}, ["a.weight", "a.weight_scale"])
    with pytest.raises(CheckpointError, match="could mean fine-grained-fp8 or modelopt"):
        layouts.detect({}, ["a.weight_scale_2", "b.weight_scale_inv"])
    with pytest.raises(CheckpointError, match="no layout reads this checkpoint"):
        layouts.detect({"quantization_config": {"quant_method": "gptq"}}, ())
    for block in ([200, 200], 128):
        said = {"quant_method": "fp8", "weight_block_size": block}
        with pytest.raises(CheckpointError, match=r"one of \[128, 128\], \[1, 32\], None, got"):
            layouts.detect({"quantization_config": said}, ())


def test_names_of_scales_tell_whose_fp8_it_is() -> None:
    """All say `fp8`."""
    plain, null = {"quant_method": "fp8"}, {"quant_method": "fp8", "weight_block_size": None}
    for said in (plain, null, {"quant_method": "fp8", "weight_block_size": [128, 128]}):
        own = {"quantization_config": said}
        if said.get("weight_block_size") is None:
            assert layouts.detect(own, ["a.weight_scale"]) is layouts.AUTO_FP8
            assert layouts.detect(own, ["a.qscale_weight"]) is layouts.MISTRAL
        assert layouts.detect(own, ["a.scale", "b.weight_scale_inv"]) is layouts.FINE_GRAINED_FP8
        assert layouts.detect(own, ["a.scale"]) is layouts.DEEPSEEK_V4
    assert layouts.detect({"quantization_config": plain}, ()) is layouts.AUTO_FP8
    assert layouts.detect({"quantization_config": null}, ()) is layouts.FINE_GRAINED_FP8


def test_what_rotates_inputs_is_refused() -> None:
    """Quark's weights of layers with a rotation in front mean nothing without it."""
    layouts.check_inputs_are_plain(["a.weight", "a.weight_scale", "a.input_scale"])
    for name in ("a.down_proj.input_rotation", "model.shared_input_rotation_128"):
        with pytest.raises(CheckpointError, match="which rotates the input first; quantize the"):
            layouts.check_inputs_are_plain(["a.weight", name])


@pytest.mark.parametrize(
    ("location", "is_read"),
    [
        ("weight_input", True),
        ("weight_output", True),
        ("input", False),
        ("output", False),
        ("k_cache", False),
    ],
)
def test_transforms_at_run_time_are_refused(location, is_read) -> None:
    """What compressed-tensors calls online; the others are part of the weights."""
    ct = pytest.importorskip("compressed_tensors.transform")
    args = ct.TransformArgs(targets=["Linear"], location=location)
    group = ct.TransformScheme(type="hadamard", apply=[args])
    said = json.loads(ct.TransformConfig(config_groups={"R4": group}).model_dump_json())
    config = {"quantization_config": {"quant_method": NAME_OF_CT, "transform_config": said}}
    assert args.is_online() != is_read
    if is_read:
        layouts.check_inputs_are_plain((), config)
        return
    with pytest.raises(CheckpointError, match=f"got transform 'R4' .*'{location}'"):
        layouts.check_inputs_are_plain((), config)


def test_other_words_about_transforms_are_none() -> None:
    for said in (None, {}, [], {"config_groups": None}, {"config_groups": {"a": {"apply": None}}}):
        layouts.check_inputs_are_plain((), {"quantization_config": {"transform_config": said}})
    layouts.check_inputs_are_plain((), None)


def test_siblings() -> None:
    names = [
        "a.q_proj",
        "a.v_proj",
        "b.up_proj",
        "a.o_proj",
        "e.0.w3",
        "e.0.w1",
        "e.1.w1",
        "head",
    ]
    assert layouts.sibling_groups(names) == [
        ("a.q_proj", "a.v_proj"),
        ("b.up_proj",),
        ("a.o_proj",),
        ("e.0.w1", "e.0.w3"),
        ("e.1.w1",),
        ("head",),
    ]
    assert layouts.siblings("up_proj.weight") == ("gate_proj.weight", "up_proj.weight")


def test_a_new_layout_needs_a_new_name() -> None:
    from dataclasses import replace

    assert layouts.register(layouts.MODELOPT) is layouts.MODELOPT
    with pytest.raises(SpecError, match="the name 'modelopt' is taken"):
        layouts.register(replace(layouts.MODELOPT, summary="another"))


@pytest.mark.parametrize("block", [[96, 80], [64, 64], "64x64", [1, 128]])
def test_blocks_of_another_size_are_refused(block) -> None:
    """Of 192x160 they have as many scales as those of 128x128."""
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": block}
    said = {"quant_method": NAME_OF_CT, "config_groups": {"group_0": {"weights": weights}}}
    with pytest.raises(CheckpointError, match="block_structure of compressed-tensors must be one"):
        layouts.detect({"quantization_config": said}, ["a.weight", "a.weight_scale"])
    for known in ([128, 128], "128x128", None):
        weights["block_structure"] = known
        assert layouts.detect({"quantization_config": said}, []) is layouts.COMPRESSED_TENSORS
