"""Sphinx: the pages of docs/ and the API from docstrings. `make docs` builds them, -W."""

from __future__ import annotations

import inspect
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer

import hybridq

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS))
import error_index  # noqa: E402

project = "hybridq"
author = "the hybridq authors"
copyright = "the hybridq authors; Apache-2.0"
release = version = hybridq.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
source_suffix = {".md": "markdown"}
html_theme = "furo"
html_title = f"hybridq {release}"
myst_heading_anchors = 3

# In docstrings `name` is a cross reference where there is such a name, and code elsewhere.
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_custom_sections = [("Source", "returns_style")]

MODULE = re.compile(r"^\.\. automodule:: (\S+)\n(?:   :.*\n)+", re.M)
PAGE = re.compile(r"`*\bdocs/([\w/-]+)\.md`*")
README_PAGE = re.compile(r"\]\(docs/")
README_FILE = re.compile(r"\[(.*?)\]\([A-Z]+\.md\)")


def complete_page(app: Sphinx, docname: str, source: list[str]) -> None:
    """Add what is not written in a page: the README, constants of the API, messages."""
    if docname == "index":
        readme = README_PAGE.sub("](/", (DOCS.parent / "README.md").read_text())
        # The title of the page itself becomes that of a section.
        source[0] = README_FILE.sub(r"\1", readme) + "\n#" + source[0]
    if docname == "reference/errors":
        source[0] += error_index.page()
    source[0] = MODULE.sub(lambda found: found.group(0) + constants(found.group(1)), source[0])


def constants(module: str) -> str:
    """Return directives for the constants that a module makes public.

    Autodoc itself shows only those whose comment stands in the same file.
    """
    owner = import_module(module)
    names = [name for name in owner.__all__ if is_constant(getattr(owner, name))]
    new = [name for name in names if module == "hybridq" or name not in hybridq.__all__]
    return "".join(f"\n.. autodata:: {module}.{name}\n   :no-value:\n" for name in new)


def is_constant(value: object) -> bool:
    """Return whether a public name is neither a class, nor a function, nor a module of pages."""
    is_page = inspect.ismodule(value) and hasattr(value, "__all__")
    return not (inspect.isclass(value) or inspect.isroutine(value) or is_page)


def link_docstring(
    app: Sphinx, what: str, name: str, value: object, options: Any, lines: list[str]
) -> None:
    """Link the pages that a docstring names, and give a constant the comment above it as text."""
    if what == "data":
        lines[:] = constant_text(name, value) or lines
    if what in ("data", "property"):
        # An empty comment: napoleon takes what stands before a colon of the first line for a type.
        lines[:0] = ["..", ""]
    lines[:] = [PAGE.sub(r":doc:`docs/\1.md </\1>`", line) for line in lines]


def constant_text(name: str, value: object) -> list[str]:
    """Return what is written about a constant: its entry in the registry, or its `#:` comment.

    A package re-exports constants of its modules, which is where the comment stands.
    """
    for entry in hybridq.formats.entries():
        if entry.format is value:
            return [f"``{entry.name}``: {entry.summary}.", "", f"Source: {entry.source}."]
    package, _, attribute = name.rpartition(".")
    for module in [one for one in sys.modules if one == package or one.startswith(f"{package}.")]:
        if getattr(sys.modules[module], "__file__", "").endswith(".py"):
            comments = ModuleAnalyzer.for_module(module).find_attr_docs()
            if ("", attribute) in comments:
                return comments["", attribute]
    return []


def skip_member(
    app: Sphinx, what: str, name: str, value: object, skip: bool, options: Any
) -> bool | None:
    """Show what hybridq itself names on its page only, and constants by `constants` only."""
    if what == "module":
        is_elsewhere = app.env.docname != "reference/api/hybridq"
        is_top = name in hybridq.__all__ and getattr(hybridq, name) is value
        is_shown = is_elsewhere and is_top
        return True if is_shown or is_constant(value) or inspect.ismodule(value) else None
    return None


def setup(app: Sphinx) -> None:
    """Connect the functions above."""
    app.connect("source-read", complete_page)
    app.connect("autodoc-process-docstring", link_docstring, priority=100)
    app.connect("autodoc-skip-member", skip_member)


# An attribute's name in a docstring ("row") may be that of attributes of several classes; which one
# Sphinx would link to does not matter.
suppress_warnings = ["ref.python"]
