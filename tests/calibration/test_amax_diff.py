"""amax-diff and the summary of a calibration: counts, ratios, names, in every form."""

from __future__ import annotations

import json
from html.parser import HTMLParser

import numpy as np
import pytest
import torch

from hybridq import Calibration
from hybridq.calibration import CalibrationSummary, amax_diff


def made(seed: int, names: range) -> Calibration:
    """Amaxes of linear layers, a stack, channels and a cache."""
    generator = np.random.default_rng(seed)
    draw = lambda *shape: torch.tensor(generator.integers(1, 4, shape), dtype=torch.float32)  # noqa: E731
    amaxes = {f"layer.{n}": {"input": draw(), "weight": torch.tensor(2.0)} for n in names}
    amaxes["layer.1"]["input"] = torch.tensor(0.0)
    own = draw(3)
    own[seed % 3] = -torch.inf
    amaxes["experts.up"] = {"input": draw(), "weight": draw(3), "expert_input": own}
    amaxes["wide"] = {"output": draw(4)}
    amaxes["attn"] = {"k": draw(), "v": draw()}
    tokens = {name: torch.tensor(5) for name in (*amaxes, "wide") if name != "attn"}
    tokens["experts.up"] = torch.tensor([4, 0, seed])
    observers = {"input": "max", "weight": "max", "expert_input": "max"}
    formats = {"layer.0": {"input": "nvfp4", "weight": "mxfp8"}}
    return Calibration(amaxes, tokens, observers, formats, batches=2)


A, B = made(1, range(12)), made(2, range(1, 15))


def flat(found: Calibration, slot: str) -> dict[str, float]:
    """Every value by itself, by NumPy's own walk."""
    values = {}
    for name, slots in found.amaxes.items():
        for place, one in np.ndenumerate(slots[slot].numpy()) if slot in slots else ():
            if one >= 0:
                values[(name, *place)] = float(one)
    return values


def test_counts_are_numpys() -> None:
    found = {one.slot: one for one in amax_diff(A, B).slots}
    assert set(found) == {"input", "weight", "output", "k", "v", "expert_input"}
    assert found["input"].only_a == 1 and found["input"].only_b == 3
    for slot, one in found.items():
        a, b = flat(A, slot), flat(B, slot)
        both = sorted(a.keys() & b.keys())
        x, y = (np.array([part[key] for key in both]) for part in (a, b))
        assert (one.equal, one.larger, one.smaller) == (
            (x == y).sum(),
            (y > x).sum(),
            (y < x).sum(),
        )
        assert (one.only_a, one.only_b) == (len(a.keys() - b.keys()), len(b.keys() - a.keys()))
        differ = (x != y) & (x > 0) & (y > 0)
        assert one.median_ratio == (np.median(y[differ] / x[differ]) if differ.any() else None)
    assert (
        sum(one.larger for one in found.values()) > 2 < sum(one.smaller for one in found.values())
    )


def test_the_worst_names_come_first() -> None:
    few, more = (
        Calibration(
            {name: {"input": torch.tensor(float(one))} for name, one in own.items()}, {}, {}
        )
        for own in ({"a": 1, "b": 1, "c": 4, "d": 0}, {"a": 1, "b": 3, "c": 1, "d": 2})
    )
    (one,) = amax_diff(few, more).slots
    assert one.worst == (("d", 0.0, 2.0), ("c", 4.0, 1.0), ("b", 1.0, 3.0))
    assert one.median_ratio == np.median([3, 0.25])
    (one,) = amax_diff(few, more, worst=1).slots
    assert [name for name, *_ in one.worst] == ["d"]
    assert amax_diff(few, few).is_equal and not amax_diff(few, more).is_equal
    assert len(amax_diff(few, few).tables()) == 1 and "Differ most" in str(amax_diff(few, more))


def test_names_of_values_in_a_stack_and_of_channels() -> None:
    other = made(1, range(12))
    other.amaxes["experts.up"]["weight"][2] = 50
    other.amaxes["wide"]["output"][3] = 50
    worst = [name for one in amax_diff(A, other).slots for name, *_ in one.worst]
    assert worst == ["experts.up.2", "wide[3]"]


def test_the_command(tmp_path) -> None:
    testing = pytest.importorskip("typer.testing")
    from hybridq_cli.app import app

    run = lambda *args: testing.CliRunner().invoke(app, ["amax-diff", *map(str, args)])  # noqa: E731
    A.save(tmp_path / "a")
    B.save(tmp_path / "b")
    said = run(tmp_path / "a", tmp_path / "b", "--json")
    assert said.exit_code == 0
    assert json.loads(said.stdout) == json.loads(json.dumps(amax_diff(A, B).as_dict()))
    assert "median B / A" in run(tmp_path / "a", tmp_path / "b").stdout
    failed = run(tmp_path / "a", tmp_path / "gone")
    assert failed.exit_code == 2 and "calibration: cannot read" in failed.output


class Cells(HTMLParser):
    """The texts of a page's cells."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(text)

    def handle_data(self, data: str) -> None:
        self.found.append(data)


def test_a_summary_has_every_quantizer_and_every_count(tmp_path) -> None:
    summary = CalibrationSummary(A)
    for suffix in ("json", "html", "txt"):
        summary.save(tmp_path / f"a.{suffix}")
    read = json.loads((tmp_path / "a.json").read_text())
    by_name = {one["name"]: one for one in read["products"]}
    assert set(by_name) == set(A.amaxes)
    assert by_name["layer.0"]["formats"] == {"input": "nvfp4", "weight": "mxfp8"}
    assert by_name["experts.up"]["tokens"] == [4, 0, 1]
    assert by_name["experts.up"]["amax"]["expert_input"][1] is None
    for name, slot, value in A.entries():
        got = np.array(by_name[name]["amax"][slot], dtype=float)
        assert np.array_equal(
            got, np.where(value.numpy() < 0, np.nan, value.numpy()), equal_nan=True
        )
    cells = Cells((tmp_path / "a.html").read_text()).found
    assert {"layer.0", "experts.up", "nvfp4", "1: 1"} <= set(cells)
    assert (tmp_path / "a.txt").read_text() == f"{summary}\n"
    assert len(summary.tables()[0].rows) == len(list(A.entries()))
