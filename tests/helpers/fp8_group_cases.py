"""What the tests of grouped FP8 products run inside Triton's interpreter, or on a GPU.

Products are held to what the planes' own values give, decoded by the oracle, within the bound of
sums in FP32 and the one by which a fold may be off (`hybridq.reference.fold`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

import triton_cases
from gemm_cases import TINY, ULP, decoded, make
from hybridq.formats import DEFAULT_SIGNS, PlaneSpec, format
from hybridq.kernels import FOLD, OpQuery, folded_groups
from hybridq.kernels.choice.arguments import GroupedArgs, GroupedOperand
from hybridq.kernels.inputs import Chip
from hybridq.kernels.ragged import padded_layout as ragged
from hybridq.kernels.scaled_mm import laid_down
from hybridq.kernels.triton import launch, plan_grouped_block
from hybridq.storage import Plane
from oracle import bridge, planes
from triton_cases import moved, stack

SPECS = {
    "transformed": PlaneSpec(format("mxfp8"), signs=DEFAULT_SIGNS),
    "transformed e5m2": PlaneSpec(format("mxfp8_e5m2"), signs=DEFAULT_SIGNS),
    "float scales": PlaneSpec(replace(format("fp8_1x128"), power_of_two=False)),
}
#: At most so far, in units of a group's amax, is a folded E4M3 code (`reference.fold`).
FOLD_LIMIT = 2.0**-9 / 448
WIDTH = 128


def _spec(name: str) -> PlaneSpec:
    return SPECS.get(name) or PlaneSpec.parse(name)


def _values(plane: Plane) -> np.ndarray:
    """FP64 values of the plane, those of a transformed one as they are multiplied."""
    if plane.spec.signs is None:
        return decoded(plane)
    buffers = {name: buffer.numpy() for name, buffer in plane.buffers.items()}
    values, factor = planes.operand(buffers, bridge.oracle_spec(plane.spec), *plane.matrix)
    return values.astype(np.float64) * np.float64(factor)


def _normal(rows: int, cols: int, generator: torch.Generator, factor: float = 1.0) -> torch.Tensor:
    """Normal values, those of 32 columns times a factor."""
    x = torch.randn(rows, cols, generator=generator)
    x[:, :32] *= factor
    return x.to(torch.bfloat16)


def _room(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """By how much folding both operands may move a product."""
    room = np.zeros((a.shape[0], b.shape[0]))
    for k in range(0, a.shape[1], WIDTH):
        x, y = np.abs(a[:, k : k + WIDTH]), np.abs(b[:, k : k + WIDTH])
        if not x.shape[1]:
            continue
        tops = np.outer(x.max(1), y.sum(1)) + np.outer(x.sum(1), y.max(1))
        room += FOLD_LIMIT * tops + FOLD_LIMIT**2 * WIDTH * np.outer(x.max(1), y.max(1))
    return room


def hold(y: torch.Tensor, a: np.ndarray, b: np.ndarray, extra: Any = 0.0, slack: float = 0.0):
    """Hold `y` to the bound around `a @ b.T + extra`; return the error in units of FP32's bound."""
    exact = a @ b.T + extra
    sums = np.abs(a) @ np.abs(b).T + np.abs(extra)
    room = (a.shape[1] + 4) * 2.0**-24 * sums + ULP[y.dtype] * np.abs(exact) + TINY[y.dtype]
    error = np.abs(y.to(torch.float64).cpu().numpy() - exact)
    worst = float((error / (room + _room(a, b) + slack * sums)).max()) if error.size else 0.0
    assert worst <= 1.0, f"error is {worst} of the bound"
    return float((error / room).max()) if error.size else 0.0


def run(a: GroupedOperand, b: GroupedOperand, args: GroupedArgs) -> torch.Tensor:
    """The grouped GEMM by the backend `fold`."""
    sides = [replace(side, buffers=[moved(buffer) for buffer in side.buffers]) for side in (a, b)]
    names = ("offsets", "padded", "bias", "accumulate_into")
    own = {name: moved(getattr(args, name)) for name in names}
    return FOLD.ops["grouped_gemm"](*sides, replace(args, **own)).cpu()


