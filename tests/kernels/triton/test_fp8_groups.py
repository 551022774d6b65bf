"""Groups of tokens on FP8 tensor cores: values in Triton's interpreter, and who takes them."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator

import pytest
import torch

import hybridq
import triton_tools
from cuda_costs import counted, fake_gpu
from hybridq.formats import PlaneSpec
from hybridq.kernels import FOLD, OpQuery, choose, described, folded_groups
from hybridq.kernels.choice.arguments import GroupedArgs, GroupedOperand
from hybridq.kernels.choice.registry import forget_choices
from hybridq.kernels.ragged import capacity
from hybridq.kernels.triton import backend
from hybridq.kernels.triton.plan_parts import Launch
from triton_tools import Worker

REASON = triton_tools.MISSING or triton_tools.interpreter_reason()
needs_interpreter = pytest.mark.skipif(REASON is not None, reason=str(REASON))

#: Formats that fold, and FP8 ones that go in with their own scales.
FOLDS = ["mxfp8", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4"]
OWN = ["fp8_e4m3", "fp8_1x128", "fp8_128x128", "float scales"]
PAIRS = [
    *((name, "mxfp8") for name in FOLDS + OWN),
    *(("mxfp8", name) for name in FOLDS[1:] + OWN),
    ("fp8_1x128", "fp8_128x128"),
    ("fp8_e5m2", "mxfp4"),
]
SIZES = [(0, 60, 0, 133, 1), (5,), (0, 0, 0), (129, 128, 127)]


@pytest.fixture(scope="module")
def run() -> Iterator[object]:
    """Calls a function of fp8_group_cases in a process whose Triton is the interpreter."""
    worker = Worker(TRITON_INTERPRET="1", OMP_NUM_THREADS="1")

    def call(function: str, *args: object) -> object:
        return worker("fp8_group_cases", function, *args)

    yield call
    worker.close()


@needs_interpreter
@pytest.mark.thinned(1)
@pytest.mark.parametrize("kind", ["rows", "contraction"])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_values(run, pair: tuple[str, str], sizes: tuple[int, ...], kind: str, seed: int) -> None:
    run(kind, *pair, sizes, seed, {})


@needs_interpreter
@pytest.mark.thinned(1)
@pytest.mark.parametrize("kind", ["rows", "contraction"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_bias_and_addition(run, kind: str, dtype: torch.dtype, seed: int) -> None:
    options = {"add": True, "bias": kind == "rows", "dtype": dtype}
    run(kind, "mxfp8", "mxfp4", (0, 30, 5), seed, options)


@needs_interpreter
@pytest.mark.parametrize(
    ("b_name", "is_stack"), [("fp8_1x128", True), ("fp8_128x128", True), ("fp8_1x128", False)]
)
def test_planes_are_taken_as_they_lie(run, b_name: str, is_stack: bool, seed: int) -> None:
    run("lying", b_name, is_stack, seed)


@needs_interpreter
@pytest.mark.parametrize("kind", ["rows", "contraction"])
def test_a_transform_stays(run, kind: str, seed: int) -> None:
    """Both operands are multiplied as they were transformed, tails included."""
    run(kind, "transformed", "transformed e5m2", (0, 33, 5), seed, {})


@needs_interpreter
@pytest.mark.parametrize("kind", ["rows", "contraction"])
def test_codes_that_a_fold_rounds(run, kind: str, seed: int) -> None:
    """Scales 2^12 apart: off by more than sums in FP32 are, and by no more than a fold may be."""
    options = {"factors": (2.0**12, 0.0)}  # what is large meets zeros
    worst = run(kind, "mxfp8", "fp8_1x128", (40, 0, 130), seed, options)
    assert worst > 1.0, "nothing was folded"


@needs_interpreter
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rows", "contraction"])
def test_every_tile(run, kind: str, seed: int) -> None:
    run("tiles", kind, seed)


@needs_interpreter
def test_squares_that_would_lie_in_two_matrices(run, seed: int) -> None:
    run("squares", seed)


@needs_interpreter
def test_corner_cases(run) -> None:
    run("nothing")
    run("specials")


@needs_interpreter
def test_wrong_offsets_stay_inside(run) -> None:
    run("wrong_offsets_stay_inside")


def chosen(a: str, b: str, chip: str = "sm_90", **more: object) -> str | None:
    """Who multiplies groups of such planes on an NVIDIA GPU."""
    fields = {
        "dtype": torch.bfloat16,
        "sizes": (16384, 4096, 4096),
        "groups": 8,
        "chip": described(chip),
    }
    specs = {"row": PlaneSpec.parse(a), "col": PlaneSpec.parse(b)}
    found = choose(OpQuery("grouped_gemm", "cuda", **(fields | specs | more)))  # type: ignore[arg-type]
    return None if found.chosen is None else found.chosen.name


@pytest.fixture
def with_triton(monkeypatch, chooses_anew) -> None:
    monkeypatch.setattr(backend, "_missing", lambda: None)


@pytest.mark.parametrize("name", FOLDS)
def test_who_takes_groups_of_mx_planes(with_triton, name: str) -> None:
    assert chosen(name, "mxfp8") == chosen("mxfp8", name) == "fold"
    assert chosen(name, "mxfp8", dtype=torch.float32, is_alone=False) == "fold"
    assert chosen(name, "mxfp8", tokens_per_group=128) == "fold"
    assert chosen(name, "mxfp8", tokens_per_group=127) == "triton"  # a stack would be folded
    assert chosen(name, "mxfp8", precision="exact") != "fold"
    # What no fold takes is decoded where groups have many tokens (ADR 207).
    assert chosen(name, "nvfp4") == chosen("nvfp4", name) == "torch"
    assert chosen(name, "nvfp4", tokens_per_group=256) == "torch"
    assert chosen(name, "nvfp4", tokens_per_group=255) == "triton"
    assert chosen(name, "bf16") != "fold"
    # Not measured anywhere: elsewhere than on sm_90 only where it is asked for.
    for other in ("sm_100", "sm_120"):
        assert chosen(name, "mxfp8", other, dtype=torch.float32) == "triton"
        assert chosen(name, "mxfp8", other, dtype=torch.float32, precision="fast") == "fold"
    assert chosen(name, "mxfp8", "sm_89", precision="fast") == "triton"


def test_who_takes_groups_of_fp8_planes(with_triton) -> None:
    """Torch's own scaled product has one scale per row only, and a BF16 result."""
    assert chosen("fp8_e4m3", "fp8_e4m3") == "native"
    assert chosen("fp8_e4m3", "fp8_e4m3", is_alone=False) == "fold"
    assert chosen("fp8_1x128", "fp8_128x128") == "fold"
    assert chosen("fp8_e5m2", "mxfp8_e5m2") != "fold"  # two E5M2 matrices are multiplied exactly
    assert chosen("mxfp8", "mxfp8_32x32") != "fold"
    assert chosen("mxfp8", "mxfp8_32x32", precision="fast") == "fold"
    assert chosen("mxfp8", "mxfp8;rht=d7e8") != "fold"


