"""Counts of how the source is built: files, imports between them, long signatures, calls.

    python benchmarks/structure.py                  the table of this tree
    python benchmarks/structure.py --json FILE      the same as values
    python benchmarks/structure.py --beside FILE    the table with an earlier one beside it

What is counted, and how:

- arrows: imports between two files of one package; between rooms: the same between its folders;
- parameters: of every `def`, without `self` and `cls`, `*args` and `**kwargs` counted as one each;
- signatures of encode: a `def` or a dataclass that lists at least four of the names in ENCODE;
- foreign underscore names: `x._name` where another package than the reader's own defines `_name`
  in a class or at module level, and the reader's does not;
- frames and Python calls: of one eager call, `sys.setprofile`, after it was called 20 times.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[1] / "src" / "hybridq"
ENCODE = frozenset(
    [
        "row",
        "col",
        "row_stat",
        "col_stat",
        "seed",
        "col_source",
        "keep_row",
        "row_stream",
        "col_stream",
    ]
)
MOST_PARAMETERS = 8
PACKAGES = ("kernels", "nn", "distributed")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def files() -> dict[str, ast.Module]:
    """Return the tree of every module, by its dotted name below `hybridq`."""
    return {_name(path): ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}


def _name(path: Path) -> str:
    parts = list(path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(name: str, tree: ast.Module, known: set[str]) -> Iterator[str]:
    """Yield the modules of hybridq that a module imports.

    Args:
        name: of the module, below `hybridq`.
        tree: of it.
        known: names of all modules.
    """
    is_package = (SOURCE / Path(*name.split("."))).is_dir() if name else True
    base = name.split(".") if name else []
    package = base if is_package else base[:-1]
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        root = package[: len(package) - node.level + 1]
        origin = ".".join([*root, *(node.module or "").split(".")]).strip(".")
        for alias in node.names:
            inner = f"{origin}.{alias.name}".strip(".")
            target = inner if inner in known else origin
            if target in known and target != name:
                yield target


def arrows(trees: dict[str, ast.Module], package: str) -> dict[str, int]:
    """Return how many files and rooms a package has, and the imports between them.

    Args:
        trees: of all modules.
        package: such as `"kernels"`.
    """
    known = set(trees)
    inside = [name for name in trees if name == package or name.startswith(f"{package}.")]
    pairs = {
        (name, target)
        for name in inside
        for target in imported(name, trees[name], known)
        if target in inside
    }
    rooms = {(_room(a, package), _room(b, package)) for a, b in pairs}
    floor = [name for name in inside if name.count(".") <= 1 and not _is_folder(name)]
    return {
        "files": len(inside),
        "files on its floor": len(floor),
        "rooms": len({_room(name, package) for name in inside} - {""}),
        "arrows between files": len(pairs),
        "arrows between rooms": sum(a != b and bool(a) and bool(b) for a, b in rooms),
    }


def _is_folder(name: str) -> bool:
    return (SOURCE / Path(*name.split("."))).is_dir()


def _room(name: str, package: str) -> str:
    """Return the folder of a package that a module is in; its own name if it is on the floor."""
    return name[len(package) :].lstrip(".").split(".")[0]


def functions(trees: dict[str, ast.Module]) -> Iterator[tuple[str, Function]]:
    """Yield every function with the name of its module."""
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, Function):
                yield name, node


def parameters(node: Function) -> list[str]:
    """Return the names of a function's parameters, without `self` and `cls`."""
    given = node.args
    every = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    every += [arg for arg in (given.vararg, given.kwarg) if arg is not None]
    return [arg.arg for arg in every if arg.arg not in ("self", "cls")]


def signature_lines(node: Function) -> int:
    """Return how many lines a function has from `def` to the colon."""
    return max(1, node.body[0].lineno - node.lineno)


def code_lines(path: Path) -> int:
    """Return how many lines of a file have code: no comment, no docstring, not empty."""
    tree = ast.parse(path.read_text())
    texts: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, Function | ast.ClassDef | ast.Module) and ast.get_docstring(node):
            text = node.body[0]
            texts |= set(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    found: set[int] = set()
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type not in (*skipped, tokenize.ENCODING, tokenize.ENDMARKER):
                found |= set(range(token.start[0], token.end[0] + 1))
    return len(found - texts)


def import_lines(tree: ast.Module) -> int:
    """Return how many lines of a module import."""
    nodes = [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)]
    return sum((n.end_lineno or n.lineno) - n.lineno + 1 for n in nodes)


def foreign_underscores(trees: dict[str, ast.Module]) -> Counter[str]:
    """Return the uses of underscore names of other packages, by `reader -> owner`."""
    owners: dict[str, set[str]] = defaultdict(set)
    for name, tree in trees.items():
        package = name.split(".")[0]
        for defined in _defined(tree):
            owners[defined].add(package)
    uses: Counter[str] = Counter()
    for name, tree in trees.items():
        package = name.split(".")[0]
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute):
                continue
            where = owners.get(node.attr, set())
            if where and package not in where and node.attr not in _TORCH:
                uses[f"{package} -> {', '.join(sorted(where))}"] += 1
    return uses


