"""Fill the tables of docs/reference/gpu-status.md from the results of `make gpu`.

    python benchmarks/gpu_status.py benchmarks/results/gpu-<machine>-<date>.json
    python benchmarks/gpu_status.py          # only add and drop rows: the kernels that exist

A row keeps what an earlier result said of it, until a later one says more.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from gpu_bench import result as results
from gpu_bench.kernels import ROOT, native_kernels, triton_kernels

from hybridq.kernels.choice import registry as registry

PAGE = ROOT / "docs" / "reference" / "gpu-status.md"
NEVER = "never run on a chip"
#: A kernel counts where it takes most of a case's time.
_MOST = 0.5

Row = tuple[str, ...]


def gemm_backends() -> dict[str, str]:
    """Return the backends that multiply: name to the first line of their module."""
    found = {}
    for backend in registry.backends():
        if "gemm" in backend.ops:
            module = sys.modules.get(backend.ops["gemm"].__module__)
            doc = (getattr(module, "__doc__", "") or "").strip().splitlines()
            found[backend.name] = doc[0].rstrip(".") if doc else ""
    return found


def _span(values: list[float]) -> str:
    if not values:
        return ""
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    cases = f"{len(values)} case{'s' * (len(values) > 1)}"
    return f"{low} ({cases})" if low == high else f"{low} to {high} ({cases})"


def _where(result: dict[str, Any]) -> str:
    return f"{result['machine']['name']}, {result['date'][:10]}"


def _failures(result: dict[str, Any], file: str) -> int | None:
    """Return how many tests of a file failed, None if no test ran."""
    tests = result["tests"]
    if tests is None or not tests["passed"] + tests["failed"]:
        return None
    return sum(file in name for name in tests["failures"])


#: Of kernels that multiply: the section and the backend of the cases that launch them.
_MULTIPLY = {
    "dense_kernel": ("small_m", "triton"),
    "grouped_kernel": ("grouped", "triton"),
    "BlockProduct": ("grouped", "fold"),
}


def kernel_row(name: str, source: str, result: dict[str, Any]) -> Row | None:
    """Return the row of a kernel, or None if the result says nothing of it."""
    if name in _MULTIPLY:
        section, backend = _MULTIPLY[name]
        if not _ratios(result, section, backend):
            return None
        return (f"`{name}`", f"`{source}`", _where(result), "a product: the next table", "")
    outcome = ((result["tests"] or {}).get("kernels") or {}).get(name, "skipped")
    cases = [case for case in result["cases"] if case["kernels"].get(name, 0.0) > 0.0]
    if outcome == "skipped" and not cases:
        return None
    ratios = [
        case["ratio"]
        for case in cases
        if case["kernels"][name] > _MOST
        and case["baseline"] == "copy"
        and case["ratio"] is not None
    ]
    failed = _failures(result, "test_gpu_kernels")
    bits = {"passed": "yes", "failed": "no", "skipped": "not tested"}[outcome]
    if bits == "yes" and failed:
        bits = f"its own case; {failed} failures in all"
    return (f"`{name}`", f"`{source}`", _where(result), bits, _span(ratios))


def _ratios(result: dict[str, Any], section: str, backend: str) -> list[float]:
    """Return the ratios of a backend's cases to those of BF16."""
    return [
        case["ratio"]
        for case in result["cases"]
        if (case["section"], case["backend"]) == (section, backend) and case["ratio"] is not None
    ]


#: Sections of products, and what the table calls those that are not the usual ones.
_SECTIONS = {"gemm": "", "small_m": "small M: ", "grouped": "groups: "}


def product_row(name: str, what: str, result: dict[str, Any]) -> Row | None:
    """Return the row of a backend that multiplies, or None if the result says nothing of it."""
    found = {text: _ratios(result, section, name) for section, text in _SECTIONS.items()}
    ratios = "; ".join(f"{text}{_span(of)}" for text, of in found.items() if of)
    if not ratios:
        return None
    failed = _failures(result, "test_gpu_gemm")
    bound = "not tested" if failed is None else "yes" if failed == 0 else f"{failed} failures"
    return (f"`{name}`", what, _where(result), bound, ratios)


def _table(
    names: dict[str, str],
    head: Row,
    blank: Callable[[str, str], Row],
    fill: Callable[[str, str, dict[str, Any]], Row | None],
    known: dict[str, Row],
    all_results: Iterable[dict[str, Any]],
) -> list[str]:
    rows = []
    for name, what in names.items():
        row = blank(name, what)
        before = known.get(row[0])
        if before is not None and len(before) == len(row):
            row = (*row[:2], *before[2:])
        for result in all_results:
            row = fill(name, what, result) or row
        rows.append(row)
    lines = [head, ("---",) * len(head), *rows]
    return ["| " + " | ".join(cells) + " |" for cells in lines]


def _known(text: str) -> dict[str, Row]:
    found = {}
    for line in text.splitlines():
        cells = tuple(cell.strip() for cell in line.strip().strip("|").split("|"))
        if line.startswith("| `") and len(cells) == 5:
            found[cells[0]] = cells
    return found


def _put(text: str, name: str, lines: list[str]) -> str:
    pattern = re.compile(rf"(<!-- {name}: begin -->\n).*?(<!-- {name}: end -->)", re.S)
    if not pattern.search(text):
        raise ValueError(f"gpu_status: the page must have the markers of {name!r}, got none")
    return pattern.sub(lambda m: m.group(1) + "\n".join([*lines, ""]) + m.group(2), text)


def fill(text: str, all_results: list[dict[str, Any]]) -> str:
    """Return the page with its tables as the code and the results have them."""
    known = _known(text)

    def blank(name: str, what: str) -> Row:
        return (f"`{name}`", f"`{what}`", NEVER, "", "")

    kernels = native_kernels() | triton_kernels()
    head = ("kernel", "source", "ran on", "the CPU's bits", "fraction of a copy")
    text = _put(text, "kernels", _table(kernels, head, blank, kernel_row, known, all_results))
    head = ("backend", "product", "ran on", "within its bound", "ratio to BF16 cuBLAS")
    products = _table(
        gemm_backends(),
        head,
        lambda name, what: (f"`{name}`", what, NEVER, "", ""),
        product_row,
        known,
        all_results,
    )
    return _put(text, "products", products)


def main(arguments: list[str] | None = None) -> int:
    """Rewrite the page; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, nargs="*")
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args(arguments)
    all_results = []
    for file in options.results:
        result = json.loads(file.read_text())
        wrong = results.check(result)
        if wrong or result["machine"].get("device") != "cuda":
            print(f"gpu_status: {file} must be a result of a GPU, got {wrong or 'a dry run'}")
            return 1
        all_results.append(result)
    before = options.page.read_text()
    after = fill(before, all_results)
    options.page.write_text(after)
    print(f"{options.page}: {'changed' if after != before else 'as it was'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
