"""Which versions of other libraries are taken, and what is said of the others."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import pytest

from hybridq import integrations
from hybridq.integrations import NEEDED, require
from places import ROOT

EXTRAS = (ROOT / "pyproject.toml").read_text()


def pretend(monkeypatch, found: str | None) -> None:
    def version(library: str) -> str:
        if found is None:
            raise importlib.metadata.PackageNotFoundError(library)
        return found

    monkeypatch.setattr(integrations, "version", version)


@pytest.mark.parametrize("found", ["5.23.0", "5.23.1", "5.30.0.dev0", "5.100"])
def test_versions_in_range_are_taken(found, monkeypatch) -> None:
    pytest.importorskip("packaging")
    pretend(monkeypatch, found)
    require("transformers")


@pytest.mark.parametrize("found", ["4.57.1", "5.9.0", "6.0.0"])
def test_others_are_named_with_what_is_needed_and_what_installs_it(found, monkeypatch) -> None:
    pytest.importorskip("packaging")
    pretend(monkeypatch, found)
    text = (
        r"^hybridq\.integrations\.transformers: needs transformers >=5\.23,<6, got version "
        rf"{found}: pip install 'hybridq\[transformers\]'$"
    )
    with pytest.raises(ImportError, match=text):
        require("transformers")


@pytest.mark.parametrize("library", NEEDED)
def test_a_missing_library_is_named_with_what_installs_it(library, monkeypatch) -> None:
    pretend(monkeypatch, None)
    with pytest.raises(ImportError, match=rf"missing: pip install 'hybridq\[{library}\]'$"):
        require(library)


@pytest.mark.parametrize("library", NEEDED)
def test_the_extra_asks_for_the_same_versions(library) -> None:
    assert f'\n{library} = ["{library}{NEEDED[library]}"' in EXTRAS


def test_no_library_is_imported_before_its_door_is() -> None:
    code = (
        "import sys, hybridq.integrations; "
        "hybridq.integrations.require; "
        f"assert not set(sys.modules) & {set(NEEDED)!r}"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)
