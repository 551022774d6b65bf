"""Quantized collectives: `python collectives_program.py RANK WORLD STORE NAME...`.

The oracle is one process: it quantizes each rank's part by the public quantizer, decodes, adds in
FP32 in the order of ranks, and rounds once. Every rank can draw every rank's tensor.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from rank_program import main
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import hybridq
from hybridq.distributed import (
    all_gather,
    all_reduce,
    all_to_all,
    count_traffic,
    parallel_cross_entropy,
    reduce_scatter,
)

FORMATS = ("mxfp8", "nvfp4", "fp8", "fp8_block", "fp8_128x128", "mxfp6_e3m2", "mxfp4", "identity")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def drawn(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A rank's tensor, with rows of very different sizes."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(100 + rank))
    if x.numel():
        x *= torch.logspace(-3, 3, x.shape[0]).view(-1, *[1] * (x.dim() - 1)) * (rank + 1)
    return x.to(dtype)


def rounded(
    x: torch.Tensor,
    quantizer: str,
    dtype: torch.dtype = torch.float32,
    seed: torch.Tensor | None = None,
) -> torch.Tensor:
    """What x decodes to, quantized by itself."""
    if not x.numel():
        return x.to(dtype)
    own = hybridq.quantizer(hybridq.PlaneSpec.parse(quantizer), None)
    return own.quantize(x, seed=seed).tensor_storage.rowwise.dequantize(dtype).view(x.shape)


def added(parts: Sequence[torch.Tensor], dtype: torch.dtype, mean: bool = False) -> torch.Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total = total + part
    return (total / len(parts) if mean else total).to(dtype)


def same(got: torch.Tensor, want: torch.Tensor, text: object) -> None:
    assert got.dtype == want.dtype and got.shape == want.shape, (text, got.shape, want.shape)
    assert torch.equal(got, want), (text, (got.float() - want.float()).abs().max())


def flat_parts(x: torch.Tensor, quantizer: str, world: int) -> list[torch.Tensor]:
    """The parts of an all-reduce: whole blocks of the tensor as one row."""
    unit = hybridq.PlaneSpec.parse(quantizer).unit(1)
    size = -(-x.numel() // (world * unit)) * unit
    return [x.flatten()[rank * size : (rank + 1) * size] for rank in range(world)]


def values() -> None:
    """Every format and dtype, sizes that blocks do not divide, three shapes."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for number, fmt in enumerate(FORMATS):
        dtype = DTYPES[number % 3]
        for shape in ((world * 3, 40), (world * 2, 3, 33), (world * 48,), (world + 1, 70), (1, 32)):
            every = [drawn(r, *shape, dtype=dtype) for r in range(world)]
            text = (fmt, dtype, shape)
            chunks = [list(torch.chunk(x, world)) for x in every]
            chunks = [c + [c[0][:0]] * (world - len(c)) for c in chunks]
            for mean in (False, True):
                want = added([rounded(c[rank], fmt) for c in chunks], dtype, mean)
                op = "mean" if mean else "sum"
                same(reduce_scatter(every[rank], fmt, op=op), want, ("scatter", *text))
                parts = [flat_parts(x, fmt, world) for x in every]
                sums = [
                    added([rounded(p[r], fmt) for p in parts], dtype, mean) for r in range(world)
                ]
                want = torch.cat([rounded(s, fmt, dtype) for s in sums]).view(shape)
                same(all_reduce(every[rank], fmt, op=op), want, ("reduce", *text))
            want = torch.cat([rounded(x, fmt, dtype) for x in every])
            same(all_gather(every[rank], fmt, shared_amax=False), want, ("gather", *text))
            # The whole, quantized by one process.
            if fmt != "fp8_128x128" and len(shape) > 1:
                want = rounded(torch.cat(every), fmt, dtype)
                same(all_gather(every[rank], fmt), want, ("whole", *text))


