"""``plan``: memory and traffic of a sharded run that no one machine can try."""

from __future__ import annotations

from typing import Annotated, Any, Final

import torch
import typer

from ..errors import must_be_one_of
from ..estimate import (
    Axes,
    DenseShape,
    ExpertsShape,
    Sharding,
    plan_axes,
    plan_experts,
)
from ..estimate import plan as make_plan
from .tables import print_json, print_tables

_BASELINE: Final = "bf16"
_DTYPES: Final = ("bfloat16", "float16", "float32")
_MODEL: Final = "Model: a dense transformer, given by --params or by its sizes"
_RUN: Final = "Run"
_AXES: Final = "Axes beside data parallelism"

#: Options that say nothing without another one: the other one, and what it is where it is missing.
_NEEDED: Final = {
    "sequence_parallel": ("tp", 1),
    "sp_communication": ("sp", 1),
    "schedule": ("pp", 1),
    "communication": ("pp", 1),
    "top": ("experts", None),
    "ep": ("experts", None),
    "dispatch": ("experts", None),
    "imbalance": ("experts", None),
}

_EXPERTS: Final = "Experts over ranks"
_Experts = Annotated[int, typer.Option(min=1, rich_help_panel=_EXPERTS)]
_Size = Annotated[int | None, typer.Option(min=1, rich_help_panel=_MODEL)]
_Ranks = Annotated[int, typer.Option(min=1, rich_help_panel=_AXES)]


