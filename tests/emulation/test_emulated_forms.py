"""Operands straight from the emulated kernels: folded, or with scales as products read them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import emulated
import form_cases as forms
import kernel_cases as cases
from hybridq.kernels.choice import EncodeRequest
from hybridq.reference import decode_codes, decode_plane, fold_plane
from prologue_cases import prologue, source

MODULE = emulated.load()
if MODULE is None:
    pytest.skip("the emulated kernels are not built (make emulation)", allow_module_level=True)

KERNELS = cases.Kernels(emulated.make_backend(MODULE).ops, "cpu")


@pytest.fixture(autouse=True)
def _random_order(seed: int):
    """Lanes, warps and blocks run in an order of each test's own."""
    MODULE.set_seed(seed)
    MODULE.reset()


@pytest.mark.thinned(1)
@pytest.mark.parametrize("special", cases.SPECIALS)
@pytest.mark.parametrize("shape", forms.TILES, ids=str)
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("name", forms.FOLDED)
def test_one_launch_has_the_bits_of_encode_and_fold(name, dtype, shape, special):
    spec, x = forms.FOLDED[name], forms.matrix(*shape, dtype, sum(shape), special)
    for pair in ((spec, None), (None, spec), (spec, spec)):
        MODULE.reset()
        forms.check(KERNELS, x, *pair)
        assert MODULE.kernels() == ["EncodeTile"]


@pytest.mark.parametrize("name", forms.FOLDED)
def test_every_code_by_every_difference_of_scales(name):
    """A block of every code beside one whose scale is larger by 0, 1, ... 40 binades."""
    spec = forms.FOLDED[name]
    element = spec.format.element
    codes = decode_codes(torch.arange(9 * 31) % 256, element)
    block = torch.full((9, 32), element.max)  # so that the block's scale is 1
    block[:, 1:] = torch.where(codes.isfinite(), codes, 0.0).reshape(9, 31)
    x = torch.zeros(41, 9, 128)
    x[..., 32:64] = block
    x[..., 96] = element.max * torch.exp2(torch.arange(41.0))[:, None]
    x = torch.cat([x.reshape(-1, 128), torch.zeros(7, 128)])
    forms.check(KERNELS, x, spec, None)
    forms.check(KERNELS, x.t().contiguous(), None, spec)


@pytest.mark.parametrize("name", forms.FOLDED)
def test_a_shape_without_a_tile_kernel_is_encoded_and_then_folded(name):
    spec = forms.FOLDED[name]
    for i, shape in enumerate(forms.OTHERS):
        forms.check(KERNELS, forms.matrix(*shape, torch.bfloat16, i, "normal"), spec, spec)
    x = forms.matrix(64, 72, torch.bfloat16, 1, "normal")
    MODULE.reset()
    forms.check(KERNELS, x[1:, 1:], spec, None)
    assert len(MODULE.kernels()) == 2


@pytest.mark.parametrize(
    "kind,has_beta", [("LayerNorm", True), ("RMSNorm", False), ("swiglu", False)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_behind_a_norm_or_an_activation(kind: str, has_beta: bool, dtype: torch.dtype) -> None:
    spec, own = forms.FOLDED["mxfp8"], cases.plain_specs()["mxfp8"]
    made = prologue(kind, has_beta, 136)
    x = source(kind, 160, 136, dtype, 3, "normal")
    for row, col in ((spec, None), (spec, spec)):
        plain = (own, None if col is None else own)
        want = cases.cpu_ops()["map_encode"](x, made, EncodeRequest(), row=plain[0], col=plain[1])[
            0
        ]
        MODULE.reset()
        got = KERNELS.ops["map_encode"](x, made, EncodeRequest(), row=row, col=col)[0]
        assert ("FoldGroups" in MODULE.kernels()) == (dtype != torch.bfloat16)
        for i, shape in enumerate(((160, 136), (136, 160))[: len(got) // 2]):
            plane = fold_plane(want[2 * i : 2 * i + 2], own, *shape)
            cases.assert_same(got[2 * i], plane.codes, f"{kind}: codes {i}")
            cases.assert_same(got[2 * i + 1], plane.scale, f"{kind}: scales {i}")


@pytest.mark.parametrize("name", ["fp8_1x128", "fp8_1x128_e5m2"])
def test_scales_lie_down_from_tile_kernels_and_from_the_general_one(name: str) -> None:
    spec = replace(cases.plain_specs()[name], scale_layout="down")
    for i, shape in enumerate((*forms.TILES, *forms.OTHERS)):
        x = cases.matrix(*shape, cases.DTYPES[i % 3], i, cases.SPECIALS[i % 5])
        cases.check_encode(KERNELS, x, spec, spec)
        made = KERNELS.ops["encode"](x, spec, spec, EncodeRequest())
        for scale in made[1::2]:
            assert scale.stride() == (1, max(scale.shape[0], 1))
    x = cases.matrix(160, 136, torch.bfloat16, 1, "normal")
    cases.check_decode(KERNELS, x, spec)


@pytest.mark.parametrize("name", forms.TILED)
def test_tiles_of_scales_are_those_of_the_swizzle(name: str) -> None:
    spec = forms.TILED[name]
    for i, shape in enumerate(forms.WHOLE):
        x = cases.matrix(*shape, cases.DTYPES[i % 3], i, cases.SPECIALS[i % 5])
        for pair in ((spec, None), (None, spec), (spec, spec)):
            MODULE.reset()
            forms.check_tiled(KERNELS, x, *pair)
            # What is transformed or stochastic has a kernel for some pairs only.
            if ";" not in spec.text.removesuffix(";scales=tiles"):
                assert set(MODULE.kernels()) <= {"EncodeTile", "AmaxAlong"}
    for i, shape in enumerate(((160, 136), (7, 33), (130, 256))):
        MODULE.reset()
        forms.check_tiled(KERNELS, cases.matrix(*shape, torch.bfloat16, i, "normal"), spec, spec)
        assert sum(kernel.startswith("Swizzle") for kernel in MODULE.kernels()) == 2


@pytest.mark.parametrize("name", forms.TILED)
def test_tiled_planes_decode_to_the_same_values(name: str) -> None:
    spec = forms.TILED[name]
    plain = replace(spec, scale_layout="")
    x = cases.matrix(160, 136, torch.bfloat16, 2, "normal")
    buffers = KERNELS.ops["encode"](x, spec, None, EncodeRequest(seed=torch.tensor([3])))
    own = KERNELS.ops["encode"](x, plain, None, EncodeRequest(seed=torch.tensor([3])))
    for op in ("decode", "operand"):
        got = KERNELS.ops[op](buffers, spec, 160, 136, torch.float32)
        want = cases.cpu_ops()[op](own, plain, 160, 136, torch.float32)
        first, second = (one if op == "decode" else one[0] for one in (got, want))
        cases.same_values(first, second, op)
    read = decode_plane(buffers, spec, 160, 136, torch.float32)
    cases.same_values(read, cases.cpu_ops()["decode"](own, plain, 160, 136, torch.float32), name)
