"""Delayed scaling of several models: a step updates what its optimizer holds, and nothing else."""

from __future__ import annotations

import copy
import sys
import threading
import warnings

import pytest
import torch
from torch import nn

import hybridq
from delayed_model import (
    INNER,
    OUTER,
    batch,
    forward,
    is_told,
    layer,
    microbatch,
    scales_of,
    train,
)
from hybridq import errors
from hybridq.errors import HybridQWarning
from hybridq.nn.delayed_scaling import update
from hybridq.nn.delayed_scaling.state import states_of
from linear_model import equal

NUM_THREADS = 3


def sgd(*modules, lr=0.05):
    return torch.optim.SGD([p for m in modules for p in m.parameters()], lr=lr)


def is_new(module) -> bool:
    """Whether no scale has moved."""
    return set(scales_of(module).values()) <= {1.0}


@pytest.fixture
def fast_switches():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


# --- threads


def test_models_in_threads_are_as_alone(fast_switches) -> None:
    given = [layer(seed=number) for number in range(NUM_THREADS)]

    def run(number):
        made = []
        own, frozen = (copy.deepcopy(one) for one in (given[number], given[number - 1]))
        frozen.requires_grad_(False)
        steps = sgd(own)
        for step in range(3):
            for part in range(2):
                x, dy = batch(number + 2 * step + part)
                y = forward(own, x) + forward(frozen, x)
                y.backward(dy)
                made.append(y.detach())
                copy.deepcopy(own)  # models come and go while others step
            steps.step()
            steps.zero_grad()
        made += [torch.tensor([*scales_of(module).values()]) for module in (own, frozen)]
        return made

    want = [run(number) for number in range(NUM_THREADS)]
    got, failed = {}, []

    def target(number):
        try:
            got[number] = run(number)
        except Exception as error:
            failed.append(error)
            raise

    threads = [threading.Thread(target=target, args=(number,)) for number in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert all(equal(got[number], want[number]) for number in range(NUM_THREADS))


# --- several optimizers


def test_a_step_between_the_microbatches_of_another_model() -> None:
    """As in distillation: what B does changes nothing of A."""
    alone, beside = layer(), layer()
    other = layer(seed=1)
    steps = sgd(other)
    want = train(alone, microbatches=2)

    def call(module, x, recipe):
        y = forward(module, x, recipe)
        steps.zero_grad()
        forward(other, x.detach() * 7).sum().backward()
        steps.step()
        return y

    assert equal(train(beside, call=call, microbatches=2), want)
    assert scales_of(beside) == scales_of(alone) and not is_new(other)


@pytest.mark.parametrize("freezes", [False, True])
def test_two_networks_against_each_other(freezes) -> None:
    """The first step of one finds the other, whose optimizer has not stepped yet."""
    generator, judge = layer(), hybridq.Linear(OUTER, INNER)
    optimizers = {generator: sgd(generator), judge: sgd(judge)}
    seen = []
    for step in range(3):
        for own in (generator, judge):
            judge.requires_grad_(own is judge or not freezes)
            before = {module: scales_of(module) for module in optimizers}
            for number in range(2):
                x = batch(2 * step + number)[0]
                y = forward(generator, x)
                forward(judge, y if own is generator else y.detach()).square().sum().backward()
            optimizers[own].step()
            for module, old in before.items():
                is_same = old == scales_of(module) or (not old and is_new(module))
                assert is_same == (module is not own), (step, own is judge)
            for optimizer in optimizers.values():
                optimizer.zero_grad()
        seen.append(tuple(scales_of(judge).values()))
    assert len(set(seen)) > 1


class Adapted(nn.Module):
    """A frozen layer and what is trained beside it, which is not hybridq's."""

    def __init__(self) -> None:
        super().__init__()
        self.base = layer().requires_grad_(False)
        self.down, self.up = nn.Linear(INNER, 2), nn.Linear(2, OUTER)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def test_what_no_optimizer_holds_updates_with_every_step_of_its_thread() -> None:
    """Adapters beside a frozen model, and a frozen teacher."""
    model, teacher = Adapted(), layer(seed=2).requires_grad_(False)
    steps = sgd(model.down, model.up)
    seen = []
    for number in range(3):
        x, _ = batch(number)
        y = forward(model, x.requires_grad_())
        with torch.no_grad():
            target = forward(teacher, x)
        (y - target).square().mean().backward()
        steps.step()
        seen.append((*scales_of(model.base).values(), *scales_of(teacher).values()))
    assert len(seen[0]) == 5 and 1.0 not in seen[0] and len(set(seen)) > 1
    x, _ = batch(3)
    forward(teacher, x * 99)
    before = scales_of(teacher)
    elsewhere = threading.Thread(target=lambda: train(layer(), range(1)))
    elsewhere.start()
    elsewhere.join()
    assert scales_of(teacher) == before
    steps.step()
    assert scales_of(teacher) != before


def test_copies_that_an_optimizer_holds_instead() -> None:
    """FP32 copies of short weights: no optimizer holds the weights themselves."""
    own = layer(torch.bfloat16)
    copies = [p.detach().float().requires_grad_() for p in own.parameters()]
    steps = torch.optim.SGD(copies, lr=0.05)
    for number in range(2):
        microbatch(own, number, dtype=torch.bfloat16)
        for p, master in zip(own.parameters(), copies, strict=True):
            master.grad, p.grad = p.grad.float(), None
        steps.step()
        assert not is_new(own)


def test_the_weight_decides_where_two_optimizers_hold_a_module() -> None:
    own = layer()
    of_bias = torch.optim.SGD([own.bias], lr=0.05)
    of_weight = torch.optim.SGD([own.weight], lr=0.05)
    microbatch(own, 0)
    of_bias.step()
    assert is_new(own)
    of_weight.step()
    assert not is_new(own)
    before = scales_of(own)
    microbatch(own, 1)
    of_bias.step()
    assert scales_of(own) == before
    of_weight.step()
    assert scales_of(own) != before


def test_another_parameter_decides_where_no_optimizer_holds_the_weight() -> None:
    own, other = layer(), layer(seed=1)
    own.weight.requires_grad_(False)
    of_bias, of_other = torch.optim.SGD([own.bias], lr=0.05), sgd(other)
    for number in range(2):
        before = scales_of(own) or {"input": 1.0, "weight": 1.0}
        microbatch(other, number)
        forward(own, batch(number)[0]).sum().backward()
        of_other.step()
        found = scales_of(own)
        assert {key: found[key] for key in before} == before
        of_bias.step()
        assert scales_of(own) != before


class Split(torch.optim.Optimizer):
    """Steps a part of its parameters by an optimizer inside, as ranks do that share the work."""

    def __init__(self, parameters, num_inner) -> None:
        parameters = list(parameters)
        super().__init__(parameters, {})
        self.inner = torch.optim.SGD(parameters[:num_inner], lr=0.05) if num_inner else None
        self.fails = False

    def step(self, closure=None) -> None:
        if self.inner is not None:
            self.inner.step()
        if self.fails:
            raise RuntimeError("a step that fails")


@pytest.mark.parametrize("num_inner", [0, 1, 4])
def test_a_step_inside_a_step_is_no_step(monkeypatch, num_inner) -> None:
    from hybridq.nn.delayed_scaling import update as scaling_update

    calls, real = [], scaling_update._update
    model = nn.Sequential(layer(), hybridq.Linear(OUTER, OUTER))

    def update(states) -> None:  # others of this process may be among them: no optimizer has those
        own = {id(one) for module in model for one in states_of(module).values()}
        calls.append(sum(id(one) in own for one in states))
        real(states)

    monkeypatch.setattr(scaling_update, "_update", update)
    steps = Split(model.parameters(), num_inner)
    for _ in range(2):
        microbatch(model, 0)
        steps.step()
    assert calls == [2, 2]
    steps.fails = True
    with pytest.raises(RuntimeError, match="that fails"):
        steps.step()
    microbatch(model, 1)
    (steps.inner or sgd(model)).step()  # alone it is one
    assert len(calls) == 3


def test_an_optimizer_that_comes_later_takes_over() -> None:
    own, head = layer(), layer(seed=1)
    first = sgd(own, head)
    for module in (own, head):
        microbatch(module, 0)
    first.step()
    del first
    second = sgd(head)
    before = scales_of(own)
    for module in (own, head):
        microbatch(module, 1)
    second.step()
    assert scales_of(own) != before  # nobody holds it any more
    second.add_param_group({"params": list(own.parameters())})
    third, before = sgd(layer(seed=2)), scales_of(own)
    microbatch(own, 2)
    third.step()
    assert scales_of(own) == before
    second.step()
    assert scales_of(own) != before


def test_tied_weights_and_copies_belong_to_their_own() -> None:
    one, two = layer(), layer(seed=1)
    two.weight = one.weight
    copied = copy.deepcopy(one)
    steps, others = sgd(one), sgd(copied)
    for module in (one, two, copied):
        microbatch(module, 0)
    steps.step()
    assert not is_new(one) and not is_new(two) and is_new(copied)
    others.step()
    assert not is_new(copied)


# --- before the first step


@pytest.mark.parametrize("known", ["", "main_grad", "optimizer"])
def test_a_gradient_that_is_taken_away_is_no_step(known) -> None:
    own, again = layer(), layer()
    steps = sgd(own) if known == "optimizer" else None
    sums = [torch.zeros_like(p) for p in own.parameters()]
    if known == "main_grad":
        own.weight.main_grad = sums[0]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for number in range(3):
            microbatch(own, number)
            for p, total in zip(own.parameters(), sums, strict=True):
                total += p.grad
                p.grad = None
            assert is_new(own) and not is_told(own)
    texts = [str(w.message) for w in seen if issubclass(w.category, HybridQWarning)]
    assert len(texts) == (not known)
    assert known or "call hybridq.update_scaling() after each step" in texts[0]
    for number in range(3):
        microbatch(again, number)
    hybridq.update_scaling(own) if steps is None else steps.step()
    hybridq.update_scaling(again)
    assert scales_of(own) == scales_of(again)


def test_a_loop_by_hand_is_helped_whatever_stepped_before() -> None:
    other = layer(seed=1)
    train(other, range(2))
    own = layer()
    microbatch(own, 0)
    with torch.no_grad():
        own.weight.sub_(own.weight.grad)
    forward(own, batch(1)[0])
    assert not is_new(own)


# --- what is loaded


def warned(seen) -> list[str]:
    texts = [str(w.message) for w in seen if issubclass(w.category, HybridQWarning)]
    return [text for text in texts if "loaded without histories" in text]


@pytest.mark.parametrize("resumes", ["new", "goes on", "evaluates"])
def test_weights_without_histories_are_told(monkeypatch, resumes) -> None:
    own = layer()
    train(own, range(2))
    target = layer(seed=1)
    if resumes == "goes on":
        train(target, range(2))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        monkeypatch.setattr(errors, "_seen", set())
        target.load_state_dict(own.state_dict())
        forward(target, batch(0)[0], "mxfp8")
        assert not warned(seen)  # nothing is known of a history yet
        if resumes == "evaluates":
            target.eval()
        for _ in range(2):
            forward(target, batch(0)[0])
    (text,) = warned(seen)
    assert ("go on from what they were" in text) == (resumes == "goes on")
    for name in ("hybridq.state_dict_with_history(model)", "distributed.ScalingHistory(model)"):
        assert name in text


def test_a_model_without_the_recipe_is_not_told_of_histories(monkeypatch) -> None:
    monkeypatch.setattr(update, "has_compiled", lambda: False, raising=False)
    train(layer(), range(2))  # another model of the process
    own = layer(seed=1)
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        monkeypatch.setattr(errors, "_seen", set())
        own.load_state_dict(own.state_dict())
        own(batch(0)[0]).sum().backward()
        optimizer.step()
        assert not warned(seen)
        forward(own, batch(0)[0])
    assert len(warned(seen)) == 1


@pytest.mark.parametrize("first", ["weights", "history", "one"])
def test_weights_with_histories_are_not(monkeypatch, first) -> None:
    own, target = layer(), layer(seed=1)
    train(own, range(2))
    history = hybridq.distributed.ScalingHistory
    saved = history(own).state_dict()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        monkeypatch.setattr(errors, "_seen", set())
        if first == "one":
            target.load_state_dict(hybridq.state_dict_with_history(own))
        elif first == "weights":
            target.load_state_dict(own.state_dict())
            history(target).load_state_dict(saved)
        else:
            history(target).load_state_dict(saved)
            target.load_state_dict(own.state_dict())
        assert equal(train(target, range(2, 4)), train(own, range(2, 4)))
    assert not warned(seen)


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("input.e4m3.scale", float("nan"), "must be positive and finite, got nan"),
        ("weight.e4m3.scale", float("inf"), "must be positive and finite, got inf"),
        ("input.e4m3.scale", 0.0, "must be positive and finite, got 0.0"),
        ("grad_output.e5m2.scale", -1.0, "must be positive and finite, got -1.0"),
        ("input.e4m3.history", -3.0, "must hold no negative numbers"),
        ("input.e9m9.history", 1.0, "must name an element, got 'e9m9'"),
        ("input_columnwise.e4m3.scale", 1.0, "must stand beside 'input_columnwise.e4m3.history'"),
        ("input.e5m2.history", 1.0, "'input' must have one element, got 'e5m2' too"),
    ],
)
def test_histories_that_nothing_made_are_refused_whole(key, value, text) -> None:
    own, target = layer(), layer()
    train(own, range(2))
    train(target, range(1))
    before = hybridq.state_dict_with_history(target)
    saved = hybridq.state_dict_with_history(own)
    saved["scaling." + key] = torch.full((1,), value)
    with pytest.raises(RuntimeError, match=text):
        target.load_state_dict(saved)
    tensors = {name[8:]: t for name, t in saved.items() if name.startswith("scaling.")}
    assert text in " ".join(states_of(target)[""].load(tensors))
    after = hybridq.state_dict_with_history(target)
    assert all(torch.equal(before[name], after[name]) for name in before if "scaling" in name)


def test_a_bad_amax_in_a_history_is_loaded() -> None:
    own, target = layer(), layer()
    train(own, range(1))
    forward(own, batch(0)[0] * float("inf"))
    hybridq.update_scaling(own)
    saved = hybridq.state_dict_with_history(own)
    assert not saved["scaling.input.e4m3.history"].isfinite().all()
    target.load_state_dict(saved)
    assert scales_of(target) == scales_of(own)


def test_cached_weights_notice_loaded_histories() -> None:
    own, other = layer(), layer()
    with torch.no_grad():
        other.weight.mul_(50)
    train(other, range(2))
    x, _ = batch(0)
    forward(own, x, is_first_microbatch=True)
    own.load_state_dict(
        {**own.state_dict(), **{k: t for k, t in saved(other).items() if "scaling" in k}}
    )
    kept = forward(own, x, is_first_microbatch=False)
    assert torch.equal(kept, forward(own, x))


def saved(module):
    return {k: t.clone() for k, t in hybridq.state_dict_with_history(module).items()}
