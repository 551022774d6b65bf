"""`doctor`: routes are those that calls take, and a missing core or GPU is said."""

from __future__ import annotations

import json
import stat
from dataclasses import replace

import pytest
import torch

import hybridq
from hybridq.formats import PlaneSpec
from hybridq.kernels import OpQuery, backends, described, select, together
from hybridq.kernels.cpu import backend as backend_cpu
from hybridq.report import diagnose, machine
from hybridq.report.doctor import _EXAMPLE_OPS

MXFP8 = PlaneSpec.parse("mxfp8")


def test_routes_are_those_that_calls_take():
    found = diagnose(dtype=torch.float32)
    assert found.forced_backend is None
    ops = {route.op for route in found.routes}
    assert {"encode", "decode", "amax", "gemm", "transpose"} <= ops
    names = {e.name for e in hybridq.formats.entries()}
    pairs = {(route.a, route.b) for route in found.routes if route.op == "gemm"}
    assert pairs == {(a, b) for a in names for b in names}
    for route in found.routes:
        if route.op in ("encode", "decode") and route.b == "plain":
            spec = PlaneSpec(hybridq.formats.format(route.a))
            assert route.backend == select(OpQuery(route.op, "cpu", torch.float32, spec)).name


def test_a_forced_backend_is_obeyed(backend):
    found = diagnose()
    assert found.forced_backend == backend
    routes = [r for r in found.routes if r.op == "encode" and r.b == "plain"]
    assert {route.backend for route in routes} == {backend}
    assert backend in str(found)


def dispatched(query: OpQuery) -> str | None:
    """Return the backends that a call takes, or None where it raises."""
    parts = query.parts()
    own = together(query, parts).chosen if len(parts) > 1 or query.op != "encode" else None
    asked = parts if own is None and parts else (query,)
    try:
        names = [own.name] if own is not None else [select(one).name for one in asked]
    except hybridq.BackendError:
        return None
    return " + ".join(dict.fromkeys(names))


@pytest.mark.parametrize("name", [None, *(one.name for one in backends()), "abacus"])
@pytest.mark.parametrize("device", ["cpu", "sm_90"])
def test_doctor_explain_and_dispatch_agree(name: str | None, device: str):
    """Over all operations and formats, with every backend forced, with none and an unknown one."""
    with hybridq.backend(name):
        found = diagnose(device)
        chip = described(device)
        for route in found.routes:
            case = (route.op, route.a, route.b)
            if route.op in ("gemm", "grouped_gemm"):
                told = hybridq.explain(route.op, route.a, route.b, device=device)
                assert told.notes == route.notes, case
            elif route.b == "plain":
                told = hybridq.explain(route.op, route.a, device=device)
            elif not route.a and route.op == "transpose":
                told = hybridq.explain(route.op, device=device)
            elif not route.a:
                query = OpQuery(route.op, chip.kind, torch.bfloat16)
                assert route.backend == dispatched(query), case
                continue
            elif route.op in _EXAMPLE_OPS:
                query = OpQuery(route.op, chip.kind, torch.bfloat16, MXFP8, MXFP8, chip=chip)
                assert route.backend == dispatched(query), case
                continue
            else:
                continue  # an option, which a name cannot say
            assert told.chosen == route.backend and told.forced == name, case
            assert bool(told.error) == (told.chosen is None), case
            specs = [
                PlaneSpec.parse(text).resolve(torch.bfloat16)
                for text in case[1:]
                if text not in ("", "plain")
            ]
            if route.op in ("gemm", "grouped_gemm"):
                sizes = None if device == "cpu" else (1 << 14, 4096, 4096)
                query = OpQuery(route.op, chip.kind, torch.bfloat16, *specs, "auto", sizes, chip)
                if route.op == "grouped_gemm":
                    query = replace(query, tokens_per_group=1 << 14)
            else:
                query = OpQuery(route.op, chip.kind, torch.bfloat16, *specs[: 1 if route.a else 0])
            assert told.chosen == dispatched(query), case