def along() -> None:
    """Other dimensions than the first, groups in every form."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("x",))
    two = init_device_mesh("cpu", (1, world), mesh_dim_names=("a", "b"))
    groups = (None, mesh, (two, 1), (two, "b"), dist.group.WORLD, dist.group.WORLD.group_name)
    for fmt, group in zip(
        ("mxfp8", "nvfp4", "fp8", "mxfp8", "fp8_block", "mxfp8"), groups, strict=True
    ):
        for dim in (1, 2, -1):
            every = [drawn(r, 5, world * 2, world * 32) for r in range(world)]
            want = added(
                [rounded(x.chunk(world, dim)[rank].contiguous(), fmt) for x in every], torch.float32
            )
            same(reduce_scatter(every[rank], fmt, group, dim), want, (fmt, dim))
            want = rounded(torch.cat(every, dim), fmt)
            same(all_gather(every[rank], fmt, group, dim), want, (fmt, dim))


def uneven() -> None:
    """Uneven and empty parts; what is sent is exactly the planes' bytes."""
    rank, world = dist.get_rank(), dist.get_world_size()
    sizes = [5, 0, 3, 9][:world]
    for fmt in FORMATS:
        spec = hybridq.PlaneSpec.parse(fmt).resolve(torch.bfloat16)
        every = [drawn(r, sizes[r], 72, dtype=torch.bfloat16) for r in range(world)]
        own = [spec.nbytes(n, 72) if n else 0 for n in sizes]
        with count_traffic() as traffic:
            got = all_gather(every[rank], fmt, sizes=sizes, shared_amax=False)
        same(got, torch.cat([rounded(x, fmt, torch.bfloat16) for x in every]), fmt)
        # Traffic is the larger of what goes in and what comes out.
        assert traffic.nbytes_by_kind == {"all_to_all": max(sum(own), world * own[rank])}, traffic
        whole = [drawn(r, sum(sizes), 72, dtype=torch.bfloat16) for r in range(world)]
        parts = [x.split(sizes) for x in whole]
        with count_traffic() as traffic:
            got = reduce_scatter(whole[rank], fmt, sizes=sizes)
        want = added([rounded(p[rank], fmt) for p in parts], torch.bfloat16)
        same(got, want, fmt)
        assert traffic.nbytes_by_kind == {"all_to_all": max(sum(own), world * own[rank])}, traffic
        given = [[(i + 2 * j) % 4 for j in range(world)] for i in range(world)]
        every = [drawn(r, sum(given[r]), 72, dtype=torch.bfloat16) for r in range(world)]
        got = all_to_all(
            every[rank],
            fmt,
            output_split_sizes=[row[rank] for row in given],
            input_split_sizes=given[rank],
        )
        want = torch.cat(
            [
                rounded(x.split(n)[rank], fmt, torch.bfloat16)
                for x, n in zip(every, given, strict=True)
            ]
        )
        same(got, want, fmt)
        empty = torch.empty(0, 72)
        assert all_gather(empty, fmt).shape == (0, 72) and reduce_scatter(empty, fmt).numel() == 0
        assert all_reduce(empty, fmt).shape == (0, 72)


def ratios() -> None:
    """Bytes against BF16."""
    world = dist.get_world_size()
    x = torch.randn(world * 64, 1024, dtype=torch.bfloat16)
    expected = {"mxfp8": 1.03125 / 2, "nvfp4": 0.5625 / 2, "fp8_block": 1.03125 / 2, "fp8": 0.5}
    for fmt, ratio in expected.items():
        calls = (all_gather, reduce_scatter, all_to_all, all_reduce)
        for call in calls:
            found = {}
            for kind in (fmt, None):
                options = {"shared_amax": False} if call is all_gather else {}
                with count_traffic() as traffic:
                    call(x, kind, **options)
                found[kind] = traffic.nbytes
            # A scale or an amax of each message: four bytes.
            assert abs(found[fmt] / found[None] - ratio) < 1e-4, (fmt, call, found)


