"""`hybridq plan --experts`."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from hybridq_cli.app import app

SIZES = ["--layers", "4", "--hidden", "256", "--ffn", "128", "--heads", "4", "--vocab", "512"]


def plan(*options: str) -> str:
    command = ["plan", "--world", "8", *SIZES, "--tokens", "1024", *options]
    result = CliRunner().invoke(app, command, env={"COLUMNS": "300"})
    return f"{result.exit_code} {result.output}"


def test_messages_levels_and_parameters() -> None:
    found = plan("--experts", "32x64", "--top", "4", "--ep", "8", "--dispatch", "mxfp8", "--json")
    made = json.loads(found.removeprefix("0 "))["experts"]
    rows = 4 * 1024 * 4  # layers, tokens, experts of each
    assert [one["nbytes"] for one in made["moved"][:4]] == [rows * (256 + 8)] * 4
    assert made["params"] == 4 * 4 * 3 * 64 * 256 and made["shares"] == [0.125, 0.875, 0.0]
    near = plan("--experts", "32x64", "--ep", "8", "--ranks-per-node", "4", "--imbalance", "1.5")
    assert "12.5% stay, 37.5% go within the node, 50.0% over the network" in near


def test_ranks_with_more_experts_than_others() -> None:
    """Of 10 experts 4 ranks have 3, 3, 3 and 1: three of them receive 3 rows for 2.5."""
    options = ("--experts", "10x64", "--top", "2", "--ep", "4", "--ranks-per-node", "2", "--json")
    made = json.loads(plan(*options).removeprefix("0 "))["experts"]
    assert made["shares"] == [0.3, 0.3, 0.4]
    rows = 1024 * 2 * 12 // 10
    assert made["arrived_nbytes"] == rows * 256 * 2
    assert [one["nbytes"] for one in made["moved"][:4]] == [4 * rows * 256 * 2] * 4
    asked = json.loads(plan(*options, "--imbalance", "1.5").removeprefix("0 "))["experts"]
    assert asked["arrived_nbytes"] == 1024 * 2 * 3 // 2 * 256 * 2


def test_bad_input_is_told() -> None:
    for options, told in (
        (["--experts", "32"], "experts must be as 128x768"),
        (["--experts", "4x64", "--ep", "8", "--top", "2"], "every rank must have one at least"),
        (["--experts", "4x64", "--top", "8"], "top must be at most the experts"),
        (["--experts", "32x64", "--ep", "3"], "ep must divide the ranks, got ep=3 with world=8"),
        (["--experts", "32x64", "--dispatch", "fp8_e4m3"], "scales are of one row each"),
        (["--experts", "32x64", "--ep", "4", "--ranks-per-node", "3"], "ranks_per_node must div"),
        (["--experts", "32x64", "--imbalance", "inf"], "imbalance at least 1, got 1, 1024 and inf"),
        (["--ranks-per-node", "3"], "ranks_per_node must divide world, got 3 with world 8"),
        (["--ep", "8"], "--ep must go with --experts, got it without"),
        (["--top", "8"], "--top must go with --experts"),
        (["--dispatch", "mxfp8"], "--dispatch must go with --experts"),
        (["--imbalance", "1"], "--imbalance must go with --experts"),
        (["--communication", "mxfp8"], "--communication must go with --pp of at least 2"),
        (["--schedule", "zbv", "--tp", "2"], "--schedule must go with --pp of at least 2"),
        (["--sp-communication", "mxfp8"], "--sp-communication must go with --sp of at least 2"),
        (["--sequence-parallel", "--tp", "1"], "--sequence-parallel must go with --tp of at lea"),
    ):
        found = plan(*options)
        assert found.startswith("2 ") and told in found, found
