"""The application: one line per command, whose module is loaded only when the command runs."""

from __future__ import annotations

import runpy
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

__all__ = ["COMMANDS", "app"]

_LOOKS: Final[dict[str, Any]] = {
    "add_completion": False,
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}


#: Name to the function of `hybridq.cli` that runs, and to what the list of commands says of it.
COMMANDS: Final = {
    "train": (
        "train.train",
        "Train a byte-level language model once per recipe, and show how close each is to BF16.",
    ),
    "train-fsdp": (
        "train_fsdp.train_fsdp",
        "Train the demo's model on several ranks under FSDP2, then the same in one process.",
    ),
    "train-experts": (
        "train_experts.train_experts",
        "Train a mixture of experts with its experts on several ranks, in BF16 and quantized.",
    ),
    "doctor": (
        "doctor.doctor",
        "Say what is installed, what the machine has, and which backend runs each operation.",
    ),
    "plan": (
        "plan.plan",
        "Say what each rank of a run would hold in memory, and move in a step.",
    ),
    "conformance": (
        "conformance.conformance",
        "Hold an implementation to the vectors: exit status 1 if anything differs or nothing ran.",
    ),
    "convert-checkpoint": (
        "convert_checkpoint.convert_checkpoint_command",
        "Quantize the weights of a safetensors checkpoint, shard by shard, with bounded memory.",
    ),
    "summary": (
        "summary.summary_command",
        "Say what a checkpoint holds: formats, amaxes, bytes, errors, tokens per expert.",
    ),
    "report": (
        "report.report_command",
        "Say where a run of a model loses precision: by layer, tensor, direction and format.",
    ),
    "advise": (
        "advise.advise_command",
        "Say which formats the slots of a model should have, and why, and write the recipe.",
    ),
    "amax-diff": (
        "amax_diff.amax_diff_command",
        "Compare two calibrations: how many amaxes are equal, larger and smaller.",
    ),
    "compare": (
        "compare.compare_command",
        "Name the first step, tensor and bit at which two traces of runs differ.",
    ),
    "export": (
        "export.export_command",
        "Write a checkpoint, plain or quantized, in a layout that other programs read.",
    ),
    "perplexity": (
        "perplexity.perplexity_command",
        "Say the perplexity of a text under a model, as it is and quantized by recipes.",
    ),
}


class _Commands(TyperGroup):
    """Lists commands by `COMMANDS`, and loads the one that runs."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        return TyperCommand(cmd_name, help=COMMANDS[cmd_name][1])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, found, rest = super().resolve_command(ctx, args)
        return name, None if found is None or name is None else _loaded(name), rest


def _loaded(name: str) -> Any:
    module, _, function = COMMANDS[name][0].partition(".")
    one = typer.Typer(**_LOOKS)
    one.command(name)(getattr(import_module(f"hybridq.cli.{module}"), function))
    return get_command(one)


app = typer.Typer(name="hybridq", cls=_Commands, no_args_is_help=True, **_LOOKS)


def _print_version(is_wanted: bool) -> None:
    spec = find_spec("hybridq")  # looks for the package and does not run it
    if is_wanted and spec is not None and spec.origin is not None:
        version = runpy.run_path(str(Path(spec.origin).with_name("_version.py")))["__version__"]
        typer.echo(f"hybridq {version}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", is_eager=True, callback=_print_version
        ),
    ] = False,
) -> None:
    """Quantized tensors for PyTorch: any format in either direction, on any machine."""
