"""A calibration's file: all of it is read back, and nothing else is."""

from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

import hybridq
from hybridq import Calibration, CheckpointError, _files

FULL = Calibration(
    {
        "a.b": {"input": torch.tensor(2.5), "weight": torch.tensor(0.0)},
        "a.k_proj": {"output": torch.tensor([1.0, 2.0, 3.0])},
        "experts.up": {
            "input": torch.tensor(7.0),
            "weight": torch.tensor([1.0, 2.0]),
            "expert_input": torch.tensor([7.0, -torch.inf]),
        },
        "attn": {"k": torch.tensor(3.0), "v": torch.tensor(4.0)},
        "": {"input": torch.tensor(1e-40)},
    },
    {"a.b": torch.tensor(3), "experts.up": torch.tensor([5, 0]), "": torch.tensor(1)},
    {"input": "max", "weight": "max", "expert_input": "max"},
    {"a.b": {"input": "nvfp4", "weight": "mxfp8"}},
    batches=4,
)


def same(one: Calibration, other: Calibration) -> bool:
    return (
        [(n, s, t.tolist()) for n, s, t in one.entries()]
        == [(n, s, t.tolist()) for n, s, t in other.entries()]
        and {n: t.tolist() for n, t in one.tokens.items()}
        == {n: t.tolist() for n, t in other.tokens.items()}
        and (one.observers, one.formats, one.batches)
        == (other.observers, other.formats, other.batches)
    )


def test_a_file_has_all_of_it(tmp_path) -> None:
    FULL.save(tmp_path / "one")
    again = Calibration.load(tmp_path / "one")
    assert same(again, FULL)
    again.save(tmp_path / "two")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["one", "two"]


def test_amaxes_of_experts() -> None:
    assert FULL.amax("experts.up.1", "weight") == 2 and FULL.amax("experts.up.0", "input") == 7
    # One that saw no token takes the layer's.
    assert FULL.amax("experts.up.1", "input") == 7
    assert FULL.amax("experts.up.1", "expert_input") is None
    assert FULL.amax("a.b.1", "weight") is None
    counted = Calibration({}, {"experts.up": torch.tensor([5, 0])}, {})
    assert counted.amax("experts.up.1", "input") is None
    with pytest.raises(ValueError, match="has 2 experts, got the name of number 2"):
        FULL.amax("experts.up.2", "weight")
    with pytest.raises(ValueError, match=r"slot must be one of .* did you mean 'weight'"):
        FULL.amax("a.b", "weigth")


def test_merging_takes_the_larger_of_each() -> None:
    less = Calibration(
        {"experts.up": {"expert_input": torch.tensor([9.0, 1.0])}, "new": {"k": torch.tensor(1.0)}},
        {"experts.up": torch.tensor([1, 2])},
        {"expert_input": "max"},
    )
    made = FULL.merge(less)
    assert made.amaxes["experts.up"]["expert_input"].tolist() == [9.0, 1.0]
    assert made.tokens["experts.up"].tolist() == [6, 2] and made.amax("new", "k") == 1
    assert same(FULL.merge(less), less.merge(FULL))
    with pytest.raises(ValueError, match=r"as many experts .* \[2\] and \[3\] for weight"):
        FULL.merge(Calibration({"experts.up": {"weight": torch.ones(3)}}, {}, {}))
    with pytest.raises(ValueError, match="observers must be the same, got 'max' and 'mse'"):
        FULL.merge(Calibration({}, {}, {"input": "mse"}))


def rewritten(path, change) -> None:
    """Write the file anew after `change(tensors, metadata)`, as other tools would."""
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    change(tensors, metadata)
    save_file(tensors, path, metadata)


