"""Write docs/reference/models.md: every family, and what holds of it.

    PYTHONPATH=tests python -m models.table [NAME,NAME]

With names, only these families are run, and their rows are printed and not kept.
"""

from __future__ import annotations

import platform
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch

from hybridq.report.machine import read_core, read_machine

from .columns import COLUMNS, NotThere, flops
from .families import FAMILIES, Family

_PAGE = Path(__file__).parents[2] / "docs" / "reference" / "models.md"
_HEADS = ("family", "kind", "quantized", "of these", *COLUMNS)
_INTRODUCTION = """# Models

Small random models of Hugging Face's families, converted by `hybridq.convert` and run. Made by
`make models`; a part of it is in the tests. Linear operations are products with a parameter.

| column | what holds |
| --- | --- |
| quantized | share of a forward's linear operations that run on quantized operands under `mxfp8` |
| of these | the same, but of all that are no head and no router |
"""


_LEFT = """Left in high precision, heads and routers apart, with shares of the linear operations.
Why: Mamba's mixers multiply by `dt_proj.weight` themselves, past its module, in a forward that
is mostly a recurrence; Inkling's relative logits come of a class with few outputs
for each head, less than a block; so have Doge's `dt_proj` and Qwen3.5's gates (`least_width=` takes
those). T5's `wo` and the rest of DeepSeek-V4 stay in FP32 by their model's own word,
`_keep_in_fp32_modules`. `hybridq.summary(model, input=...)` says so of each module."""


def row(family: Family) -> list[str]:
    """Return one family's row."""
    counted = flops(family)
    found = [f"{100 * counted.share_of_all:.0f}%", f"{100 * counted.share:.0f}%"]
    for name, column in COLUMNS.items():
        with tempfile.TemporaryDirectory() as folder:
            try:
                column(family, Path(folder))
                found.append("yes")
            except NotThere as reason:
                found.append(f"- ({reason})")
            except Exception as error:
                print(f"{family.name}, {name}: {type(error).__name__}: {error}", file=sys.stderr)
                found.append("**no**")
    return [family.name, family.kind, *found]


def rest(family: Family) -> str | None:
    """Return a line on which modules are left in high precision, or None where all are reached."""
    counted = flops(family)
    if counted.share > 0.999:
        return None
    found: Counter[str] = Counter()
    for where, amount in counted.plain_in.items():
        name, _, kind = where.partition(" ")
        found[f"`{name.rpartition('.')[2]}` {kind}"] += amount
    total = counted.counts["quantized"] + counted.counts["plain"]
    parts = [f"{what} {100 * amount / total:.1f}%" for what, amount in found.most_common(4)]
    return f"- {family.name}: {', '.join(parts)}"


def page(rows: Iterable[list[str]], rests: Iterable[str | None] = ()) -> str:
    """Return the page of these rows, and of what is left of each family."""
    import transformers

    meaning = [f"| {name} | {(column.__doc__ or '').strip()} |" for name, column in COLUMNS.items()]
    lines = ["| " + " | ".join(_HEADS) + " |", "| " + " | ".join("---" for _ in _HEADS) + " |"]
    lines += ["| " + " | ".join(one) + " |" for one in rows]
    versions = (
        f"transformers {transformers.__version__}, torch {torch.__version__}, Python "
        f"{platform.python_version()}, {read_machine().cpu}, kernels {read_core().variant}"
    )
    left = [one for one in rests if one is not None]
    lines += ["", _LEFT, "", *left] if left else []
    return "\n".join(
        [_INTRODUCTION + "\n".join(meaning), "", *lines, "", f"Run with {versions}.", ""]
    )


def main(arguments: list[str]) -> int:
    """Run the families, print or write the page; return the number of cells that say no."""
    names = [name.strip() for name in ",".join(arguments).split(",") if name.strip()]
    unknown = set(names) - {one.name for one in FAMILIES}
    if unknown:
        known = ", ".join(one.name for one in FAMILIES)
        sys.exit(f"models: must be of {known}, got {', '.join(sorted(unknown))}")
    warnings.simplefilter("ignore")
    chosen = [one for one in FAMILIES if not names or one.name in names]
    rows = []
    for family in chosen:
        rows.append(row(family))
        print(" | ".join(rows[-1]), flush=True)
    if not names:
        _PAGE.write_text(page(rows, map(rest, chosen)))
        print(f"written: {_PAGE}")
    return sum(cell == "**no**" for one in rows for cell in one)


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
