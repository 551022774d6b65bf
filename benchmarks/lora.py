"""LoRA on bases of several formats: memory and quality. python benchmarks/lora.py [--steps 40]

One task for all: a small Llama of transformers learns the demo's text (the Python standard library,
byte by byte), is frozen, and learns the same text in capital letters through adapters on all linear
layers but the head. `loss` is that of capital validation text; bytes are those of tensors, so that
none of it depends on how busy the machine is. Times are not measured.

Peers: the same in BF16, and bitsandbytes' 4-bit NF4 with its second quantization of scales, if it
is installed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import hybridq
from hybridq.demo.data import load_corpus
from hybridq.integrations.peft import merge_losses

SEQUENCE, BATCH, RANK = 128, 4, 8
SIZES = {
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": SEQUENCE,
}


class Kind(NamedTuple):
    """A row of the table.

    Attributes:
        weights: the recipe whose weight slot the base is held in; None: BF16; "nf4": bitsandbytes'.
        computes: the recipe of the products; None: BF16 products of the decoded weights.
        dora: DoRA instead of LoRA.
    """

    weights: str | None
    computes: str | None
    dora: bool = False


KINDS = {
    "bf16": Kind(None, None),
    "bitsandbytes nf4": Kind("nf4", None),
    "nvfp4, weights only": Kind("nvfp4", None),
    "nvfp4": Kind("nvfp4", "nvfp4"),
    "mxfp8": Kind("mxfp8", "mxfp8"),
    "fp8_current": Kind("fp8_current", "fp8_current"),
    "nvfp4, DoRA": Kind("nvfp4", "nvfp4", dora=True),
}


def batches(text: torch.Tensor, count: int, seed: int) -> Iterable[torch.Tensor]:
    """Yield `count` batches `[BATCH, SEQUENCE]` of random places."""
    random = torch.Generator().manual_seed(seed)
    for _ in range(count):
        starts = torch.randint(len(text) - SEQUENCE, (BATCH,), generator=random)
        yield torch.stack([text[start : start + SEQUENCE].long() for start in starts])


def capitals(text: torch.Tensor) -> torch.Tensor:
    return torch.frombuffer(bytearray(text.numpy().tobytes().upper()), dtype=torch.uint8)


def loss_of(model: nn.Module, computes: str | None, ids: torch.Tensor) -> torch.Tensor:
    with hybridq.autocast(enabled=computes is not None, recipe=computes):
        return model(input_ids=ids, labels=ids).loss


@torch.no_grad()
def validate(model: nn.Module, computes: str | None, text: torch.Tensor) -> float:
    """Return the loss in training mode: nothing is dropped here, and in evaluation bitsandbytes
    repacks weights on a CPU, after which its products have no gradient."""
    losses = [float(loss_of(model, computes, ids)) for ids in batches(text, 8, seed=99)]
    return sum(losses) / len(losses)


def train(
    model: nn.Module, computes: str | None, text: torch.Tensor, steps: int, lr: float, seed: int
) -> torch.optim.Optimizer:
    learns = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(learns, lr=lr, weight_decay=0.0)
    for step, ids in enumerate(batches(text, steps, seed)):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 20) * (1 - step / steps)
        loss_of(model, computes, ids).backward()
        nn.utils.clip_grad_norm_(learns, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def llama(state: dict[str, torch.Tensor] | None = None) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    if state is not None:
        model.load_state_dict(state)
        model.bfloat16()
    return model


def in_four_bits(model: nn.Module) -> None:
    """Put bitsandbytes' layers in the place of all linear layers but the head."""
    import bitsandbytes as bnb

    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not nn.Linear or name == "lm_head":
                continue
            made = bnb.nn.Linear4bit(
                child.in_features,
                child.out_features,
                bias=False,
                compute_dtype=torch.bfloat16,
                compress_statistics=True,
                quant_type="nf4",
            )
            made.load_state_dict(child.state_dict())
            setattr(parent, name, made.to("cpu"))


def based_on(kind: Kind, state: dict[str, torch.Tensor]) -> nn.Module:
    model = llama(state)
    if kind.weights == "nf4":
        in_four_bits(model)
    elif kind.weights is not None:
        with hybridq.quantized_model_init(kind.weights, frozen=True):
            hybridq.convert(model)
    options = {"r": RANK, "lora_alpha": 2 * RANK, "use_dora": kind.dora}
    torch.manual_seed(1)  # the same adapters on each base
    return get_peft_model(model, LoraConfig(target_modules="all-linear", **options)).train()