def plan(
    context: typer.Context,
    world: Annotated[int, typer.Option(min=1, help="Ranks.", rich_help_panel=_RUN)],
    recipe: Annotated[
        str, typer.Option(help="Name or TOML file of a recipe, or bf16.", rich_help_panel=_RUN)
    ] = "mxfp8",
    policy: Annotated[
        str, typer.Option(help="fsdp, hsdp (with --shard) or ddp.", rich_help_panel=_RUN)
    ] = "fsdp",
    shard: Annotated[
        int | None,
        typer.Option(min=1, help="Of hsdp: ranks that share a model.", rich_help_panel=_RUN),
    ] = None,
    optimizer: Annotated[
        str, typer.Option(help="adamw, momentum or sgd.", rich_help_panel=_RUN)
    ] = "adamw",
    quantized_params: Annotated[
        bool,
        typer.Option(
            "--quantized-params",
            help="Parameters are held as planes, their values by the optimizer.",
            rich_help_panel=_RUN,
        ),
    ] = False,
    masters: Annotated[
        bool,
        typer.Option(
            "--masters",
            help="16-bit parameters have FP32 masters, as hybridq.optim.AdamW keeps them.",
            rich_help_panel=_RUN,
        ),
    ] = False,
    moments: Annotated[
        str,
        typer.Option(help="Of hybridq.optim.AdamW: fp32, bf16 or fp8_block.", rich_help_panel=_RUN),
    ] = "fp32",
    tokens: Annotated[
        int,
        typer.Option(
            min=0, help="Of a rank in a step: then saved inputs count.", rich_help_panel=_RUN
        ),
    ] = 0,
    dtype: Annotated[
        str,
        typer.Option(help=f"Of the parameters: {', '.join(_DTYPES)}.", rich_help_panel=_RUN),
    ] = "float32",
    reduce_dtype: Annotated[
        str, typer.Option(help="That gradients are reduced in.", rich_help_panel=_RUN)
    ] = "float32",
    params: Annotated[
        float | None,
        typer.Option(help="How many parameters, as 70e9.", rich_help_panel=_MODEL),
    ] = None,
    layers: _Size = None,
    hidden: _Size = None,
    ffn: _Size = None,
    heads: _Size = None,
    kv_heads: _Size = None,
    vocab: _Size = None,
    tp: _Ranks = 1,
    sp: _Ranks = 1,
    cp: _Ranks = 1,
    pp: _Ranks = 1,
    sequence_parallel: Annotated[
        bool,
        typer.Option(
            "--sequence-parallel",
            help="Of tp: ranks share tokens between matrices.",
            rich_help_panel=_AXES,
        ),
    ] = False,
    microbatches: _Ranks = 1,
    schedule: Annotated[
        str,
        typer.Option(
            help="Of pp: gpipe, 1f1b, interleaved, interleaved_zero_bubble, zbv, dualpipev.",
            rich_help_panel=_AXES,
        ),
    ] = "1f1b",
    communication: Annotated[
        str | None,
        typer.Option(help="Of pp: a format, or recipe.", rich_help_panel=_AXES),
    ] = None,
    sp_communication: Annotated[
        str | None,
        typer.Option(help="Of sp: a format.", rich_help_panel=_AXES),
    ] = None,
    ranks_per_node: Annotated[int | None, typer.Option(min=1, rich_help_panel=_AXES)] = None,
    experts: Annotated[
        str | None,
        typer.Option(
            help="As 128x768: experts of a layer and their width, in the place of --ffn.",
            rich_help_panel=_EXPERTS,
        ),
    ] = None,
    top: _Experts = 8,
    ep: _Experts = 1,
    dispatch: Annotated[
        str | None, typer.Option(help="Format to experts and back.", rich_help_panel=_EXPERTS)
    ] = None,
    imbalance: Annotated[
        float,
        typer.Option(
            min=1, help="Rows of the most asked rank over the mean.", rich_help_panel=_EXPERTS
        ),
    ] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Say what each rank of a run would hold in memory, and move in a step.

    Nothing runs: planes are sized by the code that makes and gathers them.
    """
    try:
        _check_needed(context)
        shape = DenseShape.of(
            params,
            layers=layers,
            hidden=hidden,
            ffn=ffn,
            heads=heads,
            kv_heads=kv_heads,
            vocab=vocab,
        )
        sharding = Sharding(world, policy, shard, reduce_dtype=_dtype(reduce_dtype))
        axes = Axes(
            tp,
            sp,
            cp,
            pp,
            sequence_parallel,
            microbatches,
            schedule,
            communication=communication,
            ranks_per_node=ranks_per_node,
            sp_communication=sp_communication,
        )
        chosen = None if recipe == _BASELINE else recipe
        options: dict[str, Any] = {
            "optimizer": optimizer,
            "quantized_params": quantized_params,
            "masters": masters,
            "moments": moments,
            "tokens": tokens,
        }
        made: Any
        if axes == Axes():
            made = make_plan(shape.model(_dtype(dtype)), chosen, sharding, **options)
        else:
            made = plan_axes(shape, chosen, axes, sharding, dtype=_dtype(dtype), **options)
        routed = None
        if experts is not None:
            if world % ep:
                raise ValueError(f"ep must divide the ranks, got ep={ep} with world={world}")
            own = ExpertsShape.of(experts, top, shape.hidden, shape.layers)
            routed = plan_experts(
                own,
                ep,
                tokens=tokens,
                dispatch=dispatch,
                combine=dispatch,
                imbalance=imbalance,
                ranks_per_node=ranks_per_node,
            )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if as_json:
        more = {} if routed is None else {"experts": routed.as_dict()}
        print_json({"shape": vars(shape), **made.as_dict(), **more})
        return
    sizes = ", ".join(f"{name} {value}" for name, value in vars(shape).items())
    typer.echo(f"A transformer of {shape.num_params:,} parameters: {sizes}.")
    tables = [made.table()] if axes == Axes() else made.tables()
    print_tables(tables if routed is None else [*tables, routed.table()])


def _check_needed(context: typer.Context) -> None:
    """Refuse options that were given and would change nothing."""
    for name, (needed, missing) in _NEEDED.items():
        source = context.get_parameter_source(name)
        given = source is not None and source.name != "DEFAULT"
        if given and context.params[needed] == missing:
            option, other = (f"--{one.replace('_', '-')}" for one in (name, needed))
            at_least = "" if missing is None else " of at least 2"
            raise ValueError(f"{option} must go with {other}{at_least}, got it without")


def _dtype(name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise ValueError(f"dtype {must_be_one_of(_DTYPES, name)}")
    found: torch.dtype = getattr(torch, name)
    return found
