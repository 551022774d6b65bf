"""Scales that tiles write in parts of sectors are filled with zeros first (ADR 201).

Bits do not show it, so the emulator says where zeros were written.
"""

from __future__ import annotations

import pytest
import torch

import emulated
import kernel_cases as cases
from hybridq.formats import PlaneSpec
from hybridq.kernels.choice import EncodeRequest
from prologue_cases import prologue
from ragged_cases import as_groups, ends

MODULE = emulated.load()
if MODULE is None:
    pytest.skip("the emulated kernels are not built (make emulation)", allow_module_level=True)

BACKEND = emulated.make_backend(MODULE)
SIZES = (3, 0, 130, 27)
#: Specs of a plane, and whether its scales are parts of sectors: not those of tensors and squares.
SPECS = {"mxfp8": True, "fp8_1x128": True, "nvfp4": True, "fp8_e4m3": False}


@pytest.fixture(autouse=True)
def _nothing_yet():
    MODULE.reset()


def _check(name: str, buffers: list[torch.Tensor]) -> None:
    """Of both planes, if the spec's scales are parts of sectors; else no scales are zeros first."""
    places = [(one.data_ptr(), one.nbytes) for one in buffers]
    count = len(places) // 2
    scales = {places[1], places[count + 1]}
    assert (scales <= set(MODULE.zeroed())) is SPECS[name], (name, places, MODULE.zeroed())
    codes = {places[0], places[count]}
    assert not codes & set(MODULE.zeroed()), name


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_of_a_tensor(name: str, dtype: torch.dtype) -> None:
    spec = PlaneSpec.parse(name)
    _check(name, BACKEND.ops["encode"](torch.randn(160, 96).to(dtype), spec, spec, EncodeRequest()))


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("is_indexed", [False, True], ids=["in order", "through an index"])
def test_of_groups(name: str, is_indexed: bool) -> None:
    spec, x = PlaneSpec.parse(name), torch.randn(sum(SIZES), 96).bfloat16()
    index = torch.arange(len(x)).flip(0) if is_indexed else None
    request = EncodeRequest(name, name, row_index=index)
    groups = as_groups(ends(SIZES), len(x))
    got = BACKEND.ops["encode_ragged"](x, groups, spec, spec, request)
    _check(name, got)
    wanted = "EncodeIndexed" if is_indexed else "EncodeTile"
    assert wanted in MODULE.kernels()


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("kind", ["RMSNorm", "swiglu"])
def test_behind_a_norm_or_an_activation(name: str, kind: str) -> None:
    spec, x = PlaneSpec.parse(name), torch.randn(160, 192).bfloat16()
    made = prologue(kind, False, 192)
    got = BACKEND.ops["map_encode"](x, made, EncodeRequest(), row=spec, col=spec)[0]
    _check(name, got)
    assert "EncodeMapped" in MODULE.kernels()
