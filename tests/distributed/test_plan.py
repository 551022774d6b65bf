"""Plans of sharded runs: against runs of two processes, byte for byte (see `plan_program.py`)."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import distributed_table
import hybridq
from hybridq.distributed import DenseShape, Sharding, count_traffic, plan
from hybridq_cli.app import app
from places import ROOT
from rank_runs import needs_gloo, run

PROGRAM = "plan_program.py"


@needs_gloo
def test_a_run_moves_and_holds_what_is_planned(tmp_path) -> None:
    names = ("traffic", "quantized", "delayed", "dealt")
    run(2, tmp_path / "store", "baselines", *names, program=PROGRAM)


@needs_gloo
@pytest.mark.slow
def test_other_ways_of_sharding_move_and_hold_what_is_planned(tmp_path) -> None:
    names = ("traffic=all", "reshard", "ddp", "gathered", "discarded")
    run(2, tmp_path / "store", *names, program=PROGRAM)


@needs_gloo
@pytest.mark.slow
def test_quantized_parameters_move_and_hold_what_is_planned(tmp_path) -> None:
    run(2, tmp_path / "store", "quantized=all", program=PROGRAM)


@needs_gloo
@pytest.mark.more
def test_a_run_of_experts_moves_and_holds_what_is_planned(tmp_path) -> None:
    run(2, tmp_path / "store", "experts", program=PROGRAM)


@needs_gloo
@pytest.mark.slow
def test_experts_on_four_ranks(tmp_path) -> None:
    run(4, tmp_path / "store", "experts=all", program=PROGRAM)


@needs_gloo
@pytest.mark.more
def test_groups_of_ranks_move_what_is_planned(tmp_path) -> None:
    run(4, tmp_path / "store", "hsdp", program=PROGRAM)


# ---- plans by hand


def by_purpose(made) -> dict[str, int]:
    return {moved.what: moved.nbytes for moved in made.traffic}


def test_bytes_are_those_of_the_formats() -> None:
    model = nn.ModuleList([hybridq.Linear(256, 512, bias=False)])
    count = 256 * 512
    moved = by_purpose(plan(model, "mxfp8_fwd_nvfp4_bwd", Sharding(4)))
    digests = 4 * 16  # what each rank says that it computes
    assert moved["weights, forward"] == count * 33 // 32 + digests
    # Four bits, a scale byte per 16, and from each rank the amax of the tensor.
    assert moved["weights, backward"] == count * 9 // 16 + 4 * 4 + digests
    assert moved["gradients"] == 4 * count
    assert moved["amaxes"] == 4
    plain = by_purpose(plan(model, None, Sharding(4)))
    assert plain == {
        "weights, forward": 2 * count + digests,
        "weights, backward": 2 * count + digests,
        "gradients": 4 * count,
    }


def test_a_ring_moves_less_than_a_collective_is_given() -> None:
    made = plan(nn.Linear(64, 64, bias=False), None, Sharding(8, "hsdp", 4))
    sent = {moved.what: moved.network_nbytes for moved in made.traffic}
    assert sent["other parameters, forward"] == 2 * 64 * 64 * 3 // 4
    assert sent["gradients of shards"] == 2 * (4 * 64 * 64 // 4) // 2


def test_saved_inputs_are_those_of_the_memory_report() -> None:
    layer = hybridq.Linear(64, 96, bias=False, dtype=torch.bfloat16)
    x = torch.randn(48, 64, dtype=torch.bfloat16)
    for recipe in (
        "mxfp8",
        "nvfp4",
        "mxfp8_fwd_high_precision_bwd",
        "high_precision_fwd_mxfp8_bwd",
    ):
        with hybridq.autocast(recipe=recipe):
            report = hybridq.memory_report(nn.Sequential(layer), lambda: layer(x))
        made = plan(layer, recipe, Sharding(1), tokens=48)
        held = {one.what: one.nbytes for one in made.memory}
        seed = report.by_dtype("saved").get(torch.int64, 0)
        assert held["inputs saved by linears"] == report.nbytes("saved") - seed, recipe


def test_quantized_parameters_keep_their_values_in_the_optimizer() -> None:
    model = nn.ModuleList([hybridq.Linear(64, 64, bias=False)])
    count = 64 * 64 // 2
    for quantized, parameters, copies in ((False, 4 * count, 2), (True, 2 * count * 33 // 32, 3)):
        made = plan(model, "mxfp8", Sharding(2), quantized_params=quantized)
        held = {one.what: one.nbytes for one in made.memory}
        assert held["parameters"] == parameters
        assert held["optimizer"] == copies * 4 * count + 4


def test_masters_are_those_of_the_optimizer_that_keeps_them() -> None:
    """Of BF16 parameters: 12 bytes per value with masters, 4 without, of planes as with masters."""
    model = nn.ModuleList([hybridq.Linear(64, 64, bias=False, dtype=torch.bfloat16)])
    count = 64 * 64 // 2
    runs = (("mxfp8", {}, 4), ("mxfp8", {"masters": True}, 12))
    for recipe, options, want in (*runs, ("mxfp8", {"quantized_params": True}, 12)):
        made = plan(model, recipe, Sharding(2), **options)
        held = {one.what: one for one in made.memory}["optimizer"]
        found = held.nbytes, held.bf16_nbytes, held.bf16_masters_nbytes
        assert found == tuple(size * count + 4 for size in (want, 4, 12)), options
    long = plan(model.float(), "mxfp8", Sharding(2), masters=True)  # FP32 is its own master
    held = {one.what: one for one in long.memory}
    assert held["optimizer"].nbytes == 8 * count + 4
    assert held["optimizer"].bf16_masters_nbytes == 12 * count + 4
    assert held["parameters"].bf16_masters_nbytes == 2 * count
    text = str(made)
    assert "in BF16" in text and "+ masters" in text
    assert made.as_dict()["memory"][0]["bf16_masters_nbytes"] == 2 * count


@pytest.mark.parametrize("policy", ["ddp", "fsdp"])
def test_one_weight_for_all_experts_weighs_what_theirs_do(policy) -> None:
    """But for amaxes, which only their owners send."""
    recipes = ("mxfp8", "nvfp4", "mxfp8_fwd_nvfp4_bwd", "mxfp8_fwd_high_precision_bwd", None)
    for recipe in recipes:
        found = []
        for single in (False, True):
            options = {"bias": False, "single_grouped_weight": single, "device": "meta"}
            model = nn.ModuleList([hybridq.GroupedLinear(4, 64, 128, **options)])
            made = plan(model, recipe, Sharding(2, policy), tokens=16)
            held = {one.what: one.nbytes for one in made.memory}
            found.append((held, made.nbytes_by_kind()))
        (parts, own), (whole, one) = found
        kept = "weights kept for the backward"
        assert parts.get(kept) == whole.get(kept) and (policy == "ddp") == (kept in whole), recipe
        assert parts["parameters"] == whole["parameters"]
        assert "inputs saved by linears" not in whole
        if policy == "fsdp":
            saved = own["all_gather"] - one["all_gather"]
            assert 0 <= saved <= 4 * 2 * 2 * 4, recipe
            assert "all_reduce" not in one


def test_tied_weights_and_one_rank() -> None:
    model = nn.ModuleList([hybridq.Linear(64, 64, bias=False) for _ in range(2)])
    model[1].weight = model[0].weight
    made = plan(model, "mxfp8", Sharding(2))
    assert made.num_params == 64 * 64
    assert plan(model, "mxfp8", Sharding(1)).traffic == ()
    assert "0.520" in str(made.table())  # 33/64, and 16 bytes of each rank


def test_units_are_what_outermost_containers_hold() -> None:
    block = nn.ModuleDict({"up": hybridq.Linear(64, 64, bias=False)})  # not a unit of its own
    for container in (nn.ModuleList([block]), nn.ModuleDict({"0": block})):
        model = nn.Module()
        model.layers, model.head = container, hybridq.Linear(64, 64, bias=False)
        twice = 2 * 64 * 64 * 33 // 32
        moved = by_purpose(plan(model, "mxfp8", Sharding(2)))
        # The head stays gathered; its columnwise plane is gathered when the backward wants it.
        assert moved["weights, forward"] == twice + 2 * 2 * 16  # and what each rank computes
        assert moved["weights, backward"] == twice + 2 * 2 * 16
        held = {one.what: one.nbytes for one in plan(model, None, Sharding(2)).memory}
        whole = plan(model, None, Sharding(2, units=("layers.0", "head"))).memory
        assert (
            held["gathered parameters"]
            == {one.what: one.nbytes for one in whole}["gathered parameters"]
        )


def test_planning_changes_nothing() -> None:
    model = hybridq.convert(nn.Sequential(nn.Linear(8, 8)))
    before = dict(model.named_parameters())
    plan(model, "nvfp4", Sharding(2))
    after = dict(model.named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items())


def test_the_table_of_the_page_is_made_of_plans() -> None:
    page = (ROOT / "docs" / "guides" / "fsdp2.md").read_text()
    assert "\n".join(distributed_table.rows()) in page, (
        "python tests/helpers/distributed_table.py prints it"
    )


# ---- shapes


def test_a_shape_counts_its_parameters() -> None:
    shape = DenseShape(2, 64, 96, 4, 2, 50)
    assert shape.num_params == sum(p.numel() for p in shape.model().parameters())
    published = DenseShape.of(layers=80, hidden=8192)
    assert published.num_params == 70_553_706_496  # Llama 3 70B


@pytest.mark.parametrize("params", [1e9, 8e9, 70e9, 405e9])
def test_a_shape_of_a_number_of_parameters_has_about_that_many(params) -> None:
    assert DenseShape.of(params).num_params == pytest.approx(params, rel=0.02)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: DenseShape.of(), "give params, or layers and hidden, got neither"),
        (lambda: DenseShape.of(7e9, layers=3), "params give the number of layers, got both"),
        (lambda: DenseShape.of(1000), "must be enough for a layer"),
        (lambda: DenseShape.of(float("nan")), r"at least 1 and at most 1e\+15, got nan"),
        (lambda: DenseShape.of(float("inf")), r"at least 1 and at most 1e\+15, got inf"),
        (lambda: DenseShape.of(1e30), r"at least 1 and at most 1e\+15, got 1e\+30"),
        (lambda: DenseShape(10**9, 8192, 8192, 8, 8), "at most 1e.15 parameters, got 4"),
        (lambda: DenseShape(1, 64, 64, 3, 1), "hidden must be a multiple of heads"),
        (lambda: DenseShape(0, 64, 64, 4, 1), "layers must be an int of at least 1, got 0"),
        (lambda: Sharding(0), "world must be an int of at least 1, got 0"),
        (lambda: Sharding(2, "zero"), "policy must be one of fsdp, hsdp, ddp, got 'zero'"),
        (lambda: Sharding(8, "hsdp"), "shard goes with policy hsdp"),
        (lambda: Sharding(8, "fsdp", 4), "shard goes with policy hsdp"),
        (lambda: Sharding(8, "hsdp", 3), "shard must divide world, got 3 with world 8"),
        (lambda: plan(nn.Linear(2, 2), "nope", Sharding(2)), "nope"),
        (lambda: plan(nn.Linear(2, 2), None, Sharding(2), tokens=-1), "tokens must be an int"),
        (lambda: plan(nn.Linear(2, 2), None, Sharding(2), optimizer="lion"), "one of adamw"),
    ],
)
def test_what_cannot_be_planned_is_refused(make, text) -> None:
    with pytest.raises(ValueError, match=text):
        make()


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(TypeError, match=r"plan: model must be an nn.Module, got int"):
        plan(3, None, Sharding(2))
    prepared = hybridq.distributed.prepare_fsdp2(nn.ModuleList([hybridq.Linear(8, 8)]))
    with pytest.raises(ValueError, match="planned before prepare_fsdp2, got a prepared one"):
        plan(prepared, None, Sharding(2))
    with pytest.raises(TypeError, match=r"plan: sharding must be a Sharding, got int"):
        plan(nn.Linear(2, 2), None, 2)


# ---- counting


@needs_gloo
def test_collectives_are_counted_by_their_larger_side(tmp_path) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/s", rank=0, world_size=1)
    try:
        x = torch.ones(6)
        with count_traffic() as traffic:
            dist.all_reduce(x)
            dist.all_gather_into_tensor(torch.empty(6), x)
            dist.all_gather([torch.empty(6)], x)
            dist.reduce_scatter_tensor(torch.empty(6), x)
            dist.all_to_all_single(torch.empty(6), x)
            dist.broadcast(x, 0)
            dist.barrier()
            x + 1
        assert traffic.nbytes_by_kind == {
            "all_reduce": 24,
            "all_gather": 48,
            "reduce_scatter": 24,
            "all_to_all": 24,
            "broadcast": 24,
        }
        assert traffic.calls_by_kind["all_gather"] == 2
        assert traffic.nbytes == 144
        dist.all_reduce(x)
        assert traffic.nbytes == 144
    finally:
        dist.destroy_process_group()


# ---- command line


def invoke(*args: str):
    return CliRunner().invoke(app, ["plan", *args], env={"COLUMNS": "200", "NO_COLOR": "1"})


def test_the_command_prints_the_plan() -> None:
    args = ("--params", "1e9", "--world", "64", "--recipe", "nvfp4")
    result = invoke(*args)
    assert result.exit_code == 0, result.output
    assert "weights, forward" in result.output and "traffic in all" in result.output
    loaded = json.loads(invoke(*args, "--json").output)
    made = plan(DenseShape.of(1e9).model(), "nvfp4", Sharding(64))
    assert loaded["num_params"] == made.num_params == DenseShape.of(1e9).num_params
    assert [row["nbytes"] for row in loaded["traffic"]] == [row.nbytes for row in made.traffic]
    assert loaded["shape"]["hidden"] == DenseShape.of(1e9).hidden
    assert loaded["sharding"]["param_dtype"] == "bfloat16"
    short = ("--dtype", "bfloat16", "--json")
    plain, masters = (
        json.loads(invoke(*args, *short, *more).output) for more in ((), ("--masters",))
    )
    sizes = [{row["what"]: row for row in one["memory"]}["optimizer"] for one in (plain, masters)]
    assert sizes[0]["nbytes"] == sizes[0]["bf16_nbytes"] == sizes[1]["bf16_nbytes"]
    assert sizes[1]["nbytes"] == sizes[0]["bf16_masters_nbytes"] > sizes[0]["nbytes"]


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("--world", "8"), "give params, or layers and hidden"),
        (("--world", "8", "--params", "8e9", "--recipe", "nope"), "nope"),
        (("--world", "8", "--params", "8e9", "--policy", "hsdp"), "shard goes with policy hsdp"),
        (("--world", "8", "--params", "8e9", "--dtype", "int8"), "dtype must be one of"),
    ],
)
def test_bad_options_are_one_clear_message(args, text) -> None:
    result = invoke(*args)
    assert result.exit_code == 2
    assert text in result.output and "Traceback" not in result.output
