"""The page, the figures and the record of the study: `python benchmarks/study.py --write`."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from study_cells import AXES, BASELINE, CELLS, FORMATS, SIZES, TABLE

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "benchmarks" / "results" / "study.json"
PAGE = ROOT / "docs" / "reference" / "study.md"
IMAGES = ROOT / "docs" / "images"

#: 97.5% quantiles of Student's t, by degrees of freedom from 1.
_T: Final = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
#: A difference within this share of the loss is called none.
MARGIN: Final = 0.01
#: Seeds that a verdict takes.
SEEDS: Final = 5
#: How many seeds a recipe has in a figure.
LEAST: Final = 3


class Difference(NamedTuple):
    """How a cell's last loss differs from another's, in shares of that one, paired by seed.

    Attributes:
        mean: over the seeds.
        half: of the 95% confidence interval; inf for one seed.
        seeds: how many.
    """

    mean: float
    half: float
    seeds: int

    def __str__(self) -> str:
        if self.seeds == 1:
            return f"{100 * self.mean:+.2f}% (1 seed)"
        return f"{100 * self.mean:+.2f}% ± {100 * self.half:.2f}"

    @property
    def is_zero(self) -> bool:
        """Whether the interval has zero in it."""
        return abs(self.mean) <= self.half


class Claim(NamedTuple):
    """What a paper says, as a comparison of two cells.

    Attributes:
        text: in our words.
        source: of it.
        a, b: cells.
        is_equal: a trains as b does; else a's loss is lower.
    """

    text: str
    source: str
    a: str
    b: str
    is_equal: bool


CLAIMS: Final = (
    Claim("MXFP8 (E4M3) trains as BF16", "arXiv:2506.08027", "mxfp8", BASELINE, True),
    Claim("FP8 trains as BF16", "arXiv:2209.05433", "fp8_current", BASELINE, True),
    Claim("blockwise FP8 trains as BF16", "arXiv:2412.19437", "fp8_block", BASELINE, True),
    Claim("NVFP4 trains within 1% of BF16", "arXiv:2509.25149", "nvfp4", BASELINE, True),
    *(
        Claim(f"NVFP4: {what} lowers the loss", source, a, b, False)
        for what, source, a, b in (
            (
                "stochastic rounding of gradients",
                *("arXiv:2509.25149", "nvfp4", "nvfp4, nearest rounding"),
            ),
            ("the Hadamard transform", "arXiv:2509.25149", "nvfp4", "nvfp4, no transform"),
            ("four-over-six of weights", "arXiv:2512.02010", "nvfp4, 4over6 weights", "nvfp4"),
            (
                "a forward in BF16 in the last tenth",
                *("arXiv:2509.25149", "nvfp4, then bf16 forward", "nvfp4"),
            ),
        )
    ),
    Claim(
        "columnwise planes of the decoded forward lower the loss",
        *("ours, ADR 52", "decoded", "original", False),
    ),
)


#: Last losses of one cell, by seed and machine.
Losses = Mapping[tuple[int, str], float]


def machine(run: Mapping[str, Any]) -> str:
    """Return what a run ran on: processor and the instructions that torch took there."""
    return f"{run['machine']} ({run['cpu_capability']})"


def losses(runs: Sequence[dict[str, Any]], size: str) -> dict[str, dict[tuple[int, str], float]]:
    """Return the last losses of a size, by cell, seed and machine; one that diverged has NaN."""
    found: dict[str, dict[tuple[int, str], float]] = {}
    for run in runs:
        if run["size"] == size:
            loss = run["validation_loss"]
            of = found.setdefault(run["cell"], {})
            of[run["seed"], machine(run)] = math.nan if loss is None else loss
    return found


def ratios(a: Losses, b: Losses) -> dict[int, float]:
    """Return by seed how the losses a differ from b, in shares of b, where both have run.

    A seed that ran on two machines counts once, as their mean: it is the same start and the same
    batches.
    """
    by_seed: dict[int, list[float]] = {}
    for key in sorted(a.keys() & b.keys()):
        by_seed.setdefault(key[0], []).append(a[key] / b[key] - 1.0)
    return {seed: statistics.fmean(found) for seed, found in by_seed.items()}


def _interval(found: Sequence[float]) -> Difference | None:
    count = len(found)
    if count < 2:
        return Difference(found[0], math.inf, 1) if found else None
    t = _T[count - 2] if count - 2 < len(_T) else 2.228
    half = t * statistics.stdev(found) / math.sqrt(count)
    return Difference(statistics.fmean(found), half, count)


def difference(a: Losses, b: Losses) -> Difference | None:
    """Return how the losses a differ from b, of what both have; None: there is nothing."""
    return _interval([*ratios(a, b).values()])


def of_slot(found: Mapping[str, Losses], slot: int, name: str) -> Difference | None:
    """Return what a format in one slot costs, over all choices of the other two.

    Args:
        found: losses by cell.
        slot: 0 fprop, 1 dgrad, 2 wgrad.
        name: one of FORMATS.

    Returns:
        The mean of the 16 products that have it there, less the mean of the 16 that have BF16
        there, both relative to BF16's loss of the seed; of seeds that have run all of them.
    """
    base = found[BASELINE]

    def mean(of: str) -> dict[int, float]:
        cells = [
            ratios(base if cell == "bf16-bf16-bf16" else found.get(cell, {}), base)
            for cell in TABLE
            if cell.split("-")[slot] == of
        ]
        seeds = set.intersection(*(set(cell) for cell in cells))
        return {seed: statistics.fmean(cell[seed] for cell in cells) for seed in seeds}

    one, other = mean(name), mean("bf16")
    return _interval([one[seed] - other[seed] for seed in sorted(one.keys() & other.keys())])


def _by_slot(found: Mapping[str, Losses]) -> str:
    """Return the table of one slot's format, over all choices of the other two; "" if none ran."""
    names = [name for name in FORMATS if name != "bf16"]
    rows = []
    for slot, title in enumerate(("fprop", "dgrad", "wgrad")):
        costs = [of_slot(found, slot, name) for name in names]
        if all(one is not None and one.seeds >= SEEDS for one in costs):
            rows.append((title, *(str(one) for one in costs)))
    if not rows:
        return ""
    return (
        "### By slot\n\nThe mean of the 16 products that have a format in one slot, less the mean "
        "of the 16 that have BF16 there, paired by seed: what a slot's format costs, whatever the "
        "other two are. Intervals are of each figure by itself.\n\n"
        + _table(("slot", *names), rows)
    )


