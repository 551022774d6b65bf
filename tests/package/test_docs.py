"""Every example in the docs and in docstrings runs; every number in tables is the code's own."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import pkgutil
import re
from types import ModuleType

import pytest
import torch

import hybridq
from places import ROOT

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = [
    pytest.param(match.group(1), id=f"{page.name}-{number}")
    for page in PAGES
    for number, match in enumerate(re.finditer(r"```python\n(.*?)```", page.read_text(), re.S))
]
#: Parts that need the extra packages of the command line, or a peer.
_EXTRA = (
    *("hybridq.cli", "hybridq.demo", "hybridq.__main__"),
    "hybridq.conformance.adapters.peer_",
)
#: Examples of more than two seconds.
_LONG = ("hybridq.report.advice.advising",)
MODULES = [
    name
    for _, name, _ in pkgutil.walk_packages(hybridq.__path__, "hybridq.")
    if not name.startswith(_EXTRA) and not name.endswith("._core")
]
#: Those whose docstrings may have examples: doctest looks for long through what has none.
EXAMPLES = [
    pytest.param(name, marks=pytest.mark.more) if name in _LONG else name
    for name in MODULES
    if ">>> " in importlib.util.find_spec(name).loader.get_source(name)
]


def needs_libraries_of(text: str) -> None:
    """Skip where a library is missing that a module of `hybridq.integrations` in `text` is for."""
    for module in re.findall(r"hybridq\.integrations\.(\w+)", text):
        library = module if module in hybridq.integrations.NEEDED else module.split("_")[0]
        if library in hybridq.integrations.NEEDED:
            pytest.importorskip(library)


@pytest.mark.parametrize("code", BLOCKS)
def test_examples_of_pages_run(
    code: str, capsys: pytest.CaptureFixture[str], registries: None
) -> None:
    needs_libraries_of(code)
    exec(compile(code, "example", "exec"), {})


def test_every_block_of_code_says_what_it_is() -> None:
    # What is not marked as Python would not run above. Texts and shell commands are no examples of
    # the library; `{...}` are Sphinx's directives.
    for page in PAGES:
        fences = re.findall(r"^ *(?:```|~~~)(.*)$", page.read_text(), re.M)
        assert len(fences) % 2 == 0, f"{page}: a block that does not end"
        kinds = {kind for kind in fences[::2] if not kind.startswith("{")}
        assert kinds <= {"", "python"}, page
        plain = re.findall(r"^```\n(.*?)^```", page.read_text(), re.M | re.S)
        assert not any("import hybridq" in block for block in plain), page


def test_every_link_of_a_page_leads_to_a_file() -> None:
    missing = []
    for page in PAGES:
        text = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(), flags=re.S)
        targets = re.findall(r"\]\(([^)\s#]+)[^)]*\)", text)
        files = [target for target in targets if "://" not in target]
        missing += [f"{page}: {name}" for name in files if not (page.parent / name).exists()]
    assert missing == []


@pytest.mark.parametrize("folder", ["docs", "docs/adr"])
def test_the_index_links_every_page(folder: str) -> None:
    index = ROOT / folder / "index.md"
    linked = {
        (index.parent / link).resolve() for link in re.findall(r"\]\((.*?)\)", index.read_text())
    }
    pages = {page for page in index.parent.rglob("*.md") if page != index}
    if folder == "docs":  # decisions have an index of their own; the API's pages are Sphinx's alone
        pages = {
            page
            for page in pages
            if page.name == "index.md" or page.parent.name not in ("adr", "api")
        }
    assert pages - linked == set()


def test_the_index_of_decisions_has_every_title() -> None:
    folder = ROOT / "docs" / "adr"
    index = (folder / "index.md").read_text()
    unused = {int(number) for number in re.findall(r"\d+", index.split("Numbers")[1].split(".")[0])}
    numbers = set()
    for page in folder.glob("0*.md"):
        number, title = re.match(r"# (\d+)\. (.*)\n", page.read_text()).groups()
        assert int(number) == int(page.name[:4])
        assert f"- [{number}. {title}]({page.name})\n" in index
        numbers.add(int(number))
    assert unused.isdisjoint(numbers)


def test_every_page_that_a_source_names_exists() -> None:
    missing = [
        f"{file.relative_to(ROOT)}: {named}"
        for folder in ("src", "csrc", "tests", "benchmarks")
        for file in (ROOT / folder).rglob("*.*")
        if file.suffix in (".py", ".cpp", ".h", ".cu", ".md")
        for named in re.findall(r"\bdocs/[\w/-]+\.md", file.read_text())
        if not (ROOT / named).is_file()
    ]
    assert missing == []


def test_every_page_is_in_a_table_of_contents() -> None:
    docs = ROOT / "docs"
    listed = {docs / "index.md"}
    for page in docs.rglob("*.md"):
        for tree in re.findall(r"```\{toctree\}(.*?)```", page.read_text(), re.S):
            for line in tree.split():
                listed |= set(page.parent.glob(f"{line}.md"))
            if ":glob:" in tree:
                listed |= set(page.parent.glob("0*.md"))
    pages = {page for page in docs.rglob("*.md") if "_build" not in page.parts}
    assert not pages - listed, sorted(pages - listed)


def imported_module(name: str) -> ModuleType:
    if name.startswith("hybridq.kernels.triton."):
        pytest.importorskip("triton")  # modules of kernels, imported on a GPU only
    needs_libraries_of(name)
    return importlib.import_module(name)


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_of_docstrings_run(name: str, registries: None) -> None:
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    failed, attempted = doctest.testmod(imported_module(name), optionflags=flags)
    assert failed == 0 and attempted > 0


def test_modules_without_examples_are_imported() -> None:
    for name in set(MODULES) - {getattr(one, "values", (one,))[0] for one in EXAMPLES}:
        try:
            imported_module(name)
        except pytest.skip.Exception:
            continue  # a library is missing, which the examples say


def test_pages_name_formats_and_recipes_that_exist() -> None:
    pages = (ROOT / "README.md", ROOT / "docs" / "reference" / "formats.md")
    text = "".join(page.read_text() for page in pages)
    known = {*hybridq.formats.names(), *hybridq.recipes.names()}
    for name in re.findall(r"`((?:fp8|mxfp|nvfp4)[a-z0-9_]*)`", text):
        assert name in known, name


def test_the_recipes_page_has_a_row_for_every_recipe() -> None:
    page = (ROOT / "docs" / "guides" / "recipes.md").read_text()
    heads = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    assert set(hybridq.recipes.names()) - set(re.findall(r"`(\w+)`", " ".join(heads))) == set()


def test_the_numerics_page_has_the_elements_largest_values() -> None:
    text = (ROOT / "docs" / "reference" / "numerics.md").read_text()
    for name in ("e4m3", "e5m2", "e2m1"):  # the others share a row
        largest = hybridq.formats.element(name).max
        row = next(line for line in text.splitlines() if line.startswith(f"| {name.upper()} "))
        assert f"| {largest:g} |" in row
    signs = re.search(r"`((?:[+-] ){15}[+-])`", text).group(1).split()
    mask = sum(1 << i for i, sign in enumerate(signs) if sign == "-")
    assert mask == hybridq.DEFAULT_SIGNS


def test_the_architecture_page_names_every_operator() -> None:
    page = (ROOT / "docs" / "design" / "architecture.md").read_text()
    names = {name.split(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    own = {name.removeprefix("hybridq::") for name in names if name.startswith("hybridq::")}
    assert own - set(re.findall(r"`(\w+)`", page)) == set()


def test_the_page_of_backends_has_their_priorities() -> None:
    page = (ROOT / "docs" / "guides" / "adding-a-backend.md").read_text()
    lines = page[page.index("| cuda | cpu |") :].splitlines()
    names, numbers = ([cell.strip() for cell in lines[at].split("|")[1:-1]] for at in (0, 2))
    made = hybridq.kernels.backends()
    known = {one.name: str(one.priority) for one in made if one.name != "reference"}
    assert dict(zip(names, numbers, strict=True)) == {**known, "reference": "last"}


def test_every_documented_variable_is_read_in_one_place() -> None:
    read = set()
    for file in (ROOT / "src").rglob("*.py"):
        named = r"(?:environ(?:\.get\(|\[)|\b_is_on\()\s*[\"'](\w+)"
        names = set(re.findall(named, file.read_text()))
        if names:
            assert file.name == "settings.py", f"{file} reads {names}"
        read |= names
    read = {name for name in read if name != "RANK"}  # torchrun's
    documented = set(re.findall(r"`(HYBRIDQ_\w+)`", hybridq.settings.__doc__))
    assert read == documented
