"""``train``: train a small language model once per recipe and compare the losses."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from ..demo.compare import DEFAULT_RECIPES, Comparison
from ..demo.data import MAX_NBYTES, Corpus, DataError, load_corpus
from ..demo.model import OWN, QWEN3_MOE, ModelConfig
from ..demo.progress import ProgressView
from ..demo.report import (
    build_report,
    build_table,
    prepare_folder,
    quantized_shares,
    verdict,
    write_report,
)
from ..demo.train import BASELINE, TrainConfig
from ..demo.variants import VARIANTS, build_model
from ..errors import must_be_one_of
from ..integrations import require
from ..kernels.decoded import give_no_advice, product_ways
from ..recipes import get

_MODEL = ModelConfig()
_TRAIN = TrainConfig()
#: How many experts each kind of model has, and whose it is.
_KINDS = {"dense": (0, OWN), "moe": (8, OWN), "hf-moe": (8, QWEN3_MOE)}
_SIZES = "Sizes of the model"
_SCHEDULE = "Training"
_INTERRUPTED = 130
"""Exit status after Ctrl-C: 128 + SIGINT, as shells have it."""

_Size = Annotated[int, typer.Option(min=1, rich_help_panel=_SIZES)]
_Count = Annotated[int, typer.Option(min=1, rich_help_panel=_SCHEDULE)]


def train(
    recipes: Annotated[
        str,
        typer.Option(
            help="Recipes to compare, names or TOML files, by commas; the first ones first."
        ),
    ] = ",".join(DEFAULT_RECIPES),
    data: Annotated[
        Path | None,
        typer.Option(
            help="Your own file or folder of text.", show_default="Python's standard library"
        ),
    ] = None,
    data_limit: Annotated[
        int, typer.Option(min=1, help="Most bytes of data to read.", show_default="64 MiB")
    ] = MAX_NBYTES,
    out: Annotated[Path, typer.Option(help="Folder for loss.png and report.json.")] = Path(
        "runs/demo"
    ),
    device: Annotated[
        str, typer.Option(help="cpu, cuda, cuda:1, ...; auto takes cuda if there is one.")
    ] = "auto",
    threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0 leaves it to torch.")] = 0,
    modules: Annotated[
        str, typer.Option(help=f"Modules that the model is made of: {', '.join(VARIANTS)}.")
    ] = _TRAIN.modules,
    compile: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Train through torch.compile.")
    ] = False,
    kind: Annotated[
        str,
        typer.Option(
            "--model",
            help="dense; moe: a mixture of experts, each token in 2 of 8; hf-moe: the same as "
            "transformers has it (Qwen3-MoE), converted.",
            rich_help_panel=_SIZES,
        ),
    ] = "dense",
    layers: _Size = _MODEL.layers,
    hidden: _Size = _MODEL.hidden,
    heads: _Size = _MODEL.heads,
    ffn: _Size = _MODEL.ffn,
    sequence: Annotated[
        int, typer.Option(min=1, help="Bytes per sample.", rich_help_panel=_SIZES)
    ] = _MODEL.sequence,
    batch: Annotated[
        int, typer.Option(min=1, help="Samples per step.", rich_help_panel=_SCHEDULE)
    ] = _TRAIN.batch,
    steps: _Count = _TRAIN.steps,
    lr: Annotated[
        float, typer.Option(help="Peak learning rate of AdamW.", rich_help_panel=_SCHEDULE)
    ] = _TRAIN.lr,
    weight_decay: Annotated[
        float, typer.Option(min=0.0, rich_help_panel=_SCHEDULE)
    ] = _TRAIN.weight_decay,
    warmup_fraction: Annotated[
        float,
        typer.Option(
            min=0.0, max=1.0, help="Share of the steps for warm-up.", rich_help_panel=_SCHEDULE
        ),
    ] = _TRAIN.warmup_fraction,
    clip: Annotated[
        float, typer.Option(help="Largest norm of the gradient.", rich_help_panel=_SCHEDULE)
    ] = _TRAIN.clip,
    eval_batches: Annotated[
        int, typer.Option(min=1, help="Validation batches.", rich_help_panel=_SCHEDULE)
    ] = _TRAIN.eval_batches,
    eval_points: Annotated[
        int, typer.Option(min=1, help="Evaluations per run.", rich_help_panel=_SCHEDULE)
    ] = _TRAIN.eval_points,
    seed: Annotated[int, typer.Option(rich_help_panel=_SCHEDULE)] = _TRAIN.seed,
) -> None:
    """Train a byte-level language model once per recipe, and show how close each is to BF16.

    Every run starts from the same weights and sees the same batches. Ctrl-C stops early and keeps
    what there is.
    """
    names = _parse_recipes(recipes)
    if threads:
        torch.set_num_threads(threads)
    try:
        experts, family = _parse_model(kind)
        model = ModelConfig(layers, hidden, heads, ffn, sequence, experts=experts, family=family)
        config = TrainConfig(
            model=model,
            batch=batch,
            steps=steps,
            lr=lr,
            weight_decay=weight_decay,
            warmup_fraction=warmup_fraction,
            clip=clip,
            eval_batches=eval_batches,
            eval_points=eval_points,
            seed=seed,
            device=_parse_device(device),
            compile=compile,
            modules=modules,
        )
        corpus = load_corpus(data, sequence, data_limit)
        if family != OWN:
            require("transformers")
        prepare_folder(out)
    except (DataError, ValueError, ImportError) as error:
        raise typer.BadParameter(str(error)) from error
    except OSError as error:
        raise typer.BadParameter(
            f"out must be a folder that can be written, got {out} ({error.strerror})"
        ) from error
    console = Console()
    # It is said below, and nothing of the demo runs slowly for it.
    give_no_advice()
    _say_what_runs(console, config, corpus)
    comparison = Comparison(config, names, corpus)
    try:
        _say_how_long(console, comparison)
        with ProgressView(console, names, steps) as view:
            comparison.run(view)
    finally:
        # Also after an error: the recipes that were trained before it are not lost.
        _leave_report(console, comparison, out)
    if comparison.is_interrupted:
        raise typer.Exit(_INTERRUPTED)


def _leave_report(console: Console, comparison: Comparison, out: Path) -> None:
    report = build_report(comparison)
    console.print(build_table(report))
    shares = quantized_shares(report)
    if shares:
        console.print(shares, highlight=False)
    console.print(verdict(report), highlight=False)
    written = write_report(report, out)
    console.print("Written: " + ", ".join(map(str, written)), highlight=False, soft_wrap=True)


def _parse_recipes(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise typer.BadParameter("recipes must name at least one recipe, got none")
    if len(set(names)) < len(names):
        raise typer.BadParameter(f"recipes must be different, got {', '.join(names)}")
    for name in names:
        if name == BASELINE:
            continue
        try:
            get(name)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
    return names


def _parse_model(text: str) -> tuple[int, str]:
    """Return how many experts the model has, and its family."""
    if text not in _KINDS:
        raise typer.BadParameter(f"model {must_be_one_of(_KINDS, text)}")
    return _KINDS[text]


def _parse_device(text: str) -> str:
    if text == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(text)
    except RuntimeError as error:
        raise typer.BadParameter(f"device must be a device of torch, got {text!r}") from error
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise typer.BadParameter(
                f"device must be there, got {text!r} with {count} CUDA devices; use --device cpu"
            )
    elif device.type != "cpu":
        raise typer.BadParameter(f"device must be cpu or one of cuda, got {text!r}")
    return text


def _say_what_runs(console: Console, config: TrainConfig, corpus: Corpus) -> None:
    with torch.device("meta"):
        count = build_model(config.model).num_parameters()
    limited = ", cut at --data-limit" if corpus.is_truncated else ""
    console.print(
        f"{count / 1e6:.2f} M parameters on {config.device}, {config.steps} steps of "
        f"{config.batch} x {config.model.sequence} bytes per recipe.\n"
        f"Data: {corpus.source}{limited}: {len(corpus.train_files)} files, "
        f"{corpus.train.numel() / 1e6:.1f} MB to train; {len(corpus.validation_files)} files, "
        f"{corpus.validation.numel() / 1e6:.1f} MB to validate.",
        highlight=False,
        soft_wrap=True,
    )
    if config.device == "cpu":
        console.print(
            f"Plain products in bfloat16: {_way('bfloat16')}.", highlight=False, soft_wrap=True
        )


def _way(dtype: str) -> str:
    """Return how the baseline and all that is not quantized are multiplied on this CPU."""
    found = next(way for way in product_ways() if way.dtype == dtype)
    return found.ours if found.is_fast else f"{found.ours} ({found.reason})"


def _say_how_long(console: Console, comparison: Comparison) -> None:
    if comparison.config.compile:
        return  # two steps would tell of the compiler's time
    with console.status("Timing two steps of each recipe ..."):
        seconds = comparison.estimate(
            lambda recipe: None if console.is_terminal else console.print(f"{recipe}: timing")
        )
    if comparison.is_interrupted:
        return
    each = ", ".join(f"{recipe} {_clock(one)}" for recipe, one in seconds.items())
    console.print(
        f"It will take about {_clock(sum(seconds.values()))} (minutes:seconds), by two timed "
        f"steps of each: {each}.",
        highlight=False,
        soft_wrap=True,
    )


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
