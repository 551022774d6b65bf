"""Plans over several axes: shapes of parts, formulas, levels; counted runs are in the programs."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from hybridq.errors import SpecError
from hybridq.estimate import Axes, DenseShape, Sharding, plan, plan_axes
from hybridq.estimate.axes import attention_moved, tensor_moved
from hybridq_cli.app import app
from rank_runs import needs_gloo, run

SHAPE = DenseShape(8, 256, 512, 8, 4, 1024)


@needs_gloo
def test_tensor_parallel_layers_move_what_is_planned(tmp_path) -> None:
    run(2, tmp_path / "store", "tensor", "inside", program="axes_program.py")


@needs_gloo
@pytest.mark.more
def test_tensor_parallel_layers_of_four_ranks(tmp_path) -> None:
    run(4, tmp_path / "store", "tensor", program="axes_program.py")


@needs_gloo
def test_sequences_of_ranks_move_what_is_planned(tmp_path) -> None:
    run(2, tmp_path / "store", "sequences", "schedules", program="axes_program.py")


@needs_gloo
@pytest.mark.more
def test_sequences_of_four_ranks(tmp_path) -> None:
    run(4, tmp_path / "store", "sequences", "schedules", program="axes_program.py")


def test_bubbles_of_published_schedules() -> None:
    """As their papers have them; torch's orders are run in the program."""
    make = lambda name, **options: Axes(pp=4, microbatches=8, schedule=name, **options)  # noqa: E731
    assert make("gpipe").bubble == make("1f1b").bubble == pytest.approx(3 / (8 + 3))
    assert make("interleaved", stages_per_rank=3).bubble == pytest.approx(3 / (24 + 3))
    assert make("interleaved_zero_bubble").bubble == pytest.approx(3 / (3 * 16 + 3))
    # No rank of ZB-V waits between its first and its last; they begin one after the other.
    assert make("zbv").bubble == make("dualpipev").bubble == pytest.approx(3 / (3 * 16 + 3))
    assert make("zbv").in_flight == 4
    assert make("interleaved").in_flight == (4 + 2 * 3 + 1) / 2
    assert Axes().bubble == 0.0


def test_parts_of_a_model_are_the_whole() -> None:
    """Matrices are dealt out, norms are whole on every rank; stages have their layers."""
    whole = sum(p.numel() for p in SHAPE.model().parameters())
    assert whole == SHAPE.num_params
    norms = (2 * SHAPE.layers + 1) * SHAPE.hidden
    part = sum(p.numel() for p in SHAPE.model(parts=4).parameters())
    assert 4 * (part - norms) + norms == whole
    first = SHAPE.model(layers=2, has_head=False)
    block = sum(p.numel() for p in first.layers.parameters())
    inside = whole - (2 * SHAPE.vocab + 1) * SHAPE.hidden
    assert block == inside * 2 // SHAPE.layers and not hasattr(first, "lm_head")


def test_memory_and_traffic_are_those_of_the_part() -> None:
    axes = Axes(tp=2, pp=2, microbatches=4)
    made = plan_axes(SHAPE, "mxfp8", axes, Sharding(16), tokens=256, dtype=torch.bfloat16)
    model = SHAPE.model(torch.bfloat16, layers=4, parts=2, has_head=False)
    # Two of four microbatches at a time.
    assert made.sharded == plan(model, "mxfp8", Sharding(4), tokens=128)
    kinds = {(one.what, one.kind): one.nbytes for one in made.moved}
    states = 2 * 4 * 256 * 256 * 2
    assert kinds["hidden states, forward", "all_reduce"] == states
    assert kinds["activations of stages", "send"] == 256 * 256 * 2
    total = made.nbytes_by_kind()
    assert total["all_reduce"] == 2 * states + made.sharded.nbytes_by_kind().get("all_reduce", 0)
    assert sum(made.nbytes_by_level().values()) == sum(total.values())


