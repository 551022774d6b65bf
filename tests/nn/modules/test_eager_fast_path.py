"""The eager path of Linear on a CPU: bits and errors of the general path; when it is taken."""

from __future__ import annotations

import copy
import gc
import pickle
import sys

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

import hybridq
from hybridq.kernels.cpu import bf16_gemm as product
from hybridq.nn.autograd import prepared_linear
from hybridq.nn.modules import eager_fast_path, linear
from hybridq.recipes import bind, get, names

#: Whether this CPU has the core's product, and so the one call for up to eight rows. Others have
#: it for weights whose planes are there, and whose inputs' values BF16 holds.
HAS_ONE_CALL = product.product_reason() is None


def is_long(recipe: str) -> bool:
    """Whether the forward is no single step: plain operands, or an amax of each row."""
    plan = bind(get(recipe))
    rows = (plan.input.row, plan.weight.row)
    return any(row.is_plain or row.spec.endswith(";rows") for row in rows)


@pytest.fixture
def taken(monkeypatch) -> list[bool]:
    """Of each forward that took the eager path so far, whether it was done in one call."""
    seen: list[bool] = []
    original = prepared_linear.PreparedLinear.skinny

    def call(self, *args):
        made = original(self, *args)
        seen.append(made is not None)
        return made

    monkeypatch.setattr(prepared_linear.PreparedLinear, "skinny", call)
    return seen


def layer(k: int = 64, n: int = 48, dtype=torch.bfloat16, **options) -> hybridq.Linear:
    torch.manual_seed(1)
    return hybridq.Linear(k, n, dtype=dtype, **options)


def both_ways(monkeypatch, run) -> tuple[object, object]:
    """What `run` returns where the fast path is taken, and where there is none."""
    with monkeypatch.context() as patch:
        patch.setattr(linear, "eager_forward", lambda *_: None)
        long = run()
    return run(), long


def step(module, x, recipe, first=None, grads=True, **options) -> list[torch.Tensor | None]:
    """Outputs, gradients, and what torch's generator gives next."""
    torch.manual_seed(2)
    module.zero_grad()
    x = x.detach().requires_grad_(x.requires_grad)
    with hybridq.autocast(recipe=recipe), torch.set_grad_enabled(grads):
        y = module(x, is_first_microbatch=first, **options)
    if grads:
        y.float().square().sum().backward()
    gradients = [parameter.grad for parameter in module.parameters()]
    return [y.detach(), x.grad, *gradients, torch.rand(1)]


def same(a: list, b: list) -> bool:
    return all((p is q is None) or torch.equal(p, q) for p, q in zip(a, b, strict=True))


