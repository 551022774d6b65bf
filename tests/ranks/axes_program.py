"""Runs whose collectives a plan over axes must have: `axes_program.py RANK WORLD STORE ...`."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from rank_program import main
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import hybridq
from hybridq.distributed import context_parallel, count_traffic, sequence_parallel
from hybridq.estimate import Axes
from hybridq.estimate.axes import attention_moved, tensor_moved
from hybridq.kernels.decoded.plain_gemm import is_slow

WIDTH, INNER, TOKENS, LAYERS = 128, 256, 64, 2


def tensor() -> None:
    """Two pairs of matrices for each layer, as attention and a feed-forward part have."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    blocks = []
    for _ in range(2 * LAYERS):
        blocks += [nn.Linear(WIDTH, INNER), nn.Tanh(), nn.Linear(INNER, WIDTH)]
    model = hybridq.convert(nn.Sequential(*blocks)).bfloat16()
    names = {}
    for pair in range(2 * LAYERS):
        names[str(3 * pair)], names[str(3 * pair + 2)] = ColwiseParallel(), RowwiseParallel()
    parallelize_module(model, mesh, names)
    for recipe in ("mxfp8", "nvfp4_1d_weight", None):
        for _ in range(2):
            x = torch.randn(TOKENS, WIDTH, dtype=torch.bfloat16).requires_grad_()
            with count_traffic() as traffic:
                with hybridq.autocast(enabled=recipe is not None, recipe=recipe):
                    y = model(x)
                y.float().square().mean().backward()
        want = Counter[str]()
        for row in tensor_moved(Axes(tp=dist.get_world_size()), TOKENS, WIDTH, LAYERS):
            want[row.kind] += row.nbytes
        found = traffic.nbytes_by_kind
        # Beside hidden states, formats of two levels reduce amaxes: four bytes for each matrix.
        rest = found["all_reduce"] - want["all_reduce"]
        assert set(found) == {"all_reduce"}, found
        assert rest == 0 if recipe != "nvfp4_1d_weight" else 0 <= rest <= 1024, (recipe, rest)


def inside() -> None:
    """Collectives that a DTensor's operations make by themselves are counted too."""
    world = dist.get_world_size()
    x = DTensor.from_local(torch.ones(4, 6), init_device_mesh("cpu", (world,)), [Shard(0)])
    with count_traffic() as traffic:
        total = x.sum(0)  # partial sums: none yet
        assert not traffic.calls_by_kind, traffic
        made = torch.tanh(total / 8).to_local()  # of whole sums
    assert torch.equal(made, torch.full((6,), world / 2).tanh()), made
    assert traffic.nbytes_by_kind == {"all_reduce": 6 * 4}, traffic


HEADS = 8
HIDDEN = 12 * HEADS


#: Ranks that share sequences, and what travels between them.
AXES: tuple[tuple[str, Any], ...] = (
    ("sp", None),
    ("cp", None),
    ("sp", "mxfp8"),
    ("sp", ("fp8_1x128", "nvfp4")),
    ("sp", ("nvfp4", None)),
)


