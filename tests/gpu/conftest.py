"""Everything here needs a GPU, and is skipped with the reason where there is none.

`--gpu-seconds N` skips what has not begun after N seconds, so that benchmarks get their time.
`--gpu-outcomes FILE` writes a line of JSON into FILE when a test begins and when it ends, so that
nothing that is known is lost if the run is killed.
"""

from __future__ import annotations

import json
import os
import time
from functools import lru_cache
from pathlib import Path

import pytest
import torch

import kernel_cases as cases
from hybridq.kernels.choice import registry as registry

FOLDER = Path(__file__).parent
_START = time.monotonic()


@lru_cache(maxsize=1)
def _reason() -> str | None:
    if torch.version.cuda is None:
        return f"needs an NVIDIA GPU: torch {torch.__version__} is built without CUDA"
    return None if torch.cuda.is_available() else "needs an NVIDIA GPU: torch finds none"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-seconds", type=float, default=0.0, help="0: no limit")
    parser.addoption("--gpu-no-profiler", action="store_true", help="for tools that trace, too")
    parser.addoption("--gpu-outcomes", type=Path, help="a file of JSON lines, appended to")


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption("--gpu-outcomes", default=None)
    # Of several processes, the one that all reports reach.
    if file is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Outcomes(file))


class _Outcomes:
    """Writes what became of each test as soon as it is known."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def _write(self, **fields: object) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps(fields) + "\n")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(test=nodeid, outcome="begun")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        is_end = report.when == "call" or report.outcome != "passed"
        if not is_end:
            return
        self._write(
            test=report.nodeid,
            outcome=report.outcome,
            seconds=round(report.duration, 3),
            text=report.longrepr[2] if report.skipped else report.longreprtext,  # type: ignore[index]
            properties=dict(report.user_properties),
        )


#: After one of these no call of the process reaches the GPU again.
_STICKY = ("illegal memory access", "misaligned address", "unspecified launch failure",
           "device-side assert", "illegal instruction", "hardware stack error")  # fmt: skip


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    if is_worker and report.failed and any(text in report.longreprtext for text in _STICKY):
        # xdist starts another worker; the tests that follow are then about themselves.
        os._exit(70)


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
