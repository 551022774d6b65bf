"""Steps of the axes that benchmarks/axes.py counts, and the counting."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import Schedule1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import hybridq
from hybridq.distributed import (
    context_parallel,
    count_traffic,
    pipeline_stage,
    prepare_fsdp2,
    sequence_parallel,
    shard_sequence,
)
from hybridq.kernels.cpu import Steps, backend

RECIPES = {"BF16": None, "MXFP8": "mxfp8", "hybrid": "mxfp8_fwd_nvfp4_bwd"}
SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
BATCH, LENGTH, MICROBATCHES, WARM = 4, 128, 4, 2
BY_ROWS = (*(f"self_attn.{name}_proj" for name in "qkv"), "mlp.gate_proj", "mlp.up_proj")
BY_COLUMNS = ("self_attn.o_proj", "mlp.down_proj")
#: What travels in the format of a recipe: forward, backward.
FORMATS = {"BF16": None, "MXFP8": "mxfp8", "hybrid": ("mxfp8", "nvfp4")}


@contextmanager
def count_encodes() -> Iterator[Counter[str]]:
    """Count what the core encodes in a block: matrices, planes of them, values of those planes.

    Below everything that decides whether something is encoded: an operator's call would be seen by
    a dispatch mode, under which modules keep no weights.
    """
    core, found = backend.core, Counter(matrices=0, planes=0, values=0)

    class Spy:
        def __getattr__(self, name: str) -> Any:
            if name in ("encode_groups", "map_encode"):
                raise NotImplementedError(f"count_encodes: does not count {name}")
            return getattr(core, name)

        def encode_from_scratch(self, x: int, dtype: int, *rest: Any) -> Any:
            rows, cols, _, _, row, col = rest[:6]
            planes = (row is not None) + (col is not None)
            found.update(matrices=1, planes=planes, values=planes * rows * cols)
            return core.encode_from_scratch(x, dtype, *rest)

    run = Steps.run

    def counted(steps: Steps, threads: int) -> None:
        values = sum(rows * cols for rows, cols in steps.encoded)
        found.update(matrices=len(steps.encoded), planes=len(steps.encoded), values=values)
        run(steps, threads)

    backend.core = Spy()
    Steps.run = counted  # type: ignore[method-assign]
    try:
        yield found
    finally:
        backend.core = core
        Steps.run = run  # type: ignore[method-assign]


class Part(nn.Module):
    """Some layers of a Llama, with its embedding in front and its head behind, or without."""

    def __init__(self, model: Any, layers: range, is_first: bool = True, is_last: bool = True):
        super().__init__()
        self.embed = model.model.embed_tokens if is_first else None
        self.rotary = model.model.rotary_emb
        self.layers = nn.ModuleList(model.model.layers[i] for i in layers)
        self.norm = model.model.norm if is_last else None
        self.head = model.lm_head if is_last else None
        self.places = torch.arange(LENGTH)[None]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = self.places
        x = x if self.embed is None else self.embed(x)
        angles = self.rotary(x, places)
        for layer in self.layers:
            x = layer(x, position_ids=places, position_embeddings=angles)
        return x if self.head is None else self.head(self.norm(x))


def llama() -> Any:
    """The model, converted, BF16."""
    torch.manual_seed(0)
    return hybridq.convert(LlamaForCausalLM(LlamaConfig(**SIZES)).bfloat16())


def whole() -> Part:
    return Part(llama(), range(SIZES["num_hidden_layers"]))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(
        SIZES["vocab_size"], (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1)
    )
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def on_rows(model: nn.Module, rank: int, world: int) -> Callable[[], Any]:
    """A step on this rank's sequences."""
    ids, labels = (part.chunk(world)[rank] for part in batch())
    return lambda: loss_of(model(ids), labels).backward()


# ---- the axes: of each a model's parameters, and a step


def ddp(recipe: str) -> tuple[Any, Callable[[], Any]]:
    model = DistributedDataParallel(whole(), broadcast_buffers=False)
    return model, on_rows(model, dist.get_rank(), dist.get_world_size())


def sharded(model: Any, recipe: str, mesh: Any = None) -> Any:
    if recipe != "BF16":
        prepare_fsdp2(model)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fsdp2(recipe: str) -> tuple[Any, Callable[[], Any]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = sharded(whole(), recipe, mesh)
    return model, on_rows(model, dist.get_rank(), dist.get_world_size())


def around(rows: Any) -> dict[str, Any]:
    """Styles in front of the layers and behind them, where ranks share tokens."""
    return {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=rows),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=rows, output_layouts=Replicate()),
    }


def norms(layer: int) -> dict[str, Any]:
    names = ("input_layernorm", "post_attention_layernorm")
    return {f"layers.{layer}.{name}": SequenceParallel(use_local_output=True) for name in names}


def parallel(model: Any, mesh: Any, shares_tokens: bool = False) -> Any:
    """By torch's plans; without shared tokens embedding and head are each rank's own."""
    rows = Shard(1) if shares_tokens else Replicate()
    plan: dict[str, Any] = around(rows) if shares_tokens else {}
    for i in range(len(model.layers)):
        plan |= {f"layers.{i}.{name}": ColwiseParallel() for name in BY_ROWS}
        plan |= {f"layers.{i}.{name}": RowwiseParallel(output_layouts=rows) for name in BY_COLUMNS}
        if shares_tokens:
            plan |= norms(i)
            plan[f"layers.{i}.self_attn"] = PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": rows},
                desired_input_kwarg_layouts={"hidden_states": Replicate()},
            )
            plan[f"layers.{i}.mlp"] = PrepareModuleInput(
                input_layouts=(rows,), desired_input_layouts=(Replicate(),)
            )
    return parallelize_module(model, mesh, plan)


