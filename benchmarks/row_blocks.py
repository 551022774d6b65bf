"""Time FP8 with a scale per row, and products with it, beside its neighbours, on one thread.

Encode and decode beside FP8 with a scale per 1x128 and a copy; products of BF16 rows with such a
weight, and with one with FP32 scales of 128x128, beside a weight with one scale, the FP32 product
that both had, and torch's BF16 `linear`.

python benchmarks/row_blocks.py [--size 4096] [--rounds 15] [--result FILE]
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from timing import cpu_name

import hybridq
from hybridq.formats import PlaneSpec
from hybridq.kernels import REFERENCE
from hybridq.kernels.choice import EncodeRequest


def once(run: Callable[[], Any]) -> float:
    """Return the seconds of one call."""
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def measured(size: int, rounds: int) -> dict[str, dict[str, float]]:
    """Return, by operation, medians in milliseconds and ratios of neighbours.

    Args:
        size: rows and columns of a BF16 matrix.
        rounds: how often each is timed, one after the other; the reference once.
    """
    x = torch.randn(size, size, dtype=torch.float32, device="cpu").bfloat16()
    there = torch.empty_like(x)
    own = PlaneSpec.parse(f"e4m3/1x{size}/fp32/amax/float8_block")
    blocks = PlaneSpec.parse("e4m3/1x128/fp32/amax/float8_block")
    made: dict[str, dict[str, float]] = {}
    planes = {one: torch.ops.hybridq.encode(x, one.text, "", None) for one in (own, blocks)}
    pairs = {"encode": (1, 0), "encode columns": (0, 1), "encode both": (1, 1)}

    def call(op: str, one: PlaneSpec) -> Callable[[], Any]:
        if op == "decode":
            return lambda: torch.ops.hybridq.decode(planes[one], one.text, *x.shape, x.dtype)
        texts = [one.text if is_there else "" for is_there in pairs[op]]
        return lambda: torch.ops.hybridq.encode(x, *texts, None)

    for op in (*pairs, "decode"):
        runs = {one: call(op, one) for one in (own, blocks)}
        copy = functools.partial(there.copy_, x)
        turns = [[once(run) for run in (runs[own], runs[blocks], copy)] for _ in range(rounds + 1)]
        if op == "decode":
            name, given = "decode", (planes[own], own, *x.shape, x.dtype)
        else:
            wanted = [own if is_there else None for is_there in pairs[op]]
            name, given = "encode", (x, *wanted, EncodeRequest())
        reference = once(functools.partial(REFERENCE.ops[name], *given))
        row, block, plain = (1e3 * statistics.median(one) for one in zip(*turns[1:], strict=True))
        made[op] = {
            "ms_per_row": round(row, 3),
            "ms_1x128": round(block, 3),
            "ms_copy": round(plain, 3),
            "ratio_to_1x128": round(statistics.median(a / b for a, b, _ in turns[1:]), 3),
            "ratio_to_copy": round(statistics.median(a / c for a, _, c in turns[1:]), 3),
            "ms_reference": round(1e3 * reference, 1),
        }
    return made


def products(size: int, rounds: int) -> dict[str, dict[str, float]]:
    """Return, by number of rows, medians in milliseconds and ratios of neighbours.

    Args:
        size: rows and columns of the weight.
        rounds: how often each is timed, one after the other.
    """
    plain = torch.randn(size, size, dtype=torch.float32, device="cpu").bfloat16()
    texts = {
        "per_row": f"e4m3/1x{size}/fp32/amax/float8_block",
        "per_tensor": "fp8_e4m3",
        "128x128": "e4m3/128x128/fp32/amax/float8_block",
    }
    weights = {
        name: hybridq.Quantizer(rowwise=PlaneSpec.parse(text), columnwise=None).quantize(plain)
        for name, text in texts.items()
    }
    made: dict[str, dict[str, float]] = {}
    for count in (1, 8, 64, 512):
        x = torch.randn(count, size, dtype=torch.float32, device="cpu").bfloat16()
        runs: list[Callable[[], Any]] = [
            functools.partial(hybridq.gemm, x, weight.rowwise) for weight in weights.values()
        ]
        squares = weights["128x128"].rowwise
        wide = hybridq.quantize(x.float(), "fp32")  # BF16 does not hold it, as far as is known
        runs.append(functools.partial(hybridq.gemm, wide, squares, out_dtype=torch.bfloat16))
        runs.append(functools.partial(torch.nn.functional.linear, x, plain))
        turns = [[once(run) for run in runs] for _ in range(rounds + 3)][3:]
        names = [*weights, "128x128_in_fp32", "torch_bf16"]
        times = dict(zip(names, zip(*turns, strict=True), strict=True))
        made[f"{count} rows"] = {
            **{f"ms_{name}": round(1e3 * statistics.median(one), 3) for name, one in times.items()},
            **{
                f"{one}_over_{other}": round(
                    statistics.median(a / b for a, b in zip(times[one], times[other], strict=True)),
                    3,
                )
                for one in ("per_row", "128x128")
                for other in ("per_tensor", "128x128_in_fp32", "torch_bf16")
            },
        }
    return made


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--result", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    result = {
        "machine": cpu_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "hybridq": hybridq.__version__,
        "size": given.size,
        "threads": 1,
        **measured(given.size, given.rounds),
        "products": products(given.size, given.rounds),
    }
    text = json.dumps(result, indent=1)
    print(text)
    if given.result is not None:
        given.result.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