def test_who_takes_groups_where_the_core_multiplies(monkeypatch) -> None:
    """It takes FP8 with one scale from torch, but for groups of few tokens, which fold leaves."""
    with fake_gpu(monkeypatch):
        forget_choices()
        for tokens, wanted in ((None, "fold"), (128, "fold"), (64, "native")):
            assert chosen("fp8_e4m3", "fp8_e4m3", tokens_per_group=tokens) == wanted
        assert chosen("fp8_1x128", "fp8_128x128") == "fold"
    forget_choices()


def test_what_is_said_of_them(with_triton) -> None:
    text = str(hybridq.explain("grouped_gemm", "mxfp8", "fp8_1x128", device="sm_90"))
    assert "operand a folded to FP32 scales of 1x128; FP8 with one scale per 1x128" in text
    assert "group ends stay on the device" in text and "added error about 1.3e-04" in text


@pytest.mark.parametrize("by_core", [True, False])
@pytest.mark.parametrize("is_stack", [True, False])
def test_what_a_product_asks_of_a_chip(monkeypatch, is_stack: bool, by_core: bool) -> None:
    """A fold of each operand, one launch, and nothing else; no tensor but theirs."""
    launched: list[Launch] = []
    stand_in = types.SimpleNamespace(run=lambda launches, device: launched.extend(launches))
    tokens, groups, n, k = 16384, 8, 4096, 2048
    spec, depth = PlaneSpec.parse("mxfp8"), capacity(tokens, groups)

    def operand(rows: int, cols: int, stack: int | None = None) -> GroupedOperand:
        lead = () if stack is None else (stack,)
        made = [
            torch.empty((*lead, *one.shape), dtype=one.dtype, device="cuda")
            for one in spec.buffers(rows, cols)
        ]
        return GroupedOperand(made, spec, rows, cols, stack is not None, not is_stack)

    with fake_gpu(monkeypatch) as costs:
        if not by_core:
            monkeypatch.setattr(folded_groups, "_by_core", lambda chip: None)
        monkeypatch.setitem(sys.modules, "hybridq.kernels.triton.launch", stand_in)
        if is_stack:
            sides = operand(tokens, k), operand(n, k, groups)
        else:
            sides = operand(n, depth), operand(k, depth)
        ends = torch.empty(groups, dtype=torch.int32, device="cuda")
        starts = torch.empty(groups + 1, dtype=torch.int32, device="cuda")
        args = GroupedArgs(ends, tokens, starts, None, None, torch.bfloat16)
        y, cost = counted(costs, lambda: FOLD.ops["grouped_gemm"](*sides, args))
    assert y.shape == ((tokens, n) if is_stack else (groups, n, k))
    assert not cost.products and not cost.others
    assert cost.kernels == ({"fold": 2, "multiply_blocks": 1} if by_core else {"fold": 2})
    assert cost.allocations == 2 * 3 + 1  # codes, scales and a counter of each; the result
    if not by_core:
        assert [one.kernel for one in launched] == ["grouped_block"]
        assert launched[0].grid == (132 * (4 if is_stack else 2),)  # programs of a multiprocessor
