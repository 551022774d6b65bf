"""The application: one line per command."""

from __future__ import annotations

import typer

from .conformance import conformance
from .convert_checkpoint import convert_checkpoint_command
from .doctor import doctor
from .plan import plan
from .train import train
from .train_fsdp import train_fsdp

app = typer.Typer(
    name="hybridq",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def main() -> None:
    """Quantized tensors for PyTorch: any format in either direction, on any machine."""


app.command()(train)
app.command("train-fsdp")(train_fsdp)
app.command()(doctor)
app.command()(plan)
app.command()(conformance)
app.command("convert-checkpoint")(convert_checkpoint_command)
