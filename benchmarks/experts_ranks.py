"""Experts over two ranks, forward and backward, beside transformers' own in BF16.

    python benchmarks/experts_ranks.py [--tokens 2048] [--divide 4] [--rounds 15] [--write]

The block is that of Qwen3-30B-A3B (128 experts, hidden 2048, inner 768, 8 of them per token), every
number divided alike; each rank has tokens of its own and half of the experts. The base is
transformers' `all_to_all` implementation around its grouped product, with the same weights, routing
and tokens. Rounds are interleaved: ratios of wall times of the first rank, after a barrier, as
medians with quartiles. Bytes are those of all-to-alls in a step; saved are the bytes of what the
forward keeps for the backward, parameters not counted. Needs transformers.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from experts_block import SHAPE, block
from timing import cpu_name, machine_slug
from torch.distributed.device_mesh import init_device_mesh

import hybridq
from hybridq.distributed import count_traffic
from hybridq.moe import parallelize_experts

RESULTS = Path(__file__).parent / "results"
WORLD = 2
#: By name: the recipe and the format of messages of hybridq's arms.
ARMS = {
    "bf16": (None, None),
    "bf16, messages mxfp8": (None, "mxfp8"),
    "mxfp8, messages mxfp8": ("mxfp8", "mxfp8"),
    "mxfp8_fwd_nvfp4_bwd, messages mxfp8": ("mxfp8_fwd_nvfp4_bwd", "mxfp8"),
    "mxfp8_fwd_nvfp4_bwd, messages nvfp4": ("mxfp8_fwd_nvfp4_bwd", "nvfp4"),
}


def peer(shape: tuple[int, ...], rank: int) -> Callable[..., torch.Tensor]:
    """Return transformers' experts of this rank, behind its all-to-all."""
    from transformers.distributed.expert_parallel import AllToAllEP

    module: Any = block(shape)
    module.config._experts_implementation = "grouped_mm"
    own = shape[0] // WORLD
    for name, parameter in list(module.named_parameters()):
        part = parameter.detach()[rank * own : (rank + 1) * own].clone()
        setattr(module, name, torch.nn.Parameter(part))
    module.num_experts = own
    mesh = init_device_mesh("cpu", (WORLD, 1), mesh_dim_names=("ep", "tp"))
    made = AllToAllEP(module, mesh["ep"], mesh["tp"])
    made.module = module
    return made


def step(call: Any, shape: tuple[int, ...], tokens: int, recipe: str | None) -> Callable[[], None]:
    """Return a forward and backward of this rank's tokens."""
    experts, hidden, _, top = shape
    torch.manual_seed(1 + dist.get_rank())
    x = torch.randn(tokens, hidden).bfloat16().requires_grad_()
    best = torch.randn(tokens, experts).softmax(-1).topk(top)
    weights = best.values.bfloat16().requires_grad_()
    dy = torch.randn(tokens, hidden).bfloat16()
    leaves = (x, weights, *getattr(call, "module", call).parameters())

    def run() -> None:
        for one in leaves:
            one.grad = None
        with hybridq.autocast(enabled=recipe is not None, recipe=recipe or "bf16"):
            y = call(x, best.indices, weights)
        y.backward(dy)

    return run


def saved_by(run: Callable[[], None], parameters: list[torch.Tensor]) -> int:
    """Return the bytes that a forward keeps for its backward, each memory once."""
    known = {one.untyped_storage().data_ptr() for one in parameters}
    found: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        memory = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        if memory.data_ptr() not in known:
            found[memory.data_ptr()] = memory.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(found.values())


def on_rank(rank: int, store: str, args: argparse.Namespace, answers: Any) -> None:
    """Measure as one rank; rank 0 answers."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    shape = tuple(one // args.divide for one in SHAPE)
    base = peer(shape, rank)
    runs = {"transformers": (step(base, shape, args.tokens, None), [*base.module.parameters()])}
    for name, (recipe, messages) in ARMS.items():
        module = hybridq.convert(torch.nn.ModuleList([block(shape)]))
        parallelize_experts(module, dispatch=messages, combine=messages)
        parameters = [one.to_local() for one in module.parameters()]
        runs[name] = step(module[0], shape, args.tokens, recipe), parameters
    table: dict[str, Any] = {}
    for name, (run, parameters) in runs.items():
        run()
        with count_traffic() as traffic:
            run()
        table[name] = {
            "bytes of messages": traffic.nbytes_by_kind["all_to_all"],
            "bytes saved": saved_by(run, parameters),
        }
    ratios: dict[str, list[float]] = {name: [] for name in ARMS}
    for _ in range(args.rounds):
        times = {}
        for name, (run, _) in runs.items():
            dist.barrier()
            start = time.perf_counter()
            run()
            dist.barrier()
            times[name] = time.perf_counter() - start
        for name in ARMS:
            ratios[name].append(times[name] / times["transformers"])
    for name, found in ratios.items():
        low, middle, high = statistics.quantiles(found, n=4)
        table[name]["time over transformers'"] = [round(one, 3) for one in (low, middle, high)]
        for what in ("bytes of messages", "bytes saved"):
            table[name][f"{what} over transformers'"] = round(
                table[name][what] / table["transformers"][what], 3
            )
    if rank == 0:
        answers.put(table)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Measure, print the table, and keep it if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048, help="of each rank")
    parser.add_argument("--divide", type=int, default=4, help="every number of the shape by this")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--write", action="store_true", help="keep the table in results")
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=on_rank, args=(rank, f"{folder}/store", args, answers))
            for rank in range(WORLD)
        ]
        for one in ranks:
            one.start()
        table = answers.get(timeout=1800)
        for one in ranks:
            one.join()
    shape = tuple(one // args.divide for one in SHAPE)
    print(f"{args.tokens} tokens a rank; experts, hidden, inner, top {shape}; a thread each")
    for name, found in table.items():
        print(f"{name:40} {found}")
    if args.write:
        day = datetime.now(UTC).date().isoformat()
        record = {
            "command": " ".join(sys.argv),
            "cpu": cpu_name(),
            "torch": torch.__version__,
            "hybridq": hybridq.__version__,
            "date": day,
            "tokens": args.tokens,
            "shape": shape,
            "table": table,
        }
        path = RESULTS / f"experts-ranks-{machine_slug()}-{day}.json"
        path.write_text(json.dumps(record, indent=2) + "\n")
        print(f"kept in {path}")


if __name__ == "__main__":
    main()
