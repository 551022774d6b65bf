"""Folders of the tree that tests read."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
#: Modules that tests import, and that programs started in this folder can import.
HELPERS = TESTS / "helpers"
#: Programs that tests of several processes start, one process for each rank.
RANKS = TESTS / "ranks"
#: Goldens that other implementations made.
PEERS = TESTS / "golden" / "peers"
BENCHMARKS = ROOT / "benchmarks"
