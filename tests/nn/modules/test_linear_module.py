"""hybridq.Linear as a module: what it shares with nn.Linear, and how recipes reach it."""

from __future__ import annotations

import copy
import io
import pickle
import threading

import pytest
import torch
from torch import nn

from hybridq import settings
from hybridq.nn import Linear
from hybridq.quantizers import MXFP8Quantizer, NVFP4Quantizer
from hybridq.recipes import CustomRecipe, MXFP8BlockScaling, QuantizerRole, autocast, get
from linear_model import Recorder, equal, run


def _pair(*args, **kwargs):
    torch.manual_seed(5)
    ours = Linear(*args, **kwargs)
    torch.manual_seed(5)
    return ours, nn.Linear(*args, **kwargs)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float64])
def test_construction_and_state_dict_are_those_of_nn_linear(bias, dtype):
    ours, plain = _pair(13, 7, bias, dtype=dtype)
    assert list(ours.state_dict()) == list(plain.state_dict())
    assert equal(list(ours.state_dict().values()), list(plain.state_dict().values()))
    with autocast():
        if dtype != torch.float64:
            ours(torch.randn(2, 13, dtype=dtype))
    nn.init.ones_(ours.weight)
    plain.load_state_dict(ours.state_dict(), strict=True)
    assert torch.equal(plain.weight, torch.ones_like(plain.weight))
    nn.init.zeros_(plain.weight)
    ours.load_state_dict(plain.state_dict(), strict=True)
    assert not ours.weight.any()
    assert isinstance(ours, nn.Linear) and "in_features=13" in repr(ours)


@pytest.mark.usefixtures("fast_products")
@pytest.mark.parametrize("amp", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_outside_autocast_it_is_nn_linear(dtype, amp):
    if dtype == torch.float64 and amp is not None:
        return
    ours, plain = _pair(33, 17, dtype=dtype)
    x, dy = torch.randn(2, 5, 33, dtype=dtype), torch.randn(2, 5, 17)
    results = []
    for layer in (ours, plain):
        leaf = x.clone().requires_grad_()
        with torch.autocast("cpu", dtype=amp, enabled=amp is not None):
            y = layer(leaf)
        y.backward(dy.to(y.dtype))
        results.append([y, leaf.grad, layer.weight.grad, layer.bias.grad])
    assert equal(*results)
    with autocast(recipe="nvfp4"), autocast(enabled=False):
        assert torch.equal(ours(x), plain(x))


@pytest.mark.parametrize("amp", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_autocast(dtype, amp):
    """Under torch.autocast: the same as the cast layer on the cast input; gradients come back."""
    layer = Linear(40, 24, dtype=dtype)
    x, dy = torch.randn(6, 40, dtype=dtype), torch.randn(6, 24).to(amp)
    cast = copy.deepcopy(layer).to(amp)
    expected = run(cast, x.to(amp), dy, recipe="mxfp8_fwd_high_precision_bwd")
    leaf = x.clone().requires_grad_()
    with torch.autocast("cpu", dtype=amp):
        with autocast(recipe="mxfp8_fwd_high_precision_bwd"):
            y = layer(leaf)
        assert y.dtype == amp
        y.backward(dy)  # also inside torch.autocast: dtypes were settled by the forward
    got = [y.detach(), leaf.grad, layer.weight.grad, layer.bias.grad]
    assert [t.dtype for t in got] == [amp, dtype, dtype, dtype]
    assert equal(got, [e.to(t.dtype) for e, t in zip(expected, got, strict=True)])


def test_torch_autocast_does_not_reach_into_the_gemms():
    """FP32 tensors that torch.autocast leaves alone (disabled device) keep FP32 products."""
    layer, x, dy = Linear(64, 32), torch.randn(8, 64), torch.randn(8, 32)
    expected = run(layer, x, dy, recipe="mxfp8")
    leaf = x.clone().requires_grad_()
    with autocast(recipe="mxfp8"):
        y = layer(leaf)
    layer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y.backward(dy)
    assert torch.equal(leaf.grad, expected[1]) and torch.equal(layer.weight.grad, expected[2])


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: torch.randn(2, 8, dtype=torch.bfloat16), RuntimeError, "same dtype"),
        (lambda: torch.randn(2, 8, dtype=torch.float64), TypeError, "float64"),
        (lambda: torch.randn(2, 8, dtype=torch.complex64), TypeError, "complex64"),
        (lambda: torch.ones(2, 8, dtype=torch.int64), TypeError, "int64"),
        (lambda: torch.randn(2, 9), RuntimeError, r"in_features=8.*\(2, 9\)"),
        (lambda: torch.tensor(1.0), RuntimeError, "in_features=8"),
        (lambda: torch.randn(2, 8).to_sparse(), TypeError, "strided"),
        (lambda: torch.randn(2, 8, device="meta"), RuntimeError, "one device"),
        (lambda: [[1.0] * 8], TypeError, "Tensor"),
    ],
)
def test_bad_inputs(make, error, words):
    layer = Linear(8, 4, name="head.proj")
    with autocast(recipe="mxfp8"), pytest.raises(error, match=words) as caught:
        layer(make())
    assert "head.proj" in str(caught.value)


