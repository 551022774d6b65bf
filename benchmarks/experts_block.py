"""A block of experts, forward and backward, beside transformers' own in BF16.

    python benchmarks/experts_block.py [--tokens 4096] [--divide 2] [--recipe mxfp8] [--write]

The shape is that of Qwen3-30B-A3B (128 experts, hidden 2048, inner 768, 8 of them per token),
every number divided alike. The bases are transformers' implementations of the same module with
the same weights in BF16: `grouped_mm` (torch's grouped product) and `eager` (a loop). Tokens, the
router's weights and the parameters need gradients. Rounds are interleaved (`timing.py`); needs
transformers.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from datetime import UTC, datetime
from pathlib import Path

import torch
from timing import Case, Run, cpu_name, lines, machine_slug, measure

import hybridq

RESULTS = Path(__file__).parent / "results"
#: Experts, hidden and inner width, experts per token.
SHAPE = (128, 2048, 768, 8)


def block(shape: tuple[int, ...]) -> torch.nn.Module:
    """Return transformers' module of experts, BF16."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    experts, hidden, inner, top = shape
    config = Qwen3MoeConfig(
        num_experts=experts,
        hidden_size=hidden,
        moe_intermediate_size=inner,
        num_experts_per_tok=top,
    )
    torch.manual_seed(0)
    made = Qwen3MoeExperts(config).bfloat16()
    with torch.no_grad():
        for one in made.parameters():
            one.copy_(torch.randn(one.shape) * one.shape[-1] ** -0.5)
    return made


def step(module: torch.nn.Module, shape: tuple[int, ...], tokens: int, recipe: str | None) -> Run:
    """Return a forward and backward of the block."""
    experts, hidden, _, top = shape
    torch.manual_seed(1)
    x = torch.randn(tokens, hidden).bfloat16().requires_grad_()
    best = torch.randn(tokens, experts).softmax(-1).topk(top)
    weights = best.values.bfloat16().requires_grad_()
    dy = torch.randn(tokens, hidden).bfloat16()
    leaves = (x, weights, *module.parameters())

    def run() -> None:
        for one in leaves:
            one.grad = None
        with hybridq.autocast(enabled=recipe is not None, recipe=recipe or "bf16"):
            y = module(x, best.indices, weights)
        y.backward(dy)

    return run


def cases(shape: tuple[int, ...], tokens: int, recipes: list[str]) -> list[Case]:
    """Return the lines of the table."""
    plain = block(shape)
    bases = {}
    for name in ("grouped_mm", "eager"):
        own = copy.deepcopy(plain)
        own.config = copy.deepcopy(plain.config)
        own.config._experts_implementation = name
        bases[name] = step(own, shape, tokens, None)
    kind = torch.nn.ModuleList([plain])
    module = hybridq.convert(kind)[0]
    return [
        Case(
            f"{recipe}, of {name}",
            step(module, shape, tokens, recipe),
            base,
            f"transformers' {name} in BF16",
            1.3 if (recipe, name) == ("mxfp8", "grouped_mm") else None,
        )
        for recipe in recipes
        for name, base in bases.items()
    ]


def main() -> None:
    """Measure, print the table, and keep it if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--divide", type=int, default=2, help="every number of the shape by this")
    parser.add_argument("--recipe", action="append", help="repeatable; mxfp8")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--write", action="store_true", help="keep the table in results")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    shape = tuple(one // args.divide for one in SHAPE)
    found = cases(shape, args.tokens, args.recipe or ["mxfp8"])
    table = measure(found, args.rounds, args.threads)
    print(f"{args.tokens} tokens; experts, hidden, inner, top {shape}; {args.threads} threads")
    print("\n".join(lines(table)))
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
            "threads": args.threads,
            "table": table,
        }
        path = RESULTS / f"cpu-experts-{shape[1]}-{machine_slug()}-{day}.json"
        path.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
