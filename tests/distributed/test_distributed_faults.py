"""Ranks that differ, hold NaN, die or stall: see `faults_program.py` for what each rank runs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hybridq
from hybridq.distributed import check_ranks
from hybridq.distributed.agreement import recipe_agreement as agreement
from hybridq.distributed.agreement.fingerprint import Fingerprint
from hybridq.shards import named_ranks
from rank_runs import needs_gloo, run

pytestmark = needs_gloo


def test_ranks_that_differ_are_told_so_on_every_rank(tmp_path) -> None:
    names = ("differ_at_start", "differ_later", "change_together")
    run(3, tmp_path / "store", *names, program="faults_program.py")


def test_a_nan_on_one_rank_has_the_same_outcome_on_all(tmp_path) -> None:
    names = ("nan_in_a_batch", "nan_in_a_weight")
    run(3, tmp_path / "store", *names, program="faults_program.py")


@pytest.mark.parametrize(
    "name",
    ["dies", pytest.param("stalls", marks=pytest.mark.more)],  # until its timeout
)
def test_a_rank_that_is_gone_ends_the_others(name, tmp_path) -> None:
    run(3, tmp_path / "store", name, program="faults_program.py", leaves=1)


def test_fingerprints_name_the_first_difference() -> None:
    def model(width: int, dtype=torch.bfloat16) -> nn.Module:
        layers = nn.Sequential(
            nn.Linear(width, 8), hybridq.GroupedLinear(2, 8, 8), nn.Embedding(4, 8)
        )
        return hybridq.convert(layers).to(dtype)

    recipe = hybridq.recipes.get("mxfp8")
    one = Fingerprint.of(model(8), recipe, (2,))
    assert one.first_difference(Fingerprint.of(model(8), recipe, (2,))) == -1
    assert one.digest == Fingerprint.of(model(8), recipe, (2,)).digest
    for other, what in (
        (Fingerprint.of(model(9), recipe, (2,)), "parameter number 0"),
        (Fingerprint.of(model(8), recipe, (4,)), "the mesh of ranks"),
        (Fingerprint.of(model(8, torch.float32), recipe, (2,)), "parameter number 0"),
        (Fingerprint.of(model(8), None, (2,)), "the quantizer of 0:input"),
        (Fingerprint.of(model(8), recipe.with_precision("exact"), (2,)), "the products of 0"),
    ):
        assert other.digest != one.digest
        assert one.line(one.first_difference(other))[0] == what
    # A recipe that modules cannot run under is theirs to refuse: all ranks must come this far.
    lacks = hybridq.CustomRecipe(lambda role: 3)
    assert any("refused" in value for _, value in Fingerprint.of(model(8), lacks, (2,)).lines)


def test_names_of_ranks() -> None:
    assert named_ranks([3]) == "rank 3"
    assert named_ranks([5, 0, 1, 2]) == "ranks 0-2, 5"
    assert named_ranks([0, 2]) == "ranks 0, 2"


def test_what_check_ranks_refuses() -> None:
    with pytest.raises(TypeError, match=r"check_ranks: model must be an nn.Module, got int"):
        check_ranks(3)
    with pytest.raises(RuntimeError, match=r"check_ranks: torch.distributed must be initialized"):
        check_ranks(nn.Linear(2, 2))


def test_trailers_are_asked_for_one_by_one_and_their_memory_is_used_again() -> None:
    """While a device lags each gather asks about the oldest ones only."""
    asked: list[int] = []
    arrived: list[int] = []
    buffers: list[torch.Tensor] = []

    class Event:
        def __init__(self, number: int) -> None:
            self.number = number

        def query(self) -> bool:
            asked.append(self.number)
            return self.number in arrived

    def buffer(shape: torch.Size) -> torch.Tensor:
        buffers.append(torch.empty(shape, dtype=torch.uint8))
        return buffers[-1]

    numbers = iter(range(1000))
    own = b"a" * 16
    unread = agreement.Unread(lambda: Event(next(numbers)), buffer)
    trailers = torch.tensor([list(own)] * 2, dtype=torch.uint8)
    for _ in range(100):
        unread.read()
        unread.add(trailers, own, "layer", None)
    assert asked == [0] * 99
    arrived += [0, 1, 3]  # the third waits, and with it those behind
    asked.clear()
    unread.read()
    assert asked == [0, 1, 2] and len(buffers) == 100
    for _ in range(2):
        unread.add(trailers, own, "layer", None)
    assert len(buffers) == 100
    unread.add(trailers, own, "layer", None)
    assert len(buffers) == 101


def test_trailers_that_come_late_are_read_when_they_have_arrived(monkeypatch) -> None:
    """On a device; here what has come is put where a gather leaves it."""

    class Event:
        is_done = False

        def query(self) -> bool:
            return self.is_done

    class Group:
        @staticmethod
        def size() -> int:
            return 2

    monkeypatch.setattr(torch.distributed, "get_global_rank", lambda group, rank: 4 + rank)
    event, own, other = Event(), b"a" * 16, b"b" * 16
    rows = torch.tensor([list(own), list(other)], dtype=torch.uint8)
    unread = agreement.Unread(lambda: event, lambda shape: torch.empty(shape, dtype=torch.uint8))
    unread.add(rows, own, "layer", Group())
    monkeypatch.setattr(agreement, "_unread", unread)
    agreement.read_arrived()  # not yet
    event.is_done = True
    with pytest.raises(RuntimeError, match=r"for layer .* on rank 4, another on rank 5"):
        agreement.read_arrived()
    agreement.read_arrived()  # said once
