"""MLX's folders: words of 32 bits, stacks of experts, and mlx-lm itself."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file

import hybridq
from checkpoint_tools import Notes
from hybridq import layouts
from hybridq.errors import CheckpointError

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E2M1 = torch.cat([E2M1, -E2M1])
MODES = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}
SIZES = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}


def words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes in words, the first in the lowest bits: mlx's documentation of `quantize`."""
    per_word = 32 // bits
    each = codes.long().unflatten(-1, (-1, per_word)) << torch.arange(per_word) * bits
    return each.sum(-1).to(torch.uint32)


def made(mode: str, *shape: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Tensors of one module, and what they mean."""
    bits, group = MODES[mode]
    codes = torch.randint(0, 2**bits, shape, dtype=torch.uint8)
    if mode == "mxfp8":
        codes[codes & 0x7F == 0x7F] = 0  # no NaN
    scales = torch.randint(118, 130, (*shape[:-1], shape[-1] // group), dtype=torch.uint8)
    values = codes.view(torch.float8_e4m3fn).float() if bits == 8 else E2M1[codes.int()]
    factors = torch.exp2(scales.float() - 127)
    if mode == "nvfp4":
        scales = (torch.rand(scales.shape) * 3).to(torch.float8_e4m3fn)
        factors, scales = scales.float(), scales.view(torch.uint8)
    return {"weight": words(codes, bits), "scales": scales}, values * factors.repeat_interleave(
        group, -1
    )


def folder(path, tensors, said=None, key="quantization"):
    path.mkdir()
    save_file(tensors, path / "model.safetensors", {"format": "mlx"})
    config = {"model_type": "olmoe", "hidden_size": 64} | ({} if said is None else {key: said})
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


def said_of(mode: str) -> dict[str, object]:
    bits, group = MODES[mode]
    return {"group_size": group, "bits": bits, "mode": mode}


@pytest.mark.parametrize("key", ["quantization", "quantization_config", None])
@pytest.mark.parametrize("mode", MODES)
def test_a_linear_is_read(mode, key, tmp_path) -> None:
    own, values = made(mode, 48, 64)
    tensors = {f"model.layers.0.mlp.up_proj.{name}": one for name, one in own.items()}
    said = None if key is None else said_of(mode)
    source = folder(tmp_path / "in", {**tensors, "model.norm.weight": torch.ones(64)}, said, key)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read = hybridq.load_checkpoint(source)
    assert sorted(read) == ["model.layers.0.mlp.up_proj.weight", "model.norm.weight"]
    weight = read["model.layers.0.mlp.up_proj.weight"]
    assert torch.equal(weight.rowwise.dequantize(torch.float32), values)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hybridq.export(source, tmp_path / "out", layout="fp32")
    assert torch.equal(
        load_file(tmp_path / "out" / "model.safetensors")["model.layers.0.mlp.up_proj.weight"],
        values,
    )
    left = json.loads((tmp_path / "out" / "config.json").read_text())
    assert not {"quantization", "quantization_config"} & left.keys()


@pytest.mark.parametrize(("mode", "has_amax"), [*((one, False) for one in MODES), ("nvfp4", True)])
def test_stacks_of_experts_become_their_matrices(mode, has_amax, tmp_path) -> None:
    tensors, values = {}, {}
    for name, shape in {"gate": (3, 96, 64), "up": (3, 96, 64), "down": (3, 64, 96)}.items():
        own, values[name] = made(mode, *shape)
        if has_amax:
            own["global_scale"] = torch.rand(3) + 0.5
            factor = own["global_scale"] / torch.tensor(2688.0)
            values[name] = (values[name].double() * factor[:, None, None].double()).float()
        at = f"model.layers.0.mlp.switch_mlp.{name}_proj"
        tensors |= {f"{at}.{key}": one for key, one in own.items()}
    source = folder(tmp_path / "in", tensors, said_of(mode))
    read = hybridq.load_checkpoint(source)["model.layers.0.mlp.switch_mlp.gate_proj.weight"]
    assert len(read) == 3
    assert torch.equal(read[1].rowwise.dequantize(torch.float32), values["gate"][1])
    layout = "modelopt" if mode == "nvfp4" else "compressed-tensors"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hybridq.export(source, tmp_path / "out", layout=layout)
    out = hybridq.load_checkpoint(tmp_path / "out")
    for name, each in values.items():
        for expert, wanted in enumerate(each):
            found = out[f"model.layers.0.mlp.experts.{expert}.{name}_proj.weight"]
            assert torch.equal(found.rowwise.dequantize(torch.float32), wanted)


def test_integers_are_named(tmp_path) -> None:
    own, _ = made("mxfp4", 48, 64)
    tensors = {
        "m.up_proj.weight": own["weight"],
        "m.up_proj.scales": torch.ones(48, 1, dtype=torch.bfloat16),
        "m.up_proj.biases": torch.ones(48, 1, dtype=torch.bfloat16),
    }
    for said in (None, {"group_size": 64, "bits": 4, "mode": "affine"}):
        source = folder(tmp_path / str(said is None), tensors, said)
        with pytest.raises(CheckpointError, match="integers of MLX"):
            hybridq.load_checkpoint(source)


def test_each_module_has_its_mode(tmp_path) -> None:
    """The configuration names the mode of most, and that of the others by name."""
    names = [f"model.layers.{n}.mlp.down_proj" for n in range(3)]
    schemes = dict(zip(names, map(layouts.MLX.scheme, ("mxfp4", "mxfp8", "mxfp4")), strict=True))
    assert layouts.MLX.quantization_config(schemes, ["lm_head"]) == {
        **said_of("mxfp4"),
        names[1]: said_of("mxfp8"),
    }
    source = folder(tmp_path / "in", {f"{names[0]}.weight": torch.randn(48, 64).bfloat16()})
    notes = Notes()
    hybridq.export(source, tmp_path / "out", layout="mlx", format="mxfp8", observer=notes)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization"] == config["quantization_config"] == said_of("mxfp8")
    with pytest.raises(CheckpointError, match="nvfp4 is read, and not written"):
        hybridq.export(source, tmp_path / "no", layout="mlx", format="nvfp4")


@pytest.mark.judges
@pytest.mark.parametrize("kind", ["qwen3", "olmoe"])
@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8"])
def test_mlx_lm_computes_the_same(mode, kind, tmp_path) -> None:
    """Its logits are those of the decoded folder in transformers, up to FP32's rounding."""
    transformers = pytest.importorskip("transformers")
    mx = pytest.importorskip("mlx.core")
    utils = pytest.importorskip("mlx_lm.utils")
    import numpy as np

    torch.manual_seed(0)
    more = {"qwen3": {"head_dim": 32}, "olmoe": {"num_experts": 4, "num_experts_per_tok": 2}}
    config = transformers.AutoConfig.for_model(kind, **SIZES, **more[kind])
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hybridq.export(model, tmp_path / "mlx", layout="mlx", format=mode)
        hybridq.export(tmp_path / "mlx", tmp_path / "fp32", layout="fp32")
    tokens = torch.arange(20)[None]
    own = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "fp32").float().eval()
    wanted = own(tokens).logits.detach()
    theirs, _ = utils.load_model(tmp_path / "mlx")
    theirs.set_dtype(mx.float32)
    found = torch.from_numpy(np.array(theirs(mx.array(tokens.numpy()))))
    assert type(theirs.model.layers[0].self_attn.q_proj).__name__ == "QuantizedLinear"
    assert (found - wanted).norm() <= 1e-5 * wanted.norm()


