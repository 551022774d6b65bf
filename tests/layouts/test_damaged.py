"""Codes and scales that do not fit each other are never taken for values."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

from hybridq import layouts
from hybridq.errors import CheckpointError
from layout_cases import plane_of, values

E4M3 = torch.float8_e4m3fn
ONE = (torch.float32, (1, 1))


@pytest.mark.parametrize(
    ("name", "entries"),
    [
        ("modelopt", {"a.weight": (E4M3, (64, 64))}),
        ("modelopt", {"a.weight": (E4M3, (64, 64)), "a.weight_scale": (torch.float32, (3,))}),
        ("modelopt", {"a.weight_scale_2": (torch.float32, ())}),
        ("compressed-tensors", {"a.weight_packed": (torch.uint8, (64, 32))}),
        (
            "fine-grained-fp8",
            {"a.weight": (E4M3, (256, 128)), "a.weight_scale_inv": ONE},
        ),
        ("fine-grained-fp8", {"experts.gate_up_proj": (E4M3, (4, 64, 64))}),
        ("gpt-oss-mxfp4", {"experts.down_proj_blocks": (torch.uint8, (2, 64, 2, 16))}),
        ("gpt-oss-mxfp4", {"a.weight": (torch.float8_e5m2, (64, 64))}),
    ],
)
def test_what_cannot_be_told_raises(name, entries) -> None:
    with pytest.raises(CheckpointError, match=f"{name} cannot tell what"):
        layouts.get(name).find(entries)


def test_plain_tensors_are_no_weights() -> None:
    entries = {"a.weight": (torch.bfloat16, (64, 64)), "ids": (torch.uint8, (3,))}
    for name in layouts.names():
        assert layouts.get(name).find(entries) == {}


def test_tensors_are_what_the_header_said() -> None:
    plane = plane_of("mxfp8", values((16, 64)))
    weight = layouts.MODELOPT.stored("a.weight", plane.spec, (16, 64))
    tensors = weight.encode([plane])
    with pytest.raises(CheckpointError, match=r"must be .*\[16, 2\], got torch.uint8 \[2\]"):
        weight.decode(tensors | {"a.weight_scale": tensors["a.weight_scale"][0]})


@pytest.mark.parametrize("scale", [torch.float8_e8m0fnu, torch.uint8, torch.bfloat16])
def test_scales_in_other_dtypes_are_read(scale) -> None:
    """Powers of two, as DeepSeek-V3.1 and others write them."""
    plane = plane_of("fp8_128x128", values((256, 256)))
    layout = layouts.FINE_GRAINED_FP8
    weight = layout.stored("a.weight", plane.spec, (256, 256))
    tensors = weight.encode([plane])
    own = tensors["a.weight_scale_inv"]
    other = own.to(torch.float8_e8m0fnu if scale == torch.uint8 else scale)
    tensors["a.weight_scale_inv"] = other.view(torch.uint8) if scale == torch.uint8 else other
    found = layout.find({name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()})
    [again] = found["a.weight"].decode(tensors)
    assert torch.equal(again.dequantize(), plane.dequantize())


def test_scales_of_activations() -> None:
    amax = torch.tensor([3.7])
    for name in layouts.names():
        layout = layouts.get(name)
        schemes = [one for one in layout.schemes if one.input is not None]
        inputs = [(one.input, {"m.x": one}, "") for one in schemes]
        caches = [(one, {}, kind) for kind, own in layout.kv.items() for one in own]
        for part, known, kind in (*inputs, *caches):
            tensor = part.write(amax)
            assert tensor.dtype == torch.float32 and tuple(tensor.shape) == part.shape
            assert torch.allclose(part.read(tensor), amax, rtol=2.0**-22)
            assert layout.scalar_of(part.file_name("m.x"), known, kind) == (part, "m.x")
            for bad in (0.0, -1.0, torch.inf, torch.nan):
                with pytest.raises(CheckpointError, match="must be positive and finite"):
                    part.write(torch.tensor(bad))
    kinds = {"m.x": layouts.MODELOPT.scheme("fp8_tensor")}
    assert layouts.MODELOPT.scalar_of("m.x.input_scale", kinds, "fp8")[0].bound == 448.0
    assert layouts.MODELOPT.scalar_of("m.k_proj.k_scale", kinds, "nvfp4")[0].bound == 2688.0
    assert layouts.MODELOPT.scalar_of("m.y.input_scale", kinds, "fp8") is None
    assert layouts.MODELOPT.scalar_of("m.x.weight", kinds, "fp8") is None
    nvfp4 = layouts.COMPRESSED_TENSORS.scheme("nvfp4").input
    assert nvfp4.write(amax).item() == torch.tensor(2688.0).div(amax).item()


def test_a_checkpoint_of_one_module() -> None:
    plane = plane_of("nvfp4", values((16, 64)))
    tensors = layouts.MODELOPT.stored("weight", plane.spec, (16, 64)).encode([plane])
    assert list(tensors) == ["weight", "weight_scale", "weight_scale_2"]
    found = layouts.MODELOPT.find({name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()})
    assert torch.equal(found["weight"].decode(tensors)[0].data, plane.data)


SCALAR = (torch.float32, ())


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"a.k_proj.bias": ONE, "a.k_proj.input_scale": SCALAR, "a.k_proj.k_scale": SCALAR}, ""),
        ({"a.k_proj_norm.weight": ONE, "a.norm.k_proj": ONE, "k_proj.a.scale": ONE}, ""),
        ({"a.k_proj.svdquant_lora_a": ONE}, "what 'a.k_proj.svdquant_lora_a' is, beside"),
        ({"a.k_proj.R4_input.weight": ONE, "a.k_proj.zero": ONE}, "is and 1 tensors more, beside"),
    ],
)
def test_unknown_parts_of_a_linear_are_told(more, told, recwarn) -> None:
    """A zero point, a low-rank part, a rotation: the weight alone is not the model's."""
    own = {"a.k_proj.weight": (E4M3, (64, 64)), "a.k_proj.weight_scale": SCALAR}
    found = layouts.MODELOPT.find(own | more)
    assert list(found) == ["a.k_proj.weight"]
    said = [str(one.message) for one in recwarn]
    assert len(said) == bool(told) and all(told in one for one in said)


