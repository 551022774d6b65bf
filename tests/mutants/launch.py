"""Runs pytest on the copy's package, and reports which test failed first, and how.

Started by workspace.py in a process of its own for every run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings

#: For processes that tests start, ranks among them: Python runs it before anything else. An
#: editable installation finds the package by a finder of its own, put before all others.
_SITE = """
import sys
from importlib.machinery import PathFinder

sys.meta_path.sort(key=lambda finder: finder is not PathFinder)
"""
#: What the tests import besides hybridq: seconds, spent once.
PRELOADED = ("torch", "numpy", "pytest", "hypothesis", "ml_dtypes", "gfloat.formats")


class FirstFailure:
    """A pytest plugin that keeps the first failure."""

    def __init__(self) -> None:
        self.passed = 0
        self.failed: str | None = None
        self.error = ""
        self.is_assertion = False

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = (yield).get_result()
        self.passed += report.when == "call" and report.passed
        if report.failed and self.failed is None:
            raised = call.excinfo.value
            self.failed = item.nodeid
            self.error = f"{type(raised).__name__}: {str(raised).strip().splitlines()[:1]}"
            self.is_assertion = report.when == "call" and _only_assertions(raised)

    def pytest_collectreport(self, report):
        if report.failed and self.failed is None:
            self.failed, self.error = report.nodeid, "error in collection"


def _only_assertions(raised: BaseException) -> bool:
    # hypothesis raises a group where several examples fail in different ways.
    parts = getattr(raised, "exceptions", None)
    if parts is not None:
        return all(_only_assertions(part) for part in parts)
    return isinstance(raised, AssertionError)


def _imported(tree: Path) -> tuple[str, str, bool]:
    package, core = sys.modules.get("hybridq"), sys.modules.get("hybridq._core")
    if package is None or core is None:
        return "", "", False
    files = [package.__file__, core.__file__, _found_by_children()]
    own = all(tree in Path(file).resolve().parents for file in files)
    return package.__version__, core.build_info()["version"], own


def _found_by_children() -> str:
    """Where a process that a test starts would import the package from."""
    asked = "import importlib.util as u; print(u.find_spec('hybridq').origin)"
    command = [sys.executable, "-c", asked]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main(tree: Path, report: Path, output: Path, tests: tuple[str, ...]) -> None:
    """Run `tests` (pytest's arguments) in the copy `tree` and write the report."""
    if "hybridq" in sys.modules:
        raise RuntimeError("mutants: the package must not be imported before its copy")
    with output.open("w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    os.chdir(tree)
    for name in [name for name in os.environ if name.startswith(("HYBRIDQ_", "PYTEST_"))]:
        del os.environ[name]
    # No bytecode: an edit within the same second, of the same length, would not be seen.
    sys.dont_write_bytecode = True
    # The path has to come first again, here and in the processes that tests start.
    sys.path.insert(0, str(tree / "src"))
    sys.meta_path.sort(key=lambda finder: finder is not PathFinder)
    site = tree.parent / "site"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(_SITE)
    paths = [str(site), str(tree / "src"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    # The first failure is enough: no search for a smaller one.
    settings.register_profile(
        "mutants",
        max_examples=10,
        derandomize=True,
        deadline=None,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
    first = FirstFailure()
    options = ["-x", "-m", "not slow", "-p", "no:cacheprovider", "--tb=line"]
    code = pytest.main([*options, "--hypothesis-profile=mutants", *tests], plugins=[first])
    found = {
        "exit_code": int(code),
        "passed": first.passed,
        "failed": first.failed,
        "error": first.error,
        "is_assertion": first.is_assertion,
        "imported": _imported(tree.resolve()),
    }
    report.write_text(json.dumps(found))
