"""The layer rule: a layer imports only what stands to its left."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from places import ROOT

PACKAGE = ROOT / "src" / "hybridq"
LAYERS = [
    "errors",
    "settings",
    "_version",
    "_torch_private",
    "_torch_ranks",
    "_eager",
    "_log",
    "_text",
    "_imports",
    "_files",
    "direction",
    "formats",
    "reference",
    "kernels",
    "storage",
    "gemm",
    "tensor",
    "quantizers",
    "shards",
    "recipes",
    "layouts",
    "nn",
    "moe",
    "optim",
    "distributed",
    "converters",
    "expert_parallel",
    "calibration",
    "serving",
    "estimate",
    "ptq",
    "rollout",
    "report",
    "monitoring",
    "tracing",
    "conformance",
    "integrations",
    "compat",
    "te",
    "demo",
    "cli",
    "__main__",
]
#: The rooms of packages that have some, in order: folders, and files on the package's own floor.
ROOMS = {
    "kernels": (
        "inputs",
        "choice",
        "ragged",
        "cpu",
        "cuda",
        "scaled_mm",
        "decoded",
        "triton",
        "folded_groups",
        "folded_backend",
        "codec_backend",
        "reference_backend",
        "row_blocks",
        "host_backend",
        "operators",
    ),
    "nn": ("weights", "delayed_scaling", "autograd", "modules"),
    "distributed": (
        "agreement",
        "encoding",
        "parameters",
        "units",
        "tensors",
        "attachment",
        "fsdp2",
        "scaling_history",
        "collectives",
        "sequence",
        "flat",
        "pipelines",
        "separate_state",
        "sequence_gradients",
        "token_sums",
        "part_planes",
        "token_styles",
        "fused_style",
    ),
}
CSRC = ["formats", "core", "cpu cuda", "bindings"]
#: For tests only: the CUDA runtime on the host, and what runs in it.
EMULATION = "emulation"


def layer_of(file: Path) -> str:
    """The layer that a file of the package belongs to."""
    first = file.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


@dataclass(frozen=True)
class Facts:
    """What the tests here ask of a file, at any depth of its code.

    Args:
        imports: its statements that import.
        asserts: lines of its assert statements.
        names: all names and attributes in it.
    """

    imports: tuple[ast.Import | ast.ImportFrom, ...]
    asserts: tuple[int, ...]
    names: frozenset[str]


@cache
def facts(file: Path) -> Facts:
    """Read a file once for all tests: to parse the package takes seconds."""
    imports: list[ast.Import | ast.ImportFrom] = []
    asserts, names = [], set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            imports.append(node)
        elif isinstance(node, ast.Assert):
            asserts.append(node.lineno)
    return Facts(tuple(imports), tuple(asserts), frozenset(names))


def imported_layers(file: Path) -> set[str]:
    """Layers that a file imports, relative or absolute."""
    found = set()
    depth = len(file.relative_to(PACKAGE).parts) - 1
    for node in facts(file).imports:
        if isinstance(node, ast.ImportFrom):
            if node.level == depth + 1:  # from .. import x, from ..layer import x
                names = [node.module] if node.module else [a.name for a in node.names]
            elif node.level == 0 and (node.module or "").split(".")[0] == "hybridq":
                rest = (node.module or "").split(".")[1:]
                names = rest[:1] or [a.name for a in node.names]
            else:
                continue
            found |= {name.split(".")[0] for name in names}
        else:
            names = [a.name.split(".") for a in node.names]
            found |= {name[1] for name in names if name[0] == "hybridq" and len(name) > 1}
    return found


def imported_rooms(package: Path, file: Path) -> set[str]:
    """Rooms of its own package that a file imports."""
    found = set()
    depth = len(file.relative_to(package).parts) - 1
    for node in facts(file).imports:
        if isinstance(node, ast.ImportFrom) and node.level == depth + 1:
            names = [node.module] if node.module else [alias.name for alias in node.names]
            found |= {name.split(".")[0] for name in names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            name = f"hybridq.{package.name}"
            assert not (node.module or "").startswith(name), f"{file}: import {name} relatively"
    return found


FILES = sorted(f for f in PACKAGE.rglob("*.py") if f != PACKAGE / "__init__.py")


def test_imports_point_leftward() -> None:
    wrong = []
    for file in FILES:
        own = LAYERS.index(layer_of(file))
        # demo and cli stand on the public names, which are those of the package itself.
        public = own >= LAYERS.index("demo")
        for name in imported_layers(file):
            if name not in LAYERS:
                if not public and name != "_core":
                    wrong.append(f"{file} imports {name}, which is no layer")
            elif LAYERS.index(name) > own:
                wrong.append(f"{file} imports {name}, to its right")
    assert wrong == []


@pytest.mark.parametrize("name", ROOMS)
def test_rooms_import_only_rooms_to_their_left(name: str) -> None:
    package = PACKAGE / name
    order = {room: place for place, room in enumerate(ROOMS[name])}
    files = [file for file in sorted(package.rglob("*.py")) if file != package / "__init__.py"]
    found = {file.relative_to(package).parts[0].removesuffix(".py") for file in files}
    assert found == set(order), "every folder, and every file beside them, has its place"
    for file in files:
        room = file.relative_to(package).parts[0].removesuffix(".py")
        for other in imported_rooms(package, file):
            assert other in order, f"{file} imports {other}, which is no room of {name}"
            assert order[other] <= order[room], f"{room} imports {other}, to its right"


#: The doors of the runtime, and the tests' module.
_DOORS = ("rt.h", "launch.h", "matrix_unit.h", "emulated.cpp")


def test_c_includes_point_leftward() -> None:
    order = {name: i for i, group in enumerate(CSRC) for name in group.split()}
    files = [f for f in (ROOT / "csrc").rglob("*") if f.suffix in (".h", ".cpp", ".cu")]
    assert files
    for file in files:
        own = file.relative_to(ROOT / "csrc").parts[0]
        if own not in order:
            continue  # csrc/tests may include anything
        for name in re.findall(r'#include "([a-z_]+)/', file.read_text()):
            if name == EMULATION and file.name in _DOORS:
                continue
            assert name in order, f"{file} includes {name}/, which is no layer"
            same_or_left = name == own or order[name] < order[own]
            assert same_or_left, f"{file} includes {name}/"


def test_no_bare_assert_in_the_package() -> None:
    assert {str(file): facts(file).asserts for file in FILES if facts(file).asserts} == {}


def test_texts_are_read_and_written_in_utf_8() -> None:
    """The locale's own encoding may be ASCII, as in a container with `LC_ALL=C`."""
    text = re.compile(r"\.(?:read|write)_text\(|\bopen\([^)]*[\"'][rwax]\+?[\"']")
    found = [
        f"{file.relative_to(PACKAGE)}: {line.strip()}"
        for file in FILES
        for line in file.read_text(encoding="utf-8").splitlines()
        if text.search(line) and "encoding=" not in line and not re.match(r" *(?:>>>|\.\.\.)", line)
    ]
    assert found == []


