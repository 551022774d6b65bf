"""The monitor: its numbers are those of the planes, and the training is the same in every bit."""

from __future__ import annotations

import json
import logging
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hybridq
from hybridq import settings
from hybridq.monitoring import Alarms, MonitorRecord


class Net(nn.Module):
    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 96), nn.Linear(96, 32)
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.kind:
            return self.second(torch.tanh(self.first(x)))
        again: Any = checkpoint(self.first, x, use_reentrant=self.kind == "reentrant")
        return self.second(torch.tanh(again))


def net(kind: str = "") -> Net:
    torch.manual_seed(0)
    return hybridq.convert(Net(kind), least_width=0)


def train(
    model: nn.Module, recipe: str, steps: int, watch: Any = None, x: torch.Tensor | None = None
) -> list[Any]:
    """Train; return the losses' bits and the records."""
    torch.manual_seed(1)
    x = torch.randn(48, 64, requires_grad=True) if x is None else x
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses, records = [], []
    for _ in range(steps):
        with hybridq.autocast(recipe=recipe):
            loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
        if watch is not None:
            records.append(watch.step())
    return [losses, *records]


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_current"])
def test_numbers_are_those_of_the_planes(recipe: str) -> None:
    model = net()
    with hybridq.monitor(model, layers=None) as watch:
        x = torch.randn(48, 64)
        x[0, :8] *= 1e-9
        x.requires_grad_()  # without, the first layer would make no dgrad
        weight = model.first.weight.detach().clone()
        _, record = train(model, recipe, 1, watch, x)
    spec = {"mxfp8": "mxfp8", "fp8_current": "fp8_e4m3"}[recipe]
    found = {slot.place: slot for slot in record.slots}
    assert len(found) == 2 * 3 * 3
    for name, value in {"input": x.detach(), "weight": weight}.items():
        planes = hybridq.quantize(value, spec, columnwise=spec)
        assert found[f"first/{name}"].amax == value.abs().max().item()
        for direction in ("rowwise", "columnwise"):
            got = getattr(planes, direction).dequantize().double()
            noise, signal = (got - value.double()).square().sum(), value.double().square().sum()
            own = found[f"first/{name}/{direction}"]
            assert own.snr_db == pytest.approx(10 * math.log10(signal / noise), abs=1e-9)
            lost = ((got == 0) & (value != 0)).sum().item() / value.count_nonzero().item()
            assert own.underflow == lost
            assert name == "weight" or lost > 0


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8_delayed"])
def test_a_watched_training_is_the_same_in_every_bit(recipe: str) -> None:
    models = net(), net()
    plain = train(models[0], recipe, 4)[0]
    names = set(vars(models[1].first)), len(models[1].first._forward_hooks)
    with hybridq.monitor(models[1], every=2) as watch:
        watched, *records = train(models[1], recipe, 4, watch)
    assert watched == plain
    assert [one is not None for one in records] == [True, False, True, False]
    for a, b in zip(*(one.parameters() for one in models), strict=True):
        assert torch.equal(a, b)
    assert settings.current().watcher is None
    assert names[1] == len(models[1].first._forward_hooks) == 0


@pytest.mark.parametrize("kind", ["reentrant", "non-reentrant"])
def test_recomputations_are_not_counted_again(kind: str) -> None:
    found = []
    for one in ("", kind):
        with hybridq.monitor(model := net(one), layers=None) as watch:
            found.append(train(model, "mxfp8", 1, watch)[1])
    key = lambda slot: slot.place  # noqa: E731
    assert sorted(found[0].slots, key=key) == sorted(found[1].slots, key=key)


def test_layers_take_turns() -> None:
    model = net()
    with hybridq.monitor(model, every=1, layers=1) as watch:
        _, *records = train(model, "mxfp8", 4, watch)
    layers = [{slot.layer for slot in one.slots if slot.direction} for one in records]
    assert layers[1:] == [{"second"}, {"first"}, {"second"}]
    assert all(len([s for s in one.slots if not s.direction]) == 6 for one in records)