@pytest.mark.thinned(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("recipe", [name for name in names() if name != "fp8_delayed"])
def test_every_bit_is_that_of_the_long_way(monkeypatch, taken, recipe: str, dtype) -> None:
    """Sizes, rows, bias, gradients, a cached weight; random numbers drawn included."""
    sizes = ((64, 64, True, (1, 64)), (100, 37, False, (8, 100)), (32, 50, True, (2, 1, 3, 32)))
    for k, n, bias, shape in (*sizes, (7, 3, False, (7,)), (40, 24, True, (2, 9, 40))):
        module = layer(k, n, dtype, bias=bias)
        for needs_grad, grads in ((False, False), (False, True), (True, True)):
            x = torch.randn(shape).to(dtype).requires_grad_(needs_grad)
            for first in (None, True, False):
                run = lambda: step(module, x, recipe, first, grads)  # noqa: E731, B023
                short, long = both_ways(monkeypatch, run)
                assert same(short, long), (shape, needs_grad, first, grads)
    assert any(taken) == (not is_long(recipe)) or not HAS_ONE_CALL
    assert not (any(taken) and is_long(recipe))
    assert bool(taken) or is_long(recipe)


def test_delayed_scaling_takes_the_long_way(taken) -> None:
    step(layer(), torch.randn(1, 64, dtype=torch.bfloat16), "fp8_delayed")
    assert taken == []


def test_one_call_does_up_to_eight_rows(taken) -> None:
    module = layer()
    for rows, expected in ((1, [HAS_ONE_CALL]), (8, [HAS_ONE_CALL]), (9, [False]), (0, [])):
        taken.clear()
        with hybridq.autocast(recipe="mxfp8"), torch.no_grad():
            assert module(torch.ones(rows, 64, dtype=torch.bfloat16)).shape == (rows, 48)
        assert taken == expected, rows


def _hooked(module):
    module.register_forward_hook(lambda _module, _input, y: y * 2)
    module.register_forward_pre_hook(lambda _module, given: (given[0] + 1,))


CHANGES = {
    "hooks": (_hooked, True),
    "weight_norm": (weight_norm, False),
    "no gradient of the weight": (lambda module: module.weight.requires_grad_(False), True),
    "no parameter": (lambda module: _replace(module, module.weight.detach().clone()), False),
    "quantized weight": (lambda module: _replace(module, nn.Parameter(_quantized(module))), True),
    "transposed weight": (
        lambda module: _replace(module, nn.Parameter(module.weight.detach().t().contiguous().t())),
        True,
    ),
    "strided bias": (
        lambda module: setattr(module, "bias", nn.Parameter(torch.randn(96).bfloat16()[::2])),
        False,
    ),
}


def _quantized(module) -> torch.Tensor:
    return hybridq.quantize(module.weight.detach(), "mxfp8")


def _replace(module, weight: torch.Tensor) -> None:
    del module.weight
    module.weight = weight


@pytest.mark.parametrize("change", CHANGES)
def test_modules_that_were_changed(monkeypatch, taken, change: str) -> None:
    alter, is_short = CHANGES[change]
    module = layer()
    alter(module)
    x = torch.randn(2, 64, dtype=torch.bfloat16)
    short, long = both_ways(monkeypatch, lambda: step(module, x, "mxfp8", grads=False))
    assert same(short, long)
    assert bool(taken) == is_short


@pytest.mark.parametrize("rows", [1, 8, 9])
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "fp8_current", "fp8_block"])
def test_quantized_weights_have_the_bits_of_the_long_way(
    monkeypatch, taken, recipe: str, rows: int
) -> None:
    """A weight that is a plane, without gradients; with them it takes the general path."""
    module = layer()
    with hybridq.quantized_model_init(recipe=recipe, frozen=True):
        frozen = layer()
    frozen.bias = module.bias
    frozen.bias.requires_grad_(False)
    x = torch.randn(rows, 64, dtype=torch.bfloat16)
    for one in (x, x.float().bfloat16().view(1, rows, 64)):
        short, long = both_ways(monkeypatch, lambda: step(frozen, one, recipe, grads=False))  # noqa: B023
        assert same(short, long)
    own, other = (step(one, x, recipe, grads=False)[0] for one in (module, frozen))
    assert torch.equal(own, other)
    taken.clear()
    step(frozen, x.clone().requires_grad_(), recipe)
    assert not taken


def test_surroundings_take_the_long_way(monkeypatch, taken) -> None:
    """torch.autocast, a forced backend, a mode, a profiler, forward-mode AD: none is passed by."""
    module, x = layer(dtype=torch.float32), torch.randn(2, 64)

    def inside(context):
        def run():
            with context():
                return step(module, x, "mxfp8", grads=False)

        return run

    for context in (
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: hybridq.backend("reference"),
        lambda: torch.device("cpu"),
        torch.autograd.profiler.profile,
        torch.autograd.forward_ad.dual_level,
    ):
        short, long = both_ways(monkeypatch, inside(context))
        assert same(short, long) and not any(taken)  # a forced backend makes each step


def test_quantized_outputs_and_main_grad_take_the_long_way(taken) -> None:
    x = torch.randn(2, 64, dtype=torch.bfloat16).requires_grad_()
    module = layer(fuse_wgrad_accumulation=True)
    module.weight.main_grad = torch.zeros(48, 64)
    with hybridq.autocast(recipe="mxfp8"):
        module(x).sum().backward()
        layer()(x, fp8_output=True)
        layer()(x, fp8_grad=True).sum().backward()
    assert not taken and module.weight.main_grad.any()


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation(taken, reentrant: bool) -> None:
    """The recipe of the forward, and the seed of the forward, also where it is another's now."""
    module = layer()
    x = torch.randn(2, 64, dtype=torch.bfloat16).requires_grad_()
    gradients = []
    for wrap in (lambda f, x: f(x), lambda f, x: checkpoint(f, x, use_reentrant=reentrant)):
        module.zero_grad()
        x.grad = None
        torch.manual_seed(3)
        with hybridq.autocast(recipe="nvfp4"):
            y = wrap(module, x)
        with hybridq.autocast(recipe="mxfp8"):
            y.float().square().sum().backward()
        gradients.append([y.detach(), x.grad, module.weight.grad, module.bias.grad])
    assert same(*gradients)
    assert bool(taken) and (any(taken) or not HAS_ONE_CALL)