def verdict(claim: Claim, found: Difference | None) -> str:
    """Return `"confirmed"`, `"refuted"` or `"undecided"` by the page's rule; `"not run"`."""
    if found is None:
        return "not run"
    low, high = found.mean - found.half, found.mean + found.half
    if found.seeds < SEEDS or math.isnan(found.mean):
        return "undecided"
    if claim.is_equal:
        if low > -MARGIN and high < MARGIN:
            return "confirmed"
        return "refuted" if low > MARGIN or high < -MARGIN else "undecided"
    return "confirmed" if high < 0 else "refuted" if low > 0 else "undecided"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _of_size(size: str, found: Mapping[str, Losses]) -> str:
    base = found[BASELINE]
    mean = statistics.fmean(base.values())
    count = len({seed for seed, _ in base})
    seeds = "the mean of 1 seed" if count == 1 else f"the mean of {count} seeds"
    figure = f"There is no figure yet: no recipe beside BF16 has {LEAST} seeds.\n"
    if any(drawn(differences(found))):
        figure = (
            f"![Differences from BF16](../images/study-{size}.png)\n\n"
            "`python benchmarks/study.py --write` draws it: recipes of three seeds and more, and "
            f"products once they have all {SEEDS}, as colours say nothing of spread.\n"
        )
    parts = [
        f"## {SIZES[size].about[0].upper()}{SIZES[size].about[1:]}\n\n"
        f"{SIZES[size].steps} steps of {SIZES[size].batch} samples of "
        f"{SIZES[size].model.sequence} bytes. BF16: {mean:.4f} nats per byte, {seeds}. All else is "
        "the difference from BF16 of the same seed, in percent of its loss, with its 95% "
        f"confidence interval.\n\n{figure}"
    ]
    for title, cells in AXES.items():
        rows = [
            (cell, str(one), str(one.seeds))
            for cell in cells
            if (one := difference(found.get(cell, {}), base)) is not None
        ]
        if rows:
            parts.append(f"### {title}\n\n" + _table(("cell", "difference", "seeds"), rows))
    rows = []
    for fprop in FORMATS:
        for dgrad in FORMATS:
            cells = [difference(found.get(f"{fprop}-{dgrad}-{w}", {}), base) for w in FORMATS]
            if any(cells):
                rows.append((fprop, dgrad, *("" if one is None else str(one) for one in cells)))
    if rows:
        heads = ("fprop", "dgrad", *(f"wgrad {one}" for one in FORMATS))
        parts.append(
            "### By product (nearest rounding, no transform)\n\n" + _table(heads, rows)
        )  # fmt: skip
        if by_slot := _by_slot(found):
            parts.append(by_slot)
    known = [one for one in (difference(found[cell], base) for cell in found) if one is not None]
    inside = sum(abs(one.mean) + one.half < MARGIN for one in known) - 1  # without the baseline
    if inside == len(known) - 1:
        parts.append(
            f"All {inside} cells that have run lie within the margin of {MARGIN:.0%}: at this size "
            "and length the rule for training alike tells no recipe from another.\n"
        )
    absent = [cell for cell in CELLS if cell not in found]
    if absent:
        parts.append(f"Cells that have not run at this size: {len(absent)} of {len(CELLS)}.\n")
    return "\n".join(parts)


