"""What is stored has one NaN, in every backend: docs/reference/numerics.md, "One NaN"."""

from __future__ import annotations

import pytest
import torch

from core_tools import using_variant
from emulated import load, make_backend
from hybridq import _core
from hybridq.kernels.choice import EncodeRequest, Prologue
from hybridq.kernels.choice import registry as registry
from hybridq.kernels.cpu import backend as backend_cpu
from hybridq.kernels.operators.encode_plan import given_statistic, update_amax
from hybridq.kernels.ragged.group_loop import amax_loop, largest_loop
from hybridq.kernels.ragged.sync_free_groups import amax_by_group, largest_by_group
from kernel_cases import assert_same, option_specs, plain_specs

SPECS = {**plain_specs(), **option_specs()}
SEED = torch.tensor([5], dtype=torch.int64)
ROWS, COLS = 33, 70
#: NaNs of other bits: with a sign, with a payload, signalling.
NANS = {
    torch.float32: (0x7FC00000, -1, 0x7F800001, -0x3FFFFF),
    torch.bfloat16: (0x7FC0, -1, 0x7F81, -0x3F),
    torch.float16: (0x7E00, -1, 0x7C01, -0x1FF),
}
_INTEGER = {4: torch.int32, 2: torch.int16}
_EMULATED = load()


def nan_of(bits: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([bits], dtype=_INTEGER[dtype.itemsize]).view(dtype)


def x_with(bits: int, dtype: torch.dtype) -> torch.Tensor:
    """A matrix with one NaN in it, and a block of zeros of either sign."""
    x = torch.linspace(-3, 3, ROWS * COLS, dtype=torch.float32).view(ROWS, COLS).to(dtype)
    x[20] *= 0.0
    x.view(_INTEGER[dtype.itemsize])[1, 5] = bits
    return x


def backends():
    names = [("reference", None), *(("cpu", name) for name in _core.build_info()["tables"])]
    return names + ([("emulated", None)] if _EMULATED is not None else [])


@pytest.fixture(params=backends(), ids=lambda pair: "-".join(filter(None, pair)))
def ops(request):
    name, variant = request.param
    if name == "emulated":
        yield make_backend(_EMULATED).ops
    else:
        (backend,) = (one for one in registry.backends() if one.name == name)
        with using_variant(variant or _core.variant()):
            yield backend.ops


def is_canonical(tensor: torch.Tensor) -> bool:
    bits = tensor.contiguous().view(_INTEGER[tensor.dtype.itemsize])[tensor.isnan()]
    return bool(bits.numel()) and bool((bits == NANS[tensor.dtype][0]).all())


@pytest.mark.thinned(2)
@pytest.mark.parametrize("dtype", NANS, ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_planes_and_statistics(ops, name, dtype) -> None:
    spec = SPECS[name]
    cpu = registry._backends["cpu"].ops
    want = None
    for bits in NANS[dtype]:
        x = x_with(bits, dtype)
        stat = None
        if spec.needs_amax:
            stat = ops["amax"](x, spec)
            assert is_canonical(stat)
        buffers = ops["encode"](x, spec, None, EncodeRequest(row_stat=stat, seed=SEED))
        for buffer in buffers[1:]:
            assert buffer.dtype == torch.uint8 or is_canonical(buffer)
        want = want or cpu["encode"](x, spec, None, EncodeRequest(row_stat=stat, seed=SEED))
        for index, (got, other) in enumerate(zip(buffers, want, strict=True)):
            assert_same(got, other, f"buffer {index}")
    for out in (torch.bfloat16, torch.float16):
        assert is_canonical(ops["decode"](want, spec, ROWS, COLS, out))
    for out in (torch.float32, torch.bfloat16):
        assert is_canonical(ops["operand"](want, spec, ROWS, COLS, out)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm", "gelu", "relu", "swiglu"])
def test_values_of_16_bits(ops, kind, dtype) -> None:
    is_norm, is_gated = "Norm" in kind, kind == "swiglu"
    gamma = torch.ones(COLS, dtype=torch.float32) if is_norm else None
    core = {"swiglu": "silu"}.get(kind, kind)
    prologue = Prologue(kind, core, is_gated, gamma, gamma, 1e-5)
    for bits in NANS[dtype]:
        assert is_canonical(ops["map"](x_with(bits, dtype), prologue)[0])
    for bits in NANS[torch.float32]:
        x = x_with(bits, torch.float32)
        assert is_canonical(ops["round_stochastic"](x, SEED, dtype, 0, 0, 0))


@pytest.mark.parametrize("dtype", NANS, ids=str)
def test_recorded_amaxes(dtype) -> None:
    for bits in NANS[dtype]:
        x = x_with(bits, dtype)
        for name in ("mxfp8", "nvfp4"):
            run = backend_cpu.encoder(SPECS[name], None, dtype)
            stat = torch.ones(1, dtype=torch.float32) if SPECS[name].needs_amax else None
            found = torch.zeros(1, dtype=torch.float32)
            run(x, EncodeRequest(row_stat=stat), found)
            assert is_canonical(found)
        found = torch.zeros(1, dtype=torch.float32)
        update_amax(found, x)
        assert is_canonical(found)
        offsets = torch.tensor([10, ROWS], dtype=torch.int32)
        for made in (
            largest_by_group(x, offsets),
            largest_loop(x, offsets),
            amax_by_group(x, offsets, SPECS["nvfp4"], "rowwise"),
            amax_loop(x, offsets, SPECS["nvfp4"], "rowwise"),
        ):
            assert is_canonical(made)


def test_statistics_from_outside() -> None:
    for bits in NANS[torch.float32]:
        given = given_statistic(4, SPECS["nvfp4"], nan_of(bits, torch.float32), "encode")
        assert is_canonical(given)
        made = torch.ops.hybridq.encode(
            torch.ones(4, 32, dtype=torch.float32), "nvfp4", "", nan_of(bits, torch.float32)
        )
        assert is_canonical(made[2])


@pytest.mark.parametrize("sign", [0.0, -0.0])
def test_a_maximum_of_zeros_is_plus_zero(sign) -> None:
    x = torch.full((4, 32), sign, dtype=torch.float32)
    offsets = torch.tensor([2, 4], dtype=torch.int32)
    found = torch.full((1,), -1.0, dtype=torch.float32)
    update_amax(found, x)
    made = [found, largest_loop(x, offsets), largest_by_group(x, offsets)]
    made += [
        registry._backends[name].ops["amax"](x, SPECS["nvfp4"]) for name in ("cpu", "reference")
    ]
    for tensor in made:
        assert not tensor.signbit().any()
