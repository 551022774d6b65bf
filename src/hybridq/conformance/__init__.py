"""Conformance: vectors with the right answers, and a suite that holds any implementation to them.

`python -m hybridq conformance` runs it; docs/reference/conformance.md says how to cite it, how the
files are made, and how to write an adapter.
"""

from __future__ import annotations

from . import adapters
from .adapter import Adapter, AdapterError, adapter_names, load_adapter, register_adapter
from .case import KINDS, Case, describe, to_spec
from .compare import STATUSES, Difference, Result, run, run_case
from .files import FORMAT, VERSION, VectorError, read_file, write_file
from .generate import build_vectors, write_vectors
from .suite import VECTORS, Report, check, load_vectors

__all__ = [
    "FORMAT",
    "KINDS",
    "STATUSES",
    "VECTORS",
    "VERSION",
    "Adapter",
    "AdapterError",
    "Case",
    "Difference",
    "Report",
    "Result",
    "VectorError",
    "adapter_names",
    "adapters",
    "build_vectors",
    "check",
    "describe",
    "load_adapter",
    "load_vectors",
    "read_file",
    "register_adapter",
    "run",
    "run_case",
    "to_spec",
    "write_file",
    "write_vectors",
]
