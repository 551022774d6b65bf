"""``train-experts``: a mixture of experts under torchrun, its experts over ranks, and in one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from .._text import size_text
from ..demo.data import MAX_NBYTES, DataError, load_corpus
from ..demo.model import QWEN3_MOE, ModelConfig
from ..demo.train import BASELINE, TrainConfig
from ..estimate import Traffic
from ..formats.row_format import row_format
from ..kernels.decoded import give_no_advice
from ..recipes import get
from .train_fsdp import _follow, _join, _leave

_MODEL = ModelConfig()
_TRAIN = TrainConfig()
_BOUND = 0.01
"""Relative, of validation losses: ranks add in another order, in BF16, and round by other bits."""

_BY_RECIPE = "recipe"
"""Messages in the formats that the recipe gives them."""

_Count = Annotated[int, typer.Option(min=1)]


def train_experts(
    recipe: Annotated[
        str, typer.Option(help="Name or TOML file of a recipe.")
    ] = "mxfp8_fwd_nvfp4_bwd",
    dispatch: Annotated[
        str, typer.Option(help="Format in which tokens travel to experts and back, or recipe.")
    ] = "mxfp8",
    data: Annotated[
        Path | None,
        typer.Option(help="Your own file or folder of text [default: Python's standard library]."),
    ] = None,
    layers: _Count = 2,
    hidden: _Count = _MODEL.hidden,
    heads: _Count = _MODEL.heads,
    ffn: _Count = _MODEL.ffn,
    experts: _Count = 8,
    top: _Count = 2,
    sequence: Annotated[int, typer.Option(min=1, help="Bytes per sample.")] = _MODEL.sequence,
    batch: Annotated[
        int, typer.Option(min=1, help="Samples per step, of all ranks together.")
    ] = _TRAIN.batch,
    steps: _Count = 100,
    eval_batches: _Count = _TRAIN.eval_batches,
    eval_points: _Count = 2,
    seed: int = _TRAIN.seed,
) -> None:
    """Train a mixture of experts with its experts on several ranks, in BF16 and quantized.

    Run by torchrun on CPUs; the model is transformers' Qwen3-MoE. First in BF16, then under the
    recipe with quantized messages, then the same on one rank. The last line says what was
    quantized; the command fails where ranks and one rank differ by more than 1 in 100.
    """
    try:
        if dispatch != _BY_RECIPE:
            row_format("train-experts", dispatch)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--dispatch") from error
    try:
        if recipe != BASELINE:
            get(recipe)
        config = TrainConfig(
            model=ModelConfig(
                layers, hidden, heads, ffn, sequence, experts=experts, top=top, family=QWEN3_MOE
            ),
            batch=batch,
            steps=steps,
            eval_batches=eval_batches,
            eval_points=eval_points,
            seed=seed,
        )
        corpus = load_corpus(data, sequence, MAX_NBYTES)
    except (DataError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    torch.set_num_threads(1)
    give_no_advice()
    world, rank = _join(batch, 1, "train-experts")
    if experts < world:
        _leave()
        raise typer.BadParameter(
            "train-experts: every rank must have an expert, got "
            f"experts={experts} on {world} ranks; give --experts, or torchrun --nproc-per-node"
        )
    from ..demo.experts import ExpertsTrainer, quantized_share  # needs torch.distributed

    runs: list[tuple[str, str, str | None]] = [
        (f"BF16 on {world} ranks", BASELINE, None),
        (f"{recipe} on {world} ranks, messages {dispatch}", recipe, dispatch),
    ]
    made: list[tuple[str, float | None, Traffic]] = []
    for name, own, messages in runs:
        trainer = ExpertsTrainer(config, own, corpus, messages)
        _follow(name, trainer.steps(), rank == 0, steps)
        made.append((name, trainer.validation_loss, trainer.traffic))
    _leave()
    if rank:
        return
    distributed: Any = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    alone = ExpertsTrainer(config, recipe, corpus, dispatch)
    name = f"{recipe} on one rank, messages {dispatch}"
    _follow(name, alone.steps(), True, steps)
    distributed.destroy_process_group()
    made.append((name, alone.validation_loss, Traffic()))
    _show(made)
    typer.echo(f"{quantized_share(config, recipe):.1%} of the linear FLOPs are quantized")
    losses = [loss for _, loss, _ in made if loss is not None]
    if len(losses) < len(made):
        typer.echo("train-experts: the loss must be finite, got one that is not")
        raise typer.Exit(1)
    if abs(losses[1] / losses[2] - 1) > _BOUND:
        typer.echo(f"train-experts: ranks and one rank must agree within {_BOUND}, see the table")
        raise typer.Exit(1)


def _show(made: list[tuple[str, float | None, Traffic]]) -> None:
    """Print the losses, and what travelled in a step."""
    table = Table()
    for title in ("run", "validation loss", "bytes of messages per step", "of BF16's"):
        table.add_column(title, justify="left" if title == "run" else "right")
    of_bf16 = made[0][2].nbytes_by_kind["all_to_all"]
    for name, loss, traffic in made:
        nbytes = traffic.nbytes_by_kind.get("all_to_all", 0)
        value = "not finite" if loss is None else f"{loss:.4f}"
        sent = [size_text(nbytes), f"{nbytes / of_bf16:.3f}"] if nbytes else ["", ""]
        table.add_row(name, value, *sent)
    Console().print(table)
