"""Masters in shards of flat buffers: `python flat_masters_program.py RANK WORLD STORE NAME...`.

Every plane is compared with that of the whole master quantized on one rank, byte for byte.
"""

from __future__ import annotations

import copy
import itertools
import re
from typing import Any

import torch
import torch.distributed as dist
from rank_program import logged, main

import hybridq
from hybridq.distributed import (
    FlatCodes,
    post_all_gather_processing,
    quantize_master_weights,
)

Q = hybridq
#: Shapes: aligned, odd, smaller than a block, one row, a column, blocks over all ranks.
SHAPES = ((64, 96), (37, 45), (3, 5), (1, 70), (41, 1), (130, 34))


def pair(row: str, col: str = "", **options: Any) -> Q.Quantizer:
    """Return a quantizer of planes given by format, with options behind a semicolon."""
    specs = (Q.PlaneSpec.parse(row), Q.PlaneSpec.parse(col or row))
    return Q.Quantizer(*specs, **options)


def quantizers() -> dict[str, Any]:
    """Every format in both directions, pairs of them, and their options."""
    found = {name: pair(name) for name in Q.formats.names()}
    for row, col in (
        ("mxfp8", "nvfp4"), ("nvfp4", "mxfp8"), ("fp8_1x128", "mxfp8"), ("mxfp8", "bf16"),
        ("bf16", "mxfp8"), ("fp8_e4m3", "nvfp4"), ("nvfp4_16x16", "fp8_e5m2"),
        ("nvfp4;rows", "mxfp8"), ("mxfp8", "nvfp4;rows"), ("fp32", "fp8_128x128"),
    ):  # fmt: skip
        found[f"{row} | {col}"] = pair(row, col)
        found[f"{row} > {col}"] = pair(row, col, columnwise_source="rowwise_dequantized")
    for text in ("nvfp4;rht", "nvfp4;4o6=mae;bound=256", "nvfp4_16x16;4o6=mse"):
        found[text] = pair("mxfp8", text)
    for name in ("mxfp8", "nvfp4_16x16"):
        found[f"{name}, rowwise"] = pair(name).with_usage(columnwise=False)
        found[f"{name}, columnwise"] = pair(name).with_usage(rowwise=False)
    return found


def deal(flat: FlatCodes, whole: list[torch.Tensor]) -> tuple[list[Any], list[Any]]:
    """Return this rank's ranges of masters, in equal parts of the flat order."""
    part = flat.numel // dist.get_world_size()
    low = dist.get_rank() * part
    masters: list[Any] = []
    starts: list[Any] = []
    for one, values in zip(flat.held, whole, strict=True):
        start = max(low, one.offset) - one.offset
        stop = min(low + part, one.offset + one.numel) - one.offset
        masters.append(values.reshape(-1)[start:stop] if start < stop else None)
        starts.append(start if start < stop else None)
    return masters, starts


def gather(flat: FlatCodes) -> None:
    for codes in flat.buffers:
        mine = codes.chunk(dist.get_world_size())[dist.get_rank()]
        dist.all_gather(list(codes.chunk(dist.get_world_size())), mine.clone())


