"""What became of each test, read from the lines that a run of pytest leaves as it goes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

__all__ = ["counts", "read", "write_junit"]

NO_END = "begun, and not ended: the step was killed, or its process died"


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue  # the last line of a process that was killed while it wrote


def read(file: Path) -> dict[str, dict[str, Any]]:
    """Return tests by name: `outcome`, `seconds`, `text` and `properties`.

    A test that began and did not end has failed; so has one of which any part failed.
    """
    found: dict[str, dict[str, Any]] = {}
    for line in _lines(file):
        name = line["test"]
        if line["outcome"] == "begun":
            known = {"outcome": "failed", "seconds": 0.0, "text": NO_END, "properties": {}}
            found.setdefault(name, known)
        elif name not in found or found[name]["text"] == NO_END or line["outcome"] == "failed":
            found[name] = {key: line[key] for key in ("outcome", "seconds", "text", "properties")}
    return found


def counts(tests: dict[str, dict[str, Any]], is_complete: bool) -> dict[str, Any]:
    """Return what a result says of its tests: counts, failures, and the kernels that have run.

    Args:
        tests: as `read` returns them.
        is_complete: whether every file of tests came to its end.
    """
    found: dict[str, Any] = {"passed": 0, "failed": 0, "skipped": 0, "failures": [], "kernels": {}}
    for name, test in tests.items():
        outcome = test["outcome"]
        found[outcome] += 1
        if outcome == "failed":
            found["failures"].append(name[:200])
        if outcome == "skipped" and "no time left" in test["text"]:
            is_complete = False
        if "kernel" in test["properties"]:
            found["kernels"][test["properties"]["kernel"]] = outcome
    return {**found, "is_complete": is_complete}


def write_junit(tests: dict[str, dict[str, Any]], file: Path) -> None:
    """Write tests as JUnit XML, whole or not at all."""
    suite = ElementTree.Element("testsuite", name="gpu", tests=str(len(tests)))
    for name, test in tests.items():
        path, _, rest = name.partition("::")
        where = path.removesuffix(".py").replace("/", ".")
        case = ElementTree.SubElement(
            suite, "testcase", classname=where, name=rest, time=str(test["seconds"])
        )
        if test["outcome"] != "passed":
            tag = "failure" if test["outcome"] == "failed" else "skipped"
            last = (test["text"].splitlines() or [""])[-1]
            ElementTree.SubElement(case, tag, message=last[:200]).text = test["text"]
    suite.set("failures", str(sum(test["outcome"] == "failed" for test in tests.values())))
    partial = file.with_name(f".{file.name}.partial")
    ElementTree.ElementTree(suite).write(partial, encoding="utf-8", xml_declaration=True)
    os.replace(partial, file)