_HEAD = """# Study of training

Recipes beside BF16 on real text (the sources of Python's standard library, in bytes), the same
seeds, batches and schedule. The page is what has run, and is written by
`python benchmarks/study.py --write`; `make study` runs what has not.

**What such a scale can say.** These models are small and train for minutes. Differences that grow
with depth, width or the number of tokens are not seen here, and a recipe that is harmless here may
not be in a run of weeks. An effect that shows at this scale, paired by seed, is real at this scale;
one that does not may be smaller than the spread of a few seeds. No verdict below is one about
large models. Claims, rule and margin were written down when most runs of the size of 0.4 million
parameters were done and single losses had been seen, before differences were computed: a margin of
1% was not fixed in advance. They were, for all other sizes.
"""


def page(runs: Sequence[dict[str, Any]]) -> str:
    """Return the page of some runs."""
    sizes = [size for size in SIZES if size != "tiny" and losses(runs, size).get(BASELINE)]
    whole = {size: losses(runs, size) for size in sizes}
    parts = [_HEAD]
    rows = []
    for claim in CLAIMS:
        for size in sizes:
            found = difference(whole[size].get(claim.a, {}), whole[size].get(claim.b, {}))
            said = f"**{verdict(claim, found)}**"
            if claim.is_equal and found is not None and not found.is_zero:
                said += ", with a difference that is not zero"
            rows.append((claim.text, claim.source, size, str(found or ""), said))
    parts.append(
        "## Claims\n\nA claim that two recipes train alike is confirmed where the confidence "
        f"interval of the paired difference lies within ±{MARGIN:.0%} of the loss, and refuted "
        "where it lies outside of it. A claim that one is better is confirmed where the interval "
        "lies below zero, and refuted where it lies above. All else, and all that has fewer than "
        f"{SEEDS} seeds, is undecided. Intervals are Student's, 95%, of each claim by itself: "
        f"with {len(CLAIMS)} claims that are all false, {1 - 0.95 ** len(CLAIMS):.0%} of such "
        "tables would decide one or more of them by chance.\n\n"
        + _table(("claim", "source", "size", "difference", "verdict"), rows)
    )
    parts += [_of_size(size, whole[size]) for size in sizes]
    missing = [size for size in SIZES if size not in (*sizes, "tiny")]
    torches = sorted({run["torch"] for run in runs})
    about = [f"{size} ({SIZES[size].about})" for size in missing]
    names = ", ".join(about) or "none"
    counts: dict[tuple[str, str], int] = {}
    for run in runs:
        counts[run["size"], machine(run)] = counts.get((run["size"], machine(run)), 0) + 1
    ran = _table(
        ("size", "machine", "runs"), [(size, on, str(n)) for (size, on), n in counts.items()]
    )
    parts.append(
        f"## What has not run\n\nSizes without a run: {names}. `python benchmarks/study.py --list` "
        "names every run that is missing; `make study` goes on from the record.\n\n"
        f"## How it ran\n\n{len(runs)} runs, torch {', '.join(torches)}, one thread; a difference "
        f"is of two runs of one machine.\n\n{ran}\n"
        "The size of 0.4 million parameters is no part of `make study`'s own sizes: "
        '`make study ARGS="--sizes 0.4m --seeds 5"`. The losses of every run are in '
        "`benchmarks/results/study.json`; `--again` runs what is there once more, in another "
        "`--folder`: the same machine, versions and number of threads give the same digits.\n"
    )
    return "\n".join(parts)


