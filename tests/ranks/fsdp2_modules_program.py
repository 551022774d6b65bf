"""FSDP2 over all kinds of modules: `python fsdp2_modules_program.py RANK WORLD STORE NAME...`.

As in `fsdp2_program.py` all ranks see the same batch, and a sharded run is the unsharded one in
every bit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from fsdp2_program import check_equal
from rank_program import main
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import hybridq
from hybridq.distributed import GatheredWeight, prepare_fsdp2, wire_nbytes

RECIPES = ("mxfp8", "nvfp4", "mxfp8_fwd_nvfp4_bwd")
STEPS = 3


class Blocks(nn.Module):
    """Modules one after the other; each is a group of FSDP2's."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Experts(nn.Module):
    """A GroupedLinear with its splits."""

    def __init__(self, splits: list[int], *args: int, **options: Any) -> None:
        super().__init__()
        self.splits = splits
        self.grouped = hybridq.GroupedLinear(len(splits), *args, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.grouped(x, self.splits)


class Tied(nn.Module):
    """Two linear modules with one weight."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.a, self.b = hybridq.Linear(features, features), hybridq.Linear(features, features)
        self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x)))


class Language(nn.Module):
    """An embedding whose weight is the head's too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 24), hybridq.Linear(24, 50, bias=False)
        self.middle = hybridq.Linear(24, 24)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.middle(self.embedding(x)))


def train(
    make: Callable[[], nn.Module],
    x: Callable[[], torch.Tensor],
    what: str,
    prepared: int,
    recipe: str,
    compiled: bool = False,
) -> None:
    """Train a model and its sharded copy; `prepared` weights must travel as planes.

    With `compiled` all blocks are, those of the unsharded model too.
    """
    torch.manual_seed(0)
    plain = make().bfloat16()
    sharded = copy.deepcopy(plain)
    if prepared:
        prepare_fsdp2(sharded)
    assert prepared == len([p for p in sharded.parameters() if isinstance(p, GatheredWeight)]), what
    for own, block in zip(
        getattr(plain, "blocks", ()), getattr(sharded, "blocks", ()), strict=True
    ):
        if compiled:
            own.compile(fullgraph=True)
            block.compile(fullgraph=True)
        fully_shard(block)
    fully_shard(sharded)
    models = (sharded, plain)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    for number in range(STEPS):
        torch.manual_seed(100 + number)
        batch, outputs = x(), []
        for model, optimizer in zip(models, optimizers, strict=True):
            torch.manual_seed(number)
            with hybridq.autocast(recipe=recipe):
                y = model(batch)
            (y.float() - 0.3).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            outputs.append(y.detach())
        assert torch.equal(*outputs), f"{what}, {recipe}: outputs differ in step {number}"
    check_equal(sharded, plain, f"{what}, {recipe}")
    assert bool(wire_nbytes(sharded)) == bool(prepared)


