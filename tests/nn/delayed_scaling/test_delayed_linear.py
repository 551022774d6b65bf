"""hybridq.Linear under delayed scaling: step by step against a model, and what must not count."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hybridq
from delayed_model import (
    INNER,
    OUTER,
    ROWS,
    SLOTS,
    DelayedModel,
    batch,
    encode_values,
    forward,
    layer,
    microbatch,
    scale_for,
    scales_of,
    train,
    within,
)
from hybridq.quantizers import DelayedScalingRequest
from hybridq.recipes import CustomRecipe, DelayedScaling
from linear_model import equal

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


# --- numerics


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "recipe",
    [
        DelayedScaling(),
        DelayedScaling(margin=2, amax_history_len=2),
        DelayedScaling(amax_compute_algo="most_recent", fp8_format="E4M3"),
        DelayedScaling(amax_history_len=1, margin=-1),
    ],
    ids=range(4),
)
def test_steps_against_a_model(backend, recipe, dtype) -> None:
    own = layer(dtype)
    model = DelayedModel(
        ("e4m3", "e4m3", "e4m3" if recipe.fp8_format.name == "E4M3" else "e5m2"),
        length=recipe.amax_history_len,
        margin=recipe.margin,
        most_recent=recipe.amax_compute_algo == "most_recent",
    )
    optimizer = torch.optim.SGD(own.parameters(), lr=0.3)
    scales = []
    for step in range(6):
        (x, dy), weight, bias = batch(step, dtype), own.weight.detach(), own.bias.detach()
        want = model.step(x, weight, bias, dy)
        y, dx, dw, db = microbatch(own, step, recipe, dtype)
        for got, name in ((y, "y"), (dx, "dx"), (dw, "dw")):
            assert got.dtype == dtype and within(got, want[name]), (step, name)
        assert torch.equal(db, dy.sum(0))
        assert not torch.equal(y, nn.functional.linear(x, weight, bias))
        optimizer.step()
        optimizer.zero_grad()
        model.update()
        assert scales_of(own) == model.scales
        scales.append(tuple(model.scales.values()))
    assert len(set(scales)) > 2  # they did change


def test_microbatches_count_together() -> None:
    """The scale is that of the largest of them, and the same in all of one step."""
    own, model = layer(), DelayedModel()
    optimizer = torch.optim.SGD(own.parameters(), lr=0.0)
    for step in range(3):
        for number in range(3):
            x, dy = batch(3 * step + number)
            want = model.step(x, own.weight.detach(), own.bias.detach(), dy)
            got = microbatch(own, 3 * step + number)
            assert within(got[0], want["y"]) and within(got[1], want["dx"])
        optimizer.step()
        optimizer.zero_grad()
        model.update()
        assert scales_of(own) == model.scales


def test_first_step_has_scale_one_and_pending_amaxes_are_seen() -> None:
    own = layer()
    assert set(hybridq.state_dict_with_history(own)) == {"weight", "bias"}
    x, dy = batch(0)
    microbatch(own, 0)
    found = hybridq.state_dict_with_history(own)
    assert set(scales_of(own).values()) == {1.0} and set(scales_of(own)) == set(SLOTS)
    for name, tensor in (("input.e4m3", x), ("weight.e4m3", own.weight), ("grad_output.e5m2", dy)):
        assert found[f"scaling.{name}.history"].tolist() == [tensor.abs().max().item()]


def test_what_is_needed_is_recorded() -> None:
    """No gradient of the weight: no column plane of dy. None at all: no gradient is seen."""
    own = layer()
    own.weight.requires_grad_(False)
    own.bias.requires_grad_(False)
    x, dy = batch(1)
    forward(own, x)
    assert set(scales_of(own)) == {"input", "weight"}
    x.requires_grad_()
    forward(own, x).backward(dy)
    hybridq.update_scaling(own)
    assert scales_of(own)["grad_output"] == scale_for(dy, 57344.0)
    with torch.no_grad():
        forward(own, torch.full((2, INNER), 100.0))
    hybridq.update_scaling(own)
    assert scales_of(own)["input"] == scale_for(torch.full((1,), 100.0))


def test_evaluation_records_nothing() -> None:
    own = layer()
    train(own, range(2))
    before, again = scales_of(own), copy.deepcopy(own)
    own.eval()
    x, _ = batch(1)
    y = forward(own, x * 1e3)
    hybridq.update_scaling(own)
    assert scales_of(own) == before
    scale = torch.tensor(before["input"]).numpy()
    assert (encode_values(x * 1e3, scale, "e4m3").abs().max() - 448 / scale).abs() < 1e-3
    assert torch.equal(y, forward(again.eval(), x * 1e3))


def test_torch_autocast() -> None:
    """Amaxes are those of what is quantized: of x and w in BF16."""
    own, (x, dy) = layer(), batch(0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = forward(own, x)
    y.backward(dy.bfloat16())
    hybridq.update_scaling(own)
    assert scales_of(own)["input"] == scale_for(x.bfloat16()) and y.dtype == torch.bfloat16


def test_any_batch_shape_and_empty() -> None:
    one, two = layer(), layer()
    x, dy = batch(0)
    for module, shape in ((one, (ROWS,)), (two, (2, 3, 2))):
        y = forward(module, x.reshape(*shape, INNER))
        y.backward(dy.reshape(y.shape))
        hybridq.update_scaling(module)
    assert scales_of(one) == scales_of(two)
    forward(one, x[:0])  # an amax of 0 is recorded, and the history has larger ones
    hybridq.update_scaling(one)
    assert scales_of(one)["input"] == scales_of(two)["input"]


# --- what must not change the bits


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_recomputation(reentrant, microbatches) -> None:
    def region(module, x, recipe):
        with hybridq.autocast(recipe=recipe):
            return checkpoint(module, x, use_reentrant=reentrant)

    one, two = layer(), layer()
    want = train(one, microbatches=microbatches)
    assert equal(train(two, call=region, microbatches=microbatches), want)
    one_state, two_state = map(hybridq.state_dict_with_history, (one, two))
    assert one_state.keys() == two_state.keys()
    assert all(torch.equal(one_state[key], two_state[key]) for key in one_state)


def test_a_recomputation_records_nothing() -> None:
    own = layer()
    x, _ = batch(0)

    def region(x):
        with hybridq.autocast(recipe="fp8_delayed"):
            return own(x)

    y = checkpoint(region, x.clone().requires_grad_(), use_reentrant=False)
    hybridq.update_scaling(own)
    y.sum().backward()  # computes the forward again
    assert set(hybridq.state_dict_with_history(own)) >= {"scaling.input.e4m3.history"}
    assert hybridq.state_dict_with_history(own)["scaling.input.e4m3.history"][0] == 0.0


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("first", [None, True])
def test_a_recomputation_has_the_scales_of_its_forward(reentrant, first) -> None:
    """Also where updates came between, as with two optimizers, and whatever recorded meanwhile."""
    results = []
    for recomputes in (False, True):
        own = layer()
        train(own, range(2))
        x, dy = batch(2)

        def region(x, own=own, first=first):
            with hybridq.autocast(recipe="fp8_delayed", is_first_microbatch=first):
                return own(x)

        outputs = []
        for number in range(3):
            leaf = (x * (number + 1)).requires_grad_()
            y = checkpoint(region, leaf, use_reentrant=reentrant) if recomputes else region(leaf)
            outputs.append((leaf, y))
            hybridq.update_scaling(layer())  # of another model
            hybridq.update_scaling(own)
            hybridq.update_scaling(own)  # nothing was recorded
        made = []
        for leaf, y in outputs:
            y.backward(dy)
            made += [y.detach(), leaf.grad, own.weight.grad.clone()]
        hybridq.update_scaling(own)
        y = region(x)
        results.append(([*made, y.detach()], scales_of(own)))
    assert equal(results[0][0], results[1][0]) and results[0][1] == results[1][1]
    assert len({t[0, 0].item() for t in results[0][0][0:9:3]}) == 3


@pytest.mark.parametrize("updates", [False, True])
def test_cached_weights(updates) -> None:
    """is_first_microbatch: the same bits, also where an update comes between."""
    results = []
    for flags in ([None] * 3, [True, False, False]):
        own, made = layer(), []
        optimizer = torch.optim.SGD(own.parameters(), lr=0.05)
        for step in range(3):
            for number, first in enumerate(flags):
                x, dy = batch(3 * step + number)
                y = forward(own, x.requires_grad_(), is_first_microbatch=first)
                y.backward(dy)
                made += [y.detach(), x.grad]
                if updates and number == 1:
                    hybridq.update_scaling(own)
            optimizer.step()
            optimizer.zero_grad()
        results.append((made, scales_of(own)))
    assert equal(results[0][0], results[1][0]) and results[0][1] == results[1][1]


def test_watched_calls_give_the_same() -> None:
    """Through the dispatcher, as under a profiler."""
    one, two = layer(), layer()
    want = train(one)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        got = train(two)
    assert equal(got, want) and scales_of(one) == scales_of(two)


# --- hybrids, custom factories, changes of the recipe


def _hybrid(row, col, source="original"):
    made = hybridq.HybridQuantizer(
        rowwise_quantizer=row, columnwise_quantizer=col, columnwise_source=source
    )
    return CustomRecipe(lambda role: made)


def test_a_request_in_either_direction(backend) -> None:
    request, mxfp8 = DelayedScalingRequest(), hybridq.MXFP8Quantizer()
    x, dy = batch(3)
    for row, col in ((request, mxfp8), (mxfp8, request)):
        own, recipe = layer(), _hybrid(row, col)
        plain = hybridq.Linear(INNER, OUTER)
        plain.load_state_dict(own.state_dict())
        mx = microbatch(plain, 3, "mxfp8")
        for step in range(2):
            got = microbatch(own, 3, recipe)
            if step == 0:
                hybridq.update_scaling(own)
                own.zero_grad()
        end = "" if row is request else "_columnwise"
        found = scales_of(own)
        assert set(found) == {slot + end for slot in SLOTS}
        assert found["input" + end] == scale_for(x)
        assert found["grad_output" + end] == scale_for(dy, 57344.0)
        # y takes rowwise planes, dw columnwise ones, dx one of each.
        assert torch.equal(got[0], mx[0]) == (row is mxfp8)
        assert torch.equal(got[2], mx[2]) == (col is mxfp8)
        assert not torch.equal(got[1], mx[1])


def test_two_elements_of_one_tensor_have_two_states() -> None:
    recipe = _hybrid(DelayedScalingRequest(margin=1), DelayedScalingRequest())
    own, (x, _) = layer(), batch(0)
    microbatch(own, 0, recipe)
    hybridq.update_scaling(own)
    found = scales_of(own)
    assert len(found) == 6 and found["input"] * 2 == found["input_columnwise"]
    assert found["input_columnwise"] == scale_for(x)


def test_the_decoded_plane_has_an_amax_of_its_own(backend) -> None:
    mxfp8 = hybridq.MXFP8Quantizer()
    recipe = _hybrid(mxfp8, DelayedScalingRequest(), "rowwise_dequantized")
    own, (x, _) = layer(), batch(0)
    microbatch(own, 0, recipe)
    hybridq.update_scaling(own)
    seen = mxfp8.with_usage(columnwise=False)(x).dequantize().abs().max()
    assert seen != x.abs().max()
    assert scales_of(own)["input_columnwise"] == scale_for(seen)
    both = _hybrid(DelayedScalingRequest(), DelayedScalingRequest(), "rowwise_dequantized")
    own = layer()
    for _ in range(2):
        own.zero_grad()
        microbatch(own, 0, both)
        hybridq.update_scaling(own)
    assert len(scales_of(own)) == 6


def test_custom_factories_and_equal_recipes_share_a_state() -> None:
    one, two = layer(), layer()
    want = train(one, recipe=DelayedScaling())
    recipes = [CustomRecipe(hybridq.recipes.factories.delayed_scaling_factory)] * 2
    got = [t for i in range(5) for t in train(two, [i], recipe=recipes[i % 2])]
    assert equal(got, want)
    again = layer()
    assert equal([t for i in range(5) for t in train(again, [i], recipe=DelayedScaling())], want)


def test_a_changed_recipe_takes_effect_and_keeps_what_fits() -> None:
    own = layer()
    train(own, range(3), DelayedScaling(amax_history_len=8))
    old = hybridq.state_dict_with_history(own)
    other = DelayedScaling(amax_history_len=3, fp8_format="E4M3", margin=1)
    x, dy = batch(3)
    forward(own, x.requires_grad_(), other).backward(dy)
    found = hybridq.state_dict_with_history(own)
    assert torch.equal(found["scaling.input.e4m3.scale"], old["scaling.input.e4m3.scale"])
    assert found["scaling.grad_output.e4m3.scale"].item() == 1.0  # another element: anew
    assert "scaling.grad_output.e5m2.scale" not in found
    hybridq.update_scaling(own)
    found = hybridq.state_dict_with_history(own)
    history = found["scaling.input.e4m3.history"]
    newest = old["scaling.input.e4m3.history"][-1]
    assert history.tolist() == [0.0, newest.item(), x.abs().max().item()]
    assert found["scaling.input.e4m3.scale"].item() == scale_for(history, 224.0)
    forward(own, x, "mxfp8")
    forward(own, x, other)  # between other recipes a state stays
    after = hybridq.state_dict_with_history(own)
    assert torch.equal(after["scaling.input.e4m3.scale"], found["scaling.input.e4m3.scale"])


def test_choices_and_rules_of_recipes() -> None:
    """No override, as in Transformer Engine; the columns' source; rules by name; a schedule."""
    for override in ("high_precision", "dequantized"):
        with pytest.raises(ValueError, match="backward_override must be None"):
            DelayedScaling(backward_override=override)
    own = layer()
    for _ in range(2):
        own.zero_grad()
        microbatch(own, 0, DelayedScaling(columnwise_source="rowwise_dequantized"))
        hybridq.update_scaling(own)
    assert set(scales_of(own)) == {*SLOTS, "input_columnwise", "weight_columnwise"}
    request = CustomRecipe(lambda role: DelayedScalingRequest(), backward_override="dequantized")
    other = layer()
    microbatch(other, 0, request)
    hybridq.update_scaling(other)
    assert set(scales_of(other)) == {"input", "weight"}
    model = hybridq.convert(nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)}))
    rules = hybridq.recipes.ByName([("a", "fp8_delayed")], default="mxfp8")
    for name in ("a", "b"):
        forward(model[name], torch.ones(4, 8), rules)
    hybridq.update_scaling(model)
    assert scales_of(model["a"])["input"] == 448.0 and not scales_of(model["b"])
    schedule = hybridq.recipes.RecipeSchedule([(0, "mxfp8"), (1, "fp8_delayed")])
    for _ in range(2):
        forward(model["b"], torch.ones(4, 8), schedule)
        schedule.step()
    assert scales_of(model["b"])["input"] == 1.0


def test_quantized_tensors_in_and_out() -> None:
    """Planes that an input has are taken; an output's slot keeps no history."""
    own, (x, _) = layer(), batch(0)
    train(own, range(2))
    before = scales_of(own)
    given = hybridq.Float8CurrentScalingQuantizer("e4m3")(x)
    same = copy.deepcopy(own)
    y = forward(own, given)
    hybridq.update_scaling(own)
    assert scales_of(own)["input"] == min(before["input"], scale_for(given.dequantize()))
    planes = hybridq.Float8CurrentScalingQuantizer("e4m3")
    want = hybridq.gemm(planes(x), weight_quantizer(same)(same.weight.detach()), bias=same.bias)
    assert torch.equal(y, want)
    with hybridq.autocast(recipe="fp8_delayed"):
        made = own(x, fp8_output=True)
    plain = hybridq.Float8CurrentScalingQuantizer("e4m3")(forward(own, x))
    assert torch.equal(made.dequantize(), plain.dequantize())


def weight_quantizer(module) -> hybridq.Float8Quantizer:
    """The quantizer of a layer's weight."""
    scale = torch.tensor([scales_of(module)["weight"]])
    return hybridq.Float8Quantizer(scale, torch.zeros(1), "e4m3")
