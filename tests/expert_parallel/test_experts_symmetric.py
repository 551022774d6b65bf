"""Tokens by copies into other ranks' memory: see `experts_symmetric_program.py`."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from hybridq.distributed.collectives import symmetric
from rank_runs import needs_gloo, run

PROGRAM = "experts_symmetric_program.py"


@needs_gloo
def test_two_ranks(tmp_path) -> None:
    names = ("raw", "blocks=few", "flying", "refused", "traffic", "faults", "ordered")
    run(2, tmp_path / "store", *names, program=PROGRAM)


@needs_gloo
def test_four_ranks(tmp_path) -> None:
    names = ("raw", "groups", "flying", "refused", "ordered")
    run(4, tmp_path / "store", *names, program=PROGRAM)


@needs_gloo
@pytest.mark.slow
def test_all_formats_and_what_else_travels(tmp_path) -> None:
    run(2, tmp_path / "two", "blocks=all", "together", program=PROGRAM)
    run(4, tmp_path / "four", "blocks=all", "together", "traffic", "faults", program=PROGRAM)


@needs_gloo
@pytest.mark.slow
def test_one_graph(tmp_path) -> None:
    run(2, tmp_path / "store", "compiled", program=PROGRAM)


@needs_gloo
def test_a_rank_that_dies_ends_the_others(tmp_path) -> None:
    run(3, tmp_path / "store", "dies", program=PROGRAM, leaves=2)


class Told:
    """Something whose calls are written down."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls = name, calls

    def __getattr__(self, what: str) -> Any:
        return lambda *given: self.calls.append(
            f"{self.name}.{what} {' '.join(one.name for one in given)}".strip()
        )


def test_copies_run_on_a_stream_behind_what_was_asked_for(monkeypatch) -> None:
    """By names alone, since no GPU is here: the order of waits, events and uses of memory."""
    calls: list[str] = []
    stream, current = Told("own", calls), Told("current", calls)
    payload, made = Told("payload", calls), Told("made", calls)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.cuda, "stream", lambda one: nullcontext(calls.append("enter")))
    monkeypatch.setattr(symmetric, "register_event", lambda x: calls.append(f"event {x.name}"))
    room = symmetric._Room("name", None, torch.device("cuda", 0))
    with room._apart(payload, made):
        calls.append("copies")
    assert calls == [
        "own.wait_stream current",
        "enter",
        "copies",
        "event made",
        "payload.record_stream own",
        "made.record_stream own",
    ]


def test_memory_is_had_before_a_graph_is_captured(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    room = symmetric._Room("name", None, torch.device("cuda", 0))
    with pytest.raises(RuntimeError, match="run what is captured once before"):
        room.takes(100)
    room.size = 100
    assert room.takes(100)


def test_a_graph_alone_says_what_to_import(monkeypatch) -> None:
    from hybridq.kernels.operators import exchange

    monkeypatch.setattr(exchange, "_ways", [])
    with pytest.raises(RuntimeError, match=r"hybridq\.distributed must be imported"):
        torch.ops.hybridq.all_to_all_bytes(torch.zeros(1, dtype=torch.uint8), [1], 0, "0")