def gradients() -> None:
    """The backward of each is its dual, in a format of its own."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for fmt, back in (("mxfp8", "same"), ("mxfp8", "nvfp4"), ("nvfp4", None), ("fp8", "mxfp8")):
        own = {"same": fmt, None: "identity"}.get(back, back)
        whole = [drawn(r, world * 2, 64) for r in range(world)]
        part = [drawn(r, 2, 64) for r in range(world)]
        x = part[rank].clone().requires_grad_()
        all_gather(x, fmt, grad_quantizer=back).backward(whole[rank])
        sums = added([rounded(g.chunk(world)[rank], own) for g in whole], torch.float32)
        same(x.grad, sums, ("gather", fmt, back))
        x = whole[rank].clone().requires_grad_()
        reduce_scatter(x, fmt, grad_quantizer=back, op="mean").backward(part[rank])
        same(x.grad, rounded(torch.cat(part), own) / world, ("scatter", fmt, back))
        x = whole[rank].clone().requires_grad_()
        all_to_all(x, fmt, grad_quantizer=back).backward(whole[rank])
        want = torch.cat([rounded(g.chunk(world)[rank], own) for g in whole])
        same(x.grad, want, ("exchange", fmt, back))
        x = whole[rank].clone().requires_grad_()
        handle = all_reduce(x, fmt, grad_quantizer=back, async_op=True)
        (y,) = torch.autograd.grad(handle.wait(), x, whole[rank], create_graph=True)
        with torch.no_grad():
            same(y.detach(), all_reduce(whole[rank], own), ("reduce", fmt, back))


def stochastic() -> None:
    """Each rank has bits of its own, the oracle's, and their mean is the value."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for fmt in ("mxfp8;sr", "nvfp4;sr"):
        seed = torch.tensor([7])
        every = [drawn(r, world * 2, 64) for r in range(world)]
        parts = [
            rounded(x.chunk(world)[rank], fmt, seed=seed + r * world + rank)
            for r, x in enumerate(every)
        ]
        got = reduce_scatter(every[rank], hybridq.PlaneSpec.parse(fmt), seed=seed)
        same(got, added(parts, torch.float32), fmt)
        own = hybridq.PlaneSpec.parse(fmt)
        want = torch.cat([rounded(x, fmt, seed=seed + r * world) for r, x in enumerate(every)])
        same(all_gather(every[rank], own, seed=seed, shared_amax=False), want, fmt)
        # An all-reduce draws anew for the sums.
        every = [drawn(r, world, 64) for r in range(world)]
        sums = [
            added(
                [rounded(x[[n]], fmt, seed=seed + r * world + n) for r, x in enumerate(every)],
                torch.float32,
            )
            for n in range(world)
        ]
        later = seed + world * world
        want = torch.cat([rounded(x, fmt, seed=later + n * world) for n, x in enumerate(sums)])
        same(all_reduce(every[rank], own, seed=seed), want, fmt)
    # Unbiased: 0.3 lies between two codes of MXFP4 beside 5; its mean error falls with 1/sqrt(n).
    torch.manual_seed(3)  # the same on all ranks, whose errors must differ all the same
    own = hybridq.PlaneSpec.parse("mxfp4;sr")
    x = torch.full((64, 32), 0.3)
    x[:, 0] = 5.0
    total = torch.zeros(())
    count = 40
    for _ in range(count):
        total += reduce_scatter(x.repeat(world, 1), own)[:, 1:].mean() / world
    # A code is 0 or 0.5 here: a standard deviation of 0.245, over 64 * 31 * count * world draws.
    bound = 5 * 0.245 / (64 * 31 * count * world) ** 0.5
    assert abs(total.item() / count - 0.3) < bound, (total / count, bound)


def feedback() -> None:
    """With error feedback sums over steps are off by one rounding; without, by one for each."""
    rank, world = dist.get_rank(), dist.get_world_size()
    kept = hybridq.distributed.ErrorFeedback()
    steps = 12
    exact = torch.zeros(world * 2, 64, dtype=torch.float64)
    own = {name: torch.zeros(world * 2, 64, dtype=torch.float64) for name in ("with", "without")}
    by_hand = torch.zeros(2, 64)
    residuals = [torch.zeros(world * 2, 64) for _ in range(world)]
    of_sent, of_sums = (torch.zeros(world, world * 2, 64), torch.zeros(world, 2, 64))
    for step in range(steps):
        every = [drawn(r, world * 2, 64) + 0.01 * step for r in range(world)]
        exact += sum(x.double() for x in every)
        got = all_reduce(every[rank], "mxfp4", error_feedback=kept["w"])
        own["with"] += got
        of_sent += torch.stack(every)  # by hand: what is sent, and the sums, lack what was kept
        sent = torch.stack([rounded(x, "mxfp4") for x in of_sent])
        of_sent -= sent
        sums = [added([x.chunk(world)[n] for x in sent], torch.float32) for n in range(world)]
        of_sums += torch.stack(sums)
        made = torch.stack([rounded(x, "mxfp4") for x in of_sums])
        of_sums -= made
        same(got, made.flatten(0, 1), step)
        own["without"] += all_reduce(every[rank], "mxfp4")
        got = reduce_scatter(every[rank], "mxfp4", error_feedback=kept["v"])
        wanted = [x + r for x, r in zip(every, residuals, strict=True)]
        sent = [torch.cat([rounded(c, "mxfp4") for c in x.chunk(world)]) for x in wanted]
        residuals = [x - s for x, s in zip(wanted, sent, strict=True)]
        by_hand = added([s.chunk(world)[rank] for s in sent], torch.float32)
        same(got, by_hand, step)
    off = {name: (total - exact).abs().mean().item() for name, total in own.items()}
    assert off["with"] < 0.4 * off["without"], off
    assert len(kept) == 2 and kept.nbytes > 0
    state = kept.state_dict()
    other = hybridq.distributed.ErrorFeedback()
    other.load_state_dict(state)
    assert torch.equal(other["v"].sent, kept["v"].sent)
    # An overflow leaves no residual.
    x = torch.full((world * 2, 64), float("inf"))
    reduce_scatter(x, "mxfp4", error_feedback=kept["v"])
    assert kept["v"].sent.isfinite().all()


