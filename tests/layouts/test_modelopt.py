"""ModelOpt's own exporter writes the bytes that the layout `modelopt` has of the same weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hybridq import layouts
from layout_cases import SPECS, plane_of, same_bytes, values

pytestmark = pytest.mark.judges


@pytest.fixture(scope="module")
def export():
    pytest.importorskip("modelopt.torch.quantization", reason="nvidia-modelopt is not installed")
    return pytest.importorskip("modelopt.torch.export.quant_utils")


@pytest.fixture(scope="module")
def config():
    mtq = pytest.importorskip("modelopt.torch.quantization")
    return {"nvfp4": mtq.NVFP4_DEFAULT_CFG, "mxfp8": mtq.MXFP8_DEFAULT_CFG}


def calibrated(weight, config):
    """A linear that ModelOpt has quantized, after one input."""
    import modelopt.torch.quantization as mtq

    linear = nn.Linear(*reversed(weight.shape), bias=False, dtype=weight.dtype)
    linear.weight.data.copy_(weight)
    x = torch.linspace(-3.0, 2.5, weight.shape[1], dtype=weight.dtype)[None]
    model = mtq.quantize(nn.Sequential(linear), config, lambda model: model(x))
    return model[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scheme", ["nvfp4", "mxfp8"])
def test_same_bytes(scheme, dtype, export, config) -> None:
    """But for NVFP4's codes of values that lie, within FP32's rounding, between two codes.

    ModelOpt divides by `scale * factor`; planes multiply with the reciprocal, as Transformer Engine
    does. Each rounds three times: the quotients are at most 2^-21 of their value apart.
    """
    weight = torch.randn(128, 256) * torch.logspace(-2, 1, 128)[:, None]
    weight = weight.to(dtype)
    theirs = calibrated(weight, config[scheme])
    plane = plane_of(scheme, weight)
    stored = layouts.MODELOPT.stored("weight", plane.spec, (128, 256))
    ours = stored.encode([plane])
    scale = export.get_weight_scaling_factor(theirs)
    factor = export.get_weight_scaling_factor_2(theirs) if scheme == "nvfp4" else None
    codes = export.to_quantized_weight(
        theirs.weight.detach().clone(), scale, export.get_quantization_format(theirs), factor, 16
    )
    names = [one.name for one in stored.tensors]
    expected = dict(zip(names, (codes, scale, factor), strict=False))
    for name, tensor in ours.items():
        if scheme == "mxfp8" or name != "weight":
            assert same_bytes(expected[name].reshape(tensor.shape), tensor), name
    if scheme == "nvfp4":
        assert codes.dtype == torch.uint8 and factor is not None
        low, high = (
            torch.stack([own & 15, own >> 4], -1).flatten(1) for own in (codes, ours["weight"])
        )
        other = low != high
        assert other.float().mean() < 2.0**-8
        exact = weight.double() / (scale.double().repeat_interleave(16, 1) * factor.double())
        between = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]).double()
        away = (exact.abs()[other][:, None] - between).abs().amin(1) / exact.abs()[other]
        assert (away <= 2.0**-21).all()
    if scheme == "nvfp4":
        own = export.get_activation_scaling_factor(theirs)
        assert own.item() == layouts.MODELOPT.scheme("nvfp4").input.write(torch.tensor(3.0)).item()


def test_fp8_is_an_ulp_away(export) -> None:
    """One scale per tensor: `amax / 448` there; here the reciprocal of `448 / amax`, two roundings.

    So scales are at most two ulp apart, and codes differ where a value lies as near to the middle
    between two. Scales of inputs are the same number.
    """
    mtq = pytest.importorskip("modelopt.torch.quantization")
    weight = torch.randn(128, 256)
    theirs = calibrated(weight, mtq.FP8_DEFAULT_CFG)
    plane = plane_of("fp8_e4m3", weight)
    ours = layouts.MODELOPT.stored("weight", plane.spec, (128, 256)).encode([plane])
    scale = export.get_weight_scaling_factor(theirs).float()
    assert abs(scale.double() / ours["weight_scale"].double() - 1.0) <= 2.0**-22
    codes = export.to_quantized_weight(theirs.weight.detach(), scale, "fp8")
    other = codes.view(torch.uint8) != ours["weight"].view(torch.uint8)
    assert other.float().mean() < 2.0**-10
    own = export.get_activation_scaling_factor(theirs)
    assert own.item() == layouts.MODELOPT.scheme("fp8_tensor").input.write(torch.tensor(3.0)).item()


def test_modelopt_decodes_ours() -> None:
    """Its tensors' `dequantize`, in FP32: the same products, in another order in NVFP4."""
    tensors = pytest.importorskip("modelopt.torch.quantization.qtensor")
    for scheme, spec in (("nvfp4", "nvfp4;4o6=mse"), ("mxfp8", "mxfp8_32x32")):
        plane = plane_of(spec, values((64, 128)))
        own = layouts.MODELOPT.stored("weight", plane.spec, (64, 128)).encode([plane])
        codes, scale, *factor = own.values()
        kind = {"nvfp4": tensors.NVFP4QTensor, "mxfp8": tensors.MXFP8QTensor}[scheme]
        made = kind((64, 128), torch.float32, codes).dequantize(
            torch.float32,
            scale=scale,
            double_scale=factor[0] if factor else None,
            block_sizes={-1: 16},
        )
        expected = plane.dequantize()
        if scheme == "mxfp8":
            assert torch.equal(made, expected)
        else:  # (code * (scale * factor)): one rounding more, 2^-24 of the value
            assert torch.allclose(made, expected, rtol=2.0**-22, atol=0.0)


