"""torchao itself: what it writes is read here, and decodes to the values that it decodes to.

All of them bit for bit in FP32, but NVFP4 with a second-level scale: torchao multiplies both scales
first and rounds, here the product of code and block scale, which is exact, is rounded once.
"""

from __future__ import annotations

import json

import pytest
import torch

import hybridq
import hybridq.integrations.transformers as ours
from checkpoint_tools import Notes
from hybridq.errors import CheckpointError
from layout_cases import values

pytestmark = pytest.mark.judges

transformers = pytest.importorskip("transformers")
SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "tie_word_embeddings": False,
}
E4M3, E2M1 = torch.float8_e4m3fn, torch.float4_e2m1fn_x2


@pytest.fixture(scope="module")
def torchao():
    """Its 0.17 rounds the product of NVFP4's two scales to the model's dtype."""
    return pytest.importorskip("torchao", minversion="0.18", reason="needs torchao 0.18")


def quantized(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """The weight in every class that is read, as torchao quantizes it."""
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
    from torchao.quantization import Float8Tensor, PerRow, PerTensor
    from torchao.quantization.granularity import PerBlock, PerGroup

    rows, cols = weight.shape
    ways = {"row": PerRow(), "tensor": PerTensor()}
    ways |= {f"group{size}": PerGroup(size) for size in (32, 64, 128) if cols % size == 0}
    if rows % 128 == cols % 128 == 0:
        ways["block"] = PerBlock([128, 128])
    made = {f"fp8_{name}": Float8Tensor.from_hp(weight, granularity=g) for name, g in ways.items()}
    factor = per_tensor_amax_to_scale(weight.abs().max())
    for is_swizzled in (False, True):
        said = {"is_swizzled_scales": is_swizzled}
        for name, element in (("mxfp8", E4M3), ("mxfp4", E2M1)):
            made[f"{name}_{is_swizzled}"] = MXTensor.to_mx(weight, element, 32, **said)
        for name, scale in (("two", factor), ("power", torch.tensor(2.0**-9)), ("one", None)):
            made[f"nvfp4_{name}_{is_swizzled}"] = NVFP4Tensor.to_nvfp4(
                weight, per_tensor_scale=scale, **said
            )
    return {f"m.{name}.weight": one for name, one in made.items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(256, 256), (200, 192), (129, 64), (1, 64), (384, 320)])
def test_values_are_torchaos(shape, dtype, torchao, tmp_path) -> None:
    from safetensors.torch import save_file
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    weight = values(shape, dtype) if shape[0] > 3 else torch.randn(shape).to(dtype)
    theirs = quantized(weight)
    tensors, metadata = flatten_tensor_state_dict(theirs)
    save_file(tensors, tmp_path / "in.safetensors", metadata)
    read = hybridq.load_checkpoint(tmp_path / "in.safetensors")
    hybridq.export(
        tmp_path / "in.safetensors", tmp_path / "out.safetensors", layout="fp32", observer=Notes()
    )
    decoded = hybridq.load_checkpoint(tmp_path / "out.safetensors")
    assert set(read) == set(theirs)
    for name, tensor in theirs.items():
        want, made = tensor.dequantize(torch.float32), read[name].rowwise.dequantize(torch.float32)
        assert same(made, decoded[name]), name
        assert made.count_nonzero() > made.numel() // 2
        if "two" not in name:
            assert same(made, want), name
            continue
        assert ((made - want).abs() <= 2.0**-22 * want.abs()).all(), name
        plane, factor = read[name].rowwise, tensor.per_tensor_scale
        one = torch.full_like(plane.amax, 2688.0)
        exact = hybridq.Plane(plane.spec, *plane_place(plane), {**plane.buffers, "amax": one})
        assert same(made, (exact.dequantize(torch.float32).double() * factor).float())


def plane_place(plane):
    return plane.direction, plane.rows, plane.cols


def same(a, b) -> bool:
    """Bit for bit; torchao makes codes of NaN of a block of zeros in FP8."""
    return torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True)