def planes() -> None:
    """Gathered planes are those of the whole, byte for byte."""
    rank, world = dist.get_rank(), dist.get_world_size()
    sizes = [128, 0, 256, 64][:world] if world > 2 else [128, 64]
    for text in ("mxfp8", "nvfp4", "fp8", "fp8_128x128", "nvfp4_16x16"):
        for quantizer in (text, hybridq.quantizer(text), hybridq.quantizer("mxfp8", text)):
            for dim in (0, 1):
                shapes = [(n, 96) if dim == 0 else (128, n) for n in sizes]
                every = [drawn(r, *shapes[r]) for r in range(world)]
                x = every[rank].clone().requires_grad_()
                got = all_gather(x, quantizer, dim=dim, sizes=sizes, as_planes=True)
                own = hybridq.quantizer(text, None) if isinstance(quantizer, str) else quantizer
                want = own.quantize(torch.cat(every, dim))
                for mine, other in zip(
                    got.tensor_storage.planes, want.tensor_storage.planes, strict=True
                ):
                    assert mine.direction == other.direction and mine.spec == other.spec
                    for name, buffer in other.buffers.items():
                        same(mine.buffers[name], buffer, (quantizer, dim, name))
                got.backward(torch.ones(got.shape))
                assert torch.equal(x.grad, torch.full_like(x, world)), (text, x.grad)
    try:
        all_gather(torch.ones(3, 40), hybridq.quantizer("mxfp8"), as_planes=True)
    except ValueError as error:
        assert "as_planes needs parts that end at the ends of blocks, 32 rows" in str(error), error
    else:
        raise AssertionError("nothing was raised")


