"""calibrate on several ranks: `python calibrate_program.py RANK WORLD STORE NAME[=FOLDER]`."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import torch
import torch.distributed as dist
from rank_program import main
from torch import nn

import hybridq
from hybridq.calibration import MSE
from hybridq.converters import register_experts
from hybridq.moe import ExpertsLayout
from own_experts import OwnExperts

LAYOUT = ExpertsLayout()
EXPERTS, HIDDEN, INNER, LAYERS = 4, 16, 8, 4
RATIOS = (1.0, 0.99, 0.98, 0.96, 0.9, 0.7)


class Block(OwnExperts):
    """Experts of one layer."""


class Model(nn.Module):
    """A linear layer, and layers of experts whose tokens go where the batch says."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(HIDDEN, HIDDEN, bias=False)
        make = lambda: Block(LAYOUT, sizes=(EXPERTS, HIDDEN, INNER))  # noqa: E731
        self.layers = nn.ModuleList([nn.ModuleDict({"experts": make()}) for _ in range(LAYERS)])
        for layer in self.layers:
            for parameter in layer.parameters():
                parameter.data *= 1 + torch.rand(EXPERTS, 1, 1)

    def forward(self, x: torch.Tensor, routes: list[torch.Tensor]) -> torch.Tensor:
        x = self.stem(x)
        for layer, top in zip(self.layers, routes, strict=True):
            x = x + layer["experts"](x[: len(top)], top, torch.ones(top.shape)).sum(0)
        return x