def drawn(known: Mapping[str, Difference]) -> tuple[list[str], list[str]]:
    """Return the recipes of a figure, which have three seeds, and the products, which have all.

    Of two seeds an interval is 12.7 standard errors on each side, and dwarfs the others.
    """
    recipes = [cell for cells in AXES.values() for cell in cells if cell in known]
    return (
        [cell for cell in recipes if known[cell].seeds >= LEAST],
        [cell for cell in TABLE if cell in known and known[cell].seeds >= SEEDS],
    )


def differences(found: Mapping[str, Losses]) -> dict[str, Difference]:
    """Return the differences from BF16 of the cells that have run, in the order of cells."""
    base = found[BASELINE]
    cells = [cell for cell in CELLS if cell in found and cell != BASELINE]
    made = {cell: difference(found[cell], base) for cell in cells}
    return {cell: one for cell, one in made.items() if one is not None}


def draw(runs: Sequence[dict[str, Any]], size: str, path: Path) -> None:
    """Draw the differences from BF16 of a size's cells: recipes left, products right.

    Where none has seeds enough there is no figure.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    known = differences(losses(runs, size))
    recipes, products = drawn(known)
    if not (recipes or products):
        return
    if products:
        height = max(5.0, 0.24 * len(recipes) + 1.2)
        figure = plt.figure(figsize=(11, height), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(3, 2))
        _heat(right, products, known)
    else:
        figure = plt.figure(figsize=(7, 0.24 * len(recipes) + 1.4), layout="constrained")
        left = figure.subplots()
    _intervals(left, recipes, known)
    figure.suptitle(SIZES[size].about, fontsize=11)
    figure.savefig(path, dpi=90)
    plt.close(figure)


def _intervals(axes: Any, cells: Sequence[str], known: Mapping[str, Difference]) -> None:
    places = range(len(cells), 0, -1)
    axes.errorbar(
        [100 * known[cell].mean for cell in cells],
        list(places),
        xerr=[100 * known[cell].half for cell in cells],
        fmt="o",
        color="#1f5fa8",
        capsize=2,
        markersize=4,
    )
    axes.axvline(0, color="0.4", linewidth=1)
    axes.axvspan(-100 * MARGIN, 100 * MARGIN, color="0.93")
    axes.set_yticks(list(places), cells, fontsize=8)
    axes.set_xlabel("difference from BF16's loss, percent:\n95% intervals, paired by seed")


def _heat(axes: Any, cells: Sequence[str], known: Mapping[str, Difference]) -> None:
    """Draw the table fprop x dgrad x wgrad; a number is bold where its interval has no zero."""
    names = list(FORMATS)
    rows = [f"{fprop}, {dgrad}" for fprop in names for dgrad in names]
    means = [[math.nan] * len(names) for _ in rows]
    for cell in cells:
        fprop, dgrad, wgrad = cell.split("-")
        row, column = rows.index(f"{fprop}, {dgrad}"), names.index(wgrad)
        one = known[cell]
        means[row][column] = 100 * one.mean
        weight = "normal" if abs(one.mean) < one.half else "bold"
        text = f"{100 * one.mean:+.2f}"
        axes.text(column, row, text, ha="center", va="center", fontsize=7, weight=weight)
    axes.imshow(means, cmap="RdBu_r", vmin=-0.5, vmax=0.5, aspect="auto", alpha=0.7)
    axes.set_xticks(range(len(names)), names, fontsize=8)
    axes.set_yticks(range(len(rows)), rows, fontsize=8)
    axes.set_xlabel("wgrad")
    axes.set_ylabel("fprop, dgrad")
    axes.set_title("by product, percent; bold: not zero", fontsize=9)


def write(runs: Sequence[dict[str, Any]]) -> None:
    """Write the record, the figures and the page.

    Args:
        runs: results, as `study.results` yields them.
    """
    kept = [{**run, "train_curve": []} for run in runs if run["size"] != "tiny"]
    lines = ",\n".join(json.dumps(run) for run in kept)
    RECORD.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    for size in SIZES:
        if size != "tiny" and losses(kept, size).get(BASELINE):
            draw(kept, size, IMAGES / f"study-{size}.png")
    PAGE.write_text(page(kept), encoding="utf-8")
