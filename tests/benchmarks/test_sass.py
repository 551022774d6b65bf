"""The count of machine instructions (benchmarks/sass.py), on code written by hand."""

from __future__ import annotations

import importlib.util
import json
import sys
from types import ModuleType

import pytest

from places import BENCHMARKS


@pytest.fixture(scope="module")
def sass() -> ModuleType:
    """Return the script as a module."""
    spec = importlib.util.spec_from_file_location("sass", BENCHMARKS / "sass.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["sass"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def kernel(sass: ModuleType, *lines: str):
    """Return a kernel of these lines, 16 bytes apart as in Volta and later."""
    code = [sass._parse(16 * i, line) for i, line in enumerate(lines)]
    return sass.Kernel("kernel", "sm_90a", code)


def texts(made, path) -> list[str]:
    return [made.code[i].text.split()[0] for i in path.indices]


def test_slow_path_is_left_out(sass: ModuleType) -> None:
    made = kernel(
        sass,
        "LDG.E R0, [R2.64]",
        "@P0 BRA 0x60",
        "IADD3 R0, R0, R0, RZ",
        "IADD3 R0, R0, R0, RZ",
        "STG.E [R2.64], R0",
        "EXIT",
        "FADD R0, R0, R0",
        "STG.E [R2.64], R0",
        "EXIT",
        "NOP",
    )
    assert texts(made, sass.hot_path(made)) == ["LDG.E", "BRA", "FADD", "STG.E", "EXIT"]


def test_path_without_its_anchors_is_no_hot_path(sass: ModuleType) -> None:
    made = kernel(
        sass,
        "@P0 EXIT",
        "@P1 BRA 0x40",
        "LDG.E R0, [R2.64]",
        "STG.E [R2.64], R0",
        "@P2 EXIT",
        "RED.E [R2.64], R0",
        "EXIT",
    )
    # It may end at the guarded EXIT, once all anchors are behind it.
    assert texts(made, sass.hot_path(made)) == ["EXIT", "BRA", "LDG.E", "STG.E", "EXIT"]


def test_loop_with_all_anchors_is_counted_alone(sass: ModuleType) -> None:
    lines = ("MOV R1, RZ", "LDG.E R0, [R2.64]", "IADD3 R1, R1, R0, RZ", "@P0 BRA 0x10", "EXIT")
    made = kernel(sass, *lines)
    path = sass.hot_path(made)
    assert path.is_loop and texts(made, path) == ["LDG.E", "IADD3", "BRA"]
    assert len(sass.hot_path(made, loop=False).indices) == 5
    outside = kernel(sass, *lines[:4], "STG.E [R2.64], R1", "EXIT")
    assert not sass.hot_path(outside).is_loop
    assert sass.hot_path(outside, loop=True).is_loop


def test_convergence_point_returns_to_where_it_was_set(sass: ModuleType) -> None:
    made = kernel(
        sass,
        "BSSY B0, 0x30",
        "@P0 BRA 0x50",
        "BSYNC B0",
        "STG.E [R2.64], R0",
        "EXIT",
        "LDG.E R0, [R2.64]",
        "BSYNC B0",
    )
    assert texts(made, sass.hot_path(made)) == ["BSSY", "BRA", "LDG.E", "BSYNC", "STG.E", "EXIT"]


def test_branch_on_a_condition_among_its_operands_may_fall_through(sass: ModuleType) -> None:
    made = kernel(sass, "BRA.DIV UR4, 0x30", "LDG.E R0, [R2.64]", "EXIT", "EXIT")
    assert texts(made, sass.hot_path(made)) == ["BRA.DIV", "LDG.E", "EXIT"]


@pytest.mark.parametrize(
    ("arch", "registers", "threads", "shared", "warps"),
    [
        ("sm_90a", 32, 256, 0, 64),
        ("sm_90a", 64, 256, 0, 32),
        ("sm_90a", 40, 256, 0, 48),
        ("sm_120a", 32, 256, 0, 48),
        ("sm_89", 32, 256, 32768, 24),
        ("sm_80", 255, 128, 0, 8),
    ],
)
def test_resident_warps(
    sass: ModuleType, arch: str, registers: int, threads: int, shared: int, warps: int
) -> None:
    assert sass.resident_warps(arch, registers, threads, shared)[0] == warps


def test_over_budget_and_local_memory_are_problems(sass: ModuleType) -> None:
    made = kernel(sass, "LDL R0, [R1]", "LDG.E R0, [R2.64]", "EXIT")
    made.registers, made.stack = 40, 8
    entry = sass.Entry("k", "kernel", 1, 256, budget={"sm_90a": 2.5}, registers=32)
    (row,) = sass.count([made], [entry])
    assert [p.split(": ")[1] for p in row.problems()] == [
        "at most 2.5 instructions per element, got 3.000",
        "at most 32 registers, got 40",
    ]
    assert "8 bytes of stack and 1 accesses" in sass.local_memory(made)[0]


def test_too_few_warps_and_loads_that_evict_first_are_problems(sass: ModuleType) -> None:
    made = kernel(sass, "LDG.E.EF.128 R0, [R2.64]", "LDG.E R0, [R2.64]", "EXIT")
    made.registers = 143
    entry = sass.Entry("k", "kernel", 8, 128, shared=9216, warps={"sm_90a": 24}, keeps=True)
    (row,) = sass.count([made], [entry])
    assert [p.split(": ")[1] for p in row.problems()] == [
        "at least 24 resident warps, got 12",
        "must leave its input in the cache, got 1 loads that evict first",
    ]
    made.registers = 80
    assert row.warps() == (24, 64)


def test_update_keeps_what_was_not_counted(sass: ModuleType, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(sass, "BUDGETS", tmp_path / "budgets.json")
    made = kernel(sass, "LDG.E R0, [R2.64]", "EXIT")
    made.registers = 80
    known = {"budget": {"sm_80": 3.0}, "warps": {"sm_80": 12}}
    entry = sass.Entry("k", "kernel", 2, 128, **known, keeps=True)
    sass.update(sass.count([made], [entry]), [entry])
    (line,) = json.loads((tmp_path / "budgets.json").read_text())["kernels"]
    assert line["budget"] == {"sm_80": 3.0, "sm_90a": 1.02}
    assert line["warps"] == {"sm_80": 12, "sm_90a": 24} and line["keeps"] is True


def test_the_table_can_be_read(sass: ModuleType) -> None:
    table = json.loads((BENCHMARKS / "sass_budgets.json").read_text())["kernels"]
    entries = [sass.Entry(**line) for line in table]
    assert len({entry.name for entry in entries}) == len(entries) > 20
