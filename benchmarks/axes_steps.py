"""Steps of the axes that benchmarks/axes.py counts, and the counting."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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

import hybridq
from hybridq.distributed import (
    count_traffic,
    pipeline_stage,
    prepare_fsdp2,
    sequence_parallel,
    shard_sequence,
)
from hybridq.kernels.cpu import backend

RECIPES = {"BF16": None, "MXFP8": "mxfp8", "hybrid": "mxfp8_fwd_nvfp4_bwd"}
SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
BATCH, LENGTH, MICROBATCHES, WARM = 8, 64, 4, 2
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

    backend.core = Spy()
    try:
        yield found
    finally:
        backend.core = core


class Part(nn.Module):
    """Some layers of a Llama, with its embedding in front and its head behind, or without."""

    def __init__(self, model: Any, layers: range, is_first: bool = True, is_last: bool = True):
        super().__init__()
        self.embed = model.model.embed_tokens if is_first else None
        self.rotary = model.model.rotary_emb
        self.layers = nn.ModuleList(model.model.layers[i] for i in layers)
        self.norm = model.model.norm if is_last else None
        self.head = model.lm_head if is_last else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(LENGTH)[None]
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


def parallel(model: Any, mesh: Any, shares_tokens: bool = False) -> Any:
    """By torch's plans, as torchtitan has them; embedding and head are each rank's own."""
    rows = Shard(1) if shares_tokens else Replicate()
    plan: dict[str, Any] = {}
    for i in range(len(model.layers)):
        layer = f"layers.{i}."
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
            plan[layer + name] = ColwiseParallel()
        for name in ("mlp.gate_proj", "mlp.up_proj"):
            plan[layer + name] = ColwiseParallel()
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            plan[layer + name] = RowwiseParallel(output_layouts=rows)
        if shares_tokens:
            for name in ("input_layernorm", "post_attention_layernorm"):
                plan[layer + name] = SequenceParallel(use_local_output=True)
            plan[layer + "self_attn"] = PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": rows},
                desired_input_kwarg_layouts={"hidden_states": Replicate()},
            )
            plan[layer + "mlp"] = PrepareModuleInput(
                input_layouts=(rows,), desired_input_layouts=(Replicate(),)
            )
    if shares_tokens:
        plan["embed"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=rows)
        plan["norm"] = SequenceParallel()
        plan["head"] = ColwiseParallel(input_layouts=rows, output_layouts=Replicate())
    return parallelize_module(model, mesh, plan)


def tensor(recipe: str) -> tuple[Any, Callable[[], Any]]:
    model = parallel(whole(), init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, on_rows(model, 0, 1)


def tensor_sequence(recipe: str) -> tuple[Any, Callable[[], Any]]:
    model = parallel(whole(), init_device_mesh("cpu", (dist.get_world_size(),)), True)
    return model, on_rows(model, 0, 1)


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
    "Ulysses and DDP": ulysses,
    "the same, `communication`": ulysses_planes,
    "pipeline": pipeline,
    "pipeline, `communication`": pipeline_planes,
    "tensor (2 ranks) x FSDP2": tensor_fsdp2,
}


def cases(world: int) -> Iterator[tuple[str, str]]:
    """Axis and recipe of all that is counted on a number of ranks."""
    for axis in AXES:
        if world > 2 or "(2 ranks)" not in axis:
            for recipe in RECIPES:
                if recipe != "BF16" or "communication" not in axis:
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
