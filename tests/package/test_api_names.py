"""Every public name says what it is: a docstring with what its signature and its body ask for."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap

import pytest

import api_names
import docstring_markup
import hybridq
from api_names import PublicName
from places import ROOT

SECTIONS = ("Args", "Attributes", "Returns", "Raises", "Source", "Example")


def is_ours(value: object) -> bool:
    return str(getattr(value, "__module__", "")).startswith("hybridq")


NAMES: dict[str, PublicName] = {}
for _one in api_names.names():  # a thing with several paths once, by the first, the shortest
    if not any(_one.value is known.value and _one.name == known.name for known in NAMES.values()):
        NAMES[_one.path] = _one
CLASSES = {path: one for path, one in NAMES.items() if inspect.isclass(one.value)}
MEMBERS = {
    member.path: member
    for one in CLASSES.values()
    if is_ours(one.value)
    for member in api_names.members(one)
}
MODULES = {path: one for path, one in NAMES.items() if not one.name}
FUNCTIONS = {path: one for path, one in (NAMES | MEMBERS).items() if inspect.isfunction(one.value)}
CONSTANTS = {path: NAMES[path] for path in NAMES if path not in MODULES | CLASSES | FUNCTIONS}
COMMENTED = {
    name
    for file in (ROOT / "src").rglob("*.py")
    for name in re.findall(r"^#:.*\n(\w+)\b.*=", file.read_text(), re.M)
}


def doc(one: PublicName) -> str:
    """The docstring: of a method without one, that of the method which it overrides."""
    return inspect.cleandoc(inspect.getdoc(one.value) or "")


def raised(function: object) -> set[str]:
    """Names of the exceptions that the function's own body raises and does not catch."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    tries = [node for node in ast.walk(tree) if isinstance(node, ast.Try) and node.handlers]
    caught = {id(node) for one in tries for part in one.body for node in ast.walk(part)}
    nodes = [node for node in ast.walk(tree) if id(node) not in caught]
    calls = [node.exc for node in nodes if isinstance(node, ast.Raise)]
    names = [call.func for call in calls if isinstance(call, ast.Call)]
    return {name.id for name in names if isinstance(name, ast.Name)}


def problems(text: str, parameters: list[str], errors: set[str]) -> list[str]:
    """What a docstring lacks. One parameter may be described by the first line alone."""
    found = []
    first, *rest = text.splitlines() or [""]
    if not first.strip():
        found.append("a first line that says what it does or returns")
    if rest and rest[0]:
        found.append("an empty line after the first")
    words = set(re.findall(r"\w+", text))
    if len(parameters) > 1:
        found += [f"Args: {name}" for name in parameters if name not in words]
    found += [f"Raises: {error}" for error in sorted(errors) if error not in words]
    for line in rest:
        heading = re.match(r"([A-Z]\w+):\s*$", line)
        if heading and heading.group(1) not in SECTIONS:
            found.append(f"no section {heading.group(1)!r}; there are {', '.join(SECTIONS)}")
    return found


def parameters(function: object) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]


def owner_doc(path: str) -> str:
    owner = NAMES.get(path.rpartition(".")[0])
    return doc(owner) if owner is not None else ""


def of_function(path: str) -> list[str]:
    function = FUNCTIONS[path].value
    is_adapters = "methods are those of `Adapter`" in owner_doc(path)
    names = [] if is_adapters else parameters(function)
    return problems(doc(FUNCTIONS[path]), names, raised(function))


def of_class(path: str) -> list[str]:
    cls = CLASSES[path].value
    made_by = [vars(cls)[name] for name in ("__init__", "__post_init__") if name in vars(cls)]
    makers = [maker for maker in made_by if maker.__qualname__.startswith(cls.__qualname__)]
    sources = [maker for maker in makers if maker.__code__.co_filename != "<string>"]
    errors = set().union(*(raised(maker) for maker in sources)) if sources else set()
    is_protocol = getattr(cls, "_is_protocol", False)
    names = parameters(cls) if made_by and not is_protocol else []
    return problems(doc(CLASSES[path]), names, errors)


def of_property(path: str) -> list[str]:
    return problems(doc(MEMBERS[path]), [], set())


def of_module(path: str) -> list[str]:
    text = doc(MODULES[path])
    found = problems(text, [], set())
    parts = path.split(".")
    if parts[:2] == ["hybridq", "formats"] and len(parts) == 3 and "Source:" not in text:
        found.append("Source:")
    exported = MODULES[path].value.__all__
    if len(set(exported)) != len(exported):
        found.append("each name once in __all__")
    return found


def of_constant(path: str) -> list[str]:
    one = CONSTANTS[path]
    named = [entry for entry in hybridq.formats.entries() if entry.format is one.value]
    if named:
        return [] if named[0].summary and named[0].source else ["a summary and a source"]
    return [] if one.name in COMMENTED else ["a comment above it, that begins with #:"]


