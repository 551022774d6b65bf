"""FSDP2 by accelerate with `prepare`: `python accelerate_program.py RANK WORLD STORE`.

All ranks see the same batch, so the sharded run must be the unsharded one in every bit.
"""

from __future__ import annotations

import copy
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import DistributedType
from rank_program import main
from torch import nn

import hybridq
from hybridq.distributed import GatheredWeight, count_traffic, prepare_fsdp2
from hybridq.integrations.accelerate import prepare


class Block(nn.Module):
    """A unit of FSDP2, found by its class's name."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """Two of them."""

    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def accelerator(**options: Any) -> Accelerator:
    """One whose processes are CPUs, which accelerate would not shard by itself."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False
    )
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world}
    os.environ.update(own, MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # the group is there
    made = Accelerator(cpu=True, **options)
    made.state.distributed_type = DistributedType.FSDP
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP  # as accelerate does
    made.state.fsdp_plugin = plugin
    return made


def trained(model: nn.Module, optimizer: Any, backward: Any, steps: int = 2) -> list[torch.Tensor]:
    """Train on batches that follow from the count of steps; return the losses."""
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        loss = model(torch.randn(16, 64)).square().mean()
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def values(model: nn.Module) -> list[torch.Tensor]:
    """The whole parameters."""
    whole = [getattr(one, "full_tensor", lambda one=one: one)() for one in model.parameters()]
    return [one.detach() for one in whole]


def same_bits() -> None:
    """The unsharded run's losses and weights; planes travel; a saved state goes on alike."""
    for recipe in ("mxfp8", "fp8_delayed"):
        torch.manual_seed(0)
        model = hybridq.convert(Model())
        twin, fresh = copy.deepcopy(model), copy.deepcopy(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        made = accelerator()
        with count_traffic() as traffic:
            sharded, stepped = prepare(made, model, optimizer, recipe=recipe)
            losses = trained(sharded, stepped, made.backward)
        for one in (block for pair in sharded.blocks for block in pair.children()):
            assert isinstance(one.weight._local_tensor, GatheredWeight)
        assert traffic.nbytes > 0
        other = torch.optim.AdamW(twin.parameters(), lr=1e-2)
        with hybridq.autocast(recipe=recipe):
            want = trained(twin, other, lambda loss: loss.backward())
        assert all(torch.equal(*pair) for pair in zip(losses, want, strict=True)), (losses, want)
        assert all(torch.equal(*pair) for pair in zip(values(sharded), values(twin), strict=True))
        folder = [tempfile.mkdtemp()]
        dist.broadcast_object_list(folder)
        made.save_state(folder[0])
        later = trained(sharded, stepped, made.backward)
        again = accelerator()
        new = torch.optim.AdamW(fresh.parameters(), lr=1e-2)
        loaded, restepped = prepare(again, fresh, new, recipe=recipe)
        again.load_state(folder[0])
        resumed = trained(loaded, restepped, again.backward)
        assert all(torch.equal(*pair) for pair in zip(later, resumed, strict=True))
        assert Path(folder[0]).is_dir()


def by_itself() -> None:
    """accelerate alone, of a model and an optimizer that were made before or after."""
    for order in ("before", "after"):
        for quantizes in (False, True):
            torch.manual_seed(0)
            with hybridq.quantized_model_init("mxfp8", enabled=quantizes):
                model = hybridq.convert(Model())
            twin, kind = copy.deepcopy(model), hybridq.optim.AdamW
            if order == "after":
                prepare_fsdp2(model)
            optimizer = kind(model.parameters(), lr=1e-2)
            if order == "before":
                prepare_fsdp2(model)
            made = accelerator()
            sharded, stepped = made.prepare(model, optimizer)
            other = kind(twin.parameters(), lr=1e-2)
            with hybridq.autocast(recipe="mxfp8"):
                losses = trained(sharded, stepped, made.backward)
                want = trained(twin, other, lambda loss: loss.backward())
            assert all(torch.equal(*pair) for pair in zip(losses, want, strict=True)), order


def trainer() -> None:
    """transformers' Trainer, whose accelerator nobody else is given."""
    import transformers

    from hybridq.integrations.transformers import HybridQCallback

    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96}
    config = transformers.LlamaConfig(
        **sizes, num_hidden_layers=2, num_attention_heads=4, tie_word_embeddings=False
    )
    rows = [{"input_ids": torch.arange(8) + 3 * i, "labels": torch.arange(8)} for i in range(4)]
    losses = {}
    for recipe in ("mxfp8", "bf16"):
        torch.manual_seed(0)
        model = hybridq.convert(transformers.LlamaForCausalLM(config))
        arguments = transformers.TrainingArguments(
            tempfile.mkdtemp(),
            max_steps=2,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            logging_steps=1,
            save_strategy="no",
        )
        made = accelerator()  # the arguments forget those before; Trainer's own has its state
        built = transformers.Trainer(
            model, arguments, train_dataset=rows, callbacks=[HybridQCallback(recipe)]
        )
        assert built.accelerator.state.fsdp_plugin is made.state.fsdp_plugin
        built.train()
        weight = built.model.model.layers[0].mlp.up_proj.weight
        assert isinstance(weight._local_tensor, GatheredWeight)
        losses[recipe] = [one["loss"] for one in built.state.log_history if "loss" in one]
    assert losses["mxfp8"] != losses["bf16"]
    assert all(abs(a - b) < 0.2 for a, b in zip(*losses.values(), strict=True)), losses


def mixed_precision() -> None:
    """Trained weights in BF16 become FP32 for the optimizer, and travel as planes."""
    model = hybridq.convert(Model()).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    made = accelerator(mixed_precision="bf16")
    sharded, stepped = prepare(made, model, optimizer, recipe="mxfp8")
    assert all(one.dtype == torch.float32 for one in sharded.parameters())
    assert isinstance(sharded.blocks[0].up.weight._local_tensor, GatheredWeight)
    before = values(sharded)
    trained(sharded, stepped, made.backward, 1)
    assert not any(torch.equal(*pair) for pair in zip(before, values(sharded), strict=True))


if __name__ == "__main__":
    main(globals())
