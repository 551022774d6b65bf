"""Sequences that ranks share: `python sequence_program.py RANK WORLD STORE NAME...`.

The oracle is one process: the same modules without `sequence_parallel`, on the whole sequences.
Without a recipe FP32 results differ by the order of sums only. Under a recipe the planes along
features are the same bytes, and those along tokens are too where blocks are not cut.
"""

from __future__ import annotations

import copy
import os
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from rank_program import main
from torch import nn
from torch.utils.checkpoint import checkpoint

import hybridq
from hybridq.distributed import count_traffic, sequence_loss, sequence_parallel, shard_sequence
from hybridq.distributed.sequence.mesh import exchange_of
from hybridq.errors import SpecError

CLASSES, HIDDEN, HEADS = 48, 64, 4


class Model(nn.Module):
    """Tokens in, logits out; two layers of transformers between."""

    def __init__(
        self, length: int, format: str = "bshd", recomputes: bool = False, **options: Any
    ) -> None:
        super().__init__()
        self.recomputes = recomputes
        options = {"num_gqa_groups": 2, "self_attn_mask_type": "causal", **options}
        self.embed = nn.Embedding(CLASSES, HIDDEN)
        self.layers = nn.ModuleList(
            hybridq.TransformerLayer(
                HIDDEN,
                96,
                HEADS,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                normalization="RMSNorm",
                activation="swiglu",
                attn_input_format=format,
                **options,
            )
            for _ in range(2)
        )
        self.head = nn.Linear(HIDDEN, CLASSES)
        self.order = (0, 1) if format == "bshd" else (1, 0)
        angles = hybridq.RotaryPositionEmbedding(HIDDEN // HEADS)(length)
        self.register_buffer("angles", angles)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() > 1:
                    parameter.copy_(torch.randn_like(parameter) / parameter.shape[1] ** 0.5)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(ids).permute(*self.order, 2)
        for layer in self.layers:
            call = partial(layer, rotary_pos_emb=self.angles)
            if self.recomputes:
                x = checkpoint(call, x, mask, use_reentrant=False)
            else:
                x = call(x, mask)
        return self.head(x.permute(*self.order, 2))


def batch(length: int, rows: int = 2) -> dict[str, torch.Tensor]:
    """Tokens and labels; the labels that count are not equally many on all ranks."""
    ids = torch.randint(CLASSES, (rows, length), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, : length // 2 + 3] = -100
    labels[:, length // 4] = 5
    return {"input_ids": ids, "labels": labels}


def whole_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    kept = logits[:, :-1].reshape(-1, CLASSES).float()
    return nn.functional.cross_entropy(kept, labels[:, 1:].reshape(-1))


def close(mine: torch.Tensor, want: torch.Tensor, bound: float, what: str) -> None:
    error = (mine.float() - want.float()).norm() / want.float().norm()
    assert torch.isfinite(error) and error <= bound, f"{what}: {float(error)} over {bound}"


def check_gradients(model: nn.Module, plain: nn.Module, bound: float, what: str) -> None:
    """The mean of the ranks' gradients is one process's."""
    for (name, mine), own in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert own.grad is not None and own.grad.norm() > 1e-4, f"{what}: {name} is not tested"
        dist.all_reduce(mine.grad)
        close(mine.grad / dist.get_world_size(), own.grad, bound, f"{what}: {name}")


def one(
    what: str,
    length: int = 64,
    recipe: str | None = None,
    bound: float = 2e-6,
    mask: torch.Tensor | None = None,
    **options: Any,
) -> None:
    torch.manual_seed(0)
    plain = hybridq.convert(Model(length, **options), least_width=0)
    model = sequence_parallel(copy.deepcopy(plain))
    given = batch(length)
    part = shard_sequence(given)
    with hybridq.autocast(recipe=recipe) if recipe else hybridq.autocast(enabled=False):
        want = plain(given["input_ids"], mask)
        mine = model(part["input_ids"], mask)
    rank, own = dist.get_rank(), mine.shape[1]
    close(mine, want[:, rank * own : (rank + 1) * own], bound, f"{what}: logits")
    expected = whole_loss(want, given["labels"])
    loss = sequence_loss(mine, part["shift_labels"])
    close(loss, expected, bound, f"{what}: loss")
    expected.backward()
    loss.backward()
    check_gradients(model, plain, bound, what)


def formats() -> None:
    """What travels in a format is quantized once on its way, as in one process, and counted."""
    rank, world, heads, length = dist.get_rank(), dist.get_world_size(), 4, 16
    for forward, backward in (("mxfp8", "mxfp8_e5m2"), ("mxfp8", None), (None, "mxfp8")):
        torch.manual_seed(3)
        whole = [torch.randn(2, n, length, 64, requires_grad=True) for n in (heads, 2, 2)]
        seen = [quantized(x, forward, backward) for x in whole]
        mixed = nn.functional.scaled_dot_product_attention(*seen, enable_gqa=True)
        want = quantized(mixed, forward, backward)
        weights = torch.randn(want.shape)
        (want * weights).sum().backward()
        exchange = exchange_of("test", None, (forward, backward))
        own = [part_of(x.detach(), rank, world).requires_grad_() for x in whole]

        def attend(q: Any, k: Any, v: Any, mask: Any, is_grouped: bool) -> torch.Tensor:
            return nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=is_grouped)

        with count_traffic() as traffic:
            got = exchange.attend(attend, *own, None)
        close(got, part_of(want, rank, world), 2e-6, f"{forward}")
        (got * part_of(weights, rank, world)).sum().backward()
        for x, mine in zip(whole, own, strict=True):
            close(mine.grad, part_of(x.grad, rank, world), 2e-6, f"{backward}")
        values = sum(x.numel() for x in own) + own[0].numel()
        if forward == "mxfp8":
            assert traffic.nbytes_by_kind["all_to_all"] == values * 33 // 32, traffic
    model = sequence_parallel(hybridq.convert(Model(64), least_width=0), communication="mxfp8")
    assert model(shard_sequence(batch(64))["input_ids"], None).isfinite().all()
    other = hybridq.convert(Model(64), least_width=0)
    raises(SpecError, "mxfp9", lambda: sequence_parallel(other, communication="mxfp9"))
    raises(TypeError, "a pair", lambda: sequence_parallel(other, communication=8))


class _Rounded(torch.autograd.Function):
    """Each value and each gradient quantized along the features of its head, and decoded."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: Any, backward: Any) -> torch.Tensor:
        ctx.backward_format = backward
        return decoded(x, forward)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        return decoded(dy, ctx.backward_format), None, None


def decoded(x: torch.Tensor, name: str | None) -> torch.Tensor:
    if name is None:
        return x.clone()
    return hybridq.quantize(x.reshape(-1, x.shape[-1]), name).dequantize().view(x.shape)


def quantized(x: torch.Tensor, forward: str | None, backward: str | None) -> torch.Tensor:
    made: torch.Tensor = _Rounded.apply(x, forward, backward)
    return made


def part_of(x: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    return x.chunk(world, 2)[rank]


def masks() -> None:
    length = 64
    one("causal, batch first")
    one("causal, length first", format="sbhd")
    one("as many heads of keys", num_gqa_groups=4)
    one("one head of keys", num_gqa_groups=1)
    one("window", self_attn_mask_type="causal", window_size=(7, 0))
    one("all", self_attn_mask_type="no_mask")
    hidden = torch.zeros(2, 1, 1, length, dtype=torch.bool)
    hidden[1, ..., 50:] = True
    one("padding", mask=hidden, self_attn_mask_type="padding")
    packed = torch.arange(length) // 24
    outside = (packed[:, None] != packed[None]) | torch.ones(length, length).triu(1).bool()
    one("packed", mask=outside[None, None], self_attn_mask_type="arbitrary")
    by_head = outside[None, None] | (torch.rand(1, HEADS, length, length) < 0.2)
    by_head &= ~torch.eye(length, dtype=torch.bool)
    dist.broadcast(by_head, 0)
    one("a mask for each head", mask=by_head, self_attn_mask_type="arbitrary")


def recipes() -> None:
    """Rows of a rank are whole blocks along tokens: 2 x 64 tokens on at most four ranks."""
    # A rounding that goes the other way after an FP32 sum in another order is one code's step.
    for recipe in ("mxfp8", "fp8_block", nvfp4_of_the_group()):
        one(f"under {recipe}", length=128, recipe=recipe, bound=6e-2)
    estimates("mxfp8_fwd_nvfp4_bwd")
    one("recomputed, under mxfp8", length=128, recipe="mxfp8", bound=6e-2, recomputes=True)


def nvfp4_of_the_group() -> Any:
    """NVFP4 whose largest value is that of all ranks, as one process finds it."""
    options = {"with_amax_reduction": True, "amax_reduction_group": dist.group.WORLD}

    def factory(role: Any) -> Any:
        reduced = {} if role.tensor_type == "weight" else options
        return hybridq.NVFP4Quantizer(**reduced)

    return hybridq.CustomRecipe(factory)


def estimates(recipe: str) -> None:
    """A backward in NVFP4 has roundings of its own on each rank, and the error of one process."""
    torch.manual_seed(0)
    model = hybridq.convert(Model(128), least_width=0)
    exact, plain, mine = (copy.deepcopy(model) for _ in range(3))
    sequence_parallel(mine)
    given = batch(128)
    part = shard_sequence(given)
    whole_loss(exact(given["input_ids"]), given["labels"]).backward()
    with hybridq.autocast(recipe=recipe):
        whole_loss(plain(given["input_ids"]), given["labels"]).backward()
        loss = sequence_loss(mine(part["input_ids"]), part["shift_labels"])
    loss.backward()
    errors = []
    for one_of in (plain, mine):
        total = 0.0
        for own, want in zip(one_of.parameters(), exact.parameters(), strict=True):
            if one_of is mine:
                dist.all_reduce(own.grad)
                own.grad /= dist.get_world_size()
            total += float((own.grad - want.grad).square().sum() / want.grad.square().sum())
        errors.append((total / len(list(exact.parameters()))) ** 0.5)
    assert 0.05 < errors[1] < 1.1 * errors[0], errors


def demo() -> None:
    """The demo's model, whose attention is its own: losses of steps, and planes, of one process."""
    from hybridq.demo.data import Corpus
    from hybridq.demo.fsdp import InTurnTrainer, ShardedTrainer
    from hybridq.demo.model import ModelConfig
    from hybridq.demo.train import TrainConfig

    world = dist.get_world_size()
    config = TrainConfig(ModelConfig(2, 128, 4, 128, 128), 2, 3, eval_batches=2, eval_points=1)
    data = torch.randint(97, (6000,), generator=torch.Generator().manual_seed(3)).to(torch.uint8)
    corpus = Corpus(data[:4000], data[4000:], (), (), "numbers", False)
    # The backward in NVFP4 draws other random bits on ranks; what it finds is as far from exact.
    for recipe, bound in (("mxfp8", 1e-3), ("mxfp8_fwd_nvfp4_bwd", 1e-2)):
        mine = ShardedTrainer(config, recipe, corpus, sp=world)
        alone = InTurnTrainer(config, recipe, corpus, 1)
        losses = [
            [one.loss for one in trainer.steps()] + [trainer.validation_loss]
            for trainer in (mine, alone)
        ]
        first = [one[0] for one in losses]
        assert abs(first[0] / first[1] - 1) < 2e-5, losses  # the same weights, forwards in MXFP8
        for got, want in zip(*losses, strict=True):
            assert abs(got / want - 1) < bound, losses
        check_planes(mine.model, hybridq.recipes.get(recipe))


def check_planes(model: Any, recipe: Any) -> None:
    """What the blocks' matrices are gathered as is the encoded whole, by bytes."""
    names = ("attention.qkv", "attention.out", "ffn.gate_up", "ffn.down")
    for block in model.blocks:
        whole = {n: block.get_submodule(n).weight.full_tensor().bfloat16() for n in names}
        with hybridq.autocast(recipe=recipe):
            block.unshard()
        for name in names:
            module = block.get_submodule(name)
            slot, storage = module.plan_of(recipe).weight, module.weight.tensor_storage
            wanted = torch.ops.hybridq.encode(
                whole[name], slot.row.spec, slot.col.spec, col_source=slot.col_source
            )
            for direction in ("rowwise", "columnwise"):
                plane = storage.plane(direction)
                shape = whole[name].shape if direction == "rowwise" else whole[name].shape[::-1]
                assert not plane.spec.format.is_identity
                for one in plane.spec.buffers(*shape):
                    got, want = plane.buffers[one.name], wanted.pop(0)
                    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8)), name
        block.reshard()


