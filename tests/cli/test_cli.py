"""The command line as a whole: what it costs to ask it for help, and its list of commands."""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib import import_module

import pytest
from typer.testing import CliRunner

import hybridq
from hybridq_cli.app import COMMANDS, app

RUNNER = CliRunner()
WITHOUT_TORCH = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "numpy"):
            raise RuntimeError(f"{name} is imported")

sys.meta_path.insert(0, NoTorch())
sys.argv[0] = "hybridq"
from hybridq_cli import main
main()
"""


@pytest.mark.parametrize(
    ("argument", "said"), [("--help", "Usage: hybridq"), ("--version", hybridq.__version__)]
)
def test_help_and_version_without_torch(argument: str, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", WITHOUT_TORCH, argument],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert said in done.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_says_what_a_command_says_of_itself(name: str) -> None:
    where, said = COMMANDS[name]
    module, _, function = where.partition(".")
    command = getattr(import_module(f"hybridq.cli.{module}"), function)
    assert inspect.getdoc(command).partition("\n\n")[0] == said
    shown = RUNNER.invoke(app, [name, "--help"])
    assert shown.exit_code == 0 and f"Usage: hybridq {name}" in shown.output


def test_a_command_that_is_not_there() -> None:
    result = RUNNER.invoke(app, ["dokter"])
    assert result.exit_code == 2 and "No such command 'dokter'" in result.output
