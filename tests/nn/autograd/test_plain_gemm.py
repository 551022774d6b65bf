"""Plain products on CPUs where torch's are slow: BF16's and FP16's values, by FP32 products."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hybridq
from hybridq.kernels.decoded import plain_gemm as plain
from hybridq.nn.autograd.plain_gemm import plain_attention, plain_linear
from products_seen import Products

SHORT = [torch.bfloat16, torch.float16]
#: Half a unit in the last place of values in [0.5, 1).
HALF_ULP = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}


@pytest.fixture(params=["slow_products", "as it is"])
def machine(request: pytest.FixtureRequest) -> str:
    """A CPU on which torch has no fast product of BF16 and FP16, and this one."""
    if request.param == "slow_products":
        request.getfixturevalue(request.param)
    return request.param


def operands(m: int, n: int, k: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    return torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype), torch.randn(n).to(dtype)


def check(y: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> None:
    """FP32 sums of exact products (in any order), the bias, and one rounding to y's dtype.

    The sums' error is at most `(K + 1) * 2^-24 * sum |a||b|`; a rounding adds half a unit in the
    last place of the result, and FP16 half of its smallest subnormal where that is more.
    """
    left, right = a.double(), b.double()
    exact = left @ right.T
    size = left.abs() @ right.abs().T
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    sums = (a.shape[1] + 1) * 2.0**-24 * size
    least = 2.0**-25 if y.dtype == torch.float16 else 0.0
    _, exponent = torch.frexp(exact.abs() + sums)
    room = sums + torch.ldexp(torch.full_like(exact, HALF_ULP[y.dtype]), exponent) + least
    assert bool(((y.double() - exact).abs() <= room).all())


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize("m, n, k", [(1, 5, 70), (2, 64, 256), (3, 33, 129), (65, 40, 96)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_values_are_those_of_one_rounding(
    machine: str, dtype: torch.dtype, m: int, n: int, k: int, with_bias: bool
) -> None:
    a, b, bias = operands(m, n, k, dtype)
    given = bias if with_bias else None
    y = plain.plain_product(a, b, given)
    assert y.dtype == dtype
    check(y, a, b, given)
    # Operands that lie the other way round, as a backward has them.
    check(plain.plain_product(a.t().contiguous().t(), b.t().contiguous().t()), a, b, None)


@pytest.mark.parametrize("dtype", SHORT)
def test_special_values_pass(machine: str, dtype: torch.dtype) -> None:
    a, b, _ = operands(4, 8, 64, dtype)
    a[0, 0], a[1, 3], a[3] = float("inf"), float("nan"), 0.0
    y = plain.plain_product(a, b)
    assert y[0].isinf().all() and y[1].isnan().all() and not y[3].any()
    assert torch.isfinite(y[2]).all()
    assert plain.plain_product(a[:, :0], b[:, :0]).eq(0).all()
    assert plain.plain_product(a[:0], b).shape == (0, 8)


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize("kind", ["linear", "linear of no recipe", "groups", "norm", "attention"])
def test_no_short_product_of_torch_runs_on_a_slow_cpu(
    slow_products: None, dtype: torch.dtype, kind: str
) -> None:
    """Every product that the modules ask torch for has FP32 operands, the backward's included."""
    x = torch.randn(6, 64).to(dtype).requires_grad_()
    with Products() as seen:
        if kind == "groups":
            layer = hybridq.GroupedLinear(2, 64, 32, dtype=dtype)
            layer(x, [3, 3]).float().sum().backward()
        elif kind == "norm":
            layer = hybridq.LayerNormMLP(64, 32, dtype=dtype)
            layer(x).float().sum().backward()
        elif kind == "attention":
            layer = hybridq.MultiheadAttention(64, 4, params_dtype=dtype)
            layer(x[:, None]).float().sum().backward()
        else:
            layer = hybridq.Linear(64, 32, dtype=dtype)
            recipe = None if kind == "linear of no recipe" else hybridq.recipes.get("bf16")
            with hybridq.autocast(enabled=recipe is not None, recipe=recipe):
                layer(x).float().sum().backward()
    assert seen.dtypes == {torch.float32}