def cross() -> None:
    """A decoder, whose queries and keys are of sequences of two lengths."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    plain = hybridq.TransformerLayer(HIDDEN, 96, HEADS, layer_type="decoder", **options)
    model = sequence_parallel(copy.deepcopy(plain))
    rank, world = dist.get_rank(), dist.get_world_size()
    x, encoded = torch.randn(32, 2, HIDDEN), torch.randn(16, 2, HIDDEN)
    want = plain(x, encoder_output=encoded)
    mine = model(x.chunk(world)[rank], encoder_output=encoded.chunk(world)[rank])
    close(mine, want.chunk(world)[rank], 2e-6, "decoder")
    want.square().mean().backward()
    mine.square().mean().backward()
    check_gradients(model, plain, 3e-6, "decoder")


def helper() -> None:
    """Parts of a batch: labels of the next part, positions, filling up."""
    rank, world = dist.get_rank(), dist.get_world_size()
    length = 4 * world - 1
    ids = torch.arange(2 * length).view(2, length)
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    given = {"input_ids": ids, "labels": ids, "attention_mask": mask}
    part = shard_sequence(given, pad_token_id=7)
    own = slice(rank * 4, rank * 4 + 4)
    filled = nn.functional.pad(ids, (0, 1), value=7)
    assert torch.equal(part["input_ids"], filled[:, own])
    labels = nn.functional.pad(ids[:, 1:], (0, 2), value=-100)
    assert torch.equal(part["shift_labels"], labels[:, own])
    assert torch.equal(part["labels"], labels[:, own])
    assert torch.equal(part["attention_mask"], nn.functional.pad(mask, (0, 1))[:, own])
    assert part["position_ids"].tolist() == [list(range(rank * 4, rank * 4 + 4))]
    bounds = torch.tensor([0, 3, length])
    packed = shard_sequence(
        {"input_ids": ids[:1], "labels": ids[:1]}, cu_seqlens=bounds, pad_token_id=0
    )
    positions = [*range(3), *range(length - 2)]
    assert packed["position_ids"].tolist() == [positions[own]]
    labels = [1, 2, -100, *range(4, length), -100, -100]
    assert packed["shift_labels"].tolist() == [labels[own]]
    both = {"input_ids": ids[:1], "labels": ids[:1], "attention_mask": mask[:1]}
    text = "cu_seqlens must be given without an attention_mask"
    raises(ValueError, text, lambda: shard_sequence(both, cu_seqlens=bounds, pad_token_id=0))
    for bad, text in (
        ({"input_ids": ids}, "the ranks must divide the length"),
        ({"labels": ids}, "must have input_ids or inputs_embeds"),
        ({"input_ids": ids, "pixels": ids}, "got pixels too"),
        ({"input_ids": ids, "labels": ids[:, 1:]}, r"labels must be \[batch, length\]"),
    ):
        raises(ValueError, text, lambda bad=bad: shard_sequence(bad))


def raises(kind: type[BaseException], text: str, call: Any) -> None:
    import re

    try:
        call()
    except kind as error:
        assert re.search(text, str(error)), error
    else:
        raise AssertionError(f"nothing was raised: {text}")


def faults() -> None:
    """Ranks that disagree: an error on every rank, and no rank waits."""
    rank, world = dist.get_rank(), dist.get_world_size()
    ids = torch.zeros(1, 4 * world, dtype=torch.int64)
    differ = "ranks that share sequences must be given the same batch, got"
    raises(RuntimeError, differ, lambda: shard_sequence({"input_ids": ids[:, : 4 + rank]}))
    raises(RuntimeError, f"{differ} the digest", lambda: shard_sequence({"input_ids": ids + rank}))
    model = sequence_parallel(hybridq.convert(Model(64), least_width=0))
    uneven = torch.zeros(1, 8 + rank, dtype=torch.int64)
    text = "must run the same model under the same recipe, on equal parts, got the "
    raises(RuntimeError, f"{text}shapes of the inputs", lambda: model(uneven))

    def other_recipe() -> None:
        with hybridq.autocast(recipe=("mxfp8", "nvfp4")[rank % 2]):
            model(uneven[:, :8])

    raises(RuntimeError, f"{text}quantizer of layers.0.self_attention", other_recipe)
    model(uneven[:, :8])  # and all goes on

    def layer(heads: int = HEADS, **options: Any) -> nn.Module:
        made = hybridq.TransformerLayer(
            HIDDEN, 96, heads, attn_input_format="bshd", num_gqa_groups=4
        )
        return sequence_parallel(made, **options)

    x, odd_rank = torch.randn(2, 4, HIDDEN), rank % 2
    many = layer(4 * (1 + odd_rank))  # of as many parameters as with a head size twice as large
    raises(RuntimeError, "got parameter number 2: ", lambda: many(x))
    alike = hybridq.TransformerLayer(HIDDEN, 96, 4 * (1 + odd_rank), attn_input_format="bshd")
    sequence_parallel(alike)
    raises(RuntimeError, "got attention of self_attention: num_att.*=4 num_gqa", lambda: alike(x))
    mixed = layer(communication=("mxfp8", None)[odd_rank])
    raises(RuntimeError, "got what travels around attention: ", lambda: mixed(x))
    kind = {"self_attn_mask_type": ("causal", "no_mask")[odd_rank]}
    raises(RuntimeError, "got the shapes of the inputs.*no_mask", lambda: layer()(x, **kind))
    raises(ValueError, "once", lambda: sequence_parallel(model))
    odd = hybridq.MultiheadAttention(48, 3)
    raises(ValueError, "the ranks must divide the heads", lambda: sequence_parallel(odd))
    raises(ValueError, "without any", lambda: sequence_parallel(nn.Linear(2, 2)))
    alone: nn.Module
    for alone, name in (
        (nn.MultiheadAttention(64, 4), "1 .MultiheadAttention"),
        (nn.TransformerEncoderLayer(64, 4, 96), "1.self_attn .MultiheadAttention"),
        (hybridq.nn.DotProductAttention(4, 16), "1 .DotProductAttention"),
    ):
        for one_of in (alone, hybridq.convert(copy.deepcopy(alone), least_width=0)):
            both = nn.Sequential(hybridq.MultiheadAttention(64, 4), one_of)
            text = "must see whole sequences, got " + name.replace(" .", r" \((Torch)?")
            raises(ValueError, text, lambda both=both: sequence_parallel(both))
            assert both[0].exchange is None  # nothing was changed
    mesh = dist.init_device_mesh("cpu", (1, world))
    raises(ValueError, "one dimension, got 2", lambda: sequence_parallel(model, mesh))
    small = Model(8)  # angles of the part alone
    raises(ValueError, "of the whole sequence", lambda: sequence_parallel(small)(uneven[:, :8]))


def meshes() -> None:
    """A rank that was given another mesh is missed by the others, in words and in time."""
    rank, world = dist.get_rank(), dist.get_world_size()
    seconds = timedelta(seconds=2)
    every = dist.new_group(list(range(world)), timeout=seconds)
    alone = dist.new_group([1], timeout=seconds)
    layer = hybridq.TransformerLayer(HIDDEN, 96, HEADS, attn_input_format="bshd")
    sequence_parallel(layer, alone if rank == 1 else every)
    x = torch.randn(2, 4, HIDDEN)
    if rank == 1:
        layer(x)  # its mesh is itself
    else:
        raises(RuntimeError, r"the ranks of the mesh, \[0, 1.*must be given this", lambda: layer(x))


def dies() -> None:
    """A rank that ends leaves an error to the others, in attention or before it, and no hang."""
    model = sequence_parallel(hybridq.convert(Model(64), least_width=0))
    part = shard_sequence(batch(64))["input_ids"]
    model(part)
    dist.barrier()
    if dist.get_rank() == 1:
        os._exit(7)
    try:
        for _ in range(100):
            model(part).sum().backward()
    except RuntimeError:
        os._exit(0)  # a group that lost a rank cannot be left in peace
    raise AssertionError("nothing was raised")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(globals())
