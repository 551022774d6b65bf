"""The study of training: a run again is the same run, and verdicts follow the page's rule."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from places import BENCHMARKS, ROOT

sys.path.insert(0, str(BENCHMARKS))

import study
import study_cells
import study_page
from study_page import Claim, Difference

from hybridq.demo.data import load_corpus


def test_the_page_is_the_record() -> None:
    runs = json.loads(study_page.RECORD.read_text())
    assert study_page.PAGE.read_text() == study_page.page(runs)
    keys = {(one["size"], one["cell"], one["seed"], study_page.machine(one)) for one in runs}
    assert len(keys) == len(runs)
    assert runs == study.results(ROOT / "none", reversed(runs))
    assert (ROOT / "docs" / "images" / "study-0.4m.png").exists()


def test_a_run_is_reproduced_to_the_digit_and_done_once(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{n} squared is {n * n}\n" for n in range(3000)))
    corpus = load_corpus(text, 32)
    keys = study.chosen(["tiny"], ["nvfp4"], 1)
    assert [key.cell for key in keys] == ["bf16", "nvfp4"]
    said: list[str] = []
    for folder, count in (("a", 2), ("a", 0), ("b", 2)):
        done = study.run_all(keys, tmp_path / folder, corpus, math.inf, said.append)
        assert done == count
    a, b = (
        [{**json.loads(key.path(tmp_path / one).read_text()), "seconds": 0} for key in keys]
        for one in "ab"
    )
    assert a == b and len(said) == 4
    assert a[0]["validation_loss"] != a[1]["validation_loss"]
    assert len(a[1]["train_curve"]) == a[1]["steps"] == 8


@pytest.mark.parametrize(
    "cell", ["bf16", "fp8_delayed", "nvfp4", "mxfp8_fwd_nvfp4_bwd", "nvfp4, then bf16 forward"]
)
def test_a_run_goes_on_where_it_was_saved(cell: str, tmp_path: Path, monkeypatch) -> None:
    """Histories, the optimizer, the order of batches, random roundings and the schedule do so."""
    small = study_cells.SIZES["tiny"]
    mixture = small._replace(model=replace(small.model, experts=4))
    monkeypatch.setattr(study, "SIZES", {"tiny": mixture})
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{n} squared is {n * n}\n" for n in range(3000)))
    key, corpus = study.Key("tiny", cell, 3), load_corpus(text, 32)
    whole, saved = study.train(key, corpus), tmp_path / "folder" / "3.state"
    for interrupted_after in (3, 4):
        run = study.StudyRun(key, corpus)
        monkeypatch.setattr(study, "StudyRun", lambda *given, run=run, **named: run)
        steps, taken = run.steps, iter(range(interrupted_after))

        def some(steps=steps, taken=taken):
            yield from (one for _, one in zip(taken, steps(), strict=False))
            raise KeyboardInterrupt

        monkeypatch.setattr(run, "steps", some)
        with pytest.raises(KeyboardInterrupt):
            study.train(key, corpus, saved=saved, every=0.0)
        monkeypatch.undo()
        monkeypatch.setattr(study, "SIZES", {"tiny": mixture})
    before = saved.read_bytes()
    rest = study.train(key, corpus, saved=saved)
    assert len(rest["train_curve"]) == 8 and saved.read_bytes() == before
    assert {**rest, "seconds": 0} == {**whole, "seconds": 0}


def test_a_study_ends_at_its_time(tmp_path: Path) -> None:
    said: list[str] = []
    keys = study.chosen(["tiny"], ["mxfp8"], 1)
    assert study.run_all(keys, tmp_path, None, 0.0, said.append) == 0  # type: ignore[arg-type]
    assert said == ["study: the time is over; the same command goes on where it ended"]


def test_a_schedule_changes_the_forward_in_the_last_tenth() -> None:
    schedule = study_cells.source("nvfp4, then bf16 forward", 100)
    formats = [schedule.at(step).arguments()["fprop"] for step in (90, 99)]
    assert formats == ["bf16", "bf16"]
    assert type(schedule.at(89)).__name__ == "NVFP4BlockScaling"


def test_all_cells_are_recipes_with_files_of_their_own(tmp_path: Path) -> None:
    keys = study.chosen(["3m"], ["*"], 1)
    assert len({key.path(tmp_path) for key in keys}) == len(study_cells.CELLS) == len(keys)
    for cell in study_cells.CELLS:
        assert (study_cells.source(cell, 10) is None) == (cell == "bf16")
    with pytest.raises(ValueError, match="must meet a cell, got 'fp5'"):
        study.chosen(["3m"], ["fp5"], 1)
    with pytest.raises(ValueError, match="a size must be one of"):
        study.chosen(["4m"], ["*"], 1)


def test_differences_are_paired_by_seed() -> None:
    a = {(seed, "m"): 2.0 * (1.01 + 0.01 * seed) for seed in range(5)} | {(9, "m"): 1.0}
    b = dict.fromkeys([(seed, "m") for seed in range(5)], 2.0)
    found = study_page.difference(a, b)
    assert found is not None and found.seeds == 5
    assert found.mean == pytest.approx(0.03)
    # The deviation of 1..5 percent is sqrt(2.5) percent; t of 4 degrees of freedom is 2.776.
    assert found.half == pytest.approx(2.776 * math.sqrt(2.5 / 5) / 100)
    assert study_page.difference({(0, "m"): 1.0}, {(1, "m"): 1.0}) is None
    # Runs of two machines are no pair; a seed that both ran is one seed.
    assert study_page.difference({(0, "m"): 1.0}, {(0, "n"): 1.0}) is None
    twice = {**{(seed, "n"): value for (seed, _), value in a.items()}, **a}
    more = {**{(seed, "n"): value for (seed, _), value in b.items()}, **b}
    assert study_page.difference(twice, more) == found


def test_a_slot_is_averaged_over_the_other_two() -> None:
    of = {"bf16": 0.0, "fp8": 0.25, "mxfp8": 0.5, "nvfp4": 1.0}
    weights = (0.01, 0.04, 0.16)
    found: dict[str, dict[tuple[int, str], float]] = {"bf16": {(n, "one"): 2.0 for n in range(5)}}
    for cell in study_page.TABLE[1:]:
        costs = [w * of[name] for w, name in zip(weights, cell.split("-"), strict=True)]
        found[cell] = {(n, "one"): 2.0 * (1 + n * costs[0] + sum(costs[1:])) for n in range(5)}
    for slot, weight in enumerate(weights):
        for name, value in of.items():
            got = study_page.of_slot(found, slot, name)
            assert got is not None and got.seeds == 5
            assert got.mean == pytest.approx(weight * value * (2 if slot == 0 else 1))
            # Student's 2.776, of 0 to 4 whose deviation is the root of 2.5.
            half = 2.776 * weight * value * math.sqrt(2.5 / 5) if slot == 0 else 0.0
            assert got.half == pytest.approx(half, abs=1e-12)
    assert study_page._by_slot(found).count("\n| ") == 5
    del found["fp8-fp8-fp8"][3, "one"]
    cost = study_page.of_slot(found, 2, "fp8")
    assert cost is not None and cost.seeds == 4
    assert study_page._by_slot(found) == ""


def test_a_record_is_gone_on_with_on_another_machine(tmp_path: Path) -> None:
    here, there = "m (AVX512)", "n (AVX2)"

    def run(cell: str, seed: int, on: str) -> dict[str, object]:
        name, capability = on[0], on[3:-1]
        return {"size": "3m", "cell": cell, "seed": seed, "machine": name,
                "cpu_capability": capability}  # fmt: skip

    keys = study.chosen(["3m"], ["mxfp8", "nvfp4"], 2)
    record = [run("bf16", 0, there), run("mxfp8", 0, there), run("nvfp4", 0, there)]
    assert study.unrecorded(keys, record, here) == keys[3:]
    # nvfp4 of the second seed is lacking: it takes a baseline of the machine that it runs on.
    record += [run("bf16", 1, there), run("mxfp8", 1, there)]
    assert study.unrecorded(keys, record, here) == [keys[3], keys[5]]
    assert study.unrecorded(keys, record, there) == [keys[5]]
    # A run without a baseline of its machine is compared with nothing until that has run, too.
    apart = [run("bf16", 1, there), run("mxfp8", 1, here)]
    assert study.unrecorded(keys[3:5], apart, here) == [keys[3]]
    assert study.unrecorded(keys[3:5], apart, there) == [keys[4]]
    for size, cell, seed in keys:
        path = study.Key(size, cell, seed).path(tmp_path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**run(cell, seed, here), "validation_loss": 1.0}))
    merged = study.results(tmp_path, [*record, {**run("bf16", 0, here), "validation_loss": 9.0}])
    assert [(one["cell"], one["seed"], one["machine"]) for one in merged] == [
        *(("bf16", seed, on) for seed in (0, 1) for on in "mn"),
        *((cell, seed, on) for cell in ("mxfp8",) for seed in (0, 1) for on in "mn"),
        *(("nvfp4", seed, on) for seed, on in ((0, "m"), (0, "n"), (1, "m"))),
    ]
    assert merged[0]["validation_loss"] == 1.0


def test_cells_of_a_claim_run_on_one_machine() -> None:
    """Both have a baseline where they ran, and cannot be compared with one another."""
    here, there = "m (AVX512)", "n (AVX2)"
    bf16, nvfp4, nearest = keys = study.chosen(["3m"], ["nvfp4", "nvfp4, nearest*"], 1)

    def run(key: study.Key, on: str) -> dict[str, object]:
        return {**key._asdict(), "machine": on[0], "cpu_capability": on[3:-1]}

    record = [run(bf16, here), run(nearest, here), run(bf16, there), run(nvfp4, there)]
    assert study.unrecorded(keys, record, here) == [nvfp4]
    assert study.unrecorded(keys, record, there) == [nearest]
    assert study.unrecorded(keys, [*record, run(nvfp4, here)], there) == []
    assert study.unrecorded([bf16, nearest], record, there) == []  # nvfp4 was not asked for


@pytest.mark.parametrize(
    ("is_equal", "mean", "half", "seeds", "said"),
    [
        (True, 0.002, 0.003, 5, "confirmed"),
        (True, 0.02, 0.005, 5, "refuted"),
        (True, 0.008, 0.005, 5, "undecided"),
        (True, 0.002, 0.003, 4, "undecided"),
        (False, -0.02, 0.005, 5, "confirmed"),
        (False, 0.02, 0.005, 5, "refuted"),
        (False, -0.002, 0.005, 5, "undecided"),
        (False, math.nan, math.nan, 5, "undecided"),
    ],
)
def test_verdicts(is_equal: bool, mean: float, half: float, seeds: int, said: str) -> None:
    claim = Claim("", "", "a", "b", is_equal)
    assert study_page.verdict(claim, Difference(mean, half, seeds)) == said
    assert study_page.verdict(claim, None) == "not run"


def test_processes_share_the_runs(tmp_path: Path, monkeypatch, capfd) -> None:
    options = ["--sizes", "tiny", "--cells", "mxfp8", "--seeds", "1", "--jobs", "2"]
    monkeypatch.setattr(sys, "argv", [study.__file__, *options, "--folder", str(tmp_path)])
    with pytest.raises(SystemExit) as end:
        study.main()
    assert end.value.code == 0
    assert sorted(path.parent.name for path in tmp_path.rglob("*.json")) == ["bf16", "mxfp8"]
    assert capfd.readouterr().out.count("finished") == 2


def test_a_figure_has_recipes_of_three_seeds_and_products_of_all() -> None:
    seeds = {"mxfp8": 3, "nvfp4": 2, "bf16-bf16-fp8": 4, "bf16-bf16-mxfp8": study_page.SEEDS}
    known = {cell: Difference(0.01, 0.02, count) for cell, count in seeds.items()}
    assert study_page.drawn(known) == (["mxfp8"], ["bf16-bf16-mxfp8"])


def test_a_size_with_few_seeds_has_a_table_and_no_figure(tmp_path) -> None:
    losses = {"bf16": 1.0, "mxfp8": 1.02}
    runs = [
        {"size": "25m", "cell": cell, "seed": 0, "status": "finished", "validation_loss": loss}
        | {"cpu_capability": "AVX2", "machine": "one", "torch": "2.13.0", "train_curve": []}
        for cell, loss in losses.items()
    ]
    study_page.draw(runs, "25m", tmp_path / "figure.png")
    assert not (tmp_path / "figure.png").exists()
    text = study_page.page(runs)
    assert "BF16: 1.0000 nats per byte, the mean of 1 seed." in text
    assert "There is no figure yet" in text and "study-25m.png" not in text
    assert "| mxfp8 | +2.00% (1 seed) | 1 |" in text
