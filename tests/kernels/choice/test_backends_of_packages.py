"""Backends of other packages: found by entry point, chosen, forced, refused, broken, removed."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import hybridq
from hybridq.formats import PlaneSpec
from hybridq.kernels import OpQuery, backends, choose, load_backends, unregister_backend
from hybridq.kernels.choice import registry

#: A backend that multiplies two MXFP8 planes in FP64 and counts how often.
MODULE = """
import torch
from hybridq import reference
from hybridq.kernels import Backend, DeviceSupport

COUNT = []

def supports(query):
    if query.row.format.family != "mxfp8":
        return f"has beads for mxfp8 only, got {query.row.format.family}"
    return None

def gemm(a, b, args):
    COUNT.append(1)
    left, right = (
        reference.decode_plane(one.buffers, one.spec, one.rows, one.cols, torch.float32).double()
        for one in (a, b)
    )
    made = left @ right.t()
    for added in (args.bias, args.accumulate_into):
        made = made if added is None else made + added
    return made.to(args.out_dtype)

BACKEND = Backend("abacus", supports, {"gemm": gemm}, devices=DeviceSupport(("cpu",)))
"""
Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch, registries, chooses_anew) -> Install:
    """A function that installs a small distribution: a module, and a folder that describes it."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_is_loaded", False)

    def make(code: str, value: str = "BACKEND", name: str = "abacus", of: str = "beads") -> None:
        module = f"{of}_for_hybridq"
        (tmp_path / f"{module}.py").write_text(code)
        about = tmp_path / f"{of}-1.2.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {of}\nVersion: 1.2\n")
        (about / "entry_points.txt").write_text(f"[hybridq.backends]\n{name} = {module}:{value}\n")
        monkeypatch.delitem(sys.modules, module, raising=False)
        registry.forget_choices()

    return make


def gemm(a: str = "mxfp8", b: str = "mxfp8") -> torch.Tensor:
    x, w = torch.randn(4, 64), torch.randn(8, 64)
    return hybridq.gemm(hybridq.quantize(x, a), hybridq.quantize(w, b), out_dtype=torch.float32)


def test_a_package_adds_a_backend(install: Install) -> None:
    install(MODULE)
    torch.manual_seed(0)
    usual = gemm()  # the first choice of all finds it
    (own,) = (backend for backend in backends() if backend.name == "abacus")
    assert own.package == "beads 1.2"
    import beads_for_hybridq

    # Its priority is 0: after hybridq's own but those of last resort.
    last = [backend.name for backend in backends()][-4:]
    assert last == ["torch", "abacus", "host", "reference"]
    assert beads_for_hybridq.COUNT == []
    with hybridq.backend("abacus"):
        torch.manual_seed(0)
        made = gemm()
        assert beads_for_hybridq.COUNT == [1]
        assert hybridq.explain("gemm", "mxfp8", "mxfp8").chosen == "abacus"
        # What it cannot, it refuses in its own words; what it has no function for goes elsewhere.
        with pytest.raises(hybridq.BackendError, match="'abacus' cannot: has beads for mxfp8 only"):
            gemm("nvfp4")
        assert hybridq.explain("encode", "nvfp4").chosen == "cpu"
    torch.testing.assert_close(made, usual)
    told = hybridq.explain("gemm", "nvfp4", "mxfp8")
    assert ("abacus", "has beads for mxfp8 only, got nvfp4") in told.reasons
    found = hybridq.report.diagnose("cpu")
    assert [(one.devices, one.package) for one in found.backends if one.name == "abacus"] == [
        ("cpu", "beads 1.2")
    ]
    assert "beads 1.2" in str(found)
    unregister_backend("abacus")
    assert "abacus" not in str(hybridq.explain("gemm", "mxfp8", "mxfp8"))
    with hybridq.backend("abacus"), pytest.raises(hybridq.BackendError, match="must be one of"):
        gemm()


def test_a_higher_priority_comes_first_and_falls_back_with_a_reason(install: Install) -> None:
    install(MODULE.replace('("cpu",))', '("cpu",)), priority=70'))
    gemm()
    assert backends()[0].name == "abacus"
    assert hybridq.explain("gemm", "mxfp8", "mxfp8").chosen == "abacus"
    import beads_for_hybridq

    assert beads_for_hybridq.COUNT == [1]
    gemm("nvfp4")
    assert beads_for_hybridq.COUNT == [1]
    told = hybridq.explain("gemm", "nvfp4", "mxfp8")
    assert told.chosen == "torch" and "has beads for mxfp8 only" in str(told)


@pytest.mark.parametrize(
    ("code", "value", "reason"),
    [
        ("import a_module_that_is_nowhere", "BACKEND", "ModuleNotFoundError"),
        ("raise SystemError('no beads')", "BACKEND", "SystemError: no beads"),
        ("", "BACKEND", "AttributeError"),
        ("def make():\n    raise OSError('no driver')", "make", "OSError: no driver"),
        ("def make():\n    return 3", "make", "must be a Backend named 'abacus', got int"),
        (MODULE.replace('"abacus"', '"other"'), "BACKEND", "got one named 'other'"),
        (MODULE.replace('{"gemm"', '{"gem"'), "BACKEND", "ops must be among"),
    ],
)
def test_one_that_fails_is_named_once(install: Install, code: str, value: str, reason: str) -> None:
    install(code, value)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert gemm().shape == (4, 8)
        gemm("nvfp4")
        load_backends()
    (own,) = (str(one.message) for one in seen if "beads" in str(one.message))
    assert "the backend 'abacus' of the package beads 1.2 could not be loaded" in own
    assert reason in own
    assert reason in str(hybridq.explain("gemm", "mxfp8", "mxfp8"))
    assert reason.split(":")[0] in str(hybridq.report.diagnose("cpu"))
    refusal = pytest.raises(hybridq.BackendError, match="'abacus' cannot: could not be loaded")
    with hybridq.backend("abacus"), refusal:
        gemm()


