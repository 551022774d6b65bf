"""The CUDA kernels, emulated on the host thread by thread, bit for bit against the CPU core.

The emulator also reports what a GPU would leave to luck: accesses outside of buffers, races in
shared memory, uninitialised reads and barriers that some threads miss.
"""

from __future__ import annotations

import pytest
import torch

import emulated
import finish_cases
import kernel_cases as cases
import token_row_cases as token_rows
from hybridq import reference
from hybridq.formats import PlaneSpec
from hybridq.kernels.choice import GemmArgs
from hybridq.kernels.cpu.backend import core_spec
from hybridq.kernels.inputs.addresses import DTYPES
from hybridq.kernels.ragged import padded_layout as ragged
from hybridq.kernels.scaled_mm import operand_layout as native_layout

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


@pytest.mark.thinned(2)
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


@pytest.mark.parametrize("dtype", token_rows.DTYPES, ids=str)
def test_sums_over_rows_of_tokens(dtype):
    others = (dtype,) if dtype != torch.float32 else token_rows.DTYPES
    for other in dict.fromkeys((*others, torch.float32)):
        for rows, weights, inverse, order, grad, label in token_rows.cases(dtype, other):
            for own in (weights, None):
                given = (rows, own, inverse, other)
                want = cases.cpu_ops()["sum_rows"](*given)
                cases.same_values(KERNELS.ops["sum_rows"](*given), want, label)
            for read in (rows, None):
                given = (grad, read, weights, order, dtype)
                expected = cases.cpu_ops()["spread_rows"](*given)
                for one, want in zip(KERNELS.ops["spread_rows"](*given), expected, strict=True):
                    cases.same_values(one, want, label)


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
    args = cases.EncodeRequest()
    with pytest.raises(RuntimeError, match=r"EncodeTile|EncodeGeneral|Zero"):
        kernels.encode(x, spec, None, args)


@pytest.mark.parametrize("name", cases.pairs())
@pytest.mark.parametrize("shape", [(128, 64), (33, 50)])
def test_statistics_that_are_not_given_are_found_on_the_way(name, shape):
    row, col = cases.pairs()[name]
    x = cases.matrix(*shape, torch.bfloat16, 6, "normal")
    cpu, seed = cases.cpu_ops(), torch.tensor([5])
    stats = [
        cpu["amax"](own, spec) if spec.needs_amax else None
        for own, spec in ((x, row), (x.t(), col))
    ]
    want = cpu["encode"](x, row, col, cases.EncodeRequest("", "", *stats, seed))
    MODULE.reset()
    got = KERNELS.ops["encode"](x, row, col, cases.EncodeRequest("", "", None, None, seed))
    launches = MODULE.kernels()
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        cases.assert_same(g, w, f"{name}: buffer {i}")
    if shape == (128, 64) and name in ("mxfp8 | nvfp4 rht", "nvfp4 | nvfp4 rht"):
        # One pass finds both amaxes, or one and writes the other plane; one more encodes.
        assert launches == ["EncodeTile", "EncodeTile"]


@pytest.mark.parametrize("name", ["fp8", "fp8_e5m2"])
@pytest.mark.parametrize("shape", [(128, 64), (33, 50)])
@pytest.mark.parametrize("stat", [-3.7, -1.4e-36, -3.4028234663852886e38, -0.0, 0.0, 5.0])
def test_a_negative_statistic_is_the_multiplier(name, shape, stat):
    spec = PlaneSpec.parse(name)
    x = cases.matrix(*shape, torch.bfloat16, 6, "normal")
    args = cases.EncodeRequest("", "", torch.tensor([stat]), torch.tensor([stat]))
    got = KERNELS.ops["encode"](x, spec, spec, args)
    want = cases.cpu_ops()["encode"](x, spec, spec, args)
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        cases.assert_same(g, w, f"{name}: buffer {i}")
    if stat < 0.0:
        assert got[1].item() == (1.0 / -args.row_stat).item()


