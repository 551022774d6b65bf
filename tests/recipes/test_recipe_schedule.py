"""RecipeSchedule and ByName: another recipe by step, and by name."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import hybridq
from hybridq import RecipeSchedule, recipes
from hybridq.recipes import ByName, CustomRecipe, GemmPrecision, MXFP8BlockScaling, QuantizerRole
from hybridq.recipes.recipe import recipe_by_key
from linear_model import equal, run


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def _names(schedule, steps):
    known = {recipes.get(name): name for name in ("mxfp8", "nvfp4", "fp8_current", "bf16")}
    return [known[schedule.at(step)] for step in steps]


# ---- which recipe at which step


def test_steps_and_fractions():
    schedule = RecipeSchedule(
        [(0, "bf16"), (3, "nvfp4"), (0.5, "mxfp8"), (0.9, "fp8_current")], total_steps=10
    )
    assert _names(schedule, range(12)) == (
        ["bf16"] * 3 + ["nvfp4"] * 2 + ["mxfp8"] * 4 + ["fp8_current"] * 3
    )
    assert [start for start, _ in schedule.phases] == [0, 3, 5, 9]


@pytest.mark.parametrize("total", [1, 3, 7, 10, 30, 49, 1000])
def test_a_fraction_is_the_decimal_that_it_is_written_as(total):
    """0.07 of 100 is 7, and not 8, though the product of the floats is more than 7."""
    for percent in range(1, 101):
        schedule = RecipeSchedule([(0, "bf16"), (percent / 100, "mxfp8")], total_steps=total)
        first = -(-percent * total // 100)
        assert _names(schedule, (first - 1, first)) == ["bf16", "mxfp8"]


def test_of_phases_that_start_at_one_step_the_later_one_holds():
    phases = [(0, "bf16"), (0.001, "nvfp4"), (0.002, "mxfp8")]
    schedule = RecipeSchedule(phases, total_steps=100)
    assert _names(schedule, (0, 1, 2)) == ["bf16", "mxfp8", "mxfp8"]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: RecipeSchedule([]), ValueError, "at least one phase"),
        (lambda: RecipeSchedule([(1, "mxfp8")]), ValueError, "must start at 0, got 1"),
        (
            lambda: RecipeSchedule([(0, "mxfp8"), (5, "bf16"), (5, "nvfp4")]),
            ValueError,
            "in order of their starts, got 5 after step 5",
        ),
        (
            lambda: RecipeSchedule([(0, "mxfp8"), (0.9, "bf16"), (80, "nvfp4")], 100),
            ValueError,
            "got 80 after step 90",
        ),
        (lambda: RecipeSchedule([(0, "mxfp8"), (-3, "bf16")]), ValueError, "negative, got -3"),
        (
            lambda: RecipeSchedule([(0, "mxfp8"), (-0.1, "bf16")], 10),
            ValueError,
            "between 0 and 1 .* got -0.1",
        ),
        (lambda: RecipeSchedule([(0, "mxfp8"), (90.0, "bf16")], 10), ValueError, "got 90.0"),
        (
            lambda: RecipeSchedule([(0, "mxfp8"), (float("nan"), "bf16")], 10),
            ValueError,
            "got nan",
        ),
        (
            lambda: RecipeSchedule([(0, "mxfp8"), (0.9, "bf16")]),
            ValueError,
            "a fraction needs total_steps=, got 0.9",
        ),
        (lambda: RecipeSchedule([(0, "mxfp8")], 0), ValueError, "total_steps must be .* got 0"),
        (lambda: RecipeSchedule([(0, "mxfp8")], 9.5), ValueError, "got 9.5"),
        (lambda: RecipeSchedule([(0, "mxfp8"), (True, "bf16")]), TypeError, "got True"),
        (lambda: RecipeSchedule([(0, "mxfp8"), ("9", "bf16")]), TypeError, "got '9'"),
        (lambda: RecipeSchedule([(0, "mxfp8", 1)]), TypeError, "a pair"),
        (lambda: RecipeSchedule(["mx"]), TypeError, "a pair .* got 'mx'"),
        (lambda: RecipeSchedule([(0, "mxfp9")]), ValueError, "got 'mxfp9'"),
        (lambda: RecipeSchedule([(0, None)]), TypeError, "got NoneType"),
        (
            lambda: RecipeSchedule([(0, RecipeSchedule([(0, "mxfp8")]))]),
            TypeError,
            "got RecipeSchedule",
        ),
        (lambda: RecipeSchedule([(0, "mxfp8")]).at(-1), ValueError, "at least 0, got -1"),
        (lambda: RecipeSchedule([(0, "mxfp8")]).at(1.0), ValueError, "got 1.0"),
        (lambda: RecipeSchedule([(0, "mxfp8")]).load_state_dict({}), ValueError, "got {}"),
        (lambda: RecipeSchedule([(0, "mxfp8")]).load_state_dict({"step": -1}), ValueError, "-1"),
    ],
)
def test_wrong_schedules(make, error, message):
    with pytest.raises(error, match=message):
        make()


# ---- in a training loop


def _train(schedule, steps, model=None, optimizer=None):
    """Outputs of each step of a small training under a schedule."""
    torch.manual_seed(1)
    if model is None:
        model = hybridq.convert(nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 32)))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    xs, seen = torch.randn(20, 16, 32, generator=torch.Generator().manual_seed(2)), []
    for step in steps:
        torch.manual_seed(step)
        with hybridq.autocast(recipe=schedule):
            y = model(xs[step])
        y.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(y.detach())
        if isinstance(schedule, RecipeSchedule):
            schedule.step()
    return seen, model, optimizer


def test_a_switch_takes_effect_at_its_step_and_a_resumed_run_continues():
    phases = [(0, "bf16"), (3, "nvfp4"), (0.8, "mxfp8")]
    schedule = RecipeSchedule(phases, total_steps=10)
    seen, *_ = _train(schedule, range(10))
    assert schedule.steps == 10

    # By hand: one recipe after another over the same model.
    parts, model, optimizer = [], None, None
    for name, steps in (("bf16", range(3)), ("nvfp4", range(3, 8)), ("mxfp8", range(8, 10))):
        part, model, optimizer = _train(recipes.get(name), steps, model, optimizer)
        parts += part
    assert equal(seen, parts)

    # Stopped in the middle of a phase, and gone on with from a checkpoint.
    first = RecipeSchedule(phases, total_steps=10)
    begun, model, optimizer = _train(first, range(5))
    state = pickle.loads(pickle.dumps(first.state_dict()))
    second = RecipeSchedule(phases, total_steps=10)
    second.load_state_dict(state)
    assert second.steps == 5 and second.current == first.current
    assert equal(begun + _train(second, range(5, 10), model, optimizer)[0], seen)


def test_copies_have_a_count_of_their_own():
    schedule = RecipeSchedule([(0, "mxfp8"), (1, "nvfp4")])
    twins = copy.deepcopy(schedule), pickle.loads(pickle.dumps(schedule))
    schedule.step()
    for twin in twins:
        assert twin.steps == 0 and twin.current == recipes.get("mxfp8")
        twin.step()
        assert twin.current == schedule.current
    assert repr(schedule) == "RecipeSchedule([(0, 'mxfp8'), (1, 'nvfp4')], at step 1)"


def test_a_block_takes_the_recipe_of_the_moment_it_is_entered():
    layer, x = hybridq.Linear(64, 32), torch.randn(4, 64)
    schedule = RecipeSchedule([(0, "mxfp8"), (1, "nvfp4"), (2, "bf16")])
    context = hybridq.autocast(recipe=schedule)
    decorated = hybridq.autocast(recipe=schedule, precision="exact")(lambda: layer(x))
    for name in ("mxfp8", "nvfp4", "bf16"):
        with hybridq.autocast(recipe=name):
            expected = layer(x)
        assert torch.equal(decorated(), expected)
        with context:
            assert torch.equal(layer(x), expected)
            assert context.recipe == recipes.get(name)
            schedule.step()  # not before the next block
            assert torch.equal(layer(x), expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_recomputation_has_the_recipe_of_its_forward(use_reentrant):
    layer, x, dy = hybridq.Linear(64, 32), torch.randn(4, 64), torch.randn(4, 32)
    schedule = RecipeSchedule([(0, "mxfp8"), (1, "nvfp4")])
    expected = run(layer, x, dy, recipe="mxfp8")
    layer.zero_grad()
    leaf = x.clone().requires_grad_()
    with hybridq.autocast(recipe=schedule):
        y = checkpoint(layer, leaf, use_reentrant=use_reentrant)
    schedule.step()
    y.backward(dy)
    assert equal([leaf.grad, layer.weight.grad], expected[1:3])


def test_a_module_is_bound_at_a_switch_and_at_no_other_step():
    asked = []

    def factory(role):
        asked.append(role.tensor_type)
        return hybridq.MXFP8Quantizer()

    layer, x = hybridq.Linear(64, 32), torch.randn(4, 64)
    schedule = RecipeSchedule([(0, CustomRecipe(factory)), (3, "bf16"), (6, CustomRecipe(factory))])
    for _ in range(9):
        with hybridq.autocast(recipe=schedule):
            layer(x)
        schedule.step()
    assert asked == ["input", "weight", "grad_output"] * 2


@pytest.mark.parametrize("inside", [pytest.param(False, marks=pytest.mark.more), True])
def test_compiled_code_is_compiled_once_per_recipe(inside):
    """Also where the compiled function enters the block by itself, over a schedule that counts."""
    layer, x, dy = hybridq.Linear(64, 32), torch.randn(4, 64), torch.randn(4, 32)
    schedule = RecipeSchedule([(0, "mxfp8"), (3, "fp8_current"), (6, "mxfp8"), (8, "fp8_block")])
    entered = "bf16" if inside else schedule

    @torch.compile(fullgraph=True, backend="aot_eager")
    def forward(x):
        if not inside:
            return layer(x)
        with hybridq.autocast(recipe=schedule):
            return layer(x)

    graphs = []
    for step in range(10):
        leaf = x.clone().requires_grad_()
        with hybridq.autocast(recipe=entered):
            y = forward(leaf)
        y.backward(dy)
        expected = run(layer, x, dy, recipe=schedule.at(step))
        assert torch.equal(y, expected[0]) and torch.equal(leaf.grad, expected[1])
        graphs.append(counters["stats"]["unique_graphs"])
        schedule.step()
    assert graphs == [1, 1, 1, 2, 2, 2, 2, 2, 3, 3]
    assert not counters["graph_break"]


# ---- by name


def _blocks(count=4, width=32):
    blocks = nn.ModuleList(
        nn.ModuleDict({"up": nn.Linear(width, width), "down": nn.Linear(width, width)})
        for _ in range(count)
    )
    return hybridq.convert(nn.ModuleDict({"blocks": blocks, "head": nn.Linear(width, width)}))


def test_the_first_pattern_that_matches_counts():
    recipe = ByName(
        [("blocks.0.*", "bf16"), ("*.up", "nvfp4"), ("blocks.1*", "fp8_current")], default="mxfp8"
    )
    for name, chosen in {
        "blocks.0.up": "bf16",
        "blocks.1.up": "nvfp4",
        "blocks.1.down": "fp8_current",
        "blocks.10.down": "fp8_current",
        "blocks.2.down": "mxfp8",
        "Blocks.0.x": "mxfp8",
        "blocks.0": "mxfp8",
        "": "mxfp8",
    }.items():
        assert recipe.for_name(name) == recipes.get(chosen), name
        role = QuantizerRole("linear", "weight", name)
        assert recipe.quantizer(role) == recipes.get(chosen).quantizer(role)


def test_every_module_computes_under_its_own_recipe():
    model = _blocks()
    recipe = ByName([("blocks.0.*", "bf16"), ("*.up", "nvfp4")], default="mxfp8")
    x, dy = torch.randn(8, 32), torch.randn(8, 32)
    chosen = {"blocks.0.up": "bf16", "blocks.1.up": "nvfp4", "blocks.1.down": "mxfp8"}
    for name, own in chosen.items():
        module = model.get_submodule(name)
        results = []
        for one in (own, recipe):
            torch.manual_seed(4)
            results.append(run(module, x, dy, recipe=one))
        assert equal(*results)


def test_they_are_values():
    rules = [("a", "mxfp8"), ("b", MXFP8BlockScaling())]
    recipe = ByName(rules, default="bf16")
    same = ByName([["a", MXFP8BlockScaling()], ("b", "mxfp8")], recipes.get("bf16"))
    assert recipe == same and hash(recipe) == hash(same) and recipe.key == same.key
    rules.append(("c", "nvfp4"))
    assert recipe.rules == same.rules and len(recipe.rules) == 2
    assert recipe_by_key(recipe.key) == recipe and recipe.reads_names
    for twin in (copy.deepcopy(recipe), pickle.loads(pickle.dumps(recipe))):
        assert twin == recipe and twin.key == recipe.key
    others = [
        ByName(rules, default="bf16"),
        ByName(rules[:2][::-1], default="bf16"),
        ByName(rules[:2], default="mxfp8"),
        ByName([("a", "mxfp8"), ("b", "nvfp4")], default="bf16"),
        ByName([("a', 'b", "mxfp8")], default="bf16"),
        ByName([("a", "mxfp8"), ("b", "mxfp8")], default="bf16").with_precision("exact"),
    ]
    assert len({recipe.key, *(other.key for other in others)}) == 1 + len(others)
    for attribute in ("rules", "default", "key", "precision"):
        with pytest.raises(AttributeError):
            setattr(recipe, attribute, None)


def test_choices_reach_every_recipe_in_it():
    inner = ByName([("b.*", "nvfp4")], default="mxfp8")
    recipe = ByName([("b.*", inner), ("c", "bf16")], default="fp8_current")
    chosen = recipe.with_choices(backward_override="dequantized", precision="exact")
    for name in ("a", "b.c", "c"):
        expected = recipe.for_name(name).with_choices(
            backward_override="dequantized", precision="exact"
        )
        assert chosen.for_name(name) == expected
    assert chosen.for_name("b.c").backward_override == "dequantized"
    with hybridq.autocast(recipe=recipe, precision={"wgrad": "exact"}) as context:
        assert context.recipe.for_name("b.c").precision == GemmPrecision(wgrad="exact")


@pytest.mark.more
def test_compiled_and_in_a_schedule():
    """The last phase leaves the first and last block alone; nothing else is compiled again."""
    model = _blocks()
    late = ByName.first_last(model, default="mxfp8")
    schedule = RecipeSchedule([(0, "mxfp8"), (2, late)])
    layers = [module for module in model.modules() if isinstance(module, hybridq.Linear)]

    def forward(x):
        for layer in layers:
            x = layer(x)
        return x

    compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")
    x, graphs = torch.randn(8, 32), []
    for _ in range(4):
        with hybridq.autocast(recipe=schedule):
            assert torch.equal(compiled(x), forward(x))
        graphs.append(counters["stats"]["unique_graphs"])
        schedule.step()
    assert graphs == [1, 1, 2, 2] and not counters["graph_break"]


def test_first_and_last_blocks():
    model = _blocks(5)
    recipe = ByName.first_last(model, 2, 1, default="nvfp4")
    plain = [name for name, _ in model.named_modules() if recipe.for_name(name) != recipe.default]
    numbers = (0, 1, 4)
    assert plain == [f"blocks.{i}{part}" for i in numbers for part in ("", ".up", ".down")]
    for number in (10, 14):  # blocks.1 is not blocks.10
        assert recipe.for_name(f"blocks.{number}.up") == recipe.default
    assert ByName.first_last(model, 0, 0, default="nvfp4") == ByName((), default="nvfp4")
    everything = ByName.first_last(model, 3, 3, recipe="mxfp8", default="nvfp4")
    assert [f"blocks.{i}" for i in range(5)] == [name for name, _ in everything.rules[::2]]
    compiled = torch.compile(model, backend="eager")
    assert ByName.first_last(compiled, 2, 1, default="nvfp4") == recipe


def test_blocks_that_are_named():
    two = nn.ModuleDict({"encoder": _blocks(3), "decoder": _blocks(2), "odd[0]": nn.ModuleList()})
    names = ("encoder.blocks", "decoder.blocks")
    recipe = ByName.first_last(two, 1, 1, default="nvfp4", blocks=names)
    assert [name for name, _ in recipe.rules[::2]] == [
        *("encoder.blocks.0", "encoder.blocks.2", "decoder.blocks.0", "decoder.blocks.1")
    ]
    sequence = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    recipe = ByName.first_last(sequence, 1, 1, default="nvfp4", blocks="")
    assert [recipe.for_name(str(i)) == recipe.default for i in range(3)] == [False, True, False]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: ByName([("a",)], default="mxfp8"), TypeError, "a rule is a pair"),
        (lambda: ByName(["ab"], default="mxfp8"), TypeError, "a rule is a pair .* got 'ab'"),
        (lambda: ByName([(0, "mxfp8")], default="mxfp8"), TypeError, "a pattern is a string"),
        (lambda: ByName([("a", "mxfp9")], default="mxfp8"), ValueError, "got 'mxfp9'"),
        (lambda: ByName([("a", "mxfp8")], default=None), TypeError, "got NoneType"),
        (
            lambda: ByName([("a", RecipeSchedule([(0, "mxfp8")]))], default="mxfp8"),
            TypeError,
            "got RecipeSchedule",
        ),
        (lambda: ByName([("a", "mxfp8")]), TypeError, "default"),
        (
            lambda: ByName.first_last(_blocks(), -1, default="mxfp8"),
            ValueError,
            "first must be an integer of at least 0, got -1",
        ),
        (
            lambda: ByName.first_last(_blocks(), blocks="layers", default="mxfp8"),
            ValueError,
            "no module blocks='layers'",
        ),
        (lambda: ByName.first_last(nn.Linear(8, 8), default="mxfp8"), ValueError, "got none"),
        (
            lambda: ByName.first_last(
                nn.ModuleDict({"a": _blocks(), "b": _blocks()}), default="mxfp8"
            ),
            ValueError,
            "blocks='...': .* got a.blocks, b.blocks",
        ),
    ],
)
def test_wrong_rules(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_thread_has_a_recipe_of_its_own():
    """One module, under a recipe in this thread and under none in another, at the same time."""
    layer, x = hybridq.Linear(64, 32), torch.randn(4, 64)
    plain, results = layer(x), []
    entered, done = threading.Event(), threading.Event()

    def other():
        entered.wait()
        results.append(layer(x))
        with hybridq.autocast(recipe="nvfp4"):
            results.append(layer(x))
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    with hybridq.autocast(recipe="mxfp8"):
        before = layer(x)
        entered.set()
        done.wait()
        assert torch.equal(layer(x), before)
    thread.join()
    with hybridq.autocast(recipe="nvfp4"):
        expected = layer(x)
    assert torch.equal(results[0], plain) and not torch.equal(before, plain)
    assert torch.equal(results[1], expected) and not torch.equal(before, expected)


@pytest.mark.parametrize("starts", [(0, 10), (0, 5, 900), (0, 1.0)])
def test_a_phase_that_never_runs_is_warned_of(starts) -> None:
    phases = [(start, "mxfp8") for start in starts]
    text = f"the phase from step {max(starts[-1], 10):.0f} on never runs in 10 steps"
    with pytest.warns(hybridq.HybridQWarning, match=text):
        RecipeSchedule(phases, total_steps=10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        RecipeSchedule([(0, "mxfp8"), (9, "nvfp4")], total_steps=10)
        RecipeSchedule([(0, "mxfp8"), (900, "nvfp4")])
