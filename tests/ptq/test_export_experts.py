"""Experts: stacks of every kind, as they are and under names of their own; MXFP4 as NVFP4."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import hybridq
from checkpoint_tools import Notes
from export_tools import run, small_tiles, stored
from hybridq import layouts
from hybridq.layouts.second_level import written_factor, written_reciprocal
from hybridq.ptq.exact import Exponents, exact_plane

__all__ = ["small_tiles"]

E, H, INNER = 3, 64, 96
PARENT = "model.layers.0.mlp.experts"


def gates(kind: str) -> dict[str, torch.Tensor]:
    """Each expert's matrices `[out, in]`, by the name that a server has for it."""
    torch.manual_seed(2)
    made = {}
    for e in range(E):
        for name, shape in (("gate", (INNER, H)), ("up", (INNER, H)), ("down", (H, INNER))):
            made[f"{PARENT}.{e}.{name}_proj.weight"] = torch.randn(shape).bfloat16() * (e + 1)
    return made


def stacks(kind: str) -> dict[str, torch.Tensor]:
    """The same as the stacks of a model."""
    own = gates(kind)
    gate_up, down = [], []
    for e in range(E):
        gate, up, low = (own[f"{PARENT}.{e}.{one}_proj.weight"] for one in ("gate", "up", "down"))
        both = torch.cat([gate, up])
        if kind == "gpt_oss":
            both = torch.stack([gate, up], 1).flatten(0, 1)
        gate_up.append(both.t() if kind != "qwen" else both)
        down.append(low.t() if kind != "qwen" else low)
    return {
        f"{PARENT}.gate_up_proj": torch.stack(gate_up).contiguous(),
        f"{PARENT}.down_proj": torch.stack(down).contiguous(),
    }


def folder(path: Path, kind: str, tensors: dict[str, torch.Tensor]) -> Path:
    path.mkdir()
    config = {"model_type": kind, "hidden_size": H, "dtype": "bfloat16"}
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.thinned(1)
@pytest.mark.parametrize("kind", ["qwen", "gpt_oss"])
@pytest.mark.parametrize("size", ["whole", "tiles"])
def test_biases_get_the_names_of_experts(kind, size, tmp_path, request):
    """Where the matrices do; gate's and up's are halves, or alternate."""
    if size == "tiles":
        request.getfixturevalue("small_tiles")
    torch.manual_seed(3)
    gate, up, down = (torch.randn(E, n).bfloat16() for n in (INNER, INNER, H))
    both = torch.stack([gate, up], 2).flatten(1) if kind == "gpt_oss" else torch.cat([gate, up], 1)
    biases = {
        f"{PARENT}.gate_up_proj_bias": both.contiguous(),
        f"{PARENT}.down_proj_bias": down,
        f"{PARENT}.router_bias": torch.ones(E, 2),
    }
    source = folder(tmp_path / "in", kind, stacks(kind) | biases)
    run(source, tmp_path / "out", layout="modelopt", format="mxfp8")
    found = stored(tmp_path / "out")
    for e in range(E):
        for name, value in (("gate", gate), ("up", up), ("down", down)):
            own = found.pop(f"{PARENT}.{e}.{name}_proj.bias")
            assert own.dtype == torch.bfloat16 and torch.equal(own, value[e])
    assert {name for name in found if "bias" in name} == {f"{PARENT}.router_bias"}
    # One stack stays one, and so do its biases; a stack that is left out keeps them, too.
    if kind == "gpt_oss":
        run(source, tmp_path / "mx", layout="gpt-oss-mxfp4", format="mxfp4")
        assert torch.equal(stored(tmp_path / "mx")[f"{PARENT}.down_proj_bias"], down)
    some = {"layout": "modelopt", "format": "mxfp8", "exclude": ["*down_proj"]}
    run(source, tmp_path / "some", **some)
    found = stored(tmp_path / "some")
    assert torch.equal(found[f"{PARENT}.down_proj_bias"], down)
    assert torch.equal(found[f"{PARENT}.1.up_proj.bias"], up[1])


