"""What the chip itself does: the questions behind the kernels' design, answered by measuring.

    python benchmarks/gpu_facts.py [--budget 200] [--only copy,power,...]      (make gpu-facts)

| question | why |
| --- | --- |
| copy: bytes per second of a device copy, by size and by kind | what every cast is compared with |
| power: is torch.mm faster on decoded operands than on random BF16? | fewer mantissa bits |
| scaled: rate and error of FP8 products with 1x128 and 128x128 scales | the fold rests on them |
| casts: encode of one and two planes, amax | how far from the copy |
| triton: products that decode in registers | whether they are of use beyond small M |
| pipes: instructions per clock and multiprocessor | the budgets assume 64 ALU lanes |

Answers are printed and written to gpu-facts-<machine>-<date>.json. A part that this chip or torch
does not have says so. The exit status is 2 without a GPU.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from gpu_bench import casts, products, result
from gpu_bench.case import Bench, Case
from gpu_bench.runner import Runner
from gpu_bench.timing import Budget, GpuTimer, HostTimer, Sample, Timer

import hybridq
from hybridq.kernels.choice import registry as registry

RESULTS = Path(__file__).parent / "results"
#: What is asked of the casts: one and two planes, with and without an amax.
_CASTS = ("amax", "encode mxfp8 row", "encode mxfp8 col", "encode mxfp8 both", "encode nvfp4 both",
          "encode mxfp8 | nvfp4 rht", "encode nvfp4 sr | nvfp4 rht sr")  # fmt: skip

Facts = dict[str, Any]


def _times(timer: Timer, cases: dict[str, Callable[[], Any]], rounds: int) -> dict[str, Sample]:
    return timer.measure({name: [call] for name, call in cases.items()}, rounds)


def copy(bench: Bench, timer: Timer, budget: Budget) -> Facts:
    """TB/s, read and written, of three ways to copy."""
    facts: Facts = {}
    largest = 1 << (31 if bench.device == "cuda" else 12)
    nbytes = 1 << (24 if bench.device == "cuda" else 12)
    while nbytes <= largest and not budget.is_over:
        source = torch.empty(nbytes // 2, dtype=torch.int16, device=bench.device).random_()
        target = torch.empty_like(source)
        calls = {
            "copy_": lambda s=source, t=target: t.copy_(s),
            "elementwise": lambda s=source, t=target: torch.bitwise_not(s, out=t),
            "clone": lambda s=source: s.clone(),
        }
        for name, sample in _times(timer, calls, 15).items():
            facts[f"{name} {nbytes >> 20} MB, TB/s"] = round(2 * nbytes / sample.median / 1e6, 3)
        nbytes *= 4 if nbytes < 1 << 28 else 8
    return facts


def power(bench: Bench, timer: Timer, budget: Budget) -> Facts:
    """TFLOP/s of torch.mm on random, decoded and zero operands, in the same rounds."""
    facts: Facts = {}
    for name, m, n, k in bench.products:
        if budget.is_over:
            break
        a, b = (bench.randn(rows, k, torch.bfloat16, rows == m) for rows in (m, n))
        sides: dict[str, tuple[torch.Tensor, torch.Tensor]] = {"randn": (a, b)}
        for fmt in ("mxfp8", "nvfp4"):
            made = (hybridq.quantize(x, fmt, False).dequantize() for x in (a, b))
            first, second = (x.to(torch.bfloat16) for x in made)
            sides[f"decoded {fmt}"] = (first, second)
        sides["zeros"] = (torch.zeros_like(a), torch.zeros_like(b))
        calls = {key: lambda x=x, y=y: torch.mm(x, y.t()) for key, (x, y) in sides.items()}
        samples = _times(timer, calls, 20)
        for key, sample in samples.items():
            facts[f"{name} {key}, TFLOP/s"] = round(2 * m * n * k / sample.median / 1e6, 1)
            facts[f"{name} {key}, ratio to randn"] = round(sample.ratio(samples["randn"]), 4)
        bench.forget()
    return facts


def _blocks(x: torch.Tensor, height: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return E4M3 codes and FP32 scales of height x 128 blocks, in cuBLASLt's layout."""
    rows, k = x.shape
    padded_x = torch.nn.functional.pad(x.float(), (0, -k % 128, 0, -rows % height))
    high, wide = padded_x.shape
    groups = padded_x.reshape(high // height, height, wide // 128, 128)
    scale = (groups.abs().amax(dim=(1, 3)) / 448).clamp(min=1e-12)
    codes = (groups / scale[:, None, :, None]).reshape(high, wide)[:rows, :k]
    codes = codes.contiguous().to(torch.float8_e4m3fn)
    if height == 1:
        return codes, scale.t().contiguous().t()  # strides (1, rows)
    padded = torch.nn.functional.pad(scale, (0, -scale.shape[1] % 4))
    return codes, padded.t()


def _exact(codes: torch.Tensor, scale: torch.Tensor, height: int) -> torch.Tensor:
    rows, k = codes.shape
    wide = scale if height == 1 else scale.t()[:, : -(-k // 128)]
    wide = wide.double().repeat_interleave(height, 0).repeat_interleave(128, 1)
    return codes.double() * wide[:rows, :k]


def scaled(bench: Bench, timer: Timer, budget: Budget) -> Facts:
    """TFLOP/s of F.scaled_mm with block scales, and its error against FP64."""
    scaled_mm = getattr(torch.nn.functional, "scaled_mm", None)
    if scaled_mm is None or bench.device != "cuda":
        return {"not measured": "torch.nn.functional.scaled_mm is not there, or there is no GPU"}
    if torch.cuda.get_device_capability()[0] != 9:
        return {"not measured": "cuBLASLt has products with 1x128 scales on sm_90 only"}
    kinds = torch.nn.functional.ScalingType
    facts: Facts = {}
    for name, m, n, k in bench.products:
        for label, height, kind in (
            ("1x128 x 128x128", 128, kinds.BlockWise128x128),
            ("1x128 x 1x128", 1, kinds.BlockWise1x128),
        ):
            if budget.is_over:
                return facts
            x, w = (bench.randn(rows, k, torch.bfloat16, rows == m) for rows in (m, n))
            (a, sa), (b, sb) = _blocks(x, 1), _blocks(w, height)

            def product(
                bias: torch.Tensor | None = None, dtype: torch.dtype = torch.bfloat16,
                a: Any = a, sa: Any = sa, b: Any = b, sb: Any = sb, kind: Any = kind,
            ) -> torch.Tensor:  # fmt: skip
                recipes = (sa, kinds.BlockWise1x128, sb, kind)
                return scaled_mm(a, b.t(), *recipes, bias=bias, output_dtype=dtype)

            calls: dict[str, Callable[[], Any]] = {"bf16": lambda x=x, w=w: torch.mm(x, w.t())}
            for what, dtype, has_bias in (
                ("BF16", torch.bfloat16, False),
                ("BF16 with bias", torch.bfloat16, True),
                ("FP16", torch.float16, False),
                ("FP16 with bias", torch.float16, True),
                ("FP32", torch.float32, False),
            ):
                bias = torch.randn(n, device=bench.device).to(dtype) if has_bias else None

                def call(run: Any = product, bias: Any = bias, dtype: Any = dtype) -> torch.Tensor:
                    return run(bias, dtype)

                refused = _refusal(call)
                if refused is None:
                    calls[what] = call
                else:
                    facts[f"{name} {label}, {what}"] = refused
            samples = _times(timer, calls, 20)
            for what, sample in samples.items():
                if what != "bf16":
                    rate = 2 * m * n * k / sample.median / 1e6
                    facts[f"{name} {label}, {what}, TFLOP/s"] = round(rate, 1)
                    ratio = sample.ratio(samples["bf16"])
                    facts[f"{name} {label}, {what}, ratio to bf16"] = round(ratio, 3)
            most = "FP32" if "FP32" in calls else "BF16"
            if most not in calls:
                continue
            rows = slice(0, 256)
            exact = _exact(a[rows], sa[rows], 1) @ _exact(b, sb, height).t()
            got = calls[most]()[rows].double()
            rms = (got - exact).square().mean().sqrt() / exact.square().mean().sqrt()
            facts[f"{name} {label}, {most}, rms error / rms"] = float(f"{float(rms):.3e}")
        bench.forget()
    facts["expected rms error"] = "1.3e-4 with promotion every 128 (13 fraction bits), FP32 out"
    return facts


def _refusal(call: Callable[[], Any]) -> str | None:
    """Return None if torch and cuBLASLt take a call, else their words: they are an answer too."""
    try:
        call()
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        return f"refused: {error}"[:300]
    return None


def _run(bench: Bench, timer: Timer, budget: Budget, cases: list[Case]) -> list[dict[str, Any]]:
    runner = Runner(bench, timer, 20, {}, lambda text: print(text, file=sys.stderr))
    runner.run(cases, budget)
    runner.free()
    return [*runner.cases, *runner.left_out]


def _line(case: dict[str, Any]) -> str:
    if "reason" in case:
        return case["reason"]
    rate = f"{case['tb_per_s']:.2f} TB/s" if case["tb_per_s"] else f"{case['tflops']:.0f} TFLOP/s"
    return f"{case['time_us']:.1f} us, {rate}, ratio to {case['baseline']} {case['ratio']:.3f}"


def cast(bench: Bench, timer: Timer, budget: Budget) -> Facts:
    """The casts beside a copy of as many bytes."""
    facts: Facts = {}
    for rows, cols, dtype in bench.casts:
        wanted = [c for c in casts.matrix_cases(bench, rows, cols, dtype) if c.name in _CASTS]
        for case in _run(bench, timer, budget, wanted):
            facts[f"{case['name']} {rows}x{cols} {case['dtype']}"] = _line(case)
    return facts


def triton(bench: Bench, timer: Timer, budget: Budget) -> Facts:
    """Products on the `triton` backend, forced, where it takes them."""
    if "triton" not in {backend.name for backend in registry.backends()}:
        return {"not measured": "this build of hybridq has no triton backend"}
    facts: Facts = {}
    with hybridq.backend("triton"):
        for cases in (*products.product_cases(bench), *products.small_cases(bench)):
            wanted = [c for c in cases if " x " in c.name or not c.baseline]
            wanted = [c for c in wanted if "kept" not in c.name and "auto" not in c.name]
            for case in _run(bench, timer, budget, wanted):
                if case.get("baseline", "-") != "":
                    shape = "x".join(str(size) for size in case["shape"])
                    facts[f"{case['name']} {shape}"] = _line(case)
    return facts


def pipes(bench: Bench, timer: Timer, budget: Budget) -> Facts:
    """Lanes per clock and multiprocessor of single instructions."""
    nvcc = shutil.which("nvcc")
    if nvcc is None or bench.device != "cuda":
        return {"not measured": "needs nvcc and a GPU"}
    major, minor = torch.cuda.get_device_capability()
    arch = f"{major}{minor}{'a' if major >= 9 else ''}"
    with tempfile.TemporaryDirectory() as folder:
        program = f"{folder}/pipe_rates"
        command = [
            *(nvcc, "-O3", "-std=c++17", f"-DHQ_PIPE_ARCH={10 * major + minor}"),
            *("-gencode", f"arch=compute_{arch},code=sm_{arch}"),
            *("-o", program, str(Path(__file__).with_name("pipe_rates.cu"))),
        ]
        for step in (command, [program]):
            done = subprocess.run(step, capture_output=True, text=True, timeout=120, check=False)
            if done.returncode != 0:
                return {"not measured": (done.stderr or done.stdout)[-300:]}
    made = json.loads(done.stdout)
    return {
        "clock, GHz": round(made["clock_hz"] / 1e9, 3),
        "multiprocessors": made["processors"],
        **{f"{name}, lanes/clock": rate for name, rate in made["lanes_per_clock"].items()},
    }


PARTS: dict[str, Callable[[Bench, Timer, Budget], Facts]] = {
    "copy": copy,
    "power": power,
    "scaled": scaled,
    "casts": cast,
    "triton": triton,
    "pipes": pipes,
}


def main(arguments: list[str] | None = None) -> int:
    """Ask, print, write; return the exit status."""
    import gpu

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--quick", action="store_true", help="one shape of each kind")
    parser.add_argument("--budget", type=float, default=240.0, help="seconds")
    parser.add_argument("--results", type=Path, action="append", help=f"default: {RESULTS}")
    options = parser.parse_args(arguments)
    if not options.dry_run and not torch.cuda.is_available():
        print("gpu-facts: needs a GPU that torch can use, found none (--dry-run: on the CPU)")
        return 2
    budget = Budget(options.budget)
    bench = gpu.dry_bench() if options.dry_run else gpu.real_bench(options.quick)
    timer: Timer = HostTimer() if options.dry_run else GpuTimer()
    facts: dict[str, Facts] = {}
    failed = 0
    made = {
        "schema": result.SCHEMA,
        "date": result.today(),
        "command": "python benchmarks/gpu_facts.py " + " ".join(arguments or sys.argv[1:]),
        "machine": result.machine(bench.device),
        "versions": result.versions(),
        "facts": facts,
    }
    kind = "dry-facts" if options.dry_run else "gpu-facts"
    files: list[Path] = []
    for name in options.only.split(","):
        try:
            facts[name] = PARTS[name](bench, timer, budget.part(0.5))
            bench.forget()
        # One answer that fails must not cost the others.
        except Exception as error:
            failed += 1
            facts[name] = {"failed": f"{type(error).__name__}: {error}"[:400]}
        print(f"\n{name}: {(PARTS[name].__doc__ or '').splitlines()[0]}")
        for key, value in facts[name].items():
            print(f"  {key:<46} {value}", flush=True)
        # After every part: whatever ends the process, what was answered is there.
        files = result.save(made, options.results or [RESULTS], kind)
    print(f"\nkept in {', '.join(str(file) for file in files)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