def test_a_band_has_the_scale_of_the_whole_tensor() -> None:
    model, x = net(), torch.randn(400, 64)
    x[399, 0] = 3000.0  # outside of the band: by its own amax no value of it would underflow
    with hybridq.monitor(model, rows=128, layers=None) as watch:
        _, record = train(model, "fp8_current", 1, watch, x)
    own = next(slot for slot in record.slots if slot.place == "first/input/rowwise")
    band = torch.cat((x[:127], x[399:]))
    got = hybridq.quantize(x, "fp8_e4m3").dequantize()
    got = torch.cat((got[:127], got[399:]))
    assert own.underflow == ((got == 0) & (band != 0)).sum().item() / band.numel() > 0


def test_alarms_say_step_place_and_number(caplog: pytest.LogCaptureFixture) -> None:
    model, seen = net(), []
    with hybridq.monitor(model, 1, seen.append, alarms=Alarms(underflow=0.01)) as watch:
        for factor in (1.0, 100.0, math.nan):
            x = torch.randn(48, 64) * factor
            x[:, :16] *= 1e-9
            with hybridq.autocast(recipe="fp8_current"):
                model(x).sum().backward()
            watch.step()
    kinds = [{(one.kind, one.place) for one in record.alarms} for record in seen]
    assert ("underflow", "first/input/rowwise") in kinds[0]
    assert ("amax_jump", "first/input") in kinds[1]
    assert ("not_finite", "first/input") in kinds[2]
    assert ("amax_jump", "first/input") not in kinds[0]
    assert "step 1, first/input: amax changed by a factor of" in caplog.text
    assert watch.alarms == [one for record in seen for one in record.alarms]


def test_dead_experts_are_an_alarm_after_some_samples() -> None:
    model = hybridq.GroupedLinear(3, 32, 32)
    splits, seen = torch.tensor([20, 0, 12]), []
    with hybridq.monitor(model, 1, seen.append, alarms=Alarms(dead_after=2)) as watch:
        for _ in range(5):
            with hybridq.autocast(recipe="mxfp8"):
                model(torch.randn(32, 32), splits).sum().backward()
            watch.step()
    assert [record.experts for record in seen] == [{"": {0: 20, 1: 0, 2: 12}}] * 5
    assert [[one.place for one in record.alarms] for record in seen] == [[], ["/1"], [], ["/1"], []]
    assert seen[0].slots[1].direction == "rowwise"


def test_sinks_take_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Writer:
        def __init__(self) -> None:
            self.scalars: dict[str, float] = {}

        def add_scalar(self, name: str, value: float, step: int) -> None:
            self.scalars[name] = value

        def add_text(self, name: str, text: str, step: int) -> None:
            raise AssertionError(text)

    writer, run, file = Writer(), SimpleNamespace(), tmp_path / "a.jsonl"
    run.log = lambda values, step: setattr(run, "seen", (values, step))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=run))
    model = net()
    with hybridq.monitor(model, 2, [writer, "wandb", file]) as watch:
        _, record, _, last = train(model, "mxfp8", 3, watch)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert lines == [record.as_dict(), last.as_dict()]
    assert writer.scalars == run.seen[0] == last.scalars()
    assert run.seen[1] == 2 and "hybridq/amax/first/input" in writer.scalars


