"""The logger `hybridq`: once, by one rank, at the level that the environment names."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from hybridq import _log
from hybridq._log import LOGGER, log_once


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    handlers, level, propagate = list(LOGGER.handlers), LOGGER.level, LOGGER.propagate
    yield
    LOGGER.handlers[:], LOGGER.propagate = handlers, propagate
    LOGGER.setLevel(level)


def test_once(caplog: pytest.LogCaptureFixture) -> None:
    for key in ("a", "a", "b"):
        log_once(key, f"what is said of {key}")
    assert caplog.messages == ["what is said of a", "what is said of b"]
    assert {record.levelname for record in caplog.records} == {"WARNING"}


def test_by_the_first_rank(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RANK", "1")  # of torchrun, before the process group is there
    log_once("a", "not said")
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    log_once("b", "said")
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    log_once("c", "not said")
    assert caplog.messages == ["said"]


@pytest.mark.parametrize(
    ("level", "lines"),
    [
        ("info", ["hybridq INFO: small", "hybridq WARNING: slow"]),
        ("WARNING", ["hybridq WARNING: slow"]),
        ("error", []),
    ],
)
def test_the_level_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], level: str, lines: object
) -> None:
    monkeypatch.setenv("HYBRIDQ_LOG", level)
    _log._set_up()
    LOGGER.info("small")
    log_once("slow", "slow")
    assert capsys.readouterr().err.splitlines() == lines


def test_without_it_programs_decide(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HYBRIDQ_LOG", raising=False)
    before = list(LOGGER.handlers)
    _log._set_up()
    assert LOGGER.handlers == before and LOGGER.level == logging.NOTSET and LOGGER.propagate


def test_an_unknown_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDQ_LOG", "loud")
    with pytest.raises(ValueError, match=r"HYBRIDQ_LOG: must be one of debug, .* got 'loud'"):
        _log._set_up()
