"""Models of transformers on shared sequences: `python sequence_hf_program.py RANK WORLD STORE ...`.

The oracle is one process: the same model without `sequence_parallel`, on the whole batch.
"""

from __future__ import annotations

import copy
import itertools
import re
from typing import Any

import torch
import torch.distributed as dist
import transformers
from rank_program import logged, main
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

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
#: Of the token of an image, a video, audio.
IMAGE, VIDEO, AUDIO = 90, 91, 92
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "patch_size": 4,
    "position_embedding_size": 8,
    "pooling_kernel_size": 2,
}
#: A vision model of its own, with a head of its own, and 3 heads that no number of ranks divides.
SIGLIP: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 3,
    "image_size": 16,
    "patch_size": 4,
    "vision_use_head": False,
}
HEARING: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "subsampling_conv_channels": [8, 4],
    "attention_chunk_size": 4,
    "attention_context_left": 5,
    "output_proj_dims": 32,
}


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


def with_images(kind: str, length: int = LENGTH) -> tuple[Any, dict[str, torch.Tensor]]:
    """A model with an encoder of images, and a batch whose images lie on some of the ranks."""
    sizes = CONFIGS[kind][1]
    torch.manual_seed(0)
    text = {"model_type": f"{kind}_text", **sizes, "use_bidirectional_attention": "vision"}
    if kind == "gemma3":
        text.pop("use_bidirectional_attention")
        options = {"vision_config": SIGLIP, "mm_tokens_per_image": 4, "image_token_index": IMAGE}
    else:
        options = {
            "vision_config": VISION,
            "audio_config": HEARING,
            "image_token_id": IMAGE,
            "video_token_id": VIDEO,
            "audio_token_id": AUDIO,
        }
    config = getattr(transformers, f"{kind.capitalize()}Config")(text_config=text, **options)
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)
    given = batch(length=length)
    ids = given["input_ids"].clamp_(max=80)
    places = torch.zeros_like(ids)
    half = length // 2
    ids[0, half - 2 : half + 2] = ids[1, 3:5] = IMAGE  # on two ranks; and not on all of four
    if kind == "gemma3":
        ids[1, 5:7] = IMAGE
        given["pixel_values"] = torch.rand(2, 3, 16, 16)
        given["token_type_ids"] = places + (ids == IMAGE)
        return model, given
    ids[1, 45:49], ids[0, 8:16] = VIDEO, AUDIO
    grid = torch.cartesian_prod(torch.arange(4), torch.arange(4)).flip(1)
    half = grid.clone()
    half[8:] = -1  # a smaller image: half of the patches are none
    given["pixel_values"] = torch.rand(2, 16, 48)
    given["image_position_ids"] = torch.stack([grid, half])
    given["pixel_values_videos"] = torch.rand(1, 16, 48)
    given["video_position_ids"] = grid[None]
    given["num_frames_per_video"] = torch.tensor([1])
    given["input_features"] = torch.rand(1, 36, 8)
    given["input_features_mask"] = torch.arange(36)[None] < 32
    given["mm_token_type_ids"] = places + (ids == IMAGE) + 2 * (ids == VIDEO) + 3 * (ids == AUDIO)
    return model, given


def images(kinds: str = "gemma3+gemma4") -> None:
    """Models that see and hear: encoders are whole, and each rank has what its tokens are."""
    for kind in kinds.split("+"):
        compare(f"{kind} with images", *with_images(kind))


def images_quantized() -> None:
    plain, given = with_images("gemma4", 128)
    plain = hybridq.convert(plain, least_width=0)
    compare("gemma4 with images under mxfp8", plain, given, 8e-2, "mxfp8")
    image_faults(plain, given)
    text = {name: given[name] for name in ("input_ids", "labels")}
    text["input_ids"] = text["input_ids"].clamp(max=80)
    plain.zero_grad()
    compare("gemma4 without images", plain, text)