def sequences() -> None:
    """Ulysses and torch's ring attention, with as many heads of keys as of queries, and fewer."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    for heads, groups in ((4, 4), (4, 2), (12, 6)):
        for name, formats in AXES:
            torch.manual_seed(0)
            layers = [
                hybridq.TransformerLayer(
                    *(HIDDEN, 64, heads),
                    num_gqa_groups=groups,
                    attn_input_format="bshd",
                    hidden_dropout=0.0,
                    attention_dropout=0.0,
                )
                for _ in range(LAYERS)
            ]
            model = nn.Sequential(*layers).bfloat16()
            x = torch.randn(2, 4 * world, HIDDEN, dtype=torch.bfloat16)
            with ExitStack() as stack, hybridq.autocast(recipe="mxfp8"):
                traffic = stack.enter_context(count_traffic())
                if name == "sp":
                    own = x[:, :4]
                    sequence_parallel(model, mesh, communication=formats)
                else:
                    stack.enter_context(
                        context_parallel(mesh, model, buffers=[x], buffer_seq_dims=[1])
                    )
                    own = x
                model(own.clone().requires_grad_()).float().square().mean().backward()
            kv = (2 * groups * HIDDEN // heads, groups)
            axes = Axes(**{name: world}, sp_communication=formats)
            rows = attention_moved(axes, 2 * 4, HIDDEN, kv, LAYERS)
            want = Counter[str]()
            for row in rows:
                want[row.kind] += row.nbytes
            found = Counter(traffic.nbytes_by_kind)
            found["all_gather"] -= 16 * world  # what ranks compare before a forward
            if name == "cp" and is_slow(torch.bfloat16):
                continue  # such a CPU attends in FP32, and gathers keys and values so
            assert +found == want, (heads, groups, name, formats, found, want)


#: Computations of torch's schedules by their names, of which torch's letters differ by version.
LETTERS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}

#: Schedules of torch, and the number of stages on each rank.
KINDS = {
    "gpipe": (ScheduleGPipe, 1),
    "1f1b": (Schedule1F1B, 1),
    "interleaved": (ScheduleInterleaved1F1B, 3),
    "interleaved_zero_bubble": (ScheduleInterleavedZeroBubble, 2),
    "zbv": (ScheduleZBVZeroBubble, 2),
    "dualpipev": (ScheduleDualPipeV, 2),
}


def finish(order: dict[int, list[tuple[str, int, int]]], stages: int) -> tuple[int, int]:
    """Run an order of computations, none of which waits for a message.

    Args:
        order: by rank: F, B, or its halves I (of inputs) and W (of weights); stage; microbatch.
        stages: of all ranks.

    Returns:
        When the last rank has ended, and how many forwards' activations the first holds at most.
    """
    done: dict[tuple[str, int, int], int] = {}
    clock, places = dict.fromkeys(order, 0), dict.fromkeys(order, 0)
    while any(places[rank] < len(tasks) for rank, tasks in order.items()):
        before = sum(places.values())
        for rank, tasks in order.items():
            while places[rank] < len(tasks):
                kind, stage, i = tasks[places[rank]]
                needs = {"F": [("F", stage - 1, i)], "W": [("I", stage, i)]}.get(
                    kind, [("F", stage, i), ("I", stage + 1, i)]
                )
                needs = [need for need in needs if 0 <= need[1] < stages]
                if not all(need in done for need in needs):
                    break
                begin = max([clock[rank], *(done[need] for need in needs)])
                clock[rank] = begin + (2 if kind == "B" else 1)
                done["I" if kind == "B" else kind, stage, i] = clock[rank]
                places[rank] += 1
        assert sum(places.values()) > before, (order, places)
    held = [0]
    for kind, _, _ in order[0]:
        held.append(held[-1] + {"F": 1, "I": 0}.get(kind, -1))
    return max(clock.values()), max(held)


def order_of(schedule: Any, name: str, count: int) -> dict[int, list[tuple[str, int, int]]]:
    """The order of torch's schedule; of one stage on each rank it has none that it follows."""
    world = dist.get_world_size()
    if name not in ("gpipe", "1f1b"):
        return {
            rank: [
                (LETTERS[part.computation_type.name], part.stage_index, part.microbatch_index)
                for task in tasks
                if task is not None
                for part in task.sub_actions or (task,)
                if part.computation_type.name in LETTERS
            ]
            for rank, tasks in schedule.pipeline_order.items()
        }
    found = {}
    for rank in range(world):
        warm = count if name == "gpipe" else min(count, world - rank)
        tasks = [("F", rank, i) for i in range(warm)]
        for i in range(count):
            tasks.append(("B", rank, i))
            tasks += [("F", rank, warm + i)] if warm + i < count else []
        found[rank] = tasks
    return found


def schedules() -> None:
    """Idle shares and microbatches held are those of torch's schedules, run with equal times."""
    rank, world = dist.get_rank(), dist.get_world_size()
    tried = Counter[str]()
    for name, (kind, each) in KINDS.items():
        has_v, total = name in ("zbv", "dualpipev"), each * world
        places = [rank, total - 1 - rank] if has_v else range(rank, total, world)
        stages = [PipelineStage(nn.Identity(), i, total, torch.device("cpu")) for i in places]
        for count in (1, 2, 3, 4, 6, 8, 12, 16):
            given = stages if each > 1 else stages[0]
            try:
                axes = Axes(pp=world, microbatches=count, schedule=name, stages_per_rank=each)
                schedule = kind(given, count, loss_fn=nn.functional.mse_loss)
            except ValueError:
                continue  # a number that the schedule does not take
            last, held = finish(order_of(schedule, name, count), total)
            what = (name, world, count, last, held, axes.bubble, axes.in_flight)
            assert abs(axes.bubble - (1 - 3 * count * each / last)) < 1e-9, what
            assert axes.in_flight == held / each, what
            tried[name] += 1
    assert min(tried.values()) >= 3 and len(tried) == len(KINDS), tried


if __name__ == "__main__":
    main(globals(), timeout=60.0)