def test_errors_are_the_long_ways(monkeypatch) -> None:
    module = layer()
    good = torch.ones(1, 64, dtype=torch.bfloat16)
    for given, first in (
        (torch.ones(1, 64), None),
        (torch.ones(1, 63, dtype=torch.bfloat16), None),
        (torch.tensor(1.0), None),
        (torch.ones(1, 64, dtype=torch.int64), None),
        ([1.0], None),
        (good.to_sparse(), None),
        (good.to("meta"), None),
        (good, 1),
    ):

        def run(given=given, first=first):
            with hybridq.autocast(recipe="mxfp8"), pytest.raises(Exception) as error:
                module(given, is_first_microbatch=first)
            return error.type, str(error.value)

        short, long = both_ways(monkeypatch, run)
        assert short == long


def test_a_cached_weight_ends_where_it_does_on_the_long_way(taken) -> None:
    """A write, another optimizer's step, another recipe, `hybridq.forget`."""
    module, x = layer(), torch.ones(1, 64, dtype=torch.bfloat16)

    def forward(first=False, recipe="mxfp8"):
        with hybridq.autocast(recipe=recipe), torch.no_grad():
            return module(x, is_first_microbatch=first)

    before = forward(True)
    module.weight.data.mul_(2)  # no version tells of it: the promise is broken
    assert torch.equal(forward(), before)
    hybridq.forget(module)
    doubled = forward()
    assert not torch.equal(doubled, before)
    with torch.no_grad():
        module.weight.div_(2)
    assert torch.equal(forward(), before)
    with hybridq.autocast(recipe="nvfp4"), torch.no_grad():
        other = module(x)
    assert torch.equal(forward(recipe="nvfp4"), other)
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    module.weight.grad = torch.ones_like(module.weight)
    optimizer.step()
    assert not torch.equal(forward(), before)
    assert taken and (all(taken) or not HAS_ONE_CALL)


def test_copies_and_pickles_leave_the_plan_behind() -> None:
    module, x = layer(), torch.ones(1, 64, dtype=torch.bfloat16)
    with hybridq.autocast(recipe="mxfp8"):
        y = module(x)
        assert "_prepared_linear" in module.__dict__
        for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            assert "_prepared_linear" not in other.__dict__
            assert torch.equal(other(x), y)
    assert eager_fast_path.eager_forward(module, x, None) is None  # without a recipe


@pytest.mark.parametrize("rows,most", [(4, 40), (256, 80)])
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "fp8_current", "fp8_block"])
def test_a_forward_takes_few_python_calls(recipe: str, rows: int, most: int) -> None:
    """What follows from specs and dtypes alone is not asked again, and no frame only hands on.

    Of 256 rows under MXFP8 once 206 calls, 14 frames deep.
    """
    module, x = layer(), torch.randn(rows, 64, dtype=torch.bfloat16)
    with hybridq.autocast(recipe=recipe):
        calls, depth = cost_of(lambda: module(x))
    above = 3  # the caller's, and two of nn.Module
    assert 10 < calls <= (most if HAS_ONE_CALL else 85)
    assert 5 < depth - above <= 9


def test_quantize_takes_few_python_calls() -> None:
    x = torch.randn(256, 64, dtype=torch.bfloat16)
    for fmt in ("mxfp8", "nvfp4", "fp8_e4m3"):
        calls, depth = cost_of(lambda fmt=fmt: hybridq.quantize(x, fmt))
        assert 10 < calls <= 30 and 3 < depth - 1 <= 7, (fmt, calls, depth)


def cost_of(run) -> tuple[int, int]:
    """The Python calls of `run`, and how deep they go with its frame; after some of its like."""
    calls, depth, most = 0, 0, 0

    def count(_frame, event: str, _arg) -> None:
        nonlocal calls, depth, most
        calls += event == "call"
        depth += (event == "call") - (event == "return")
        most = max(most, depth)

    for _ in range(3):
        run()
    gc.collect()
    gc.disable()  # what other tests left behind tells of its end wherever it is collected
    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls, most