def configs():
    from torchao.prototype import mx_formats
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, PerTensor

    def mx(element):
        return mx_formats.MXDynamicActivationMXWeightConfig(
            activation_dtype=element, weight_dtype=element
        )

    return {
        "fp8_channel": Float8WeightOnlyConfig(),
        "fp8_tensor": Float8WeightOnlyConfig(granularity=PerTensor()),
        "nvfp4": mx_formats.NVFP4WeightOnlyConfig(),
        "mxfp8": mx(E4M3),
        "mxfp4": mx(E2M1),
        "int8": Int8WeightOnlyConfig(),
    }


@pytest.mark.parametrize("scheme", ["fp8_channel", "fp8_tensor", "nvfp4", "mxfp8", "mxfp4", "int8"])
def test_what_transformers_writes_is_read(scheme, torchao, tmp_path) -> None:
    """In several files; the model that is loaded says what that of the decoded weights says."""
    torch.manual_seed(0)
    kind = transformers.AutoModelForCausalLM
    model = kind.from_config(transformers.LlamaConfig(**SIZES)).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "plain")
    asked = transformers.TorchAoConfig(configs()[scheme])
    theirs = kind.from_pretrained(
        tmp_path / "plain", quantization_config=asked, dtype=torch.bfloat16
    )
    theirs.save_pretrained(tmp_path / "q", max_shard_size="60KB")
    assert len(list((tmp_path / "q").glob("*.safetensors"))) > 1
    if scheme == "int8":
        with pytest.raises(CheckpointError, match="holds integers of torchao, and no layout reads"):
            hybridq.load_checkpoint(tmp_path / "q")
        return
    read = hybridq.load_checkpoint(tmp_path / "q")
    state = theirs.state_dict()
    assert set(read) == set(state)
    own = {name for name, one in read.items() if isinstance(one, hybridq.QuantizedTensor)}
    assert len(own) == 14
    for name, want in state.items():
        made = read[name].dequantize(dtype=torch.float32) if name in own else read[name]
        want = want.dequantize(torch.float32) if name in own else want
        rtol = 2.0**-22 if scheme == "nvfp4" else 0.0
        torch.testing.assert_close(made, want, rtol=rtol, atol=0.0, msg=name)
        with torch.no_grad():
            model.get_parameter(name).copy_(made)
    loaded = ours.load(tmp_path / "q")
    ids = torch.arange(12)[None]
    with torch.no_grad():
        said, wanted = loaded(ids).logits.float(), model(ids).logits.float()
    assert (said - wanted).norm() <= 2.0**-6 * wanted.norm()
    config = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "torchao"


@pytest.mark.parametrize("scheme", ["fp8_channel", "mxfp8", "mxfp4"])
def test_stacks_of_experts_are_read(scheme, torchao, tmp_path) -> None:
    """Swizzled by torchao as one matrix: it takes multiples of 128 rows alone."""
    from torchao.quantization import FqnToConfig

    torch.manual_seed(0)
    kind = transformers.AutoModelForCausalLM
    sizes = {"hidden_size": 128, "moe_intermediate_size": 128, "num_experts": 4}
    config = transformers.Qwen3MoeConfig(**{**SIZES, **sizes, "num_experts_per_tok": 2})
    kind.from_config(config).to(torch.bfloat16).save_pretrained(tmp_path / "plain")
    asked = FqnToConfig({r"re:.*experts\.(gate_up|down)_proj": configs()[scheme]})
    theirs = kind.from_pretrained(
        tmp_path / "plain",
        quantization_config=transformers.TorchAoConfig(asked),
        dtype=torch.bfloat16,
    )
    theirs.save_pretrained(tmp_path / "q")
    read = hybridq.load_checkpoint(tmp_path / "q")
    loaded = ours.load(tmp_path / "q")
    stacks = {name: one for name, one in theirs.state_dict().items() if "experts" in name}
    assert len(stacks) == 4
    for name, one in stacks.items():
        want = one.dequantize(torch.float32)
        made = torch.stack([each.rowwise.dequantize(torch.float32) for each in read[name]])
        assert same(made, want), name
        own = loaded.get_parameter(name).detach()
        assert isinstance(own, hybridq.QuantizedTensor)
        assert same(own.dequantize(dtype=torch.float32), want), name
