"""Runs the tutorials, each in a fresh kernel, and keeps what their cells show.

`make tutorials` does it for all; `python docs/tutorials/run.py first-run.ipynb --check` runs one
and writes nothing.
"""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent
#: Seconds that a cell may take.
MOST_SECONDS = 300
#: What belongs to the machine and not to the tutorial: absolute paths, times of day, addresses.
_MACHINE = re.compile(
    r"(?<![\w.:/])/(?:home|root|tmp|usr|work|mnt|var|Users)/[\w.-]|\bat 0x[0-9a-f]+"
)


def run(notebook: Any) -> None:
    """Run all cells of a notebook in a fresh kernel, and put their outputs into it.

    Args:
        notebook: as nbformat reads it.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised; the message has it.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # small tensors
    where = {"metadata": {"path": FOLDER}}
    client = NotebookClient(notebook, timeout=MOST_SECONDS, resources=where, coalesce_streams=True)
    client.execute()
    notebook.metadata.pop("widgets", None)
    notebook.metadata["language_info"] = {"name": "python"}
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if not _is_log(output)]


def _is_log(output: Any) -> bool:
    """Return whether an output is what another library logs: of what is installed beside it."""
    return output.get("name") == "stderr" and "hybridq" not in output.text


def problems(notebook: Any) -> list[str]:
    """Return what a kept notebook must not have, a line each.

    Args:
        notebook: as nbformat reads it.
    """
    found = []
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type != "code":
            continue
        if cell.execution_count is None:
            found.append(f"cell {number} was not run")
        for output in cell.outputs:
            if output.output_type == "error" or output.get("name") == "stderr":
                found.append(f"cell {number} shows an error or a warning: {_text(output)[:200]}")
            elif machine := _MACHINE.search(_text(output)):
                found.append(f"cell {number} shows a path of one machine: {machine.group()}")
    return found


def _text(output: Any) -> str:
    """Return the text of an output, pictures apart."""
    kinds = output.get("data", {})
    parts = [output.get("text", ""), *output.get("traceback", ())]
    parts += [text for kind, text in kinds.items() if kind.startswith("text/")]
    return re.sub(r"data:image/[^\"]*", "", "\n".join(map(str, parts)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="names of notebooks; all by default")
    parser.add_argument("--check", action="store_true", help="run, and write nothing")
    options = parser.parse_args()
    chosen = [FOLDER / name for name in options.names] or sorted(FOLDER.glob("*.ipynb"))
    for path in chosen:
        notebook = nbformat.read(path, as_version=4)
        run(notebook)
        wrong = problems(notebook)
        if wrong:
            raise SystemExit(f"{path.name}: " + "\n".join(wrong))
        if not options.check:
            nbformat.write(notebook, path)
        print(f"{path.name}: {len(notebook.cells)} cells")


if __name__ == "__main__":
    main()