def tensor(recipe: str) -> tuple[Any, Callable[[], Any]]:
    model = parallel(whole(), init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, on_rows(model, 0, 1)


def tensor_sequence(recipe: str) -> tuple[Any, Callable[[], Any]]:
    model = parallel(whole(), init_device_mesh("cpu", (dist.get_world_size(),)), True)
    return model, on_rows(model, 0, 1)


def attend(module: Any, hidden_states: Any, position_embeddings: Any, **_: Any) -> Any:
    """Llama's attention, with as many tokens as its linear layers return, not as it is given."""
    found = [getattr(module, f"{name}_proj")(hidden_states) for name in "qkv"]
    q, k, v = (x.unflatten(-1, (-1, module.head_dim)).transpose(1, 2) for x in found)
    q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
    mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return module.o_proj(mixed.transpose(1, 2).flatten(2)), None


def tensor_planes(recipe: str) -> tuple[Any, Callable[[], Any]]:
    """By hybridq's styles: each layer encodes its own tokens, and gathers planes."""
    model, rows = whole(), Shard(1)
    for layer in model.layers:
        layer.self_attn.forward = partial(attend, layer.self_attn)
    plan: dict[str, Any] = around(rows)
    for i in range(len(model.layers)):
        plan |= norms(i)
        for name in BY_ROWS:
            plan[f"layers.{i}.{name}"] = hybridq.distributed.ColwiseParallel(input_layouts=rows)
        for name in BY_COLUMNS:
            plan[f"layers.{i}.{name}"] = hybridq.distributed.RowwiseParallel(output_layouts=rows)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return parallelize_module(model, mesh, plan), on_rows(model, 0, 1)


def tensor_fsdp2(recipe: str) -> tuple[Any, Callable[[], Any]]:
    """Two tensor-parallel ranks, and as many groups of them as there are."""
    groups = dist.get_world_size() // 2
    mesh = init_device_mesh("cpu", (groups, 2), mesh_dim_names=("dp", "tp"))
    model = sharded(parallel(whole(), mesh["tp"]), recipe, mesh["dp"])
    return model, on_rows(model, mesh.get_local_rank("dp"), groups)


def ulysses(recipe: str, communication: Any = None) -> tuple[Any, Callable[[], Any]]:
    model = sequence_parallel(llama(), communication=communication)
    ids, labels = batch()
    part = shard_sequence({"input_ids": ids, "labels": labels})
    # The step's gradients are averaged by DDP, as on any data-parallel rank.
    model = DistributedDataParallel(model, broadcast_buffers=False)
    return model, lambda: model(**part).loss.backward()


def ulysses_planes(recipe: str) -> tuple[Any, Callable[[], Any]]:
    return ulysses(recipe, FORMATS[recipe])


def ring(recipe: str) -> tuple[Any, Callable[[], Any]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    part, (ids, labels) = whole(), batch()
    model = DistributedDataParallel(part, broadcast_buffers=False)

    def step() -> None:
        buffers = [ids, labels, part.places]
        with context_parallel(mesh, part, buffers=buffers, buffer_seq_dims=[1, 1, 1]):
            loss_of(model(ids), labels).backward()

    return model, step


def pipeline(recipe: str, communication: Any = None) -> tuple[Any, Callable[[], Any]]:
    rank, world = dist.get_rank(), dist.get_world_size()
    each = SIZES["num_hidden_layers"] // world
    layers = range(rank * each, (rank + 1) * each)
    model = Part(llama(), layers, rank == 0, rank == world - 1)
    stage = pipeline_stage(model, rank, world, "cpu", communication=communication)
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_of)
    ids, labels = batch()
    args = (ids,) if rank == 0 else ()
    options = {"target": labels} if rank == world - 1 else {}
    return model, lambda: schedule.step(*args, **options)


def pipeline_planes(recipe: str) -> tuple[Any, Callable[[], Any]]:
    return pipeline(recipe, FORMATS[recipe])


AXES: dict[str, Callable[[str], tuple[Any, Callable[[], Any]]]] = {
    "DDP": ddp,
    "FSDP2": fsdp2,
    "tensor": tensor,
    "tensor, `SequenceParallel`": tensor_sequence,
    "the same, planes of tokens": tensor_planes,
    "Ulysses and DDP": ulysses,
    "Ulysses, `communication`": ulysses_planes,
    "ring attention and DDP": ring,
    "pipeline": pipeline,
    "pipeline, `communication`": pipeline_planes,
    "tensor (2 ranks) x FSDP2": tensor_fsdp2,
}


def cases(world: int) -> Iterator[tuple[str, str]]:
    """Axis and recipe of all that is counted on a number of ranks."""
    for axis in AXES:
        if world > 2 or "(2 ranks)" not in axis:
            for recipe in RECIPES:
                is_alike = "communication" in axis or "planes" in axis
                if recipe != "BF16" or not is_alike:
                    yield axis, recipe


def cost(axis: str, recipe: str) -> dict[str, Any]:
    """What a later step costs this rank: two are counted, since counting traffic takes a mode.

    Args:
        axis: of AXES.
        recipe: of RECIPES.
    """
    model, step = AXES[axis](recipe)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    name = RECIPES[recipe]

    def run() -> None:
        with hybridq.autocast(enabled=name is not None, recipe=name):
            step()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARM):
        run()
    with count_encodes() as encodes:
        run()
    with count_traffic() as traffic:
        run()
    return {
        "collectives": dict(sorted(traffic.calls_by_kind.items())),
        "bytes": dict(sorted(traffic.nbytes_by_kind.items())),
        "encodes": dict(encodes),
    }
