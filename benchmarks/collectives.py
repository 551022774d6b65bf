"""Error and bytes of quantized collectives beside BF16: python benchmarks/collectives.py

Run on 2 and 4 processes with gloo, and computed by one process up to 1024 ranks (`modelled`): a
part of each rank's gradient, quantized, decoded and added as a reduce-scatter does it, and beside
it a ring that quantizes its partial sum at every rank. No times: a loaded machine will do.

Errors are the root mean square of the difference to sums in FP64, over that of the sums; values
are normal, rows of very different sizes, ranks independent of each other. Bytes are what
collectives are given, over those of the same collective in BF16.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import tempfile
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from timing import cpu_name, machine_slug

import hybridq
from hybridq.distributed import all_gather, all_reduce, count_traffic, reduce_scatter

RESULTS = Path(__file__).parent / "results"
FORMATS = ("mxfp8", "fp8_block", "fp8", "mxfp6_e3m2", "nvfp4", "mxfp4")
RANKS = (2, 4)
MODELLED = (2, 4, 16, 64, 256, 1024)
#: Of a gradient, for each rank one part of its rows.
ROWS, COLS = 64, 1024


def gradient(rank: int, rows: int) -> torch.Tensor:
    """A rank's gradient, FP32 `[rows, COLS]`."""
    x = torch.randn(rows, COLS, generator=torch.Generator().manual_seed(rank))
    return x * torch.logspace(-2, 0, ROWS).repeat(rows // ROWS)[:, None]


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """The root mean square of an error over that of what is wanted."""
    return float((got.double() - want).square().mean().sqrt() / want.square().mean().sqrt())


def _plain_reduce_scatter(x: torch.Tensor) -> torch.Tensor:
    part = x.new_empty(x.shape[0] // dist.get_world_size(), x.shape[1])
    dist.reduce_scatter_tensor(part, x)
    return part


def _plain_all_reduce(x: torch.Tensor) -> torch.Tensor:
    made = x.clone()
    dist.all_reduce(made)
    return made


def on_rank(rank: int, world: int, store: str, answers: Any) -> None:
    """Measure as one rank; rank 0 answers."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    own = gradient(rank, world * ROWS)
    exact = sum(gradient(r, world * ROWS).double() for r in range(world))
    every = torch.cat([gradient(r, world * ROWS) for r in range(world)]).double()
    part = exact.chunk(world)[rank]
    x = own.bfloat16()
    bf16 = {
        "all_gather": (lambda: all_gather(x, None), every),
        "reduce_scatter": (lambda: _plain_reduce_scatter(x), part),
        "all_reduce": (lambda: _plain_all_reduce(x), exact),
    }
    found: dict[str, Any] = {"bf16": {}}
    for name, (call, want) in bf16.items():
        found["bf16"][name] = {"error": relative(call(), want)}
    calls: dict[str, tuple[Callable[..., Any], torch.Tensor]] = {
        "all_gather": (all_gather, every),
        "reduce_scatter": (reduce_scatter, part),
        "all_reduce": (all_reduce, exact),
    }
    for fmt in FORMATS:
        found[fmt] = {}
        for name, (function, want) in calls.items():
            with count_traffic() as traffic:
                got = function(own, fmt)
            with count_traffic() as plain:
                function(x, None)
            share = traffic.nbytes / plain.nbytes
            found[fmt][name] = {"error": relative(got, want), "bytes_of_bf16": share}
    if rank == 0:
        answers.put(found)
    dist.barrier()
    dist.destroy_process_group()


def measured(world: int) -> dict[str, Any]:
    """What `world` processes find."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=on_rank, args=(rank, world, f"{folder}/store", answers))
            for rank in range(world)
        ]
        for one in ranks:
            one.start()
        found: dict[str, Any] = answers.get(timeout=120)
        for one in ranks:
            one.join()
    return found


def modelled(fmt: str) -> dict[str, dict[str, float]]:
    """By the number of ranks: errors of one part, one hop, two hops, and a hop for each rank."""

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return hybridq.quantize(x, fmt, None).dequantize()

    rows: dict[str, dict[str, float]] = {}
    total, ring = torch.zeros(ROWS, COLS), torch.zeros(ROWS, COLS)
    exact = torch.zeros(ROWS, COLS, dtype=torch.float64)
    for rank in range(max(MODELLED)):
        own = gradient(rank, ROWS)
        total += rounded(own)
        ring = rounded(ring) + own if rank else own
        exact += own
        if rank + 1 in MODELLED:
            rows[str(rank + 1)] = {
                "reduce_scatter": relative(total, exact),
                "all_reduce": relative(rounded(total), exact),
                "ring_reduce_scatter": relative(ring, exact),
            }
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help="write a file of benchmarks/results")
    save = parser.parse_args().save
    found = {
        "command": "python benchmarks/collectives.py --save",
        "date": str(date.today()),
        "machine": cpu_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "values": f"a part: {ROWS} x {COLS}, FP32; BF16 for the plain collectives",
        "measured": {str(world): measured(world) for world in RANKS},
        "modelled": {fmt: modelled(fmt) for fmt in FORMATS},
    }
    text = json.dumps(found, indent=1)
    print(text)
    if save:
        (RESULTS / f"collectives-{machine_slug()}-{date.today()}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
