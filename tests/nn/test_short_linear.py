"""The short way of Linear through few rows: bits and errors of the long way; when it is taken."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

import hybridq
from hybridq.kernels import product
from hybridq.nn import few_rows, linear, short_linear
from hybridq.recipes import bind, get, names

pytestmark = pytest.mark.skipif(
    product.product_reason() is not None, reason=str(product.product_reason())
)


def is_long(recipe: str) -> bool:
    """Whether the forward is no single step: plain operands, or an amax of each row."""
    plan = bind(get(recipe))
    rows = (plan.input.row, plan.weight.row)
    return any(row.is_plain or row.spec.endswith(";rows") for row in rows)


@pytest.fixture
def taken(monkeypatch) -> list[bool]:
    """Whether each forward that came so far was done in one step."""
    seen: list[bool] = []
    original = few_rows.FewRows.__call__

    def call(self, *args):
        made = original(self, *args)
        seen.append(made is not None)
        return made

    monkeypatch.setattr(few_rows.FewRows, "__call__", call)
    return seen


def layer(k: int = 64, n: int = 48, dtype=torch.bfloat16, **options) -> hybridq.Linear:
    torch.manual_seed(1)
    return hybridq.Linear(k, n, dtype=dtype, **options)


def both_ways(monkeypatch, run) -> tuple[object, object]:
    """What `run` returns where the short way is taken, and where there is none."""
    with monkeypatch.context() as patch:
        patch.setattr(linear, "short_linear", lambda *_: None)
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("recipe", [name for name in names() if name != "fp8_delayed"])
def test_every_bit_is_that_of_the_long_way(monkeypatch, taken, recipe: str, dtype) -> None:
    """Sizes, rows, bias, gradients, a kept weight; random numbers drawn included."""
    sizes = ((64, 64, True, (1, 64)), (100, 37, False, (8, 100)), (32, 50, True, (2, 1, 3, 32)))
    for k, n, bias, shape in (*sizes, (7, 3, False, (7,))):
        module = layer(k, n, dtype, bias=bias)
        for needs_grad, grads in ((False, False), (False, True), (True, True)):
            x = torch.randn(shape).to(dtype).requires_grad_(needs_grad)
            for first in (None, True, False):
                run = lambda: step(module, x, recipe, first, grads)  # noqa: E731, B023
                short, long = both_ways(monkeypatch, run)
                assert same(short, long), (shape, needs_grad, first, grads)
    assert is_long(recipe) == (not any(taken))


def test_delayed_scaling_takes_the_long_way(taken) -> None:
    step(layer(), torch.randn(1, 64, dtype=torch.bfloat16), "fp8_delayed")
    assert taken == []


def test_it_is_taken_for_few_rows_only(taken) -> None:
    module = layer()
    for rows, expected in ((1, [True]), (8, [True]), (9, []), (0, [])):
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
    "quantized weight": (lambda module: _replace(module, nn.Parameter(_quantized(module))), False),
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
    assert any(taken) == is_short


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
        assert same(short, long) and not any(taken)


def test_quantized_outputs_and_main_grad_take_the_long_way(taken) -> None:
    x = torch.randn(2, 64, dtype=torch.bfloat16).requires_grad_()
    module = layer(fuse_wgrad_accumulation=True)
    module.weight.main_grad = torch.zeros(48, 64)
    with hybridq.autocast(recipe="mxfp8"):
        module(x).sum().backward()
        layer()(x, fp8_output=True)
        layer()(x, fp8_grad=True).sum().backward()
    assert not any(taken) and module.weight.main_grad.any()


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
    assert any(taken)


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


def test_a_kept_weight_ends_where_it_does_on_the_long_way(taken) -> None:
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
    assert all(taken)


def test_copies_and_pickles_leave_the_plan_behind() -> None:
    module, x = layer(), torch.ones(1, 64, dtype=torch.bfloat16)
    with hybridq.autocast(recipe="mxfp8"):
        y = module(x)
        assert "_few_rows" in module.__dict__
        for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            assert "_few_rows" not in other.__dict__
            assert torch.equal(other(x), y)
    assert short_linear.short_linear(module, x, None) is None  # without a recipe
