"""Packed sequences in attention: batches of equal lengths beside one padded batch.

    python benchmarks/packed.py                 the table
    python benchmarks/packed.py --rounds 9

Forward and backward of `DotProductAttention(8, 64, qkv_format="thd")`, causal, BF16, one thread.
Kept are the median of the ratios of both ways, taken in turns, and what a forward and its backward
add to the process's resident memory at their peak, the second time, each way in its own process.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from timing import Case, measure

import hybridq
from hybridq.nn.modules import dot_product_attention

HEADS, FEATURES = 8, 64
LENGTHS = {
    "one of 1,024, 31 of 32": [1024] + [32] * 31,
    "8 from 64 to 512": [512, 64, 200, 333, 90, 450, 128, 260],
    "64 from 1 to 64, all different": list(range(1, 65)),
    "256 of 16": [16] * 256,
    "16 of 128": [128] * 16,
}


def step(lengths: list[int], *, padded: bool) -> Callable[[], None]:
    """Return what runs a forward and its backward."""
    torch.manual_seed(0)
    tokens = sum(lengths)
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    given = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts}
    module = hybridq.nn.DotProductAttention(HEADS, FEATURES, qkv_format="thd")
    shape = (tokens, HEADS, FEATURES)
    leaves = [torch.randn(shape, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    dy = torch.randn(tokens, HEADS * FEATURES, dtype=torch.bfloat16)
    alike = dot_product_attention.alike

    def run() -> None:
        dot_product_attention.alike = (lambda *_: []) if padded else alike
        try:
            torch.autograd.grad(module(*leaves, **given), leaves, dy)
        finally:
            dot_product_attention.alike = alike

    return run


def peak(label: str, *, padded: bool) -> float:
    """Return what a step adds at its peak, in MiB, asked of a process of its own."""
    call = [sys.executable, __file__, "--peak", label, *(["--padded"] if padded else [])]
    return float(subprocess.run(call, check=True, capture_output=True, text=True).stdout)


def resident(field: str) -> int:
    """Return a field of the process's status in KiB."""
    return int(re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text()).group(1))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peak", choices=LENGTHS, help=argparse.SUPPRESS)
    parser.add_argument("--padded", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.peak:
        run = step(LENGTHS[options.peak], padded=options.padded)
        run()  # libraries keep kernels of each shape
        Path("/proc/self/clear_refs").write_text("5")  # the highest so far is forgotten
        before = resident("VmRSS")
        run()
        print((resident("VmHWM") - before) / 1024)
        return
    cases = [
        Case(label, step(own, padded=False), step(own, padded=True), "padded")
        for label, own in LENGTHS.items()
    ]
    table = measure(cases, options.rounds, 1)
    for label, row in table.items():
        mib = [peak(label, padded=padded) for padded in (False, True)]
        median = row["median"]
        print(f"{label:32} {median:.2f} of the padded time, {mib[0]:.0f} MiB of {mib[1]:.0f}")


if __name__ == "__main__":
    main()
