"""A copy of the tree in which mutants are applied, built and tested.

The copy's tests must meet the copy's package and the copy's core, never the installed ones. So the
copy bears a version of its own, which its build compiles into the core, and every run reports what
it imported (launch.py).
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from . import launch
from .record import ROOT, Mutant, occurrences

#: Of the copy alone: no release will ever have it.
VERSION = "0.0.0+mutants"
_LEFT_OUT = (".git", ".venv", "build", "dist", "runs", "*.so", "__pycache__", ".*_cache")


@dataclass(frozen=True)
class Run:
    """The result of one pytest run in the copy, as launch.py wrote it.

    Args:
        exit_code: pytest's; None if the run did not come to its end.
        passed: tests that passed.
        failed: id of the first test that failed, if any.
        error: what it raised: type and first line.
        is_assertion: it failed in its own code, by assertions alone.
        imported: versions of the package and of the core, and whether both came from the copy.
        output: the end of what was printed.
    """

    exit_code: int | None = None
    passed: int = 0
    failed: str | None = None
    error: str = ""
    is_assertion: bool = False
    imported: tuple[str, str, bool] = ("", "", False)
    output: str = ""

    @property
    def is_of_the_copy(self) -> bool:
        return self.imported == (VERSION, VERSION, True)


class Workspace:
    """One copy, one build folder; a mutant at a time.

    Args:
        folder: an empty folder outside of the tree.
    """

    def __init__(self, folder: Path) -> None:
        self.tree, self._build = folder / "tree", folder / "build"
        shutil.copytree(ROOT, self.tree, ignore=shutil.ignore_patterns(*_LEFT_OUT))
        stamp = self.tree / "src" / "hybridq" / "_version.py"
        stamp.write_text(f'__version__ = "{VERSION}"\n')
        # Forks of a process that has imported what all tests import, and nothing of hybridq.
        os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        self._forks = multiprocessing.get_context("forkserver")
        self._forks.set_forkserver_preload(list(launch.PRELOADED))
        self._original = ""
        self._configure()
        self._has_own_bindings = False
        self._tool("cmake", "--build", str(self._build), "--target", "_core")
        self._link = self._commands("_core")[-1]
        self.pristine = self._digest()

    def apply(self, mutant: Mutant) -> None:
        """Edit the copy; `revert` undoes it."""
        if occurrences(mutant, self.tree) != 1:
            raise RuntimeError(f"mutants: {mutant.name} is out of date")
        path = self.tree / mutant.file
        self._original = path.read_text()
        path.write_text(self._original.replace(mutant.old, mutant.new))

    def revert(self, mutant: Mutant) -> None:
        """Restore the file that `apply` edited."""
        (self.tree / mutant.file).write_text(self._original)

    def build(self, mutant: Mutant | None = None) -> str:
        """Build the copy's core into its package; return the digest of the binary.

        The bindings are compiled again only where the edit is in them: they take longest, and the
        constants and Philox words that they hand out are what tests of the kernels measure by.
        """
        has_bindings = mutant is not None and mutant.file.startswith("csrc/bindings/")
        if has_bindings or self._has_own_bindings:
            self._tool("cmake", "--build", str(self._build), "--target", "_core")
        else:
            self._tool("cmake", "--build", str(self._build), "--target", "hybridq_core")
            self._shell(self._link)
        self._has_own_bindings = has_bindings
        return self._digest()

    def test(self, tests: tuple[str, ...], keyword: str, limit_s: float) -> Run:
        """Run `tests` in the copy up to the first failure, `limit_s` seconds at most."""
        folder = self.tree.parent
        report, output = folder / "report.json", folder / "output.txt"
        report.unlink(missing_ok=True)
        arguments = (self.tree, report, output, (*tests, "-k", keyword))
        process = self._forks.Process(target=launch.main, args=arguments, daemon=True)
        process.start()
        process.join(limit_s)
        if process.is_alive():
            process.kill()
            process.join()
            return Run(error=f"no end after {limit_s:.0f} s", output=_end(output))
        if not report.is_file():
            error = f"ended with status {process.exitcode} before its report"
            return Run(error=error, output=_end(output))
        found = json.loads(report.read_text())
        found["imported"] = tuple(found["imported"])
        return Run(**found, output=_end(output))

    def _configure(self) -> None:
        options = {
            "CMAKE_LIBRARY_OUTPUT_DIRECTORY": self.tree / "src" / "hybridq",
            "CMAKE_MAKE_PROGRAM": _find("ninja"),
            "HYBRIDQ_CUDA": "OFF",
            # One source makes all variants: the slowest of them is enough, and compiles fastest.
            "HYBRIDQ_X86_VARIANTS": "OFF",
            "Python_EXECUTABLE": sys.executable,
        }
        defined = [f"-D{key}={value}" for key, value in options.items()]
        self._tool("cmake", "-G", "Ninja", "-S", str(self.tree), "-B", str(self._build), *defined)

    def _tool(self, name: str, *arguments: str) -> str:
        command = [_find(name), *arguments]
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False
        )
        return _checked(done)

    def _commands(self, target: str) -> list[str]:
        return self._tool("ninja", "-C", str(self._build), "-t", "commands", target).splitlines()

    def _shell(self, command: str) -> None:
        done = subprocess.run(
            command, shell=True, cwd=self._build, capture_output=True, text=True, check=False
        )
        _checked(done)

    def _digest(self) -> str:
        (core,) = (self.tree / "src" / "hybridq").glob("_core*.so")
        return hashlib.sha256(core.read_bytes()).hexdigest()


class BuildError(RuntimeError):
    """The copy does not compile; the text is the compiler's."""


def _end(output: Path) -> str:
    return output.read_text(errors="replace")[-3000:] if output.is_file() else ""


def _checked(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode != 0:
        raise BuildError((done.stdout + done.stderr)[-3000:])
    return done.stdout


def _find(tool: str) -> str:
    beside = os.path.dirname(sys.executable)
    path = shutil.which(tool, path=os.pathsep.join([beside, os.environ.get("PATH", "")]))
    if path is None:
        raise RuntimeError(f"mutants: {tool} must be installed, found none on the path")
    return path