def rows(features: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.randn(24, features).bfloat16()


def tied() -> None:
    for recipe in RECIPES:
        train(lambda: Blocks(Tied(40), Tied(40)), rows(40), "tied", 2, recipe)
    tokens = lambda: torch.randint(50, (24,))  # noqa: E731
    train(Language, tokens, "tied to an embedding", 1, "mxfp8")


def wrapped() -> None:
    """Wrappers around prepared modules themselves have the modules' attributes, too."""
    kinds = (checkpoint_wrapper, partial(torch.compile, backend="eager"))
    for wrap, recipe in zip(kinds, ("mxfp8_fwd_nvfp4_bwd", "mxfp8"), strict=True):

        def make(wrap: Any = wrap) -> nn.Module:
            parts = [hybridq.Linear(40, 56), nn.GELU(), hybridq.Linear(56, 40)]
            return Blocks(nn.Sequential(wrap(parts[0]), parts[1], wrap(parts[2])))

        train(make, rows(40), "wrapped", 2, recipe)


def fused() -> None:
    def make() -> nn.Module:
        return Blocks(
            hybridq.LayerNormLinear(40, 36),
            hybridq.LayerNormMLP(36, 52, activation="swiglu"),
            hybridq.RMSNormLinear(36, 20),
        )

    for recipe in (*RECIPES, "fp8_current", "fp8_delayed"):
        train(make, rows(40), "fused modules", 4, recipe)


def transformer() -> None:
    def make() -> nn.Module:
        options = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
        return Blocks(*(hybridq.TransformerLayer(48, 80, 4, **options) for _ in range(2)))

    for recipe in RECIPES:
        train(make, lambda: torch.randn(6, 3, 48).bfloat16(), "transformer", 8, recipe)


def grouped() -> None:
    for single in (False, True):
        for recipe in (*RECIPES, "fp8_delayed"):
            make = lambda s=single: Blocks(  # noqa: E731
                hybridq.Linear(40, 36), Experts([9, 0, 15], 36, 20, single_grouped_weight=s)
            )
            train(make, rows(40), f"experts, single {single}", 4 - 2 * single, recipe)


def compiled() -> None:
    def make() -> nn.Module:
        return Blocks(*(nn.Sequential(hybridq.Linear(48, 48), nn.Tanh()) for _ in range(2)))

    for recipe in ("mxfp8", "nvfp4"):
        train(make, rows(48), "compiled", 0, recipe, compiled=True)
    # Derivable, hybrid, of the decoded row; and two that the graph quantizes itself.
    names = ("fp8_current", "nvfp4", "mxfp8_fwd_nvfp4_bwd", "nvfp4_1d_weight")
    for recipe in (*names, "mxfp8_fwd_high_precision_bwd", "mxfp8", "fp8_delayed"):
        torch._dynamo.reset()
        counters.clear()
        train(make, rows(48), "compiled and prepared", 2, recipe, compiled=True)
        # Of each model: a block whose input needs no gradient, and one whose does.
        assert counters["stats"]["unique_graphs"] == 4 and not counters["graph_break"], counters
    train(
        lambda: Blocks(Recomputed(), Recomputed()),
        rows(48),
        "recomputed in a graph",
        2,
        "nvfp4_1d_weight",
        compiled=True,
    )
    for recipe in ("mxfp8_fwd_nvfp4_bwd", "nvfp4"):
        freed_after_graphs(recipe)
    late = prepare_fsdp2(make().bfloat16())
    fully_shard(late)
    with hybridq.autocast(recipe="mxfp8"):
        late(rows(48)())
        try:
            torch.compile(late.blocks[0], fullgraph=True)(rows(48)())
        except Exception as error:  # dynamo wraps what it meets in classes of its own
            assert "leave hybridq.distributed.prepare_fsdp2 out" in str(error), error
        else:
            raise AssertionError("nothing was raised")


class OwnRecipe(nn.Module):
    """A block that sets its recipe inside of what is compiled."""

    def __init__(self, features: int, recipe: str | None) -> None:
        super().__init__()
        self.linear, self.recipe = hybridq.Linear(features, features), recipe

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with hybridq.autocast(enabled=self.recipe is not None, recipe=self.recipe):
            return self.linear(x)


def compiled_early() -> None:
    """Compiled blocks that were gathered under another recipe than they compute under."""
    torch._dynamo.config.recompile_limit = 64
    torch.manual_seed(0)
    plain = Blocks(*(nn.Sequential(hybridq.Linear(48, 48)) for _ in range(2))).bfloat16()
    sharded = prepare_fsdp2(copy.deepcopy(plain))
    for model in (sharded, plain):
        for block in model.blocks:
            block.compile(fullgraph=True, backend="aot_eager")
    for block in sharded.blocks:
        fully_shard(block, reshard_after_forward=False)
    fully_shard(sharded)

    def compare(recipe: str | None, what: str) -> None:
        x, results = rows(48)(), []
        for model in (sharded, plain):
            torch.manual_seed(1)
            with hybridq.autocast(enabled=recipe is not None, recipe=recipe):
                y = model(x)
            if model.training:
                y.float().square().sum().backward()
            results.append(y.detach())
        assert torch.equal(*results), f"{recipe}, {what}"
        if not sharded.training:
            return
        for own, whole in zip(sharded.parameters(), plain.parameters(), strict=True):
            assert torch.equal(own.grad.full_tensor(), whole.grad), f"gradients, {recipe}, {what}"
        for model in (sharded, plain):
            model.zero_grad()

    for given, recipe in ((None, "nvfp4"), ("nvfp4_1d_weight", "nvfp4"), ("nvfp4", None)):
        with hybridq.autocast(enabled=given is not None, recipe=given):
            sharded.blocks[0].unshard()
            sharded.blocks[1].unshard(async_op=True)
        compare(recipe, f"unsharded under {given}")
    for model in (sharded, plain):
        model.eval()
    with torch.no_grad():
        for recipe in (None, "nvfp4", None):  # what the last one gathered stays
            compare(recipe, "gathered for the last forward")


def compiled_inner_recipe() -> None:
    """A recipe that a compiled block sets inside is seen by no gather."""
    pairs = (("nvfp4", "mxfp8"), ("nvfp4", None), ("mxfp8", "nvfp4"), (None, "nvfp4"))
    for outer, inner in (*pairs, ("nvfp4", "nvfp4")):
        torch._dynamo.reset()
        torch.manual_seed(0)
        plain = Blocks(OwnRecipe(48, inner)).bfloat16()
        sharded = prepare_fsdp2(copy.deepcopy(plain))
        for model in (sharded, plain):
            model.blocks[0].compile(fullgraph=True, backend="aot_eager")
        fully_shard(sharded.blocks[0])
        fully_shard(sharded)
        x = rows(48)()
        with hybridq.autocast(enabled=outer is not None, recipe=outer):
            whole = plain(x)
            if outer != "nvfp4" or outer == inner:  # of the others the values travel
                assert torch.equal(sharded(x), whole), (outer, inner)
                continue
            try:
                sharded(x)
            except Exception as error:  # dynamo wraps what it meets in classes of its own
                assert "set the recipe around the block" in str(error), error
            else:
                raise AssertionError(f"nothing was raised, {outer}, {inner}")


class Recomputed(nn.Module):
    """A block whose backward computes its forward again, inside its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = hybridq.Linear(48, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(checkpoint(self.linear, x, use_reentrant=False))


def freed_after_graphs(recipe: str) -> None:
    """Compiled blocks, prepared or quantized: planes are freed between forward and backward."""
    for is_quantized in (False, True):
        torch._dynamo.reset()
        with hybridq.quantized_model_init(recipe, enabled=is_quantized):
            torch.manual_seed(0)
            plain = Blocks(*(hybridq.Linear(48, 48, dtype=torch.bfloat16) for _ in range(2)))
        sharded = prepare_fsdp2(copy.deepcopy(plain))
        for block in (*sharded.blocks, *plain.blocks):
            block.compile(fullgraph=True)
        for block in sharded.blocks:
            fully_shard(block)
        fully_shard(sharded)
        abouts = [block.weight._local_tensor._about for block in sharded.blocks]
        for _ in range(2):
            x, results = rows(48)(), []
            for model in (sharded, plain):
                own = x.clone().requires_grad_()
                torch.manual_seed(1)
                with hybridq.autocast(recipe=recipe):
                    y = model(own)
                held = [buffer for about in abouts for buffer in about.inner]
                assert len(held) >= len(abouts), "nothing was tested"
                assert not any(b.untyped_storage().nbytes() for b in held)
                y.float().square().sum().backward()
                assert not any(b.untyped_storage().nbytes() for b in held)
                results += [y.detach(), own.grad]
            for mine, whole in zip(results[:2], results[2:], strict=True):
                assert torch.equal(mine, whole), f"quantized {is_quantized}"


def split_groups() -> None:
    """What ranks have parts of, and is no Linear's: an error that names it, and what to do."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = Experts([8, 8], 32, 32)
    weight = distribute_tensor(model.grouped.weight1.detach(), mesh["tensor"], [Shard(0)])
    model.grouped.weight1 = nn.Parameter(weight)
    try:
        prepare_fsdp2(model)
    except NotImplementedError as error:
        assert "grouped.weight1 must be a weight in high precision of a" in str(error), error
        assert "a weight of a GroupedLinear; leave prepare_fsdp2 out" in str(error), error
    else:
        raise AssertionError("nothing was raised")


if __name__ == "__main__":
    main(globals())
