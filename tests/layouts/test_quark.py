"""AMD's Quark: what it writes is read here, and what is written here it reads, number for number.

It runs where the package amd-quark is installed beside transformers; MXFP4 inputs need a GPU there,
so that weights are compared, and not logits.
"""

from __future__ import annotations

import json

import pytest
import torch

import hybridq
from checkpoint_tools import Notes
from hybridq import layouts

pytestmark = pytest.mark.judges

transformers = pytest.importorskip("transformers")
SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
SCHEMES = [one.name for one in layouts.QUARK.schemes]


@pytest.fixture(scope="module")
def quark():
    pytest.importorskip("quark.torch", reason="amd-quark is not installed")
    import quark
    import quark.torch.kernel

    quark.torch.kernel.mx.qdq_mxfp4 = lambda x, *_, **__: x  # inputs; a kernel for GPUs
    return quark


def model(dtype: torch.dtype = torch.bfloat16):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES)
    return transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()


def decoded(folder) -> dict[str, torch.Tensor]:
    """What Quark decodes the weights of a folder to, in FP32, by transformers' own loader."""
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return {
        f"{name}.weight": module.weight_quantizer(module.weight).float()
        for name, module in loaded.named_modules()
        if getattr(module, "weight_quantizer", None) is not None
    }


def same(theirs: dict[str, torch.Tensor], own: dict[str, hybridq.QuantizedTensor]) -> None:
    """All weights are equal; those of FP8 up to BF16's rounding, in which Quark decodes."""
    assert set(theirs) == set(own) and len(own) == 14
    for name, made in theirs.items():
        wanted = own[name].rowwise.dequantize(torch.float32)
        assert wanted.count_nonzero() > wanted.numel() // 2
        assert ((made - wanted).abs() <= 2.0**-8 * wanted.abs()).all(), name


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_quark_writes_is_read(scheme, quark, tmp_path) -> None:
    from quark.torch import ModelQuantizer, export_safetensors
    from quark.torch.quantization.config import config as said

    tensor = said.FP8E4M3PerTensorSpec(is_dynamic=False, observer_method="min_max")
    weight, inputs = {
        "mxfp4": (
            said.OCP_MXFP4Spec(ch_axis=-1, is_dynamic=False),
            said.OCP_MXFP4Spec(ch_axis=-1, is_dynamic=True),
        ),
        "fp8_tensor": (tensor, tensor),
        "fp8_channel": (
            said.FP8E4M3PerChannelSpec(is_dynamic=False, ch_axis=0),
            said.FP8E4M3PerChannelSpec(is_dynamic=True, ch_axis=1),
        ),
    }[scheme]
    both = {
        "weight": weight.to_quantization_spec(),
        "input_tensors": inputs.to_quantization_spec(),
    }
    config = said.QConfig(global_quant_config=said.QLayerConfig(**both), exclude=["lm_head"])
    quantizer = ModelQuantizer(config)
    made = quantizer.freeze(quantizer.quantize_model(model(), [torch.arange(16)[None]]))
    export_safetensors(made, tmp_path / "theirs")
    read = hybridq.load_checkpoint(tmp_path / "theirs")
    own = {name: t for name, t in read.items() if isinstance(t, hybridq.QuantizedTensor)}
    assert {t.rowwise.spec.format.element.name for t in own.values()} == {
        "e2m1" if scheme == "mxfp4" else "e4m3"
    }
    same(decoded(tmp_path / "theirs"), own)
    # What it says of the weights is what the layout says, key by key.
    written = json.loads((tmp_path / "theirs" / "config.json").read_text())["quantization_config"]
    inputs_are = "static" if scheme == "fp8_tensor" else "dynamic"
    ours = layouts.QUARK.quantization_config(
        {"a": layouts.QUARK.scheme(scheme)}, ["lm_head"], inputs=inputs_are
    )
    for tensor_is in ("weight", "input_tensors"):
        mine = ours["global_quant_config"][tensor_is]
        theirs = written["global_quant_config"][tensor_is]
        differ = {key for key in mine if mine[key] != theirs[key]} - {"scale_type"}
        assert not differ, differ
    assert set(ours) <= set(written) and ours["export"] == written["export"]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_quark_reads_what_is_written(scheme, quark, tmp_path) -> None:
    notes = Notes()
    hybridq.export(model(), tmp_path / "q", layout="quark", format=scheme, observer=notes)
    read = hybridq.load_checkpoint(tmp_path / "q")
    own = {name: t for name, t in read.items() if isinstance(t, hybridq.QuantizedTensor)}
    same(decoded(tmp_path / "q"), own)


def test_quark_reads_two_schemes_and_caches(quark, tmp_path) -> None:
    """Single names stand before patterns: the first entry that matches is taken."""
    fp8 = layouts.QUARK.scheme("fp8_channel")
    mxfp4 = layouts.QUARK.scheme("mxfp4")
    schemes = {
        f"model.layers.{i}.{part}": fp8 if "self_attn" in part else mxfp4
        for i in range(2)
        for part in (
            *(f"self_attn.{one}_proj" for one in "qkvo"),
            *(f"mlp.{one}_proj" for one in ("gate", "up", "down")),
        )
    }
    said = layouts.QUARK.quantization_config(schemes, ["lm_head"], kv_cache="fp8")
    from quark.torch.quantization.config.config import QConfig

    config = QConfig.from_dict(json.loads(json.dumps(said)))
    assert config.global_quant_config.weight.dtype.value == "fp8_e4m3"
    layers = config.layer_quant_config
    assert list(layers)[-2:] == ["*k_proj", "*v_proj"] and len(layers) == 6 + 2
    for name, one in layers.items():
        assert one.weight.dtype.value == ("fp8_e4m3" if name.startswith("*") else "fp4"), name
        assert (one.output_tensors is not None) == name.startswith("*"), name
