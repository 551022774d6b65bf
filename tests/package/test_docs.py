"""Every example in the docs and in docstrings runs; every number in tables is the code's own."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

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
MODULES = [
    name
    for _, name, _ in pkgutil.walk_packages(hybridq.__path__, "hybridq.")
    if not name.startswith(_EXTRA) and not name.endswith("._core")
]


@pytest.mark.filterwarnings("ignore:.*slow PyTorch reference")
@pytest.mark.parametrize("code", BLOCKS)
def test_examples_of_pages_run(
    code: str, capsys: pytest.CaptureFixture[str], registries: None
) -> None:
    exec(compile(code, "example", "exec"), {})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_of_code_says_what_it_is(page: Path) -> None:
    # What is not marked as Python would not run above. Texts and shell commands are no examples of
    # the library; `{...}` are Sphinx's directives.
    fences = re.findall(r"^ *(?:```|~~~)(.*)$", page.read_text(), re.M)
    assert len(fences) % 2 == 0, "a block that does not end"
    kinds = {kind for kind in fences[::2] if not kind.startswith("{")}
    assert kinds <= {"", "python"}
    plain = re.findall(r"^```\n(.*?)^```", page.read_text(), re.M | re.S)
    assert not any("import hybridq" in block for block in plain)


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_docstrings_run(name: str) -> None:
    if name.startswith("hybridq.kernels.triton."):
        pytest.importorskip("triton")  # modules of kernels, imported on a GPU only
    module = importlib.import_module(name)
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    failed, _ = doctest.testmod(module, optionflags=flags)
    assert failed == 0


def test_the_readme_names_what_exists() -> None:
    text = (ROOT / "README.md").read_text()
    known = {*hybridq.formats.names(), *hybridq.recipes.names()}
    for name in re.findall(r"`((?:fp8|mxfp|nvfp4)[a-z0-9_]*)`", text):
        assert name in known, name


def test_the_numerics_page_has_the_elements_maxima() -> None:
    text = (ROOT / "docs" / "numerics.md").read_text()
    for name in ("e4m3", "e5m2", "e2m1"):  # the others share a row
        largest = hybridq.formats.element(name).max
        row = next(line for line in text.splitlines() if line.startswith(f"| {name.upper()} "))
        assert f"| {largest:g} |" in row
    signs = re.search(r"`((?:[+-] ){15}[+-])`", text).group(1).split()
    mask = sum(1 << i for i, sign in enumerate(signs) if sign == "-")
    assert mask == hybridq.DEFAULT_SIGNS


def test_every_documented_variable_is_read_in_one_place() -> None:
    read = set()
    for file in (ROOT / "src").rglob("*.py"):
        names = set(re.findall(r"environ(?:\.get\(|\[)\s*[\"'](\w+)", file.read_text()))
        if names:
            assert file.name == "settings.py", f"{file} reads {names}"
        read |= names
    documented = set(re.findall(r"`(HYBRIDQ_\w+)`", hybridq.settings.__doc__))
    assert read == documented
