"""`make gpu` and the status page without a GPU: the refusal, the order of steps, the tables."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from places import BENCHMARKS, ROOT

sys.path.insert(0, str(BENCHMARKS))

import gpu_facts
import gpu_run
import gpu_status
from gpu_bench import outcomes, plans, prebuilt, result, steps
from gpu_bench.kernels import native_kernels, triton_kernels

import gpu

NO_GPU = "no NVIDIA GPU"


def test_without_a_gpu_there_is_one_line_and_status_two(monkeypatch, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(steps.Run, "steps", lambda *_: pytest.fail("nothing may run"))
    assert gpu_run.main([]) == 2
    out = capsys.readouterr().out
    assert out.count("\n") == 1 and NO_GPU in out
    monkeypatch.setattr(torch.version, "cuda", None)
    assert gpu_run.main([]) == 2 and "without CUDA" in capsys.readouterr().out


def test_what_a_build_needs_is_asked_first(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(gpu_run.shutil, "which", lambda name: None)
    monkeypatch.setattr(gpu_run.sysconfig, "get_paths", lambda: {"include": "/no/such/folder"})
    reason = gpu_run.gpu_reason()
    for name in ("cmake", "ninja", "nvcc", "/no/such/folder/Python.h"):
        assert name in reason


@pytest.fixture
def place(tmp_path) -> plans.Place:
    (tmp_path / "parts").mkdir()
    return plans.Place(
        results=tmp_path / "results",
        parts=tmp_path / "parts",
        outcomes=tmp_path / "outcomes.jsonl",
        site=tmp_path / "site",
        build=tmp_path / "build",
        arch="90a",
    )


# --- plans


def test_everything_builds_for_this_gpu_then_tests_then_measures(place) -> None:
    found = plans.everything(place)
    build = found[0].command
    assert "--config-settings=cmake.define.HYBRIDQ_CUDA_ARCHS=90a-real" in build
    assert {"--no-index", "--no-deps", "--no-build-isolation"} <= {*build}
    names = [step.name for step in found]
    assert names.index("tests each_kernel") == 1 and names.index("measure cast") > 10
    assert found[0].is_needed and not any(step.is_needed for step in found[1:])
    assert {name.removeprefix("measure ") for name in names if name.startswith("measure ")} == {
        *gpu.SECTIONS
    }


def test_every_file_of_tests_and_every_part_of_the_facts_is_in_a_plan() -> None:
    files = {file.stem.removeprefix("test_gpu_") for file in (ROOT / "tests/gpu").glob("test_*.py")}
    assert {*plans.TEST_FILES} == files
    assert {*plans.FACTS} == {*gpu_facts.PARTS} and {*plans.SECTIONS} == {*gpu.SECTIONS}


def test_the_first_hour_is_three_calls_that_leave_nothing_out(place) -> None:
    calls = [plans.PLANS["first", part](place) for part in (1, 2, 3)]
    names = [step.name for call in calls for step in call]
    for name in plans.TEST_FILES:
        assert f"tests {name}" in names
    for name in plans.FACTS:
        assert f"facts {name}" in names or name == "casts"
    assert names[:4] == [
        *("build", "tests each_kernel"),
        *("compute-sanitizer memcheck", "compute-sanitizer racecheck"),
    ]
    assert sum(name.startswith("ncu ") for name in names) == 3
    assert sum("warps" in name and name.startswith("measure") for name in names) == 3
    assert all(len({step.name for step in call}) == len(call) for call in calls)
    for call in calls:
        assert call[0].name == "build" and all(step.seconds <= 240 for step in call)


def test_a_prebuilt_library_is_of_these_sources(place, tmp_path, monkeypatch) -> None:
    good = tmp_path / prebuilt.file_name("90a")
    assert "must be a file" in prebuilt.reason(good, "90a")
    good.write_bytes(b"")
    assert prebuilt.reason(good, "90a") is None
    assert prebuilt.file_name("80") in prebuilt.reason(good, "80")
    other = tmp_path / "kernels.a"
    other.write_bytes(b"")
    assert "make gpu-library" in prebuilt.reason(other, "90a")
    define = f"--config-settings=cmake.define.HYBRIDQ_CUDA_LIBRARY={good}"
    with_it = replace(place, prebuilt=good)
    assert define in plans.build(with_it).command
    assert define not in plans.build(with_it, warps=8).command  # that one has other bounds
    folder = tmp_path / "tree" / "csrc" / "cuda"
    folder.mkdir(parents=True)
    before = prebuilt.sources(tmp_path / "tree")
    (folder / "a.h").write_text("1")
    after = prebuilt.sources(tmp_path / "tree")
    (folder / "a.h").write_text("2")
    assert len({before, after, prebuilt.sources(tmp_path / "tree")}) == 3


# --- steps


def _python(text: str, name: str = "one", seconds: float = 30.0, **rest) -> steps.Step:
    return steps.Step(name, (sys.executable, "-c", text), seconds, **rest)


def _run(tmp_path, **rest) -> steps.Run:
    options = {"root": tmp_path, "seconds": 60.0, "about": {"plan": "x"}, "environment": {}}
    return steps.Run(tmp_path / "out", **{**options, **rest})


def _kept(tmp_path) -> dict:
    return json.loads((tmp_path / "out" / "run.json").read_text())


def test_how_each_step_ended_is_told(tmp_path, capsys) -> None:
    run = _run(tmp_path, environment={"WORD": "spoken"})
    is_good = run.steps(
        [
            _python("import os; print(os.environ['WORD'])"),
            _python("raise SystemExit(3)", "two"),
            _python("pass", "three", reason="there is no ncu"),
            steps.Step("four", ("/no/such/program",), 5.0),
        ]
    )
    assert not is_good
    found = [(step["name"], step["what"], step["detail"]) for step in _kept(tmp_path)["steps"]]
    assert found[:3] == [
        ("one", "ok", ""),
        ("two", "failed", "exit status 3"),
        ("three", "left out", "there is no ncu"),
    ]
    assert found[3][:2] == ("four", "failed") and "/no/such/program" in found[3][2]
    assert "spoken" in run.log.read_text() and _kept(tmp_path)["state"] == "done"
    assert "two: failed" in capsys.readouterr().out


def test_a_step_that_takes_too_long_is_ended_with_its_children(tmp_path) -> None:
    shell = ("sh", "-c", "sleep 600 & echo $!; wait")
    run = _run(tmp_path)
    for seconds in (0.2, 1.0, 5.0, 25.0):  # as many as the shell needs to begin
        assert run.step(steps.Step("one", shell, seconds)).what == "ended"
        last = run.log.read_text().split()[-1]
        if last.isdigit():
            break
    assert _is_gone(int(last))


def _is_gone(pid: int) -> bool:
    """Whether a process that was sent SIGKILL ends; a zombie has."""
    stat = Path(f"/proc/{pid}/stat")
    while stat.exists():
        try:
            if stat.read_text().split()[2] == "Z":
                break
        except (ProcessLookupError, FileNotFoundError):
            break
        os.sched_yield()
    return True


def test_a_needed_step_ends_the_run_and_no_time_leaves_out(tmp_path) -> None:
    now = [0.0]
    run = _run(tmp_path, seconds=10.0, clock=lambda: now[0])
    run.steps([_python("raise SystemExit(1)", "build", is_needed=True), _python("pass", "tests")])
    assert [step["name"] for step in _kept(tmp_path)["steps"]] == ["build"]
    now[0] = 8.0
    assert run.step(_python("pass", least=5.0)).detail == "no time left"


def test_whatever_ends_the_run_what_was_done_is_there(tmp_path) -> None:
    """SIGKILL in the second step: the first one's end, the log and the second's lines are kept."""
    program = f"""
