"""Many tensors in one launch, emulated: for each the bits of the CPU core's single call."""

from __future__ import annotations

import pytest
import torch

import emulated
import hybridq
import kernel_cases as cases
from hybridq.kernels.choice import EncodeRequest
from hybridq.kernels.choice import registry as registry
from hybridq.kernels.cpu.backend import core_spec
from tensor_tools import PAIRS, same_planes

MODULE = emulated.load()
if MODULE is None:
    pytest.skip("the emulated kernels are not built (make emulation)", allow_module_level=True)

BACKEND = emulated.make_backend(MODULE)
KERNELS = cases.Kernels(BACKEND.ops, "cpu")
#: As many tensors as one launch takes: `kMaxTensors` of csrc/cuda/encode_many.h.
TABLE = 48


@pytest.fixture(autouse=True)
def _random_order(seed: int):
    MODULE.set_seed(seed)
    MODULE.reset()


@pytest.fixture
def forced():
    """The emulated kernels as the backend of every operation."""
    registry.register_backend(BACKEND)
    try:
        with hybridq.backend(BACKEND.name):
            yield
    finally:
        registry.unregister_backend(BACKEND.name)


@pytest.mark.parametrize("name", cases.MANY)
def test_aligned_tensors_share_their_launches(name) -> None:
    row, col = cases.many_specs(name)
    for i, dtype in enumerate(cases.DTYPES):
        xs = [
            cases.matrix(*shape, dtype, 10 * i + j, cases.SPECIALS[(i + j) % 5])
            for j, shape in enumerate((*cases.ALIGNED, (256, 128), (32, 200)))
        ]
        MODULE.reset()
        cases.check_many(KERNELS, xs, row, col)
        assert MODULE.kernels() == ["EncodeMany"] * cases.MANY[name][2], (name, dtype)


@pytest.mark.parametrize("name", cases.MANY)
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_any_tensor_may_be_in_the_list(name, dtype) -> None:
    """Those that no tile kernel takes are encoded by themselves, and every one has its own amax."""
    row, col = cases.many_specs(name)
    cases.check_many(KERNELS, cases.mixed_list(dtype, 1), row, col)
    launched = MODULE.kernels()
    assert launched[0] == "EncodeMany" and len(launched) > launched.count("EncodeMany")