def dtensors() -> None:
    """DTensors are named, and what to give instead: it was torch's "sharding strategy"."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x = DTensor.from_local(drawn(0, 32, 64), mesh, [Shard(0)])
    labels, linear = torch.zeros(32, dtype=torch.long), hybridq.Linear(64, 64)

    def under_a_recipe() -> None:
        with hybridq.autocast(recipe="mxfp8"):
            linear(x)

    calls = {
        "all_gather: x must be a plain tensor": lambda: all_gather(x, "mxfp8"),
        "all_reduce: x must be a plain tensor": lambda: all_reduce(x, "mxfp8"),
        "reduce_scatter: x must be a plain tensor": lambda: reduce_scatter(x, "mxfp8"),
        "all_to_all: x must be a plain tensor": lambda: all_to_all(x, "mxfp8"),
        "parallel_cross_entropy: logits must be a plain tensor": lambda: parallel_cross_entropy(
            x, labels, group=mesh
        ),
        "quantize: input must be a plain tensor": lambda: hybridq.quantize(x, "mxfp8"),
        "the input is a DTensor, and so must be the weight": under_a_recipe,
    }
    for text, call in calls.items():
        try:
            call()
        except (TypeError, RuntimeError) as error:
            assert text in str(error) and "to_local()" in str(error), error
        else:
            raise AssertionError(text)


def compiled() -> None:
    """One graph, with the bits of eager code, forward and backward."""
    rank = dist.get_rank()
    mxfp8 = hybridq.quantizer("mxfp8", None)

    def step(x: torch.Tensor) -> torch.Tensor:
        y = all_gather(x * 2, mxfp8, "0")
        y = all_to_all(y + 1, "mxfp8", "0")
        y = reduce_scatter(y.sin(), "nvfp4", "0", grad_quantizer="mxfp8")
        return all_reduce(y, "fp8", "0", op="mean")

    name = dist.group.WORLD.group_name
    assert name == "0", name
    results = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        x = drawn(rank, 4, 64).requires_grad_()
        y = function(x)
        y.square().sum().backward()
        results.append((y.detach(), x.grad))
    for got, want in zip(results[1], results[0], strict=True):
        same(got, want, "compiled")


def compiled_differ() -> None:
    """What ranks make graphs for is compared once, while they trace; and what graphs cannot do."""
    rank = dist.get_rank()
    eager = (
        lambda x: all_gather(x, "mxfp8_e5m2", "0"),
        lambda x: all_reduce(x[:, : 32 * (rank + 1)], "mxfp8_e5m2", "0"),
        lambda x: all_gather(x, "mxfp8", "0", as_planes=True).dequantize(),
        lambda x: all_reduce(x, "mxfp8", "0", error_feedback=kept["x"]),
    )
    texts = (
        r"all_gather: shape must be the same on all ranks, got graphs for \[1, 64\] on rank 0; "
        r"\[2, 64\] on rank 1",
        r"all_reduce: shape must be the same on all ranks",
        "as_planes is for eager code",
        "error feedback writes into an object, which compiled code must not",
    )
    kept = hybridq.distributed.ErrorFeedback()
    for function, text in zip(eager, texts, strict=True):
        rows = rank + 1 if "on rank 0" in text else 32
        try:
            torch.compile(function, fullgraph=True, backend="aot_eager")(torch.ones(rows, 64))
        except Exception as error:
            assert re.search(text, str(error)), error
        else:
            raise AssertionError(f"nothing was raised: {text}")


def compiled_symbolic() -> None:
    """Sizes that change make one graph with symbolic sizes."""
    rank = dist.get_rank()

    def step(x: torch.Tensor) -> torch.Tensor:
        return reduce_scatter(all_gather(x, "mxfp8"), "nvfp4")

    again = torch.compile(step, fullgraph=True, backend="aot_eager")
    for rows in (4, 6, 8):
        x = drawn(rank, rows, 64)
        same(again(x), step(x), rows)


def differ() -> None:
    """Ranks that differ, and one that refuses: the same error on every rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    x = torch.ones(world * 4, 64)
    calls = (
        (lambda: all_gather(x, ("mxfp8", "nvfp4")[rank % 2]), "formats must be the same"),
        (lambda: all_gather(x.to(DTYPES[rank % 2]), "mxfp8"), "dtype|formats"),
        (lambda: all_gather(x[: rank + 1], "mxfp8"), "shape must be the same.*give sizes="),
        (lambda: reduce_scatter(x, "mxfp8", op=("sum", "mean")[rank % 2]), "options"),
        (lambda: reduce_scatter(x, "mxfp8", dim=rank % 2), "dim must be the same"),
        (lambda: all_reduce(x, "mxfp8", grad_quantizer=(None, "mxfp8")[rank % 2]), "formats"),
        (lambda: all_gather(x, ("mxfp8", "mxpf8")[rank % 2]), "mxpf8"),
        (
            lambda: all_to_all(
                x,
                "mxfp8",
                output_split_sizes=[4] * world if rank else [4] * (world - 1) + [3],
                input_split_sizes=[4] * world,
            ),
            "must expect what another sends it, got 4 rows from rank",
        ),
        (lambda: (all_gather if rank % 2 else reduce_scatter)(x, "mxfp8"), "where must be"),
    )
    for call, text in calls:
        try:
            call()
        except (RuntimeError, ValueError) as error:
            assert re.search(text, str(error)), error
        else:
            raise AssertionError(f"nothing was raised: {text}")
    assert all_gather(x, "mxfp8").shape[0] == world * world * 4  # and all goes on


def late() -> None:
    """A call that is new to one rank alone: it raises, and the other one learns of its end."""
    rank = dist.get_rank()
    group = dist.new_group()
    store = group.get_group_store()
    store.set_timeout(timedelta(seconds=1 if rank == 0 else 10))
    x = torch.ones(4, 64)
    all_gather(x, "mxfp8", group)
    try:
        all_gather(x, "mxfp8" if rank else "nvfp4", group)
    except RuntimeError as error:
        if rank == 0:
            text = "a call that is new on rank 0 and that rank 1 did not come to"
            assert text in str(error), error
            os._exit(0)  # a rank that raises ends
    else:
        raise AssertionError("nothing was raised")
    assert rank  # the others' connections to it have closed
    os._exit(0)


if __name__ == "__main__":
    main(globals(), timeout=20.0)