def images_sharded() -> None:
    """Under FSDP2 parameters of encoders are there before the forward, and have their gradients."""
    plain, given = with_images("gemma4")
    model = sequence_parallel(copied(plain))
    text = model.model.language_model
    for unit in (*text.layers, model.model.vision_tower, model):
        fully_shard(unit)
    want, mine = plain(**given, use_cache=False), model(**shard_sequence(given))
    close(mine.loss, want.loss, 5e-6, "sharded: loss")
    want.loss.backward()
    mine.loss.backward()
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        if other.grad is not None:
            error = (one.grad.full_tensor() - other.grad).norm()
            assert error <= 2e-5 * other.grad.norm() + 1e-9, f"{name} {float(error)}"


class _Rounded(torch.autograd.Function):
    """Each head's features quantized and decoded; the gradient as it is."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        made = hybridq.quantize(x.reshape(-1, x.shape[-1]), "mxfp8").dequantize()
        return made.view(x.shape)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        return dy


def rounded(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
    """What one process attends to where heads travel in MXFP8: each value is quantized once."""
    given = [_Rounded.apply(x) for x in (query, key, value)]
    y, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](module, *given, mask, **options)
    return _Rounded.apply(y), None


def communication(kinds: str = "llama+gemma4") -> None:
    """Heads of every size travel as planes, and nothing else is another."""
    AttentionInterface.register("rounded_sdpa", rounded)
    AttentionMaskInterface.register("rounded_sdpa", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    for kind in kinds.split("+"):
        plain = make(kind)
        model = sequence_parallel(copied(plain), communication=("mxfp8", None))
        plain.set_attn_implementation("rounded_sdpa")
        want = plain(**batch(), use_cache=False)
        mine = model(**shard_sequence(batch()))
        close(mine.loss, want.loss, 5e-6, f"{kind}: loss")
        want.loss.backward()
        mine.loss.backward()
        for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            if other.grad is not None:
                dist.all_reduce(one.grad)
                error = (one.grad / dist.get_world_size() - other.grad).norm()
                assert error <= 2e-5 * other.grad.norm() + 1e-9, f"{kind}: {name} {float(error)}"


def recomputed(kind: str = "llama") -> None:
    """Layers that are computed again in the backward exchange heads again."""
    plain = make(kind).train()
    plain.gradient_checkpointing_enable({"use_reentrant": False})
    compare(f"{kind}, recomputed", plain, batch())


def image_faults(model: Any, given: dict[str, Any]) -> None:
    """What would stand in a wrong place is refused, on every rank."""
    model = share(copied(model))
    part = shard_sequence(given)
    fewer = {**part, "pixel_values": part["pixel_values"][:1]}
    fewer["image_position_ids"] = part["image_position_ids"][:1]
    raises(ValueError, "features of image must be as many as tokens", lambda: model(**fewer))
    encoded = {**part, "mm_encoder_outputs": {}}
    raises(ValueError, "images must be given as pixels", lambda: model(**encoded))
    packed = {**part, "position_ids": part["position_ids"] % 24}
    raises(ValueError, "packed sequences must be without images", lambda: model(**packed))


def others() -> None:
    """An implementation that is not known is told of once, and gets whole positions."""
    AttentionInterface.register("of_mine", no_mask)
    plain = make("llama", attn_implementation="of_mine")
    bounds = torch.tensor([0, 7, LENGTH])
    with logged() as messages:
        compare("an unknown one", plain, batch(rows=1), cu_seqlens=bounds)
    told = [one for one in messages if "'of_mine' is not known" in one]
    assert len(told) == (dist.get_rank() == 0), messages


def raises(kind: type[BaseException], text: str, call: Any) -> None:
    try:
        call()
    except kind as error:
        assert re.search(text, str(error)), error
    else:
        raise AssertionError(f"nothing was raised: {text}")


def faults() -> None:
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
