"""One question, one answer: calls, `explain` and `doctor` read the same Decision."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import hybridq
from hybridq.formats import PlaneSpec
from hybridq.kernels import (
    CPU,
    REFERENCE,
    Backend,
    Chip,
    DeviceSupport,
    OpQuery,
    backends,
    choose,
    register_backend,
    select,
    together,
    unregister_backend,
)
from hybridq.kernels.choice import OPERATIONS, registry
from hybridq.tensor.functional import explain_query
from places import ROOT

MXFP8, NVFP4 = PlaneSpec.parse("mxfp8"), PlaneSpec.parse("nvfp4")
PAIR = OpQuery("encode", "cpu", torch.bfloat16, MXFP8, NVFP4)


def only_rows(query: OpQuery) -> str | None:
    return None if query.col is None else "makes rowwise planes only"


#: Asked first of all, and takes half of what an encode may be.
ROWS = Backend(
    "rows",
    only_rows,
    {"encode": REFERENCE.ops["encode"]},
    devices=DeviceSupport(("cpu",)),
    priority=100,
)


def test_nobody_but_the_registry_asks_a_backend() -> None:
    """Whoever asked for himself could come to another answer."""
    asked = {"answer", "supports", "leaves"}
    source, seen = ROOT / "src" / "hybridq", 0
    for file in source.rglob("*.py"):
        parts = file.relative_to(source).parts
        if "choice" in parts or "conformance" in parts:
            continue  # adapters of a conformance suite have a `supports` of their own
        seen += 1
        calls = [
            node.func.attr
            for node in ast.walk(ast.parse(file.read_text()))
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and getattr(node.func.value, "id", "") != "core"  # the compiled one's own question
        ]
        assert not asked & set(calls), file
    assert seen > 100


@pytest.mark.parametrize("forced", [None, "reference"])
def test_a_call_and_its_explanation_ask_the_same(forced: str | None) -> None:
    """`explain` after the call chooses nothing anew: each of its questions was the call's."""
    ends = torch.tensor([3, 8], dtype=torch.int32)
    with hybridq.backend(forced):
        registry.forget_choices()
        t = hybridq.quantize(torch.randn(8, 64, dtype=torch.bfloat16), "mxfp8", columnwise="nvfp4")
        w = hybridq.quantize(torch.randn(8, 64, dtype=torch.bfloat16), "mxfp8")
        t.dequantize()
        torch.ops.hybridq.amax(t.dequantize(), "nvfp4", "rowwise")
        torch.ops.hybridq.transpose(torch.zeros(4, 4, dtype=torch.uint8), 4, 4, 8)
        hybridq.gemm(t, w)
        hybridq.grouped_gemm(t, [w, w], ends)
        before = registry._choose.cache_info().misses, registry._together.cache_info().misses
        assert min(before) > 0
        for op, a, b in (
            ("encode", "mxfp8", "nvfp4"),
            ("encode", "mxfp8", None),
            ("decode", "mxfp8", None),
            ("amax", "nvfp4", None),
            ("gemm", "mxfp8", "mxfp8"),
            ("grouped_gemm", "mxfp8", "mxfp8"),
        ):
            hybridq.explain(op, a, b)
        hybridq.explain("transpose", dtype=torch.uint8)
        after = registry._choose.cache_info().misses, registry._together.cache_info().misses
    pair = 1  # of both planes, which a call asks only together
    assert after == (before[0] + pair, before[1])