import sys
sys.path.insert(0, {str(ROOT / "benchmarks")!r})
from pathlib import Path
from gpu_bench.steps import Run, Step
run = Run(Path({str(tmp_path / "out")!r}), Path("."), 60, {{}}, {{}})
py = sys.executable
run.steps([
    Step("first", (py, "-c", "print('measured 1')"), 30),
    Step("second", (py, "-c", "print('measured 2')"), 30),
    Step("third", (py, "-c", "import time, os; print('at', os.getpid(), flush=True); "
                             "time.sleep(600)"), 30),
])
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.DEVNULL)
    log = tmp_path / "out" / "log.txt"
    while "at " not in (text := log.read_text() if log.exists() else ""):
        assert process.poll() is None, text
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = _kept(tmp_path)
    assert [step["name"] for step in kept["steps"]] == ["first", "second"]
    assert kept["state"] == "in third" and "measured 1" in text and "measured 2" in text
    pid = int(text.split("at ")[-1].split()[0])
    assert _is_gone(pid)  # a step ends with its parent


# --- tests' outcomes


LINES = [
    {"test": "tests/gpu/test_gpu_each_kernel.py::a", "outcome": "begun"},
    {
        "test": "tests/gpu/test_gpu_each_kernel.py::a",
        "outcome": "passed",
        "seconds": 1.5,
        "text": "",
        "properties": {"kernel": "EncodeTile"},
    },
    {
        "test": "tests/gpu/test_gpu_kernels.py::b[1]",
        "outcome": "failed",
        "seconds": 0.5,
        "text": "Traceback\nE   bytes differ",
        "properties": {},
    },
    {
        "test": "tests/gpu/test_gpu_linear.py::c",
        "outcome": "skipped",
        "seconds": 0.0,
        "text": "needs two GPUs",
        "properties": {},
    },
    {"test": "tests/gpu/test_gpu_linear.py::hangs", "outcome": "begun"},
]


