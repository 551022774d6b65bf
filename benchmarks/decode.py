"""One decoded token of a whole Llama, quantized, beside BF16: tokens per second as a ratio.

    python benchmarks/decode.py [--hidden 1024] [--layers 4] [--context 128] [--threads 1]
        [--rounds 21] [--write]

A step is the model's forward of one token with a cache that holds `--context` of them, and `crop`,
which takes the token away again: so every step is the same. Each case is timed right after the same
step of the model in BF16, in every round; shown is the median over the rounds of
time(BF16) / time(case), with its quartiles. Absolute times are not kept.
With --write, benchmarks/results/decode-<machine>-<threads>t-<date>.json.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from timing import Case, machine_slug, measure
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

import hybridq
from hybridq.calibration.caches import cache_argument
from hybridq.integrations.transformers import HybridQCache
from hybridq.report import diagnose

#: Label, recipe, activations, and format of keys and values.
CASES = (
    ("mxfp8 weights", "mxfp8", "high_precision", None),
    ("nvfp4 weights", "nvfp4_1d_weight", "high_precision", None),
    ("mxfp8", "mxfp8", "quantized", None),
    ("nvfp4", "nvfp4_1d_weight", "quantized", None),
    ("nvfp4 weights, fp8 cache", "nvfp4_1d_weight", "high_precision", "fp8"),
)


def llama(hidden: int, layers: int) -> Any:
    """A random Llama in BF16."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(hidden // 256, 1),
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def step(model: Any, cache: Any, context: int) -> Callable[[], object]:
    """Return what decodes one token after a context."""
    ids = torch.arange(context)[None] % 4096
    named = {cache_argument(model) or "cache": cache}
    with torch.no_grad():
        model(ids, **named)

    def decode() -> object:
        with torch.no_grad():
            logits = model(ids[:, :1], **named).logits
        cache.crop(-1)
        return logits

    return decode


def cases(hidden: int, layers: int, context: int) -> list[Case]:
    """Return a case for each way of quantizing."""
    plain = llama(hidden, layers)
    base = step(plain, DynamicCache(config=plain.config), context)
    made = []
    for label, recipe, activations, kv in CASES:
        model = hybridq.quantize_model(copy.deepcopy(plain), recipe, activations=activations)
        cache = DynamicCache(config=model.config) if kv is None else HybridQCache(model, kv)
        made.append(Case(label, step(model, cache, context), base, "the BF16 model"))
    return made


def main() -> None:
    """Measure, print a table, and write the result where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    made = cases(options.hidden, options.layers, options.context)
    table = measure(made, options.rounds, options.threads)
    rows = []
    for label, row in table.items():
        ratios = [round(1 / float(str(row[key])), 2) for key in ("median", "high", "low")]
        rows.append({"case": label, "tokens_per_second_ratio": ratios[0], "quartiles": ratios[1:]})
        print(f"{label:<34}{ratios[0]:7.2f}x BF16   {ratios[1]:.2f} .. {ratios[2]:.2f}")
    if not options.write:
        return
    found = diagnose("cpu")
    result = {
        "what": "time of one decoded token in BF16 / quantized, median over rounds",
        "machine": found.machine.cpu,
        "versions": {key: found.versions[key] for key in ("hybridq", "torch", "python")},
        "load": round(os.getloadavg()[0], 1),
        **vars(options),
        "cases": rows,
    }
    day = datetime.date.today().isoformat()
    name = f"decode-{machine_slug()}-{options.threads}t-{day}.json"
    path = Path(__file__).parent / "results" / name
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(path)


if __name__ == "__main__":
    main()
