"""Planes that share an allocation, in the emulator: in their places, with the bits of `encode`."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

import emulated
import hybridq
import kernel_cases as cases
from hybridq import reference
from hybridq.formats import PlaneSpec
from hybridq.kernels import folded_backend
from hybridq.kernels.choice import ALIGNMENT, EncodeRequest, GemmArgs, Operand, OpQuery, Place
from hybridq.kernels.choice.registry import register_backend, unregister_backend
from hybridq.kernels.decoded import factored_gemm, planned_gemm
from hybridq.kernels.inputs import Chip
from hybridq.kernels.operators import run_gemm
from hybridq.kernels.scaled_mm import backend as native
from hybridq.kernels.scaled_mm import laid_down
from hybridq.kernels.scaled_mm.operand_views import tiled
from hybridq.nn.autograd import Activation, Norm, PrologueCall
from hybridq.nn.autograd.linear_function import _Call, _forward, _Needs
from hybridq.nn.autograd.operands import PlaneOperand, gemm
from hybridq.nn.autograd.prepared_backward import PreparedBackward
from hybridq.nn.autograd.prepared_linear import PreparedLinear
from hybridq.nn.autograd.slot_encoder import SlotEncoder
from hybridq.recipes import bind
from scaled_mm_oracle import scaled_mm

MODULE = emulated.load()
if MODULE is None:
    pytest.skip("the emulated kernels are not built (make emulation)", allow_module_level=True)

BACKEND = emulated.make_backend(MODULE)
PLAIN = cases.plain_specs()
PAIRS = {
    **cases.pairs(),
    **{f"{name} | {name}": (spec, spec) for name, spec in PLAIN.items()},
    **{f"{name} |": (spec, None) for name, spec in PLAIN.items()},
    # One amax of both, for which only one of them has a buffer.
    "fp8_e4m3 | nvfp4": (PLAIN["fp8_e4m3"], PLAIN["nvfp4"]),
    "nvfp4 | fp8_e4m3": (PLAIN["nvfp4"], PLAIN["fp8_e4m3"]),
}


@pytest.fixture(autouse=True)
def _random_order(seed: int):
    MODULE.set_seed(seed)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


@pytest.mark.parametrize("name", PAIRS)
def test_planes_in_a_place_have_the_bits_of_encode(name: str) -> None:
    row, col = PAIRS[name]
    for i, (rows, cols) in enumerate(((64, 96), (7, 33))):
        x = cases.matrix(rows, cols, cases.DTYPES[i], i, cases.SPECIALS[i])
        request = EncodeRequest("", "", seed=torch.tensor([5]), row_stream=2, col_stream=3)
        encoder = BACKEND.encoder(row, col, x.dtype)
        want = BACKEND.ops["encode"](x, row, col, request)
        room = encoder.room(rows, cols)
        assert room % ALIGNMENT == 0
        memory = torch.full((room + 2 * ALIGNMENT,), 0xA5, dtype=torch.uint8)
        got = encoder.placed.encode(x, request, Place(memory, ALIGNMENT, 0))
        assert len(got) == len(want)
        count = len(row.buffers(rows, cols))
        for j, (mine, theirs) in enumerate(zip(got, want, strict=True)):
            cases.assert_same(mine, theirs, f"{name} of {rows}x{cols}: buffer {j}")
            # What dies with the forward keeps nothing alive that does not.
            # An amax of both is with the plane that is saved.
            is_shared = j == 2 and j < count < len(got) and mine is got[-1]
            assert (_storage(mine) == _storage(memory)) == (j < count and not is_shared)
            assert mine.data_ptr() % 16 == memory.data_ptr() % 16 or j >= count
        outside = torch.cat([memory[:ALIGNMENT], memory[-ALIGNMENT:]])
        assert (outside == 0xA5).all()


@pytest.mark.parametrize("name", ["mxfp8", "mxfp8_e5m2", "mxfp4", "mxfp6_e2m3"])
def test_planes_folded_into_a_place_are_those_of_fold(name: str) -> None:
    spec, rows, cols = PLAIN[name], 36, 256
    x = cases.matrix(rows, cols, torch.bfloat16, 3, "normal")
    plane = BACKEND.ops["encode"](x, spec, None, EncodeRequest())
    want = BACKEND.ops["fold"](plane, spec, rows, cols, 1)
    fold_into = BACKEND.folder(spec, rows, cols)
    memory = torch.zeros(fold_into.nbytes + ALIGNMENT, dtype=torch.uint8)
    with emulated.EmulatedKernels(MODULE).launch(x.device):
        codes, scale = fold_into(plane, memory, ALIGNMENT, 0)
    cases.assert_same(codes, want.codes, "codes")
    cases.assert_same(scale.contiguous(), want.scale.contiguous(), "scales")
    assert scale.stride() == want.scale.stride()


RECIPES = ["mxfp8", "fp8_current", "nvfp4", "mxfp8_fwd_nvfp4_bwd", "fp8_block"]
#: What a matrix goes through: what it is, the columns that it takes, whether a norm has a beta.
BEFORE = {
    "LayerNorm": (Norm("LayerNorm", 1e-5), 96, True),
    "RMSNorm": (Norm("RMSNorm", 1e-5, True), 96, False),
    "swiglu": (Activation("swiglu"), 192, False),
}


def _assert_prepared(recipe: str, needs: tuple[bool, bool], before: str = "") -> None:
    plan = bind(hybridq.recipe(recipe), "layer", "linear")
    prologue, cols, has_beta = BEFORE.get(before, (None, 96, False))
    x, w = cases.matrix(64, cols, torch.bfloat16, 1, "normal"), torch.randn(48, 96).bfloat16()
    bias, seed, gamma, beta = torch.randn(48).bfloat16(), torch.tensor([11]), None, None
    if isinstance(prologue, Norm):
        gamma, beta = torch.randn(2, 96).bfloat16()
    call = _Call(plan, _Needs(needs[1], needs[0]), None, prologue)
    given = None if prologue is None else PrologueCall(prologue, gamma, beta if has_beta else None)
    norm = (None, None) if given is None else given[1:]
    register_backend(BACKEND)
    try:
        with hybridq.backend("emulated"), torch.no_grad():
            want = _forward(x, w, bias, *norm, seed, None, call)
            prepared = PreparedLinear(plan, x.dtype, "cpu")
            made = prepared.on_gpu(x, w, bias, seed, needs, before=given)
    finally:
        unregister_backend("emulated")
    cases.same_values(made[0], want[0], "y")
    for what, mine, theirs in zip(("x", "w", "rows"), made[1:], want[1:4], strict=True):
        assert len(mine) == len(theirs)
        for j, (one, other) in enumerate(zip(mine, theirs, strict=True)):
            cases.assert_same(one, other.contiguous(), f"saved of {what}: {j}")
    owners = {_storage(one) for one in made[1] if one is not x}
    assert owners.isdisjoint(_storage(one) for one in made[2] if one is not w)
    if recipe != "mxfp8_fwd_nvfp4_bwd":  # whose weight is encoded in two steps
        # One allocation of both statistics, which the general path does not make.
        assert len({_storage(one) for one in made[3]}) == (gamma is not None)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, False)])
def test_a_prepared_forward_of_a_gpu_has_the_general_ones_bits(recipe: str, needs) -> None:
    _assert_prepared(recipe, needs)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("before", BEFORE)
def test_a_prepared_forward_behind_a_norm_or_an_activation(recipe: str, before: str) -> None:
    _assert_prepared(recipe, (True, True), before)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("weights", cases.DTYPES, ids=str)
@pytest.mark.parametrize("is_centered", [False, True])
def test_a_norm_makes_its_weights_fp32_on_the_way(dtype, weights, is_centered: bool) -> None:
    """In the launch that finds the rows' statistics: the bits of weights that torch casts."""
    for rows, cols, has_beta in ((64, 96, True), (5, 33, False), (9, 264, True)):
        x = cases.matrix(rows, cols, dtype, rows, "normal")
        gamma, beta = (torch.randn(cols).to(weights) for _ in range(2))
        gamma[0], beta[-1] = -0.0, -0.0
        kind = "LayerNorm" if has_beta else "RMSNorm"
        norm = Norm(kind, 1e-5, is_centered)
        raw = norm.of_backends(x, gamma, beta if has_beta else None)
        assert raw.gamma is gamma and raw.is_centered == is_centered
        spec = PLAIN["mxfp8"]
        request = EncodeRequest()
        want = BACKEND.ops["map_encode"](x, raw.wide(), request, spec, spec)
        encoder = BACKEND.encoder(spec, spec, dtype)
        memory = torch.full((encoder.room(rows, cols),), 0xA5, dtype=torch.uint8)
        got = encoder.placed.encode(x, request, Place(memory, 0, 0), raw)
        wanted = [*want[0], *want[1:]]
        assert len(got) == len(wanted)
        for j, (mine, theirs) in enumerate(zip(got, wanted, strict=True)):
            cases.assert_same(mine.contiguous(), theirs.contiguous(), f"{rows}x{cols}: {j}")


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("has_wgrad", [True, False])
def test_a_prepared_backward_of_a_gpu_has_the_general_ones_bits(recipe, has_wgrad) -> None:
    plan, seed = bind(hybridq.recipe(recipe), "layer", "linear"), torch.tensor([11])
    x, w = cases.matrix(64, 96, torch.bfloat16, 1, "normal"), torch.randn(48, 96).bfloat16()
    dy = cases.matrix(64, 48, torch.bfloat16, 2, "normal")
    register_backend(BACKEND)
    try:
        with hybridq.backend("emulated"), torch.no_grad():
            x_saved = SlotEncoder(plan.input, "input", seed, True).operand(x, True)[1]
            w_saved = SlotEncoder(plan.weight, "weight", seed, True).operand(w, True)[1]
            encoder = SlotEncoder(plan.grad_output, "grad_output", seed, True)
            row, col = encoder.encode(dy, True, has_wgrad)
            grad, how = plan.grad_output, plan.precision
            a = (
                PlaneOperand(row, grad.row.spec, 64),
                PlaneOperand(w_saved, plan.weight.col.spec, 96),
            )
            want = [gemm(*a, 48, None, dy.dtype, how.dgrad, run_gemm)]
            sizes, wants = (64, 96, 48), (True, has_wgrad)
            ready = PreparedBackward(plan, sizes, wants, dy.dtype, dy.device)
            assert ready.is_possible
            dy_row, dy_col, work = ready.encode(dy, seed)
            got = [ready.dgrad(dy_row, w_saved, None, work)]
            if has_wgrad:
                b = (
                    PlaneOperand(col, grad.col.spec, 48),
                    PlaneOperand(x_saved, plan.input.col.spec, 96),
                )
                want.append(gemm(*b, 64, None, dy.dtype, how.wgrad, run_gemm))
                got.append(ready.wgrad(dy_col, x_saved, work))
    finally:
        unregister_backend("emulated")
    for mine, theirs in zip([*dy_row, *dy_col, *got], [*row, *col, *want], strict=True):
        cases.assert_same(mine.contiguous(), theirs.contiguous(), recipe)