@pytest.mark.judges
@pytest.mark.parametrize("mode", MODES)
def test_what_mlx_quantizes_is_read(mode, tmp_path) -> None:
    mx = pytest.importorskip("mlx.core")
    import numpy as np

    x = np.random.default_rng(0).standard_normal((48, 64)).astype(np.float32)
    bits, group = MODES[mode]
    own = mx.quantize(mx.array(x), group_size=group, bits=bits, mode=mode)
    mx.save_safetensors(str(tmp_path / "m.safetensors"), {"up.weight": own[0], "up.scales": own[1]})
    read = hybridq.load_checkpoint(tmp_path / "m.safetensors")["up.weight"]
    wanted = mx.dequantize(*own, group_size=group, bits=bits, mode=mode, dtype=mx.float32)
    assert torch.equal(read.rowwise.dequantize(torch.float32), torch.from_numpy(np.array(wanted)))


def test_what_is_replaced_or_renamed_is_said(tmp_path) -> None:
    source = folder(tmp_path / "in", {"pos.table": torch.randn(32, 64), "a.b": torch.randn(32, 64)})
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "quantization": "k-means"}))
    notes = Notes()
    hybridq.export(
        source, tmp_path / "out", layout="mlx", format="mxfp8", include=["*"], observer=notes
    )
    assert any("'quantization' of config.json" in one for one in notes.warnings), notes.warnings
    assert any("'pos.table' and 1 others is written" in one for one in notes.warnings) or any(
        "'a.b' and 1 others is written" in one for one in notes.warnings
    )
    assert "pos.table.weight" in load_file(tmp_path / "out" / "model.safetensors")