def test_explain_says_that_a_backend_is_forced():
    free = hybridq.explain("gemm", "mxfp8", "mxfp8")
    assert free.forced is None and "forced" not in str(free)
    with hybridq.backend("reference"):
        told = hybridq.explain("gemm", "mxfp8", "mxfp8")
        assert told.chosen == "reference" and "forced backend: reference" in str(told)
    with hybridq.backend("cpu"):
        told = hybridq.explain("gemm", "mxfp8", "mxfp8")
        assert told.chosen == "torch" and "forced backend: cpu, which has no gemm" in str(told)
    with hybridq.backend("cuda"):
        told = hybridq.explain("encode", "mxfp8")
        assert told.chosen is None and "raises: encode: the forced backend 'cuda'" in str(told)


def test_an_unknown_backend_leaves_nothing():
    with hybridq.backend("abacus"):
        found = diagnose()
    assert {route.backend for route in found.routes} == {None}
    assert "none" in str(found)


def test_a_device_without_kernels_falls_to_the_reference_with_reasons():
    routes = [r for r in diagnose("cuda").routes if r.op == "encode"]
    assert {route.backend for route in routes} == {"reference"}
    assert all(("cpu", "runs on CPU tensors, got cuda") in route.refusals for route in routes)
    assert not torch.cuda.is_initialized()


def test_an_architecture_may_be_named():
    """Every pair of formats, each with its path, its added error and why nothing faster runs."""
    found = diagnose("sm_90")
    assert found.device == "cuda sm_90" and found.precision == "auto"
    routes = {(r.op, r.a, r.b): r for r in found.routes}
    fold = routes["gemm", "mxfp8", "mxfp8"]
    assert fold.backend == "fold" and any("added error" in note for note in fold.notes)
    assert routes["gemm", "fp8_1x128", "fp8_128x128"].backend == "native"
    assert routes["gemm", "nvfp4", "nvfp4"].backend == "torch"
    text = str(found)
    assert "gemm on cuda sm_90, bfloat16, precision auto" in text
    assert "native cannot: NVFP4: sm_100 and newer, got cuda sm_90" in text
    exact = diagnose("sm_90", precision="exact")
    assert {r.backend for r in exact.routes if r.op == "gemm"} == {"torch"}
    with pytest.raises(ValueError, match="architecture as sm_90"):
        diagnose("hopper")
    with pytest.raises(ValueError, match="diagnose: precision must be"):
        diagnose("cpu", precision="most")


def test_the_drivers_gpu_is_the_one_asked_about(tmp_path, monkeypatch):
    fake_tool(tmp_path, monkeypatch, "echo 'NVIDIA H200, 9.0, 143771 MiB, 570.86.10'")
    found = diagnose("cuda")
    assert found.device == "cuda sm_90"
    assert not torch.cuda.is_initialized()
    if torch.version.cuda is None:
        assert diagnose().device == "cpu"  # torch cannot use it


def test_a_missing_core_is_said(monkeypatch, chooses_anew):
    monkeypatch.setattr(backend_cpu, "core", None)
    monkeypatch.setattr(backend_cpu, "core_error", "No module named 'hybridq._core'")
    backend_cpu.core_spec.cache_clear()
    chooses_anew()
    try:
        found = diagnose()
        text = str(found)
    finally:
        backend_cpu.core_spec.cache_clear()
    assert not found.core.is_built
    assert "Compiled core: MISSING" in text and "No module named 'hybridq._core'" in text
    assert {r.backend for r in found.routes if r.op == "encode"} == {"reference"}


