"""Tokens sorted by group on a GPU: planes with the CPU's bits, products of experts, no waiting."""

from __future__ import annotations

import pytest
import torch

import hybridq
import kernel_cases as cases
from gpu_tools import no_waiting, to_cpu
from hybridq.formats import PlaneSpec
from hybridq.kernels.operators import encode_ragged as ops_ragged
from ragged_cases import BY_KERNEL, PAIRS, SIZES, bounds, ends, parts_of, places, text

#: RMS of rounding to BF16, relative to what is rounded.
BF16_RMS = 1.7e-3


@pytest.mark.parametrize("name", PAIRS)
def test_planes_have_the_bits_of_the_cpu(name) -> None:
    row, col = PAIRS[name]
    seed = torch.tensor([11])
    for i, (sizes, rest) in enumerate(SIZES):
        for cols in (72, 21):
            x = cases.matrix(sum(sizes) + rest, cols, cases.DTYPES[i % 3], i, cases.SPECIALS[i % 5])
            args = (text(row), text(col), None, None)
            want = torch.ops.hybridq.encode_ragged(x, ends(sizes), *args, seed)
            here = x.cuda(), ends(sizes).cuda()
            got = torch.ops.hybridq.encode_ragged(*here, *args, seed.cuda())
            for j, (g, w) in enumerate(zip(got, want, strict=True)):
                alike = cases.same_values if w.is_floating_point() else cases.assert_same
                alike(g, w, f"{name}, {sizes}, {cols}, {x.dtype}: buffer {j}")