def nbytes(tensor: Any) -> int:
    state = getattr(tensor, "quant_state", None)  # bitsandbytes' scales, and theirs
    own = tensor.nbytes
    while state is not None:
        own += state.absmax.nbytes + state.code.nbytes
        own += 0 if state.offset is None else state.offset.nbytes
        state = getattr(state, "state2", None)
    return own


def saved(model: nn.Module, forward: Callable[[], object]) -> int:
    """Return bytes that autograd saves beside the parameters, shared memory counted once."""
    found: dict[int, int] = {}
    own = {
        one.untyped_storage()._cdata for one in model.parameters() if not hasattr(one, "quantize_")
    }

    def pack(one: torch.Tensor) -> torch.Tensor:
        if type(one) is torch.Tensor:
            memory = one.untyped_storage()
            if memory._cdata in own:
                return one
            found[memory._cdata] = memory.nbytes()
        return one

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
        made = forward()
    del made
    return sum(found.values())


def measure(kind: Kind, state: Any, texts: dict[str, torch.Tensor], steps: int) -> dict[str, Any]:
    model = based_on(kind, state)
    own = [(n, p) for n, p in model.named_parameters() if ".base_layer." in n]
    adapters = [p for p in model.parameters() if p.requires_grad]
    before = validate(model, kind.computes, texts["validation"])
    ids = next(iter(batches(texts["train"], 1, seed=1)))
    row: dict[str, Any] = {
        "base_nbytes": sum(nbytes(p) for _, p in own),
        "adapter_nbytes": sum(p.nbytes for p in adapters),
        "saved_nbytes": saved(model, lambda: loss_of(model, kind.computes, ids)),
    }
    optimizer = train(model, kind.computes, texts["train"], steps, 3e-3, seed=2)
    held = (v for one in optimizer.state.values() for v in one.values())
    row["optimizer_nbytes"] = sum(v.nbytes for v in held)
    row |= {"loss_before": before, "loss": validate(model, kind.computes, texts["validation"])}
    if kind.weights != "nf4":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.merge_adapter()
        row["loss_merged"] = validate(model, kind.computes, texts["validation"])
        losses = list(merge_losses(model).values())
        row["merge_loss"] = sum(losses) / len(losses) if losses else None
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40, help="of the adapters")
    parser.add_argument("--base-steps", type=int, default=300)
    parser.add_argument("--base", type=Path, help="keep the trained base in this file")
    parser.add_argument("--only", choices=KINDS, action="append")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    corpus = load_corpus(None, SEQUENCE)
    if options.base is not None and options.base.exists():
        state = torch.load(options.base)
    else:
        model = llama()
        train(model, None, corpus.train, options.base_steps, 2e-3, seed=0)
        state = model.state_dict()
        if options.base is not None:
            torch.save(state, options.base)
    texts = {"train": capitals(corpus.train), "validation": capitals(corpus.validation)}
    linears = sum(v.numel() for k, v in state.items() if "proj" in k)
    found: dict[str, dict[str, Any]] = {}
    heads = ("base MiB", "per value", "adapters", "optimizer", "saved", "before", "after", "merged")
    print(f"{'base':22}" + "".join(f"{head:>11}" for head in heads), flush=True)
    for name in options.only or KINDS:
        row = found[name] = measure(KINDS[name], state, texts, options.steps)
        row["bytes_per_value"] = row["base_nbytes"] / linears
        sizes = [row[key] / 2**20 for key in ("adapter_nbytes", "optimizer_nbytes", "saved_nbytes")]
        numbers = [row["base_nbytes"] / 2**20, row["bytes_per_value"], *sizes]
        numbers += [row["loss_before"], row["loss"], row.get("loss_merged", float("nan"))]
        print(f"{name:22}" + "".join(f"{number:11.3f}" for number in numbers), flush=True)
        if options.out is not None:
            write(options, corpus.digest, found)


def write(options: argparse.Namespace, digest: str, found: dict[str, dict[str, Any]]) -> None:
    libraries = ("torch", "transformers", "peft", "bitsandbytes")
    record = {
        "command": f"python benchmarks/lora.py --steps {options.steps}",
        "versions": {name: importlib.metadata.version(name) for name in libraries},
        "model": SIZES,
        "tokens": BATCH * SEQUENCE,
        "rank": RANK,
        "steps": options.steps,
        "base_steps": options.base_steps,
        "corpus": digest,
        "rows": found,
    }
    options.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
