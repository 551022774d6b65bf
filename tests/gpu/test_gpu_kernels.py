"""Every case of the emulated kernels on the compiled ones, bit for bit against the CPU core."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import form_cases as forms
import kernel_cases as cases

SPECS = {**cases.plain_specs(), **cases.option_specs()}


@pytest.fixture(params=SPECS)
def spec(request):
    return SPECS[request.param]


@pytest.mark.parametrize("special", cases.SPECIALS)
def test_aligned_matrices(kernels, spec, special) -> None:
    for i, shape in enumerate((*cases.ALIGNED, (512, 640))):
        for dtype in cases.DTYPES:
            x = cases.matrix(*shape, dtype, i, special)
            cases.check_encode(kernels, x, spec, None)
            cases.check_encode(kernels, x, None, spec)
            cases.check_encode(kernels, x, spec, spec)


def test_any_shape_and_any_view(kernels, spec) -> None:
    for i, shape in enumerate(cases.ODD):
        for special in cases.SPECIALS:
            x = cases.matrix(*shape, cases.DTYPES[i % 3], i, special)
            cases.check_encode(kernels, x, spec, spec)
    for dtype in cases.DTYPES:
        for view in cases.views(dtype).values():
            cases.check_encode(kernels, view, spec, None)
            cases.check_encode(kernels, view, None, spec)


@pytest.mark.parametrize("name", cases.pairs())
def test_pairs_of_formats(kernels, name) -> None:
    row, col = cases.pairs()[name]
    for i, shape in enumerate((*cases.ALIGNED, *cases.ODD)):
        for dtype in cases.DTYPES:
            cases.check_encode(
                kernels, cases.matrix(*shape, dtype, 5, cases.SPECIALS[i % 5]), row, col
            )


@pytest.mark.parametrize("offset", [(0, 0), (32, 48), (5, 3), (1 << 33, 16)])
def test_a_shard_draws_the_random_bytes_of_its_place(kernels, offset) -> None:
    specs = cases.option_specs()
    places = {"row0": offset[0], "col0": offset[1], "row_stream": 2, "col_stream": 5}
    for shape in (128, 64), (33, 50):
        x = cases.matrix(*shape, torch.bfloat16, 2, "normal")
        for row, col in ("nvfp4 sr", "nvfp4 rht sr"), ("mxfp8 sr", "16x16 sr"):
            cases.check_encode(kernels, x, specs[row], specs[col], **places)


def test_planes_decode_to_the_same_values(kernels, spec) -> None:
    for i, shape in enumerate((*cases.ALIGNED, *cases.ODD, (256, 512))):
        x = cases.matrix(*shape, torch.bfloat16, i, cases.SPECIALS[i % 5])
        cases.check_decode(kernels, x, spec)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("special", cases.SPECIALS)
def test_amax_of_tensors_and_rows(kernels, dtype, special) -> None:
    names = ("nvfp4", "nvfp4 rht", "nvfp4 rows", "nvfp4 rows rht", "fp8_e4m3")
    for shape in (*cases.ALIGNED, *cases.ODD, (3, 5000), (1030, 520)):
        x = cases.matrix(*shape, dtype, 1, special)
        on_gpu = kernels.to(x)
        for name in names:
            for own, there in ((x, on_gpu), (x.t(), on_gpu.t())):
                want = cases.cpu_ops()["amax"](own, SPECS[name])
                got = kernels.ops["amax"](there, SPECS[name])
                cases.assert_same(got, want, f"amax for {name} of {shape} {dtype} {own.stride()}")


@pytest.mark.parametrize("bits", [4, 8, 16, 32])
def test_transpose_of_plane_data(kernels, bits) -> None:
    dtype = {4: torch.uint8, 8: torch.uint8, 16: torch.bfloat16, 32: torch.float32}[bits]
    item = torch.empty(0, dtype=dtype).element_size()
    for rows, cols in ((128, 64), (33, 70), (1, 9), (130, 1), (64, 256), (4096, 384), (999, 2050)):
        width = -(-cols // 2) if bits == 4 else cols
        data = torch.randint(0, 256, (rows, width * item), dtype=torch.uint8).view(dtype)
        if bits == 4 and cols % 2:
            data[:, -1] &= 0xF
        want = cases.cpu_ops()["transpose"](data, rows, cols, bits)
        got = kernels.ops["transpose"](data.to(kernels.device), rows, cols, bits)
        cases.assert_same(got, want, f"{rows}x{cols}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_stochastic_rounding_to_sixteen_bits(kernels, dtype) -> None:
    shapes = ((128, 64), (7, 33), (1, 1), (40, 200), (513, 1024))
    for i, (rows, cols) in enumerate(shapes):
        x = cases.matrix(rows, cols, torch.float32, i, cases.SPECIALS[i])
        for col0 in (0, 5 * i):
            seed, rest = torch.tensor([99 + i]), (dtype, 3, 11 * i, col0)
            want = cases.cpu_ops()["round_stochastic"](x, seed, *rest)
            got = kernels.ops["round_stochastic"](
                x.to(kernels.device), seed.to(kernels.device), *rest
            )
            cases.same_values(got, want, f"{rows}x{cols}")


def test_every_finite_bfloat16_value(kernels) -> None:
    bits = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = bits[torch.isfinite(bits)].reshape(-1, 32)
    x = torch.cat([x, torch.zeros(-len(x) % 128, 32, dtype=x.dtype)])
    for spec in SPECS.values():
        cases.check_encode(kernels, x, spec, None)
        cases.check_encode(kernels, x.flip(0), None, spec)


def test_all_float32_binades_beside_each_other(kernels) -> None:
    """Random bits are floats of every exponent, subnormals and NaN included."""
    bits = torch.randint(-(2**31), 2**31 - 1, (512, 256), dtype=torch.int64).to(torch.int32)
    x = bits.view(torch.float32)
    finite = torch.where(torch.isfinite(x), x, 0.0)
    for spec in SPECS.values():
        cases.check_encode(kernels, finite, spec, spec)
        cases.check_encode(kernels, x, spec, None)


@pytest.mark.parametrize("name", forms.FOLDED)
@pytest.mark.parametrize("special", cases.SPECIALS)
def test_folded_planes_are_those_of_encode_and_fold(kernels, name, special) -> None:
    spec = forms.FOLDED[name]
    for i, shape in enumerate((*forms.TILES, *forms.OTHERS, (512, 640))):
        for dtype in cases.DTYPES:
            x = forms.matrix(*shape, dtype, i, special)
            forms.check(kernels, x, spec, None)
            forms.check(kernels, x, None, spec)
            forms.check(kernels, x, spec, spec)


@pytest.mark.parametrize("name", ["fp8_1x128", "fp8_1x128_e5m2"])
def test_scales_that_lie_down(kernels, name) -> None:
    spec = replace(SPECS[name], scale_layout="down")
    for i, shape in enumerate((*forms.TILES, *forms.OTHERS)):
        x = cases.matrix(*shape, cases.DTYPES[i % 3], i, cases.SPECIALS[i % 5])
        cases.check_encode(kernels, x, spec, spec)


@pytest.mark.parametrize("name", forms.TILED)
def test_scales_in_tiles(kernels, name) -> None:
    spec = forms.TILED[name]
    for i, shape in enumerate((*forms.WHOLE, (160, 136), (7, 33), (512, 640))):
        x = cases.matrix(*shape, cases.DTYPES[i % 3], i, cases.SPECIALS[i % 5])
        for pair in ((spec, None), (None, spec), (spec, spec)):
            forms.check_tiled(kernels, x, *pair)