def about(change):
    """A change of what the metadata say."""

    def changed(tensors, metadata) -> None:
        text = json.loads(metadata["hybridq_calibration"])
        change(text)
        metadata["hybridq_calibration"] = json.dumps(text)

    return changed


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda t, m: t.pop("a.b.input_amax"), "damaged: names or shapes"),
        (lambda t, m: t.update({"c.input_amax": torch.ones(())}), "damaged: names or shapes"),
        (lambda t, m: t["a.b.input_amax"].fill_(9.0), "damaged: values are not those"),
        (about(lambda one: one["about"].update(batches=9)), "damaged: values are not those"),
        (about(lambda one: one.update(version=2)), "must have version 1, got 2"),
        (about(lambda one: one.pop("values")), "damaged: its metadata lack something"),
        (about(lambda one: one.update(about=[])), "damaged: its metadata lack something"),
        (lambda t, m: m.update(hybridq_calibration="{"), "damaged: its metadata cannot be read"),
        (lambda t, m: m.update(hybridq_calibration="[]"), "damaged: its metadata cannot be read"),
        (lambda t, m: m.pop("hybridq_calibration"), "got a safetensors file without its metadata"),
    ],
)
def test_a_changed_file_is_refused(tmp_path, change, text) -> None:
    FULL.save(tmp_path / "one")
    rewritten(tmp_path / "one", change)
    with pytest.raises(CheckpointError, match=text):
        Calibration.load(tmp_path / "one")


def test_other_files_are_refused(tmp_path) -> None:
    save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="got a safetensors file without its metadata"):
        Calibration.load(tmp_path / "model.safetensors")
    for name, data in {"empty": b"", "text": b"no tensors at all", "pt": b"\0" * 99}.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(CheckpointError, match="cannot read"):
            Calibration.load(tmp_path / name)
    with pytest.raises(CheckpointError, match="must be a file, got a folder"):
        Calibration.load(tmp_path)
    with pytest.raises(CheckpointError, match=r"cannot read .*gone"):
        Calibration.load(tmp_path / "gone")
    FULL.save(tmp_path / "whole")
    data = (tmp_path / "whole").read_bytes()
    for size in (4, 100, len(data) - 1):
        (tmp_path / "cut").write_bytes(data[:size])
        with pytest.raises(CheckpointError, match="cannot read"):
            Calibration.load(tmp_path / "cut")


def test_a_file_that_cannot_be_written_stays_as_it_was(tmp_path, monkeypatch) -> None:
    FULL.save(tmp_path / "one")
    before = (tmp_path / "one").read_bytes()

    def full(number: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        hybridq.Calibration({}, {}, {}).save(tmp_path / "one")
    assert (tmp_path / "one").read_bytes() == before and os.listdir(tmp_path) == ["one"]
    with pytest.raises(FileNotFoundError):
        FULL.save(tmp_path / "no folder" / "one")


@pytest.mark.parametrize("umask", (0o022, 0o077, 0o002))
def test_a_file_may_be_read_as_any_other_that_is_made(tmp_path, umask) -> None:
    previous = os.umask(umask)
    try:
        FULL.save(tmp_path / "one")
        (tmp_path / "plain").write_bytes(b"")
    finally:
        os.umask(previous)
    assert (tmp_path / "one").stat().st_mode == (tmp_path / "plain").stat().st_mode
    (tmp_path / "one").chmod(0o640)  # what is replaced stays open to those it was open to
    FULL.save(tmp_path / "one")
    assert (tmp_path / "one").stat().st_mode & 0o777 == 0o640


def test_without_the_library_of_its_files_nothing_runs(tmp_path, monkeypatch) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(16, 32))
    FULL.save(tmp_path / "one")

    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(_files, "import_module", missing)
    ran: list[int] = []
    model.register_forward_pre_hook(lambda *_: ran.append(1))
    named = r"^calibration: safetensors is not installed; pip install hybridq\[checkpoints\]$"
    for call in (
        lambda: hybridq.calibrate(model, [torch.ones(2, 16)], path=tmp_path / "two"),
        lambda: FULL.save(tmp_path / "two"),
        lambda: Calibration.load(tmp_path / "one"),
        lambda: hybridq.calibration.is_calibration(tmp_path / "one"),
    ):
        with pytest.raises(ImportError, match=named):
            call()
    assert not ran and os.listdir(tmp_path) == ["one"]
    assert hybridq.calibrate(model, [torch.ones(2, 16)]).amax("0", "input") == 1  # takes no file
