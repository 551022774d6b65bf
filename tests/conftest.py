"""Fixtures over the registries, seeds, and the check that no declared backend went untested.

A format or backend that joins its registry is tested by every test that asks for `fmt` or
`backend`; nothing else needs to be written.
"""

from __future__ import annotations

import gc
import os
import random
import tempfile
import zlib
from pathlib import Path

# One thread per test process: xdist fills the cores. Before torch, which reads it at import.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

import hybridq
from captured_logs import captured_logs
from declared import BACKENDS, FORMATS
from hybridq.direction import DIRECTIONS
from hybridq.kernels.decoded import give_no_advice
from places import TESTS
from suite_time import SuiteTime
from thinning import thin

#: What `make test` runs.
DEFAULT = "not slow and not more"
#: What `make test-all` runs.
BOTH = "not slow"

# Whether they are given depends on the CPU: only their own test sees them.
give_no_advice()

# torch.manual_seed keeps a call, with the text of its stack, for each kind of device that is not
# there: half a millisecond each time, and in the end hundreds of megabytes.
for _devices in (torch.cuda, torch.xpu, torch.mtia):
    if not _devices.is_available():
        _devices.manual_seed_all = lambda seed: None

# A build with CUDA on a machine without a GPU: what is chosen for a named chip is not to depend on
# the version that torch happens to be built with.
if not torch.cuda.is_available():
    torch.version.cuda = None

# Each compilation would measure how long its guards take, with the CPU's caches flushed: 0.02 s for
# a line of torch's log.
torch._C._dynamo.guards.profile_guard_manager = lambda *given: 0.0

_COMMON = {
    "deadline": None,
    # `backend` only sets a thread-local setting: the same for every example of a test.
    "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
}
settings.register_profile("hybridq", max_examples=10, derandomize=True, **_COMMON)
# For hunting: pytest --hypothesis-profile=thorough
settings.register_profile("thorough", max_examples=200, print_blob=True, **_COMMON)
settings.load_profile("hybridq")

if os.environ.get("ATEN_CPU_CAPABILITY") == "avx2":
    # Inductor asks the CPU how wide its vectors are, torch's own headers this variable: on a CPU
    # with AVX-512 its loops would take steps of 16 with vectors of 8.
    from torch._inductor import config as inductor

    inductor.cpp.simdlen = 256


@pytest.fixture(autouse=True, scope="session")
def temporary_folders(tmp_path_factory):
    """Folders that examples leave behind lie in pytest's, which removes them."""
    # Compiled code stays where it is: the next run and other workers find it there.
    compiled = Path(tempfile.gettempdir(), "torchinductor")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(compiled))
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("system")
        patch.setenv("TMPDIR", str(folder))
        patch.setattr(tempfile, "tempdir", None)
        yield
    tempfile.tempdir = None


@pytest.fixture(params=BACKENDS)
def backend(request):
    """Every registered backend, forced while the test runs."""
    request.node.user_properties.append(("backend", request.param))
    with hybridq.backend(request.param):
        yield request.param


@pytest.fixture(params=FORMATS)
def fmt(request) -> str:
    """Every registered format's name."""
    return request.param


@pytest.fixture(params=DIRECTIONS)
def direction(request) -> str:
    """`rowwise` and `columnwise`."""
    return request.param


@pytest.fixture
def fast_products(monkeypatch):
    """As on a CPU for which torch has fast products of BF16 and FP16: its bits are ours."""
    from hybridq.kernels.choice.registry import forget_choices
    from hybridq.kernels.decoded import plain_gemm as plain

    monkeypatch.setattr(plain, "_SLOW", frozenset())
    forget_choices()
    yield
    forget_choices()


@pytest.fixture
def without_tiles():
    """As on a CPU that has no AMX."""
    from hybridq import _core

    used = _core.variant()
    if used == "x86-64-v4-amx":
        _core.set_variant("x86-64-v4")
    yield
    _core.set_variant(used)


@pytest.fixture
def tiles():
    """Where the CPU has AMX and no variant is forced that does without."""
    from hybridq import _core

    if not _core.multiplies_planes_in_bf16():
        pytest.skip("this CPU has no AMX, or the variant in use does without")


@pytest.fixture
def slow_products(monkeypatch):
    """As on a CPU for which torch has none: values are rounded once, sums have another order."""
    from hybridq.kernels.choice.registry import forget_choices
    from hybridq.kernels.decoded import plain_gemm as plain

    monkeypatch.setattr(plain, "_SLOW", frozenset((torch.bfloat16, torch.float16)))
    forget_choices()
    yield
    forget_choices()


