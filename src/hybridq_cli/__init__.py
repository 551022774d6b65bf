"""The command `hybridq`. It stands beside the package hybridq, whose import imports torch."""

from __future__ import annotations

import sys
from typing import Final

__all__ = ["main"]

#: What the command line needs beyond the library itself.
_EXTRAS: Final = ("typer", "rich", "matplotlib")


def main(name: str = "hybridq") -> None:
    """Run the command line (the console script's entry).

    Args:
        name: the program's, for its help.
    """
    try:
        from .app import app

        app(prog_name=name)
    except ModuleNotFoundError as error:
        # Only for the packages of the extra: any other missing module is an error of its own.
        if (error.name or "").partition(".")[0] not in _EXTRAS:
            raise
        sys.exit(f"hybridq: the command line needs {error.name}; pip install hybridq[demo]")
