"""Who updates the scales of delayed scaling, and where its state goes."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

import hybridq
from delayed_model import (
    INNER,
    OUTER,
    DelayedModel,
    batch,
    forward,
    is_told,
    layer,
    microbatch,
    scale_for,
    scales_of,
    train,
    within,
)
from hybridq.errors import HybridQWarning
from hybridq.recipes import DelayedScaling
from linear_model import equal

# --- who updates


class Foreign:
    """An optimizer that torch's hooks do not know."""

    def __init__(self, module, how) -> None:
        self.parameters, self.how = list(module.parameters()), how

    def step(self) -> None:
        for p in self.parameters:
            with torch.no_grad():
                if self.how == "in place":
                    p.sub_(p.grad, alpha=0.05)
                    p.grad.zero_()
                else:
                    p.data = p.data - 0.05 * p.grad
                    p.grad = None


@pytest.mark.parametrize("how", ["in place", "memory"])
def test_steps_that_nobody_told_of_are_seen(how) -> None:
    own, model = layer(), DelayedModel()
    optimizer = Foreign(own, how)
    for step in range(4):
        for number in range(2):
            x, dy = batch(2 * step + number)
            want = model.step(x, own.weight.detach().clone(), own.bias.detach().clone(), dy)
            y, dx, *_ = microbatch(own, 2 * step + number)
            assert within(y, want["y"]) and within(dx, want["dx"]), (step, number)
        optimizer.step()
        model.update()
    assert not is_told(own)


def test_steps_inside_a_backward() -> None:
    """One optimizer per parameter, stepping as soon as its gradient is there."""
    own, model = layer(), DelayedModel()
    optimizers = {p: torch.optim.SGD([p], lr=0.05) for p in own.parameters()}

    def step(parameter) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in own.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for number in range(4):
        x, dy = batch(number)
        want = model.step(x, own.weight.detach().clone(), own.bias.detach().clone(), dy)
        x.requires_grad_()
        y = forward(own, x)
        y.backward(dy)
        assert within(y.detach(), want["y"]) and within(x.grad, want["dx"])
        model.update()
    assert not is_told(own)


def test_many_backwards_without_an_update_are_reported() -> None:
    own = hybridq.Linear(1, 1)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for number in range(1001):
            assert not seen or number == 1000
            forward(own, torch.ones(1, 1)).backward(torch.ones(1, 1))
    assert len(seen) == 1 and "hybridq.update_scaling() once per step" in str(seen[0].message)


def test_no_update_between_microbatches() -> None:
    own = layer()
    for number in range(3):
        microbatch(own, number)
        assert set(scales_of(own).values()) == {1.0}
    with torch.no_grad():
        own.weight.mul_(0.5)
    x, _ = batch(0)
    forward(own, x, is_first_microbatch=False)  # told that nothing has stepped
    assert set(scales_of(own).values()) == {1.0}
    forward(own, x)
    assert 1.0 not in scales_of(own).values()


def test_an_update_leaves_alone_what_recorded_nothing() -> None:
    one, two = layer(), layer(seed=1)
    microbatch(two, 0)
    train(one, range(2))
    assert 1.0 not in scales_of(two).values()  # a step of any optimizer is a step
    before = hybridq.state_dict_with_history(two)
    train(one, range(2))
    after = hybridq.state_dict_with_history(two)
    assert all(torch.equal(before[key], after[key]) for key in before)
    microbatch(two, 1)
    hybridq.update_scaling(one)
    assert scales_of(two)["input"] == before["scaling.input.e4m3.scale"].item()
    with pytest.raises(TypeError, match=r"model must be an nn\.Module, got list"):
        hybridq.update_scaling([two])


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_bad_amax_warns_once_and_leaves_the_scale(bad) -> None:
    recipe = DelayedScaling(amax_history_len=2)
    model = hybridq.convert(nn.ModuleDict({"up": nn.Linear(INNER, OUTER)}))
    own, (x, dy) = model["up"], batch(0)
    forward(own, x, recipe).backward(dy)
    hybridq.update_scaling(model)
    before = scales_of(own)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            worse = x.clone()
            worse[0, 0] = bad
            forward(own, worse, recipe)
            hybridq.update_scaling(model)
    texts = [str(w.message) for w in seen if issubclass(w.category, HybridQWarning)]
    assert len(texts) == 1 and "slot 'input' of up" in texts[0]
    assert scales_of(own)["input"] == before["input"]
    for _ in range(2):  # out of the history
        forward(own, x * 2, recipe)
        hybridq.update_scaling(model)
    assert scales_of(own)["input"] == scale_for(x * 2)