#: Of each kind of public name its paths, and what finds problems. One test each: there are 1,600.
KINDS = {
    "functions": (FUNCTIONS, of_function),
    "classes": (CLASSES, of_class),
    "properties": ([path for path in MEMBERS if path not in FUNCTIONS], of_property),
    "modules": (MODULES, of_module),
    "constants": (CONSTANTS, of_constant),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_name_says_what_it_is(kind: str) -> None:
    paths, found = KINDS[kind]
    assert paths
    assert {path: lacks for path in paths if (lacks := found(path))} == {}


def test_rules_of_the_reference_have_sources() -> None:
    for file in (ROOT / "src" / "hybridq" / "reference").glob("*.py"):
        text = ast.get_docstring(ast.parse(file.read_text()))
        assert "Source:" in text or file.name == "__init__.py", file.name


def test_a_docstring_that_lacks_something_is_found() -> None:
    assert problems("", [], set())
    assert problems("Return it.", ["a", "b"], set()) == ["Args: a", "Args: b"]
    assert problems("Return it.\n\nArgs:\n    a, b: parts.", ["a", "b"], {"SpecError"}) == [
        "Raises: SpecError"
    ]
    assert problems("Return it.\nAnd more.", [], set())
    assert problems("Return it.\n\nParameters:\n    a: x.", ["a"], set())
    assert raised(hybridq.formats.PlaneSpec.resolve) == {"SpecError"}


def test_sphinx_reads_docstrings_as_they_are_meant() -> None:
    named = FUNCTIONS | CLASSES | MODULES
    broken = {path: docstring_markup.broken(doc(one)) for path, one in named.items()}
    assert {path: rules for path, rules in broken.items() if rules} == {}


def test_markup_that_sphinx_would_not_read_is_found() -> None:
    broken = docstring_markup.broken
    assert broken("Return it.\n\nArgs:\n    a, b: parts,\n        of it.\n    *c: `x, *y`.") == []
    assert broken("Return it:\n\n- a,\n  b\n- c.\n\nSource: one,\n    or two.") == []
    assert len(broken("Return it.\n\nArgs:\n    a, b,\n        c: parts.")) == 1
    assert len(broken("Return it.\n\nArgs:\n    a, *b: parts.")) == 1
    assert len(broken("Return it:\n- a.")) == 1
    assert len(broken("Return it.\n\nAnd more,\n    of it.")) == 1


def test_no_class_is_on_two_api_pages() -> None:
    shown: dict[int, str] = {}
    twice = []
    for page in sorted((ROOT / "docs" / "reference" / "api").glob("*.md")):
        directives = re.findall(r"automodule:: (\S+)\n((?:   :.*\n)+)", page.read_text())
        for module, options in directives:
            if module.startswith("hybridq.integrations."):
                continue  # their libraries may be missing, and nobody else names what is theirs
            left_out = re.search(r":exclude-members:(.*)", options)
            names = set(importlib.import_module(module).__all__)
            names -= set(re.findall(r"\w+", left_out.group(1))) if left_out else set()
            if module != "hybridq":  # those of the top are on its page alone
                names -= set(hybridq.__all__)
            for name in sorted(names):
                value = getattr(importlib.import_module(module), name)
                if not inspect.isclass(value) or value.__module__ == module:
                    continue  # where it is defined it may stand beside
                if shown.setdefault(id(value), module) != module:
                    twice.append(f"{name}: {shown[id(value)]} and {module}")
    assert twice == []


def test_every_public_module_has_an_api_page() -> None:
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "reference" / "api").glob("*.md"))
    shown = re.findall(r"automodule:: (\S+)", pages)
    assert len(set(shown)) == len(shown)
    for module in MODULES:
        # `hybridq.gemm` is a function too, so that package is shown by its modules.
        assert module in shown or any(name.startswith(f"{module}.") for name in shown), module


def test_a_name_that_the_pages_lack_is_found() -> None:
    paths = {one.path for one in api_names.names()}
    assert api_names.missing(paths) == []
    assert api_names.missing(paths - {"hybridq.quantize", "hybridq.quantizers.quantize"}) == [
        "hybridq.quantize"
    ]
    assert api_names.missing(paths - {"hybridq.recipes.get"}) == ["hybridq.recipes.get"]


def test_what_a_page_leaves_out_another_one_has() -> None:
    others = list(api_names.names())
    pages = sorted((ROOT / "docs" / "reference" / "api").glob("*.md"))
    single = {one for page in pages for one in re.findall(r"auto[a-z]+:: (\S+)", page.read_text())}
    for page in pages:
        for block in page.read_text().split(".. automodule:: ")[1:]:
            left_out = re.search(r":exclude-members: (.+)", block)
            module = block.split()[0]
            for name in left_out.group(1).split(", ") if left_out else ():
                value = getattr(importlib.import_module(module), name)
                paths = {one.path for one in others if one.value is value and one.name == name}
                paths = paths - {f"{module}.{name}"} | {f"{module}.{name}"} & single
                assert paths, f"{page.name}: {name} is nowhere else"