#: Underscore names that torch or a named tuple has too, so that a reader may mean theirs.
_TORCH = frozenset(
    (
        *("_base", "_version", "_parameters", "_modules", "_buffers", "_apply", "_C", "_fields"),
        "_get_name",
    )
)


def _defined(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, Function | ast.ClassDef):
            name = node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.attr if getattr(node.value, "id", "") == "self" else ""
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
        else:
            continue
        if name.startswith("_") and not name.startswith("__"):
            yield name


def encode_signatures(trees: dict[str, ast.Module]) -> list[str]:
    """Return the functions and records that list at least four of encode's arguments."""
    found = []
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, Function):
                names = set(parameters(node))
            elif isinstance(node, ast.ClassDef):
                names = {
                    n.target.id
                    for n in node.body
                    if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
                }
            else:
                continue
            if len(names & ENCODE) >= 4:
                found.append(f"{name}.{node.name}")
    return found


def profile(call: Callable[[], object]) -> dict[str, int]:
    """Return the Python calls and the deepest stack of hybridq's frames in one call."""
    for _ in range(20):
        call()
    calls = c_calls = deepest = depth = 0

    def watch(frame: Any, event: str, _: object) -> None:
        nonlocal calls, c_calls, deepest, depth
        is_ours = str(SOURCE) in frame.f_code.co_filename
        if event == "call":
            calls += 1
            depth += is_ours
            deepest = max(deepest, depth)
        elif event == "return":
            depth -= is_ours
        elif event == "c_call":
            c_calls += 1

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    return {"Python calls": calls - 1, "C calls": c_calls - 1, "frames": deepest}


def calls() -> dict[str, dict[str, int]]:
    """Return what an eager Linear and `quantize` cost in calls, on the CPU."""
    import torch

    import hybridq

    torch.set_num_threads(1)
    linear = hybridq.Linear(128, 64)
    few, many = torch.randn(4, 128), torch.randn(256, 128)
    quantizer = hybridq.MXFP8Quantizer()

    def forward(x: torch.Tensor) -> Callable[[], object]:
        def call() -> object:
            with hybridq.autocast(recipe="mxfp8"):
                return linear(x)

        return call

    def around() -> object:
        with hybridq.autocast(recipe="mxfp8"):
            return None

    entry = profile(around)["Python calls"]
    found = {
        "Linear, 4 rows, mxfp8": profile(forward(few)),
        "Linear, 256 rows, mxfp8": profile(forward(many)),
    }
    for counted in found.values():
        counted["Python calls"] -= entry
    found["quantize, mxfp8"] = profile(lambda: quantizer.quantize(few))
    return found


def import_time(times: int = 5) -> float:
    """Return the seconds that `import hybridq` takes after `import torch`: least of some runs."""
    code = """
import time, torch
start = time.perf_counter()
import hybridq
print(time.perf_counter() - start)
"""
    command = [sys.executable, "-c", code]
    runs = [
        float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        for _ in range(times)
    ]
    return min(runs)


def count() -> dict[str, float]:
    """Return all counts."""
    trees = files()
    found: dict[str, float] = {}
    for package in PACKAGES:
        for what, value in arrows(trees, package).items():
            found[f"{package}: {what}"] = value
    every = list(functions(trees))
    found["functions"] = len(every)
    found[f"functions of more than {MOST_PARAMETERS} parameters"] = sum(
        len(parameters(node)) > MOST_PARAMETERS for _, node in every
    )
    found["signatures that list four of encode's arguments"] = len(encode_signatures(trees))
    found["uses of other packages' underscore names"] = sum(foreign_underscores(trees).values())
    paths = sorted(SOURCE.rglob("*.py"))
    found["lines of src"] = sum(len(path.read_text().splitlines()) for path in paths)
    found["lines of code"] = code = sum(code_lines(path) for path in paths)
    heads = sum(signature_lines(node) for _, node in every)
    heads += sum(import_lines(tree) for tree in trees.values())
    found["share of signatures and imports, %"] = round(100 * heads / code, 1)
    sys.path.insert(0, str(SOURCE.parent))
    import hybridq

    found["names in hybridq.__all__"] = len(hybridq.__all__)
    for what, counted in calls().items():
        for unit, value in counted.items():
            found[f"{what}: {unit}"] = value
    found["import beyond torch's, s"] = round(import_time(), 2)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="file for the values")
    parser.add_argument("--beside", type=Path, help="file of an earlier run, shown beside")
    parser.add_argument("--list", action="store_true", help="name the functions that are counted")
    options = parser.parse_args()
    if options.list:
        trees = files()
        for name, node in functions(trees):
            if len(parameters(node)) > MOST_PARAMETERS:
                print(f"{len(parameters(node)):3} parameters: {name}.{node.name}")
        for text in encode_signatures(trees):
            print(f"encode's arguments: {text}")
        for text, uses in foreign_underscores(trees).most_common():
            print(f"underscore names: {uses:3} {text}")
        return
    found = count()
    before = json.loads(options.beside.read_text()) if options.beside else {}
    print("| count |" + (" before | now |" if before else " now |"))
    print("| --- |" + (" --: | --: |" if before else " --: |"))
    for what, value in found.items():
        print(f"| {what} |" + (f" {before.get(what, '')} |" if before else "") + f" {value} |")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