@pytest.mark.judges
def test_tensorboards_own_reader_reads_them(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    model = net()
    with hybridq.monitor(model, 1, f"tensorboard:{tmp_path}") as watch:
        _, record = train(model, "mxfp8", 1, watch)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    for name, value in record.scalars().items():
        assert events.Scalars(name)[0].value == pytest.approx(value, rel=1e-6)


@pytest.mark.judges
def test_wandbs_own_summary_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    model = net()
    with wandb.init(project="hybridq", dir=str(tmp_path)) as run:
        with hybridq.monitor(model, 2, "wandb") as watch:
            *_, last = train(model, "mxfp8", 3, watch)
        run.log({}, step=3)  # what is of a step is written when the next one begins
        seen = {name: run.summary[name] for name in last.scalars()}
    assert seen == pytest.approx(last.scalars())
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


def test_what_cannot_be_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    for to in ("wandb", "tensorboard"):
        with pytest.raises(ImportError, match=f"needs the package {to}, .*pip install {to}"):
            hybridq.monitor(model, to=to)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=None))
    with pytest.raises(RuntimeError, match=r"call wandb.init"):
        hybridq.monitor(model, to="wandb")
    with pytest.raises(ValueError, match=r"monitor: every must be .*, got 0"):
        hybridq.monitor(model, every=0)
    with pytest.raises(TypeError, match=r"monitor: to must be .*, got int"):
        hybridq.monitor(model, to=3)
    with pytest.raises(TypeError, match=r"monitor: to must be .*, got Logger"):
        hybridq.monitor(model, to=logging.getLogger("hybridq"))
    with pytest.raises(ValueError, match="a file that can be written"):
        hybridq.monitor(model, to=tmp_path / "none" / "a.jsonl")
    with pytest.raises(TypeError, match="must be a Module, got list"):
        hybridq.monitor([])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="amax_jump must be more than 1"):
        Alarms(amax_jump=0.5)
    with pytest.raises(TypeError, match="underflow must be a number or None, got 'a'"):
        Alarms(underflow="a")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="start must be an integer of at least 0, got -1"):
        hybridq.monitor(model, start=-1)
    for options, text in (
        ({"alarms": {"underflow": 0.1}}, "alarms must be a hybridq.monitoring.Alarms or None"),
        ({"alarms": Alarms}, "alarms must be a hybridq.monitoring.Alarms or None"),
        ({"group": 5}, "group must be a process group, got int"),
        ({"optimizer": 3}, "optimizer must be a torch.optim.Optimizer, got int"),
    ):
        with pytest.raises(TypeError, match=text):
            hybridq.monitor(model, to=tmp_path / "b.jsonl", **options)  # type: ignore[arg-type]
    assert not (tmp_path / "b.jsonl").exists()
    watch = hybridq.monitor(model)
    watch.close()
    watch.close()
    with pytest.raises(RuntimeError, match="got a closed one"):
        watch.step()
    assert settings.current().watcher is None


def test_an_optimizer_counts_steps_until_the_end() -> None:
    model, seen = net(), list[MonitorRecord]()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with hybridq.monitor(model, 2, seen.append, optimizer=optimizer) as watch:
        for _ in range(3):
            with hybridq.autocast(recipe="mxfp8"):
                model(torch.randn(4, 64)).sum().backward()
            optimizer.step()
    optimizer.step()
    assert watch.steps == 3 and [one.step for one in seen] == [0, 2]
    assert not optimizer._optimizer_step_post_hooks


def test_a_writer_that_raises_costs_no_step() -> None:
    model, seen = net(), []

    def full(record: MonitorRecord) -> None:
        seen.append(record.step)
        if record.step == 1:
            raise OSError("no space left")

    watch = hybridq.monitor(model, every=1, to=full)
    with pytest.raises(OSError, match="no space left"):
        train(model, "mxfp8", 4, watch)
    train(model, "mxfp8", 2, watch)
    watch.close()
    assert seen == [0, 1, 2, 3] and watch.steps == 4 and settings.current().watcher is None


class Closes:
    """A run of TensorBoard's kind that cannot be ended."""

    def __init__(self, *_: object) -> None:
        self.steps: list[int] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        if name == "hybridq/alarms":
            self.steps.append(step)

    def close(self) -> None:
        raise OSError("cannot be flushed")


