"""``python -m hybridq``: the command line."""

from __future__ import annotations

from hybridq_cli import main

if __name__ == "__main__":
    main("python -m hybridq")
