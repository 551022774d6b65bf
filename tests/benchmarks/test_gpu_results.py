"""What the benchmarks measure, on a CPU: bytes, goals, the record and its table, whole runs."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from hybridq.formats import PlaneSpec
from places import BENCHMARKS

sys.path.insert(0, str(BENCHMARKS))

import gpu_facts
from gpu_bench import casts, layers, products, result
from gpu_bench.case import encode_goal

import gpu

SIZE = 1024
ELEMENTS = SIZE * SIZE


def spec(text: str) -> PlaneSpec:
    return PlaneSpec.parse(text)


# --- bytes and goals


@pytest.mark.parametrize(
    "row,col,per_element",
    [
        ("mxfp8", None, 2 + 1 + 1 / 32),
        ("mxfp8", "mxfp8", 2 + 2 * (1 + 1 / 32)),
        ("fp8_1x128", None, 2 + 1 + 4 / 128),
        ("fp8_128x128", None, 2 + 1 + 4 / 128**2),
        ("mxfp4", None, 2 + 0.5 + 1 / 32),
        ("mxfp8", "nvfp4", 2 + 2 + 1 + 1 / 32 + 0.5 + 1 / 16),  # the amax needs a second read
    ],
)
def test_bytes_that_an_encode_needs(row, col, per_element) -> None:
    specs = [None if text is None else spec(text) for text in (row, col)]
    found = casts.encode_nbytes(*specs, SIZE, SIZE, torch.bfloat16, with_amax=True)
    amax = 4 * any(s is not None and s.needs_amax for s in specs)
    assert found == per_element * ELEMENTS + amax


def test_a_given_amax_saves_a_read() -> None:
    both = [
        casts.encode_nbytes(spec("nvfp4"), None, SIZE, SIZE, torch.bfloat16, with_amax)
        for with_amax in (True, False)
    ]
    assert both[0] - both[1] == 2 * ELEMENTS
    wide = casts.encode_nbytes(spec("mxfp8"), None, SIZE, SIZE, torch.float32, True)
    assert wide == (4 + 1 + 1 / 32) * ELEMENTS


@pytest.mark.parametrize(
    "row,col,goal",
    [
        ("mxfp8", None, 0.90),
        ("fp8_e4m3", "fp8_e4m3", 0.85),
        ("nvfp4", "nvfp4", 0.85),
        ("nvfp4;sr", "nvfp4;sr;rht=d7e8", 0.70),
        ("mxfp8", "nvfp4;sr;rht=d7e8", 0.70),
        ("nvfp4;rows", None, None),
        ("mxfp4", None, None),
    ],
)
def test_goals_of_encodes(row, col, goal) -> None:
    assert encode_goal(spec(row), None if col is None else spec(col)) == goal


def test_goals_of_products() -> None:
    assert products.product_goal("mxfp8", "mxfp8", "auto", False, 8192) == 1.3
    assert products.product_goal("mxfp8", "mxfp8", "auto", True, 4096) == 1.15
    assert products.product_goal("nvfp4", "mxfp8", "exact", True, 8192) == 0.97
    assert products.product_goal("nvfp4", "mxfp8", "exact", False, 8192) is None
    assert products.product_goal("fp8_1x128", "fp8_128x128", "auto", False, 4096) == 1.5


# --- whole runs


@pytest.fixture(scope="module")
def dry(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("dry")
    assert gpu.main(["--dry-run", "--results", str(folder)]) == 0
    (file,) = folder.iterdir()
    assert file.name.startswith("dry-")
    return json.loads(file.read_text())


@pytest.mark.more
def test_every_case_runs_on_the_cpu(dry) -> None:
    assert result.check(dry) == [] and dry["left_out"] == []
    names = {section: set() for section in gpu.SECTIONS}
    for case in dry["cases"]:
        names[case["section"]].add(case["name"])
    assert {f"encode {name}" for name in casts.pairs()} <= names["cast"]
    assert names["linear"] >= {"nn.Linear", *layers.recipes()}
    assert len(names["gemm"]) > len(products.PAIRS) and names["small_m"] and names["host"]
    for case in dry["cases"]:
        assert case["time_us"] > 0
        assert (case["ratio"] is None) == (case["baseline"] == "")
        assert (case["tb_per_s"] is None) == (case["nbytes"] == 0)


def test_the_table_is_short_and_says_what_is_below_its_goal(dry) -> None:
    text = result.render(dry)
    lines = text.splitlines()
    assert len(lines) <= 94 and len(lines) == len({*lines})
    assert all(len(line) <= 130 for line in lines)
    made = json.loads(json.dumps(dry))
    case = next(c for c in made["cases"] if c["name"] == "encode mxfp8 row")
    for ratio, mark in ((0.95, "ok"), (0.89, "below")):
        case["ratio"] = ratio
        (line,) = (x for x in result.render(made).splitlines() if "encode mxfp8 row" in x)
        assert line.split()[-3:] == [f"{ratio:.2f}", "0.90", mark]
    host = next(c for c in made["cases"] if c["section"] == "host" and c["name"] == "mxfp8")
    host["ratio"] = 1 / 7
    (line,) = (x for x in result.render(made).splitlines() if x.split()[:2] == ["host", "mxfp8"])
    assert line.split()[-3:] == ["7.00", "6.00", "above"]
    made["tests"] = {"passed": 5, "failed": 1, "skipped": 0, "is_complete": False}
    assert result.render(made).endswith(
        "tests: 5 passed, 1 failed, 0 skipped; not finished in time"
    )


@pytest.mark.parametrize(
    "field,value,text",
    [
        ("time_us", float("nan"), "time_us must be finite, got nan"),
        ("time_us", "3", "time_us must be int, got '3'"),
        ("rounds", True, "rounds must be int, got True"),
        ("kernels", None, "kernels must be dict, got None"),
    ],
)
def test_a_record_is_checked(dry, field, value, text) -> None:
    made = json.loads(json.dumps(dry))
    made["cases"][3][field] = value
    assert result.check(made) == [f"case 3: {text}"]
    del made["cases"][3][field]
    assert result.check(made) == [f"case 3: {field} is missing"]
    made["schema"] = 99
    assert result.check(made) == ["result: schema must be 2, got 99"]


def test_no_case_may_be_there_twice(dry) -> None:
    made = json.loads(json.dumps(dry))
    made["cases"].append(made["cases"][0])
    assert len(result.check(made)) == 1 and "twice" in result.check(made)[0]


def test_without_a_gpu_both_programs_say_so(capsys, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for program, name in ((gpu, "gpu"), (gpu_facts, "gpu-facts")):
        assert program.main([]) == 2
        out = capsys.readouterr().out
        assert out.startswith(f"{name}: needs a GPU") and out.count("\n") == 1


@pytest.mark.parametrize("height", [1, 128])
def test_the_operands_of_scaled_products_are_what_cublaslt_takes(height) -> None:
    x = torch.randn(384, 640)
    codes, scale = gpu_facts._blocks(x, height)
    assert codes.shape == x.shape and codes.dtype == torch.float8_e4m3fn
    # 1x128: [M, K / 128], one row after the other along M; 128x128: [K / 128, N / 128], K padded.
    assert tuple(scale.shape) == ((384, 5) if height == 1 else (8, 3))
    assert scale.stride() == ((1, 384) if height == 1 else (1, 8))
    values = gpu_facts._exact(codes, scale, height)
    room = x.abs() * 2.0**-4 + x.abs().max() * 2.0**-9 / 448 * 2  # half a unit, subnormals
    assert bool(((values - x).abs() <= room).all())


def test_facts_are_asked_on_the_cpu_too(tmp_path, capsys) -> None:
    assert gpu_facts.main(["--dry-run", "--results", str(tmp_path)]) == 0
    (file,) = tmp_path.iterdir()
    facts = json.loads(file.read_text())["facts"]
    assert set(facts) == set(gpu_facts.PARTS) and all(facts.values())
    assert "ratio to randn" in capsys.readouterr().out