@pytest.mark.parametrize("dtype", SHORT)
def test_planes_of_plain_tensors_take_the_same_way(slow_products: None, dtype: torch.dtype) -> None:
    a, b, bias = operands(6, 5, 300, dtype)
    wide = F.linear(a.float(), b.float(), bias.float()).to(dtype)
    assert torch.equal(hybridq.gemm(a, b, bias=bias), wide)
    layer = hybridq.Linear(300, 5, dtype=dtype)
    with torch.no_grad():
        plain_y = layer(a)
        with hybridq.autocast(recipe=hybridq.recipes.get("bf16")):
            assert torch.equal(layer(a), plain_y)


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize("shape", [(64,), (3, 64), (2, 5, 64), (0, 64)])
def test_linear_and_its_gradients(
    slow_products: None, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    layer, x = nn.Linear(64, 24).to(dtype), torch.randn(shape).to(dtype).requires_grad_()
    y = plain_linear(x, layer.weight, layer.bias)
    assert y.dtype == dtype and y.shape == (*shape[:-1], 24)
    dy = torch.randn_like(y)
    dx, dw, db = torch.autograd.grad(y, (x, layer.weight, layer.bias), dy)
    rows, flat = dy.reshape(-1, 24), x.detach().reshape(-1, 64)
    check(dx.reshape(-1, 64), rows, layer.weight.detach().t(), None)
    check(dw, rows.t(), flat.t(), None)
    check(db[:, None], rows.t(), torch.ones(1, rows.shape[0], dtype=dtype), None)


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize("lead", [(), (0,), (2, 3), (0, 2)])
def test_a_layer_without_inputs_is_its_bias(slow_products: None, dtype, lead) -> None:
    """No values say how many rows there are, and shapes do."""
    x = torch.zeros(*lead, 0, dtype=dtype, requires_grad=True)
    weight = torch.zeros(4, 0, dtype=dtype, requires_grad=True)
    bias = torch.randn(4, dtype=dtype, requires_grad=True)
    y = plain_linear(x, weight, bias)
    assert y.shape == (*lead, 4) and y.dtype == dtype and torch.equal(y, bias.expand(*lead, 4))
    y.sum().backward()
    assert x.grad.shape == x.shape and weight.grad.shape == weight.shape
    assert torch.equal(bias.grad, torch.full_like(bias, float(y.numel() // 4)))


def test_what_is_saved_is_the_operands(slow_products: None) -> None:
    x, w = (torch.randn(8, 64).bfloat16().requires_grad_() for _ in range(2))
    q, k, v = (torch.randn(2, 4, 8, 16).bfloat16().requires_grad_() for _ in range(3))
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        plain_linear(x, w)
        plain_attention(q, k, v)
    assert [t.data_ptr() for t in saved] == [t.data_ptr() for t in (x, w, q, k, v)]


@pytest.mark.parametrize("dtype", SHORT)
def test_gradients_of_attention_are_those_of_fp32_rounded(
    slow_products: None, dtype: torch.dtype
) -> None:
    short = [torch.randn(2, 4, 8, 16).to(dtype).requires_grad_() for _ in range(3)]
    wide = [one.detach().float().requires_grad_() for one in short]
    y = plain_attention(*short, is_causal=True)
    same = F.scaled_dot_product_attention(*wide, is_causal=True)
    dy = torch.randn_like(y)
    assert torch.equal(y, same.to(dtype))
    found = torch.autograd.grad(y, short[1:], dy)
    expected = torch.autograd.grad(same, wide[1:], dy.float())
    assert all(
        torch.equal(one, other.to(dtype)) for one, other in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("kind", ["none", "bool", "float"])
def test_attention_takes_masks_and_groups_of_heads(slow_products: None, kind: str) -> None:
    q, k, v = (torch.randn(2, heads, 9, 16).bfloat16() for heads in (4, 2, 2))
    mask = None
    if kind != "none":
        mask = torch.ones(9, 9).tril().bool()
        mask = mask if kind == "bool" else torch.zeros(9, 9).masked_fill(~mask, -1e4).bfloat16()
    y = plain_attention(q, k, v, mask, enable_gqa=True)
    wide = F.scaled_dot_product_attention(
        q.double(),
        k.double(),
        v.double(),
        mask if mask is None or mask.dtype is torch.bool else mask.double(),
        enable_gqa=True,
    )
    assert y.dtype == torch.bfloat16
    assert torch.allclose(y.double(), wide, rtol=2.0**-8, atol=2.0**-12)


def test_autocast_decides_the_dtype(slow_products: None) -> None:
    layer, x = hybridq.Linear(64, 32), torch.randn(5, 64, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    check(
        y.detach(), x.detach().bfloat16(), layer.weight.detach().bfloat16(), layer.bias.bfloat16()
    )
    y.float().sum().backward()
    assert x.grad.dtype == layer.weight.grad.dtype == torch.float32


def test_every_kind_of_derivative_is_there(slow_products: None) -> None:
    x, w = torch.randn(3, 16).bfloat16(), torch.randn(4, 16).bfloat16()

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return plain_linear(x, w).float().square().sum()

    for transform in (torch.func.grad, torch.func.jacrev, torch.func.jacfwd):
        assert torch.allclose(
            transform(f)(x, w).float(),
            (2 * (x.float() @ w.float().T) @ w.float()),
            rtol=0.05,
            atol=1,
        )
    rows = torch.func.vmap(plain_linear, (0, None))(x, w)
    assert torch.allclose(rows.float(), x.float() @ w.float().T, rtol=2.0**-7, atol=2.0**-7)
    leaf = x.clone().requires_grad_()
    (once,) = torch.autograd.grad(f(leaf, w), leaf, create_graph=True)
    (twice,) = torch.autograd.grad(once.float().sum(), leaf)
    wide = w.float().T @ w.float()
    assert torch.allclose(twice.float(), 2 * wide.sum(0).expand(3, 16), rtol=0.05, atol=1)


def test_compiled_code_takes_it_too(slow_products: None) -> None:
    layer = hybridq.Linear(64, 32, dtype=torch.bfloat16)
    x = torch.randn(6, 64).bfloat16()
    with Products() as seen:
        eager = layer(x)
    torch._dynamo.reset()
    made = torch.compile(layer, backend="aot_eager", fullgraph=True)(x)
    assert seen.dtypes == {torch.float32}
    assert torch.equal(made, eager)


def test_what_it_does_not_know_is_torchs(slow_products: None) -> None:
    x, w = torch.randn(4, 8).bfloat16(), torch.randn(5, 8).bfloat16()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        plain_linear(x[:, :7], w)
    with pytest.raises(RuntimeError, match="dtype"):
        plain_linear(x, w.float())
    assert plain_linear(x.to("meta"), w.to("meta")).is_meta
    assert torch.equal(plain_linear(x.float(), w.float()), F.linear(x.float(), w.float()))
    assert not plain.is_slow(torch.bfloat16, "cuda") and not plain.is_slow(torch.float32)


def test_explain_names_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    for found, text in ((frozenset(), "torch's bfloat16 product"), (frozenset(SHORT), "FP32")):
        monkeypatch.setattr(plain, "_SLOW", found)
        assert text in " ".join(hybridq.explain("gemm", "identity", "bf16").notes)
    assert [way.dtype for way in plain.product_ways()] == ["float32", "bfloat16", "float16"]


@pytest.mark.parametrize("recipe", [None, "mxfp8"])
def test_a_module_that_runs_where_products_are_slow_says_so_once(
    slow_products: None, caplog: pytest.LogCaptureFixture, recipe: str | None
) -> None:
    layer, x = hybridq.Linear(64, 32), torch.randn(12, 64)
    with hybridq.autocast(enabled=recipe is not None, recipe=recipe):
        layer(x)  # FP32 is never slow
        assert not caplog.messages
        for _ in range(2):
            layer.bfloat16()(x.bfloat16())
    (said,) = caplog.messages
    assert re.search("bfloat16 products are slow .*Linear", said)


def test_no_advice_where_products_are_fast(
    fast_products: None, caplog: pytest.LogCaptureFixture
) -> None:
    hybridq.Linear(64, 32, dtype=torch.bfloat16)(torch.randn(12, 64).bfloat16())
    assert not caplog.messages
