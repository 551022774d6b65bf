"""torch's ring attention over ranks: `python context_program.py RANK WORLD STORE NAME...`.

The oracle is one process: the same modules on the whole sequences, outside of the context.
"""

from __future__ import annotations

import copy
import os
import re
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from rank_program import main
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as sdpa_by_name
from torch.utils.checkpoint import checkpoint

import hybridq
from hybridq.distributed import context_parallel, sequence_loss

CLASSES, HIDDEN, HEADS = 48, 64, 4


class Model(nn.Module):
    """Tokens and rotary angles in, logits out; two layers of transformers between."""

    def __init__(
        self, heads: int = HEADS, recomputes: bool = False, mask: Any = None, **options: Any
    ) -> None:
        super().__init__()
        self.recomputes, self.mask = recomputes, mask
        options = {"num_gqa_groups": 2, "self_attn_mask_type": "causal", **options}
        self.embed = nn.Embedding(CLASSES, HIDDEN)
        self.layers = nn.ModuleList(
            hybridq.TransformerLayer(
                *(HIDDEN, 96, heads),
                hidden_dropout=0.0,
                attention_dropout=0.0,
                normalization="RMSNorm",
                activation="swiglu",
                attn_input_format="bshd",
                **options,
            )
            for _ in range(2)
        )
        self.head = nn.Linear(HIDDEN, CLASSES)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() > 1:
                    parameter.copy_(torch.randn_like(parameter) / parameter.shape[1] ** 0.5)

    def forward(self, ids: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            call = partial(layer, rotary_pos_emb=angles, attention_mask=self.mask)
            x = checkpoint(call, x, use_reentrant=False) if self.recomputes else call(x)
        return self.head(x)


def batch(length: int, classes: int = CLASSES) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, and shifted labels; those that count are not equally many on all ranks."""
    ids = torch.randint(classes, (2, length), generator=torch.Generator().manual_seed(1))
    labels = nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    labels[:, : length // 2 + 3] = -100
    labels[:, length // 4] = 5
    return ids, labels


def close(mine: torch.Tensor, want: torch.Tensor, bound: float, what: str) -> None:
    error = (mine.float() - want.float()).norm() / want.float().norm()
    assert torch.isfinite(error) and error <= bound, f"{what}: {float(error)} over {bound}"


def check_gradients(model: nn.Module, plain: nn.Module, bound: float, what: str) -> None:
    """The mean of the ranks' gradients is one process's."""
    for (name, mine), own in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert own.grad is not None and own.grad.norm() > 1e-4, f"{what}: {name} is not tested"
        dist.all_reduce(mine.grad)
        close(mine.grad / dist.get_world_size(), own.grad, bound, f"{what}: {name}")


def places(length: int, is_balanced: bool) -> torch.Tensor:
    """Where this rank's tokens stand: the r-th part from the start and from the end."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if not is_balanced:
        return torch.arange(length).chunk(world)[rank]
    parts = torch.arange(length).chunk(2 * world)
    return torch.cat([parts[rank], parts[2 * world - 1 - rank]])


def mean(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def one(
    what: str,
    length: int = 64,
    recipe: Any = None,
    bound: float = 2e-6,
    is_balanced: bool = True,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> None:
    torch.manual_seed(0)
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    plain = hybridq.convert(Model(**options).to(dtype), least_width=0)
    model = copy.deepcopy(plain)
    ids, labels = batch(length)
    heads = options.get("heads", HEADS)
    angles = hybridq.RotaryPositionEmbedding(HIDDEN // heads)(length)
    autocast = hybridq.autocast(recipe=recipe, enabled=recipe is not None)
    with autocast:
        want = plain(ids, angles)
    expected = mean(want, labels)
    expected.backward()
    own = places(length, is_balanced and length % (2 * mesh.size()) == 0)
    buffers = [ids, labels, angles]
    before = [x.clone() for x in buffers]
    with (
        autocast,
        context_parallel(
            mesh, model, buffers=buffers, buffer_seq_dims=[1, 1, 0], load_balance=is_balanced
        ),
    ):
        assert torch.equal(ids, before[0][:, own]), what
        mine = model(ids, angles)
        loss = sequence_loss(mine, labels, mesh)
        loss.backward()
    assert all(torch.equal(a, b) for a, b in zip(buffers, before, strict=True)), what
    close(mine, want[:, own], bound, f"{what}: logits")
    close(loss, expected, bound, f"{what}: loss")
    check_gradients(model, plain, bound, what)


def modules() -> None:
    one("causal")
    one("as many heads of keys", num_gqa_groups=4)
    one("heads that the ranks do not divide", heads=1, num_gqa_groups=1)
    one("parts in order", is_balanced=False)
    one("a length that pairs of parts do not divide", length=15 * dist.get_world_size())
    one("all", self_attn_mask_type="no_mask", is_balanced=False)
    masks()
    # A block's result is BF16 before it is merged: one rounding more than in one process.
    one("BF16", dtype=torch.bfloat16, bound=3e-2)


def torch_modules() -> None:
    """torch's own modules of attention, converted or not, in training and in evaluation."""
    rank, length = dist.get_rank(), 8 * dist.get_world_size()
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    x = torch.randn(2, length, HIDDEN)
    layer = nn.TransformerEncoderLayer(HIDDEN, HEADS, 96, 0.0, batch_first=True)
    attention = nn.MultiheadAttention(HIDDEN, HEADS, batch_first=True)

    def weighed(x: torch.Tensor, needs: bool = False, own: Any = None) -> torch.Tensor:
        module = attention if own is None else own
        made: torch.Tensor = module(x, x, x, need_weights=needs)[0]
        return made

    def in_ring(call: Any) -> torch.Tensor:
        part = x.clone()
        with context_parallel(mesh, buffers=[part], buffer_seq_dims=[1], load_balance=False):
            made: torch.Tensor = call(part)
        return made

    more = {"batch_first": True, "add_zero_attn": True}
    zero = nn.MultiheadAttention(HIDDEN, HEADS, **more)
    biased = nn.MultiheadAttention(HIDDEN, HEADS, add_bias_kv=True, batch_first=True)
    is_fast = torch.backends.mha.get_fastpath_enabled()
    for recipe in (None, "mxfp8"):
        if recipe is not None:
            for module in (layer, attention, zero, biased):
                hybridq.convert(module, least_width=0)
        with hybridq.autocast(enabled=recipe is not None, recipe=recipe):
            for is_trained in (True, False):  # without gradients torch has one operator for all
                layer.train(is_trained), attention.train(is_trained)
                with torch.set_grad_enabled(is_trained):
                    for call in (layer, weighed):
                        want = call(x).chunk(dist.get_world_size(), 1)[rank]
                        close(in_ring(call), want, 2e-6, f"torch's module, {recipe}, {is_trained}")
            for text, call in (
                ("got need_weights=True", partial(weighed, needs=True)),
                ("got add_zero_attn=True", partial(weighed, own=zero)),
                ("got add_bias_kv=True", partial(weighed, own=biased)),
            ):
                raises(ValueError, text, lambda call=call: in_ring(call))
    assert torch.backends.mha.get_fastpath_enabled() is is_fast
    attention(x, x, x)  # and weights are given as before


def buffers() -> None:
    """Buffers that lie in one tensor, which stays as it was: views, expanded rows, columns."""
    world = dist.get_world_size()
    mesh, length = dist.init_device_mesh("cpu", (world,)), 4 * world
    tokens = torch.arange(2 * (length + 1)).view(2, length + 1)
    row, wide = torch.arange(length), torch.arange(2 * length * 3).view(2, length, 3)
    bases = [tokens, row, wide]
    given = [tokens[:, :-1], tokens[:, 1:], row[None].expand(2, length), wide[..., 1]]
    given.append(given[0].detach())
    stays = tokens[:, :-1].clone()[:, 1:]  # a view that stays cut
    wanted, kept = [one.clone() for one in given], [one.clone() for one in bases]
    own = places(length, True)
    for _ in range(2):
        with context_parallel(mesh, buffers=given, buffer_seq_dims=[1] * len(given)):
            for one, want in zip(given, wanted, strict=True):
                part = want.index_select(1, own)
                assert torch.equal(one, part), (one, part)
        for one, want in zip([*given, *bases], [*wanted, *kept], strict=True):
            assert torch.equal(one, want), (one, want)
    given[0][0, 1] = 77
    assert tokens[0, 1] == 77  # views as before
    even = stays[:, : 2 * world * ((length - 1) // (2 * world))]
    options = {"buffers": [even], "buffer_seq_dims": [1], "no_restore_buffers": {even}}
    size = even.shape[1] // world
    with context_parallel(mesh, **options):
        pass
    assert even.shape == (2, size) and stays.shape == (2, length - 1)


def masks() -> None:
    """Windows and masks of the whole sequences: the keys of all ranks are gathered."""
    torch.manual_seed(4)
    padding = torch.zeros(2, 1, 1, 64, dtype=torch.bool)
    padding[0, ..., -9:] = True
    some = torch.rand(2, 1, 64, 64) < 0.5
    some &= ~torch.eye(64, dtype=torch.bool)
    one("a window", window_size=(5, 0))
    one(
        "a window, recomputed, parts in order",
        window_size=(5, 0),
        recomputes=True,
        is_balanced=False,
    )
    one("a window on both sides", self_attn_mask_type="no_mask", window_size=(7, 3))
    one("padding", self_attn_mask_type="padding_causal", mask=padding, heads=1, num_gqa_groups=1)
    one("any mask", self_attn_mask_type="arbitrary", mask=some)
    one("padding, a window", self_attn_mask_type="padding", mask=padding, window_size=(9, 9))


def recipes() -> None:
    """Both parts of a rank are whole blocks along tokens."""
    # A rounding that goes the other way after an FP32 sum in another order is one code's step.
    step = 6e-2
    one("under mxfp8", length=256, recipe="mxfp8", bound=step)
    one("recomputed, under mxfp8", length=256, recipe="mxfp8", bound=step, recomputes=True)
    one("under mxfp8 forwards", length=256, recipe="mxfp8_fwd_high_precision_bwd", bound=step)
    one("under fp8_block", length=256 * dist.get_world_size(), recipe="fp8_block", bound=step)
    one("under NVFP4", length=256, recipe=nvfp4_of_the_group(), bound=step)


def hybrid() -> None:
    """Forwards in MXFP8 are those of one process; a backward in NVFP4 has the error of one."""
    torch.manual_seed(0)
    exact = hybridq.convert(Model(), least_width=0)
    plain, model = copy.deepcopy(exact), copy.deepcopy(exact)
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    ids, labels = batch(256)
    angles = hybridq.RotaryPositionEmbedding(HIDDEN // HEADS)(256)
    mean(exact(ids, angles), labels).backward()
    with hybridq.autocast(recipe="mxfp8_fwd_nvfp4_bwd"):
        whole = mean(plain(ids, angles), labels)
        whole.backward()
        buffers = [ids, labels, angles]
        with context_parallel(mesh, model, buffers=buffers, buffer_seq_dims=[1, 1, 0]):
            loss = sequence_loss(model(ids, angles), labels, mesh)
            loss.backward()
    close(loss, whole, 1e-4, "hybrid: loss")
    errors = []
    for one_of in (plain, model):
        error, norm = 0.0, 0.0
        for own, want in zip(one_of.parameters(), exact.parameters(), strict=True):
            if one_of is model:
                dist.all_reduce(own.grad)
                own.grad /= dist.get_world_size()
            error += float((own.grad - want.grad).square().sum())
            norm += float(want.grad.square().sum())
        errors.append((error / norm) ** 0.5)
    assert 0.05 < errors[1] < 1.15 * errors[0], errors


def nvfp4_of_the_group() -> Any:
    """NVFP4 whose largest value is that of all ranks, as one process finds it."""
    options = {"with_amax_reduction": True, "amax_reduction_group": dist.group.WORLD}

    def factory(role: Any) -> Any:
        reduced = {} if role.tensor_type == "weight" else options
        return hybridq.NVFP4Quantizer(**reduced)

    return hybridq.CustomRecipe(factory)


def transformers_models() -> None:
    import transformers

    transformers.logging.set_verbosity_error()
    sizes: dict[str, Any] = {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    for name, more in (("LlamaConfig", {}), ("Qwen3Config", {"head_dim": 24})):
        torch.manual_seed(0)
        config = getattr(transformers, name)(**sizes, **more)
        plain = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in plain.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(6)
        of_transformers(plain, name, None, 64, 5e-6)
        if name == "LlamaConfig":
            plain = hybridq.convert(plain, least_width=0)
            of_transformers(plain, f"{name} under mxfp8", "mxfp8", 256, 6e-2)
            model_faults(plain)


def of_transformers(plain: Any, what: str, recipe: Any, length: int, bound: float) -> None:
    plain.zero_grad()
    model = copy.deepcopy(plain)
    model.config = copy.deepcopy(plain.config)
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    ids, labels = batch(length, 96)
    positions = torch.arange(length)[None]
    with hybridq.autocast(recipe=recipe, enabled=recipe is not None):
        want = plain(ids, position_ids=positions, use_cache=False).logits
        mean(want, labels).backward()
        buffers = [ids, labels, positions]
        with context_parallel(mesh, model, buffers=buffers, buffer_seq_dims=[1, 1, 1]):
            mine = model(ids, position_ids=positions).logits
            loss = sequence_loss(mine, labels, mesh)
            loss.backward()
    assert model.config._attn_implementation == "sdpa"
    close(mine, want[:, places(length, True)], bound, f"{what}: logits")
    close(loss, mean(want, labels), bound, f"{what}: loss")
    check_gradients(model, plain, 4 * bound, what)


def model_faults(model: Any) -> None:
    """What would be computed without the rest of the sequence is refused."""
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    ids, positions = batch(64, 96)[0], torch.arange(64)[None]
    packed = positions % 32
    buffers = [ids, positions, packed]
    with context_parallel(mesh, model, buffers=buffers, buffer_seq_dims=[1, 1, 1]):
        raises(ValueError, "position_ids must be given", lambda: model(ids))
        given = {"position_ids": positions}
        raises(ValueError, "0, 1, .* of the whole", lambda: model(ids, position_ids=packed))
        raises(ValueError, "no labels", lambda: model(ids, labels=ids, **given))
        mask = torch.ones_like(ids)
        model(ids, attention_mask=mask, **given)
        mask[0, 0] = 0
        raises(ValueError, "no token may be", lambda: model(ids, attention_mask=mask, **given))
    model = copy.deepcopy(model)
    model.config = copy.deepcopy(model.config)
    model.config.layer_types = ["sliding_attention", "full_attention"]

    def enter() -> None:
        with context_parallel(mesh, model, buffers=[ids], buffer_seq_dims=[1]):
            pass

    raises(ValueError, "must have full attention.*sliding_attention", enter)


def raises(kind: type[BaseException], text: str, call: Any) -> None:
    try:
        call()
    except kind as error:
        assert re.search(text, str(error)), error
    else:
        raise AssertionError(f"nothing was raised: {text}")


def faults() -> None:
    """Ranks that disagree, what cannot be cut, and attention that no operator of the ring does."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = dist.init_device_mesh("cpu", (world,))
    model = hybridq.convert(Model(), least_width=0)
    sdpa = nn.functional.scaled_dot_product_attention

    def enter(length: int = 4 * world, call: Any = None, recipe: Any = None, **options: Any) -> Any:
        x = torch.randn(2, HEADS, length, 16)
        given = {"buffers": [x], "buffer_seq_dims": [2], **options}
        autocast = hybridq.autocast(recipe=recipe, enabled=recipe is not None)
        with autocast, context_parallel(options.pop("mesh", mesh), model, **given):
            return None if call is None else call(x)

    raises(RuntimeError, "got the shapes of the inputs", lambda: enter(4 + rank))
    raises(RuntimeError, "got the quantizer", lambda: enter(recipe=("mxfp8", "nvfp4")[rank % 2]))
    raises(RuntimeError, "load_balance", lambda: enter(load_balance=bool(rank % 2)))
    raises(ValueError, "the ranks must divide the length", lambda: enter(4 * world + 1))
    raises(ValueError, "a dimension of tokens", lambda: enter(buffer_seq_dims=[]))
    raises(ValueError, "must be one of", lambda: enter(buffer_seq_dims=[4]))
    both = {"buffers": [torch.zeros(8), torch.zeros(16)], "buffer_seq_dims": [0, 0]}
    raises(ValueError, "equally many tokens", lambda: enter(**both))
    mask = torch.ones(4, 4, dtype=torch.bool)
    raises(ValueError, "no mask", lambda: enter(call=lambda x: sdpa_of(x, attn_mask=mask)))
    raises(ValueError, "got is_causal=False.*load_balance", lambda: enter(call=sdpa_of))
    drops = {"dropout_p": 0.5, "is_causal": True}
    raises(ValueError, "no dropout on a CPU", lambda: enter(call=lambda x: sdpa_of(x, **drops)))

    of_module(mesh)

    def other_width(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x[..., :8], is_causal=True)

    raises(RuntimeError, "no operator of the ring computes", lambda: enter(call=other_width))
    # Torch's own function, as a module has it that imported it by name before.
    imported = partial(sdpa_by_name, is_causal=True)
    raises(RuntimeError, "imported before", lambda: enter(call=lambda x: imported(x, x, x)))
    assert nn.functional.scaled_dot_product_attention is sdpa
    y = enter(call=lambda x: sdpa_of(x.clone().requires_grad_(), is_causal=True))  # and all goes on
    raises(RuntimeError, "a backward must run inside of the block", y.sum().backward)
    late = enter(call=lambda x: sdpa_of(x.clone().requires_grad_(), is_causal=True)).sum()
    enter(call=lambda x: late.backward())  # of an earlier block, in one as long


def of_module(mesh: Any) -> None:
    """What a module is told beside a causal mask: an error that names what computes it."""
    length = 8 * mesh.size()
    ulysses = "take hybridq.distributed.sequence_parallel"

    def attend(format: str = "bshd", recipe: Any = None, drops: float = 0.0, **call: Any) -> None:
        module = hybridq.MultiheadAttention(
            HIDDEN, HEADS, attention_dropout=drops, qkv_format=format
        )
        x = torch.randn((length, HIDDEN) if format == "thd" else (2, length, HIDDEN))
        buffers = {"buffers": [x], "buffer_seq_dims": [0 if format == "thd" else 1]}
        autocast = hybridq.autocast(recipe=recipe, enabled=recipe is not None)
        with autocast, context_parallel(mesh, module, **buffers):
            module(x, **call)

    starts = torch.tensor([0, 3, 8], dtype=torch.int32)
    hidden = torch.zeros(2, 1, 1, 8, dtype=torch.bool)
    hidden[:, ..., -1] = True
    for call in (
        {"window_size": (4, 0), "core_attention_bias_type": "alibi"},
        {"attn_mask_type": "padding_causal", "cu_seqlens_q": starts, "cu_seqlens_kv": starts},
        {"core_attention_bias_type": "alibi"},
        {"format": "thd", "cu_seqlens_q": starts, "cu_seqlens_kv": starts},
        {"recipe": hybridq.recipes.with_attention(hybridq.recipes.MXFP8BlockScaling())},
        {"attn_mask_type": "no_mask"},
        {"drops": 0.5},
    ):
        raises(ValueError, ulysses, lambda call=call: attend(**call))
    part = {"attn_mask_type": "padding_causal", "attention_mask": hidden}
    raises(ValueError, "must be that of the whole sequences", lambda: attend(**part))
    attend()  # and all goes on


def dies() -> None:
    """A rank that ends leaves an error to the others, and no hang."""
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    dist.barrier()
    if dist.get_rank() == 1:
        os._exit(7)
    try:
        for _ in range(100):
            x = torch.randn(1, 1, 48, 8)
            with context_parallel(mesh, buffers=[x], buffer_seq_dims=[2]):
                q = x.clone().requires_grad_()
                sdpa_of(q, is_causal=True).sum().backward()
    except RuntimeError:
        os._exit(0)  # a group that lost a rank cannot be left in peace
    raise AssertionError("nothing was raised")


def sdpa_of(x: torch.Tensor, **options: Any) -> torch.Tensor:
    return nn.functional.scaled_dot_product_attention(x, x, x, **options)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(globals())
