"""The messages of hybridq's errors and warnings, read from its sources: docs/reference/errors.md.

    python docs/error_index.py "linear: input dtype must be float32, bfloat16 or float16, got int64"

prints where a message comes from; words of it will do. What is filled in is `…` here.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

__all__ = ["Message", "find", "messages", "page"]

ROOT = Path(__file__).parents[1] / "src"
#: What is filled in when the message is made.
GAP = "…"
#: Functions that are given a message, and where: its position, or -1 for the first text.
SPEAKERS = {"warn_once": 1, "warn": 0, "warning": 0, "_error": -1, "error": -1}
#: The kind of what stands inside of another message, where that has `…`.
REASON = "reason"
#: Functions that make a part of a message.
PARTS = {"must_be_one_of": f"must be one of {GAP}, got {GAP}"}
_CLASS = re.compile(r"[A-Z]\w*(Error|Warning)|BadParameter")


class Message(NamedTuple):
    """One message.

    Attributes:
        kind: name of the exception, `"warning"`, or `"reason"` of a part of another message.
        pattern: its text, with `…` for what is filled in.
        place: file below `src`, and the function: `hybridq/gemm/call.py, gemm`.
    """

    kind: str
    pattern: str
    place: str

    @property
    def words(self) -> int:
        """How many letters are its own."""
        return len(self.pattern.replace(GAP, ""))

    def is_of(self, text: str) -> bool:
        """Return whether a message that was read may be this one."""
        parts = [re.escape(one) for one in self.pattern.split(GAP)]
        return re.search(".*?".join(parts), text, re.DOTALL) is not None


@cache
def messages() -> tuple[Message, ...]:
    """Return all messages, in the order of files."""
    found = dict.fromkeys(
        message for path in sorted(ROOT.rglob("*.py")) for message in _of_file(path)
    )
    return tuple(found)


def find(text: str) -> list[Message]:
    """Return the messages that a text may be, or whose words it has, the most telling first.

    Args:
        text: an error's message, or some words of it.
    """
    same = [one for one in messages() if one.words >= 6 and one.is_of(text)]
    if same:
        return sorted(same, key=lambda one: -one.words)
    wanted = text.lower().split()
    shares = {one: sum(word in one.pattern.lower() for word in wanted) for one in messages()}
    least = max(1, (len(wanted) + 1) // 2)
    some = [one for one, share in shares.items() if share >= least]
    return sorted(some, key=lambda one: (-shares[one], one.words))


def page() -> str:
    """Return the tables of all messages, by package, in Markdown."""
    by_package: dict[str, list[Message]] = {}
    for one in messages():
        parts = one.place.partition(",")[0].removesuffix(".py").split("/")
        by_package.setdefault(".".join(parts[:2]), []).append(one)
    lines = []
    for package, some in sorted(by_package.items()):
        lines += ["", f"## {package}", "", "| message | kind | from |", "| --- | --- | --- |"]
        ordered = sorted(some, key=lambda one: one.pattern.lower())
        lines += [
            f"| {_cell(one.pattern)} | `{one.kind}` | {_cell(one.place)} |" for one in ordered
        ]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    """Return a text as code that may stand in a table."""
    plain = " ".join(text.split()).replace("|", "\\|")
    fence = "``" if "`" in plain else "`"
    return f"{fence} {plain} {fence}" if fence == "``" else f"`{plain}`"


class _Scope(NamedTuple):
    """Where an expression stands: its function, class or module, and what names of it stand for."""

    owner: ast.AST
    known: dict[str, ast.expr]


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _known_in(tree: ast.Module) -> dict[str, ast.expr]:
    """Return the strings of a module: its constants, and what functions of one `return` give."""
    known: dict[str, ast.expr] = {}
    for one in tree.body:
        if isinstance(one, ast.FunctionDef):
            made = [node.value for node in ast.walk(one) if isinstance(node, ast.Return)]
            if len(made) == 1 and made[0] is not None:
                known[one.name] = made[0]
        elif isinstance(one, ast.Assign | ast.AnnAssign) and one.value is not None:
            targets = one.targets if isinstance(one, ast.Assign) else [one.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            known |= {name: one.value for name in names if _is_text(one.value)}
    return known


@cache
def _known_below(place: Path) -> dict[str, ast.expr]:
    """Return the strings of a module or, of a package, of all its modules."""
    module = place.with_suffix(".py")
    paths = [module] if module.exists() else sorted(place.rglob("*.py"))
    return {name: text for path in paths for name, text in _known_in(_tree(path)).items()}


def _imported(path: Path) -> dict[str, ast.expr]:
    """Return the strings that a module imports from others here, by name."""
    found: dict[str, ast.expr] = {}
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.ImportFrom) and node.level:
            place = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
            known = _known_below(place)
            found |= {one.name: known[one.name] for one in node.names if one.name in known}
    return found


@cache
def _parts() -> frozenset[str]:
    """Return the names of functions that are called to make a part of a message."""
    return frozenset(
        part.func.id
        for path in sorted(ROOT.rglob("*.py"))
        for call in ast.walk(_tree(path))
        if isinstance(call, ast.Call) and _is_speaker(call)
        for given in call.args
        for part in ast.walk(given)
        if isinstance(part, ast.Call) and isinstance(part.func, ast.Name)
    )


def _of_file(path: Path) -> Iterator[Message]:
    tree = _tree(path)
    file = path.relative_to(ROOT).as_posix()
    known = _imported(path) | _known_in(tree)
    yield from _of_body(tree, _Scope(tree, known), file)


def _of_body(node: ast.AST, scope: _Scope, file: str) -> Iterator[Message]:
    """Yield the messages below a node."""
    for child in ast.iter_child_nodes(node):
        is_owner = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        within = scope._replace(owner=child) if is_owner else scope
        if isinstance(child, ast.Call | ast.Return):
            made = _of_call(child, scope) if isinstance(child, ast.Call) else _reason(child, scope)
            if made is not None:
                name = getattr(scope.owner, "name", "")
                yield Message(*made, f"{file}, {name}" if name else file)
        yield from _of_body(child, within, file)


def _of_call(call: ast.Call, scope: _Scope) -> tuple[str, str] | None:
    """Return the kind and the pattern of the message that a call is given; None: of no message."""
    if not _is_speaker(call):
        return None
    name = _name(call)
    is_class = name not in SPEAKERS
    at = 0 if is_class else SPEAKERS[name]
    given = call.args[at : at + 1] if at >= 0 else call.args
    patterns = [_pattern(one, scope) for one in given]
    pattern = next((one for one in patterns if re.search(r"[A-Za-z]{3}", one or "")), None)
    if pattern is None:
        return None
    kinds = [one.id for one in call.args if isinstance(one, ast.Name) and _CLASS.fullmatch(one.id)]
    kind = name if is_class else next(iter(kinds), "ValueError" if name == "error" else "warning")
    if name == "warning":  # of logging
        pattern = re.sub(r"%[sdr]", GAP, pattern)
    pattern = re.sub(f"{GAP}(?:{GAP})+", GAP, pattern)
    return kind, pattern


def _name(call: ast.Call) -> str:
    return str(getattr(call.func, "id", getattr(call.func, "attr", "")))


def _is_speaker(call: ast.Call) -> bool:
    return _name(call) in SPEAKERS or _CLASS.fullmatch(_name(call)) is not None


def _reason(back: ast.Return, scope: _Scope) -> tuple[str, str] | None:
    """Return the pattern of a part: of a function that returns it or None, or makes parts."""
    owner, text = scope.owner, back.value
    if not isinstance(owner, ast.FunctionDef) or owner.returns is None:
        return None
    if text is None or not _is_text(text):
        return None
    kind = ast.unparse(owner.returns)
    if kind != "str | None" and not (kind == "str" and owner.name in _parts()):
        return None
    pattern = _pattern(text, scope)
    return (REASON, pattern) if len(re.findall(r"[A-Za-z]{2,}", pattern)) >= 4 else None


def _is_text(node: ast.expr) -> bool:
    is_constant = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return is_constant or isinstance(node, ast.JoinedStr | ast.BinOp)


def _pattern(node: ast.AST, scope: _Scope) -> str:
    """Return what an expression's text looks like."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else GAP
    if isinstance(node, ast.JoinedStr):
        return "".join(_pattern(one, scope) for one in node.values)
    if isinstance(node, ast.FormattedValue):
        inner = node.value
        is_constant = isinstance(inner, ast.Name) and inner.id.isupper()
        return _pattern(inner, scope) if is_constant or isinstance(inner, ast.Call) else GAP
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _pattern(node.left, scope) + _pattern(node.right, scope)
    if isinstance(node, ast.Call):
        name = getattr(node.func, "id", "")
        made = scope.known.get(name)
        if made is not None and not isinstance(made, ast.Name):
            return _pattern(made, scope._replace(known={}))
        return PARTS.get(name, GAP)
    if isinstance(node, ast.Name):
        return _assigned(node, scope)
    return GAP


def _assigned(name: ast.Name, scope: _Scope) -> str:
    """Return the pattern of what a name of a function was last given."""
    given = [
        one.value
        for one in ast.walk(scope.owner)
        if isinstance(one, ast.Assign)
        and one.lineno < name.lineno
        and any(isinstance(target, ast.Name) and target.id == name.id for target in one.targets)
    ]
    last = given[-1] if given else scope.known.get(name.id)
    if last is None or not (isinstance(last, ast.Call) or _is_text(last)):
        return GAP
    return _pattern(last, scope)


def main(words: Sequence[str]) -> int:
    """Print where a message comes from; return the command's status."""
    if not words:
        print(__doc__)
        return 2
    found = find(" ".join(words))
    for one in found[:10]:
        print(f"{one.kind}: {one.pattern}\n    {one.place}")
    if not found:
        print("error_index: no message of hybridq has these words; it may be torch's own")
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
