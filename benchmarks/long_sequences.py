"""What a rank holds in a step on a long sequence: python benchmarks/long_sequences.py [--save]

One sequence of 4096 tokens on one process, and one of 16384 on four processes with gloo, which
share it by `sequence_parallel` (Ulysses) or `context_parallel` (ring attention): a forward and a
backward of the same layers in BF16, by recipe. Of each process:

- `saved`: the bytes that autograd keeps for the backward, parameters left out, counted;
- `peak`: its largest resident memory in the step over what it had before, read from Linux; what
  the C library is given back goes back to Linux at once (`MALLOC_MMAP_THRESHOLD_`).

Neither depends on how busy the machine is.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import queue
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from timing import cpu_name, machine_slug
from torch import nn

import hybridq
from hybridq.distributed import (
    context_parallel,
    sequence_loss,
    sequence_parallel,
    shard_sequence,
)

RESULTS = Path(__file__).parent / "results"
LENGTH, RANKS = 4096, 4
SIZES = {"layers": 4, "hidden": 512, "ffn": 1408, "heads": 8, "heads_of_keys": 4}
CLASSES = 256
#: One process, and what shares a sequence four times as long among four.
METHODS = ("whole", "ulysses", "ring")
RECIPES = ("bf16", "mxfp8", "mxfp8_fwd_nvfp4_bwd")


class Model(nn.Module):
    """Tokens in, logits out."""

    def __init__(self) -> None:
        super().__init__()
        hidden = SIZES["hidden"]
        self.embed = nn.Embedding(CLASSES, hidden)
        self.layers = nn.ModuleList(
            hybridq.TransformerLayer(
                *(hidden, SIZES["ffn"], SIZES["heads"]),
                num_gqa_groups=SIZES["heads_of_keys"],
                self_attn_mask_type="causal",
                hidden_dropout=0.0,
                attention_dropout=0.0,
                normalization="RMSNorm",
                activation="swiglu",
                bias=False,
                attn_input_format="bshd",
            )
            for _ in range(SIZES["layers"])
        )
        self.head = nn.Linear(hidden, CLASSES, bias=False)

    def forward(self, ids: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, rotary_pos_emb=angles)
        return self.head(x)


def _resident(field: str) -> int:
    """Return VmRSS or VmHWM in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"long_sequences: /proc/self/status has no {field}")


class Saved:
    """Counts the memory of what autograd keeps, each storage once, in a block."""

    def __init__(self, model: nn.Module) -> None:
        self._known = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.nbytes = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        storage = getattr(x, "_local_tensor", x).untyped_storage()  # of the ring's DTensors
        if storage.data_ptr() not in self._known:
            self._known.add(storage.data_ptr())
            self.nbytes += storage.nbytes()
        return x


def step(model: Model, method: str, recipe: str, length: int, saved: Saved | None) -> None:
    """A forward and a backward of one sequence, which this process has a part of."""
    ids = torch.randint(CLASSES, (1, length), generator=torch.Generator().manual_seed(length))
    labels = F.pad(ids[:, 1:], (0, 1), value=-100)
    angles = hybridq.RotaryPositionEmbedding(SIZES["hidden"] // SIZES["heads"])(length)
    with contextlib.ExitStack() as stack:
        if method == "ring":
            mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
            buffers = [ids, labels, angles]
            stack.enter_context(
                context_parallel(mesh, model, buffers=buffers, buffer_seq_dims=[1, 1, 0])
            )
        elif method == "ulysses":
            part = shard_sequence({"input_ids": ids, "shift_labels": labels})
            ids, labels = part["input_ids"], part["shift_labels"]
        with contextlib.ExitStack() as forward:
            if saved is not None:
                hooks = torch.autograd.graph.saved_tensors_hooks(saved, lambda x: x)
                forward.enter_context(hooks)
            forward.enter_context(hybridq.autocast(enabled=recipe != "bf16", recipe=recipe))
            logits = model(ids, angles)
            if method == "whole":
                loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
            else:
                loss = sequence_loss(logits, labels)
        loss.backward()


def on_rank(rank: int, world: int, store: str, method: str, recipe: str, answers: Any) -> None:
    """Measure as one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    torch.manual_seed(0)
    model = hybridq.convert(Model()).bfloat16()
    if method == "ulysses":
        sequence_parallel(model)
    step(model, method, recipe, 128 * world, None)  # allocates the gradients, and connects ranks
    Path("/proc/self/clear_refs").write_text("5")
    before, saved = _resident("VmRSS"), Saved(model)
    step(model, method, recipe, LENGTH * world, saved)
    answers.put((rank, {"saved": saved.nbytes, "peak": _resident("VmHWM") - before}))
    dist.barrier()
    dist.destroy_process_group()


def measured(method: str, recipe: str) -> dict[str, list[int]]:
    """What the processes of one method hold, by rank."""
    world = 1 if method == "whole" else RANKS
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        given = (world, f"{folder}/store", method, recipe, answers)
        ranks = [context.Process(target=on_rank, args=(rank, *given)) for rank in range(world)]
        for one in ranks:
            one.start()
        found: dict[int, dict[str, int]] = {}
        while len(found) < world:
            with contextlib.suppress(queue.Empty):
                found.update([answers.get(timeout=1)])
            if any(one.exitcode for one in ranks):
                raise SystemExit(f"long_sequences: a rank of {method} under {recipe} has failed")
        for one in ranks:
            one.join()
        found = dict(sorted(found.items()))
    return {name: [one[name] for one in found.values()] for name in ("saved", "peak")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help="write a file of benchmarks/results")
    save = parser.parse_args().save
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(64 * 1024)
    os.environ["OMP_NUM_THREADS"] = "1"
    table: dict[str, dict[str, dict[str, list[int]]]] = {}
    for recipe in RECIPES:
        table[recipe] = {}
        for method in METHODS:
            one = table[recipe][method] = measured(method, recipe)
            whole = table[recipe]["whole"]
            text = ", ".join(
                f"{name} {max(one[name]) / 2**20:.1f} MiB ({max(one[name]) / whole[name][0]:.3f})"
                for name in one
            )
            print(f"{recipe:22}{method:9}{text}", flush=True)
    if save:
        found = {
            "command": "python benchmarks/long_sequences.py --save",
            "date": str(date.today()),
            "machine": cpu_name(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "model": SIZES,
            "tokens": {"whole": LENGTH, "shared": LENGTH * RANKS, "ranks": RANKS},
            "bytes_by_rank": table,
        }
        name = f"long-sequences-{machine_slug()}-{date.today()}.json"
        (RESULTS / name).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