@pytest.mark.parametrize("what", ["raise ValueError('jammed')", "return 3"])
def test_one_that_fails_when_it_is_asked_is_passed_by(install: Install, what: str) -> None:
    code = MODULE.replace("def supports(query):", f"def supports(query):\n    {what}")
    install(code.replace('("cpu",))', '("cpu",)), priority=70'))
    with pytest.warns(hybridq.HybridQWarning, match="'abacus' of the package beads 1.2: its supp"):
        assert gemm().shape == (4, 8)
    told = hybridq.explain("gemm", "mxfp8", "mxfp8")
    assert told.chosen == "torch" and "its supports failed" in str(told)


def test_an_error_of_its_kernel_is_the_callers(install: Install) -> None:
    """Nothing runs twice in silence: an operation that has begun is not begun again elsewhere."""
    install(MODULE.replace("COUNT.append(1)", "raise OverflowError('out of beads')"))
    gemm()
    with hybridq.backend("abacus"), pytest.raises(OverflowError, match="out of beads"):
        gemm()


def test_notes_that_fail_are_told(install: Install) -> None:
    install(MODULE.replace('("cpu",))', '("cpu",)), notes=lambda query: 1 / 0'))
    gemm()
    with hybridq.backend("abacus"), pytest.warns(hybridq.HybridQWarning, match="its notes failed"):
        assert "ZeroDivisionError" in str(hybridq.explain("gemm", "mxfp8", "mxfp8"))


@pytest.mark.parametrize("text", [b"[console_scripts]\nnonsense\n", b"\xff\xfe[", None])
def test_a_package_that_is_damaged_stops_nobody(
    install: Install, tmp_path: Path, text: bytes | None
) -> None:
    """One that has nothing to do with hybridq: its list of entry points, or its name."""
    install(MODULE)
    other = tmp_path / "damaged-1.0.dist-info"
    other.mkdir()
    own = b"[hybridq.backends]\nother = os:path\n"
    (other / "entry_points.txt").write_bytes(own if text is None else text)
    (other / "METADATA").write_bytes(b"\xff\xfe" if text is None else b"Name: damaged\n")
    with pytest.warns(hybridq.HybridQWarning, match="package (damaged|unknown)"):
        assert gemm().shape == (4, 8)
    assert "abacus" in {backend.name for backend in backends()}


def test_of_two_copies_the_first_on_the_path_is_taken(
    install: Install, tmp_path_factory, monkeypatch
) -> None:
    install(MODULE)
    later = tmp_path_factory.mktemp("later")
    (later / "beads-0.9.dist-info").mkdir()
    for name, text in (
        ("METADATA", "Name: beads\nVersion: 0.9\n"),
        ("entry_points.txt", "[hybridq.backends]\nabacus = nowhere:BACKEND\n"),
    ):
        (later / "beads-0.9.dist-info" / name).write_text(text)
    monkeypatch.setattr(sys, "path", [*sys.path, str(later)])
    gemm()
    assert [one.package for one in backends() if one.name == "abacus"] == ["beads 1.2"]


def test_a_name_belongs_to_whoever_has_it(install: Install) -> None:
    install(MODULE.replace('"abacus"', '"cpu"'), name="cpu")
    install(MODULE, of="a_first")
    install(MODULE, of="a_second")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        gemm()
    told = "\n".join(str(one.message) for one in seen)
    assert "offers a backend 'cpu', a name that hybridq has" in told
    assert "the package a_second 1.2 offers a backend 'abacus', a name that a_first 1.2 has" in told
    known = {backend.name: backend.package for backend in backends()}
    assert known["cpu"] == "" and known["abacus"] == "a_first 1.2"


def test_a_package_may_use_hybridq_as_it_is_imported(install: Install) -> None:
    """It asks for backends while they are being loaded, and gets hybridq's own."""
    install("import hybridq, torch\nhybridq.quantize(torch.ones(2, 32), 'mxfp8')\n" + MODULE)
    gemm()
    assert "abacus" in {backend.name for backend in backends()}


def test_packages_can_be_left_alone(monkeypatch) -> None:
    for text, loads in (("0", False), ("1", True), ("", True)):
        monkeypatch.setenv("HYBRIDQ_BACKEND_AUTOLOAD", text)
        assert hybridq.settings.loads_backends() is loads
    monkeypatch.setenv("HYBRIDQ_BACKEND_AUTOLOAD", "no")
    with pytest.raises(ValueError, match="HYBRIDQ_BACKEND_AUTOLOAD: must be 0 or 1, got 'no'"):
        hybridq.settings.loads_backends()


def test_a_choice_made_before_is_made_anew(install: Install) -> None:
    query = OpQuery("gemm", "cpu", torch.float32, *[PlaneSpec.parse("mxfp8")] * 2)
    assert choose(query).chosen.name == "torch"
    install(MODULE.replace('("cpu",))', '("cpu",)), priority=70'))
    assert load_backends() == ("abacus",)
    assert choose(query).chosen.name == "abacus"
