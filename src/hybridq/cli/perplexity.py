"""``perplexity``: of a text, for a model as it is and quantized."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from .._text import Table
from ..calibration import Calibration
from ..errors import CheckpointError, must_be_one_of
from ..recipes import get, names
from ..serving import Perplexity, perplexity, quantize_model
from .checkpoints import USAGE, stop
from .folders import DTYPES, check_device, check_predicts_the_next, model_of, tokens_of
from .tables import print_json, print_tables

_ACTIVATIONS = ("quantized", "high_precision")


def perplexity_command(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A folder of transformers, with its tokenizer.")
    ],
    text: Annotated[Path, typer.Argument(metavar="TEXT", help="A text file, UTF-8.")],
    recipe: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Also quantized by this recipe: {', '.join(names())}, or a file; may be given "
            "again."
        ),
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option(help="File of a calibration, for static scales of activations.")
    ] = None,
    activations: Annotated[
        str, typer.Option(help=f"What becomes of activations: {', '.join(_ACTIVATIONS)}.")
    ] = _ACTIVATIONS[0],
    window: Annotated[int, typer.Option(help="Tokens that the model is given at once.")] = 512,
    stride: Annotated[
        int | None, typer.Option(help="Tokens between windows; half a window if left out.")
    ] = None,
    dtype: Annotated[str, typer.Option(help=f"Dtype of the model: {', '.join(DTYPES)}.")] = "auto",
    device: Annotated[str, typer.Option(help="Device of the model.")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Say the perplexity of a text under a model, as it is and quantized by recipes.

    exp of the mean negative log-likelihood of the tokens but the first, each predicted once, in
    windows that begin a stride after one another.
    """
    if activations not in _ACTIVATIONS:
        raise typer.BadParameter(f"activations {must_be_one_of(_ACTIVATIONS, activations)}")
    try:
        recipes = {one: get(one) for one in recipe or ()}
        seen = None if calibration is None else Calibration.load(calibration)
        check_device(device)
        ids = torch.tensor(tokens_of(model, text), dtype=torch.int64, device="cpu")
        found: dict[str, Perplexity] = {}
        for one in (None, *recipes):
            loaded = model_of(model, dtype).eval().to(device)
            check_predicts_the_next(loaded)
            if one is not None:
                quantize_model(loaded, recipes[one], seen, activations=activations)
            options: dict[str, Any] = {"window": window, "stride": stride}
            found[one or "as it is"] = perplexity(loaded, ids.to(device), **options)
            del loaded
    except (CheckpointError, ImportError, OSError, ValueError) as error:
        stop(str(error), USAGE)
    if as_json:
        print_json({name: _finite(asdict(one)) for name, one in found.items()})
    else:
        print_tables([_table(model, text, found)])


def _finite(numbers: dict[str, Any]) -> dict[str, Any]:
    """Return numbers as JSON can hold them: None where one is not finite."""
    return {key: one if math.isfinite(one) else None for key, one in numbers.items()}


def _table(model: str, text: Path, found: dict[str, Perplexity]) -> Table:
    plain = found["as it is"]
    rows = [
        (name, f"{one.value:.4f}", f"{one.value / plain.value:.4f}") for name, one in found.items()
    ]
    note = f"{plain.tokens:,} tokens in windows of {plain.window}, {plain.stride} apart"
    return Table(
        f"Perplexity of {text.name} under {model}",
        ("model", "perplexity", "ratio"),
        tuple(rows),
        (note,),
    )
