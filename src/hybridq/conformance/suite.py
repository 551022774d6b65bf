"""The suite: vectors from folders, results in a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .._text import Table
from .adapter import Adapter
from .archive import VectorError, read_arrays
from .case import Case
from .compare import STATUSES, Result, run_case
from .files import FORMAT, cases_of, read_meta
from .peers import peer_cases

__all__ = ["VECTORS", "Report", "check", "load_vectors"]

#: The vectors that come with hybridq.
VECTORS = Path(__file__).parent / "vectors"
_MOST_LINES = 3


def load_vectors(folder: Path | str = VECTORS, only: str = "") -> dict[str, list[Case]]:
    """Return file name to cases of a folder of vectors, ours or goldens of peers.

    Goldens are many small files: they come together by the first word of their names.

    Args:
        folder: with `.npz` files.
        only: keep cases whose id contains this.

    Raises:
        VectorError: there are none, or a file is no vector file.

    Example:
        >>> from hybridq import conformance
        >>> "mxfp8" in conformance.load_vectors()
        True
    """
    folder = Path(folder)
    paths = sorted(folder.glob("*.npz"))
    if not paths:
        raise VectorError(f"load_vectors: {folder} must hold .npz files, got none")
    found: dict[str, list[Case]] = {}
    for path in paths:
        name, cases = _read(path)
        found.setdefault(name, []).extend(cases)
    kept = {name: [case for case in cases if only in case.id] for name, cases in found.items()}
    kept = {name: cases for name, cases in kept.items() if cases}
    if not kept:
        raise VectorError(f"load_vectors: no case in {folder} has {only!r} in its id")
    return kept


def _read(path: Path) -> tuple[str, list[Case]]:
    arrays = read_arrays(path)
    meta = read_meta(arrays, path)
    if meta.get("format") == FORMAT:
        return path.stem, cases_of(path, meta, arrays)
    if "options" not in meta:
        raise VectorError(f"load_vectors: {path} is neither ours nor a peer's golden")
    own = {name: array for name, array in arrays.items() if name != "meta"}
    try:
        return path.stem.partition("_")[0], peer_cases(path, meta, own)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise VectorError(f"load_vectors: the golden {path} is damaged ({error!r})") from error


@dataclass(frozen=True)
class Report:
    """The outcome of a run; `str()` is a table.

    Args:
        adapter: name of the implementation.
        results: (file, result) pairs.
    """

    adapter: str
    results: tuple[tuple[str, Result], ...]

    @property
    def counts(self) -> dict[str, int]:
        """How many cases have each status."""
        found = Counter(result.status for _, result in self.results)
        return {status: found[status] for status in STATUSES}

    @property
    def is_conformant(self) -> bool:
        """Whether every supported case passed, and at least one is supported."""
        counts = self.counts
        return counts["pass"] > 0 and counts["differs"] == counts["failed"] == 0

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain dicts, lists and strings, for JSON."""
        return {
            "adapter": self.adapter,
            "is_conformant": self.is_conformant,
            "counts": self.counts,
            "results": [{"file": file, **asdict(result)} for file, result in self.results],
        }

    def tables(self, verbose: bool = False) -> tuple[Table, ...]:
        """Return the summary, and what differs.

        Args:
            verbose: list every case that differs, and every reason; else the first of each file.
        """
        groups: dict[tuple[str, str], list[Result]] = {}
        for file, result in self.results:
            groups.setdefault((file, result.kind), []).append(result)
        asked = {
            key: results
            for key, results in groups.items()
            if any(result.status != STATUSES[-1] for result in results)
        }
        rows = tuple(_summary(file, kind, results) for (file, kind), results in asked.items())
        named = {file for file, _ in asked}
        skipped = ", ".join(dict.fromkeys(file for file, _ in groups if file not in named))
        counts = ", ".join(f"{count} {status}" for status, count in self.counts.items() if count)
        summary = Table(
            f"{self.adapter}: {counts}",
            ("vectors", "step", *STATUSES, "what differs"),
            rows,
            (f"nothing supported of {skipped}",) if skipped else (),
        )
        details = tuple(self._details(verbose))
        reasons = tuple(self._reasons(verbose))
        tables = [summary]
        if details:
            tables.append(Table("What differs", (), details))
        if reasons:
            tables.append(Table("Not supported", (), reasons))
        return tuple(tables)

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.tables()))

    def _details(self, verbose: bool) -> Iterable[tuple[str, str]]:
        shown: Counter[tuple[str, str]] = Counter()
        for file, result in self.results:
            lines = [str(one) for one in result.differences]
            if result.status == "failed":
                lines = [result.reason]
            if not lines:
                continue
            shown[file, result.kind] += 1
            if verbose or shown[file, result.kind] <= _MOST_LINES:
                for line in lines:
                    yield result.id, line
        hidden = sum(max(0, count - _MOST_LINES) for count in shown.values())
        if hidden and not verbose:
            yield f"{hidden} more cases", "--verbose lists them"

    def _reasons(self, verbose: bool) -> Iterable[tuple[str, str]]:
        found = Counter(
            result.reason.splitlines()[0]
            for _, result in self.results
            if result.status == "not supported"
        )
        for reason, count in found.most_common(None if verbose else 4 * _MOST_LINES):
            yield str(count), reason


def _summary(file: str, kind: str, results: Sequence[Result]) -> tuple[str, ...]:
    found = Counter(result.status for result in results)
    # Of the cases that differ: how many entries of how many.
    wrong: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for result in results:
        for one in result.differences:
            wrong[one.array] += one.count
            total[one.array] += one.total
    what = ", ".join(f"{name} {wrong[name]}/{total[name]}" for name in total)
    return (file, kind, *(str(found[status] or "") for status in STATUSES), what)


def check(adapter: Adapter, vectors: dict[str, list[Case]]) -> Report:
    """Return the outcome of every case of `vectors` for `adapter`.

    Example:
        >>> from hybridq import conformance
        >>> vectors = conformance.load_vectors(only="mxfp8/odd")
        >>> conformance.check(conformance.load_adapter("hybridq"), vectors).is_conformant
        True
    """
    results = [(file, run_case(adapter, case)) for file, cases in vectors.items() for case in cases]
    return Report(adapter.name, tuple(results))
