"""What a module records of a weight whose planes were gathered: each place its own maximum."""

from __future__ import annotations

import pytest
import torch

from hybridq.formats import PlaneSpec
from hybridq.nn.autograd.slot_encoder import record_given
from hybridq.nn.delayed_scaling.state import Scales
from hybridq.recipes.bind import SlotPlan

ROW, COL = (PlaneSpec.parse(name).plain_text() for name in ("fp8_e4m3", "fp8_e5m2"))
FOUND = torch.tensor([3.0, 5.0], dtype=torch.float32)


def recorded(plan: SlotPlan, with_col: bool) -> list[float]:
    """The forward's amaxes after a recording."""
    stats, amaxes = (torch.full((4,), -1.0, dtype=torch.float32) for _ in range(2))
    record_given(FOUND, plan, with_col, Scales(stats, amaxes, stats, amaxes, None))
    return amaxes.tolist()


@pytest.mark.parametrize(
    ("source", "with_col", "shares", "want"),
    [
        ("original", True, False, [-1.0, -1.0, 3.0, 3.0]),
        ("rowwise_dequantized", True, False, [-1.0, -1.0, 3.0, 5.0]),
        ("rowwise_dequantized", False, False, [-1.0, -1.0, 3.0, -1.0]),
        ("original", True, True, [-1.0, -1.0, 3.0, -1.0]),
    ],
)
def test_each_plane_has_its_own_maximum(source, with_col, shares, want) -> None:
    plan = SlotPlan(ROW, COL, source, "", "delay", "delay", shares)
    assert recorded(plan, with_col) == want


def test_a_plane_without_a_history_records_nothing() -> None:
    assert recorded(SlotPlan(ROW, COL, "original", "", "", "delay"), True)[2:] == [-1.0, 3.0]
    assert recorded(SlotPlan(ROW, COL, "original", "", "delay", ""), True)[2:] == [3.0, -1.0]