def test_files_are_not_too_long() -> None:
    files = [*FILES, *(f for f in (ROOT / "csrc").rglob("*") if f.is_file())]
    files += [*(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    long = [(f.name, n) for f in files if (n := len(f.read_text().splitlines())) > 500]
    assert not long, f"over 500 lines: {long}"


def test_import_is_silent_and_touches_no_device() -> None:
    code = (
        "import torch, sys; import hybridq; "
        "assert not torch.cuda.is_initialized(); "
        "extra = ('triton', 'matplotlib', 'rich', 'safetensors', 'typer'); "
        "bad = [m for m in extra if m in sys.modules]; "
        "assert not bad, bad; "
        "import hybridq.kernels.choice.registry as registry; "
        "assert not registry._is_loaded"  # packages with backends wait for the first choice
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_every_public_name_is_documented() -> None:
    import hybridq

    for name in hybridq.__all__:
        thing = getattr(hybridq, name)
        if callable(thing) or isinstance(thing, type):
            assert thing.__doc__ and len(thing.__doc__) > 20, name


def uses(*names: str) -> set[str]:
    """Files of the package that read an attribute or a name."""
    files = PACKAGE.rglob("*.py")
    return {str(f.relative_to(PACKAGE)) for f in files if not facts(f).names.isdisjoint(names)}


def test_addresses_are_taken_in_one_place() -> None:
    assert uses("data_ptr") == {"kernels/inputs/addresses.py"}


def test_addresses_for_comparison_stay_away_from_the_core() -> None:
    calls_core = {file for file in uses("core", "module") if file.startswith("kernels/")}
    assert {"kernels/cpu/backend.py", "kernels/cuda/ragged_tokens.py"} <= calls_core
    assert not uses("begins_at") & calls_core


def test_what_is_said_once_is_known_by_no_address() -> None:
    """The number of an object that is gone is that of another one, which would be told nothing."""
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if name in ("warn_once", "log_once", "is_first"):
                called = {getattr(n, "id", "") for n in ast.walk(node.args[0])}
                assert "id" not in called, f"{file.name}:{node.lineno}"


@pytest.mark.more  # it walks through every file twice
def test_packages_keep_their_underscore_names_to_themselves() -> None:
    spec = importlib.util.spec_from_file_location("structure", ROOT / "benchmarks" / "structure.py")
    assert spec is not None and spec.loader is not None
    structure = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(structure)
    found = structure.foreign_underscores(structure.files())
    assert not found, f"public names are read only, got {dict(found)}"


def test_every_module_offers_what_other_packages_ask() -> None:
    """That they ask nothing else is what mypy sees: they know modules as `WeightOwner`s."""
    from hybridq.nn import Linear, WeightOwner

    asked = {name for name in vars(WeightOwner) if not name.startswith("_")}
    asked |= set(WeightOwner.__annotations__)
    assert len(asked) > 10 and not {name for name in asked if not hasattr(Linear(8, 8), name)}