@pytest.mark.parametrize("name", ["fp8_e4m3 both", "nvfp4 row", "mxfp8 | nvfp4"])
@pytest.mark.parametrize("count", [1, 2, TABLE, TABLE + 1, 2 * TABLE + 5])
def test_a_long_list_takes_several_launches(name, count) -> None:
    row, col = cases.many_specs(name)
    # Numbers of blocks that differ, so that a wrong tensor would be found.
    xs = [cases.matrix(32, 8 + 64 * (i % 3), torch.bfloat16, i, "normal") for i in range(count)]
    cases.check_many(KERNELS, xs, row, col)
    launches = -(-count // TABLE) * cases.MANY[name][2]
    assert MODULE.kernels().count("EncodeMany") == (launches if count > 1 else 0)


def test_every_block_finds_its_tensor() -> None:
    """One to three tiles down and across, in every order of sizes."""
    spec = cases.plain_specs()["fp8_e4m3"]
    sizes = [(16 * (1 + 9 * (i % 3)), 8 * (1 + 9 * (i // 3 % 3))) for i in range(TABLE)]
    xs = [cases.matrix(*size, torch.bfloat16, i, "normal") for i, size in enumerate(sizes)]
    for some in (xs, xs[::-1], xs[5:12]):
        cases.check_many(KERNELS, some, spec, spec)


@pytest.mark.parametrize("name", cases.pairs())
def test_hybrid_pairs_have_the_bits_of_single_calls(name) -> None:
    """Pairs with a transform, random rounding or an amax per row have launches of their own."""
    row, col = cases.pairs()[name]
    cases.check_many(KERNELS, cases.mixed_list(torch.bfloat16, 3)[:6], row, col)
    shares = name in ("mxfp8 | nvfp4", "nvfp4 | mxfp8")
    assert ("EncodeMany" in MODULE.kernels()) == shares


@pytest.mark.parametrize("name", cases.option_specs())
def test_options_have_the_bits_of_single_calls(name) -> None:
    spec = cases.option_specs()[name]
    xs = cases.mixed_list(torch.bfloat16, 4)[:6]
    cases.check_many(KERNELS, xs, spec, spec, row_stream=3, col_stream=9)


@pytest.mark.parametrize("gives", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize(
    "row,col", [("nvfp4", "nvfp4"), ("fp8_e4m3", "nvfp4_16x16"), ("mxfp8", "nvfp4")]
)
def test_amaxes_may_be_given(row, col, gives) -> None:
    specs = cases.plain_specs()
    xs = cases.mixed_list(torch.bfloat16, 5)[:7]
    cases.check_many(KERNELS, xs, specs[row], specs[col], gives)


def test_a_nan_stays_in_its_tensor() -> None:
    spec = cases.plain_specs()["nvfp4"]
    xs = [cases.matrix(32, 64, torch.float32, i, "normal") for i in range(5)]
    xs[2][3, 3] = float("nan")
    xs[4][0, 0] = -float("inf")
    made = KERNELS.ops["encode_many"](xs, spec, spec, EncodeRequest())
    amaxes = torch.cat([made[6 * i + 2] for i in range(5)])
    assert torch.isnan(amaxes).tolist() == [False, False, True, False, False]
    assert amaxes[4] == torch.finfo(torch.float32).max
    assert all(torch.equal(made[6 * i + 2], made[6 * i + 5]) for i in (0, 1, 3, 4))


def test_a_tensor_that_32_bits_do_not_reach_has_its_own_launch() -> None:
    memory = torch.empty((1 << 31) + 64, dtype=torch.bfloat16)  # touched at both ends only
    far = memory.as_strided((2, 64), (1 << 31, 1))
    small = [cases.matrix(2, 64, torch.bfloat16, i, "normal") for i in range(3)]
    far.copy_(small[2])
    cases.check_many(KERNELS, [small[0], far, small[1]], cases.plain_specs()["mxfp8"], None)
    assert MODULE.kernels() == ["EncodeMany", "EncodeTile"]


@pytest.mark.parametrize("shape", [(0, 16), (16, 0)])
def test_an_empty_tensor_has_a_scale(shape) -> None:
    spec = cases.plain_specs()["fp8_e4m3"]
    x = torch.empty(16, 16, dtype=torch.bfloat16)[: shape[0], : shape[1]]  # rows 32 bytes apart
    cases.check_encode(KERNELS, x, spec, None)
    cases.check_encode(KERNELS, x, spec, spec)
    cases.check_many(KERNELS, [x, x], spec, spec)
    made = KERNELS.ops["encode_many"]([x, x], spec, spec, EncodeRequest())
    assert [scale.item() for scale in made[1::2]] == [1.0] * 4


def test_an_access_outside_of_the_buffers_is_reported() -> None:
    kernels = emulated.EmulatedKernels(MODULE)
    inside = kernels.pointer
    x = [torch.zeros(16, 64, dtype=torch.bfloat16) for _ in range(3)]

    def without_last(tensor, written=False):
        return tensor.data_ptr() if tensor is x[2] else inside(tensor, written)

    kernels.pointer = without_last
    with pytest.raises(RuntimeError, match=r"EncodeMany.*must lie inside a buffer"):
        kernels.encode_many(x, cases.plain_specs()["mxfp8"], None, EncodeRequest())


def test_one_amax_serves_both_planes_of_a_single_tensor() -> None:
    spec = cases.plain_specs()["nvfp4"]
    x = cases.matrix(128, 64, torch.bfloat16, 1, "normal")
    want = cases.cpu_ops()["amax"](x, spec)
    made = KERNELS.ops["encode"](x, spec, spec, EncodeRequest())
    assert MODULE.kernels() == ["AmaxAlong", "EncodeTile"]
    assert torch.equal(made[2], want) and torch.equal(made[5], want)


# --- the operator and the public door over these kernels


@pytest.mark.parametrize("pair", sorted(PAIRS))
def test_quantizing_many_is_quantizing_each(pair, forced) -> None:
    quantizer = hybridq.quantizer(**PAIRS[pair])
    tensors = [torch.randn(shape) for shape in ((64, 64), (3, 32, 40), (0, 16), (7,), (32, 128))]
    MODULE.reset()
    made = hybridq.multi_tensor_quantize(tensors, quantizer)
    launched = MODULE.kernels()
    for tensor, one in zip(tensors, made, strict=True):
        same_planes(one, quantizer(tensor))
    if pair in ("uniform", "derivable", "packed derivable", "one scale", "square", "from decoded"):
        assert "EncodeMany" in launched
    if pair == "half identity":  # the quantized plane shares launches, the other is a copy
        assert launched.count("EncodeMany") == 1


def test_stochastic_tensors_draw_as_single_calls_do(forced) -> None:
    quantizers = [
        hybridq.NVFP4Quantizer(stochastic_rounding=True),
        hybridq.MXFP8Quantizer(),
        hybridq.NVFP4Quantizer(stochastic_rounding=True, with_rht=True),
    ] * 2
    tensors = [torch.randn(32, 64) for _ in quantizers]
    torch.manual_seed(3)
    made = hybridq.multi_tensor_quantize(tensors, quantizers)
    torch.manual_seed(3)
    for one, tensor, quantizer in zip(made, tensors, quantizers, strict=True):
        same_planes(one, quantizer(tensor))


def test_the_binding_checks_what_it_gets() -> None:
    spec = core_spec(cases.plain_specs()["mxfp8"])[0]
    stat = core_spec(cases.plain_specs()["nvfp4"])[0]
    rows = core_spec(cases.option_specs()["nvfp4 rows"])[0]
    drawn = core_spec(cases.option_specs()["mxfp8 sr"])[0]
    x, buffers = (8, 16, 16, 16, 1), (8, 8, 0)
    for planes, message in (
        ((None, None), "row or col must be given"),
        (((None, 0, 0, False, [buffers]), None), "a plane needs a spec"),
        (((spec, 0, 0, False, []), None), "buffers for 1 tensors, got 0"),
        (((spec, 0, 0, True, [buffers]), None), "only a plane that needs a stat has one"),
        (((spec, 0, 0, False, [(0, 8, 0)]), None), "data must not be null"),
        (((spec, 0, 0, False, [(8, 0, 0)]), None), "scale must not be null"),
        (((stat, 0, 0, True, [buffers]), None), "stats must not be null"),
        (((rows, 0, 0, False, [buffers]), None), "a row-scaled plane must find its stats"),
        (((rows, 0, 0, True, [buffers]), None), "amax must not be null"),
        (((drawn, 0, 0, False, [buffers]), None), "seeds must not be null"),
        (((stat, 0, 8, True, [buffers]), (stat, 0, 8, True, [buffers])), "must follow those of"),
    ):
        with pytest.raises(ValueError, match=f"encode_many: .*{message}"):
            given = [None if plane is None else (*plane, 0, 0, 0) for plane in planes]
            MODULE.encode_many("bfloat16", [x], *given, 0, 0)
    with pytest.raises(ValueError, match="encode_many: rows and cols must be >= 0"):
        MODULE.encode_many("bfloat16", [(8, -1, 16, 16, 1)], None, None, 0, 0)
