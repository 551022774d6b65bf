"""The CUDA kernels, emulated on the host thread by thread, bit for bit against the CPU core.

The emulator also reports what a GPU would leave to luck: accesses outside of buffers, races in
shared memory, uninitialised reads and barriers that some threads miss.
"""

from __future__ import annotations

import pytest
import torch

import emulated
import kernel_cases as cases

MODULE = emulated.load()
if MODULE is None:
    pytest.skip("the emulated kernels are not built (make emulation)", allow_module_level=True)

SPECS = {**cases.plain_specs(), **cases.option_specs()}
KERNELS = cases.Kernels(emulated.make_backend(MODULE).ops, "cpu")


@pytest.fixture(autouse=True)
def _random_order(seed: int):
    """Lanes, warps and blocks run in an order of each test's own."""
    MODULE.set_seed(seed)
    MODULE.reset()


@pytest.fixture(params=SPECS)
def spec(request):
    return SPECS[request.param]


@pytest.mark.parametrize("special", cases.SPECIALS)
def test_aligned_matrices_take_the_tile_kernel_and_its_bits_are_the_cores(spec, special):
    for i, shape in enumerate(cases.ALIGNED):
        x = cases.matrix(*shape, cases.DTYPES[(i + len(special)) % 3], i, special)
        cases.check_encode(KERNELS, x, spec, None)
        cases.check_encode(KERNELS, x, None, spec)
        cases.check_encode(KERNELS, x, spec, spec)


def test_any_shape_and_any_view_is_encoded(spec):
    for i, shape in enumerate(cases.ODD):
        x = cases.matrix(*shape, cases.DTYPES[i % 3], i, cases.SPECIALS[i % 5])
        cases.check_encode(KERNELS, x, spec, spec)
    for i, view in enumerate(cases.views(torch.bfloat16).values()):
        cases.check_encode(KERNELS, view, spec if i % 2 else None, None if i % 2 else spec)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_every_input_dtype_takes_both_paths(spec, dtype):
    x = cases.matrix(64, 72, dtype, 1, "normal")
    cases.check_encode(KERNELS, x, spec, spec)
    cases.check_encode(KERNELS, x[1:, 1:], spec, spec)


@pytest.mark.parametrize("name", cases.pairs())
def test_pairs_of_formats_have_the_bits_of_their_single_planes(name):
    row, col = cases.pairs()[name]
    for shape, dtype in ((160, 136), torch.bfloat16), ((128, 64), torch.float32):
        cases.check_encode(KERNELS, cases.matrix(*shape, dtype, 5, "normal"), row, col)


def test_the_pairs_of_the_zoo_are_one_kernel():
    x = cases.matrix(128, 64, torch.bfloat16, 1, "normal")
    for name, (row, col) in list(cases.pairs().items())[:9]:
        MODULE.reset()
        cases.check_encode(KERNELS, x, row, col)
        assert MODULE.kernels() == ["EncodeTile"], name
    MODULE.reset()
    row, col = cases.pairs()["mxfp6_e3m2 | fp8_e5m2"]
    cases.check_encode(KERNELS, x, row, col)
    assert MODULE.kernels() == ["EncodeTile", "EncodeTile"]


@pytest.mark.parametrize("offset", [(0, 0), (32, 48), (5, 3)])
def test_a_shard_draws_the_random_bytes_of_its_place(offset):
    specs = cases.option_specs()
    row0, col0 = offset
    for shape in (128, 64), (33, 50):
        x = cases.matrix(*shape, torch.bfloat16, 2, "normal")
        for row, col in ("nvfp4 sr", "nvfp4 rht sr"), ("mxfp8 sr", "16x16 sr"):
            cases.check_encode(
                KERNELS, x, specs[row], specs[col], row0=row0, col0=col0, row_stream=2, col_stream=5
            )


def test_planes_decode_to_the_same_values(spec):
    for i, shape in enumerate((*cases.ALIGNED[:2], *cases.ODD)):
        x = cases.matrix(*shape, torch.bfloat16, i, cases.SPECIALS[i % 5])
        cases.check_decode(KERNELS, x, spec)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("special", cases.SPECIALS)
def test_amax_of_tensors_and_rows_with_and_without_transform(dtype, special):
    names = ("nvfp4", "nvfp4 rht", "nvfp4 rows", "nvfp4 rows rht", "fp8_e4m3")
    for shape in (*cases.ALIGNED, *cases.ODD, (3, 5000)):
        x = cases.matrix(*shape, dtype, 1, special)
        for name in names:
            for own in (x, x.t()):
                want = cases.cpu_ops()["amax"](own, SPECS[name])
                got = KERNELS.ops["amax"](own, SPECS[name])
                cases.assert_same(got, want, f"amax for {name} of {shape} {dtype} {own.stride()}")


@pytest.mark.parametrize("bits", [4, 8, 16, 32])
def test_transpose_of_plane_data(bits):
    dtype = {4: torch.uint8, 8: torch.uint8, 16: torch.bfloat16, 32: torch.float32}[bits]
    for rows, cols in ((128, 64), (33, 70), (1, 9), (130, 1), (0, 3), (64, 256)):
        width = -(-cols // 2) if bits == 4 else cols
        data = torch.randint(0, 256, (rows, width * torch.empty(0, dtype=dtype).element_size()))
        data = data.to(torch.uint8).view(dtype) if rows else torch.empty(0, width, dtype=dtype)
        if bits == 4 and cols % 2 and rows:
            data[:, -1] &= 0xF
        want = cases.cpu_ops()["transpose"](data, rows, cols, bits)
        cases.assert_same(KERNELS.ops["transpose"](data, rows, cols, bits), want, f"{rows}x{cols}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_stochastic_rounding_to_sixteen_bits(dtype):
    for i, (rows, cols) in enumerate(((128, 64), (7, 33), (1, 1), (0, 4), (40, 200))):
        x = cases.matrix(rows, cols, torch.float32, i, cases.SPECIALS[i])
        args = (torch.tensor([99 + i]), dtype, 3, 11 * i, 5 * i)
        want = cases.cpu_ops()["round_stochastic"](x, *args)
        same = KERNELS.ops["round_stochastic"](x, *args)
        cases.same_values(same, want, f"{rows}x{cols}")


def test_every_finite_value_of_an_element_passes_the_short_path():
    """All BF16 values through the E2M1 and FP8 tile kernels: their packed casts are shortcuts."""
    bits = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = bits[torch.isfinite(bits)].reshape(-1, 32)
    x = torch.cat([x, torch.zeros(-len(x) % 128, 32, dtype=x.dtype)])
    for name in ("mxfp4", "mxfp8", "mxfp8_e5m2", "mxfp6_e2m3", "nvfp4"):
        cases.check_encode(KERNELS, x, SPECS[name], None)
    sign = cases.option_specs()["nvfp4 sr"]
    cases.check_encode(KERNELS, x[:4096], sign, sign)


def test_an_access_outside_of_the_buffers_is_reported():
    x = torch.zeros(16, 64, dtype=torch.bfloat16)
    spec = SPECS["mxfp8"]
    kernels = emulated.EmulatedKernels(MODULE)
    kernels.pointer = lambda tensor, written=False: 0 if tensor is None else tensor.data_ptr()
    args = cases.EncodeArgs()
    with pytest.raises(RuntimeError, match=r"EncodeTile|EncodeGeneral"):
        kernels.encode(x, spec, None, args)