def batch(rank: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Of each rank other starved experts in other layers; layer `rank` sees nothing at all."""
    generator = torch.Generator().manual_seed(100 + rank)
    x = torch.randn(6, HIDDEN, generator=generator) * (1 + rank)
    routes = []
    for number in range(LAYERS):
        starved = (rank + number) % EXPERTS
        others = [e for e in range(EXPERTS) if e not in (starved, (starved + 1) % EXPERTS)]
        top = torch.tensor(others).expand(0 if number == rank else 6, -1)
        routes.append(top)
    return x, routes


def in_numpy(model: Model, world: int) -> dict[tuple[str, int], float]:
    """Of each projection and expert the largest input on any rank, by NumPy in FP64."""
    found: dict[tuple[str, int], float] = {}

    def note(name: str, e: int, rows: np.ndarray) -> None:
        if rows.size:
            found[name, e] = max(found.get((name, e), 0.0), float(np.abs(rows).max()))

    for rank in range(world):
        given, routes = batch(rank)
        x = given.double().numpy()
        note("stem", 0, x)
        x = x @ model.stem.weight.detach().double().numpy().T
        for number, (layer, top) in enumerate(zip(model.layers, routes, strict=True)):
            own = layer["experts"]
            up, down = (own.get_parameter(n).detach().double().numpy() for n in LAYOUT.weights)
            total = np.zeros(HIDDEN)
            for e in range(EXPERTS):
                rows = x[: len(top)][(top == e).any(1).numpy()]
                gate, value = np.split(rows @ up[e].T, 2, axis=1)
                hidden = gate / (1 + np.exp(-gate)) * value
                note(f"layers.{number}.experts.gate_up_proj", e, rows)
                note(f"layers.{number}.experts.down_proj", e, hidden)
                total = total + (hidden @ down[e].T).sum(0)
            x = x + total
    return found


def starved(folder: str) -> None:
    """The amaxes of all ranks are NumPy's, the same on all, and written once."""
    os.environ["LOCAL_RANK"] = "0"
    rank, world, path = dist.get_rank(), dist.get_world_size(), Path(folder) / "found"
    register_experts(Block, LAYOUT)
    model, saved = Model(), []
    save = hybridq.Calibration.save
    hybridq.Calibration.save = lambda one, to: (saved.append(to), save(one, to))[1]
    try:
        found = hybridq.calibrate(model, [batch(rank)], "nvfp4", per_expert=True, path=path)
    finally:
        hybridq.Calibration.save = save
    assert len(saved) == (rank == 0), "global rank 0 writes, and no other"
    dist.barrier()
    again = hybridq.Calibration.load(path)
    assert os.listdir(folder) == ["found"]
    for one in (found, again):
        assert [e[:2] for e in one.entries()] == [e[:2] for e in found.entries()]
    want = in_numpy(model, world)
    for name, count in found.tokens.items():
        for one in (found, again):
            own = {e: value for (n, e), value in want.items() if n == name}
            got = one.amax(name, "input")
            assert np.isclose(float(got), max(own.values()), rtol=1e-5), name
            for e in range(EXPERTS if count.dim() else 0):
                mine = one.amax(f"{name}.{e}", "expert_input")
                assert (mine is None) == (e not in own), (name, e)
                assert mine is None or np.isclose(float(mine), own[e], rtol=1e-5), (name, e)
    assert int(found.tokens["stem"]) == 6 * world and found.batches == world
    for number in range(LAYERS):
        counts = sum(
            torch.bincount(batch(r)[1][number].reshape(-1), minlength=EXPERTS) for r in range(world)
        )
        assert torch.equal(found.tokens[f"layers.{number}.experts.down_proj"], counts)
    alone = hybridq.calibrate(model, [batch(rank)], group="alone")
    name = f"layers.{rank}.experts.down_proj"
    assert alone.amax(name, "input") is None and found.amax(name, "input") is not None


def split() -> None:
    """Each rank has a part of the experts, in a stack or as modules with their own numbers."""
    rank, world = dist.get_rank(), dist.get_world_size()
    register_experts(Block, LAYOUT)
    torch.manual_seed(rank)
    net = nn.ModuleDict({"experts": Block(LAYOUT, sizes=(2, HIDDEN, INNER))})
    x, top = torch.full((3, HIDDEN), 1.0 + rank), torch.full((3, 1), rank % 2)
    found = hybridq.calibrate(
        net, lambda one: one["experts"](x, top, torch.ones(3, 1)), expert_parallel=world
    )
    weights = []
    for other in range(world):
        torch.manual_seed(other)
        made = Block(LAYOUT, sizes=(2, HIDDEN, INNER)).down_proj.detach()
        weights += made.abs().amax((1, 2)).tolist()
    assert found.amax("experts.down_proj", "weight").tolist() == weights
    assert found.amax("experts.gate_up_proj", "input") == world
    tokens = [3 * (e == other % 2) for other in range(world) for e in range(2)]
    assert found.tokens["experts.gate_up_proj"].tolist() == tokens

    linear = nn.Linear(HIDDEN, HIDDEN)
    named = nn.ModuleDict({"experts": nn.ModuleDict({str(rank): linear})})
    found = hybridq.calibrate(named, lambda one: one["experts"][str(rank)](x), per_expert=True)
    assert set(found.tokens) == {f"experts.{other}" for other in range(world)}
    for other in range(world):
        assert found.amax(f"experts.{other}", "input") == 1 + other
        assert found.amaxes[f"experts.{other}"]["input"] == world
    assert found.amax(f"experts.{rank}", "weight") == linear.weight.abs().max()


def clips() -> None:
    """Errors are summed over all ranks before the best clip is taken."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 32))
    data = [torch.randn(8, 32) * (1 + one) for one in range(world)]
    found = hybridq.calibrate(net, [data[rank]], observer={"input": MSE("nvfp4")})
    whole = hybridq.calibrate(net, data, observer={"input": MSE("nvfp4")}, group="alone")
    assert found.amax("0", "input") == whole.amax("0", "input")


def best_clips(parts: list[np.ndarray], width: int) -> np.ndarray:
    """Of each `width` channels the clip of all ranks' rows with which E4M3 errs least, in FP64."""
    rows = np.concatenate(parts).astype(np.float64)
    made = []
    for first in range(0, rows.shape[1], width):
        x = rows[:, first : first + width]
        largest = np.abs(x).max()
        clips = np.array([np.float32(r * largest) for r in sorted(RATIOS, reverse=True)])
        errors = []
        for clip in clips.astype(np.float64):
            codes = np.clip(x * 448 / clip, -448, 448).astype(ml_dtypes.float8_e4m3fn)
            errors.append(((x - codes.astype(np.float64) * clip / 448) ** 2).sum())
        made.append(clips[int(np.argmin(errors))])
    return np.array(made, dtype=np.float32)


def numpy_clips() -> None:
    """Clips of tensors, channels and blocks are those of all ranks' rows, by NumPy in FP64.

    Ranks have other numbers of rows, of other sizes; what one rank's rows alone would choose is
    another clip. Each rank runs a layer that no other one does.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    numbers = np.random.default_rng(3)
    parts = []
    for one in range(world):
        x = numbers.uniform(-0.5, 0.5, (20 + 7 * one, 24)) * np.exp(numbers.normal(size=24))
        x *= np.exp(numbers.normal(size=(len(x), 1)))
        parts.append(x.astype(np.float32))
    x = torch.from_numpy(parts[rank])
    net = nn.ModuleDict({"every": nn.Linear(24, 8)})
    net.update({f"only{one}": nn.Linear(24, 8) for one in range(world)})
    run = lambda model: (model["every"](x), model[f"only{rank}"](x))  # noqa: E731
    for granularity, block in (("tensor", 0), ("channel", 0), ("block", 5)):
        observer = MSE("fp8_e4m3", RATIOS, granularity, block)
        found = hybridq.calibrate(net, run, observer={"input": observer}, slots=("input",))
        width = {"tensor": 24, "channel": 1, "block": block}[granularity]
        want = best_clips(parts, width)
        got = found.amax("every", "input").numpy().reshape(-1)
        assert np.array_equal(got, want), (granularity, got, want)
        if granularity == "channel":
            largest = np.abs(np.concatenate(parts)).max(0)
            assert (want < largest).any(), "something must be clipped"
            assert not np.array_equal(want, best_clips([parts[rank]], 1)), "by all ranks' rows"
        for one in range(world):
            got = found.amax(f"only{one}", "input").numpy().reshape(-1)
            assert np.array_equal(got, best_clips([parts[one]], width)), (granularity, one)


def sharded() -> None:
    """Weights that FSDP2 shards count as a whole."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    net = hybridq.convert(nn.Sequential(nn.Linear(8, 9), nn.Linear(9, 8)))
    want = [one.weight.detach().abs().max() for one in net]
    for one in (*net, net):
        fully_shard(one)
    found = hybridq.calibrate(net, [torch.ones(2, 8) * (1 + dist.get_rank())])
    assert [found.amax(name, "weight") for name in "01"] == want
    assert found.amax("0", "input") == dist.get_world_size()


def fails(action, text: str) -> None:
    """All ranks raise the same."""
    try:
        action()
    except (RuntimeError, ValueError) as error:
        said = f"{type(error).__name__}: {error}"
    else:
        raise AssertionError("nothing was raised")
    assert text in said, said
    all_said: list = [None] * dist.get_world_size()
    dist.all_gather_object(all_said, said)
    assert len(set(all_said)) == 1, all_said


def differ(folder: str) -> None:
    """Ranks with other names or options raise the same error; nothing is written."""
    is_odd, path = dist.get_rank() == 1, Path(folder) / "found"
    x = torch.ones(2, 8)

    def calibrated(name: str, **options):
        net = nn.Sequential()
        net.add_module(name, nn.Linear(8, 8))
        return lambda: hybridq.calibrate(net, [x], path=path, **options)

    fails(calibrated("odd" if is_odd else "even"), "every rank must have the same products")
    fails(calibrated("one", observer="percentile" if is_odd else "max"), "products, observers")
    try:
        calibrated("one", slots=("input",))()
        hybridq.calibrate(nn.Linear(8, 8), [x if not is_odd else torch.ones(2, 9)], path=path)
    except RuntimeError as error:
        assert is_odd != ("got an error on rank 1, which says" in str(error)), error
    else:
        raise AssertionError("nothing was raised")
    dist.barrier()
    assert os.listdir(folder) == ["found"]
    missing = Path(folder) / "no folder" / "found"
    try:
        hybridq.calibrate(nn.Linear(8, 8), [x], path=missing)
    except (RuntimeError, OSError) as error:
        assert isinstance(error, OSError) == (dist.get_rank() == 0), error
    else:
        raise AssertionError("nothing was raised")


def dies(folder: str) -> None:
    """A rank that is gone ends the others soon, and nothing is written."""
    path, began = Path(folder) / "found", time.monotonic()

    def data():
        yield torch.ones(2, 8)
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        hybridq.calibrate(nn.Linear(8, 8), data(), path=path)
    except RuntimeError as error:
        assert "one is gone or did not answer in time; nothing was written" in str(error), error
    else:
        raise AssertionError("nothing was raised")
    assert time.monotonic() - began < 20 and not os.listdir(folder)
    os._exit(0)  # the group cannot be left in order


if __name__ == "__main__":
    main(globals(), timeout=10.0)
