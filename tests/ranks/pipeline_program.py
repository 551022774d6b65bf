"""Pipelines of two to four stages: `python pipeline_program.py RANK WORLD STORE NAME...`.

What a pipeline computes is compared with one process that runs the microbatches in turn, with the
same planes at the same places.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from rank_program import main
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import hybridq
from hybridq.distributed import count_traffic, pipeline_stage, prepare_fsdp2
from hybridq.distributed.pipelines import stage as stage_module
from hybridq.estimate import Axes
from hybridq.estimate.axes import pipeline_moved
from hybridq.kernels.cpu import backend as backend_cpu
from hybridq.nn.delayed_scaling.state import states_of
from hybridq.recipes import DelayedScaling

WIDTH, ROWS, MICROBATCHES = 64, 16, 4
#: Their ranks have the r-th stage from the front and the r-th from the end.
V_SCHEDULES = (ScheduleZBVZeroBubble, ScheduleDualPipeV)
#: MXFP8 forward, NVFP4 backward, rounded to nearest: a pipeline draws other seeds than one process.
HYBRID = hybridq.recipe(fprop="mxfp8", dgrad="nvfp4", wgrad="nvfp4")


class Block(nn.Module):
    """Begins with a norm, as blocks do, and so takes values."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 96)
        self.down = nn.Linear(96, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def built(count: int, kind: Callable[[], nn.Module] = Block) -> list[nn.Module]:
    """Return the modules of all stages, the same on all ranks."""
    torch.manual_seed(0)
    return list(hybridq.convert(nn.Sequential(*(kind() for _ in range(count)))))


def chain() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def loss_of(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (y.float() - target.float()).square().mean()


def batch(number: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + number)
    x, target = torch.randn(2, MICROBATCHES * ROWS, WIDTH, generator=generator)
    return x * (1 + number), target


class Boundary(torch.autograd.Function):
    """One process's boundary: what a format keeps of an activation, and of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, formats: tuple[Any, Any], planes: bool) -> Any:
        ctx.backward_format = formats[1]
        if formats[0] is None:
            return x.clone()
        made = hybridq.quantize(x.detach(), formats[0], None)
        return made if planes else made.dequantize()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if ctx.backward_format is None:
            return grad, None, None
        return hybridq.quantize(grad, ctx.backward_format, None).dequantize(), None, None


class Oracle:
    """All stages in one process, the microbatches in turn."""

    def __init__(
        self, modules: list[nn.Module], formats: Any, planes: bool, count: int = MICROBATCHES
    ):
        self.modules = [copy.deepcopy(module) for module in modules]
        self.formats, self.planes, self.count = formats, planes, count
        self.parameters = [p for module in self.modules for p in module.parameters()]

    def step(self, recipe: Any, number: int = 0) -> list[torch.Tensor]:
        losses, sources = [], zip(*(t.chunk(self.count) for t in batch(number)), strict=True)
        for chunk, (x, target) in enumerate(sources):
            with hybridq.autocast(
                enabled=recipe is not None, recipe=recipe, is_first_microbatch=chunk == 0
            ):
                for place, module in enumerate(self.modules):
                    if place:
                        x = Boundary.apply(x, self.formats, self.planes)
                    x = module(x)
            losses.append(loss_of(x, target))
            losses[-1].backward()
        for parameter in self.parameters:
            parameter.grad /= self.count
        return losses


def microbatches_of(kind: Any) -> int:
    """As many as DualPipeV takes at least, or MICROBATCHES."""
    return (
        max(MICROBATCHES, 2 * dist.get_world_size()) if kind is ScheduleDualPipeV else MICROBATCHES
    )


def schedule_of(kind: Any, stages: list[Any]) -> Any:
    is_single = kind in (Schedule1F1B, ScheduleGPipe)
    return kind(stages[0] if is_single else stages, microbatches_of(kind), loss_fn=loss_of)


def places_of(kind: Any) -> tuple[int, ...]:
    """Stages of this rank, in a pipeline of all ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if kind in (Schedule1F1B, ScheduleGPipe):
        return (rank,)
    return (rank, 2 * world - 1 - rank if kind in V_SCHEDULES else rank + world)


def run_step(
    schedule: Any, places: tuple[int, ...], last: int, recipe: Any, number: int = 0
) -> Any:
    x, target = batch(number)
    args = (x,) if 0 in places else ()
    losses: list[torch.Tensor] = []
    with hybridq.autocast(enabled=recipe is not None, recipe=recipe):
        if last in places:
            schedule.step(*args, target=target, losses=losses)
        else:
            schedule.step(*args)
    return losses


def check_grads(module: nn.Module, want: nn.Module, what: str) -> None:
    """Equal, but for the order in which microbatches' FP32 gradients are added."""
    for (name, p), q in zip(module.named_parameters(), want.parameters(), strict=True):
        error = (p.grad - q.grad).norm() / q.grad.norm()
        assert error < 1e-6, f"{what}: gradient of {name} differs by {error:.2e}"


def check(
    kind: Any,
    recipe: Any,
    communication: Any,
    block: Callable[[], nn.Module] = Block,
    steps: int = 1,
    **options: Any,
) -> None:
    """A pipeline of all ranks has the losses and gradients of one process."""
    what = f"{kind.__name__}, {recipe}, {communication}"
    rank, world, places = dist.get_rank(), dist.get_world_size(), places_of(kind)
    count = world * len(places)
    modules = built(count, block)
    formats = communication if isinstance(communication, tuple) else (communication,) * 2
    if communication == "recipe":
        formats = {"mxfp8": ("mxfp8", "mxfp8"), HYBRID: ("mxfp8", "nvfp4")}[recipe]
    oracle = Oracle(modules, formats, block is chain, microbatches_of(kind))
    options = {"communication": communication, **options}
    stages = [pipeline_stage(modules[i], i, count, "cpu", **options) for i in places]
    schedule = schedule_of(kind, stages)
    both = [[modules[i] for i in places], oracle.modules]
    optimizers = [
        torch.optim.SGD([p for m in side for p in m.parameters()], lr=0.05) for side in both
    ]
    for number in range(steps):
        torch.manual_seed(5)
        losses = run_step(schedule, places, count - 1, recipe, number)
        want = oracle.step(recipe, number)
        if losses:
            found = torch.stack(losses).detach()
            assert torch.equal(found, torch.stack(want).detach()), f"{what}: {found}, {want}"
        for i in places:
            check_grads(modules[i], oracle.modules[i], f"{what}, stage {i} of rank {rank}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for i in places:  # the next step begins alike, in every bit
            oracle.modules[i].load_state_dict(modules[i].state_dict())
        share(oracle.modules, places)


def share(modules: list[nn.Module], places: tuple[int, ...]) -> None:
    """Give every rank the weights of all stages."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, {i: modules[i].state_dict() for i in places})
    for part in found:
        for i, state in part.items():
            if i not in places:
                modules[i].load_state_dict(state)


def schedules() -> None:
    """Every schedule, with values, with planes, and with other planes each way."""
    check(Schedule1F1B, HYBRID, None, steps=2)
    check(Schedule1F1B, HYBRID, "recipe", steps=2)
    check(ScheduleInterleaved1F1B, "mxfp8", ("mxfp8", "mxfp8_e5m2"))
    check(ScheduleInterleavedZeroBubble, HYBRID, "mxfp8")
    check(ScheduleZBVZeroBubble, "mxfp8", ("mxfp8_e5m2", "fp8_block"))
    check(ScheduleDualPipeV, HYBRID, "recipe")
    with mock.patch.object(stage_module, "is_split_right", lambda: False):  # as with torch 2.10
        check(ScheduleZBVZeroBubble, HYBRID, "mxfp8")


def formats() -> None:
    """Formats with scales of blocks and of tensors, of two levels, and plain ones."""
    for name in ("nvfp4", "fp8_e4m3", "bf16", ("mxfp8", None), (None, "mxfp4"), "mxfp6_e2m3"):
        check(Schedule1F1B, "mxfp8", name)
    check(ScheduleGPipe, None, "mxfp8")


def taken() -> None:
    """A stage that begins with a Linear takes the bytes that arrive: they are not encoded again."""
    for recipe in ("mxfp8", HYBRID, "fp8_block"):
        check(Schedule1F1B, recipe, "mxfp8", chain, steps=2)
    check(ScheduleZBVZeroBubble, HYBRID, "mxfp8", chain)
    check(Schedule1F1B, "mxfp8", "mxfp8", Block, takes_planes=True)


@contextmanager
def encodes() -> Any:
    """Record what the CPU core encodes inside: rows, columns, and which planes of them."""
    core = backend_cpu.core
    found: list[tuple[tuple[int, int], bool, bool]] = []

    class Spy:
        def __getattr__(self, name: str) -> Any:
            return getattr(core, name)

        def encode_from_scratch(self, x: int, dtype: int, *rest: Any) -> Any:
            found.append((rest[:2], rest[4] is not None, rest[5] is not None))
            return core.encode_from_scratch(x, dtype, *rest)

    backend_cpu.core = Spy()
    try:
        yield found
    finally:
        backend_cpu.core = core


def counts() -> None:
    """Encodes and bytes of a step, counted, beside BF16."""
    rank, world = dist.get_rank(), dist.get_world_size()
    receives, sends = rank > 0, rank < world - 1
    values = MICROBATCHES * ROWS * WIDTH
    mx, four = values * 33 // 32, values * 9 // 16 + 4 * MICROBATCHES
    for communication, there, back in (
        (None, 2 * values, 2 * values),
        ("mxfp8", mx, mx),
        (("mxfp8", "nvfp4"), mx, four),
    ):
        for keeps in (True, False):
            module = built(world, chain)[rank].bfloat16()
            options = {"communication": communication, "keep_weights": keeps}
            stage = pipeline_stage(module, rank, world, "cpu", **options)
            schedule = schedule_of(Schedule1F1B, [stage])
            x, target = (one.bfloat16() for one in batch())

            def step(schedule: Any = schedule, x: Any = x, target: Any = target) -> None:
                with hybridq.autocast(recipe="mxfp8"):
                    schedule.step(*(() if receives else (x,)), target=target)

            step()
            with encodes() as found:
                step()
            with count_traffic() as traffic:
                step()
            what = (communication, keeps, found)
            # The first stage's weight has no columnwise plane: its input needs no gradient.
            weights = found.count(((WIDTH, WIDTH), True, receives))
            assert weights == (1 if keeps else MICROBATCHES), what
            both = found.count(((ROWS, WIDTH), True, True))
            row = found.count(((ROWS, WIDTH), True, False))
            col = found.count(((ROWS, WIDTH), False, True))
            planes = 2 * both + row + col
            takes = communication is not None
            # An input and a gradient have two planes each, of the first stage's gradient one; the
            # wire has one more of each that is sent. Of an input that arrives as a plane only the
            # columnwise one is made.
            inside = 2 + 1 + int(receives) - int(takes and receives)
            outside = int(takes) * (int(receives) + int(sends))
            assert planes == MICROBATCHES * (inside + outside), (planes, inside, outside, what)
            assert not (takes and receives) or col >= MICROBATCHES, what
            want = {
                "send": there * sends + back * receives,
                "recv": there * receives + back * sends,
            }
            assert traffic.nbytes_by_kind == want, (traffic, want, what)


def planned() -> None:
    """The first rank sends and receives what a plan says, in every schedule."""
    rank, world = dist.get_rank(), dist.get_world_size()
    names = {
        "gpipe": ScheduleGPipe,
        "1f1b": Schedule1F1B,
        "interleaved": ScheduleInterleaved1F1B,
        "interleaved_zero_bubble": ScheduleInterleavedZeroBubble,
        "zbv": ScheduleZBVZeroBubble,
    }
    for name, kind in names.items():
        for communication in (None, "recipe") if name == "1f1b" else ("mxfp8",):
            places = places_of(kind)
            count = world * len(places)
            modules = built(count)
            options = {"communication": communication}
            stages = [pipeline_stage(modules[i], i, count, "cpu", **options) for i in places]
            schedule = schedule_of(kind, stages)
            run_step(schedule, places, count - 1, HYBRID)
            with count_traffic() as traffic:
                run_step(schedule, places, count - 1, HYBRID)
            axes = Axes(pp=world, microbatches=MICROBATCHES, schedule=name, **options)
            tokens = MICROBATCHES * ROWS
            with hybridq.autocast(recipe=HYBRID):
                rows = pipeline_moved(axes, tokens, WIDTH, 1, torch.float32)
            want = Counter[str]()
            for row in rows:
                want[row.kind] += row.nbytes
            if rank == 0:
                assert traffic.nbytes_by_kind == dict(want), (name, communication, traffic, want)


def histories(module: nn.Module) -> dict[str, torch.Tensor]:
    return {
        f"{name}:{part}:{key}": tensor
        for name, one in module.named_modules()
        for part, state in states_of(one).items()
        for key, tensor in state.exported().items()
    }


def delayed() -> None:
    """Histories are those of one process: a stage's own, and nothing that torch made up."""
    world = dist.get_world_size()
    recipe = DelayedScaling(amax_history_len=3)
    for kind in (Schedule1F1B, ScheduleInterleaved1F1B, ScheduleZBVZeroBubble):
        places = places_of(kind)
        count = world * len(places)
        modules = built(count)
        oracle = Oracle(modules, (None, None), False)
        # A module that no optimizer holds would be one that all ranks have.
        modules = {i: modules[i] for i in places}
        stages = [pipeline_stage(modules[i], i, count, "cpu") for i in places]
        schedule = schedule_of(kind, stages)
        mine = torch.optim.SGD([p for i in places for p in modules[i].parameters()], lr=0.02)
        for module in oracle.modules:  # as one process: no ranks to reduce over
            for one in module.modules():
                one.__dict__["amax_ranks"] = ""
        whole = torch.optim.SGD(oracle.parameters, lr=0.02)
        for number in range(3):
            losses = run_step(schedule, places, count - 1, recipe, number)
            want = oracle.step(recipe, number)
            if losses:
                assert torch.equal(torch.stack(losses), torch.stack(want)), (kind, number)
            for i in places:
                check_grads(modules[i], oracle.modules[i], f"{kind}, step {number}, stage {i}")
            for optimizer in (mine, whole):
                optimizer.step()
                optimizer.zero_grad()
            for i in places:
                have, own = histories(modules[i]), histories(oracle.modules[i])
                assert have.keys() == own.keys() and len(own), (kind, i)
                for key, tensor in own.items():
                    assert torch.equal(have[key], tensor), (kind, number, key, have[key], tensor)
                oracle.modules[i].load_state_dict(modules[i].state_dict())
            share(oracle.modules, places)


def grid() -> None:
    """Two stages of two ranks each: FSDP2 inside, planes between and gathered, scales delayed."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    place = mesh.get_local_rank("pp")
    for recipe in (HYBRID, DelayedScaling(amax_history_len=2)):
        modules = built(2)
        oracle = Oracle(modules, ("mxfp8", "mxfp8"), False)
        for module in oracle.modules:
            for one in module.modules():
                one.__dict__["amax_ranks"] = ""
        own = fully_shard(prepare_fsdp2(modules.pop(place)), mesh=mesh["dp"])
        del modules  # of another stage
        stage = pipeline_stage(
            own, place, 2, "cpu", group=mesh.get_group("pp"), communication="mxfp8",
            replicas=mesh["dp"],
        )  # fmt: skip
        schedule = schedule_of(Schedule1F1B, [stage])
        optimizer = torch.optim.SGD(own.parameters(), lr=0.02)
        whole = torch.optim.SGD(oracle.parameters, lr=0.02)
        for number in range(2):
            losses = run_step(schedule, (place,), 1, recipe, number)
            want = oracle.step(recipe, number)
            if losses:  # weights of later steps differ by the order of sums
                found, right = torch.stack(losses), torch.stack(want)
                is_same = (
                    torch.equal(found, right) if not number else torch.allclose(found, right, 1e-3)
                )
                assert is_same, (recipe, number, found, right)
            for (name, p), q in zip(
                own.named_parameters(), oracle.modules[place].parameters(), strict=True
            ):
                error = (p.grad.full_tensor() - q.grad).norm() / q.grad.norm()
                assert error < (1e-2 if number else 1e-6), (recipe, number, name, error)
            for one in (optimizer, whole):
                one.step()
                one.zero_grad()
        if isinstance(recipe, DelayedScaling):
            have, want_histories = histories(own), histories(oracle.modules[place])
            assert have.keys() == want_histories.keys() and len(have), (
                list(have),
                list(want_histories),
            )


def tensor_parallel() -> None:
    """Two stages whose matrices two ranks share: one process, but for the order of FP32 sums."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    place, modules = mesh.get_local_rank("pp"), built(2)
    oracle = Oracle(modules, ("mxfp8", "mxfp8"), False)
    own = parallelize_module(
        modules.pop(place), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
    )
    options = {"communication": "mxfp8", "replicas": mesh["tp"]}
    stage = pipeline_stage(own, place, 2, "cpu", group=mesh.get_group("pp"), **options)
    losses = run_step(schedule_of(Schedule1F1B, [stage]), (place,), 1, HYBRID)
    want = oracle.step(HYBRID)
    if losses:
        assert torch.allclose(torch.stack(losses), torch.stack(want), rtol=1e-3), (losses, want)
    pairs = zip(own.named_parameters(), oracle.modules[place].parameters(), strict=True)
    for (name, p), q in pairs:
        grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        error = (grad - q.grad).norm() / q.grad.norm()
        assert error < 2e-2, (name, error)


if __name__ == "__main__":
    main(globals(), timeout=60.0)
