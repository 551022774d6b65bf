"""Folders that ModelOpt itself exports (0.47), loaded with their own planes."""

from __future__ import annotations

import pytest
import torch

import hybridq.integrations.transformers  # registers the reader
from hf_models import IDS, load, logits, make, quantized

pytestmark = pytest.mark.judges

#: Values of the codes of E2M1.
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def decoded(tensors: dict[str, torch.Tensor], module: str) -> torch.Tensor:
    """The values of a weight by ModelOpt's description of its files, FP32."""
    codes, scale = tensors[f"{module}.weight"], tensors[f"{module}.weight_scale"]
    if codes.dtype == torch.uint8:
        both = torch.stack([codes & 15, codes >> 4], -1).flatten(1).long()
        values = _E2M1[both & 7] * torch.where(both > 7, -1.0, 1.0)
        factor = scale.float() * tensors[f"{module}.weight_scale_2"]
        return values * factor.repeat_interleave(16, 1)
    if scale.dim():
        return codes.float() * torch.exp2(scale.float() - 127).repeat_interleave(32, 1)
    return codes.float() * scale


@pytest.mark.parametrize("name", ["NVFP4_DEFAULT_CFG", "FP8_DEFAULT_CFG", "MXFP8_DEFAULT_CFG"])
@pytest.mark.parametrize("kind", ["llama", "wide_moe"])
@pytest.mark.filterwarnings("ignore")
def test_modelopts_own_export_is_read(kind, name, tmp_path) -> None:
    quantization = pytest.importorskip("modelopt.torch.quantization", exc_type=ImportError)
    export = pytest.importorskip("modelopt.torch.export", exc_type=ImportError)
    from safetensors.torch import load_file

    source = make(kind)
    source.config.architectures = [type(source).__name__]
    source = quantization.quantize(source, getattr(quantization, name), lambda m: m(IDS))
    export.export_hf_checkpoint(source, export_dir=tmp_path / "m")
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    names = {one.removesuffix(".weight_scale") for one in tensors if one.endswith("weight_scale")}

    model, told = load(tmp_path / "m", output_loading_info=True, dtype=torch.float32)
    assert not any(told.values())
    assert isinstance(model.hf_quantizer, hybridq.integrations.transformers.LayoutQuantizer)
    plain = load_plain(kind, tensors, names, tmp_path / "plain")
    own = quantized(model)
    for key, value in plain.named_parameters():
        mine = model.get_parameter(key).detach()
        mine = mine.dequantize() if key in own else mine
        torch.testing.assert_close(mine, value.detach(), rtol=2**-22, atol=0.0, msg=key)
    held = {key.removesuffix(".weight") for key in own if "experts" not in key}
    assert held == {one for one in names if "experts" not in one}
    if kind == "wide_moe":  # ModelOpt gives gate and up one second-level scale
        assert sum("experts" in key for key in own) == 4
    said = logits(plain)
    assert (logits(model) - said).norm() <= 1e-5 * said.norm()
    scale = tensors.get("model.layers.0.mlp.down_proj.input_scale")
    if scale is not None:
        amax = model.hf_quantizer.calibration.amax("model.layers.0.mlp.down_proj", "input")
        bound = 448.0 * (6.0 if name.startswith("NVFP4") else 1.0)
        assert float(amax) == pytest.approx(float(scale) * bound, rel=1e-6)


def load_plain(kind, tensors, names, folder):
    """The model of the decoded weights, by transformers alone."""
    from safetensors.torch import save_file

    make(kind).save_pretrained(folder)
    ends = (".weight_scale", ".weight_scale_2", ".input_scale")
    own = {key: one.float() for key, one in tensors.items() if not key.endswith(ends)}
    own |= {f"{one}.weight": decoded(tensors, one) for one in names}
    save_file(own, folder / "model.safetensors", metadata={"format": "pt"})
    return load(folder, dtype=torch.float32)
