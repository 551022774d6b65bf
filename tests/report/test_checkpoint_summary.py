"""checkpoint_summary: every layout, against NumPy and the files themselves."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import hybridq
from hybridq import Calibration, CheckpointError, quantizer
from hybridq.report import checkpoint_summary
from hybridq.report.checkpoint_summary import starred

#: What exports say of the versions that read them.
pytestmark = pytest.mark.filterwarnings("ignore::hybridq.HybridQWarning")
NAMES = [f"model.layers.{n}.mlp.{part}_proj.weight" for n in (0, 1) for part in ("up", "down")]


@pytest.fixture
def plain(tmp_path):
    """A checkpoint in BF16, and its tensors."""
    torch.manual_seed(0)
    tensors = {name: torch.randn(128, 128).to(torch.bfloat16) for name in NAMES}
    tensors |= {
        "model.norm.weight": torch.ones(128),
        "model.embed_tokens.weight": torch.ones(9, 128),
    }
    folder = tmp_path / "plain"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    config = {"model_type": "llama", "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, tensors


def file_bytes(folder) -> int:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118


LAYOUTS = [
    ("hybridq", "mxfp8", "mxfp8"),
    ("compressed-tensors", "nvfp4", "nvfp4"),
    ("compressed-tensors", "mxfp8", "mxfp8"),
    ("modelopt", "nvfp4", "nvfp4"),
    ("fine-grained-fp8", "fp8_128x128", "e4m3/128x128/fp32/amax/float8_block"),
]


@pytest.mark.parametrize(("layout", "fmt", "text"), LAYOUTS)
def test_formats_bytes_amaxes_and_errors(plain, tmp_path, layout, fmt, text) -> None:
    folder, tensors = plain
    hybridq.export(folder, tmp_path / "out", layout=layout, format=fmt)
    found = checkpoint_summary(tmp_path / "out", source=folder)
    assert found.layout == layout and not found.missing
    assert [one.name for one in found.weights] == sorted(NAMES)
    assert found.nbytes == file_bytes(tmp_path / "out")
    checkpoint = hybridq.load_checkpoint(tmp_path / "out")
    for one in found.weights:
        assert one.text == text and one.shape == (128, 128) and one.elements == 128 * 128
        values = checkpoint[one.name].dequantize().double().numpy()
        want = tensors[one.name].double().numpy()
        assert one.amax == np.abs(values).max()
        assert one.error == pytest.approx(np.linalg.norm(values - want) / np.linalg.norm(want))
        assert 0 < one.error < 0.2
    kept = {dtype: count for dtype, count, *_ in found.plain}
    assert kept["F32"] == 2
    quick = checkpoint_summary(tmp_path / "out", reads_values=False)
    assert quick.nbytes == found.nbytes and quick.weights[0].amax is None


def test_a_plain_checkpoint_and_both_planes(plain, tmp_path) -> None:
    folder, tensors = plain
    found = checkpoint_summary(folder)
    assert found.layout is None and not found.weights and "nothing is quantized" in str(found)
    assert found.nbytes == sum(one.nbytes for one in tensors.values())
    hybridq.convert_checkpoint(folder, tmp_path / "out", quantizer("mxfp8", "nvfp4"))
    both = checkpoint_summary(tmp_path / "out", reads_values=False)
    assert both.weights[0].text == "rowwise mxfp8, columnwise nvfp4"
    assert both.nbytes == file_bytes(tmp_path / "out")


def test_what_the_source_has_not_is_said(plain, tmp_path) -> None:
    folder, tensors = plain
    hybridq.convert_checkpoint(folder, tmp_path / "out", quantizer("mxfp8"))
    other = tmp_path / "other"
    other.mkdir()
    changed = {name: one for name, one in tensors.items() if name != NAMES[0]}
    changed[NAMES[1]] = torch.ones(3, 3)
    changed[NAMES[2]] = changed[NAMES[2]].clone()
    changed[NAMES[2]][0, 0] = torch.nan
    save_file(changed, other / "model.safetensors")
    found = checkpoint_summary(tmp_path / "out", source=other)
    assert sorted(found.missing) == sorted(NAMES[:3])
    assert "the source has no" in str(found)
    json.loads(found.to_json())
    with pytest.raises(ValueError, match="errors need values"):
        checkpoint_summary(folder, source=other, reads_values=False)
    with pytest.raises(CheckpointError, match="there is no"):
        checkpoint_summary(tmp_path / "gone")


def calibration() -> Calibration:
    """Of the layers of `plain`, with caches."""
    one = lambda value: torch.tensor(value)  # noqa: E731
    amaxes = {name.removesuffix(".weight"): {"input": one(3.5)} for name in NAMES}
    for n in (0, 1):
        amaxes[f"model.layers.{n}.self_attn"] = {"k": one(2.0), "v": one(4.0)}
    return Calibration(amaxes, {name: one(7) for name in amaxes}, {"input": "max"})


@pytest.mark.parametrize("format_", ["nvfp4", "fp8"])
@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
def test_scales_of_inputs_are_read_as_amaxes(plain, tmp_path, layout, format_) -> None:
    folder, _ = plain
    hybridq.export(
        folder, tmp_path / "out", layout=layout, format=format_, calibration=calibration()
    )
    found = checkpoint_summary(tmp_path / "out", reads_values=False)
    assert {one.input_amax for one in found.weights} == {3.5}
    assert not any(one.tokens for one in found.weights), "these are no experts"
    rows = found.tables()[1].rows
    assert [row[0] for row in rows] == [starred(name) for name in sorted(NAMES[:2])]
    assert all(row[3] == "2" and row[6] == "3.5" for row in rows)


def test_scales_of_caches_are_read_as_amaxes(plain, tmp_path) -> None:
    folder, tensors = plain
    name = "model.layers.0.self_attn.k_proj.weight"
    more = {name: torch.randn(128, 128), name.replace("k_proj", "v_proj"): torch.randn(128, 128)}
    save_file(tensors | more, folder / "model.safetensors")
    options = {"format": "nvfp4", "kv_cache": "fp8", "calibration": with_inputs(more)}
    hybridq.export(folder, tmp_path / "out", layout="modelopt", **options)
    found = checkpoint_summary(tmp_path / "out", reads_values=False)
    assert {(one.slot, one.amax) for one in found.caches} == {("k", 2.0), ("v", 4.0)}
    assert any(table.title == "KV caches" for table in found.tables())


def with_inputs(weights) -> Calibration:
    """The calibration with the inputs of more weights."""
    own = calibration()
    more = {name.removesuffix(".weight"): {"input": torch.tensor(1.0)} for name in weights}
    return Calibration({**own.amaxes, **more}, own.tokens, own.observers)


def test_tokens_of_experts(tmp_path) -> None:
    torch.manual_seed(0)
    names = [f"l.0.experts.{e}.{part}.weight" for e in range(3) for part in "ab"]
    each = {name: torch.randn(32, 64) for name in names}
    save_file(each | {"l.1.experts.up": torch.randn(3, 32, 64)}, tmp_path / "in.safetensors")
    include = hybridq.ptq.Selection(quantizer("mxfp8"), include=("*",))
    hybridq.convert_checkpoint(tmp_path / "in.safetensors", tmp_path / "out.safetensors", include)
    counts = {
        "l.0.experts.gate_up_proj": torch.tensor([4, 0, 9]),
        "l.1.experts.up": torch.tensor([0, 0, 5]),
        "l.0.experts.2.b": torch.tensor(6),
    }
    seen = Calibration({}, counts, {})
    found = checkpoint_summary(tmp_path / "out.safetensors", calibration=seen)
    tokens = {one.name: one.tokens for one in found.weights}
    assert tokens["l.0.experts.0.a.weight"] == (4,) and tokens["l.0.experts.1.b.weight"] == (0,)
    assert tokens["l.0.experts.2.a.weight"] == (9,) and tokens["l.0.experts.2.b.weight"] == (6,)
    assert tokens["l.1.experts.up"] == (0, 0, 5)
    # A model may have another name for the experts of a layer than its files.
    counts = {"l.0.mlp.experts.gate_up_proj": torch.tensor([1, 2, 3])}
    counts["l.00.experts.up"] = torch.ones(3, dtype=torch.int64)
    own = torch.tensor([1.0, 2.0, -torch.inf])
    amaxes = {name: {"input": torch.tensor(9.0), "expert_input": own} for name in counts}
    other = Calibration(amaxes, counts, {})
    moved = checkpoint_summary(
        tmp_path / "out.safetensors", calibration=other, reads_values=False
    ).weights[:6]
    assert [one.tokens for one in moved] == [(e,) for e in (1, 1, 2, 2, 3, 3)]
    assert [one.input_amax for one in moved] == [1, 1, 2, 2, 9, 9]
    rows = {row[0]: row[1:] for row in found.tables()[-1].rows}
    assert rows["l.0.experts.*.a.weight"] == ("3", "0", "9", "1")
    assert rows["l.1.experts.up"] == ("3", "0", "5", "2")


def test_the_command(plain, tmp_path) -> None:
    testing = pytest.importorskip("typer.testing")
    from hybridq_cli.app import app

    def run(*args: object):
        return testing.CliRunner().invoke(app, ["summary", *map(str, args)])

    folder, _ = plain
    out = tmp_path / "out"
    hybridq.export(folder, out, layout="compressed-tensors", format="nvfp4")
    said = run(out, "--source", folder, "--json", "--html", tmp_path / "page.html")
    assert said.exit_code == 0, said.output
    read = json.loads(said.stdout)
    assert read == json.loads(checkpoint_summary(out, source=folder).to_json())
    assert all(math.isfinite(one["error"]) for one in read["weights"])
    assert "compressed-tensors" in (tmp_path / "page.html").read_text()
    assert "bits each" in run(out, "--no-values").stdout
    calibration().save(tmp_path / "amax.safetensors")
    assert "Calibration of" in run(tmp_path / "amax.safetensors").stdout
    failed = run(tmp_path / "gone")
    assert failed.exit_code == 2 and "there is no" in failed.output
    assert run(out, "--source", folder, "--no-values").exit_code == 2