def test_the_report_has_versions_the_core_and_the_machine():
    found = diagnose()
    text = str(found)
    assert found.versions["hybridq"] == hybridq.__version__
    assert found.versions["torch"] == torch.__version__
    assert found.core.variant in found.core.build["variants"]
    assert found.machine.cores >= 1 and found.machine.threads == torch.get_num_threads()
    for word in ("Versions", "Compiled core", "thread runtime", "features", "gemm on cpu"):
        assert word in text
    assert json.loads(json.dumps(found.as_dict()))["core"]["is_built"] is True
    assert all(line == line.rstrip() for line in text.splitlines())


def test_an_accelerator_of_another_kind_is_named(monkeypatch) -> None:
    assert "accelerator" not in str(diagnose("cpu"))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    found = diagnose("mps")
    assert found.machine.accelerator == "mps" and "mps; --device mps says" in str(found)
    assert "any device but cpu, cuda" in str(found)
    routes = {route.op: route.backend for route in found.routes if route.a == "nvfp4"}
    assert (routes["encode"], routes["gemm"]) == ("host", "torch"), routes


def test_a_cpu_whose_tiles_are_not_used_is_told_so() -> None:
    """A container may forbid the call that asks for them, and products are slow for no reason."""
    found = diagnose()
    tiled = replace(found.machine, flags=("avx512f", "amx_tile", "amx_bf16"))
    for variants, is_said in ((["x86-64-v4"], True), (["x86-64-v4", "x86-64-v4-amx"], False)):
        core = replace(found.core, is_built=True, build={"variants": variants})
        assert ("arch_prctl is allowed" in str(replace(found, core=core, machine=tiled))) is is_said
    plain = replace(found.machine, flags=("avx512f",))
    core = replace(found.core, is_built=True, build={"variants": ["x86-64-v4"]})
    assert "AMX" not in str(replace(found, core=core, machine=plain))


def fake_tool(folder, monkeypatch, body: str) -> None:
    tool = folder / "nvidia-smi"
    tool.write_text("#!/bin/sh\n" + body)
    tool.chmod(tool.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_gpus_come_from_the_drivers_tool(tmp_path, monkeypatch):
    line = "NVIDIA H200, 9.0, 143771 MiB, 570.86.10"
    fake_tool(tmp_path, monkeypatch, f"echo '{line}'; echo '{line}'")
    here = machine.read_machine()
    assert [gpu.name for gpu in here.gpus] == ["NVIDIA H200"] * 2
    assert here.gpus[0].compute_capability == "9.0"
    if torch.version.cuda is None:
        assert "built without CUDA" in here.gpu_note
    assert "GPU 1" in str(diagnose())


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("echo 'no devices were found' >&2; exit 6", "no devices were found"),
        ("exit 0", "lists none"),
    ],
)
def test_no_gpu_has_a_reason(tmp_path, monkeypatch, body, reason):
    fake_tool(tmp_path, monkeypatch, body)
    here = machine.read_machine()
    assert here.gpus == () and reason in here.gpu_note


def test_no_tool_is_a_reason(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no nvidia-smi" in machine.read_machine().gpu_note


def test_slow_products_are_named_with_what_helps(request):
    request.getfixturevalue("slow_products")
    found = diagnose()
    assert [way.dtype for way in found.products if not way.is_fast] == ["bfloat16", "float16"]
    text = " ".join(str(found).split())
    assert "bfloat16 SLOW FP32 product, rounded once to bfloat16" in text
    assert "make such layers hybridq.Linear" in text
    request.getfixturevalue("fast_products")
    text = str(diagnose())
    assert "SLOW" not in text and "torch's bfloat16 product" in text


@pytest.mark.parametrize("shape", [(), (64,)])
def test_a_quantized_vector_or_scalar_is_explained_as_a_matrix_of_one_row(shape):
    t = hybridq.quantize(torch.ones(shape), "fp8_e4m3")
    own = hybridq.quantize(torch.ones(1, t.numel()), "fp8_e4m3")
    assert hybridq.explain("gemm", t, t) == hybridq.explain("gemm", own, own)
