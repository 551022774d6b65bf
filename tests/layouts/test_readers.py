"""Other programs decode what layouts write to what planes decode to here."""

from __future__ import annotations

import pytest
import torch

from hybridq import layouts
from layout_cases import CASES, plane_of, values

SHAPE = (256, 256)


def of(layout):
    """The cases of one layout, as parameters."""
    return pytest.mark.parametrize(
        ("scheme", "spec"), [(scheme, spec) for name, scheme, spec in CASES if name == layout]
    )


def written(name, spec, shape=SHAPE):
    """A plane, and its tensors in the layout under the names of a module's parameters."""
    layout = layouts.get(name)
    plane = plane_of(spec, values(shape))
    weight = layout.stored("up.weight", plane.spec, shape)
    assert weight.scheme.name
    own = {one.removeprefix("up."): t for one, t in weight.encode([plane]).items()}
    return plane, own, weight.scheme


@of("compressed-tensors")
def test_compressed_tensors_decompresses(scheme, spec) -> None:
    """The compressor of the format that our configuration names, with its scheme.

    It decodes FP4 in BF16, with `scale / global` in FP32 before the product: one rounding more than
    ours, so that its BF16 is ours or a neighbour. All else is one product in FP32.
    """
    base = pytest.importorskip("compressed_tensors.compressors.base")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    plane, tensors, own = written("compressed-tensors", spec)
    config = layouts.COMPRESSED_TENSORS.quantization_config({"up": own})
    read = quantization.QuantizationConfig.model_validate(config)
    [group] = read.config_groups.values()
    compressor = base.BaseCompressor.get_value_from_registry(group.format)
    made = compressor.decompress(dict(tensors), group)["weight"]
    expected = plane.dequantize(made.dtype)
    assert expected.count_nonzero() > expected.numel() // 2
    if scheme == "nvfp4":
        steps = (bf16_place(made) - bf16_place(expected)).abs()
        assert steps.max() <= 1
        assert (steps == 0).float().mean() > 0.99
    else:
        assert torch.equal(made, expected)


def bf16_place(x: torch.Tensor) -> torch.Tensor:
    """The number of a BF16 value in the order of all of them."""
    bits = x.contiguous().view(torch.int16).to(torch.int32)
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)


@pytest.mark.parametrize(
    ("scheme", "inputs"),
    [(one.name, each) for one in layouts.COMPRESSED_TENSORS.schemes for each in one.inputs],
)
def test_compressed_tensors_takes_our_configuration(scheme, inputs) -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    own = layouts.COMPRESSED_TENSORS.scheme(scheme)
    config = layouts.COMPRESSED_TENSORS.quantization_config({"up": own}, ["head"], inputs=inputs)
    read = quantization.QuantizationConfig.model_validate(config)
    [group] = read.config_groups.values()
    assert (group.input_activations is None) == (inputs == "none")
    preset = {
        ("nvfp4", "static"): "NVFP4",
        ("nvfp4", "none"): "NVFP4A16",
        ("mxfp8", "dynamic"): "MXFP8",
        ("mxfp4", "dynamic"): "MXFP4",
        ("fp8_tensor", "static"): "FP8",
        ("fp8_channel", "dynamic"): "FP8_DYNAMIC",
        ("fp8_block", "dynamic"): "FP8_BLOCK",
    }.get((scheme, inputs))
    if preset is not None:
        theirs = quantization.preset_name_to_scheme(preset, ["Linear"])
        for part in ("weights", "input_activations"):
            mine, other = getattr(group, part), getattr(theirs, part)
            for field in (
                "num_bits",
                "type",
                "strategy",
                "dynamic",
                "group_size",
                "symmetric",
                "block_structure",
                "scale_dtype",
            ):
                a, b = (getattr(one, field, None) for one in (mine, other))
                assert a == b, (part, field)


@of("fine-grained-fp8")
def test_transformers_decodes_fine_grained_fp8(scheme, spec) -> None:
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    plane, tensors, _ = written("fine-grained-fp8", spec)
    read = fp8.Fp8Dequantize(None)
    for dtype in (torch.float32, torch.bfloat16):
        made = read._dequantize_one(tensors["weight"], tensors["weight_scale_inv"], dtype)
        assert torch.equal(made, plane.dequantize(dtype))


@pytest.mark.parametrize("spec", ["mxfp4", "e2m1/1x32/e8m0/floor/mxfp4"])
def test_transformers_decodes_gpt_oss(spec) -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    planes = [plane_of(spec, values((96, 64))) for _ in range(3)]
    weight = layouts.GPT_OSS_MXFP4.stored("mlp.experts.up_proj", planes[0].spec, (3, 96, 64))
    tensors = weight.encode(planes)
    assert tensors["mlp.experts.up_proj_blocks"].shape == (3, 96, 2, 16)
    for dtype in (torch.float32, torch.bfloat16):
        made = mxfp4.convert_moe_packed_tensors(
            tensors["mlp.experts.up_proj_blocks"],
            tensors["mlp.experts.up_proj_scales"],
            dtype=dtype,
        )
        expected = torch.stack([plane.dequantize(dtype) for plane in planes])
        assert torch.equal(made, expected.transpose(1, 2))  # [E, in, out] in the model


def test_converter_of_modelopt_checkpoints_validates_ours() -> None:
    """compressed-tensors' own converter, with input and cache scales, finds nothing missing."""
    convert = pytest.importorskip("compressed_tensors.entrypoints.convert.converters")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    layout = layouts.MODELOPT
    tensors, planes = {}, {}
    for name in ("k_proj", "v_proj", "o_proj"):
        planes[name] = plane_of("nvfp4", values())
        weight = layout.stored(f"attn.{name}.weight", planes[name].spec, SHAPE)
        tensors |= weight.encode([planes[name]])
        part = weight.scheme.input
        tensors[part.file_name(f"attn.{name}")] = part.write(torch.tensor(2.5))
    for part in layout.kv["fp8"]:
        tensors[part.file_name("attn")] = part.write(torch.tensor(7.0))
    tensors["lm_head.weight"] = torch.ones(4, 4)
    cache = quantization.QuantizationArgs(num_bits=8, type="float", strategy="tensor")
    converter = convert.ModelOptNvfp4Converter(
        targets=["re:attn.*"], ignore=["lm_head"], kv_cache_scheme=cache
    )
    made = converter.validate(dict(tensors))
    for name, plane in planes.items():
        own = layouts.COMPRESSED_TENSORS.stored(f"attn.{name}.weight", plane.spec, SHAPE)
        for each, tensor in own.encode([plane]).items():
            found = made[each].reshape(tensor.shape)
            if each.endswith("global_scale"):  # 1 / (amax / 2688) there, 2688 / amax here
                assert torch.allclose(found, tensor, rtol=2.0**-23, atol=0.0)
            else:
                assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))
