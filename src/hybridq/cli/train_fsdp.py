"""``train-fsdp``: the demo under torchrun, sharded, and again in one process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import torch
import typer

from .._text import size_text
from ..demo.data import MAX_NBYTES, DataError, load_corpus
from ..demo.model import ModelConfig
from ..demo.progress import Pace
from ..demo.train import BASELINE, COUNTED_STEP, Progress, TrainConfig
from ..demo.variants import VARIANTS
from ..estimate import Traffic
from ..kernels.decoded import give_no_advice
from ..recipes import get

_MODEL = ModelConfig()
_TRAIN = TrainConfig()
_TIMEOUT = timedelta(minutes=5)
"""After it, ranks stop waiting for one that has died."""

_PARALLEL_BOUND = 0.01
"""Relative, of validation losses: ranks that share a sample add in another order, in BF16."""

_Count = Annotated[int, typer.Option(min=1)]


def train_fsdp(
    recipe: Annotated[
        str, typer.Option(help="Name or TOML file of a recipe, or bf16.")
    ] = "mxfp8_fwd_nvfp4_bwd",
    data: Annotated[
        Path | None,
        typer.Option(help="Your own file or folder of text [default: Python's standard library]."),
    ] = None,
    data_limit: Annotated[
        int, typer.Option(min=1, help="Most bytes of data to read.", show_default="64 MiB")
    ] = MAX_NBYTES,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of each process.")] = 1,
    modules: Annotated[
        str, typer.Option(help=f"Modules that the model is made of: {', '.join(VARIANTS)}.")
    ] = _TRAIN.modules,
    layers: _Count = _MODEL.layers,
    hidden: _Count = _MODEL.hidden,
    heads: _Count = _MODEL.heads,
    ffn: _Count = _MODEL.ffn,
    sequence: Annotated[int, typer.Option(min=1, help="Bytes per sample.")] = _MODEL.sequence,
    batch: Annotated[
        int, typer.Option(min=1, help="Samples per step, of all ranks together.")
    ] = _TRAIN.batch,
    steps: _Count = _TRAIN.steps,
    lr: Annotated[float, typer.Option(help="Peak learning rate of AdamW.")] = _TRAIN.lr,
    clip: Annotated[float, typer.Option(help="Largest norm of the gradient.")] = _TRAIN.clip,
    eval_batches: _Count = _TRAIN.eval_batches,
    eval_points: _Count = _TRAIN.eval_points,
    seed: int = _TRAIN.seed,
    tp: Annotated[
        int, typer.Option(min=1, help="Tensor-parallel ranks, each with a part of every matrix.")
    ] = 1,
    sp: Annotated[
        int, typer.Option(min=1, help="Ranks that share sequences, each with a part of them.")
    ] = 1,
) -> None:
    """Train the demo's model on several ranks under FSDP2, then the same in one process.

    Run by torchrun on CPUs. Both must come to the same validation loss, with --tp or --sp within 1
    in 100; the last line says so, and what travelled.
    """
    if sp > 1 and (tp > 1 or sequence % sp or heads % sp):
        raise typer.BadParameter(
            "train-fsdp: sp must divide the sequence and the heads, without tp, got "
            f"sp={sp} with sequence={sequence}, heads={heads}, tp={tp}"
        )
    if tp > 1 and modules != _TRAIN.modules:
        raise typer.BadParameter(
            f"train-fsdp: tp takes modules {_TRAIN.modules!r} alone, got {modules!r}"
        )
    try:
        if recipe != BASELINE:
            get(recipe)
        config = TrainConfig(
            model=ModelConfig(layers, hidden, heads, ffn, sequence),
            batch=batch,
            steps=steps,
            lr=lr,
            clip=clip,
            eval_batches=eval_batches,
            eval_points=eval_points,
            seed=seed,
            modules=modules,
        )
        corpus = load_corpus(data, sequence, data_limit)
    except (DataError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    torch.set_num_threads(threads)
    # Nothing of the demo runs slowly for it.
    give_no_advice()
    world, rank = _join(batch, tp * sp)
    from ..demo.fsdp import InTurnTrainer, ShardedTrainer  # needs a torch with torch.distributed

    plain = ShardedTrainer(config, BASELINE, corpus, tp, sp)
    for _ in zip(range(COUNTED_STEP + 1), plain.steps(), strict=False):
        pass  # for what BF16 sends in a step
    sharded = ShardedTrainer(config, recipe, corpus, tp, sp)
    _follow(f"{recipe} on {world} ranks", sharded.steps(), rank == 0, steps)
    _leave()
    if rank:
        return
    alone = InTurnTrainer(config, recipe, corpus, world // (tp * sp))
    _follow(f"{recipe} in one process", alone.steps(), True, steps)
    if sharded.validation_loss is None or alone.validation_loss is None:
        typer.echo("train-fsdp: the loss must be finite, got one that is not")
        raise typer.Exit(1)
    losses = [f"{loss:.6f}" for loss in (sharded.validation_loss, alone.validation_loss)]
    typer.echo(
        f"validation loss {losses[0]} on {world} ranks, {losses[1]} in one process; "
        + _traffic_text(sharded.traffic, plain.traffic)
    )
    difference = abs(sharded.validation_loss / alone.validation_loss - 1)
    if difference > _PARALLEL_BOUND if tp * sp > 1 else losses[0] != losses[1]:
        raise typer.Exit(1)


def _traffic_text(traffic: Traffic, bf16: Traffic) -> str:
    gathered, of_bf16 = (one.nbytes_by_kind["all_gather"] for one in (traffic, bf16))
    return (
        f"{traffic.nbytes} wire bytes per step ({size_text(traffic.nbytes)}), "
        f"{traffic.nbytes / bf16.nbytes:.3f} of BF16's; all-gathers {gathered / of_bf16:.3f}"
    )


def _join(batch: int, shared: int, command: str = "train-fsdp") -> tuple[int, int]:
    """Join the group that torchrun has started, `shared` ranks of which have one micro-batch.

    Returns its size and the own rank.
    """
    found = torch.distributed.is_available() and torch.distributed.is_gloo_available()
    if not found:
        raise typer.BadParameter(f"{command}: torch must have gloo, got a build without it")
    import torch.distributed as dist

    if not dist.is_torchelastic_launched():
        raise typer.BadParameter(
            f"{command}: must run under torchrun, got a plain process; for example: "
            f"torchrun --nproc-per-node 2 -m hybridq {command}"
        )
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    world, rank = dist.get_world_size(), dist.get_rank()
    if world % shared:
        _leave()
        raise typer.BadParameter(
            f"{command}: tp and sp must divide the ranks, got {shared} of {world}"
        )
    if world < 2 or batch % (world // shared):
        _leave()
        raise typer.BadParameter(
            f"{command}: ranks must be two or more and divide the batch, got {world} with a "
            f"batch of {batch}; give torchrun --nproc-per-node, or --batch"
        )
    return world, rank


def _leave() -> None:
    import torch.distributed as dist

    dist.barrier()
    dist.destroy_process_group()


def _follow(what: str, progress: Iterator[Progress], is_shown: bool, steps: int) -> None:
    """Train to the end; say where it is at each evaluation, and every few seconds."""
    pace = Pace()
    for one in progress:
        validation = ""
        if one.validation_loss is not None:
            validation = f", validation {one.validation_loss:.4f}"
        if is_shown and pace.is_due(bool(validation)):
            typer.echo(
                f"{what}: step {one.step}/{steps}, loss {one.loss:.4f}{validation} nats/byte"
            )
            sys.stdout.flush()