def test_same_configuration(export, config) -> None:
    """What its exporter says of a model, in both files, but for the words of ours."""
    convert = pytest.importorskip("modelopt.torch.export.convert_hf_config")
    import modelopt.torch.quantization as mtq

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up_proj = nn.Linear(64, 64)
            self.lm_head = nn.Linear(64, 64)

        def forward(self, x):
            return self.lm_head(self.up_proj(x))

    for scheme, inputs in (("nvfp4", "static"), ("mxfp8", "dynamic")):
        model = mtq.quantize(Model(), config[scheme], lambda model: model(torch.randn(2, 64)))
        theirs = export.get_quant_config(model)
        ours = layouts.MODELOPT.hf_quant_json(
            {"up_proj": layouts.MODELOPT.scheme(scheme)}, ["lm_head"], inputs=inputs
        )
        assert ours is not None
        assert ours["quantization"] == theirs["quantization"]
        assert ours["producer"]["name"] == theirs["producer"]["name"]
        config_json = layouts.MODELOPT.quantization_config(
            {"up_proj": layouts.MODELOPT.scheme(scheme)}, ["lm_head"], inputs=inputs
        )
        said = convert.convert_hf_quant_config_format(theirs)
        both = set(said) & set(config_json) - {"producer"}
        assert {"quant_algo", "ignore", "quant_method"} <= both
        assert {key: config_json[key] for key in both} == {key: said[key] for key in both}


@pytest.mark.parametrize("scheme", ["fp8_channel", "fp8_block"])
def test_fp8_of_rows_and_blocks(scheme, export) -> None:
    """Its shapes and, but for an ulp of scales, its numbers; what it writes is read as it means."""
    mtq = pytest.importorskip("modelopt.torch.quantization")
    weight = torch.randn(256, 384) * torch.logspace(-2, 1, 256)[:, None]
    kind, config = {
        "fp8_channel": ("fp8_pc_pt", mtq.FP8_PER_CHANNEL_PER_TOKEN_CFG),
        "fp8_block": ("fp8_pb_wo", mtq.FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG),
    }[scheme]
    theirs = calibrated(weight, config)
    assert export.get_quantization_format(theirs) == kind
    scale = export.get_weight_scaling_factor(theirs).float()
    codes = export.to_quantized_weight(theirs.weight.detach().clone(), scale, kind, None, 128)
    made = {"m.weight": codes, "m.weight_scale": scale}
    found = layouts.MODELOPT.find({key: (t.dtype, tuple(t.shape)) for key, t in made.items()})
    [read] = found["m.weight"].decode(made)
    assert found["m.weight"].scheme is layouts.MODELOPT.scheme(scheme)
    assert found["m.weight"].tensors[1].shape == tuple(scale.shape)
    each = scale[:, None] if scale.dim() == 1 else scale[:, 0, :, 0]
    if scheme == "fp8_block":
        each = each.repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert torch.equal(read.dequantize(), codes.float() * each)
    plane = plane_of(SPECS[scheme][-1], weight)
    stored = layouts.MODELOPT.stored("m.weight", plane.spec, (256, 384))
    ours = stored.encode([plane])
    assert ours["m.weight_scale"].shape == scale.shape
    ratio = ours["m.weight_scale"].double() / scale.double()
    assert (ratio - 1.0).abs().max() <= 2.0**-22
    other = codes.view(torch.uint8) != ours["m.weight"].view(torch.uint8)
    assert other.float().mean() < 2.0**-10