@pytest.fixture
def ran(registries: None) -> list[tuple[str, str]]:
    """What runs, as (operation, backend): every function of every backend notes itself."""
    seen: list[tuple[str, str]] = []

    def noting(op: str, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            seen.append((op, name))
            return function(*args, **options)

        return run

    for backend in backends():
        ops = {op: noting(op, backend.name, run) for op, run in backend.ops.items()}
        # Prepared ways go past them.
        plain = replace(backend, ops=ops, decoder=None, multiplier=None, encoder=None)
        register_backend(replace(plain, updates_amax=False))
    return seen


@pytest.mark.parametrize("forced", [None, "cpu", "torch", "reference"])
def test_what_is_explained_is_what_runs(forced: str | None, ran: list[tuple[str, str]]) -> None:
    x = torch.randn(8, 64, dtype=torch.bfloat16)
    ends = torch.tensor([3, 8], dtype=torch.int32)
    norm = (torch.ones(64), None, 1e-5, "RMSNorm", False)
    ops = torch.ops.hybridq
    with hybridq.backend(forced):
        planes = ops.encode(x, "mxfp8", "")
        operands = (planes, "mxfp8", 8, planes, "mxfp8", 8, 64)
        stack = [torch.stack([one, one]) for one in planes]
        groups = (planes, "mxfp8", [8, 64], stack, "mxfp8", [8, 64], ends, 8)
        listed = (planes, "mxfp8", [8, 64], [*planes, *planes], "mxfp8", [8, 64], ends, 8)
        out = {"out_dtype": torch.bfloat16}
        runs: dict[str, Callable[[], Any]] = {
            "encode": lambda: ops.encode(x, "mxfp8", "nvfp4"),
            "map_encode": lambda: ops.norm_encode(x, *norm, "mxfp8", "nvfp4"),
            "encode_many": lambda: ops.encode_many([x], "mxfp8", "nvfp4"),
            "encode_ragged": lambda: ops.encode_ragged(x, ends, "mxfp8", "nvfp4"),
            "decode": lambda: ops.decode(planes, "mxfp8", 8, 64, torch.bfloat16),
            "amax": lambda: ops.amax(x, "nvfp4", "rowwise"),
            "gemm": lambda: ops.gemm(*operands, **out),
            "grouped_gemm": lambda: ops.grouped_gemm(*groups, is_stack=True, **out),
            "grouped_loop": lambda: ops.grouped_gemm(*listed, is_stack=True, **out),
        }
        for op, run in runs.items():
            second = {"gemm": MXFP8, "grouped_gemm": MXFP8, "grouped_loop": MXFP8}.get(op, NVFP4)
            first = NVFP4 if op == "amax" else MXFP8
            pair = (first, None if op in ("decode", "amax") else second)
            query = OpQuery(op, "cpu", torch.bfloat16, *pair)
            told = explain_query(query)
            ran.clear()
            run()
            whole = {name for what, name in ran if what == op}
            parts = {name for what, name in ran if what in {one.op for one in query.parts()}}
            assert "+" not in told.chosen and told.error == "", op
            assert {told.chosen} == (whole or parts), (op, ran)


def test_together_is_the_backend_of_all_parts() -> None:
    whole = together(PAIR, PAIR.parts())
    assert whole.chosen is CPU and whole.error == ""
    with hybridq.backend("reference"):
        assert together(PAIR, PAIR.parts()).chosen is REFERENCE
        fused = PAIR.of_op("map_encode")
        found = together(fused, fused.parts())
        assert found.chosen is None and "reference: has no map_encode" in found.error
    with hybridq.backend("cuda"):
        found = together(PAIR, PAIR.parts())
        assert found.chosen is None and "the forced backend 'cuda' cannot" in found.error
    found = together(PAIR, [])
    assert found.chosen is None and "there are no parts" in found.error


def test_planes_of_two_backends_are_made_one_by_one(registries: None) -> None:
    """No backend does both, so each does its own; that is what is explained, and the bits stay."""
    x = torch.randn(8, 64, dtype=torch.bfloat16)
    expected = torch.ops.hybridq.encode(x, "mxfp8", "nvfp4")
    norm = (torch.ones(64), None, 1e-5, "RMSNorm", False)
    fused = torch.ops.hybridq.norm_encode(x, *norm, "mxfp8", "nvfp4")
    register_backend(ROWS)
    found = together(PAIR, PAIR.parts())
    assert found.chosen is None and "the parts run by rows and cpu" in found.error
    for made in (
        torch.ops.hybridq.encode(x, "mxfp8", "nvfp4"),
        torch.ops.hybridq.encode_many([x], "mxfp8", "nvfp4"),
    ):
        assert all(map(torch.equal, made, expected))
    assert all(map(torch.equal, torch.ops.hybridq.norm_encode(x, *norm, "mxfp8", "nvfp4"), fused))
    told = hybridq.explain("encode", "mxfp8", "nvfp4")
    assert told.chosen == "rows + cpu" and told.error == ""
    assert told.notes == ("rowwise by rows", "columnwise by cpu")
    assert str(told).count("->") == 3  # the call's own, and both
    assert hybridq.explain("encode", "mxfp8").chosen == "rows"
    assert hybridq.explain("encode", "mxfp8", "bf16").chosen == "rows"  # the other is a copy
    assert hybridq.explain("encode", None, "nvfp4").chosen == "cpu"


@pytest.mark.parametrize("forced", [None, "reference"])
def test_a_plain_plane_is_said_to_be_a_copy(forced: str | None) -> None:
    with hybridq.backend(forced):
        for call in (("encode", "bf16"), ("encode", "mxfp8", "bf16"), ("decode", "bf16")):
            assert "which torch makes whatever backend is chosen" in str(hybridq.explain(*call))
        for call in (("encode", "mxfp8"), ("gemm", "bf16", "mxfp8")):
            assert "is a copy" not in str(hybridq.explain(*call))


def test_a_backend_that_is_registered_may_leave_again(registries: None) -> None:
    register_backend(ROWS)
    query = OpQuery("encode", "cpu", torch.float32, MXFP8)
    assert backends()[0] is ROWS and select(query) is ROWS
    assert unregister_backend("rows") is ROWS
    assert ROWS not in backends() and select(query) is CPU
    with pytest.raises(hybridq.BackendError, match="unregister_backend: must be one of"):
        unregister_backend("rows")
    with hybridq.backend("rows"):
        assert "backend: must be one of" in choose(query).error


def test_the_order_does_not_depend_on_who_came_first(registries: None) -> None:
    for names in (("b", "a"), ("a", "b")):
        for name in names:
            register_backend(replace(ROWS, name=name, priority=0))
        order = [backend.name for backend in backends()]
        built_in = ["cuda", "cpu", "native", "triton", "fold", "row_blocks", "codec", "torch"]
        assert order == [*built_in, "a", "b", "host", "reference"]
        for name in names:
            unregister_backend(name)


def test_an_operation_may_have_a_place_of_its_own(registries: None) -> None:
    first, second = (replace(ROWS, name=name, priority=70 + i) for i, name in enumerate("ab"))
    register_backend(replace(first, op_priorities={"encode": 75}))
    register_backend(second)
    assert [one.name for one in backends()][:2] == ["b", "a"]
    assert [one.name for one in backends("encode")][:2] == ["a", "b"]
    assert select(OpQuery("encode", "cpu", torch.float32, MXFP8)).name == "a"


def test_an_operation_must_be_known() -> None:
    with pytest.raises(ValueError, match=r"ops must be among encode, .*, got enocde"):
        Backend("typo", only_rows, {"enocde": print})
    assert {op for backend in backends() for op in backend.ops} == set(OPERATIONS)


# ---- devices


@pytest.mark.parametrize("backend", backends(), ids=lambda one: one.name)
@pytest.mark.parametrize("kind", ["cpu", "cuda", "xpu", "meta"])
def test_what_a_backend_says_of_devices_is_data(backend: Backend, kind: str) -> None:
    """Elsewhere than on its devices its own code is not even asked, and each op has some."""

    def supports(query: OpQuery) -> str | None:
        asked.append(query.op)
        return None

    asked: list[str] = []
    spied = replace(backend, supports=supports, leaves=None)
    chip = Chip.of(kind, (10, 0) if kind == "cuda" else None)
    for op in backend.ops:
        answer = spied.answer(OpQuery(op, kind, torch.bfloat16, MXFP8, MXFP8, chip=chip))
        own = backend.op_devices.get(op, backend.devices)
        assert (answer.lacks == "device") == (not own.takes(kind)) == (op not in asked)
        assert (answer.reason is None) == (op in asked)
        if answer.lacks:
            assert f"got {kind}" in answer.reason or "got a meta" in answer.reason


@pytest.mark.parametrize(
    ("devices", "kind", "chip", "reason"),
    [
        (DeviceSupport(), "xpu", None, None),
        (DeviceSupport(), "meta", None, "needs data, got a meta tensor"),
        (DeviceSupport(others=("cpu", "cuda")), "mps", None, None),
        (DeviceSupport(others=("cpu", "cuda")), "meta", None, "needs data, got a meta tensor"),
        (DeviceSupport(others=("cpu", "cuda")), "cpu", None, "other than cpu and cuda, got cpu"),
        (DeviceSupport(("cpu",)), "cuda", None, "runs on CPU tensors, got cuda"),
        (DeviceSupport(("cpu", "xpu")), "mps", None, "runs on CPU and XPU tensors, got mps"),
        (DeviceSupport(("cuda",)), "cuda", None, None),
        (DeviceSupport(("cuda",), (9, 0)), "cpu", None, "runs on NVIDIA GPUs, got cpu"),
        (DeviceSupport(("cuda",), (9, 0)), "cuda", None, "compute capability is not known"),
        (DeviceSupport(("cuda",), (9, 0)), "cuda", (8, 9), "needs compute capability 9.0, got"),
        (DeviceSupport(("cuda",), (9, 0)), "cuda", (9, 0), None),
        (DeviceSupport(("cpu", "cuda"), (9, 0)), "cpu", None, None),
    ],
)
def test_reasons_of_devices(devices: DeviceSupport, kind: str, chip, reason: str | None) -> None:
    found = devices.reason(kind, None if chip is None else Chip.of("cuda", chip))
    assert found is None if reason is None else reason in str(found)


def test_one_way_on_a_cpu_whatever_the_sizes() -> None:
    specs, sizes = (MXFP8, MXFP8, "auto"), (1, 2, 3)
    on_cpu = OpQuery("gemm", "cpu", torch.bfloat16, *specs, sizes, Chip.of("cpu"), groups=3)
    assert on_cpu == OpQuery("gemm", "cpu", torch.bfloat16, *specs)
    gpu = Chip.of("cuda", (9, 0))
    on_gpu = OpQuery("gemm", "cuda", torch.bfloat16, *specs, sizes, gpu)
    assert on_gpu.sizes == sizes and on_gpu.chip is gpu