def test_bad_constructor_arguments():
    with pytest.raises(TypeError, match="name must be a string"):
        Linear(4, 4, name=3)
    with pytest.raises(TypeError):
        Linear(4, 4, True, None, None, "positional")


def test_nan_and_inf_stay_visible():
    layer = Linear(64, 8)
    x = torch.randn(4, 64)
    x[1, 3] = float("nan")
    with autocast(recipe="mxfp8"):
        y = layer(x)
    assert y[1].isnan().all() and y[[0, 2, 3]].isfinite().all()
    with autocast(recipe="nvfp4"):  # one scale for the tensor: a NaN spreads over it
        assert layer(x).isnan().all()


def test_meta_and_fake_tensors():
    layer = Linear(8, 4, device="meta")
    with autocast(recipe="mxfp8"), torch.no_grad():
        assert layer(torch.empty(3, 8, device="meta")).shape == (3, 4)


def test_a_tied_weight_gets_both_gradients():
    one, two = Linear(24, 24, bias=False), Linear(24, 24, bias=False)
    x, dy = torch.randn(5, 24), torch.randn(5, 24)
    first = run(one, x, dy, recipe="mxfp8")
    middle = first[0]
    two.weight = one.weight
    tied = nn.Sequential(one, two)
    assert len(list(tied.parameters())) == 1
    apart = nn.Sequential(copy.deepcopy(one), copy.deepcopy(two))
    got, expected = run(tied, x, dy, recipe="mxfp8"), run(apart, x, dy, recipe="mxfp8")
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])
    assert torch.equal(got[2], expected[3] + expected[2])
    assert torch.equal(first[0], middle)


def test_a_changed_recipe_takes_effect_at_the_next_call():
    layer, x, dy = Linear(48, 24), torch.randn(6, 48), torch.randn(6, 24)
    fresh = {n: run(copy.deepcopy(layer), x, dy, recipe=n) for n in ("mxfp8", "fp8_current")}
    assert not equal(*fresh.values())
    for name in ("mxfp8", "fp8_current", "mxfp8", "mxfp8", "fp8_current"):
        assert equal(run(layer, x, dy, recipe=name), fresh[name])


def test_backward_uses_the_recipe_of_its_forward():
    layer, x, dy = Linear(48, 24), torch.randn(6, 48), torch.randn(6, 24)
    expected = run(layer, x, dy, recipe="mxfp8_fwd_high_precision_bwd")
    layer.zero_grad()
    leaf = x.clone().requires_grad_()
    with autocast(recipe="mxfp8_fwd_high_precision_bwd"):
        y = layer(leaf)
    with autocast(recipe="fp8_current"):
        layer(x)
        y.backward(dy)
    assert torch.equal(leaf.grad, expected[1])


