"""Large results ask for huge pages: which do, and that nothing else changes."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from hybridq import PlaneSpec, settings
from hybridq.kernels.cpu import backend, core, results

pytestmark = pytest.mark.skipif(core is None, reason="the compiled core is missing")


def test_whole_huge_pages_of_a_block_are_asked_for() -> None:
    """All but the ends of a large block; nothing where there are no such pages."""
    block = torch.empty(64 << 20, dtype=torch.uint8)  # never written: no memory is taken
    took = core.advise_huge_pages(block.data_ptr(), block.nbytes)
    assert took == 0 or 48 << 20 <= took <= block.nbytes
    assert core.advise_huge_pages(block.data_ptr(), 4096) == 0
    assert core.advise_huge_pages(0, 1 << 30) == 0


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "fp8_e4m3"])
def test_large_results_ask_and_are_the_same(name, monkeypatch) -> None:
    spec = PlaneSpec.parse(name).resolve(torch.bfloat16)
    x = torch.randn(72, 224, dtype=torch.bfloat16)  # a shape of this test's own: sizes are kept
    wanted = torch.ops.hybridq.encode(x[:71], spec.text, spec.text)
    asked: list[torch.Tensor] = []
    monkeypatch.setattr(results, "LARGE_NBYTES", 4096)
    monkeypatch.setattr(backend, "prepare", lambda one: (asked.append(one), results.prepare(one)))
    monkeypatch.setattr(results, "_uses_huge_pages", True)
    made = torch.ops.hybridq.encode(x, spec.text, spec.text)
    large = [one for one in made if one.nbytes >= 4096]
    assert len(large) == 2 and [one.data_ptr() for one in asked] == [o.data_ptr() for o in large]
    rows = made[: len(made) // 2]
    values = torch.ops.hybridq.decode(rows, spec.text, 72, 224, torch.bfloat16)
    assert len(asked) == 3 and asked[2].data_ptr() == values.data_ptr()
    if spec.format.block:  # blocks along rows do not see the last one
        assert torch.equal(made[0][:71], wanted[0])
    results.result(64, 64, dtype=torch.uint8)
    monkeypatch.setattr(results, "_uses_huge_pages", False)
    assert not results.is_large(1 << 40)


_FAULTS = """
import resource, torch, hybridq
x = torch.randn(4096, 8192, dtype=torch.bfloat16)
for _ in range(6):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    made = hybridq.quantize(x, "mxfp8")
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    del made
print(faults)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc's mallopt")
def test_memory_that_is_kept_has_no_faults() -> None:
    """A result of 32 MiB is 8192 ordinary pages, or 16 huge ones and some beside them."""
    faults = []
    for text in ("0", "1"):
        environment = {**os.environ, "HYBRIDQ_KEEP_MEMORY": text, "HYBRIDQ_HUGE_PAGES": "0"}
        command = [sys.executable, "-c", _FAULTS]
        made = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        faults.append(int(made.stdout))
    assert faults[0] >= 8192 and faults[1] < 256


@pytest.mark.parametrize(
    "library, text",
    [
        (SimpleNamespace(), "no mallopt"),
        (SimpleNamespace(mallopt=lambda *_: 0), "mallopt refused"),
    ],
)
def test_a_library_that_does_not_keep_it_is_told_of(monkeypatch, caplog, library, text) -> None:
    monkeypatch.setattr(results.ctypes, "CDLL", lambda _: library)
    assert not results._keep_freed_memory()
    assert text in caplog.text


def test_the_variable_that_leaves_them_out(monkeypatch) -> None:
    for text, wanted in (("", True), ("1", True), ("0", False)):
        monkeypatch.setenv("HYBRIDQ_HUGE_PAGES", text)
        assert settings.uses_huge_pages() is wanted
    monkeypatch.setenv("HYBRIDQ_HUGE_PAGES", "yes")
    with pytest.raises(ValueError, match="HYBRIDQ_HUGE_PAGES: must be 0 or 1, got 'yes'"):
        settings.uses_huge_pages()
