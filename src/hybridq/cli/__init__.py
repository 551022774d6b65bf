"""The command line: ``python -m hybridq <command>``."""

from .app import app

__all__ = ["app"]