def test_a_writer_that_raises_costs_the_others_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Closes)
    )
    seen: list[int] = []

    def full(record: MonitorRecord) -> None:
        seen.append(record.step)
        raise OSError("no space left")

    to = [full, "tensorboard", tmp_path / "a.jsonl", lambda one: seen.append(one.step)]
    watch = hybridq.monitor(net(), every=1, to=to)
    writes = watch._sinks[2].write
    with pytest.raises(OSError, match="no space left"):
        train(net(), "mxfp8", 1, watch)
    assert seen == [0, 0]
    with pytest.raises(OSError, match="cannot be flushed"):
        watch.close()
    assert [json.loads(line)["step"] for line in (tmp_path / "a.jsonl").open()] == [0]
    with pytest.raises(ValueError, match="closed file"):
        writes(MonitorRecord(1, (), {}))


def test_the_optimizer_within_a_wrapper_is_counted() -> None:
    accelerate = pytest.importorskip("accelerate")
    model, seen = net(), list[MonitorRecord]()
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), 0.1))
    with hybridq.monitor(model, 1, seen.append, optimizer=optimizer) as watch:
        for scale in (1.0, 2.0, 3.0, 4.0):
            with accelerator.accumulate(model), hybridq.autocast(recipe="mxfp8"):
                model(torch.full((4, 64), scale)).sum().backward()
                optimizer.step()
    amaxes = [{one.place: one.amax for one in record.slots}["first/input"] for record in seen]
    assert amaxes == [2.0, 4.0] and watch.steps == 2


def test_a_run_that_goes_on_has_the_numbers_of_its_steps(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    for path, lengths in ((whole, [8]), (parts, [3, 5])):
        done = 0
        for steps in lengths:
            model = net()
            with hybridq.monitor(model, 2, path, start=done) as watch:
                train(model, "mxfp8", steps, watch)
            done += steps
            assert watch.steps == done
    steps = [[json.loads(line)["step"] for line in path.open()] for path in (whole, parts)]
    assert steps == [[0, 2, 4, 6], [0, 2, 4, 6]]


@pytest.mark.slow  # compiles
def test_a_compiled_graph_is_used_between_samples() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    models = net(), net()
    compiled = torch.compile(models[1], backend=counter, fullgraph=True)
    with hybridq.monitor(models[1], every=3) as watch:
        _, *records = train(compiled, "mxfp8", 7, watch)
    train(torch.compile(models[0], backend="aot_eager", fullgraph=True), "mxfp8", 7)
    assert counter.frame_count == 1
    assert [one is not None for one in records] == [True, False, False] * 2 + [True]
    assert len(records[3].slots) == 2 * 3 * 3 and records[3].slots[0].layer == "first"
    for a, b in zip(*(one.parameters() for one in models), strict=True):
        torch.testing.assert_close(a, b)


def test_a_compiled_step_of_the_optimizer_is_counted() -> None:
    """With the records of a step that is not compiled."""
    seen: list[list[Any]] = []
    for backend in (None, "eager"):
        torch.manual_seed(0)
        model, records = hybridq.convert(nn.Sequential(nn.Linear(64, 64))), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        step = optimizer.step if backend is None else torch.compile(optimizer.step, backend=backend)
        with hybridq.monitor(model, every=2, to=records.append, optimizer=optimizer):
            for _ in range(3):
                with hybridq.autocast(recipe="mxfp8"):
                    model(torch.ones(4, 64)).square().mean().backward()
                step()
                optimizer.zero_grad()
        seen.append([(one.step, [(s.place, s.amax) for s in one.slots]) for one in records])
    assert seen[0] == seen[1] and [step for step, _ in seen[0]] == [0, 2]


def test_a_monitor_that_counts_no_step_says_so() -> None:
    model, records = hybridq.convert(nn.Sequential(nn.Linear(64, 64))), []
    watch = hybridq.monitor(model, every=1, to=records.append)
    with hybridq.autocast(recipe="mxfp8"):
        model(torch.randn(4, 64)).sum().backward()
    with pytest.warns(hybridq.HybridQWarning, match="no step was counted.*optimizer="):
        watch.close()
    assert not records
