"""``python -m hybridq``: the command line."""

from __future__ import annotations

import sys

#: What the command line needs beyond the library itself.
_EXTRAS = ("typer", "rich", "matplotlib")

try:
    from .cli import app
except ModuleNotFoundError as error:
    # Only for the packages of the extra: any other missing module is an error of its own.
    if (error.name or "").partition(".")[0] not in _EXTRAS:
        raise
    sys.exit(f"hybridq: the command line needs {error.name}; pip install hybridq[demo]")


def main() -> None:
    """Run the command line (the console script's entry)."""
    app(prog_name="hybridq")


if __name__ == "__main__":
    app(prog_name="python -m hybridq")