# --- checkpoints, copies, moves


def test_state_dict_is_that_of_linear() -> None:
    own = layer()
    train(own, range(2))
    assert set(own.state_dict()) == {"weight", "bias"}
    assert not list(own.buffers()) and len(list(own.parameters())) == 2
    plain = nn.Linear(INNER, OUTER)
    plain.load_state_dict(own.state_dict())
    before = scales_of(own)
    own.load_state_dict(plain.state_dict())
    assert scales_of(own) == before


@pytest.mark.parametrize("way", ["state_dict", "deepcopy", "pickle"])
def test_training_goes_on_in_a_copy(way) -> None:
    """In mid-step: what was recorded and not yet used comes along."""

    def model():
        torch.manual_seed(0)
        parts = nn.Linear(INNER, OUTER), nn.ReLU(), nn.Linear(OUTER, OUTER)
        return hybridq.convert(nn.Sequential(*parts))

    one = model()
    train(one, range(3))
    one.zero_grad()
    microbatch(one, 3)
    if way == "state_dict":
        two = model()
        saved = hybridq.state_dict_with_history(one)
        assert {key for key in saved if "scaling" in key} and all(
            key.split(".")[1] == "scaling" for key in set(saved) - set(one.state_dict())
        )
        assert two.load_state_dict({k: t.clone() for k, t in saved.items()}).unexpected_keys == []
    else:
        two = copy.deepcopy(one) if way == "deepcopy" else pickle.loads(pickle.dumps(one))
    for module in (one, two):
        module.zero_grad()
        hybridq.update_scaling(module)
    assert equal(train(two, range(4, 7)), train(one, range(4, 7)))
    a, b = map(hybridq.state_dict_with_history, (one, two))
    assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_broken_histories_are_refused() -> None:
    own = layer()
    train(own, range(2))
    saved = hybridq.state_dict_with_history(own)
    for change, text in (
        ({"scaling.input.e4m3.scale": None}, "must stand beside"),
        ({"scaling.input.e4m3.history": torch.zeros(2, 2)}, r"must be \[length\]"),
        ({"scaling.output.e4m3.history": torch.zeros(2)}, "unknown key"),
    ):
        broken = {k: t for k, t in {**saved, **change}.items() if t is not None}
        with pytest.raises(RuntimeError, match=text):
            layer().load_state_dict(broken)
    with pytest.raises(TypeError, match=r"model must be an nn\.Module, got OrderedDict"):
        hybridq.state_dict_with_history(saved)


def test_moves_and_other_dtypes_keep_fp32() -> None:
    own = layer()
    train(own, range(2))
    before = hybridq.state_dict_with_history(own)
    own = own.bfloat16().float().half()
    after = hybridq.state_dict_with_history(own)
    for key in before:
        if "scaling" in key:
            assert torch.equal(before[key], after[key]) and after[key].dtype == torch.float32
    fresh = own.to("meta").to_empty(device="cpu")
    assert set(hybridq.state_dict_with_history(fresh)) == {"weight", "bias"}
    with torch.device("meta"):
        made = hybridq.Linear(INNER, OUTER)
    made = made.to_empty(device="cpu")
    made.load_state_dict(layer().state_dict())
    assert equal(train(made), train(layer()))


def test_converted_modules_have_a_state_and_no_module_is_kept_alive() -> None:
    import gc
    import weakref

    model = hybridq.convert(nn.Sequential(nn.Linear(INNER, OUTER)))
    x, dy = batch(0)
    y = forward(model, x)
    dead = weakref.ref(model[0])
    hybridq.update_scaling()
    gc.collect()
    gc.disable()
    try:
        del model
        assert dead() is None
    finally:
        gc.enable()
    y.backward(dy)  # of a module that is gone
    hybridq.update_scaling()


def test_a_checkpoint_reads_each_module_once(monkeypatch) -> None:
    """On a device every read waits for it."""
    model = nn.ModuleList(layer(seed=seed) for seed in range(3))
    for module in model:
        train(module, range(2))
    want = hybridq.state_dict_with_history(model)
    reads: list[torch.Size] = []
    listed = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda _: pytest.fail("a boolean was read"))
    monkeypatch.setattr(torch.Tensor, "item", lambda _: pytest.fail("a value was read"))
    monkeypatch.setattr(torch.Tensor, "tolist", lambda t: [reads.append(t.shape), listed(t)][1])
    found = hybridq.state_dict_with_history(model)
    monkeypatch.undo()
    assert reads == [(6, 3)] * 3
    assert sum("history" in key for key in want) == 9 and list(found) == list(want)
    assert all(torch.equal(found[key], value) for key, value in want.items())