@pytest.mark.thinned(1)
@pytest.mark.parametrize("kind", ["qwen", "llama4", "gpt_oss"])
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp8"])
@pytest.mark.parametrize("size", ["whole", "tiles"])
def test_stacks_get_the_names_of_experts(kind, fmt, size, tmp_path, request):
    if size == "tiles":
        request.getfixturevalue("small_tiles")
    source = folder(tmp_path / "in", kind, stacks(kind) | {"model.norm.weight": torch.ones(H)})
    run(source, tmp_path / "out", layout="compressed-tensors", format=fmt)
    own, want = gates(kind), {}
    spec = hybridq.PlaneSpec.parse(fmt)
    for name, x in own.items():
        other = (
            name.replace("gate_proj", "up_proj") if "gate" in name else name.replace("up_", "gate_")
        )
        amax = torch.maximum(x.abs().max(), own[other].abs().max()).float().reshape(1)
        stat = amax if fmt == "nvfp4" else None
        buffers = torch.ops.hybridq.encode(x, spec.text, "", stat)
        named = zip((one.name for one in spec.buffers(1, 1)), buffers, strict=True)
        plane = hybridq.Plane(spec, "rowwise", *x.shape, named)
        want |= layouts.get("compressed-tensors").stored(name, spec, x.shape).encode([plane])
    found = stored(tmp_path / "out")
    assert found.keys() == {*want, "model.norm.weight"}
    for name, value in want.items():
        assert torch.equal(found[name].view(torch.uint8), value.view(torch.uint8)), name


def test_stacks_stay_stacks_where_the_layout_has_them(tmp_path):
    """Of `[E, in, out]` the planes run along `in`, and what they decode to is `[E, in, out]`."""
    tensors = stacks("gpt_oss")
    source = folder(tmp_path / "in", "gpt_oss", tensors)
    run(source, tmp_path / "q", layout="gpt-oss-mxfp4", format="mxfp4")
    found = stored(tmp_path / "q")
    assert found[f"{PARENT}.gate_up_proj_blocks"].shape == (E, 2 * INNER, H // 32, 16)
    assert found[f"{PARENT}.down_proj_scales"].shape == (E, H, INNER // 32)
    run(tmp_path / "q", tmp_path / "plain", layout="bf16")
    for name, value in stored(tmp_path / "plain").items():
        planes = [hybridq.quantize(one.t().contiguous(), "mxfp4").rowwise for one in tensors[name]]
        want = torch.stack([plane.dequantize(torch.bfloat16).t() for plane in planes])
        assert torch.equal(value, want), name
    checkpoint = hybridq.load_checkpoint(tmp_path / "q")
    assert [one.shape for one in checkpoint[f"{PARENT}.down_proj"]] == [(H, INNER)] * E


@pytest.mark.parametrize("size", ["whole", "tiles"])
def test_mxfp4_becomes_nvfp4_without_loss(size, tmp_path, request):
    source = folder(tmp_path / "in", "gpt_oss", stacks("gpt_oss"))
    run(source, tmp_path / "q", layout="gpt-oss-mxfp4", format="mxfp4")
    if size == "tiles":
        request.getfixturevalue("small_tiles")
    notes = run(tmp_path / "q", tmp_path / "nv", layout="modelopt", format="nvfp4")
    assert not any("loss" in text for text in notes.warnings)
    assert all(one.worst == 0.0 for one in notes.outcome.tensors.values())
    assert set(notes.outcome.named("exact")) == set(notes.outcome.tensors) != set()
    again = run(tmp_path / "q", tmp_path / "nv", layout="modelopt", format="nvfp4").outcome
    assert again.num_kept and again.named("exact") == notes.outcome.named("exact")
    assert not notes.outcome.named("kept") and '"made": "exact"' in json.dumps(again.as_dict())
    before = hybridq.load_checkpoint(tmp_path / "q")
    after = hybridq.load_checkpoint(tmp_path / "nv")
    for e in range(E):
        gate_up = before[f"{PARENT}.gate_up_proj"][e].dequantize(dtype=torch.float32)
        for number, name in enumerate(("gate_proj", "up_proj")):
            own = after[f"{PARENT}.{e}.{name}.weight"].dequantize(dtype=torch.float32)
            assert torch.equal(own, gate_up[number::2])
        own = after[f"{PARENT}.{e}.down_proj.weight"].dequantize(dtype=torch.float32)
        assert torch.equal(own, before[f"{PARENT}.down_proj"][e].dequantize(dtype=torch.float32))
    scales = stored(tmp_path / "nv")
    one, other = (scales[f"{PARENT}.0.{name}_proj.weight_scale_2"] for name in ("gate", "up"))
    assert torch.equal(one, other)


def test_what_cannot_be_exact_is_named_and_encoded_anew(tmp_path):
    x = torch.ones(32, 64).bfloat16()
    x[0, :32] = 2.0**-18  # 18 powers of two below the largest block
    tensors = {"a.weight": x, "b.weight": torch.randn(32, 64).bfloat16()}
    save_file(tensors, tmp_path / "in.safetensors")
    q, nv = tmp_path / "q.safetensors", tmp_path / "nv.safetensors"
    run(tmp_path / "in.safetensors", q, layout="compressed-tensors", format="mxfp4")
    notes = run(q, nv, layout="modelopt", format="nvfp4", source_layout="compressed-tensors")
    told = [text for text in notes.warnings if "without loss" in text]
    assert len(told) == 1 and told[0].startswith("a.weight ") and "2^-20 to 2^-2" in told[0]
    assert notes.outcome.named("encoded") == ("a.weight",)
    assert notes.outcome.named("exact") == ("b.weight",)
    own = hybridq.load_checkpoint(q, "compressed-tensors")["a.weight"]
    want = hybridq.quantize(own.dequantize(dtype=torch.float32), "nvfp4").rowwise
    found = hybridq.load_checkpoint(nv)["a.weight"].rowwise
    assert torch.equal(found.data, want.data) and torch.equal(found.scale, want.scale)


def of_scales(exponents: np.ndarray) -> hybridq.storage.Plane:
    """An MXFP4 plane whose blocks have all 16 codes twice, and scales of these exponents."""
    rows, blocks = exponents.shape
    codes = np.tile(np.arange(32, dtype=np.uint8) % 16, (rows, blocks))
    data = codes[:, ::2] | codes[:, 1::2] << 4
    made = hybridq.quantize(torch.ones(rows, 32 * blocks), "mxfp4").rowwise
    made.buffers["data"].copy_(torch.from_numpy(data))
    made.buffers["scale"].copy_(torch.from_numpy((exponents + 127).astype(np.uint8)))
    return made


def test_all_scales_that_fit_become_nvfp4_with_every_value_they_had():
    """Exhaustive: every largest exponent, all 18 below it, all codes; by ml_dtypes and FP64.

    What files hold is decoded here, `code * weight_scale * weight_scale_2`, and the reciprocal.
    """
    e2m1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = np.concatenate([e2m1, -e2m1])
    for top in range(-110, 111):
        lower = np.maximum(top - np.arange(18), -127)
        exponents = np.stack([np.full(18, top), lower], 1)
        plane, seen = of_scales(exponents), Exponents()
        seen.add(plane)
        assert seen.top == top and (seen.least, seen.largest) == (lower.min(), top)
        made = exact_plane(plane, top)
        want = values[np.arange(64) % 16] * np.exp2(exponents.astype(float)).repeat(32, 1)
        np.testing.assert_array_equal(plane.dequantize(torch.float32).double().numpy(), want)
        np.testing.assert_array_equal(made.dequantize(torch.float32).double().numpy(), want)
        assert torch.equal(made.buffers["data"], plane.buffers["data"])
        factor = written_factor(made.buffers["amax"], 448.0 * 6.0)
        assert factor.item() == 2.0 ** (top - 8)
        assert written_reciprocal(made.buffers["amax"], 448.0 * 6.0).item() == 2.0 ** (8 - top)
        scale = made.buffers["scale"].view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
        found = values[np.arange(64) % 16] * scale.astype(float).repeat(16, 1) * factor.item()
        np.testing.assert_array_equal(found, want)


def test_scales_that_do_not_fit_are_none_and_say_why():
    for least, largest, why in ((0, 18, "more than E4M3"), (-20, 15, "more than E4M3")):
        seen = Exponents()
        seen.add(of_scales(np.array([[largest, least]])))
        assert (
            seen.top is None and why in seen.reason and f"2^{least} to 2^{largest}" in seen.reason
        )
    for top in (-111, 111):
        seen = Exponents()
        seen.add(of_scales(np.array([[top]])))
        assert seen.top is None and "no FP32 second-level scale" in seen.reason
    plane, seen = of_scales(np.array([[0, 1]])), Exponents()
    plane.buffers["scale"][0, 1] = 255
    seen.add(plane)
    assert seen.top is None and "NaN" in seen.reason
    # Blocks of zeros do not count, whatever their scale is.
    plane, seen = of_scales(np.array([[0, 100]])), Exponents()
    plane.buffers["data"][:, 16:] = 0x80
    seen.add(plane)
    assert seen.top == 0
    assert torch.equal(exact_plane(plane, 0).dequantize(), plane.dequantize())
    zeros = Exponents()
    zeros.add(hybridq.quantize(torch.zeros(2, 64), "mxfp4").rowwise)
    assert zeros.top == 0


def test_separate_experts_stay_as_they_are(tmp_path):
    source = folder(tmp_path / "in", "mixtral", gates("qwen"))
    notes = run(source, tmp_path / "out", layout="fine-grained-fp8", format="mxfp8")
    assert set(notes.outcome.tensors) == set(gates("qwen"))
    assert isinstance(notes, Notes)