E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


@pytest.mark.parametrize(
    ("value", "is_read"),
    [
        *((0.0, True), (math.inf, True), (math.nan, True), (0.37, True), (2e-38, True)),
        *((4e37, False), (-0.5, False), (3e38, False)),
    ],
)
@pytest.mark.parametrize("name", ["modelopt", "compressed-tensors"])
def test_a_second_level_scale_that_no_amax_gives(name, value, is_read) -> None:
    """Read as it is, or refused: never another value, whatever a file says. Oracle: FP64."""
    layout = layouts.get(name)
    is_factor = name == "modelopt"
    codes = torch.randint(0, 256, (16, 16), dtype=torch.uint8)
    scale = torch.rand(16, 2).add(0.5).to(torch.float8_e4m3fn)
    said = torch.tensor([value]) if is_factor else 1.0 / torch.tensor([value])
    tensors = {
        "a.weight" if is_factor else "a.weight_packed": codes,
        "a.weight_scale": scale,
        "a.weight_scale_2" if is_factor else "a.weight_global_scale": said,
    }
    entries = {key: (one.dtype, tuple(one.shape)) for key, one in tensors.items()}
    stored = layout.find(entries)["a.weight"]
    if not is_read:
        with pytest.raises(CheckpointError, match="and no amax of a plane gives such"):
            stored.decode(tensors)
        return
    with warnings.catch_warnings():
        exact = not math.isfinite(value) or value == 0.0
        warnings.simplefilter("error" if exact else "ignore")
        [plane] = stored.decode(tensors)
    table = torch.tensor(E2M1 + [-one for one in E2M1], dtype=torch.float64)
    nibbles = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()
    factor = said.double() if is_factor else 1.0 / said.double()
    want = table[nibbles] * scale.double().repeat_interleave(16, 1) * factor
    made = plane.dequantize(torch.float32).double()
    assert torch.allclose(made, want, rtol=2.0**-20, atol=2.0**-140, equal_nan=True)
