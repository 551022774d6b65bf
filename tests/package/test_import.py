"""`import hybridq`: what it loads, what it registers, and which names there are."""

from __future__ import annotations

import ast
import inspect
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

import hybridq
from places import ROOT

MODULE_OF = hybridq._MODULE_OF
#: What type checkers see of packages that can be called.
CALLABLE = ROOT / "src" / "hybridq" / "_callable_package.pyi"
#: Most names at the top: what nearly every program uses. The rest stands in the packages.
MOST_NAMES = 45


def run(code: str, *args: object) -> None:
    """Run `code` in a process that has imported nothing; warnings are errors."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *map(str, args)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (done.stdout, done.stderr) == ("", "")


def test_no_package_brings_the_compiler_before_something_is_compiled() -> None:
    """It takes seconds. Whoever makes an optimizer has it: torch's own brings it."""
    packages = sorted({*MODULE_OF.values()} - {"te", "optim"})
    run(
        "import sys, importlib, warnings\n"
        "warnings.simplefilter('default')\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(f'hybridq.{name}')\n"
        "    if 'torch._dynamo' in sys.modules:\n"
        "        sys.exit(f'hybridq.{name} imports torch._dynamo')\n",
        *packages,
    )


@pytest.mark.parametrize("name", sorted({*hybridq.__all__, *MODULE_OF}))
def test_a_name_is_that_of_its_package(name: str) -> None:
    if name == "__version__":
        return
    module = import_module(f"hybridq.{MODULE_OF.get(name, 'tensor')}")
    assert getattr(hybridq, name) is getattr(module, name)
    assert name in dir(hybridq) and name in module.__all__


def test_there_are_few_names_and_each_has_one_home() -> None:
    assert len(hybridq.__all__) <= MOST_NAMES
    homes = [
        name
        for table in (hybridq._NAMES, hybridq._ALIASES)
        for part in table.values()
        for name in part
    ]
    assert len(set(homes)) == len(homes)
    public = [name for part in hybridq._NAMES.values() for name in part]
    assert sorted([*public, "__version__", "gemm"]) == hybridq.__all__


def test_type_checkers_see_every_name() -> None:
    tree = ast.parse(Path(hybridq.__file__).read_text())
    (block,) = (
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    seen = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    called = {name for name, module in seen.items() if module == CALLABLE.stem}
    packages = called | {name for name, module in seen.items() if module is None}
    assert packages >= set(hybridq._PACKAGES)
    assert called == {name for name in hybridq._PACKAGES if callable(getattr(hybridq, name))}
    again = {
        alias.name
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name
    }
    # Without implicit re-exports, as strict checkers have it, a module exports these alone.
    assert again == called | {name for names in hybridq._ALIASES.values() for name in names}
    named = {n: module for n, module in seen.items() if module is not None and n not in called}
    assert set(named) == set(MODULE_OF)
    for name, module in named.items():
        assert module == MODULE_OF[name] or module.startswith(f"{MODULE_OF[name]}."), name
        found = getattr(import_module(f"hybridq.{module}"), name)
        assert found is getattr(hybridq, name), name


def test_type_checkers_see_a_package_that_can_be_called() -> None:
    """Its names and its function's arguments, as a class has them."""
    (shown,) = (
        one for one in ast.parse(CALLABLE.read_text()).body if isinstance(one, ast.ClassDef)
    )
    package = getattr(hybridq, shown.name)
    call, *names = shown.body
    targets = [one.target if isinstance(one, ast.AnnAssign) else one.targets[0] for one in names]
    assert sorted(target.id for target in targets) == sorted(package.__all__)
    source = ast.parse(inspect.getsource(getattr(package, shown.name))).body[0]
    assert isinstance(call, ast.FunctionDef) and isinstance(source, ast.FunctionDef)
    call.args.args.pop(0)  # cls
    assert ast.unparse(call.args) == ast.unparse(source.args)
    assert f"_{ast.unparse(source.returns)}" == ast.unparse(shown.bases[0])


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="module 'hybridq' has no attribute 'Lineer'"):
        hybridq.Lineer  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'Lineer'"):
        exec("from hybridq import Lineer")


def test_names_are_found_inside_a_graph(monkeypatch) -> None:
    for name in ("PlaneSpec", "autocast", "backend"):
        monkeypatch.delitem(vars(hybridq), name, raising=False)

    def cast(x: torch.Tensor) -> torch.Tensor:
        with hybridq.backend("reference"), hybridq.autocast(recipe=hybridq.recipes.get("mxfp8")):
            return x + 1

    x = torch.ones(2)
    assert torch.equal(torch.compile(cast, fullgraph=True, backend="eager")(x), x + 1)


LAZY = """
import sys, hybridq
late = {f"hybridq.{name}" for name in hybridq._PACKAGES}
assert not late & set(sys.modules), late & set(sys.modules)
"""
READS = """
import torch
names = torch._C._dispatch_get_all_op_names()
assert sorted(name for name in names if name.startswith("hybridq::")) == sys.argv[2:]
read = torch.load(sys.argv[1], weights_only=True)
assert isinstance(read, hybridq.QuantizedTensor)
assert read.dequantize().shape == (32, 32)
assert not late & set(sys.modules), late & set(sys.modules)
"""
#: What a program may be inside of when it asks for a name for the first time.
INSIDE = """
import gc
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
before = {id(one) for one in gc.get_objects()}
with torch.inference_mode(), torch.device("meta"), FakeTensorMode():
    for name in hybridq._PACKAGES:
        getattr(hybridq, name)
made = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)
        and id(one) not in before]
spoilt = [one for one in made if one.is_meta or one.is_inference() or type(one) is FakeTensor]
assert not spoilt, spoilt
"""


@pytest.mark.more
def test_files_and_graphs_can_be_read_after_the_import_alone(tmp_path) -> None:
    for package in hybridq._PACKAGES:  # none of them has an operator of its own
        import_module(f"hybridq.{package}")
    names = torch._C._dispatch_get_all_op_names()
    operators = sorted(name for name in names if name.startswith("hybridq::"))
    assert "hybridq::encode" in operators  # graphs have operators by name
    torch.save(hybridq.quantize(torch.ones(32, 32), "mxfp8"), tmp_path / "tensor.pt")
    run(LAZY + READS + INSIDE, tmp_path / "tensor.pt", *operators)


def test_no_module_is_shadowed_by_the_tables() -> None:
    modules = {path.stem for path in (ROOT / "src" / "hybridq").iterdir()}
    assert modules & set(MODULE_OF) == set()
    assert modules & set(hybridq.__all__) == {"gemm"}


@pytest.mark.slow
def test_a_strict_type_checker_knows_every_public_name(tmp_path) -> None:
    """A user's file that says every name; checkers read sources, so no name may be made later."""
    pytest.importorskip("mypy", reason="needs mypy: hybridq[dev]")
    packages = [*hybridq._PACKAGES, "formats", "kernels", "quantizers", "settings", "storage"]
    lines = ["import hybridq", *(f"import hybridq.{name} as in_{name}" for name in packages)]
    lines += [f"hybridq.{name}" for name in sorted({*hybridq.__all__, *MODULE_OF})]
    for package in packages:
        module = import_module(f"hybridq.{package}")
        lines += [f"in_{package}.{name}" for name in module.__all__]
    lines += ["def text(it: hybridq.report.PrecisionReport) -> str:", "    return repr(it)"]
    lines += ["text(hybridq.report(in_nn.Linear(4, 4), None, recipe='mxfp8'))"]
    file = tmp_path / "user.py"
    file.write_text("\n".join(lines) + "\n")
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", tmp_path / "cache", file]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
