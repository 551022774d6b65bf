"""What the tests of the Triton kernels run inside Triton's interpreter (see `triton_tools`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

import hybridq
from gemm_cases import check, decoded, make
from hybridq.formats import DEFAULT_SIGNS, PlaneSpec, format, names
from hybridq.kernels.choice import DeviceSupport, registry
from hybridq.kernels.choice.arguments import GemmArgs, GroupedArgs, GroupedOperand, Operand
from hybridq.kernels.ragged import padded_layout as ragged
from hybridq.kernels.triton import TRITON, block_gemm, launch
from hybridq.kernels.triton.form import form_of, form_reason
from hybridq.kernels.triton.plan import plan_grouped
from hybridq.reference import plane_operand
from hybridq.storage import Plane

FORMATS = [name for name in names() if form_reason(PlaneSpec.parse(name)) is None]
SPECS = {
    "rows": PlaneSpec(format("nvfp4"), row_scaled=True),
    "4o6": PlaneSpec(format("nvfp4"), False, None, 256.0, "mse"),
    "transformed": PlaneSpec(format("nvfp4"), signs=DEFAULT_SIGNS),
    "transformed mx": PlaneSpec(format("mxfp8"), signs=DEFAULT_SIGNS),
    "floor": PlaneSpec(replace(format("mxfp8"), rule="floor")),
    "scales of rows": PlaneSpec.parse("e4m3/1x80/fp32/amax/float8_block"),
}
#: Scales that BF16 does not hold: products of FP32 operands, for groups only.
WIDE_SPECS = {
    "float scales": PlaneSpec(replace(format("fp8_1x128"), power_of_two=False)),
    "float squares": PlaneSpec(replace(format("fp8_128x128"), power_of_two=False)),
}
#: Plain operands, whose values fill their dtype.
PLAIN = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


#: Where the kernels run: in the interpreter, or, for the GPU tests, on `"cuda"`.
DEVICE = "cpu"


def moved(x: torch.Tensor | None) -> torch.Tensor | None:
    """x on the device of the kernels, its strides kept."""
    if x is None or DEVICE == "cpu":
        return x
    out = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=DEVICE)
    return out.copy_(x)


def operand(plane: Plane) -> Operand:
    """The plane as the kernels take it."""
    return Operand([moved(b) for b in plane.tensors], plane.spec, *plane.matrix)


def run_grouped(a: GroupedOperand, b: GroupedOperand, args: GroupedArgs) -> torch.Tensor:
    """The grouped GEMM by the Triton backend."""
    sides = [replace(side, buffers=[moved(buffer) for buffer in side.buffers]) for side in (a, b)]
    own = {
        name: moved(getattr(args, name))
        for name in ("offsets", "padded", "bias", "accumulate_into")
    }
    return TRITON.ops["grouped_gemm"](*sides, replace(args, **own)).cpu()


def multiply(
    a: Plane,
    b: Plane,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    into: torch.Tensor | None = None,
) -> torch.Tensor:
    """`a @ b.T` by the Triton backend."""
    args = GemmArgs(moved(bias), moved(into), dtype)
    return TRITON.ops["gemm"](operand(a), operand(b), args).cpu()


def pairs(a_name: str, seed: int) -> None:
    """One format against every other, small and ragged, BF16 and FP32 results."""
    torch.manual_seed(seed)
    a = make(torch.randn(5, 70, dtype=torch.bfloat16), a_name)
    for i, b_name in enumerate(FORMATS):
        b = make(torch.randn(19, 70, dtype=torch.bfloat16), b_name)
        dtype = torch.float32 if i % 3 else torch.bfloat16
        check(multiply(a, b, dtype), decoded(a), decoded(b))


def shape(m: int, n: int, k: int, a_name: str, b_name: str, seed: int) -> None:
    """One shape: tails, a K that is shared among programs, large tiles, nothing."""
    torch.manual_seed(seed)
    a = make(torch.randn(m, k, dtype=torch.bfloat16), a_name)
    b = make(torch.randn(n, k, dtype=torch.bfloat16), b_name)
    y = multiply(a, b, torch.float32)
    assert y.shape == (m, n)
    check(y, decoded(a), decoded(b))


def epilogue(m: int, n: int, k: int, dtype: torch.dtype, seed: int) -> None:
    """Bias, addition to what is there, results that are no row-major matrix."""
    torch.manual_seed(seed)
    a, b = make(torch.randn(m, k), "nvfp4"), make(torch.randn(n, k), "mxfp8_e5m2")
    for bias, into in (
        (torch.randn(n), None),
        (None, torch.randn(m, n).to(dtype)),
        (torch.randn(n).bfloat16(), torch.randn(n, m).to(dtype).t()),
        (torch.randn(2 * n)[::2].half(), torch.randn(2 * m, n).to(dtype)[::2]),
    ):
        extra = 0.0 if bias is None else bias.double().numpy()[None, :]
        extra = extra + (0.0 if into is None else into.double().numpy())
        check(multiply(a, b, dtype, bias, into), decoded(a), decoded(b), extra)


def option(name: str, seed: int) -> None:
    """A spec with options against itself and, unless it is transformed, against others."""
    torch.manual_seed(seed)
    spec = SPECS[name]
    transformed = spec.signs is not None
    for other in (spec, *(() if transformed else (PlaneSpec.parse("mxfp4"),))):
        a = make(torch.randn(5, 75, dtype=torch.bfloat16), spec)
        b = make(torch.randn(19, 75, dtype=torch.bfloat16), other)
        for left, right in ((a, b), (b, a)):
            y = multiply(left, right, torch.float32)
            if not transformed:
                check(y, decoded(left), decoded(right))
                continue
            # Both are multiplied as they were transformed, tails included.
            values = [
                plane_operand(list(p.tensors), p.spec, *p.matrix, torch.float32)[0]
                for p in (left, right)
            ]
            factors = [
                p.buffers["amax"].double().numpy() / (448.0 * 6.0) if "amax" in p.buffers else 1.0
                for p in (left, right)
            ]
            check(y, *(v.double().numpy() * f for v, f in zip(values, factors, strict=True)))


def rounded(name: str, seed: int) -> None:
    """An operand that BF16 does not hold: each of its values is rounded once."""
    torch.manual_seed(seed)
    wide = make(torch.randn(19, 300), WIDE_SPECS[name])
    values = torch.from_numpy(decoded(wide)).float().bfloat16().double().numpy()
    for other in ("bf16", "nvfp4", "fp8_e4m3"):
        a = make(torch.randn(5, 300, dtype=torch.bfloat16), other)
        check(multiply(a, wide, torch.float32), decoded(a), values)
        check(multiply(wide, a, torch.float32), values, decoded(a))


def views(seed: int) -> None:
    """Plain operands with any strides, planes whose rows are not aligned."""
    torch.manual_seed(seed)
    wide = torch.randn(80, 90, dtype=torch.bfloat16)
    b = make(torch.randn(19, 33), "mxfp8")
    for x in (wide.t()[:5, :33], wide[:10:2, 5:38], wide[3:8, 1:34]):
        a = Operand([moved(x)], PlaneSpec.parse("bf16"), 5, 33)
        y = TRITON.ops["gemm"](a, operand(b), GemmArgs(None, None, torch.float32)).cpu()
        check(y, x.double().numpy(), decoded(b))
    shifted = torch.zeros(1 + b.data.numel(), dtype=torch.uint8, device=DEVICE)[1:].view(19, 33)
    shifted.copy_(b.data)
    right = Operand([shifted, *operand(b).buffers[1:]], b.spec, 19, 33)
    a = make(torch.randn(5, 33), "nvfp4")
    y = TRITON.ops["gemm"](operand(a), right, GemmArgs(None, None, torch.float32)).cpu()
    check(y, decoded(a), decoded(b))


def factors_apply_one_after_the_other() -> None:
    """Two factors whose product overflows, or underflows, though the result does not."""
    x = torch.ones(2, 32)
    big, small = make(x * 1e-36, "fp8_e4m3"), make(x * 1e36, "fp8_e4m3")
    for left, right in ((big, big), (big, small), (small, small)):
        y = multiply(left, right, torch.float32).double().numpy()
        a, b = decoded(left), decoded(right)
        exact = np.where(np.abs(a @ b.T) > 3.5e38, np.inf, a @ b.T)
        assert np.allclose(y, exact, rtol=1e-6, atol=1e-38), (y, exact)


def specials() -> None:
    """A NaN or an infinity in a row spoils that row of the result and no other."""
    x = torch.randn(6, 64)
    x[2, 5], x[4, 60] = float("nan"), float("inf")
    for name in ("mxfp8", "mxfp8_e5m2", "nvfp4", "mxfp4", "fp8_1x128", "bf16"):
        a = make(x.bfloat16(), name)
        b = make(torch.randn(20, 64), "mxfp8")
        values = decoded(a)
        y = multiply(a, b, torch.float32)
        plain = np.isfinite(values).all(1) & (np.abs(values) < 1e30).all(1)
        check(y[torch.from_numpy(plain)], values[plain], decoded(b))
        assert torch.isnan(y[torch.from_numpy(np.isnan(values).any(1))]).all()
    # A code that is NaN under a scale that is not, as other libraries write it.
    a = make(torch.randn(6, 64), "mxfp8")
    a.data[3, 7] = 0xFF
    y = multiply(a, make(torch.randn(20, 64), "mxfp8"), torch.float32)
    assert torch.equal(torch.isnan(y).all(1), torch.arange(6) == 3)
    assert not torch.isnan(y[[0, 1, 2, 4, 5]]).any()


def stack(planes: list[Plane]) -> GroupedOperand:
    """One plane per group, as the grouped GEMM takes them."""
    buffers = [torch.stack(same) for same in zip(*(p.tensors for p in planes), strict=True)]
    return GroupedOperand(buffers, planes[0].spec, *planes[0].matrix, is_stack=True)


def _spec(name: str) -> PlaneSpec:
    return (SPECS | WIDE_SPECS).get(name) or PlaneSpec.parse(name)


def _source(rows: int, cols: int, name: str) -> torch.Tensor:
    """Random values: of a plain operand in its dtype."""
    return torch.randn(rows, cols, dtype=PLAIN.get(name, torch.bfloat16))


def _ends(sizes: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(sizes).cumsum(0).to(torch.int32)


def grouped_rows(
    a_name: str,
    b_name: str,
    sizes: tuple[int, ...],
    seed: int,
    options: dict[str, Any] | None = None,
) -> None:
    """Forward and input gradient: rows of a in groups, one b per group."""
    torch.manual_seed(seed)
    options = options or {}
    groups, tokens, n, k = len(sizes), options.get("tokens", sum(sizes) + 9), 21, 37
    dtype = options.get("dtype", torch.float32)
    a = make(_source(tokens, k, a_name), _spec(a_name))
    weights = [make(_source(n, k, b_name), _spec(b_name)) for _ in range(groups)]
    bias = torch.randn(groups, n) if options.get("bias") else None
    into = torch.randn(tokens, n).to(dtype) if options.get("add") else None
    left = GroupedOperand(list(a.tensors), a.spec, tokens, k)
    args = GroupedArgs(_ends(sizes), tokens, None, bias, into, dtype)
    y = run_grouped(left, stack(weights), args)
    values = decoded(a)
    begin = 0
    for group, size in enumerate(sizes):
        rows = slice(begin, begin + size)
        extra = np.zeros((size, n)) if bias is None else bias[group].double().numpy()[None, :]
        extra = extra + (0.0 if into is None else into[rows].double().numpy())
        check(y[rows], values[rows], decoded(weights[group]), extra)
        begin += size
    rest = torch.zeros(tokens - begin, n, dtype=dtype) if into is None else into[begin:]
    assert torch.equal(y[begin:], rest)


def grouped_k(
    a_name: str,
    b_name: str,
    sizes: tuple[int, ...],
    seed: int,
    options: dict[str, Any] | None = None,
) -> None:
    """Weight gradient: the contraction runs over each group's tokens."""
    torch.manual_seed(seed)
    options = options or {}
    tokens, m, n = options.get("tokens", sum(sizes) + 9), 18, 21
    dtype = options.get("dtype", torch.float32)
    ends = _ends(sizes)
    padded = ragged.padded_offsets(ends, tokens)
    sides, values, begins = [], [], []
    for name, rows in ((a_name, m), (b_name, n)):
        x = _source(tokens, rows, name)
        if name in PLAIN:
            sides.append(GroupedOperand([x.t()], PlaneSpec.parse(name), rows, tokens))
            values.append(x.t().double().numpy())
            begins.append((ends - torch.tensor(sizes)).tolist())
            continue
        plane = make(ragged.pad_tokens(x, ends).t(), _spec(name))
        sides.append(GroupedOperand(list(plane.tensors), plane.spec, *plane.matrix, is_padded=True))
        values.append(decoded(plane))
        begins.append(padded.tolist())
    into = torch.randn(len(sizes), m, n).to(dtype) if options.get("add") else None
    args = GroupedArgs(ends, tokens, padded, None, into, dtype)
    y = run_grouped(*sides, args)
    for group, size in enumerate(sizes):
        size = -(-size // 16) * 16 if sides[0].spec.signs is not None else size
        left, right = (
            v[:, start[group] : start[group] + size]
            for v, start in zip(values, begins, strict=True)
        )
        extra = 0.0 if into is None else into[group].double().numpy()
        if size:
            check(y[group], left, right, extra)
        else:
            assert torch.equal(y[group], torch.zeros(m, n) if into is None else into[group])


def empty_groups_ignore_factors() -> None:
    """Rows of no group are zeros even where the last group's factor is NaN."""
    a = make(torch.randn(12, 32), "bf16")
    weights = [make(torch.randn(5, 32), "nvfp4") for _ in range(2)]
    weights[1].buffers["amax"].fill_(float("nan"))
    left = GroupedOperand(list(a.tensors), a.spec, 12, 32)
    ends = torch.tensor([4, 8], dtype=torch.int32)
    args = GroupedArgs(ends, 12, None, None, None, torch.float32)
    y = run_grouped(left, stack(weights), args)
    assert torch.isfinite(y[:4]).all()
    assert torch.isnan(y[4:8]).all()
    assert torch.equal(y[8:], torch.zeros(4, 5))


def public(seed: int) -> None:
    """hybridq.gemm and hybridq.grouped_gemm with this backend forced, as if it ran on a CPU."""
    torch.manual_seed(seed)
    registry.register_backend(replace(TRITON, devices=DeviceSupport()))
    try:
        with hybridq.backend("triton"):
            a, b = make(torch.randn(7, 70), "mxfp8"), make(torch.randn(9, 70), "nvfp4")
            check(hybridq.gemm(a, b, out_dtype=torch.float32), decoded(a), decoded(b))
            ends = torch.tensor([0, 4, 7], dtype=torch.int32)
            weights = [make(torch.randn(9, 70), "mxfp4") for _ in range(3)]
            y = hybridq.grouped_gemm(a, weights, ends, out_dtype=torch.float32)
            check(y[:4], decoded(a)[:4], decoded(weights[1]))
            check(y[4:], decoded(a)[4:], decoded(weights[2]))
            sides = [
                make(ragged.pad_tokens(torch.randn(7, rows), ends), name, "columnwise")
                for rows, name in ((5, "mxfp8"), (6, "nvfp4"))
            ]
            out = torch.randn(3, 5, 6)
            before = out.double().numpy()
            hybridq.grouped_gemm(*sides, ends, tokens=7, out=out, accumulate=True)
            assert np.array_equal(out[0].double().numpy(), before[0])
            for group, size in ((1, 4), (2, 3)):
                start = 128 * group
                left, right = (decoded(side)[:, start : start + size] for side in sides)
                check(out[group], left, right, before[group])
    finally:
        registry.register_backend(TRITON)


def wrong_offsets_stay_inside() -> None:
    """Ends that are no ends give wrong numbers, but read and write only what is theirs."""
    tokens, n, k = 40, 17, 32
    a = make(torch.randn(tokens, k), "mxfp8")
    weights = stack([make(torch.randn(n, k), "mxfp8") for _ in range(3)])
    weights = replace(weights, buffers=[moved(buffer) for buffer in weights.buffers])
    left = GroupedOperand(operand(a).buffers, a.spec, tokens, k)
    for ends in ([50, -3, 1000], [30, 10, 20], [-5, -4, -1]):
        guarded = torch.full((tokens + 2, n), 7.0, device=DEVICE)
        offsets = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
        args = GroupedArgs(offsets, tokens, None, None, None, torch.float32)
        _, launches = plan_grouped(left, weights, args)
        launches[0].arguments["out"] = guarded[1:-1]
        launch.run(launches, guarded.device)
        assert (guarded[0] == 7.0).all() and (guarded[-1] == 7.0).all()


def blocks(m: int, n: int, k: int, elements: tuple[str, str], is_square: bool, seed: int) -> None:
    """FP8 by tensor cores, one scale per 128, scales that are no powers of two."""
    torch.manual_seed(seed)
    values, codes, scales = [], [], []
    kinds = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
    for rows, element, square in ((m, elements[0], False), (n, elements[1], is_square)):
        code = torch.randn(rows, k).to(kinds[element])
        scale = torch.rand(-(-rows // 128) if square else rows, -(-k // 128)) + 0.5
        wide = scale.double().repeat_interleave(128, 0)[:rows] if square else scale.double()
        values.append((code.double() * wide.repeat_interleave(128, 1)[:, :k]).numpy())
        codes.append(code.view(torch.uint8))
        scales.append(scale.t().contiguous().t() if not square else scale)
    bias = torch.randn(n)
    y = block_gemm(
        *(moved(x) for pair in zip(codes, scales, strict=True) for x in pair),
        elements,
        b_is_square=is_square,
        args=GemmArgs(moved(bias), None, torch.float32),
    )
    check(y.cpu(), *values, bias.double().numpy()[None, :])


def decode_everything(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Every code under every scale: BF16 operands of the kernels and of the reference, as FP32."""
    from hybridq.kernels.triton.dense import decode_kernel
    from hybridq.kernels.triton.plan import _side

    spec = PlaneSpec.parse(name)
    buffers = every_code_and_scale(spec)
    rows, k = buffers[0].shape[0], buffers[0].shape[1] * form_of(spec).per_unit
    expected, _ = plane_operand(buffers, spec, rows, k, torch.bfloat16)
    side = _side(Operand([moved(buffer) for buffer in buffers], spec, rows, k))
    out = torch.empty(rows, k, device=DEVICE)
    scale_stride = side.scale.stride(0) if side.scale.dim() > 1 else 0
    decode_kernel[(-(-rows // 64), -(-k // 128))](
        side.data,
        side.scale,
        out,
        rows,
        k,
        side.data.stride(0),
        scale_stride,
        side.scale.shape[-1],
        side.form,
        64,
        128,
    )
    return out.cpu().numpy(), expected.to(torch.float32).numpy()


#: Scales that squares are decoded with: they differ from other blocks in their index only.
_SOME_SCALES = (0, 1, 2, 7, 8, 64, 126, 127, 128, 200, 253, 254, 255)


def every_code_and_scale(spec: PlaneSpec) -> list[torch.Tensor]:
    """Buffers of a plane with every code, and in each row (or square) another scale."""
    fmt = spec.format
    if fmt.is_identity:
        return [torch.arange(1 << 16).to(torch.int16).view(torch.bfloat16).view(256, 256)]
    block = fmt.block or (1, 1)
    bytes_ = torch.arange(256) if block[0] == 1 else torch.tensor(_SOME_SCALES)
    rows = len(bytes_) * block[0]
    data = torch.arange(256, dtype=torch.uint8).repeat(rows, 1)
    if fmt.block is None:
        return [data, torch.ones(1)]
    cols = 256 * form_of(spec).per_unit
    shapes = {buffer.name: buffer.shape for buffer in spec.buffers(rows, cols)}
    scale = bytes_[:, None].expand(shapes["scale"])
    if fmt.scale is not None and fmt.scale.bits == 32:
        # 2^-127, a subnormal, to 2^127; NaN last.
        powers = torch.ldexp(torch.ones(()), scale - 127)
        both = [data, torch.where(scale == 255, float("nan"), powers).float().contiguous()]
    else:
        both = [data, scale.to(torch.uint8).contiguous()]
    return both + ([torch.ones(shapes["amax"])] if "amax" in shapes else [])
