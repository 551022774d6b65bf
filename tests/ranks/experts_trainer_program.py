"""transformers' Trainer over ranks of experts: `python experts_trainer_program.py RANK WORLD ...`.

One process with the batches of all ranks has the losses that ranks must have.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from experts_program import near, whole
from rank_program import main
from safetensors import safe_open
from torch.distributed.tensor import DTensor

import hybridq
from hybridq.integrations.transformers import ExpertsTrainer, HybridQCallback
from hybridq.moe import parallelize_experts

SIZES = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
STEPS = 4


def built(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=16, num_key_value_heads=4)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5)
    return hybridq.convert(model)


def rows() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made = torch.randint(0, 96, (64, 16), generator=generator)
    return [{"input_ids": one, "labels": one} for one in made]


def trainer(model: Any, folder: str, recipe: Any = None, **options: Any) -> Any:
    arguments = transformers.TrainingArguments(
        folder,
        per_device_train_batch_size=2,
        max_steps=STEPS,
        logging_steps=1,
        learning_rate=3e-3,
        weight_decay=0.1,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        max_grad_norm=0.5,
        **{"save_strategy": "no", **options},
    )
    callbacks = [] if recipe is None else [HybridQCallback(recipe)]
    return ExpertsTrainer(model, arguments, train_dataset=rows(), callbacks=callbacks)


def told(made: Any) -> list[tuple[float, float]]:
    """Return the loss and the norm of gradients of each step."""
    history = made.state.log_history
    return [(one["loss"], float(one["grad_norm"])) for one in history if "loss" in one]


def environment() -> None:
    """Say what torchrun says."""
    rank, world = dist.get_rank(), dist.get_world_size()
    known = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ.update({name: str(value) for name, value in known.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", ACCELERATE_USE_CPU="1")


def trains(folder: str) -> None:
    """Losses, norms and weights are those of data-parallel ranks that have all experts each."""
    environment()
    found = []
    for is_dealt in (False, True):
        model = built()
        if is_dealt:
            parallelize_experts(model)
        made = trainer(model, f"{folder}/none")
        made.train()
        found.append((told(made), [whole(one.detach()) for one in model.parameters()]))
        if is_dealt:
            groups = made.optimizer.param_groups
            kinds = [{type(one.data) for one in group["params"]} for group in groups]
            assert all(len(one) == 1 for one in kinds) and {DTensor} in kinds, kinds
    (wanted, one), (had, two) = found
    assert len(wanted) == STEPS and wanted[0][0] > wanted[-1][0]
    near(torch.tensor(had), torch.tensor(wanted), "losses", 1e-5)
    for a, b in zip(two, one, strict=True):
        near(a, b, "weights", 1e-3)


def resumes(folder: str) -> None:
    """A run that goes on from a checkpoint ends as one that was not stopped."""
    environment()
    options = {"recipe": "mxfp8", "save_strategy": "steps", "save_steps": 2}
    model = parallelize_experts(built(), dispatch="mxfp8", combine="mxfp8")
    made = trainer(model, folder, **options)
    made.train()
    dist.barrier()
    files = {one.name for one in Path(folder, "checkpoint-2").iterdir()}
    assert {"model.safetensors", "optimizer.pt", "scheduler.pt"} <= files, files
    with safe_open(f"{folder}/checkpoint-2/model.safetensors", "pt") as file:
        names = set(file.keys())
    assert "model.layers.1.mlp.experts.7.down_proj.weight" in names, names
    again = parallelize_experts(built(seed=3), dispatch="mxfp8", combine="mxfp8")
    other = trainer(again, folder, **{**options, "save_strategy": "no"})
    other.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    near(torch.tensor(told(other)), torch.tensor(told(made)), "losses", 1e-6)
    for a, b in zip(again.parameters(), model.parameters(), strict=True):
        near(whole(a.detach()), whole(b.detach()), "weights", 1e-6)
    read = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/checkpoint-{STEPS}")
    for a, b in zip(read.parameters(), model.parameters(), strict=True):
        assert torch.equal(a, whole(b.detach()))


if __name__ == "__main__":
    main(globals())
