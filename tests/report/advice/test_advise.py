"""`hybridq.advise`: what it takes and leaves, its file, and training under its recipe."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

import hybridq
from hybridq.formats import PlaneSpec
from hybridq.recipes import Recipe, bind, load
from hybridq.recipes.gemm_words import word
from hybridq.report import Advice
from hybridq.report.advice import speeds
from hybridq.report.advice.advice import recipe_of

WIDTH = 64


def mean_square(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean()


def model_of(*features: int) -> nn.Sequential:
    torch.manual_seed(0)
    pairs = itertools.pairwise(features)
    return hybridq.convert(nn.Sequential(*(nn.Linear(*pair) for pair in pairs)))


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that every measurement gives: what is plain takes the first, all else the second."""
    seconds = [1.0, 0.5]

    def run(self: speeds.Bench, own: object, recipe: Recipe, backward: object) -> Recipe:
        return recipe

    def medians(runs: Sequence[Recipe], device: torch.device) -> list[float]:
        """The plain one is first; where it is last again, it is what stands before a backward."""
        plain = [seconds[0], *[0.0] * (len(runs) - 1)]
        is_plain = [recipe == hybridq.recipes.get("bf16") for recipe in runs]
        return [plain[at] if is_it else seconds[1] for at, is_it in enumerate(is_plain)]

    def whole(self: speeds.Bench, shape: object, recipe: object) -> tuple[float, float]:
        return seconds[-1], seconds[0]

    monkeypatch.setattr(speeds, "medians", medians)
    monkeypatch.setattr(speeds.Bench, "_run", run)
    monkeypatch.setattr(speeds.Bench, "whole", whole)
    return seconds


def spec(advice: Advice, layer: str, slot: str, direction: str) -> str:
    """The plane that a module binds under the advised recipe."""
    plan = bind(advice.recipe, layer)
    plane = getattr(getattr(plan, slot), "row" if direction == "rowwise" else "col")
    return word(PlaneSpec.parse(plane.spec))


def test_a_spoiled_slot_keeps_higher_precision(times: list[float]) -> None:
    """Outliers among the input channels of layer 1: NVFP4 and MXFP8 lose the rest of each block."""
    model, x = model_of(*[WIDTH] * 4), torch.randn(128, WIDTH)
    far = torch.zeros(WIDTH)
    far[5::16] = 1e5
    model[1].register_forward_pre_hook(lambda module, args: (args[0] + far,))
    with torch.no_grad():
        model[1].weight[:, 5::16] = 0.0
    advice = hybridq.advise(model, x, loss=mean_square, candidates=["nvfp4"], budget=0.2, error=0.2)
    assert spec(advice, "1", "input", "rowwise") == "bf16"
    assert spec(advice, "0", "input", "rowwise") == "nvfp4"
    assert spec(advice, "2", "weight", "rowwise") == "nvfp4_16x16"
    (why,) = [one for one in advice.products if (one.layer, one.gemm) == ("1", "fprop")]
    assert "input rowwise in nvfp4: error" in why.reason and "become zero" in why.reason
    assert advice.loss is not None and advice.plain_loss is not None
    assert advice.loss <= 1.2 * advice.plain_loss


def test_nothing_slower_is_advised(times: list[float]) -> None:
    model, x = model_of(WIDTH, WIDTH), torch.randn(64, WIDTH)
    times[1] = 1.5
    advice = hybridq.advise(model, x, loss=mean_square, budget=1.0)
    assert advice.recipe == hybridq.recipes.get("bf16")
    assert advice.notes[0].startswith("no candidate is both faster")
    assert "1.50 of BF16's time (measured)" in advice.products[0].reason
    smallest = hybridq.advise(model, x, loss=mean_square, budget=1.0, prefer="memory")
    assert spec(smallest, "0", "input", "rowwise") == "nvfp4"


def test_a_layer_that_is_slower_as_a_whole_goes_back(
    times: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speeds.Bench, "whole", lambda self, shape, recipe: (1.25, 1.0))
    model, x = model_of(WIDTH, WIDTH), torch.randn(64, WIDTH)
    advice = hybridq.advise(model, x, loss=mean_square, candidates=["mxfp8"], budget=1.0)
    assert advice.recipe == hybridq.recipes.get("bf16")
    assert "1.25 of BF16's time" in advice.products[0].reason