def test_the_name_reaches_the_factory_and_renaming_binds_again():
    def factory(role: QuantizerRole):
        return MXFP8Quantizer() if role.name.startswith("a") else NVFP4Quantizer()

    x = torch.randn(4, 32)
    recipe = CustomRecipe(factory)
    results = []
    layer = Linear(32, 8)
    for name in ("a.x", "b.x"):
        layer.set_name(name)
        with autocast(recipe=recipe), Recorder() as seen:
            layer(x)
        results.append(seen.encodes[0][0])
    assert results[0] == str(MXFP8Quantizer().rowwise) and results[1] == str(
        NVFP4Quantizer().rowwise
    )
    kept = Linear(32, 8, name="mine")
    kept.set_name("other")
    assert kept.name == "mine"


@pytest.mark.parametrize(
    "copier",
    [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), "torch"],
    ids=["deepcopy", "pickle", "torch.save"],
)
def test_copies_after_binding(copier):
    layer, x, dy = Linear(32, 16, name="q"), torch.randn(4, 32), torch.randn(4, 16)
    expected = run(layer, x, dy, recipe=CustomRecipe(lambda role: MXFP8Quantizer()))
    if copier == "torch":
        file = io.BytesIO()
        torch.save(layer, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    else:
        twin = copier(layer)
    assert twin.name == "q" and list(twin.state_dict()) == ["weight", "bias"]
    assert equal(run(twin, x, dy, recipe="mxfp8"), expected)


def test_moving_and_casting_the_module():
    layer, x, dy = Linear(32, 16), torch.randn(4, 32), torch.randn(4, 16)
    run(layer, x, dy, recipe="mxfp8")
    layer.bfloat16()
    got = run(layer, x.bfloat16(), dy.bfloat16(), recipe="mxfp8")
    assert all(t.dtype == torch.bfloat16 for t in got)


def test_settings_nest_and_survive_errors():
    state = settings.current()
    assert state.recipe is None
    with autocast(recipe="mxfp8"):
        assert state.recipe == get("mxfp8")
        with autocast(recipe="nvfp4"):
            assert state.recipe == get("nvfp4")
            with autocast(enabled=False, recipe="nvfp4"):
                assert state.recipe is None
        with pytest.raises(KeyError), autocast():
            assert state.recipe == MXFP8BlockScaling()
            raise KeyError
        assert state.recipe == get("mxfp8")
    assert state.recipe is None
    again = autocast(recipe="fp8_block")
    with again, again, autocast(recipe="mxfp8"), again:
        assert state.recipe == get("fp8_block")
    assert state.recipe is None


def test_as_a_decorator():
    @autocast(recipe="mxfp8")
    def forward(depth):
        """Doc."""
        inner = settings.current().recipe
        return [inner, *(forward(depth - 1) if depth else [])]

    assert forward(2) == [get("mxfp8")] * 3 and forward.__doc__ == "Doc."
    assert settings.current().recipe is None
    failing = autocast(recipe="mxfp8")(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        failing()
    assert settings.current().recipe is None


def test_threads_have_recipes_of_their_own():
    layer, x, dy = Linear(48, 24), torch.randn(6, 48), torch.randn(6, 24)
    names = ("mxfp8", "fp8_current", None, "mxfp8_fwd_high_precision_bwd")
    options = [{"recipe": name} if name else {"enabled": False} for name in names]
    expected = [run(layer, x, dy, **option) for option in options]
    barrier, failures = threading.Barrier(len(names)), []

    def work(option, wanted):
        mine = copy.deepcopy(layer)
        for _ in range(5):
            leaf = x.clone().requires_grad_()
            with autocast(**option):
                barrier.wait()
                y = layer(leaf)  # one module, four recipes at once
                barrier.wait()
            if not (torch.equal(y, wanted[0]) and equal(run(mine, x, dy, **option), wanted)):
                failures.append(option)

    threads = [
        threading.Thread(target=work, args=pair) for pair in zip(options, expected, strict=True)
    ]
    with autocast(recipe="nvfp4"):  # of this thread, and of no other
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []
