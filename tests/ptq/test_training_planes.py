"""What `convert_checkpoint` and the `hybridq` layout take over from a quantized source as it is."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

import hybridq
from checkpoint_tools import convert
from export_tools import run, small_tiles, source, stored
from hybridq.formats import PlaneSpec
from hybridq.quantizers import Quantizer

__all__ = ["small_tiles", "source"]

PAIRS = (
    ("nvfp4", "mxfp8", "original"),
    ("nvfp4", "nvfp4", "rowwise_dequantized"),
    ("mxfp8", "nvfp4;rht=d7e8", "original"),
    ("fp8_1x128", "fp8_128x128", "original"),
)


def quantizer(row: str, col: str | None, of: str = "original") -> Quantizer:
    """By the texts of specs, options included."""
    return Quantizer(PlaneSpec.parse(row), None if col is None else PlaneSpec.parse(col), of)


@pytest.mark.parametrize("size", ["whole", "tiles"])
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0]}-{pair[1]}")
@pytest.mark.thinned(1, few=2)
def test_both_planes_of_hybridqs_own_are_copied(pair, size, source, tmp_path, request):
    """Byte for byte, though the second cannot be had from what the first decodes to."""
    convert(source, tmp_path / "q", quantizer(*pair))
    if size == "tiles":
        request.getfixturevalue("small_tiles")
    notes = run(tmp_path / "q", tmp_path / "again", layout="hybridq", format=quantizer(*pair))
    before, after = stored(tmp_path / "q"), stored(tmp_path / "again")
    assert before.keys() == after.keys() and any("columnwise" in name for name in before)
    for name, value in before.items():
        assert torch.equal(value.view(torch.uint8), after[name].view(torch.uint8)), name
    assert set(notes.outcome.named("kept")) == set(notes.outcome.tensors) != set()
    first, second = (hybridq.load_checkpoint(tmp_path / one) for one in ("q", "again"))
    for name in notes.outcome.tensors:
        assert first.record(name) == second.record(name)
    assert notes.outcome.num_copied == len(before) - sum("wise." in name for name in before)


def test_another_transform_or_format_is_made_of_the_values(source, tmp_path):
    """The plane for the forward stays; the other one is what is asked for."""
    convert(source, tmp_path / "q", quantizer("mxfp8", "nvfp4"))
    name = "model.layers.1.q_proj.weight"
    before = hybridq.load_checkpoint(tmp_path / "q")[name]
    for col in ("nvfp4;rht=d7e8", "mxfp8_e5m2"):
        wanted = quantizer("mxfp8", col)
        run(tmp_path / "q", tmp_path / col[:5], layout="hybridq", format=wanted)
        made = hybridq.load_checkpoint(tmp_path / col[:5])[name]
        assert torch.equal(made.rowwise.data, before.rowwise.data)
        want = wanted(before.dequantize(dtype=torch.float32)).columnwise
        assert made.columnwise.spec == want.spec
        assert torch.equal(made.columnwise.data, want.data)


@pytest.mark.parametrize("size", ["whole", "tiles"])
@pytest.mark.parametrize("col", [None, "mxfp8", "nvfp4"])
@pytest.mark.thinned(1, few=2)
def test_mxfp4_becomes_nvfp4_without_loss(col, size, source, tmp_path, request):
    """From a reader's layout and from hybridq's own; the second plane is that of its values."""
    run(source, tmp_path / "ct", layout="compressed-tensors", format="mxfp4")
    run(tmp_path / "ct", tmp_path / "own", layout="hybridq", format="mxfp4")
    if size == "tiles":
        request.getfixturevalue("small_tiles")
    wanted = quantizer("nvfp4", col)
    for one in ("ct", "own"):
        notes = run(tmp_path / one, tmp_path / f"{one}-nv", layout="hybridq", format=wanted)
        assert not notes.warnings, notes.warnings
        assert set(notes.outcome.named("exact")) == set(notes.outcome.tensors) != set()
        before = hybridq.load_checkpoint(tmp_path / one)
        after = hybridq.load_checkpoint(tmp_path / f"{one}-nv")
        for name in notes.outcome.tensors:
            own, made = before[name], after[name]
            values = own.dequantize(dtype=torch.float32)
            assert torch.equal(made.rowwise.data, own.rowwise.data)
            assert torch.equal(made.dequantize(dtype=torch.float32), values)
            if col is not None:
                want = hybridq.quantize(values, None, columnwise=col).columnwise
                assert all(
                    torch.equal(value.view(torch.uint8), want.buffers[key].view(torch.uint8))
                    for key, value in made.columnwise.buffers.items()
                )


@pytest.mark.parametrize("col", [None, "nvfp4", "mxfp8"])
def test_what_e4m3_does_not_hold_is_named_and_encoded_anew(col, small_tiles, tmp_path):
    x = torch.ones(32, 64).bfloat16()
    x[0, :32] = 2.0**-18  # 18 powers of two below the largest block
    save_file(
        {"a.weight": x, "b.weight": torch.randn(32, 64).bfloat16()}, tmp_path / "in.safetensors"
    )
    q, nv = tmp_path / "q.safetensors", tmp_path / "nv.safetensors"
    run(tmp_path / "in.safetensors", q, layout="compressed-tensors", format="mxfp4")
    wanted = quantizer("nvfp4", col)
    notes = run(q, nv, layout="hybridq", format=wanted)
    (said,) = notes.warnings
    assert said.startswith("a.weight cannot be NVFP4 without loss, since the scales of its MXFP4")
    assert list(notes.outcome.named("exact")) == ["b.weight"]
    values = hybridq.load_checkpoint(q)["a.weight"].dequantize(dtype=torch.float32)
    made, want = hybridq.load_checkpoint(nv)["a.weight"], wanted(values)
    for plane, other in ((made.rowwise, want.rowwise), (made.columnwise, want.columnwise)):
        assert (plane is None) == (other is None)
        for key, value in () if plane is None else plane.buffers.items():
            assert torch.equal(value.view(torch.uint8), other.buffers[key].view(torch.uint8)), key