@pytest.mark.parametrize("switch", [False, True])
def test_the_budget_holds_with_as_little_back_as_it_needs(times: list[float], switch: bool) -> None:
    """The loss is that of a step: products go back until both are within the budget."""
    model, x = model_of(*[WIDTH] * 4), torch.randn(128, WIDTH)
    target = torch.randn(128, WIDTH)

    def loss(y: torch.Tensor) -> torch.Tensor:
        return (y - target).square().mean()

    given = {"loss": loss, "candidates": ["nvfp4"], "switch": switch}
    free = hybridq.advise(model, x, budget=10.0, **given)
    tight = hybridq.advise(model, x, budget=1e-6, **given)

    def count(advice: Advice) -> int:
        return sum(one.formats != ("bf16", "bf16") for one in advice.products)

    assert count(free) == 8 > count(tight)  # all but the first layer's dgrad, which is not made
    assert tight.loss is not None and tight.plain_loss is not None
    assert tight.loss <= tight.plain_loss * (1 + 1e-6)
    back = [one.reason for one in tight.products if one.formats == ("bf16", "bf16")]
    assert set(back) == {"the loss would rise by more than its budget"}


def test_the_file_is_the_recipe(times: list[float], tmp_path: Path) -> None:
    model, x, path = model_of(WIDTH, WIDTH, WIDTH), torch.randn(64, WIDTH), tmp_path / "r.toml"
    advice = hybridq.advise(model, x, loss=mean_square, budget=1.0, path=path)
    assert load(path) == advice.recipe
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# Advice: ") and "# " in text
    with torch.no_grad():
        made = []
        for recipe in (advice, advice.recipe, path):
            torch.manual_seed(5)
            with hybridq.autocast(recipe=recipe):
                made.append(model(x))
    assert torch.equal(made[0], made[1]) and torch.equal(made[0], made[2])
    assert not torch.equal(made[0], model(x))
    read = json.loads(advice.to_json())
    assert len(read["products"]) == 5 and "fprop" in read["recipe"]
    assert "<table>" in advice._repr_html_()


