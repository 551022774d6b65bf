"""Models of transformers by their own `tp_plan`: `python tensor_parallel_hf_program.py RANK ...`.

The oracle is one process: the same folder, read whole on every rank.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
import transformers
from rank_program import logged, main
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig

import hybridq
from hybridq.integrations.transformers import HybridQConfig

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
#: Parts that end inside of blocks: heads of 18, an inner size of 100.
SIZES: dict[str, Any] = {
    "vocab_size": 98,
    "hidden_size": 72,
    "intermediate_size": 100,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXED = ["sliding_attention", "full_attention"]
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", SIZES),
    "qwen3": ("Qwen3Config", {**SIZES, "head_dim": 18}),
    "gemma3": (
        "Gemma3TextConfig",
        {**SIZES, "head_dim": 18, "sliding_window": 7, "layer_types": MIXED},
    ),
    "phi3": ("Phi3Config", SIZES),  # packed projections
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            **SIZES,
            "head_dim": 18,
            "moe_intermediate_size": 48,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
}
RECIPES = ("mxfp8_fwd_nvfp4_bwd", "nvfp4")
IDS = torch.arange(22).reshape(2, 11) * 5 % 98


def folder(kind: str) -> str:
    """Return a folder with a small model, which rank 0 has written."""
    path = os.path.join(os.path.dirname(sys.argv[3]), kind)
    name, options = CONFIGS[kind]
    heads = max(2, dist.get_world_size())
    config = getattr(transformers, name)(**{**options, "num_key_value_heads": heads})
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(5 if parameter.dim() > 1 else 1)  # large enough to matter
    if dist.get_rank() == 0:
        made.save_pretrained(path)
    dist.barrier()
    return path


def load(path: str, is_parallel: bool, **options: Any) -> Any:
    if is_parallel:
        options["distributed_config"] = DistributedConfig(tp_size=dist.get_world_size())
    kind = transformers.AutoModelForCausalLM
    return kind.from_pretrained(path, attn_implementation="eager", **options)


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def outcome(model: Any, recipe: Any) -> list[torch.Tensor]:
    """Return logits without a gradient, the loss, and all gradients."""
    model.zero_grad()
    torch.manual_seed(3)
    with hybridq.autocast(enabled=recipe is not None, recipe=recipe):
        with torch.no_grad():
            logits = model(IDS).logits
        loss = model(IDS, labels=IDS).loss
    loss.backward()
    return [logits, loss.detach(), *(whole(one.grad) for one in model.parameters())]


def distances(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> list[float]:
    pairs = zip(found, wanted, strict=True)
    return [float((a - b).norm() / b.norm().clamp_min(1e-12)) for a, b in pairs]


def check_same(model: Any, single: Any, recipe: Any, what: str) -> None:
    """Compare within the order of FP32 sums: now and then that makes another code."""
    wanted = outcome(single, recipe)
    if recipe is not None:
        assert max(distances(outcome(single, None), wanted)) > 0.01, what  # it does something
    logits, loss, *gradients = distances(outcome(model, recipe), wanted)
    assert logits < 2e-2 and loss < 1e-4, (what, logits, loss)  # planes of parts: 0.2 and more
    assert max(gradients) < 3e-2, (what, max(gradients))


def plans(kinds: str) -> None:
    """Loss, gradients and evaluation are those of one process; converted before and after."""
    for kind in kinds.split(","):
        path = folder(kind)
        config = HybridQConfig("nvfp4", weights="high_precision", also=["heads"])
        single = load(path, False, quantization_config=config)
        before = load(path, True, quantization_config=config)
        check_same(before, single, None, kind)
        for recipe in RECIPES:
            check_same(before, single, recipe, f"{kind}, {recipe}")
        after = hybridq.convert(load(path, True), also=["heads"])
        check_same(after, single, RECIPES[0], f"{kind}, converted after")


def experts() -> None:
    """Experts compute on local tensors, and that is said."""
    path = folder("qwen3_moe")
    config = HybridQConfig("mxfp8", weights="high_precision")
    single = load(path, False, quantization_config=config)
    with logged() as messages:
        model = load(path, True, quantization_config=config)
    told = [one for one in messages if "planes are those of each rank's part alone" in one]
    assert len(told) == (dist.get_rank() == 0), messages
    check_same(model, single, None, "experts")
    check_same(model, single, "mxfp8", "experts")


def saved() -> None:
    """Greedy generation is one process's, and what is saved is what was read."""
    path = folder("qwen3")
    config = HybridQConfig("nvfp4", weights="high_precision")
    single = load(path, False, quantization_config=config)
    model = load(path, True, quantization_config=config)
    with hybridq.autocast(recipe="nvfp4"):
        options = {"max_new_tokens": 5, "do_sample": False}
        found = model.generate(IDS[:1, :4], **options)
        assert torch.equal(found, single.generate(IDS[:1, :4], **options))
    model.save_pretrained(path + "-again")
    dist.barrier()
    again = load(path + "-again", False)
    for (name, one), other in zip(single.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other), name


def refused() -> None:
    """Quantized parameters are not dealt out: an error on every rank, which says what to take."""
    path = folder("llama")
    try:
        load(path, True, quantization_config=HybridQConfig(format="mxfp8"))
    except NotImplementedError as error:
        assert "got a distributed_config of tp_size=2, ep_size=1" in str(error), error
        assert 'weights="high_precision"' in str(error)
    else:
        raise AssertionError("quantized weights were dealt out")


if __name__ == "__main__":
    main(globals())
