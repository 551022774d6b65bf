"""Stages that differ, or die: `python pipeline_faults_program.py RANK WORLD STORE NAME...`."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from pipeline_program import (
    ROWS,
    WIDTH,
    built,
    loss_of,
    microbatches_of,
    places_of,
    run_step,
    schedule_of,
)
from rank_program import main
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

import hybridq
from hybridq.distributed import pipeline_stage
from hybridq.recipes import DelayedScaling


def fails(what: str, action: Callable[[], Any], *texts: str) -> None:
    """Check that `action` raises on every rank, with these words."""
    try:
        action()
    except RuntimeError as error:
        message = str(error)
    else:
        raise AssertionError(f"{what}: nothing was raised")
    for text in texts:
        assert text in message, f"{what}: {text!r} not in {message!r}"
    dist.barrier()


def disagree() -> None:
    """Formats, recipes, replicas and counts of stages that differ: an error on every rank."""
    rank, world = dist.get_rank(), dist.get_world_size()

    def step(recipe: Any = "mxfp8", more: int = 0, **options: Any) -> Callable[[], Any]:
        def run() -> None:
            module = built(world)[rank]
            stage = pipeline_stage(module, rank, world, "cpu", **options)
            count = microbatches_of(Schedule1F1B) + more
            schedule = Schedule1F1B(stage, count, loss_fn=loss_of)
            run_step(schedule, (rank,), world - 1, recipe)

        return run

    mine = "nvfp4" if rank == 1 else "mxfp8"
    said = "pipeline_stage: every rank must run the same model"
    fails("format", step(communication=mine), said, "activations between stages", "on rank 1")
    fails("gradients", step(communication=("mxfp8", mine)), "gradients between stages", "nvfp4")
    fails("recipe", step(mine), said, "the quantizer of a linear module:input", "on rank 1")
    fails("none", step(None if rank else "mxfp8"), "the quantizer of a linear module", "none")
    fails("kept", step(keep_weights=rank == 1), "keep_weights", "True on rank 1")
    fails("microbatches", step(more=rank), said, "the number of microbatches", "on rank 1")
    own = [dist.new_group([one]) for one in range(world)][rank]
    whole = dist.group.WORLD
    fails("replicas", step(replicas=whole if rank == 1 else own), "replicas", "on rank 1")


def later() -> None:
    """A recipe that is new in a later step: the same on all ranks, others, on one alone."""
    rank, world = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(list(range(world)), timeout=timedelta(seconds=3))

    def stepped() -> Callable[[Any], Any]:
        stage = pipeline_stage(built(world)[rank], rank, world, "cpu", group=group)
        schedule = schedule_of(Schedule1F1B, [stage])
        return lambda recipe: run_step(schedule, (rank,), world - 1, recipe)

    for kind in (ScheduleInterleaved1F1B, ScheduleZBVZeroBubble):  # two stages on each rank
        places, count = places_of(kind), 2 * world
        modules = built(count)
        own = [pipeline_stage(modules[at], at, count, "cpu", group=group) for at in places]
        schedule = schedule_of(kind, own)
        for recipe in ("mxfp8", "nvfp4"):
            run_step(schedule, places, count - 1, recipe)
    step = stepped()
    for recipe in ("mxfp8", "nvfp4", None, "mxfp8"):
        step(recipe)
    said = "pipeline_stage, whose recipe changes: formats must be the same on all ranks, got"
    fails("others", lambda: step("fp8_block" if rank else "fp8_current"), said, "on rank 1")
    step = stepped()
    step("mxfp8")
    group.get_group_store().set_timeout(timedelta(seconds=3))
    try:
        step("nvfp4" if rank else "mxfp8")
    except RuntimeError as error:
        assert not rank or "rank 0 did not come to" in str(error), error
    else:
        raise AssertionError("nothing was raised")
    dist.barrier()


def uneven() -> None:
    """A batch that the microbatches do not divide, or of another size: the sender says so."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for sizes, count in (((32,), 3), ((32, 20), 2)):
        group = dist.new_group(list(range(world)), timeout=timedelta(seconds=3))
        stage = pipeline_stage(built(world)[rank], rank, world, "cpu", group=group)
        schedule = Schedule1F1B(stage, count, loss_fn=nn.functional.mse_loss)
        try:
            for size in sizes:
                x, target = torch.randn(2, size, WIDTH)
                last = {"target": target} if stage.is_last else {}
                schedule.step(*((x,) if stage.is_first else ()), **last)
        except ValueError as error:
            assert "all microbatches must have one shape" in str(error), error
        except RuntimeError as error:
            assert rank or "shape mismatch" in str(error), error  # torch 2.10 says it itself
        else:
            raise AssertionError("nothing was raised")
        dist.barrier()


def unlike() -> None:
    """Stages that nobody made known as such: the first update raises on every rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    module = hybridq.convert(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(1 + rank))))
    x = torch.zeros(ROWS, WIDTH, requires_grad=True)
    stage = PipelineStage(module, rank, world, torch.device("cpu"), input_args=x, output_args=x)
    schedule = schedule_of(Schedule1F1B, [stage])
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    run_step(schedule, (rank,), world - 1, "fp8_delayed")
    fails("update", optimizer.step, "must step the same modules", "pipeline_stage")


def open_groups() -> None:
    """A pipeline of some ranks under delayed scaling needs to know who has the same stage."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    place = mesh.get_local_rank("pp")
    stage = pipeline_stage(built(2)[place], place, 2, "cpu", group=mesh.get_group("pp"))
    schedule = schedule_of(Schedule1F1B, [stage])
    run = lambda recipe: run_step(schedule, (place,), 1, recipe)  # noqa: E731
    fails("open", lambda: run("fp8_delayed"), "give replicas=mesh['dp']")
    run(DelayedScaling(reduce_amax=False))


def dies() -> None:
    """The last rank is gone in its second microbatch: the others raise, the first one too."""
    import os
    import signal
    import sys

    rank, world = dist.get_rank(), dist.get_world_size()
    module = built(world)[rank]
    if rank == world - 1:
        calls = []

        def die(*_: Any) -> None:
            calls.append(1)
            if len(calls) > 2:  # torch's look at shapes is the first
                os.kill(os.getpid(), signal.SIGKILL)

        module.register_forward_pre_hook(die)
    stage = pipeline_stage(module, rank, world, "cpu", communication="mxfp8")
    schedule = schedule_of(Schedule1F1B, [stage])
    try:
        run_step(schedule, (rank,), world - 1, "mxfp8")
    except RuntimeError:
        print("raised", flush=True)
        sys.stdout.flush()
        os._exit(0)  # the group is broken
    raise AssertionError("nothing was raised")


if __name__ == "__main__":
    main(globals(), timeout=60.0)