def _lines(file: Path, lines: list[dict], tail: str = "") -> Path:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)
    return file


def test_what_pytest_left_is_read(tmp_path) -> None:
    tests = outcomes.read(_lines(tmp_path / "o.jsonl", LINES, '{"test": "cut off'))
    found = outcomes.counts(tests, True)
    assert (found["passed"], found["failed"], found["skipped"]) == (1, 2, 1)
    assert found["failures"] == [
        "tests/gpu/test_gpu_kernels.py::b[1]",
        "tests/gpu/test_gpu_linear.py::hangs",
    ]
    assert found["kernels"] == {"EncodeTile": "passed"} and found["is_complete"] is True
    late = [*LINES[:1], {**LINES[3], "text": "no time left"}]
    assert not outcomes.counts(outcomes.read(_lines(tmp_path / "p.jsonl", late)), True)[
        "is_complete"
    ]
    assert outcomes.read(tmp_path / "none.jsonl") == {}
    outcomes.write_junit(tests, tmp_path / "tests.xml")
    suite = ElementTree.parse(tmp_path / "tests.xml").getroot()
    assert (suite.get("tests"), suite.get("failures")) == ("4", "2")
    failure = suite.find("testcase/failure")
    assert failure.get("message") == "E   bytes differ" and "Traceback" in failure.text
    assert suite.find("testcase").get("classname") == "tests.gpu.test_gpu_each_kernel"


@pytest.mark.more
def test_pytest_writes_each_outcome_as_it_comes(tmp_path) -> None:
    file = tmp_path / "o.jsonl"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu"]
    command += ["tests/gpu/test_gpu_streams.py", f"--gpu-outcomes={file}"]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    tests = outcomes.read(file)
    if torch.cuda.is_available():
        return
    assert len(tests) == 4 and {test["outcome"] for test in tests.values()} == {"skipped"}
    assert all("needs an NVIDIA GPU" in test["text"] for test in tests.values())


def test_what_the_steps_leave_is_put_together_after_each(place, monkeypatch, tmp_path) -> None:
    """Two processes that measured, one that was killed, and tests: one result of all."""
    monkeypatch.setattr(gpu_run, "RESULTS", tmp_path / "kept")
    place.results.mkdir()
    keeper = gpu_run.Keeper(place, "make gpu")
    for number, name in enumerate(("cast", "gemm")):
        made = _made()
        made["cases"] = [made["cases"][number]]
        result.save(made, [place.parts / "bench" / name])
        _lines(place.outcomes, LINES[: 2 + number])
        what = "ended" if number else "ok"
        keeper(steps.Outcome(f"measure {name}", what, "", 1.0))
        (file,) = place.results.glob("gpu-*.json")
        whole = json.loads(file.read_text())
        assert result.check(whole) == [] and len(whole["cases"]) == 1 + number
        assert whole["tests"]["passed"] == 1 and whole["tests"]["failed"] == number
        assert (tmp_path / "kept" / file.name).read_text() == file.read_text()
        assert (place.results / "tests.xml").exists()
    facts = {**_made(), "facts": {"copy": {"4 MB": 1.0}}}
    result.save(facts, [place.parts / "facts" / "copy"], "gpu-facts")
    keeper(steps.Outcome("tests gemm", "ended", "after 60 s", 60.0))
    (file,) = place.results.glob("gpu-facts-*.json")
    assert json.loads(file.read_text())["facts"] == {"copy": {"4 MB": 1.0}}
    assert json.loads((place.results / "tests.json").read_text())["is_complete"] is False


# --- the status page


def _rows(text: str) -> dict[str, tuple[str, ...]]:
    return gpu_status._known(text)