def _ends(sizes: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(sizes, dtype=torch.int64).cumsum(0).to(torch.int32)


def rows(
    a_name: str, b_name: str, sizes: tuple[int, ...], seed: int, options: dict[str, Any]
) -> float:
    """Forward and input gradient: rows of a in groups, one matrix of b per group."""
    generator = torch.Generator().manual_seed(seed)
    n, k, rest = options.get("n", 21), options.get("k", 150), options.get("rest", 9)
    groups, tokens = len(sizes), sum(sizes) + rest
    dtype, factors = options.get("dtype", torch.float32), options.get("factors", (1.0, 1.0))
    a = make(_normal(tokens, k, generator, factors[0]), _spec(a_name))
    weights = [make(_normal(n, k, generator, factors[1]), _spec(b_name)) for _ in range(groups)]
    bias = torch.randn(groups, n, generator=generator) if options.get("bias") else None
    into = None
    if options.get("add"):  # neither row-major nor contiguous
        into = torch.randn(n, 2 * tokens, generator=generator).to(dtype).t()[::2]
    left = GroupedOperand(list(a.tensors), a.spec, tokens, k)
    y = run(left, stack(weights), GroupedArgs(_ends(sizes), tokens, None, bias, into, dtype))
    assert y.shape == (tokens, n) and y.dtype == dtype
    values, begin, worst = _values(a), 0, 0.0
    for group, size in enumerate(sizes):
        own = slice(begin, begin + size)
        extra = np.zeros((size, n)) if bias is None else bias[group].double().numpy()[None, :]
        extra = extra + (0.0 if into is None else into[own].double().numpy())
        slack = options.get("slack", 0.0)
        worst = max(worst, hold(y[own], values[own], _values(weights[group]), extra, slack))
        begin += size
    other = torch.zeros(tokens - begin, n, dtype=dtype) if into is None else into[begin:]
    assert torch.equal(y[begin:], other)
    return worst


def contraction(
    a_name: str, b_name: str, sizes: tuple[int, ...], seed: int, options: dict[str, Any]
) -> float:
    """Weight gradient: the contraction runs over each group's tokens."""
    generator = torch.Generator().manual_seed(seed)
    m, n, rest = options.get("m", 18), options.get("n", 21), options.get("rest", 9)
    tokens, ends, factors = sum(sizes) + rest, _ends(sizes), options.get("factors", (1.0, 1.0))
    dtype, padded = options.get("dtype", torch.float32), ragged.padded_offsets(ends, tokens)
    sides, values = [], []
    for name, count, factor in ((a_name, m, factors[0]), (b_name, n, factors[1])):
        x = _normal(count, tokens, generator, factor).t()
        plane = make(ragged.pad_tokens(x, ends).t(), _spec(name))
        sides.append(GroupedOperand(list(plane.tensors), plane.spec, *plane.matrix, is_padded=True))
        values.append(_values(plane))
    into = None
    if options.get("add"):
        into = torch.randn(len(sizes), m, n, generator=generator).to(dtype)
    y, worst = run(*sides, GroupedArgs(ends, tokens, padded, None, into, dtype)), 0.0
    assert y.shape == (len(sizes), m, n) and y.dtype == dtype
    for group, size in enumerate(sizes):
        width = -(-size // 16) * 16 if sides[0].spec.signs is not None else size
        own = slice(int(padded[group]), int(padded[group]) + width)
        extra = 0.0 if into is None else into[group].double().numpy()
        if size:
            left, right = (one[:, own] for one in values)
            worst = max(worst, hold(y[group], left, right, extra, options.get("slack", 0.0)))
        else:
            assert torch.equal(y[group], torch.zeros(m, n) if into is None else into[group])
    return worst


def _lying(operand: GroupedOperand) -> GroupedOperand:
    """The operand as encode lays it for this product: NaN where scales are filled up."""
    codes, scale = operand.buffers
    if operand.spec.format.block == (WIDTH, WIDTH):
        return operand
    rows = operand.rows * (codes.shape[0] if operand.is_stack else 1)
    pitch = -(-rows // 4) * 4
    laid = torch.full((scale.shape[-1], pitch), float("nan"))
    laid[:, :rows] = scale.reshape(rows, -1).t()
    strides = ((operand.rows,) if operand.is_stack else ()) + (1, pitch)
    made = laid.as_strided(scale.shape, strides)
    return replace(operand, buffers=[codes, made], spec=laid_down(operand.spec))


def lying(b_name: str, is_stack: bool, seed: int) -> None:
    """Planes that are encoded as the product takes them: the bits of those that are moved first."""
    generator, sizes, tokens = torch.Generator().manual_seed(seed), (0, 30, 131), 170
    ends, m, n, k = _ends(sizes), 18, 128 if b_name == "fp8_128x128" else 20, 256

    def general(*_: object) -> torch.Tensor:
        raise AssertionError("an operand was moved")

    if is_stack:
        a = make(_normal(tokens, k, generator), "fp8_1x128")
        weights = [make(_normal(n, k, generator), b_name) for _ in sizes]
        sides = (GroupedOperand(list(a.tensors), a.spec, tokens, k), stack(weights))
        args = GroupedArgs(ends, tokens, None, None, None, torch.bfloat16)
    else:
        made = []
        for name, count in (("fp8_1x128", m), (b_name, n)):
            x = ragged.pad_tokens(_normal(count, tokens, generator).t(), ends).t()
            plane = make(x, name)
            own = (list(plane.tensors), plane.spec, *plane.matrix)
            made.append(GroupedOperand(*own, is_padded=True))
        sides = (made[0], made[1])
        padded = ragged.padded_offsets(ends, tokens)
        args = GroupedArgs(ends, tokens, padded, None, None, torch.bfloat16)
    left, right = (_lying(side) for side in sides)
    chip, size = Chip("cuda", (9, 0)), (left.rows, right.rows, left.cols)
    query = OpQuery("grouped_gemm", "cuda", torch.bfloat16, left.spec, right.spec, "auto", size)
    query = replace(query, chip=chip, groups=3, tokens_per_group=57 if is_stack else None)
    planned = folded_groups.planned_groups(query, general)
    assert torch.equal(planned(left, right, args), run(*sides, args))


def tiles(kind: str, seed: int) -> None:
    """Each tile that some chip has, with several tiles down and across, and one program for all."""
    shape, processors = plan_grouped_block._shape, plan_grouped_block.processors
    own = [plan_grouped_block._OF_TOKENS, plan_grouped_block._OVER_TOKENS]
    own += plan_grouped_block._OTHERS.values()
    plan_grouped_block.processors = lambda device: 1  # type: ignore[assignment]
    try:
        for one in own:
            plan_grouped_block._shape = lambda *_, one=one: one  # type: ignore[assignment]
            options = {"n": 140, "m": 260, "k": 140}
            sizes = (270, 0, 130)
            (rows if kind == "rows" else contraction)("mxfp8", "mxfp8", sizes, seed, options)
    finally:
        plan_grouped_block._shape, plan_grouped_block.processors = shape, processors


def squares(seed: int) -> None:
    """32x32 blocks of a matrix whose rows 32 does not divide: none lies in two matrices."""
    generator = torch.Generator().manual_seed(seed)
    a = make(torch.randn(40, 64, generator=generator), "mxfp8")
    weights = [make(torch.randn(21, 64, generator=generator), "mxfp8_32x32") for _ in range(2)]
    left = GroupedOperand(list(a.tensors), a.spec, 40, 64)
    args = GroupedArgs(_ends((13, 27)), 40, None, None, None, torch.float32)
    y = run(left, stack(weights), args)
    for own, weight in ((slice(0, 13), weights[0]), (slice(13, 40), weights[1])):
        hold(y[own], _values(a)[own], _values(weight), slack=FOLD_LIMIT * 64)


def nothing() -> None:
    """Sizes of zero: results of the right shape, with what is added."""
    spec = PlaneSpec.parse("mxfp8")
    bias = torch.randn(2, 5)
    for tokens, k, n in ((0, 64, 5), (7, 0, 5), (7, 64, 0)):
        a = make(torch.randn(tokens, k), spec)
        weights = stack([make(torch.randn(n, k), spec) for _ in range(2)])
        args = GroupedArgs(
            _ends((3, 4))[:2].clamp(max=tokens), tokens, None, None, None, torch.float32
        )
        if n:
            args = replace(args, bias=bias)
        y = run(GroupedOperand(list(a.tensors), spec, tokens, k), weights, args)
        assert y.shape == (tokens, n)
        if k == 0:
            assert torch.equal(y, bias.repeat_interleave(torch.tensor([3, 4]), 0))
    a = make(torch.randn(7, 64), spec)
    weights = stack([make(torch.randn(5, 64), spec)])
    weights = replace(weights, buffers=[buffer[:0] for buffer in weights.buffers])
    into = torch.randn(7, 5)
    for added in (None, into):
        none = torch.zeros(0, dtype=torch.int32)
        args = GroupedArgs(none, 7, None, None, added, torch.float32)
        y = run(GroupedOperand(list(a.tensors), spec, 7, 64), weights, args)
        assert torch.equal(y, torch.zeros(7, 5) if added is None else into)


def specials(slack: float = 0.0) -> None:
    """A NaN or an infinity in a row spoils that row of its group and no other."""
    x = torch.randn(12, 64)
    x[2, 5], x[7, 60] = float("nan"), float("inf")
    for name in ("mxfp8", "mxfp8_e5m2", "mxfp4", "fp8_1x128"):
        a = make(x.bfloat16(), name)
        weights = [make(torch.randn(20, 64), "mxfp8") for _ in range(2)]
        left = GroupedOperand(list(a.tensors), a.spec, 12, 64)
        y = run(
            left, stack(weights), GroupedArgs(_ends((5, 6)), 12, None, None, None, torch.float32)
        )
        values = decoded(a)
        is_plain = np.isfinite(values).all(1) & (np.abs(values) < 1e30).all(1)
        for own, weight in ((slice(0, 5), weights[0]), (slice(5, 11), weights[1])):
            keep = torch.from_numpy(is_plain[own])
            hold(y[own][keep], values[own][is_plain[own]], decoded(weight), slack=slack)
        nan = torch.from_numpy(np.isnan(values).any(1))
        if name == "mxfp8_e5m2" or triton_cases.DEVICE == "cuda":  # interpreted E4M3 has no NaN
            assert torch.isnan(y[nan]).all()
        assert torch.equal(y[11:], torch.zeros(1, 20))  # a token of no group


def wrong_offsets_stay_inside() -> None:
    """Ends that are no ends give wrong numbers, but write only what is theirs."""
    tokens, n, k = 300, 17, 128
    a = make(torch.randn(tokens, k), "mxfp8")
    weights = stack([make(torch.randn(n, k), "mxfp8") for _ in range(3)])
    sides = []
    for one in (GroupedOperand(list(a.tensors), a.spec, tokens, k), weights):
        moved_ = replace(one, buffers=[moved(buffer) for buffer in one.buffers])
        sides.append(_folded_side(moved_))
    for ends in ([500, -3, 1000], [300, 100, 200], [-5, -4, -1], [100, 20, 300]):
        guarded = torch.full((tokens + 2, n), 7.0, device=triton_cases.DEVICE)
        offsets = torch.tensor(ends, dtype=torch.int32, device=triton_cases.DEVICE)
        args = GroupedArgs(offsets, tokens, None, None, None, torch.float32)
        _, launches = plan_grouped_block.plan_grouped_block(*sides, args, True)
        launches[0].arguments["out"] = guarded[1:-1]
        launch.run(launches, guarded.device)
        assert (guarded[0] == 7.0).all() and (guarded[-1] == 7.0).all()
    deep = make(torch.randn(18, 512), "mxfp8")
    one = GroupedOperand([moved(b) for b in deep.tensors], deep.spec, 18, 512, is_padded=True)
    side = _folded_side(one)
    for ends in ([500, -3, 1000], [300, 100, 200]):
        offsets = torch.tensor(ends, dtype=torch.int32, device=triton_cases.DEVICE)
        for starts in (
            ragged.padded_offsets(offsets, tokens),
            offsets.new_tensor([-7, 9999, 77, 3]),
        ):
            args = GroupedArgs(offsets, tokens, starts, None, None, torch.float32)
            made, launches = plan_grouped_block.plan_grouped_block(side, side, args, False)
            launch.run(launches, made.device)  # reads and writes stay inside of the descriptors


def _folded_side(operand: GroupedOperand):
    from hybridq.kernels import folded_backend, folded_groups

    return folded_groups._side(operand, folded_backend.fold)
