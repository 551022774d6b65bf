"""Distributed checkpoints: `python dcp_program.py RANK WORLD STORE NAME[=FOLDER]...`.

All ranks see the same batch, and world sizes are powers of two, so that a run may go on with any
number of ranks and must have the same bits.
"""

from __future__ import annotations

import copy
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rank_program import main
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard

import hybridq
from hybridq.distributed import ScalingHistory, prepare_fsdp2

RECIPES = ("mxfp8_fwd_nvfp4_bwd", "nvfp4", "fp8_delayed")
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


#: Moments of the optimizer under a recipe, where it is hybridq's.
MOMENTS = {"nvfp4": "fp8_block", "mxfp8_fwd_nvfp4_bwd": "bf16"}


def built(sharded: bool = True, seed: int = 0, recipe: str = "") -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    # Shards are misaligned, uneven, and of the last weight some are empty.
    layers = (nn.Linear(40, 100), nn.Tanh(), nn.Linear(100, 36), nn.Tanh(), nn.Linear(36, 3))
    model = hybridq.convert(nn.Sequential(*layers), least_width=0).bfloat16()
    if sharded:
        prepare_fsdp2(model)
        for layer in model[:3:2]:
            fully_shard(layer)
        fully_shard(model)
    if recipe in MOMENTS:
        return model, hybridq.optim.AdamW(model.parameters(), lr=1e-2, moments=MOMENTS[recipe])
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(model: nn.Module, optimizer: Any, recipe: str, number: int) -> float:
    torch.manual_seed(100 + number)
    x = torch.randn(32, 40).bfloat16()
    with hybridq.autocast(recipe=recipe):
        loss = (model(x).float() - 0.3).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def state_of(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "scaling": ScalingHistory(model)}


def save(folder: str) -> None:
    """Train two steps and save; then write down the losses of two more."""
    for recipe in RECIPES:
        model, optimizer = built(recipe=recipe)
        for number in range(2):
            step(model, optimizer, recipe, number)
        path = Path(folder) / recipe
        state = state_of(model, optimizer)
        locals_ = [getattr(t, "_local_tensor", t) for t in state["model"].values()]
        assert all(type(t) is torch.Tensor for t in locals_)
        dcp.save(state, checkpoint_id=path)
        whole = get_model_state_dict(model, options=FULL)
        losses = [step(model, optimizer, recipe, number) for number in (2, 3)]
        if dist.get_rank() == 0:
            torch.save((whole, losses), path / "expected")
    dist.barrier()


def resume(folder: str) -> None:
    """Go on from a checkpoint, sharded and not, with the losses that were written down."""
    for recipe in RECIPES:
        path = Path(folder) / recipe
        whole, losses = torch.load(path / "expected")
        for sharded in (True, False):
            model, optimizer = built(sharded, seed=1, recipe=recipe)
            if sharded:  # what is known of the weights before must not matter
                step(model, optimizer, recipe, 9)
            state = state_of(model, optimizer)
            dcp.load(state, checkpoint_id=path)
            set_state_dict(
                model,
                optimizer,
                model_state_dict=state["model"],
                optim_state_dict=state["optimizer"],
            )
            mine = get_model_state_dict(model, options=FULL)
            if dist.get_rank() == 0:  # torch gives the others nothing
                assert mine.keys() == whole.keys()
                assert all(torch.equal(mine[name], whole[name]) for name in whole)
            got = [step(model, optimizer, recipe, number) for number in (2, 3)]
            assert got == losses, (recipe, sharded, got, losses)


def without_history(folder: str) -> None:
    """A checkpoint is whole without what delayed scaling remembers."""
    path = Path(folder) / "fp8_delayed"
    losses = torch.load(path / "expected")[1]
    model, optimizer = built(seed=1)
    state = state_of(model, optimizer)
    del state["scaling"]
    dcp.load(state, checkpoint_id=path)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    assert step(model, optimizer, "fp8_delayed", 2) != losses[0]  # scales begin anew


def full() -> None:
    """Full state dicts of one rank: out of a sharded run, and into another one."""
    is_first = dist.get_rank() == 0
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    for recipe in ("", *MOMENTS):  # torch's optimizer, and hybridq's
        model, optimizer = built(recipe=recipe)
        step(model, optimizer, "nvfp4", 0)
        weights = get_model_state_dict(model, options=FULL)
        moments = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=FULL))
        expected = step(model, optimizer, "nvfp4", 1)
        assert bool(weights) == is_first
        other, own = built(seed=1, recipe=recipe)
        # One by one: torch's set_state_dict takes an empty one for "no model", on some ranks.
        set_model_state_dict(other, weights, options=options)
        set_optimizer_state_dict(other, own, moments, options=options)
        assert step(other, own, "nvfp4", 1) == expected, recipe
    # A checkpoint of plain torch modules.
    plain = nn.Sequential(nn.Linear(40, 100), nn.Linear(100, 36)).bfloat16().state_dict()
    model = hybridq.convert(nn.Sequential(nn.Linear(40, 100), nn.Linear(100, 36))).bfloat16()
    fully_shard(prepare_fsdp2(model))
    set_model_state_dict(model, dict(plain) if is_first else {}, options=options)
    got = get_model_state_dict(model, options=FULL)
    assert not is_first or all(torch.equal(got[name], plain[name]) for name in plain)


def export(folder: str) -> None:
    """Write plain safetensors of the checkpoint in `folder`."""
    from safetensors.torch import save_file

    model, optimizer = built(seed=1, recipe="nvfp4")
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=Path(folder) / "nvfp4")
    set_model_state_dict(model, state["model"])
    weights = get_model_state_dict(model, options=FULL)
    if dist.get_rank() == 0:
        save_file(weights, str(Path(folder) / "model.safetensors"))


def die_in_saves() -> None:
    """Let this rank's next save end after its data, before the metadata that follow all data."""
    real = dcp.FileSystemWriter.write_data

    def write(self: Any, *args: Any) -> Any:
        real(self, *args).wait()
        os.kill(os.getpid(), signal.SIGKILL)

    dcp.FileSystemWriter.write_data = write  # type: ignore[method-assign]


def killed(folder: str) -> None:
    """Save twice, each time to a folder of its own; the last rank is killed in the second save."""
    model, optimizer = built()
    step(model, optimizer, "nvfp4", 0)
    dcp.save(state_of(model, optimizer), checkpoint_id=Path(folder) / "step-0")
    step(model, optimizer, "nvfp4", 1)
    if dist.get_rank() == dist.get_world_size() - 1:
        die_in_saves()
    try:
        dcp.save(state_of(model, optimizer), checkpoint_id=Path(folder) / "step-1")
    except Exception:  # whatever a lost peer looks like
        os._exit(0)
    raise AssertionError("the save was not killed")


if __name__ == "__main__":
    main(globals())