def test_times_are_planned_for_a_named_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large products are planned faster on tensor cores of 4 bits, and say that it is planned."""
    side = 8192
    monkeypatch.setattr(speeds, "gemm_sizes", lambda gemm, shape: (side, side, side))
    model, x = model_of(WIDTH, WIDTH), torch.randn(64, WIDTH)
    found = {}
    for device in ("b200", "a100"):
        given = {"loss": mean_square, "candidates": ["nvfp4"], "budget": 1.0}
        found[device] = hybridq.advise(model, x, device=device, **given)
    assert spec(found["b200"], "0", "input", "rowwise") == "nvfp4"
    assert spec(found["a100"], "0", "input", "rowwise") == "bf16"
    assert all(one.is_planned for one in found.values())
    assert "planned by its data sheet" in str(found["b200"])
    one = found["b200"].products[0]
    flops = 2 * side**3
    assert one.plain_seconds == pytest.approx(flops / (0.79 * 2250e12))
    # Two operands are read in BF16, once more for their amaxes, and written with their scales.
    planes = side * side * (2 * (2 + 2 + 0.5) + 1 / 16 + 1 / 256)
    assert one.seconds == pytest.approx(planes / (0.9 * 8e12) + flops / (0.58 * 9000e12), rel=1e-3)


def test_measured_times_are_of_the_layers_own_products() -> None:
    """On this machine, whatever it is: no product is quantized that was measured slower."""
    model, x = model_of(128, 96), torch.randn(64, 128)
    advice = hybridq.advise(model, x, loss=mean_square, candidates=["mxfp8"], budget=1.0)
    assert not advice.is_planned and advice.device == "cpu"
    for one in advice.products:
        assert one.seconds is not None and one.plain_seconds is not None
        assert one.formats == ("bf16", "bf16") or one.seconds <= one.plain_seconds


def trained(recipe: object, spoil: str, steps: int = 120) -> float:
    """Return the final error of a student under a recipe; each spoiled as it says."""
    model, x, target, weights = student(spoil)
    # Gradients of any size count alike.
    optimizer = torch.optim.Adam(model.parameters(), 3e-3, eps=1e-30)
    for _ in range(steps):
        optimizer.zero_grad()
        with hybridq.autocast(recipe=recipe):
            y = model(x)
        ((y - target).square() * weights).mean().backward()
        optimizer.step()
    with torch.no_grad():
        return float((model(x) - target).square().mean())


def student(spoil: str) -> tuple[nn.Sequential, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A student of a linear teacher with noise.

    With `"outliers"` each block of the second layer's input has a channel that the layer ignores,
    larger by five orders; with `"gradient"` half of the outputs count by 1e-13 in the loss, so that
    FP8 with one scale has zeros for their gradients.
    """
    model = model_of(WIDTH, WIDTH, WIDTH)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(256, WIDTH, generator=generator)
    target = x @ torch.randn(WIDTH, WIDTH, generator=generator) / 8
    target += torch.randn(256, WIDTH, generator=generator)  # what no student can learn
    weights = torch.ones(WIDTH)
    if spoil == "gradient":
        weights[WIDTH // 2 :] = 1e-13
    else:
        far = torch.zeros(WIDTH)
        far[5::16] = 1e5
        model[1].register_forward_pre_hook(lambda module, args: (args[0] + far,))
        with torch.no_grad():
            model[1].weight[:, 5::16] = 0.0
        model[1].weight.register_hook(lambda grad: grad * (far == 0))
    return model, x, target, weights


def test_rules_of_layers_reach_experts_in_stacks() -> None:
    """The most frequent recipe is the default; a rule for a layer is one for its experts, too."""
    mxfp8, plain = hybridq.recipe(fprop="mxfp8"), hybridq.recipes.get("bf16")
    made = recipe_of([("a", mxfp8), ("experts.up[0]", plain), ("b", mxfp8)])
    assert made.for_name("experts.up[0]") == made.for_name("experts.up[0].11") == plain
    assert made.for_name("a") == made.for_name("experts.up[0].x") == made.for_name("c") == mxfp8
    assert recipe_of([("a", mxfp8), ("b", mxfp8)]) == mxfp8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "candidate", "kept"),
    [("outliers", "nvfp4", ("1", "fprop")), ("gradient", "fp8_current", ("1", "wgrad"))],
)
def test_training_under_the_advice_reaches_bf16s_loss(
    spoil: str, candidate: str, kept: tuple[str, str], times: list[float]
) -> None:
    model, x, target, weights = student(spoil)
    budget = 0.05
    advice = hybridq.advise(
        model,
        x,
        loss=lambda y: ((y - target).square() * weights).mean(),
        candidates=[candidate],
        budget=budget,
        error=0.2,
    )
    formats = {(one.layer, one.gemm): one.formats for one in advice.products}
    assert formats[kept] == ("bf16", "bf16")
    assert any(one != ("bf16", "bf16") for one in formats.values())
    plain, own, all_of_it = (trained(one, spoil) for one in ("bf16", advice, candidate))
    print(f"{spoil}: BF16 {plain:.4g}, advised {own:.4g}, {candidate} everywhere {all_of_it:.4g}")
    assert own <= plain * (1 + budget)
    assert all_of_it > 1.5 * plain


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"prefer": "fun"}, ValueError, "advise: prefer .*'fun'"),
        ({"budget": -1}, ValueError, "advise: budget must be a number of at least 0, got -1"),
        ({"device": "h10"}, ValueError, "h100"),
        ({"candidates": ["fp8_delayed"]}, ValueError, "without histories, got 'fp8_delayed'"),
        ({"candidates": ["mxfp"]}, ValueError, "mxfp8"),
        ({"candidates": "mxfp8"}, TypeError, "must be a collection of names, got 'mxfp8'"),
        ({"candidates": None}, TypeError, "must be a collection of names, got None"),
        ({"candidates": []}, ValueError, "candidates must have a recipe at least, got none"),
    ],
)
def test_mistakes_are_named(given: dict[str, object], error: type, text: str) -> None:
    with pytest.raises(error, match=text):
        hybridq.advise(model_of(WIDTH, WIDTH), torch.ones(4, WIDTH), loss=mean_square, **given)


def test_a_run_that_is_not_finite_is_refused_with_its_place() -> None:
    model = model_of(WIDTH, WIDTH, WIDTH)
    with torch.no_grad():
        model[1].weight[3, 20] = math.nan
    with pytest.raises(ValueError, match=r"must be finite in BF16, got .*nan: 1, weight, rowwise"):
        hybridq.advise(model, torch.ones(4, WIDTH), loss=mean_square)
    unnamed = nn.Sequential(hybridq.Linear(WIDTH, WIDTH))
    with pytest.raises(ValueError, match="modules must have names"):
        hybridq.advise(unnamed, torch.ones(4, WIDTH), loss=mean_square)
    with pytest.raises(TypeError, match=r"model must be an nn\.Module"):
        hybridq.advise(3, torch.ones(4, WIDTH))
