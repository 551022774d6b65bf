"""The tutorials run, and show what they showed."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import pytest
import torch

from places import ROOT

FOLDER = ROOT / "docs" / "tutorials"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
#: Those whose cells take several seconds.
LONG = {"first-run", "hf-model", "experts", "fsdp2"}


def cells(path: Path, kind: str) -> list[dict]:
    found = json.loads(path.read_text())["cells"]
    return [cell for cell in found if cell["cell_type"] == kind]


def source(cell: dict) -> str:
    return "".join(cell["source"])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_tutorial_keeps_what_it_shows(path: Path) -> None:
    code = cells(path, "code")
    assert [cell["execution_count"] for cell in code] == [*range(1, len(code) + 1)]
    outputs = [output for cell in code for output in cell["outputs"]]
    assert not [one for one in outputs if one["output_type"] == "error"]
    assert not [one for one in outputs if one.get("name") == "stderr"]
    pictures = [one for one in outputs if "image/png" in json.dumps(one)]
    assert pictures, "a tutorial shows a picture"
    text = re.sub(r"base64,[^\"]*|\"image/png\": \"[^\"]*\"", "", json.dumps(outputs))
    assert not re.findall(r"/(?:home|root|tmp|usr|work|mnt|Users)/", text)
    assert path.stat().st_size < 400_000
    first = source(cells(path, "markdown")[0])
    assert 'pip install ".[tutorials' in first


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_links_lead_somewhere(path: Path) -> None:
    text = "\n".join(map(source, cells(path, "markdown")))
    assert [one for one in re.findall(r"\]\(([^)#]+)\)", text) if not (FOLDER / one).exists()] == []
    assert path.name in (FOLDER / "index.md").read_text()


def test_the_documented_table_has_recipes_that_there_are() -> None:
    import hybridq

    text = source(
        next(c for c in cells(FOLDER / "which-recipe.ipynb", "markdown") if "| you |" in source(c))
    )
    known = {*hybridq.recipes.names(), *hybridq.formats.names()}
    assert {*re.findall(r"`((?:fp8|mxfp8|nvfp4)[a-z0-9_]*)`", text)} <= known


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=[pytest.mark.more] if path.stem in LONG else [])
        for path in NOTEBOOKS
    ],
)
def test_the_cells_run(path: Path, monkeypatch: pytest.MonkeyPatch, registries: None) -> None:
    if "transformers" in source(cells(path, "markdown")[0]):
        pytest.importorskip("transformers", reason="needs hybridq[transformers]")
    monkeypatch.setattr(plt, "show", plt.close)
    space: dict = {"__name__": "tutorial"}
    state = torch.get_rng_state()
    monkeypatch.chdir(FOLDER)
    with matplotlib.rc_context({"backend": "Agg"}):
        for number, cell in enumerate(cells(path, "code")):
            exec(compile(source(cell), f"{path.stem}, cell {number}", "exec"), space)
    plt.close("all")
    torch.set_rng_state(state)


@pytest.mark.more
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_fresh_kernel_shows_the_same_text(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nbclient", reason="needs nbclient and ipykernel: hybridq[tutorials]")
    pytest.importorskip("ipykernel", reason="needs nbclient and ipykernel: hybridq[tutorials]")
    if "transformers" in source(cells(path, "markdown")[0]):
        pytest.importorskip("transformers", reason="needs hybridq[transformers]")
    import nbformat

    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.delitem(sys.modules, "run", raising=False)
    import run

    notebook = nbformat.read(path, as_version=4)
    run.run(notebook)
    assert run.problems(notebook) == []
    kept = cells(path, "code")
    for cell, known in zip((c for c in notebook.cells if c.cell_type == "code"), kept, strict=True):
        assert [o.output_type for o in cell.outputs] == [o["output_type"] for o in known["outputs"]]