@pytest.mark.parametrize("height", [1, 128])
@pytest.mark.parametrize(
    "name", ["mxfp8", "mxfp8_e5m2", "mxfp4", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp8_32x32"]
)
def test_fold_is_the_references(name, height):
    spec = cases.plain_specs()[name]
    for i, (rows, cols) in enumerate(((130, 256), (7, 33), (1, 1), (0, 64), (64, 500))):
        x = cases.matrix(rows, cols, torch.bfloat16, i, cases.SPECIALS[i])
        x = x * torch.exp(4 * torch.randn(1, cols))  # scales of a group that differ
        plane = cases.cpu_ops()["encode"](x, spec, None, cases.EncodeRequest())
        want = reference.fold_plane(plane, spec, rows, cols, height)
        got = KERNELS.ops["fold"](plane, spec, rows, cols, height)
        for part in ("codes", "scale", "changed"):
            cases.assert_same(getattr(got, part), getattr(want, part), f"{part} of {rows}x{cols}")


def test_swizzled_scales_are_the_references():
    for rows, blocks in ((128, 4), (130, 5), (1, 1), (300, 17), (0, 3)):
        scale = torch.randint(0, 256, (rows, blocks), dtype=torch.uint8)
        want = native_layout.swizzle(scale)
        cases.assert_same(KERNELS.ops["swizzle"](scale), want, f"{rows}x{blocks}")


def test_a_product_is_finished_with_the_references_bits():
    run, ways = KERNELS.ops["finish"], set()
    for case in finish_cases.every_case():
        MODULE.reset()
        cases.same_values(run(*case[:5]), case.wanted, case.label)
        ways.update(MODULE.kernels())
    assert ways == {"FinishGroups", "FinishElements"}


def test_a_product_may_be_finished_where_it_is_added():
    product, into = torch.randn(16, 64), torch.randn(16, 64)
    want = reference.finish_product(product, None, None, out=into, out_dtype=torch.float32)
    args = GemmArgs(None, into, torch.float32, place=into)
    assert KERNELS.ops["finish"](product, None, None, args) is into
    cases.assert_same(into, want, "in place")


def test_what_follows_a_product_must_fit_it():
    product, args = torch.randn(4, 8), GemmArgs(None, None, torch.bfloat16)
    run = KERNELS.ops["finish"]
    with pytest.raises(ValueError, match=r"finish: row_factor must be \[4\] or \[1\]"):
        run(product, torch.ones(3), None, args)
    with pytest.raises(ValueError, match=r"finish: what is added must be \(4, 8\)"):
        run(product, None, None, args._replace(accumulate_into=torch.ones(8, 4)))
    with pytest.raises(ValueError, match="finish: out must be 32 contiguous values"):
        run(product, None, None, args._replace(place=torch.ones(4, 8)))


@pytest.mark.parametrize("name", ["mxfp8", "mxfp8 | nvfp4 rht", "nvfp4 sr | nvfp4 rht sr", "mxfp4"])
@pytest.mark.parametrize("sizes", [(3, 0, 130, 128, 7), (0, 0), (256,), (1,) * 9])
def test_ragged_rows_are_padded_while_they_are_encoded(name, sizes):
    """The column plane of the padded rows and the row plane of the rows, without moving one."""
    row, col = cases.pairs().get(name) or (SPECS[name], SPECS[name])
    tokens, cols, seed = sum(sizes) + 5, 72, torch.tensor([11])  # five belong to no group
    x = cases.matrix(tokens, cols, torch.bfloat16, 8, "normal")
    ends = torch.tensor(sizes, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    padded, begins = ragged.pad_tokens(x, ends), ragged.padded_offsets(ends, tokens)
    cpu, kernels = cases.cpu_ops(), emulated.EmulatedKernels(MODULE)
    stats = [
        cpu["amax"](own, spec) if spec.needs_amax else None
        for own, spec in ((x, row), (padded.t(), col))
    ]
    want = cpu["encode"](x, row, None, cases.EncodeRequest("", "", stats[0], None, seed))
    want += cpu["encode"](padded, None, col, cases.EncodeRequest("", "", None, stats[1], seed))
    got, planes, finds = [], [], []
    with kernels.launch(x.device):
        for spec, shape, stream in ((row, x.shape, 0), (col, padded.shape[::-1], 1)):
            own = [torch.empty(b.shape, dtype=b.dtype) for b in spec.buffers(*shape)]
            stat = own[2] if len(own) == 3 else None
            pointers = [kernels.pointer(t, True) for t in (own[0], own[1], stat)]
            drawn = kernels.pointer(seed if spec.stochastic else None)
            planes.append((core_spec(spec)[0], *pointers, drawn, 0, 0, stream, 0, 0, 0))
            finds.append(spec.needs_amax)
            got += own
        groups = [kernels.pointer(t) for t in (ends, begins)]
        source = kernels.pointer(x)
        where = (source, DTYPES[x.dtype], tokens, cols, *x.stride())
        assert MODULE.encode_ragged(*where, *planes, *finds, *groups, len(sizes), len(padded), 0), (
            "no kernel reads the groups"
        )
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        cases.assert_same(g, w, f"{name}: buffer {i}")
