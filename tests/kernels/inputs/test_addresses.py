"""No pointer reaches a compiled function unless its tensor has the dtype, place and size for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod

import pytest
import torch

import hybridq
from emulated import load, make_backend
from hybridq.formats import DEFAULT_SIGNS, PlaneSpec
from hybridq.kernels.choice import EncodeRequest, GemmArgs, Groups, Operand, Prologue
from hybridq.kernels.cpu import backend as backend_cpu
from hybridq.kernels.cpu.backend import CPU
from hybridq.kernels.cpu.bf16_gemm import multiply
from hybridq.kernels.cpu.codes_gemm import CodesProduct
from hybridq.kernels.operators.skinny_gemm import SkinnyGemm
from hybridq.nn.delayed_scaling.state import states_of
from kernel_cases import plain_specs

ROWS, COLS = 6, 48
SPECS = {
    "mxfp8": PlaneSpec.parse("mxfp8"),
    "mxfp8 sr": replace(PlaneSpec.parse("mxfp8"), stochastic=True),
    "fp8_e4m3": PlaneSpec.parse("fp8_e4m3"),
    "nvfp4": PlaneSpec.parse("nvfp4"),
    "nvfp4 rht": replace(PlaneSpec.parse("nvfp4"), signs=DEFAULT_SIGNS),
    "nvfp4 rows": replace(PlaneSpec.parse("nvfp4"), row_scaled=True),
}
_EMULATED = load()


def wrong_ones(good: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> Iterator[torch.Tensor]:
    """Tensors that are in one way not what a kernel takes for `good`."""
    for dtype in dtypes:
        yield good.to(dtype)
    yield good.to("meta")
    yield good.flatten()[:-1]
    yield torch.cat([good.flatten(), good.flatten()])


def x(dtype=torch.float32) -> torch.Tensor:
    return torch.linspace(-3, 3, ROWS * COLS, dtype=torch.float32).view(ROWS, COLS).to(dtype)


def stat(count: int) -> torch.Tensor:
    return torch.full((count,), 3.0, dtype=torch.float32)


SEED = torch.tensor([7], dtype=torch.int64)
OTHERS = (torch.float64, torch.bfloat16, torch.float16, torch.int32)
FP32 = torch.float32
Run = Callable[[torch.Tensor], object]


def decode_cases(ops) -> Iterator[tuple[str, Run, torch.Tensor]]:
    for name, spec in SPECS.items():
        planes = ops["encode"](x(), spec, None, EncodeRequest(seed=SEED))
        for index, buffer in enumerate(planes):

            def run(given, planes=planes, index=index, spec=spec):
                own = [given if i == index else one for i, one in enumerate(planes)]
                return ops["decode"](own, spec, ROWS, COLS, FP32)

            yield f"decode {name} {index}", run, buffer


def encode_cases(ops) -> Iterator[tuple[str, Run, torch.Tensor]]:
    for name, count in (("fp8_e4m3", 1), ("nvfp4", 1), ("nvfp4 rows", ROWS)):
        spec = SPECS[name]
        yield (
            f"statistic of rows, {name}",
            lambda given, spec=spec: ops["encode"](x(), spec, None, EncodeRequest(row_stat=given)),
            stat(count),
        )
    for name, count in (("fp8_e4m3", 1), ("nvfp4 rows", COLS)):
        spec = SPECS[name]
        yield (
            f"statistic of columns, {name}",
            lambda given, spec=spec: ops["encode"](x(), None, spec, EncodeRequest(col_stat=given)),
            stat(count),
        )
    spec = SPECS["mxfp8 sr"]
    yield "seed", lambda given: ops["encode"](x(), spec, None, EncodeRequest(seed=given)), SEED


def norm_cases(ops) -> Iterator[tuple[str, Run, torch.Tensor]]:
    gamma = torch.ones(COLS, dtype=FP32)

    def norm(gamma=gamma, beta=gamma) -> Prologue:
        return Prologue("LayerNorm", "LayerNorm", False, gamma, beta, 1e-5)

    yield "gamma", lambda given: ops["map"](x(), norm(gamma=given)), gamma
    yield "beta", lambda given: ops["map"](x(), norm(beta=given)), gamma
    spec, args = SPECS["mxfp8"], EncodeRequest()
    yield (
        "gamma before encode",
        lambda given: ops["map_encode"](x(), norm(gamma=given), args, row=spec, col=None),
        gamma,
    )
    yield (
        "statistic behind a norm",
        lambda given: ops["map_encode"](
            x(), norm(), EncodeRequest(row_stat=given), row=SPECS["fp8_e4m3"], col=None
        ),
        stat(1),
    )


def emulated_cases(ops) -> Iterator[tuple[str, Run, torch.Tensor]]:
    xs, spec = [x(), x()], SPECS["fp8_e4m3"]
    yield (
        "statistics of many",
        lambda given: ops["encode_many"](xs, spec, None, EncodeRequest(row_stat=given)),
        stat(2),
    )
    drawn = SPECS["mxfp8 sr"]
    seeds = torch.tensor([1, 2], dtype=torch.int64)
    yield (
        "seeds of many",
        lambda given: ops["encode_many"](xs, drawn, None, EncodeRequest(seed=given)),
        seeds,
    )
    ends = torch.tensor([2, ROWS], dtype=torch.int32)
    begins = torch.tensor([0, 128, 256], dtype=torch.int32)

    def ragged(ends=ends, begins=begins):
        groups = Groups(ends, begins, 256)
        return ops["encode_ragged"](x(), groups, None, SPECS["mxfp8"], EncodeRequest())

    yield "ends", lambda given: ragged(ends=given), ends
    yield "begins", lambda given: ragged(begins=given), begins


def backends() -> Iterator[tuple[str, object]]:
    yield "cpu", CPU.ops
    if _EMULATED is not None:
        yield "emulated", make_backend(_EMULATED).ops


def all_cases() -> Iterator[object]:
    for name, ops in backends():
        makers = [encode_cases, decode_cases, norm_cases]
        makers += [emulated_cases] if name == "emulated" else []
        for make in makers:
            for what, run, good in make(ops):
                yield pytest.param(run, good, id=f"{name}: {what}")


@pytest.mark.parametrize(("run", "good"), list(all_cases()))
def test_a_backend_refuses_what_is_not_the_memory_it_takes(run, good) -> None:
    run(good)
    dtypes = tuple(dtype for dtype in OTHERS if dtype != good.dtype)
    for wrong in wrong_ones(good, dtypes):
        # Torch itself refuses to copy a meta seed.
        with pytest.raises((ValueError, NotImplementedError)):
            run(wrong)


@pytest.mark.parametrize(("name", "ops"), list(backends()))
def test_a_backend_refuses_matrices_of_other_dtypes_and_devices(name, ops) -> None:
    spec, norm = SPECS["mxfp8"], Prologue("gelu", "gelu")
    calls = {
        "encode": lambda x: ops["encode"](x, spec, None, EncodeRequest()),
        "amax": lambda x: ops["amax"](x, SPECS["nvfp4"]),
        "map": lambda x: ops["map"](x, norm),
        "map_encode": lambda x: ops["map_encode"](x, norm, EncodeRequest(), row=spec, col=None),
        "round": lambda x: ops["round_stochastic"](x, SEED, torch.bfloat16, 0, 0, 0),
    }
    wrong = [x(torch.float64), x().to(torch.uint8), x()[0]]
    wrong += [x().to("meta")] if name == "cpu" else []
    for what, call in calls.items():
        call(x())
        for given in (*wrong, *([x(torch.bfloat16)] if what == "round" else [])):
            with pytest.raises((ValueError, IndexError, TypeError)):
                call(given)
    for data, bits in ((x(), 8), (x().to(torch.uint8), 16), (x().to(torch.uint8)[:-1], 8)):
        with pytest.raises(ValueError, match="transpose: data"):
            ops["transpose"](data, ROWS, COLS, bits)


@pytest.mark.parametrize(("name", "ops"), list(backends()))
def test_a_backend_refuses_a_statistic_with_gaps(name, ops) -> None:
    args = EncodeRequest(row_stat=torch.stack([stat(ROWS), stat(ROWS)], 1)[:, 0])
    with pytest.raises(ValueError, match="with gaps"):
        ops["encode"](x(), SPECS["nvfp4 rows"], None, args)


def test_an_encoder_refuses_another_maximum_to_raise() -> None:
    run = backend_cpu.encoder(SPECS["mxfp8"], None, FP32)
    found = torch.zeros(1, dtype=FP32)
    run(x(), EncodeRequest(), found)
    assert found.item() == 3.0
    for wrong in wrong_ones(found, OTHERS):
        if wrong.numel() or wrong.dtype != FP32:
            with pytest.raises(ValueError, match="encode: found must be"):
                run(x(), EncodeRequest(), wrong)


def test_delayed_scaling_refuses_a_state_of_another_dtype() -> None:
    layer = hybridq.Linear(COLS, 8, dtype=FP32)
    (state,) = states_of(layer).values()
    for name in ("forward_stats", "forward_amaxes"):
        setattr(state, name, getattr(state, name).to(torch.bfloat16))
    state._cache()
    with hybridq.autocast(recipe="fp8_delayed"), pytest.raises(ValueError, match="float32"):
        layer(x())


def test_the_product_refuses_other_operands() -> None:
    a, b, args = x(torch.bfloat16), x(torch.bfloat16), GemmArgs(None, None, FP32)
    for one in (x(), x(torch.bfloat16).to("meta"), a[:, :-1], a[0]):
        with pytest.raises((ValueError, IndexError)):
            multiply(a, one, None, None, args)
    for wrong in (
        (a, b, torch.ones(5, dtype=FP32), None, args),
        (a, b, None, torch.ones(7, dtype=FP32), args),
        (a, b, None, None, args._replace(bias=torch.ones(5, dtype=FP32))),
        (a, b, None, None, args._replace(accumulate_into=torch.ones(6, 5, dtype=FP32))),
    ):
        with pytest.raises(ValueError, match="product: "):
            multiply(*wrong)


def test_a_product_of_few_rows_refuses_other_operands() -> None:
    spec = SPECS["mxfp8"]
    product = backend_cpu.CPU.ops["skinny_gemm"](spec, spec, FP32)
    run = SkinnyGemm(product, None, spec, FP32)
    bias = torch.ones(ROWS, dtype=FP32)
    good = (x()[:2], x(), bias)
    data, scale = CPU.ops["encode"](x(), spec, None, EncodeRequest(seed=SEED))
    run(*good, None, 1)
    run(x()[:2], Operand([data, scale], spec, ROWS, COLS), bias, None, 1)
    for wrong in (
        (x(torch.bfloat16)[:2], x(), bias),
        (x()[:2], x(torch.bfloat16), bias),
        (x()[:2], x()[:, :-1], bias),
        (x()[:2, :-1], x(), bias),
        (x()[:2], x(), bias[:-1]),
        (x()[:2], x(), bias.to(torch.bfloat16)),
        (x()[:2], Operand([data, scale], spec, ROWS, COLS - 32), bias),
        (x()[:2], Operand([data], spec, ROWS, COLS), bias),
        (x()[:2], Operand([data, scale.to(torch.int32)], spec, ROWS, COLS), bias),
        (x()[:2], Operand([data[:-1], scale], spec, ROWS, COLS), bias),
    ):
        with pytest.raises(ValueError, match="linear: "):
            run(*wrong, None, 1)


def test_a_product_of_codes_refuses_other_operands() -> None:
    spec, args = SPECS["mxfp8"], GemmArgs(None, None, FP32)
    data, scale = CPU.ops["encode"](x(), spec, None, EncodeRequest(seed=SEED))
    run, rows = CodesProduct(spec), x()[:2]
    plane = Operand([data, scale], spec, ROWS, COLS)
    run(rows, None, plane, args)
    for wrong in (
        (rows.to(torch.float64), None, plane, args),
        (rows[:, :-1], None, plane, args),
        (rows, torch.ones(3, dtype=FP32), plane, args),
        (rows, None, Operand([data[:-1], scale], spec, ROWS, COLS), args),
        (rows, None, Operand([data, scale[:-1]], spec, ROWS, COLS), args),
        (rows, None, plane, args._replace(bias=torch.ones(ROWS + 1, dtype=FP32))),
        (rows, None, plane, args._replace(accumulate_into=torch.ones(2, 5, dtype=FP32))),
    ):
        with pytest.raises(ValueError, match="product: "):
            run(*wrong)


# --- memory that a backend makes itself

_MARGIN, _POISON = 64, 0xA5


@pytest.mark.parametrize("name", sorted(plain_specs()))
@pytest.mark.parametrize("shape", [(1, 1), (7, 33), (33, 130), (0, 5), (5, 0)], ids=str)
def test_the_core_writes_into_what_was_made_for_it_and_no_further(monkeypatch, name, shape) -> None:
    spec, wholes = PlaneSpec.parse(name), []

    def guarded(*size, dtype, device):
        shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
        nbytes = prod(shape) * dtype.itemsize
        whole = torch.full((nbytes + 2 * _MARGIN,), _POISON, dtype=torch.uint8, device=device)
        wholes.append(whole)
        return whole[_MARGIN : _MARGIN + nbytes].view(dtype).reshape(shape)

    monkeypatch.setattr(backend_cpu, "_empty", guarded)
    given = torch.linspace(-3, 3, prod(shape), dtype=FP32).view(shape)
    args = EncodeRequest(seed=SEED)
    for pair in ((spec, None), (None, spec), (spec, spec)):
        buffers = CPU.ops["encode"](given, *pair, args)
    half = buffers[: len(buffers) // 2]
    CPU.ops["decode"](half, spec, *shape, torch.bfloat16)
    CPU.ops["operand"](half, spec, *shape, FP32)
    for op in ("map", "map_encode"):
        prologue = Prologue("srelu", "srelu")
        rest = (args, spec, spec) if op == "map_encode" else ()
        CPU.ops[op](given, prologue, *rest)
    bits = 4 if half[0].shape[1] * 2 - 1 == shape[1] or spec.format.element.bits == 4 else 8
    CPU.ops["transpose"](half[0], *shape, bits)
    CPU.ops["round_stochastic"](given, SEED, torch.float16, 0, 0, 0)
    CPU.ops["amax"](given, spec)
    assert len(wholes) > 10
    for whole in wholes:
        assert bool((torch.cat([whole[:_MARGIN], whole[-_MARGIN:]]) == _POISON).all())


def test_a_plain_weight_that_was_given_the_data_of_planes_is_named() -> None:
    """torch gives it the memory of a wrapper, which is none, and asks nobody."""
    layer = hybridq.Linear(32, 32)
    layer.weight.data = hybridq.quantize(torch.ones(32, 32), "mxfp8")
    said = r"weight must have memory.*module\.weight = torch\.nn\.Parameter"
    with hybridq.autocast(recipe="mxfp8"), pytest.raises(RuntimeError, match=said):
        layer(torch.ones(4, 32))
