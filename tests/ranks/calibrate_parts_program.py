"""calibrate and quantize_model where ranks have parts of modules: tensor parallelism.

`python calibrate_parts_program.py RANK WORLD STORE NAME...`. Every rank has the whole model too,
which one process would calibrate.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from parallel_modules_program import part_of
from rank_program import main
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import hybridq
from hybridq import calibration
from hybridq.calibration import Max, Percentile
from hybridq.distributed import ColwiseParallel, FusedParallel, RowwiseParallel

TOKENS, BATCH, HIDDEN, FFN = 16, 2, 64, 128
OBSERVERS: tuple[Any, ...] = (
    "max",
    {"input": Max(granularity="channel"), "weight": Max(granularity="row")},
    {"input": Percentile(percent=95.0, granularity="channel"), "weight": Max()},
    {"input": "mse", "output": Max(granularity="channel")},
)


class Model(nn.Module):
    """Fused modules and plain ones; the largest values are in the last rank's part."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = hybridq.TransformerLayer(HIDDEN, FFN, 4, num_gqa_groups=4)
        self.mlp = hybridq.LayerNormMLP(HIDDEN, FFN, activation="swiglu")
        self.up = hybridq.Linear(HIDDEN, FFN)
        self.down = hybridq.Linear(FFN, HIDDEN)
        with torch.no_grad():
            self.mlp.fc1_weight[-1] *= 9
            self.layer.self_attention.layernorm_qkv.weight[HIDDEN - 1] *= 5  # a query's
            self.up.weight[-1] *= 7

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(self.mlp(self.layer(x)))))


def batch(count: int) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return list(torch.randn(count, TOKENS, BATCH, HIDDEN))


def same(part: nn.Module, whole: nn.Module, of_part: Any, of_whole: Any, where: Any) -> None:
    for observer in OBSERVERS:
        slots = ("input", "output") if "output" in observer else ("input", "weight")
        options: Any = {"observer": observer, "slots": slots, "least_width": 0}
        found = hybridq.calibrate(part, of_part, "fp8_current", **options)
        wanted = hybridq.calibrate(whole, of_whole, "fp8_current", **options)
        assert found.amaxes.keys() == wanted.amaxes.keys(), where
        for name, slot, value in [
            (n, s, v) for n, a in wanted.amaxes.items() for s, v in a.items()
        ]:
            own = found.amaxes[name][slot]
            # Sums over ranks are in another order than one rank's.
            assert own.shape == value.shape, (where, observer, name, slot)
            assert torch.allclose(own, value, rtol=1e-4), (where, observer, name, slot)


def plan() -> None:
    """Modules that `parallelize_module` dealt out give the maxima of the whole model."""
    whole, part = Model(), Model()
    styles = {"layer": FusedParallel(), "mlp": FusedParallel()}
    styles |= {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(part, init_device_mesh("cpu", (dist.get_world_size(),)), styles)
    same(part, whole, batch(2), batch(2), "plan")


def tokens() -> None:
    """So do those of which each rank sees its own tokens."""
    whole, part = Model().mlp, Model().mlp
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(part, mesh, FusedParallel(sequence_parallel=True))
    same(part, whole, [part_of(x, 0) for x in batch(2)], batch(2), "tokens")


def groups() -> None:
    """So do modules that were made as parts, with `tp_group`."""
    group = dist.group.WORLD
    for is_sequence in (False, True):
        one: Any = {"tp_group": group, "sequence_parallel": is_sequence}
        cases = {
            "mlp": hybridq.LayerNormMLP(
                HIDDEN, FFN, activation="swiglu", set_parallel_mode=True, **one
            ),
            "up": hybridq.Linear(HIDDEN, FFN, parallel_mode="column", **one),
            "down": hybridq.Linear(FFN, HIDDEN, parallel_mode="row", **one),
        }
        for name, part in cases.items():
            whole = getattr(Model(), name)
            take_part(part, whole)
            torch.manual_seed(2)
            x = torch.randn(TOKENS, BATCH, FFN if name == "down" else HIDDEN)
            own = part_of(x, -1) if name == "down" else part_of(x, 0) if is_sequence else x
            same(nn.Sequential(part), nn.Sequential(whole), [own], [x], (name, is_sequence))


def take_part(part: Any, whole: Any) -> None:
    """Give a part the values that it has of a whole module."""
    with torch.no_grad():
        for (name, own), value in zip(part.named_parameters(), whole.parameters(), strict=True):
            if own.shape == value.shape:
                own.copy_(value)
            elif name.startswith("fc1"):  # both halves of the gate
                own.copy_(torch.cat([part_of(half, 0) for half in value.chunk(2)]))
            else:
                own.copy_(part_of(value, own.partition_dim))


def served() -> None:
    """A model that is dealt out serves from values, which is said; planes of one can be cut."""
    whole, late, early = Model(), Model(), nn.Sequential(Model().up, nn.ReLU(), Model().down)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    two = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(late, mesh, {"mlp": FusedParallel(), **two})
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        hybridq.quantize_model(late, "mxfp8")
    (said,) = [str(one.message) for one in seen if "DTensors" in str(one.message)]
    assert "call quantize_model before fully_shard" in said and "mlp.fc1_gate_weight" in said
    assert "layer.self_attention" not in said  # what every rank has whole is quantized
    hybridq.quantize_model(whole, "mxfp8")
    (x,) = batch(1)
    near(late(x), whole(x))
    assert type(late.layer.self_attention.proj.weight).__name__ == "MXFP8Tensor"

    hybridq.quantize_model(early, "mxfp8")
    y = early(x)
    parallelize_module(early, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    near(early(x), y)
    assert type(early[0].weight.to_local()).__name__ == "MXFP8Tensor"


def changed() -> None:
    """What changes weights leaves those of which ranks have parts, and says why."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    split = nn.ModuleDict({"up": Model().up, "down": Model().down})
    parallelize_module(split, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    whole = hybridq.Linear(HIDDEN, HIDDEN)
    model = nn.Sequential(split["up"], nn.ReLU(), split["down"], whole)
    made = hybridq.Linear(HIDDEN, FFN, tp_group=dist.group.WORLD, parallel_mode="column")
    data = [torch.randn(64, HIDDEN)]
    for one, parts in ((model, {"0", "2"}), (nn.Sequential(made), {"0"})):
        kept = [getattr(one[int(k)].weight, "_local_tensor", one[int(k)].weight) for k in parts]
        old = [weight.detach().clone() for weight in kept]
        reports: list[Any] = [
            calibration.smooth(one, data, least_width=0, in_front=True),
            calibration.awq(one, data, "mxfp8", least_width=0, in_front=True),
            calibration.clip_weights(one, data, "mxfp8", least_width=0),
            calibration.gptq(one, data, "mxfp8", least_width=0),
        ]
        for report in reports:
            assert set(report.left) == parts, report
            assert all("on several ranks" in why for why in report.left.values()), report
        for weight, before in zip(kept, old, strict=True):
            assert torch.equal(weight, before)
    assert type(whole.weight).__name__ == "MXFP8Tensor"
    assert torch.isfinite(model(data[0])).all()


def near(a: Any, b: torch.Tensor) -> None:
    assert torch.allclose(a, b, rtol=1e-5, atol=1e-6), (a - b).abs().max()


if __name__ == "__main__":
    main({"plan": plan, "tokens": tokens, "groups": groups, "served": served, "changed": changed})