def test_sequences() -> None:
    """Of 10 tokens of width 64 with keys and values of 32 in one layer, in 16 bits."""
    sent = lambda axes, heads: [  # noqa: E731
        (one.kind, one.nbytes) for one in attention_moved(axes, 10, 64, (32, heads), 1)
    ]
    assert sent(Axes(sp=2), 2) == [("all_to_all", 2 * 10 * (2 * 64 + 32))] * 2
    # Four ranks and two heads of keys: each head twice.
    assert sent(Axes(sp=4), 2) == [("all_to_all", 2 * 10 * (2 * 64 + 64))] * 2
    # Six heads of keys for four ranks: twelve, of twelve queries'.
    assert [one.nbytes for one in attention_moved(Axes(sp=4), 10, 12 * 8, (2 * 6 * 8, 6), 1)] == [
        2 * 10 * (2 * 96 + 2 * 96)
    ] * 2
    # In MXFP8, heads of 8: a code for each value and a scale for each head; gradients as values.
    half = attention_moved(Axes(sp=2, sp_communication=("mxfp8", None)), 10, 64, (2 * 4 * 8, 4), 3)
    values = 3 * 10 * (2 * 64 + 64)
    assert [one.nbytes for one in half] == [values * 9 // 8, 2 * values]
    assert [one.bf16_nbytes for one in half] == [2 * values] * 2
    every = 4 * 2 * 10 * 32
    gathers = [("all_gather", every)] * 2
    assert sent(Axes(cp=4), 2) == [*gathers, ("all_to_all", 2 * every)]
    both = tensor_moved(Axes(tp=2, sequence_parallel=True), 10, 64, 3)
    assert [one.kind for one in both] == ["all_gather", "reduce_scatter"] * 2
    assert {one.nbytes for one in both} == {2 * 3 * 2 * 10 * 64}


def test_levels() -> None:
    """Ranks of a node hold the inner axes."""
    axes = Axes(tp=4, cp=2, pp=2, ranks_per_node=8, microbatches=2)
    made = plan_axes(SHAPE, "mxfp8", axes, Sharding(32), tokens=64)
    levels = {one.what: one.level for one in made.moved}
    assert levels["hidden states, forward"] == levels["keys and values, forward"] == "node"
    assert levels["activations of stages"] == "network"
    assert set(made.levels) == {"network"}  # four data ranks, each four apart
    assert set(made.nbytes_by_level()) == {"node", "network"}
    inside = plan_axes(SHAPE, "mxfp8", Axes(tp=2, ranks_per_node=8), Sharding(8), tokens=64)
    assert set(inside.levels) == {"node"}
    # Six ranks have room within a node of eight, whatever divides it.
    few = plan_axes(SHAPE, None, Axes(pp=3, ranks_per_node=8), Sharding(6), tokens=64)
    assert set(few.nbytes_by_level()) == {"node"}


def test_a_model_without_a_pipeline_has_one_microbatch_at_a_time() -> None:
    one, more = Axes(tp=2, microbatches=8, schedule="gpipe"), Axes(tp=2, microbatches=8)
    assert one.in_flight == more.in_flight == 1.0


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: Axes(tp=0), ValueError, "Axes: tp must be an int of at least 1, got 0"),
        (lambda: Axes(schedule="none"), ValueError, "Axes: schedule must be one of"),
        (lambda: Axes(stages_per_rank=2), ValueError, "stages_per_rank of 1f1b must be 1, got 2"),
        (lambda: Axes(communication="nope"), SpecError, "Axes: communication"),
        (lambda: Axes(sp_communication="nope"), SpecError, "Axes: sp_communication"),
        (
            lambda: Axes(pp=4, schedule="dualpipev", microbatches=7),
            ValueError,
            "dualpipev must have twice as many microbatches as ranks, got 7 on 4",
        ),
        (
            lambda: plan_axes(SHAPE, None, Axes(tp=3), Sharding(8)),
            ValueError,
            "must divide world, got 3",
        ),
        (
            lambda: plan_axes(SHAPE, None, Axes(pp=16), Sharding(16)),
            ValueError,
            "a layer for each stage, got 8 layers for 16 stages",
        ),
        (lambda: plan_axes(SHAPE, None, Axes(tp=16), Sharding(16)), ValueError, "divide the heads"),
        (
            lambda: plan_axes(SHAPE, None, Axes(ranks_per_node=3), Sharding(8)),
            ValueError,
            "ranks_per_node must divide world, got 3 with world 8",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused(make, error, text) -> None:
    with pytest.raises(error, match=text):
        make()


def test_the_command_prints_the_axes() -> None:
    args = [
        "plan",
        "--params",
        "8e9",
        "--world",
        "64",
        "--tp",
        "4",
        "--pp",
        "2",
        "--tokens",
        "4096",
    ]
    args += ["--microbatches", "8", "--communication", "mxfp8", "--ranks-per-node", "8"]
    result = CliRunner().invoke(app, args, env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert result.exit_code == 0, result.output
    assert "activations of stages" in result.output and "11.1% of a step idle" in result.output
    made = json.loads(CliRunner().invoke(app, [*args, "--json"]).output)
    assert made["axes"]["tp"] == 4 and made["bubble"] == pytest.approx(1 / 9)
    assert {row["level"] for row in made["axes_traffic"]} == {"node", "network"}
    bad = CliRunner().invoke(app, [*args, "--schedule", "none"])
    assert bad.exit_code == 2 and "schedule must be one of" in bad.output
