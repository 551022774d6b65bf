"""`make gpu` and the status page without a GPU: the refusal, the order of steps, the tables."""

from __future__ import annotations

import importlib.util
import json
import sys

import pytest
import torch

from places import BENCHMARKS, ROOT

sys.path.insert(0, str(BENCHMARKS))

import gpu_run
import gpu_status
from gpu_bench import result
from gpu_bench.kernels import native_kernels, triton_kernels

XML = """<?xml version="1.0"?><testsuites><testsuite>
<testcase classname="tests.gpu.test_gpu_each_kernel" name="a"><properties>
<property name="kernel" value="EncodeTile"/></properties></testcase>
<testcase classname="tests.gpu.test_gpu_kernels" name="b">
<failure message="bytes differ"/></testcase>
<testcase classname="tests.gpu.test_gpu_linear" name="c"><skipped message="{}"/></testcase>
</testsuite></testsuites>"""


def test_without_a_gpu_there_is_one_line_and_status_two(monkeypatch, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(gpu_run, "_run", lambda *_: pytest.fail("nothing may run"))
    assert gpu_run.main([]) == 2
    out = capsys.readouterr().out
    assert out.count("\n") == 1 and "no NVIDIA GPU" in out
    monkeypatch.setattr(torch.version, "cuda", None)
    assert gpu_run.main([]) == 2 and "without CUDA" in capsys.readouterr().out


@pytest.fixture
def steps(monkeypatch, tmp_path):
    """`make gpu` on a machine with a GPU whose every command is recorded and none run."""
    ran: list[list[str]] = []
    statuses = {"pip": 0, "pytest": 0, "benchmarks/gpu.py": 0, "benchmarks/gpu_facts.py": 0}

    def run(command: list[str], seconds: float, environment: dict[str, str]) -> int:
        assert seconds > 0
        ran.append(command)
        what = next(name for name in statuses if name in command)
        if what != "pip":
            assert environment["PYTHONPATH"] == str(tmp_path / "build" / "gpu-site")
        return statuses[what]

    monkeypatch.setattr(gpu_run, "gpu_reason", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(gpu_run, "_run", run)
    (tmp_path / "build").mkdir()
    return ran, statuses, [f"--site={tmp_path / 'build' / 'gpu-site'}"]


def test_it_builds_for_this_gpu_then_tests_then_measures(steps, tmp_path) -> None:
    ran, _, site = steps
    assert gpu_run.main([*site, f"--results={tmp_path / 'out'}"]) == 0
    build, tests, bench = ran
    assert "--config-settings=cmake.define.HYBRIDQ_CUDA_ARCHS=90a-real" in build
    assert {"--no-index", "--no-deps", "--no-build-isolation"} <= {*build}
    assert tests[tests.index("-m", 3) + 1] == "gpu" and "tests/gpu" in tests
    folders = [part for part in bench if part.startswith("--results=")]
    assert folders[0].endswith("benchmarks/results") and folders[1].endswith("out")
    (budget,) = (float(part[9:]) for part in bench if part.startswith("--budget="))
    assert gpu_run.BENCHMARKS < budget < gpu_run.TOTAL


def test_failing_tests_do_not_stop_the_benchmarks_but_count(steps) -> None:
    ran, statuses, site = steps
    statuses["pytest"] = 1
    assert gpu_run.main(site) == 1 and len(ran) == 3
    statuses.update({"pytest": 124, "benchmarks/gpu.py": 0})
    assert gpu_run.main(site) == 1 and len(ran) == 6
    statuses.update({"pytest": 0, "benchmarks/gpu.py": 1})
    assert gpu_run.main(site) == 1
    ran.clear()
    statuses["pip"] = 1
    assert gpu_run.main(site) == 1 and len(ran) == 1


def test_facts_need_no_tests(steps) -> None:
    ran, _, site = steps
    assert gpu_run.main([*site, "--facts", "--bench-args=--quick"]) == 0
    assert len(ran) == 2 and ran[1][1] == "benchmarks/gpu_facts.py" and ran[1][-1] == "--quick"


@pytest.mark.parametrize("message,is_complete", [("needs two GPUs", True), ("no time left", False)])
def test_what_pytest_left_is_read(tmp_path, message, is_complete) -> None:
    file = tmp_path / "tests.xml"
    file.write_text(XML.format(message))
    found = gpu_run.read_tests(file)
    assert (found["passed"], found["failed"], found["skipped"]) == (1, 1, 1)
    assert found["failures"] == ["tests.gpu.test_gpu_kernels::b"]
    assert found["kernels"] == {"EncodeTile": "passed"} and found["is_complete"] is is_complete
    assert not gpu_run.read_tests(tmp_path / "none.xml")["is_complete"]


def test_a_command_that_takes_too_long_is_ended() -> None:
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert gpu_run._run(sleep, 1.0, {}) == 124
    assert gpu_run._run([sys.executable, "-c", "raise SystemExit(3)"], 60.0, {}) == 3


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
    page = gpu_status.PAGE.read_text()
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