@pytest.mark.parametrize("name", PAIRS)
def test_rows_of_an_index_have_the_bits_of_the_cpu(name) -> None:
    row, col = PAIRS[name]
    seed = torch.tensor([11])
    for i, (sizes, rest) in enumerate(SIZES):
        rows = sum(sizes) + rest
        x = cases.matrix(max(rows // 2, 1), 72, cases.DTYPES[i % 3], i, cases.SPECIALS[i % 5])
        index = torch.randint(x.shape[0], (rows,), generator=torch.Generator().manual_seed(i))
        args = (text(row), text(col), None, None)
        want = torch.ops.hybridq.encode_ragged(x, ends(sizes), *args, seed, index)
        here = x.cuda(), ends(sizes).cuda()
        got = torch.ops.hybridq.encode_ragged(*here, *args, seed.cuda(), index.cuda())
        for j, (g, w) in enumerate(zip(got, want, strict=True)):
            alike = cases.same_values if w.is_floating_point() else cases.assert_same
            alike(g, w, f"{name}, {sizes}, {x.dtype}: buffer {j}")


@pytest.mark.parametrize("is_indexed", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        *("nvfp4", "nvfp4 | nvfp4 rht", "nvfp4 sr | nvfp4 rht sr", "mxfp8 | nvfp4 rht", "fp8_e4m3"),
        *("nvfp4 mae", "nvfp4 | mxfp8", "nvfp4 rows | mxfp8", "none | nvfp4", "nvfp4 rows"),
    ],
)
def test_planes_of_groups_with_statistics_of_their_own(name, is_indexed) -> None:
    """Those of tokens that belong to a group; of stochastic planes the scales."""
    row, col = PAIRS[name]
    for i, (sizes, rest) in enumerate(SIZES):
        rows, seed = sum(sizes) + rest, torch.arange(len(sizes))
        for cols in (72, 21):
            x = cases.matrix(max(rows, 1), cols, cases.DTYPES[i % 3], i, cases.SPECIALS[i % 5])
            index = torch.randint(x.shape[0], (rows,), generator=torch.Generator().manual_seed(i))
            index = index if is_indexed else torch.arange(rows)
            args, options = (text(row), text(col), None, None), {"by_group": True}
            want = torch.ops.hybridq.encode_ragged(x[index], ends(sizes), *args, seed, **options)
            own = (index.cuda(),) if is_indexed else ()
            here = x.cuda() if is_indexed else x[index].cuda()
            got = torch.ops.hybridq.encode_ragged(
                here, ends(sizes).cuda(), *args, seed.cuda(), *own, **options
            )
            got = [one.cpu() for one in got]
            assert [one.shape for one in got] == [one.shape for one in want]
            cut = (parts_of(buffers, row, col, cols, sizes) for buffers in (got, want))
            for mine, other in zip(*cut, strict=True):
                is_drawn = mine.spec.stochastic and mine.number == 0
                if sizes[mine.group] == 0 or is_drawn:
                    continue
                is_code = not other.buffer.is_floating_point()
                alike = cases.assert_same if is_code else cases.same_values
                alike(mine.buffer, other.buffer, f"{name}, {sizes}, {cols}, {mine[:4]}")


def test_large_ragged_tokens() -> None:
    sizes = (5000, 0, 128, 1, 3000, 127, 4096)
    x = cases.matrix(sum(sizes) + 77, 1024, torch.bfloat16, 5, "normal")
    for name in ("mxfp8", "mxfp8 | nvfp4 rht", "fp8_1x128"):
        args = [text(spec) for spec in PAIRS[name]]
        want = torch.ops.hybridq.encode_ragged(x, ends(sizes), *args)
        got = torch.ops.hybridq.encode_ragged(x.cuda(), ends(sizes).cuda(), *args)
        for g, w in zip(got, want, strict=True):
            cases.assert_same(g, w, name)


@pytest.mark.parametrize("name", BY_KERNEL)
def test_quantizing_moves_no_tokens_and_never_waits(name, monkeypatch) -> None:
    def moved(*_: object) -> None:
        raise AssertionError("the tokens were moved")

    monkeypatch.setattr(ops_ragged, "pad_tokens", moved)
    row, col = PAIRS[name]
    x = torch.randn(300, 512, device="cuda", dtype=torch.bfloat16)
    offsets, seed = ends((100, 0, 190)).cuda(), torch.tensor([3], device="cuda")
    hybridq.quantize_grouped(x, offsets, row, col, seed=seed)
    with no_waiting():
        hybridq.quantize_grouped(x, offsets, row, col, seed=seed)


def layer(a: str, w: str, dtype: torch.dtype) -> tuple[object, ...]:
    """Quantized tokens, their output's gradient, and experts."""
    sizes, rest = (300, 0, 77, 128), 9
    tokens, n, k = sum(sizes) + rest, 264, 416
    generator = torch.Generator().manual_seed(4)
    x, dy = (torch.randn(tokens, c, generator=generator).to(dtype).cuda() for c in (k, n))
    weights = torch.randn(4, n, k, generator=generator).to(dtype).cuda()
    offsets = ends(sizes).cuda()
    xr = hybridq.quantize_grouped(x, offsets, a)
    dyr = hybridq.quantize_grouped(dy, offsets, a)
    if w in ("fp32", "bf16"):
        return sizes, xr, dyr, weights
    return sizes, xr, dyr, [hybridq.quantize(one, w) for one in weights]


def values(plane) -> torch.Tensor:
    """FP64 values of the plane's own matrix; quantized ones are decoded on the CPU."""
    own = to_cpu(plane).dequantize(torch.float32).double().cuda()
    return own if plane.direction == "rowwise" else own.t()


def pairs(sizes, xr, dyr, experts) -> list[tuple[object, list, list]]:
    """Each product with its operands, group by group."""
    plain = isinstance(experts, torch.Tensor)
    transposed = experts.mT if plain else [one.mT for one in experts]
    weights = [one.double() if plain else values(one.rowwise) for one in experts]
    columns = [one.double() if plain else values(one.columnwise).t() for one in experts]
    rows = [values(one.rowwise) for one in (xr, dyr)]
    cut = [[own[begin:end] for begin, end in bounds(sizes)] for own in rows]
    deep = []
    for one in (dyr, xr):
        own, is_plain = values(one.columnwise), one.columnwise.spec.format.is_identity
        at = [begin for begin, _ in bounds(sizes)] if is_plain else places(sizes)
        deep.append([own[:, a : a + size] for a, size in zip(at, sizes, strict=True)])
    return [
        ((xr, experts), cut[0], weights),
        ((dyr, transposed), cut[1], [one.t() for one in columns]),
        ((dyr, xr), deep[0], deep[1]),
    ]


def parts(y: torch.Tensor, sizes) -> list[torch.Tensor]:
    """The result of each group; rows of no group are zeros."""
    if y.dim() == 3:
        return list(y)
    assert not y[sum(sizes) :].any()
    return [y[begin:end] for begin, end in bounds(sizes)]


@pytest.mark.parametrize(
    "a,w",
    [
        *(("mxfp8", "mxfp8"), ("nvfp4", "mxfp8"), ("fp8_e4m3", "fp8_e4m3"), ("mxfp4", "nvfp4")),
        *(("fp8_1x128", "fp8_128x128"), ("bf16", "nvfp4"), ("bf16", "bf16")),
        *(("fp32", "fp32"), ("fp32", "mxfp8"), ("nvfp4", "fp32")),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_exact_products(a, w, dtype) -> None:
    sizes, *operands = layer(a, w, torch.float32 if "fp32" in (a, w) else torch.bfloat16)
    rounding = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-24
    for call, left, right in pairs(sizes, *operands):
        with no_waiting_after_first(call, dtype):
            y = hybridq.grouped_gemm(*call, out_dtype=dtype, precision="exact")
        for part, one, two in zip(parts(y, sizes), left, right, strict=True):
            exact, sums = one @ two.t(), one.abs() @ two.abs().t()
            room = (one.shape[1] + 5) * 2.0**-24 * sums + rounding * (exact.abs() + sums * 2.0**-20)
            assert ((part.double() - exact).abs() <= room + 1e-30).all()


def no_waiting_after_first(call, dtype):
    """Compile, and keep what is kept, before waiting is forbidden."""
    hybridq.grouped_gemm(*call, out_dtype=dtype, precision="exact")
    return no_waiting()


@pytest.mark.parametrize("name", ["fp8_e4m3", "mxfp8", "mxfp4", "nvfp4", "fp8_1x128"])
@pytest.mark.parametrize("precision", ["auto", "fast"])
def test_the_fast_paths_add_less_than_the_rounding_of_the_result(name, precision) -> None:
    sizes, *operands = layer(name, name, torch.bfloat16)
    for call, left, right in pairs(sizes, *operands):
        y = hybridq.grouped_gemm(*call, out_dtype=torch.bfloat16, precision=precision)
        hold_to_rounding(y, sizes, left, right)


def hold_to_rounding(y, sizes, left, right) -> None:
    """Products of groups err by as much as the rounding of their results twice."""
    for part, one, two in zip(parts(y, sizes), left, right, strict=True):
        exact = one @ two.t()
        if not exact.numel() or not one.shape[1]:
            assert not part.any()
            continue
        rms = (part.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
        # One factor rounds the few mantissas of a format alike.
        assert float(rms) <= 1.3 * 2**0.5 * BF16_RMS


@pytest.mark.parametrize(
    "a,w", [("nvfp4", "nvfp4"), ("fp8_e4m3", "nvfp4"), ("bf16", "nvfp4"), ("bf16", "mxfp8")]
)
def test_groups_that_are_decoded_before_the_product(a, w) -> None:
    """Forced, whatever the number of tokens: factors are in the tokens, and nothing waits."""
    sizes, *operands = layer(a, w, torch.bfloat16)
    for call, left, right in pairs(sizes, *operands):
        with hybridq.backend("torch"):
            hybridq.grouped_gemm(*call, out_dtype=torch.bfloat16)
            with no_waiting():
                y = hybridq.grouped_gemm(*call, out_dtype=torch.bfloat16)
        hold_to_rounding(y, sizes, left, right)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8", "fp8_current", "fp8_block"])
def test_a_layer_of_groups_is_as_exact_by_either_way(recipe, has_bias) -> None:
    """With an amax for each group: decoded before the product, and in registers."""
    sizes = (300, 0, 500, 256)
    experts = hybridq.GroupedLinear(4, 512, 384, has_bias, device="cuda", dtype=torch.bfloat16)
    x, dy = (torch.randn(sum(sizes), c, device="cuda").bfloat16() for c in (512, 384))
    splits, made = torch.tensor(sizes, device="cuda"), []
    for precision in ("auto", "exact"):
        torch.manual_seed(3)  # of stochastic rounding
        own = x.clone().requires_grad_()
        with hybridq.autocast(recipe=recipe, precision=precision):
            y = experts(own, splits)
        y.backward(dy)
        made.append((y.detach(), own.grad))
    for got, want in zip(*made, strict=True):
        rms = (got - want).double().square().mean().sqrt() / want.double().square().mean().sqrt()
        assert float(rms) <= 2 * 2**0.5 * BF16_RMS


@pytest.mark.parametrize("name", ["fp8_e4m3", "mxfp8", "mxfp4", "nvfp4"])
def test_torchs_scaled_grouped_product(name) -> None:
    """Forced, in all three directions; what this chip or this torch lacks is a skip."""
    spec = PlaneSpec.parse(name)
    found = hybridq.explain("grouped_gemm", spec, spec, device=torch.device("cuda"))
    reason = dict(found.reasons)["native"]
    if reason is not None:
        pytest.skip(reason)
    sizes, *operands = layer(name, name, torch.bfloat16)
    for call, left, right in pairs(sizes, *operands):
        with hybridq.backend("native"):
            hybridq.grouped_gemm(*call, out_dtype=torch.bfloat16)
            with no_waiting():
                y = hybridq.grouped_gemm(*call, out_dtype=torch.bfloat16)
        for part, one, two in zip(parts(y, sizes), left, right, strict=True):
            exact, sums = one @ two.t(), one.abs() @ two.abs().t()
            if not one.shape[1]:
                assert not part.any()  # a contraction over no tokens
                continue
            room = 2.0**-8 * exact.abs() + 2.0**-9 * sums / max(one.shape[1], 1) ** 0.5 + 1e-30
            assert ((part.double() - exact).abs() <= room).all()


def test_a_graph_follows_new_offsets() -> None:
    x = torch.randn(256, 128, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(3, 64, 128, device="cuda", dtype=torch.bfloat16)
    offsets = ends((100, 0, 100)).cuda()

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        xr = hybridq.quantize_grouped(x, offsets, "mxfp8")
        options = {"out_dtype": torch.bfloat16, "precision": "exact"}
        return hybridq.grouped_gemm(xr, w, **options), hybridq.grouped_gemm(xr, xr, **options)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = step()
    for sizes in ((256, 0, 0), (0, 1, 255), (0, 0, 0)):
        offsets.copy_(ends(sizes))
        x.copy_(torch.randn_like(x))
        graph.replay()
        for got, want in zip(made, step(), strict=True):
            assert torch.equal(got, want)
