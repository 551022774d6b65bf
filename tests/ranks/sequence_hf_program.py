"""Models of transformers on shared sequences: `python sequence_hf_program.py RANK WORLD STORE ...`.

The oracle is one process: the same model without `sequence_parallel`, on the whole batch.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch
import torch.distributed as dist
import transformers
from rank_program import logged, main
from torch import nn
from transformers import AttentionInterface

import hybridq
from hybridq.distributed import sequence_parallel, shard_sequence

transformers.logging.set_verbosity_error()
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attention_dropout": 0.0,
}
LAYERS = ["sliding_attention", "full_attention"]
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", SIZES),
    "llama, one head of keys": ("LlamaConfig", {**SIZES, "num_key_value_heads": 1}),
    "qwen3": ("Qwen3Config", {**SIZES, "head_dim": 24}),
    "gemma3": (
        "Gemma3TextConfig",
        {**SIZES, "head_dim": 16, "sliding_window": 7, "layer_types": LAYERS},
    ),
    "gemma4": (
        "Gemma4TextConfig",
        {
            **SIZES,
            "num_key_value_heads": 2,
            "num_global_key_value_heads": 1,
            "head_dim": 16,
            "global_head_dim": 32,
            "sliding_window": 7,
            "layer_types": LAYERS,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 96,
            "num_kv_shared_layers": 0,
        },
    ),
}
LENGTH = 64


def make(kind: str, **options: Any) -> Any:
    name, sizes = CONFIGS[kind]
    config = getattr(transformers, name)(**sizes)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)
    return model


def batch(rows: int = 2, length: int = LENGTH) -> dict[str, torch.Tensor]:
    ids = torch.randint(96, (rows, length), generator=torch.Generator().manual_seed(2))
    labels = ids.clone()
    labels[:, : length // 2 + 5] = -100
    labels[:, 9] = 3
    return {"input_ids": ids, "labels": labels}


def close(mine: torch.Tensor, want: torch.Tensor, bound: float, what: str) -> None:
    error = (mine.float() - want.float()).norm() / want.float().norm()
    assert torch.isfinite(error) and error <= bound, f"{what}: {float(error)} over {bound}"


def compare(
    what: str,
    plain: Any,
    given: dict[str, torch.Tensor],
    bound: float = 5e-6,
    recipe: str | None = None,
    **options: Any,
) -> None:
    """Logits, loss and gradients of the shared model and of one process."""
    model = sequence_parallel(copy.deepcopy(plain))
    part = shard_sequence(given, **options)
    given = dict(given)
    if "cu_seqlens" in options:
        bounds = options["cu_seqlens"].tolist()
        given["position_ids"] = torch.cat(
            [torch.arange(b - a) for a, b in itertools.pairwise(bounds)]
        )[None]
        given["labels"] = given["labels"].clone()
        given["labels"][:, bounds[1:-1]] = -100
    with hybridq.autocast(recipe=recipe, enabled=recipe is not None):
        want = plain(**given, use_cache=False)
        mine = model(**part)
    rank, own = dist.get_rank(), mine.logits.shape[1]
    close(mine.logits, want.logits[:, rank * own : (rank + 1) * own], bound, f"{what}: logits")
    close(mine.loss, want.loss, bound, f"{what}: loss")
    want.loss.backward()
    mine.loss.backward()
    tested = 0
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), f"{what}: {name}"
        if one.grad is None:
            continue
        dist.all_reduce(one.grad)
        tested += float(other.grad.norm()) > 1e-4
        error = (one.grad / dist.get_world_size() - other.grad).norm()
        assert error <= 4 * bound * other.grad.norm() + 1e-9, f"{what}: {name} {float(error)}"
    assert tested > 10, tested


def models(kinds: str = "") -> None:
    for kind in kinds.split("+") if kinds else CONFIGS:
        compare(kind, make(kind), batch())


def recipes(kinds: str = "llama+gemma3") -> None:
    for kind in kinds.split("+"):
        for recipe in ("mxfp8", "mxfp8_fwd_high_precision_bwd")[: len(kinds.split("+"))]:
            plain = hybridq.convert(make(kind), least_width=0)
            compare(f"{kind} under {recipe}", plain, batch(length=128), 6e-2, recipe)


def hybrids(kinds: str = "llama+qwen3+gemma3") -> None:
    """A backward in NVFP4 has roundings of its own on each rank, and the error of one process."""
    for kind in kinds.split("+"):
        for recipe in ("mxfp8_fwd_nvfp4_bwd", "nvfp4"):
            estimates(kind, recipe)


def estimates(kind: str, recipe: str) -> None:
    exact = hybridq.convert(make(kind), least_width=0)
    plain, mine = copied(exact), sequence_parallel(copied(exact))
    given = batch(length=128)
    part = shard_sequence(given)
    want = exact(**given, use_cache=False)
    want.loss.backward()
    with hybridq.autocast(recipe=recipe):
        whole = plain(**given, use_cache=False)
        own = mine(**part)
    # Forwards in MXFP8 are those of one process; NVFP4's largest values are those of a rank.
    bound = 1e-4 if recipe == "mxfp8_fwd_nvfp4_bwd" else 0.1
    close(own.loss, whole.loss, bound, f"{kind} under {recipe}: loss")
    for one in (whole, own):
        one.loss.backward()
    errors = []
    for model in (plain, mine):
        error, norm = 0.0, 0.0
        for parameter, other in zip(model.parameters(), exact.parameters(), strict=True):
            if parameter.grad is None:
                continue
            if model is mine:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
            error += float((parameter.grad - other.grad).square().sum())
            norm += float(other.grad.square().sum())
        errors.append((error / norm) ** 0.5)
    assert 0.05 < errors[1] < 1.15 * errors[0], (kind, recipe, errors)


def copied(model: Any) -> Any:
    """A copy with a configuration of its own."""
    made = copy.deepcopy(model)
    assert made.config is not model.config
    return made


def masks(kinds: str = "llama+gemma3") -> None:
    """Padding, and packed sequences, with a sliding window and without."""
    for kind in kinds.split("+"):
        given = batch()
        mask = torch.ones_like(given["input_ids"])
        mask[0, -20:] = 0
        compare(f"{kind}, padding", make(kind), {**given, "attention_mask": mask})
        bounds = torch.tensor([0, 5, 45, LENGTH])  # sequences that lie on two ranks
        compare(f"{kind}, packed", make(kind), batch(rows=1), cu_seqlens=bounds)


def no_mask(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
    """Attention that knows packed sequences by `position_ids`, as flash attention does."""
    assert mask is None
    positions = options["position_ids"]
    number = (torch.diff(positions, prepend=positions[:, :1] - 1) != 1).cumsum(-1)
    length = query.shape[2]
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    seen = seen & (number[:, :, None] == number[:, None])
    y = nn.functional.scaled_dot_product_attention(
        query, key, value, seen[:, None], scale=options["scaling"], enable_gqa=True
    )
    return y.transpose(1, 2).contiguous(), None


def others() -> None:
    """An implementation that is not known is told of once, and gets whole positions."""
    AttentionInterface.register("of_mine", no_mask)
    plain = make("llama", attn_implementation="of_mine")
    bounds = torch.tensor([0, 7, LENGTH])
    with logged() as messages:
        compare("an unknown one", plain, batch(rows=1), cu_seqlens=bounds)
    told = [one for one in messages if "'of_mine' is not known" in one]
    assert len(told) == (dist.get_rank() == 0), messages


def faults() -> None:
    import re

    def raises(kind: type[BaseException], text: str, call: Any) -> None:
        try:
            call()
        except kind as error:
            assert re.search(text, str(error)), error
        else:
            raise AssertionError(f"nothing was raised: {text}")

    rank = dist.get_rank()
    eager = make("llama", attn_implementation="eager")
    raises(ValueError, r"got 'eager'.*set_attn_implementation\('sdpa'\)", lambda: share(eager))
    model = share(make("llama"))
    ids = batch()["input_ids"][:, :16]
    raises(ValueError, "labels must be shifted", lambda: model(ids, labels=ids))
    raises(ValueError, "no KV cache", lambda: model(ids, use_cache=True))
    text = "on equal parts, got the shapes of the inputs"
    raises(RuntimeError, text, lambda: model(ids[:, : 8 + rank]))
    raises(ValueError, "got token_type_ids", lambda: model(ids, token_type_ids=ids))
    raises(RuntimeError, "the model that was given must be called", lambda: model.model(ids))
    raises(ValueError, "given once", lambda: share(model))
    name, sizes = CONFIGS["llama"]
    three = {**sizes, "num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 48}
    config = getattr(transformers, name)(**three)
    odd = share(transformers.AutoModelForCausalLM.from_config(config))
    raises(ValueError, "the ranks must divide the heads", lambda: odd(ids))
    mamba = transformers.MambaConfig(vocab_size=96, hidden_size=32, num_hidden_layers=1)
    model = transformers.AutoModelForCausalLM.from_config(mamba)
    raises(ValueError, "sequence_parallel: ", lambda: share(model))


def share(model: Any) -> Any:
    return sequence_parallel(model)


if __name__ == "__main__":
    main(globals())
