"""Functions of more than eight parameters: those that users write out, and few others."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import hybridq
from places import ROOT

PACKAGE = ROOT / "src" / "hybridq"
#: Beside public names, the command line and kernels of Triton, whose arguments are their launch.
ALLOWED = {
    "gemm/grouped.py:grouped_planes": "`hybridq.grouped_gemm` of planes",
    "kernels/operators/grouped_gemm.py:_prepared": "the operator's schema",
    "kernels/operators/library.py:encode_operator": "what differs between four operators",
    "nn/autograd/grouped_function.py:_GroupedLinear.forward": "autograd takes tensors one by one",
    "nn/autograd/linear_function.py:_Linear.forward": "autograd takes tensors one by one",
    "nn/autograd/linear_function.py:linear": "a value would cost a small forward its time",
    "quantizers/api.py:_made": "what is looked up by its arguments",
    "te/cpp_extensions.py:general_gemm": "Transformer Engine's arguments",
    "te/cpp_extensions.py:general_grouped_gemm": "Transformer Engine's arguments",
    "te/optimizers.py:FusedAdam.__init__": "Transformer Engine's arguments",
    "te/optimizers.py:FusedSGD.__init__": "Transformer Engine's arguments",
    "te/rope.py:apply_rotary_pos_emb": "Transformer Engine's arguments",
    "te/router.py:fused_topk_with_score_function": "Transformer Engine's arguments",
}


def wide() -> Iterator[tuple[str, str]]:
    """(file, qualified name) of every function of more than eight parameters."""

    def walk(node: ast.AST, prefix: str, file: str) -> Iterator[tuple[str, str]]:
        for one in ast.iter_child_nodes(node):
            name = f"{prefix}{getattr(one, 'name', '')}"
            if isinstance(one, ast.FunctionDef):
                given = [a.arg for a in (*one.args.posonlyargs, *one.args.args)]
                count = len(given) + len(one.args.kwonlyargs) - (given[:1] in (["self"], ["cls"]))
                if count > 8:
                    yield file, name
                yield from walk(one, f"{name}.", file)
            else:
                yield from walk(one, f"{name}." if isinstance(one, ast.ClassDef) else prefix, file)

    for path in sorted(PACKAGE.rglob("*.py")):
        yield from walk(ast.parse(path.read_text()), "", str(path.relative_to(PACKAGE)))


def is_public(file: str, name: str) -> bool:
    """Whether users write the arguments: of a public function, or a method of a public class."""
    owner = name.split(".")[0]
    if owner.startswith("_") or (name.count(".") and not name.endswith((".__init__", ".forward"))):
        return False
    folders = Path(file).parts[:-1]
    packages = [".".join(["hybridq", *folders[:depth]]) for depth in range(len(folders), -1, -1)]
    known = {"hybridq": [*hybridq.__all__, *hybridq._MODULE_OF]}
    return any(
        owner in known.get(package, getattr(import_module(package), "__all__", ()))
        for package in packages
        if package.split(".")[1:2] != ["gemm"] and "autograd" not in package
    )


def test_long_lists_of_arguments_are_those_that_users_write() -> None:
    commands = ("cli/", "kernels/triton/")
    found = {
        f"{file}:{name}"
        for file, name in wide()
        if not file.startswith(commands) and not is_public(file, name)
    }
    assert found == set(ALLOWED), found ^ set(ALLOWED)