def _operand(name: str, rows: int, k: int, spec: PlaneSpec | None = None) -> Operand:
    x = cases.matrix(rows, k, torch.bfloat16, rows, "normal")
    if name == "bf16":
        return Operand([x], PlaneSpec.parse("bf16"), rows, k)
    known = {**PLAIN, **cases.option_specs()}
    spec = spec or known.get(name) or PlaneSpec.parse(name)
    if spec.by_row(k) is not spec:  # made by another backend
        return Operand(reference.encode_plane(x, spec), spec, rows, k)
    return Operand(BACKEND.ops["encode"](x, spec, None, EncodeRequest()), spec, rows, k)


def _folded_operand(one: Operand, height: int) -> Operand:
    made = BACKEND.ops["fold"](one.buffers, one.spec, one.rows, one.cols, height)
    spec = folded_backend.folded_spec(one.spec, height)
    return Operand([made.codes, made.scale], spec, one.rows, one.cols)


@pytest.mark.parametrize("name", ["mxfp8", "mxfp8_fast", "fp8_e4m3", "fp8_block", "mx", "nvfp4"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_planned_products_have_the_bits_of_those_that_plan_nothing(
    name: str, has_bias: bool, monkeypatch
) -> None:
    sizes, dtype = (36, 48, 512), torch.bfloat16
    precision = "fast" if name == "mxfp8_fast" else "auto"
    if name == "mxfp8_fast":
        sizes = (36, 272, 512)
        a, b = (_operand("mxfp8", rows, 512) for rows in sizes[:2])
    elif name == "fp8_block":  # the weight's scales in squares, whose rows have no gap
        down = laid_down(PLAIN["fp8_1x128"])
        a, b = _operand("", 36, 512, down), _operand("fp8_128x128", 48, 512)
    elif name in ("mx", "nvfp4"):  # scales in tiles, those of the second in squares
        sizes, formats = (128, 256, 512), ("mxfp8", "mxfp8_32x32")
        formats = formats if name == "mx" else ("nvfp4", "nvfp4_16x16")
        a, b = (
            _operand("", rows, 512, tiled(PLAIN[one]))
            for rows, one in zip(sizes, formats, strict=False)
        )
    else:
        a, b = (_operand(name, rows, sizes[2]) for rows in sizes[:2])
    major = 10 if name in ("mx", "nvfp4") else 9
    chip = Chip("cuda", (major, 0), (13, 0), (2, 11))
    query = OpQuery("gemm", "cuda", dtype, a.spec, b.spec, precision, sizes, chip)
    bias = torch.randn(sizes[1]).to(dtype) if has_bias else None
    args = GemmArgs(bias, None, dtype, precision, chip=chip)
    calls = []

    def product(*given, **more):
        calls.append(given[0].dtype)
        return scaled_mm(*given, **more)

    monkeypatch.setattr(native, "scaled_mm", product)
    monkeypatch.setattr(native, "block_takes_bias", lambda *_: True)
    monkeypatch.setattr(folded_backend, "is_current", lambda _: True)
    monkeypatch.setattr(folded_backend, "_gemm", None)  # nothing is left to it
    kernels = emulated.EmulatedKernels(MODULE)
    if name.startswith("mxfp8"):
        heights = (1, 128 if precision == "fast" else 1)
        folders = [
            BACKEND.folder(one.spec, one.rows, sizes[2], height)
            for one, height in zip((a, b), heights, strict=True)
        ]
        with kernels.launch(torch.device("cpu")):
            got = folded_backend._Planned(query, folders)(a, b, args)
        left, right = (
            _folded_operand(one, height) for one, height in zip((a, b), heights, strict=True)
        )
        want = native.multiply(left, right, args, "block")
    else:
        monkeypatch.setattr(native, "multiply", None)
        got = native._planner(query)(a, b, args)
        monkeypatch.undo()
        monkeypatch.setattr(native, "scaled_mm", product)
        monkeypatch.setattr(native, "block_takes_bias", lambda *_: True)
        kind = {"fp8_e4m3": "tensor", "fp8_block": "block"}.get(name, name)
        want = native.multiply(a, b, args, kind)
    codes = torch.float4_e2m1fn_x2 if name == "nvfp4" else torch.float8_e4m3fn
    assert calls == [codes] * 2
    cases.assert_same(got, want, name)


def test_one_kernel_divides_both_amaxes(monkeypatch) -> None:
    """The bits of two divisions by torch, in the memory that a plan asks for, on Blackwell."""
    specials = torch.tensor([0.0, 3e-39, 1.0, 448.0, 3.4e38, float("nan"), 2688.0 / 3])
    kernels, bounds = emulated.EmulatedKernels(MODULE), (2688.0, 1536.0)
    for first in specials.split(1):
        for second in specials.flip(0).split(1):
            memory = torch.full((3 * ALIGNMENT,), 0xA5, dtype=torch.uint8)
            with kernels.launch(memory.device):
                place = Place(memory, ALIGNMENT, 0)
                got = kernels.two_factors((first, second), bounds, place)
            for mine, amax, bound in zip(got, (first, second), bounds, strict=True):
                want = reference.factor_of([amax, amax, amax], bound)
                cases.assert_same(mine, want, f"{amax} / {bound}")
                assert mine.data_ptr() % 16 == memory.data_ptr() % 16
            assert (torch.cat([memory[:ALIGNMENT], memory[-ALIGNMENT:]]) == 0xA5).all()
    sizes, dtype, chip = (128, 256, 512), torch.bfloat16, Chip("cuda", (10, 0), (13, 0), (2, 11))
    a, b = (
        _operand(name, rows, 512, tiled(PLAIN[name]))
        for name, rows in zip(("nvfp4", "nvfp4_16x16"), sizes, strict=False)
    )
    monkeypatch.setattr(native, "scaled_mm", scaled_mm)
    monkeypatch.setattr(native, "choose", lambda _: Decided(BACKEND))
    monkeypatch.setattr(native, "is_current", lambda _: True)
    run = native._planner(OpQuery("gemm", "cuda", dtype, a.spec, b.spec, "auto", sizes, chip))
    assert run.room == ALIGNMENT
    memory = torch.zeros(run.room + ALIGNMENT, dtype=torch.uint8)
    with kernels.launch(memory.device):
        got = run(a, b, GemmArgs(None, None, dtype, chip=chip, work=Place(memory, ALIGNMENT, 0)))
    assert memory[ALIGNMENT:].any()
    want = native.multiply(a, b, GemmArgs(None, None, dtype, chip=chip), "nvfp4")
    cases.assert_same(got, want, "the product")


class Decided(NamedTuple):
    """What a choice has come to."""

    chosen: object


@pytest.mark.parametrize("names", [("nvfp4", "nvfp4"), ("nvfp4", "mxfp8"), ("fp8_e4m3", "nvfp4")])
def test_a_planned_exact_product_has_the_bits_of_two_decodes(names, monkeypatch) -> None:
    """Operands, product and result in their places; amaxes are divided as the reference does."""
    sizes, dtype = (36, 48, 96), torch.bfloat16
    a, b = (_operand(name, rows, sizes[2]) for name, rows in zip(names, sizes, strict=False))
    want = []
    for one in (a, b):
        values, _ = reference.plane_operand(one.buffers, one.spec, one.rows, one.cols, dtype, False)
        want.append(values.float())
    factors = [reference.tensor_factor(one.buffers, one.spec) for one in (a, b)]
    bias = torch.randn(48).to(dtype)
    product = want[0] @ want[1].t()
    wanted = reference.finish_product(product, *factors, bias=bias, out_dtype=dtype)

    def mm(x: torch.Tensor, y: torch.Tensor, *, out_dtype, out: torch.Tensor) -> None:
        assert x.dtype == y.dtype == dtype and out_dtype == out.dtype == torch.float32
        assert {_storage(one) for one in (x, y, out)} == {_storage(memory)}
        torch.mm(x.float(), y.float(), out=out)

    monkeypatch.setattr(planned_gemm, "_mm", mm)
    monkeypatch.setattr(planned_gemm, "is_current", lambda _: True)
    monkeypatch.setattr(planned_gemm, "exact_gemm", None)  # nothing is left to it
    monkeypatch.setattr(planned_gemm, "select", lambda _: BACKEND)
    chip = Chip("cuda", (9, 0), (13, 0), (2, 11))
    query = OpQuery("gemm", "cuda", dtype, a.spec, b.spec, "exact", sizes, chip)
    run = planned_gemm.planner(query)
    memory = torch.full((run.room + 2 * ALIGNMENT,), 0xA5, dtype=torch.uint8)
    args = GemmArgs(bias, None, dtype, "exact", work=Place(memory, ALIGNMENT, 0))
    with emulated.EmulatedKernels(MODULE).launch(torch.device("cpu")):
        got = run(a, b, args)
    cases.assert_same(got, wanted, str(names))
    assert (torch.cat([memory[:ALIGNMENT], memory[-ALIGNMENT:]]) == 0xA5).all()


#: Of two planes, and the values of the left operand that the product gets.
FACTORED = [
    *(("nvfp4", "nvfp4"), ("nvfp4", "mxfp8"), ("mxfp8", "nvfp4"), ("fp8_e4m3", "nvfp4")),
    *(("nvfp4", "fp8_e5m2"), ("nvfp4 rht", "nvfp4 rht"), ("nvfp4", "bf16"), ("fp8_e5m2", "bf16")),
]


@pytest.mark.parametrize("sizes", [(36, 48, 96), (5, 7, 33)], ids=str)
@pytest.mark.parametrize("names", FACTORED, ids=str)
def test_factors_go_into_one_operand(names, sizes, monkeypatch) -> None:
    """That operand is its values times both factors, rounded once; the other one is exact."""
    dtype = torch.bfloat16
    a, b = (_operand(name, rows, sizes[2]) for name, rows in zip(names, sizes, strict=False))
    values, factor = [], torch.ones(1)
    for one in (a, b):
        if one.spec.format.is_identity:
            values.append(one.buffers[0].float())
            continue
        exact, _ = reference.plane_operand(one.buffers, one.spec, one.rows, one.cols, dtype, False)
        values.append(exact.float())
        own = reference.tensor_factor(one.buffers, one.spec)
        factor = factor if own is None else factor * own
    values[0] = values[0].double() * factor.double()
    monkeypatch.setattr(factored_gemm, "select", lambda _: BACKEND)
    chip = Chip("cuda", (9, 0), (13, 0), (2, 11))
    query = OpQuery("gemm", "cuda", dtype, a.spec, b.spec, "auto", sizes, chip)
    run = factored_gemm.factored_planner(query)
    memory = torch.full((run.room + 2 * ALIGNMENT,), 0xA5, dtype=torch.uint8)
    found = []

    def mm(bias: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        found.extend((bias, x, y.t()))
        return torch.empty(sizes[0], sizes[1])

    monkeypatch.setattr(torch, "addmm", mm)
    bias = torch.zeros(sizes[1], dtype=dtype)
    args = GemmArgs(bias, None, dtype, work=Place(memory, ALIGNMENT, 0))
    with emulated.EmulatedKernels(MODULE).launch(torch.device("cpu")):
        assert run(a, b, args).shape == sizes[:2]
        assert run(a._replace(buffers=[x.t().contiguous().t() for x in a.buffers]), b, args) is None
        for other in ({"bias": bias.float()}, {"accumulate_into": bias}, {"place": bias}):
            assert run(a, b, args._replace(**other)) is None  # the exact way's
    first, second = (one[:, : sizes[2]] for one in found[1:3])
    assert first.dtype == second.dtype == dtype
    assert torch.equal(second.float(), values[1][:, : sizes[2]])
    # One rounding to 8 bits; two of FP32 before it.
    wanted = values[0][:, : sizes[2]]
    assert ((first.double() - wanted).abs() <= (2.0**-8 + 2.0**-21) * wanted.abs()).all()
    assert (torch.cat([memory[:ALIGNMENT], memory[-ALIGNMENT:]]) == 0xA5).all()


ROW = "e4m3/1x96/fp32/amax/float8_block"
BLOCKS = "e4m3/1x128/fp32/amax/float8_block"
SQUARES = "e4m3/128x128/fp32/amax/float8_block"


@pytest.mark.parametrize(
    "names",
    [
        ("bf16", ROW),
        ("bf16", SQUARES),
        (BLOCKS, "bf16"),
        ("mxfp8", SQUARES),
        ("nvfp4", BLOCKS),
        ("fp8_e4m3", ROW),
        (ROW, "fp8_e4m3"),
        ("mxfp4", ROW),
    ],
    ids=str,
)
def test_what_bf16_does_not_hold_is_rounded_once(names, monkeypatch) -> None:
    """Values of one operand, times the other's factor; the other one is exact."""
    sizes, dtype = (48, 32, 96), torch.bfloat16
    a, b = (_operand(name, rows, sizes[2]) for name, rows in zip(names, sizes, strict=False))
    rounded = next(i for i in (0, 1) if names[i] in (ROW, BLOCKS, SQUARES))
    values, factor = [], torch.ones(1)
    for i, one in enumerate((a, b)):
        if one.spec.format.is_identity:
            values.append(one.buffers[0].double())
            continue
        given = (one.buffers, one.spec, one.rows, one.cols)
        if i == rounded:
            values.append(reference.decode_plane(*given, torch.float32).double())
            continue
        values.append(reference.plane_operand(*given, dtype, False)[0].double())
        own = reference.tensor_factor(one.buffers, one.spec)
        factor = factor if own is None else own
    values[rounded] = values[rounded] * factor.double()
    monkeypatch.setattr(factored_gemm, "select", lambda _: BACKEND)
    chip = Chip("cuda", (9, 0), (13, 0), (2, 11))
    query = OpQuery("gemm", "cuda", dtype, a.spec, b.spec, "auto", sizes, chip)
    assert factored_gemm.rounded_operand(query) == rounded
    assert factored_gemm.rounded_operand(replace(query, precision="exact")) is None
    assert factored_gemm.rounded_operand(replace(query, dtype=torch.float32)) is None
    run = factored_gemm.factored_planner(query)
    found = []

    def mm(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        found.extend((x, y.t()))
        return torch.empty(sizes[0], sizes[1])

    monkeypatch.setattr(torch, "mm", mm)
    memory = torch.empty(run.room, dtype=torch.uint8)
    with emulated.EmulatedKernels(MODULE).launch(torch.device("cpu")):
        run(a, b, GemmArgs(None, None, dtype, work=Place(memory, 0, 0)))
    first, second = (one[:, : sizes[2]].double() for one in found)
    other = (second, first)[rounded]
    own = (first, second)[rounded]
    assert torch.equal(other, values[1 - rounded][:, : sizes[2]])
    assert ((own - values[rounded]).abs() <= (2.0**-8 + 2.0**-21) * values[rounded].abs()).all()


def test_two_operands_that_bf16_does_not_hold_are_not_rounded() -> None:
    chip = Chip("cuda", (10, 0), (13, 0), (2, 11))
    for one, other in ((BLOCKS, SQUARES), (ROW, BLOCKS), ("nvfp4;rows", SQUARES), ("fp32", ROW)):
        specs = (PlaneSpec.parse(name) for name in (one, other))
        query = OpQuery("gemm", "cuda", torch.bfloat16, *specs, "auto", (48, 32, 96), chip)
        assert factored_gemm.rounded_operand(query) is None
