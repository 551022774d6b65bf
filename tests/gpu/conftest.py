"""Everything here needs a GPU, and is skipped with the reason where there is none.

`--gpu-seconds N` skips what has not begun after N seconds, so that benchmarks get their time.
"""

from __future__ import annotations

import time
from functools import lru_cache
from pathlib import Path

import pytest
import torch

import kernel_cases as cases
from hybridq.kernels import registry

FOLDER = Path(__file__).parent
_START = time.monotonic()


@lru_cache(maxsize=1)
def _reason() -> str | None:
    if torch.version.cuda is None:
        return f"needs an NVIDIA GPU: torch {torch.__version__} is built without CUDA"
    return None if torch.cuda.is_available() else "needs an NVIDIA GPU: torch finds none"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-seconds", type=float, default=0.0, help="0: no limit")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    reason = _reason()
    if reason is not None:
        pytest.skip(reason)  # from one place: one line of the summary for all of them
    # Registered only where this folder was asked for, as `make gpu` does.
    seconds = item.config.getoption("--gpu-seconds", default=0.0)
    if seconds and time.monotonic() - _START > seconds:
        pytest.skip("no time left")


@pytest.fixture
def kernels() -> cases.Kernels:
    """The compiled kernels, on tensors of the first GPU."""
    return cases.Kernels(registry._backends["cuda"].ops, "cuda")


@pytest.fixture(autouse=True)
def _free_memory():
    """Tests run beside each other, and some need many gigabytes."""
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