def test_the_page_has_a_row_for_every_kernel_and_no_other() -> None:
    page = gpu_status.PAGE.read_text()
    assert gpu_status.fill(page, []) == page, "run python benchmarks/gpu_status.py"
    names = {*native_kernels(), *triton_kernels(), *gpu_status.gemm_backends()}
    assert {*_rows(page)} == {f"`{name}`" for name in names}
    assert len(native_kernels()) >= 16


def test_every_kernel_has_a_case_on_a_gpu() -> None:
    file = ROOT / "tests" / "gpu" / "test_gpu_each_kernel.py"
    module_spec = importlib.util.spec_from_file_location("each_kernel", file)
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    assert {*native_kernels()} == {*module.CALLS}


def _made(**tests) -> dict:
    """A result with invented figures, of a machine that does not exist."""
    case = {
        "section": "cast",
        "name": "encode mxfp8 row",
        "shape": [8, 8],
        "dtype": "bfloat16",
        "time_us": 1.0,
        "low_us": 1.0,
        "high_us": 1.0,
        "rounds": 1,
        "buffers": 1,
        "baseline": "copy",
        "ratio": 0.5,
        "goal": 0.9,
        "floor_us": None,
        "predicted_us": None,
        "formula": "",
        "nbytes": 1,
        "tb_per_s": 1.0,
        "tflops": None,
        "host_limited": False,
        "is_headline": True,
        "backend": "",
        "kernels": {"EncodeTile": 1.0},
        "note": "",
    }
    other = {**case, "name": "encode nvfp4 row", "ratio": 0.25}
    other["kernels"] = {"EncodeTile": 0.6, "AmaxAlong": 0.4}
    gemm = {**case, "section": "gemm", "backend": "torch", "baseline": "bf16 randn", "kernels": {}}
    known = {"passed": 3, "failed": 0, "skipped": 0, "failures": [], "is_complete": True}
    return {
        "schema": result.SCHEMA,
        "date": "2000-01-01T00:00:00",
        "command": "",
        "machine": {"name": "No such GPU", "device": "cuda"},
        "versions": {},
        "cases": [case, other, gemm],
        "left_out": [],
        "tests": {**known, "kernels": {"EncodeTile": "passed"}, **tests},
    }


def test_a_result_fills_the_rows_of_what_ran() -> None:
    # As it was before anything had run.
    page = re.sub(r"^\| `.*\n", "", gpu_status.PAGE.read_text(), flags=re.MULTILINE)
    made = _made()
    assert result.check(made) == []
    rows = _rows(gpu_status.fill(page, [made]))
    where = "No such GPU, 2000-01-01"
    assert rows["`EncodeTile`"][2:] == (where, "yes", "0.25 to 0.50 (2 cases)")
    assert rows["`AmaxAlong`"][2:] == (where, "not tested", "")
    assert rows["`Swizzle`"][2] == gpu_status.NEVER
    assert rows["`torch`"][2:] == (where, "yes", "0.50 (1 case)")
    again = gpu_status.fill(gpu_status.fill(page, [made]), [])
    assert _rows(again) == rows, "an older result was forgotten"


def test_failures_are_told_in_the_rows() -> None:
    page = gpu_status.PAGE.read_text()
    failed = _made(kernels={"EncodeTile": "failed"}, failed=1, failures=["x.test_gpu_gemm::y"])
    rows = _rows(gpu_status.fill(page, [failed]))
    assert rows["`EncodeTile`"][3] == "no" and rows["`torch`"][3] == "1 failures"
    other = _made(failed=2, failures=["t.test_gpu_kernels::x", "t.test_gpu_kernels::y"])
    rows = _rows(gpu_status.fill(page, [other]))
    assert rows["`EncodeTile`"][3] == "its own case; 2 failures in all"


def test_a_dry_run_fills_nothing(tmp_path, capsys) -> None:
    made = _made()
    made["machine"]["device"] = "cpu"
    file = tmp_path / "dry.json"
    file.write_text(json.dumps(made))
    assert gpu_status.main([str(file)]) == 1 and "dry run" in capsys.readouterr().out
    page = tmp_path / "page.md"
    page.write_text(gpu_status.PAGE.read_text())
    made["machine"]["device"] = "cuda"
    file.write_text(json.dumps(made))
    assert gpu_status.main([str(file), f"--page={page}"]) == 0
    assert "No such GPU" in page.read_text()
