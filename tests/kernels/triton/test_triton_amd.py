"""The Triton kernels compiled ahead of time for AMD's chips: matrix instructions, no spill.

Operands are decoded by plain operations there; the interpreter runs the same and
`test_triton_values` holds every code under every scale to the reference.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import triton_tools
from hybridq.formats import PlaneSpec
from hybridq.kernels.choice.arguments import Operand
from hybridq.kernels.triton import backend, plan
from hybridq.kernels.triton.form import form_of
from triton_tools import Worker

#: A launch -> registers of a lane on gfx942 and gfx950, at most.
BUDGETS = {
    ("dense", "bf16", "mxfp8", 16): (136, 136),
    ("dense", "nvfp4", "nvfp4", 16): (120, 136),
    ("dense", "mxfp8", "mxfp8", 4096): (200, 224),
    ("reduce",): (40, 40),
    ("grouped", "few", "mxfp8", "nvfp4"): (248, 232),
    ("grouped", "rows", "mxfp8", "mxfp8"): (256, 248),
    ("grouped", "k", "mxfp4", "nvfp4"): (224, 232),
    ("grouped", "k", "fp32", "mxfp8"): (208, 224),
    ("block", False): (280, 208),
}
CHIPS = ("gfx942", "gfx950")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> Iterator[object]:
    """Compiles a launch in a process of its own, with an empty cache."""
    folder = tmp_path_factory.mktemp("triton")
    worker = Worker(TRITON_CACHE_DIR=str(folder), TRITON_INTERPRET="0", OMP_NUM_THREADS="1")

    def call(*args: object) -> object:
        return worker("triton_amd", "compiled", *args)

    yield call
    worker.close()


@pytest.mark.slow
@pytest.mark.skipif(triton_tools.MISSING is not None, reason=str(triton_tools.MISSING))
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("case", BUDGETS, ids=str)
def test_kernels_compile(compiled, case: tuple[object, ...], chip: str) -> None:
    code = compiled(chip, *case)
    print(case, chip, code)
    assert code.spilled == 0
    if backend._triton_version() >= (3, 9):  # older ones take up to 492, of 512
        assert code.registers <= BUDGETS[case][CHIPS.index(chip)]
    assert code.shared <= (64 if chip == "gfx942" else 160) << 10
    if case[0] == "reduce":
        return
    assert code.products
    wide, narrow = "fp32" in case, case[0] == "block"
    # FP8 as the chip has it: gfx942 has other codes than ours, and takes them as FP16.
    name = "f32" if wide else "bf16" if not narrow else "f8f6f4" if chip == "gfx950" else "f16"
    assert all(product.endswith(f"_{name}") for product in code.products)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "fp8_e5m2", "bf16"])
def test_a_plan_for_an_amd_chip_has_no_ptx(monkeypatch, name: str) -> None:
    spec = PlaneSpec.parse(name)
    shapes = spec.buffers(4, 64)
    buffers = [torch.zeros(one.shape, dtype=one.dtype or torch.bfloat16) for one in shapes]
    assert bool(form_of(spec).code.asm) == (name != "bf16")
    monkeypatch.setattr(torch.version, "hip", "7.0")
    made = plan._side(Operand(buffers, spec, 4, 64)).form
    assert (
        made.code.asm == "" and made.code._replace(asm=form_of(spec).code.asm) == form_of(spec).code
    )