def placed(params: list[Any], gap: int = 0) -> FlatCodes:
    ends = list(itertools.accumulate(p.numel() + gap for p in params))
    unit = 2 * dist.get_world_size()
    return FlatCodes(params, [0, *ends[:-1]], -(-ends[-1] // unit) * unit)


def nbytes(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def planes_equal(ours: Any, theirs: Any, what: str) -> None:
    for plane in theirs.tensor_storage.planes:
        mine = ours.tensor_storage.plane(plane.direction)
        for name, buffer in plane.buffers.items():
            same = torch.equal(nbytes(mine.buffers[name]), nbytes(buffer))
            assert same, f"{what}: {plane.direction} {name}"


def update(params: list[Any], whole: list[torch.Tensor], flat: FlatCodes) -> None:
    masters, starts = deal(flat, whole)
    quantize_master_weights(params, masters, starts, None)
    gather(flat)
    post_all_gather_processing(params)


def values(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return made * torch.logspace(-3, 3, shape[-1])


def matrix(only: str = "") -> None:
    """Every format and pair, several parameters in one flat buffer, cut anywhere."""
    for number, (name, quantizer) in enumerate(quantizers().items()):
        shapes = SHAPES[number % 3 :: 2] if only else SHAPES
        params = [quantizer(torch.ones(shape, dtype=torch.bfloat16)) for shape in shapes]
        theirs = [copy.deepcopy(one) for one in params]
        flat = placed(params, gap=number % 4)
        for step in range(2):
            whole = [values(shape, 10 * step + i) for i, shape in enumerate(shapes)]
            update(params, whole, flat)
            for one, other, master in zip(params, theirs, whole, strict=True):
                other.quantize_(master)
                planes_equal(one, other, f"{name}, {list(one.shape)}, step {step}")


def specials() -> None:
    """NaN, infinities, zeros and the smallest numbers, at the ends of ranges."""
    for name in ("mxfp8", "nvfp4", "nvfp4_16x16", "fp8_e4m3", "fp8_128x128", "nvfp4;rows"):
        for special in (float("nan"), -float("nan"), float("inf"), -float("inf"), 0.0, 1e-45):
            params = [pair(name)(torch.zeros(33, 46))]
            whole = [values((33, 46), 3)]
            middle = whole[0].numel() // dist.get_world_size()
            whole[0].view(-1)[middle - 1 : middle + 1] = special
            update(params, whole, placed(params))
            planes_equal(params[0], pair(name)(whole[0]), f"{name}, {special}")


def kinds() -> None:
    """Stacks of matrices, given scales, groups of a quantizer's own, tensors of three axes."""
    for name in ("mxfp8", "nvfp4", "nvfp4_16x16", "fp8_e4m3", "mxfp8|nvfp4"):
        quantizer = pair(*name.split("|"))
        whole = [values((3, 21, 34), 1), values((3, 21, 34), 2)]
        params = [
            quantizer.quantize_stack(torch.zeros(3, 21, 34)),
            quantizer(torch.zeros(3, 21, 34)),
        ]
        update(params, whole, placed(params))
        planes_equal(params[0], quantizer.quantize_stack(whole[0]), f"{name}, stack")
        planes_equal(params[1], quantizer(whole[1]), f"{name}, three axes")
    given = [Q.Float8Quantizer(torch.full((1,), 3.0), torch.zeros(1)) for _ in range(2)]
    params, master = [given[0](torch.zeros(33, 20))], values((33, 20), 5)
    update(params, [master], placed(params))
    planes_equal(params[0], given[1](master), "given scale")
    assert torch.equal(given[0].amax, given[1].amax) and given[0].amax > 0
    own = values((33, 20), dist.get_rank())
    group = pair("nvfp4", amax_group=dist.group.WORLD.group_name)
    params = [group(torch.zeros(33, 20))]
    flat = FlatCodes(params, [0])
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    quantize_master_weights(params, [own], [0], alone)
    post_all_gather_processing(params)
    planes_equal(params[0], group(own), "a group of its own")
    assert flat.numel == own.numel()


def state() -> None:
    """Parameters stay until the codes are there; writes are seen; two collectives a call."""
    params = [pair("mxfp8", "nvfp4")(torch.ones(64, 96)) for _ in range(3)]
    before, whole = copy.deepcopy(params), [values((64, 96), i) for i in range(3)]
    flat = placed(params)
    masters, starts = deal(flat, whole)
    calls: list[int] = []
    true = dist.all_reduce

    def counted(tensor: Any, *args: Any) -> Any:
        calls.append(tensor.numel())
        return true(tensor, *args)

    dist.all_reduce = counted
    for _ in range(2):
        quantize_master_weights(params, masters, starts, None)
    dist.all_reduce = true
    maxima = 3 * 64 * 96 // 32 + 3 * 64 * 96 // 16
    assert calls == [1, maxima] * 2, calls
    for one, old in zip(params, before, strict=True):
        planes_equal(one, old, "before the gather")
    versions = [one._version for one in params]
    gather(flat)
    post_all_gather_processing([*params, torch.zeros(2)])
    assert all(one._version > old for one, old in zip(params, versions, strict=True))
    copied = copy.deepcopy(params[0])
    try:
        post_all_gather_processing([copied])
    except ValueError as error:
        assert "lies in none" in str(error)
    else:
        raise AssertionError("a copy lies in a flat buffer")
    with logged() as said:
        transformed = pair("mxfp6_e3m2;rht")
        FlatCodes([transformed(torch.ones(4, 4))], [0])
        FlatCodes([transformed(torch.ones(4, 4))], [0])
    assert len(said) == int(dist.get_rank() == 0) and all("Hadamard" in one for one in said)


def faults() -> None:
    """A fault of one rank is an error on every rank, and the next call works."""
    rank, world = dist.get_rank(), dist.get_world_size()
    params = [pair("nvfp4")(torch.ones(32, 33)) for _ in range(2)]
    whole = [values((32, 33), i) for i in range(2)]
    flat = placed(params)
    masters, starts = deal(flat, whole)
    own = next(i for i, one in enumerate(masters) if one is not None)
    later = pair("nvfp4")(torch.ones(32, 33))

    def changed(given: list[Any], value: Any, where: int = own) -> list[Any]:
        return [value if i == where and rank == world - 1 else x for i, x in enumerate(given)]

    for error, text, call in (
        (TypeError, "must be float32", (params, changed(masters, masters[own].half()), starts)),
        (TypeError, "must be quantized", (changed(params, torch.ones(2)), masters, starts)),
        (ValueError, "begin at an offset from 0 to", (params, masters, changed(starts, 1056))),
        (ValueError, "begin at an offset from 0 to", (params, masters, changed(starts, None))),
        (ValueError, "begin at an offset from 0 to", (params, masters, changed(starts, -2))),
        (ValueError, "a master and an offset", (params, masters[: 2 - (rank == 0)], starts)),
        (ValueError, "lies in none", (changed(params, later), masters, starts)),
        (ValueError, "must be given once", (changed(params, params[1 - own]), masters, starts)),
        (ValueError, "got none of values", (params, changed(masters, None), starts)),
        (
            ValueError,
            "the same parameters, got",
            (params[: 1 + (rank > 0)], masters[: 1 + (rank > 0)], starts[: 1 + (rank > 0)]),
        ),
        (
            ValueError,
            r"got values from \d+ on ranks",
            (params, [one.reshape(-1) for one in whole], [0, 0]),
        ),
    ):  # fmt: skip
        try:
            quantize_master_weights(*call, None)
        except error as raised:
            assert re.search(text, str(raised)), f"{text}: {raised}"
        else:
            raise AssertionError(f"nothing said {text}")
    cut = 501  # odd: two codes of one byte lie on two ranks
    ends = [0] + [cut] * (world - 1) + [1056]
    low, high = ends[rank], ends[rank + 1]
    try:
        part = whole[0].reshape(-1)[low:high]
        quantize_master_weights(params[:1], [part], [low], None)
    except ValueError as raised:
        assert "even value, got 501" in str(raised), raised
    else:
        raise AssertionError("a byte lay on two ranks")
    update(params, whole, flat)
    for one, master in zip(params, whole, strict=True):
        planes_equal(one, pair("nvfp4")(master), "after the faults")
    if rank == 0:
        params[0].update_usage(columnwise_usage=False)
    try:
        quantize_master_weights(params, masters, starts, None)
    except ValueError as raised:
        assert "as they were" in str(raised) and "(on rank 0)" in str(raised), raised
    else:
        raise AssertionError("a plane that is gone was not missed")


def loop(recipe: str) -> None:
    """A distributed optimizer against one process: every loss and every plane."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    with Q.quantized_model_init(recipe, preserve_high_precision_init_val=True):
        kind = {"bias": False, "dtype": torch.bfloat16}
        layers = (Q.Linear(40, 67, **kind), torch.nn.GELU(), Q.Linear(67, 24, **kind))
        model = torch.nn.Sequential(*layers)
    alone = copy.deepcopy(model)
    # Sums of two values, and of four equal ones, are the same in every order.
    dtype = torch.float32 if world == 3 else torch.bfloat16
    params = list(model.parameters())
    flat = placed(params)
    part = flat.numel // world
    start = [p.get_high_precision_init_val().float() for p in params]
    whole = torch.nn.Parameter(torch.zeros(flat.numel))
    for one, values in zip(flat.held, start, strict=True):
        whole.data[one.offset :][: one.numel] = values.view(-1)
    master = torch.nn.Parameter(whole.detach()[rank * part :][:part].clone())
    ours, theirs = (torch.optim.AdamW([one], 1e-2, foreach=False) for one in (master, whole))

    def gradients(of: torch.nn.Module, step: int, number: int) -> tuple[float, torch.Tensor]:
        torch.manual_seed(step + 100 * number * (world == 2))  # of stochastic rounding, too
        x = torch.randn(32, 40).bfloat16()
        with Q.autocast(recipe=recipe):
            loss = of(x).float().square().mean()
        loss.backward()
        found = torch.zeros(flat.numel, dtype=dtype)
        for one, own in zip(flat.held, of.parameters(), strict=True):
            found[one.offset :][: one.numel] = own.grad.view(-1)
            own.grad = None
        return loss.item(), found

    for step in range(4):
        loss, grads = gradients(model, step, rank)
        mine = torch.empty(part, dtype=dtype)
        dist.reduce_scatter(mine, list(grads.chunk(world)))
        master.grad = mine.float() / world
        ours.step()
        every = [gradients(alone, step, number) for number in range(world)]
        whole.grad = sum(one for _, one in every).float() / world
        theirs.step()
        assert loss == every[rank][0], f"{recipe}: losses differ in step {step}"
        quantize_master_weights(params, *deal_flat(flat, master.detach()), None)
        gather(flat)
        post_all_gather_processing(params)
        for one, mine, own in zip(flat.held, params, alone.parameters(), strict=True):
            with torch.no_grad():
                own.quantize_(whole[one.offset :][: one.numel].view(one.shape).detach())
            planes_equal(mine, own, f"{recipe}, step {step}")


def deal_flat(flat: FlatCodes, master: torch.Tensor) -> tuple[list[Any], list[Any]]:
    """Return the ranges of parameters that this rank's part of the flat order holds."""
    low = dist.get_rank() * master.numel()
    masters, starts = [], []
    for one in flat.held:
        first = min(max(low, one.offset), one.offset + one.numel)
        last = max(first, min(low + master.numel(), one.offset + one.numel))
        masters.append(master[first - low : last - low])
        starts.append(first - one.offset)
    return masters, starts


if __name__ == "__main__":
    main(globals())
