"""Quantized stacks `[E, in, out]`, exported from memory: the values that the model decodes."""

from __future__ import annotations

import pytest
import torch

import hybridq
from checkpoint_tools import Notes
from hybridq.errors import CheckpointError
from hybridq.ptq import pieces

transformers = pytest.importorskip("transformers")
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 64,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
}
EXPERTS = "model.layers.0.mlp.experts"


def _model(intermediate: int, recipe: str) -> torch.nn.Module:
    config = transformers.GptOssConfig(**SIZES, intermediate_size=intermediate)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with hybridq.quantized_model_init(recipe):
        hybridq.convert(model)
    return model


def _values(model: torch.nn.Module, name: str) -> torch.Tensor:
    """What the model decodes a stack to, `[E, out, in]`."""
    return model.get_parameter(f"{EXPERTS}.{name}").detach().dequantize().float().mT


@pytest.mark.parametrize("intermediate", [96, 64])  # other than hidden, and the same
@pytest.mark.parametrize(
    ("recipe", "format"),
    [
        ("mxfp8", "mxfp8"),  # both planes
        ("nvfp4_1d_weight", "nvfp4"),
        ("fp8_current", "fp8_tensor"),
        ("mxfp8_fwd_high_precision_bwd", "mxfp8"),
    ],
)
def test_each_expert_has_its_matrices(recipe, format, intermediate, tmp_path) -> None:
    model = _model(intermediate, recipe)
    hybridq.export(
        model, tmp_path / "out", layout="compressed-tensors", format=format, observer=Notes()
    )
    read = hybridq.load_checkpoint(tmp_path / "out")
    gate_up, down = _values(model, "gate_up_proj"), _values(model, "down_proj")
    assert tuple(gate_up.shape) == (3, 2 * intermediate, 64)
    for i in range(3):
        wanted = {"gate": gate_up[i, 0::2], "up": gate_up[i, 1::2], "down": down[i]}
        for name, value in wanted.items():
            made = read[f"{EXPERTS}.{i}.{name}_proj.weight"].rowwise.dequantize(torch.float32)
            assert made.shape == value.shape
            # A reciprocal of the second level does not say the last bit of the factor.
            exact = 2.0**-21 if format == "nvfp4" else 0.0
            assert ((made - value).abs() <= exact * value.abs()).all(), (name, i)


def test_a_stack_stays_one_where_the_layout_has_stacks(tmp_path) -> None:
    """Of MXFP8 in MXFP4: each is a rounding of what the model decodes."""
    model = _model(96, "mxfp8")
    hybridq.export(
        model, tmp_path / "out", layout="gpt-oss-mxfp4", format="mxfp4", observer=Notes()
    )
    for name in ("gate_up_proj", "down_proj"):
        wanted = _values(model, name)
        read = hybridq.load_checkpoint(tmp_path / "out")[f"{EXPERTS}.{name}"]
        for one, value in zip(read, wanted, strict=True):
            own = hybridq.quantize(value, "mxfp4").rowwise.dequantize(torch.float32)
            assert torch.equal(one.rowwise.dequantize(torch.float32), own)


def test_planes_of_the_backward_alone_are_refused(tmp_path, monkeypatch) -> None:
    model = _model(96, "mxfp8")
    monkeypatch.setattr(pieces, "COLUMNWISE", "neither")
    with pytest.raises(CheckpointError, match="must have the plane that its forward takes"):
        hybridq.export(model, tmp_path / "out", layout="compressed-tensors", format="mxfp8")
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").glob("*.safetensors"))
