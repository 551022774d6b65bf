"""What a training step holds in memory, by recipe. python benchmarks/memory.py [--tokens 4096]

The demo's transformer in bfloat16, larger: forward and backward of one step in a process of its
own per recipe and kind of modules. `saved` is what autograd keeps for the backward
(hybridq.memory_report), and `linears` the part of it that hybridq's modules keep; `peak` is the
process's largest resident memory in the step over what it had before, read from Linux. None of
them depends on how busy the machine is.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

import hybridq
from hybridq.demo.model import ModelConfig, Transformer
from hybridq.demo.variants import VARIANTS

CONFIG = ModelConfig(layers=4, hidden=1024, heads=16, ffn=2816, sequence=512)
RECIPES = ("bf16", "fp8_current", "fp8_block", "mxfp8", "nvfp4", "mxfp8_fwd_nvfp4_bwd")


def _resident(field: str) -> int:
    """Return VmRSS or VmHWM in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"memory: /proc/self/status has no {field}")


def _linears(model: torch.nn.Module, report: hybridq.MemoryReport) -> int:
    kind = hybridq.nn.QuantizedModule
    names = [name for name, module in model.named_modules() if isinstance(module, kind)]
    return sum(report.nbytes("saved", name) for name in names)


def measure(recipe: str, variant: str, tokens: int) -> dict[str, int]:
    """Return bytes of one recipe's step."""
    torch.manual_seed(0)
    model = VARIANTS[variant](hybridq.convert(Transformer(CONFIG))).bfloat16()
    batch = torch.randint(0, 256, (tokens // CONFIG.sequence, CONFIG.sequence))

    def forward() -> torch.Tensor:
        with hybridq.autocast(enabled=recipe != "bf16", recipe=recipe):
            return model(batch).float().logsumexp(-1).mean()

    step: Callable[[], None] = lambda: forward().backward()  # noqa: E731
    step()  # allocates the gradients, and whatever is made once
    report = hybridq.memory_report(model, forward)
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident("VmRSS")
    step()
    return {
        "saved": report.nbytes("saved"),
        "saved_by_linears": _linears(model, report),
        "peak": _resident("VmHWM") - before,
        "parameters": report.nbytes("parameters"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--recipe", choices=RECIPES, help="measure this one only, print JSON")
    parser.add_argument("--modules", choices=VARIANTS, help="of what modules, with --recipe")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.recipe:
        print(json.dumps(measure(options.recipe, options.modules, options.tokens)))
        return
    found: dict[str, dict[str, dict[str, int]]] = {}
    print(f"{'modules':9}{'recipe':22}{'saved MiB':>11}{'linears MiB':>13}{'peak MiB':>10}")
    for variant in VARIANTS:
        found[variant] = {}
        for recipe in RECIPES:
            command = [sys.executable, __file__, "--tokens", str(options.tokens)]
            command += ["--recipe", recipe, "--modules", variant]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            one = found[variant][recipe] = json.loads(done.stdout.splitlines()[-1])
            print(
                f"{variant:9}{recipe:22}{one['saved'] / 2**20:11.1f}"
                f"{one['saved_by_linears'] / 2**20:13.1f}{one['peak'] / 2**20:10.1f}"
            )
    if options.out is not None:
        record = {
            "command": "python benchmarks/memory.py",
            "torch": torch.__version__,
            "tokens": options.tokens,
            "model": vars(CONFIG),
            "bytes": found,
        }
        options.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