@pytest.fixture
def asked(monkeypatch) -> list[str]:
    """The precision of every GEMM that reaches the choice of a backend, in order."""
    from hybridq.kernels.operators import dense as ops
    from hybridq.nn.autograd import prepared_linear

    seen: list[str] = []
    operation = ops.operation

    def spy(op, device, dtype, row=None, col=None, *rest):
        if op == "gemm":
            seen.append(rest[0])
        return operation(op, device, dtype, row, col, *rest)

    monkeypatch.setattr(ops, "operation", spy)
    plan = prepared_linear.gemm_plan

    def spy_plan(a, b, dtype, precision, is_alone):
        seen.append(precision)
        return plan(a, b, dtype, precision, is_alone)

    monkeypatch.setattr(prepared_linear, "gemm_plan", spy_plan)
    return seen


@pytest.fixture
def registries():
    """What a test registers is forgotten after it: other tests iterate the registries."""
    from hybridq.formats import ELEMENTS
    from hybridq.formats import codec as codecs
    from hybridq.formats import registry as known
    from hybridq.formats.spec import _parse
    from hybridq.kernels.choice import registry as registry
    from hybridq.quantizers.api import _cached
    from hybridq.quantizers.quantizer import _plan
    from oracle import ELEMENTS as ORACLE_ELEMENTS

    tables = (
        *(ELEMENTS, known._entries, known._aliases, codecs._codecs),
        *(ORACLE_ELEMENTS, registry._backends),
    )
    before = [dict(table) for table in tables]
    yield
    for table, kept in zip(tables, before, strict=True):
        table.clear()
        table.update(kept)
    # Whatever is looked up by a text.
    for clear in (_parse.cache_clear, _plan.cache_clear, _cached.cache_clear):
        clear()
    registry.forget_choices()


@pytest.fixture
def chooses_anew():
    """A test that changes what backends find on this machine: no choice outlives the change."""
    from hybridq.kernels.choice import forget_choices

    forget_choices()
    yield forget_choices  # to be called after each further change
    forget_choices()


@pytest.fixture(autouse=True)
def _warns_anew() -> None:
    """What is said once per process is said once per test: no test uses up another's warning."""
    from hybridq import errors
    from hybridq.tensor import lost_updates

    errors._seen.clear()
    lost_updates._counts.clear()


@pytest.fixture
def caplog():
    """What is logged while the test runs."""
    with captured_logs() as logs:
        yield logs


@pytest.fixture
def seed(request) -> int:
    """A seed of this test's own: the same in every run and every folder, another for every test."""
    file, _, name = request.node.nodeid.partition("::")
    return zlib.crc32(f"tests/{Path(file).name}::{name}".encode())


@pytest.fixture(autouse=True)
def _seeded(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


# --- a run in which a declared backend executed no test is a failed run --------------------------

_executed: set[str] = set()
_time = SuiteTime()


def _is_default(item: pytest.Item) -> bool:
    return not any(item.get_closest_marker(name) for name in ("more", "slow"))


def pytest_collection_finish() -> None:
    _keep()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is not None and nextitem.path != item.path:
        _keep()


def _keep() -> None:
    """Take what is alive out of Python's collections, which then look through little.

    Imports, and what the compiler keeps, stay until the end; the update of scales collects in every
    model's first step, and would look through a million objects of other tests.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave all but the default tests out unless -m or an explicit test id asks for them."""
    thin(items)  # before -m chooses
    if config.option.markexpr or any("::" in arg for arg in config.args):
        return
    others = [item for item in items if not _is_default(item)]
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if _is_default(item)]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    # With xdist the controller sees the workers' reports, and counts for all of them.
    _time.add(report)
    if report.when == "call" and not report.skipped:
        _executed.update(value for name, value in report.user_properties if name == "backend")


def _is_whole_suite(config: pytest.Config, *expressions: str) -> bool:
    """Whether this run collected everything that a plain `pytest`, or one of these, collects."""
    option = config.option
    narrowed = (
        option.keyword
        or option.markexpr not in ("", DEFAULT, *expressions)
        or option.collectonly
        or getattr(option, "lf", False)
        or getattr(option, "deselect", None)
        or getattr(option, "ignore", None)
        or getattr(option, "ignore_glob", None)
        or getattr(option, "maxfail", 0)
    )
    if narrowed:
        return False
    roots = [(config.invocation_params.dir / arg).resolve() for arg in config.args]
    return any(root == TESTS or root in TESTS.parents for root in roots)


def _untested(config: pytest.Config) -> list[str]:
    if hasattr(config, "workerinput") or not _is_whole_suite(config):
        return []
    return [name for name in BACKENDS if name not in _executed]


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED) and _untested(
        session.config
    ):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, exitstatus: int, config: pytest.Config) -> None:
    for name in _untested(config):
        terminalreporter.write_line(
            f"backend {name!r} is declared, but no test was executed with it", red=True
        )
    if _is_whole_suite(config, BOTH):
        for line in _time.lines():
            terminalreporter.write_line(line)
