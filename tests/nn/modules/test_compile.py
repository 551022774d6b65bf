"""torch.compile(fullgraph=True): eager's bits, no graph break, no needless recompilation."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import hybridq
from compilers import BACKENDS, BOTH_BACKENDS
from hybridq import recipes, te
from hybridq.nn import Linear, convert
from hybridq.quantizers import MXFP8Quantizer, NVFP4Quantizer
from hybridq.recipes import CustomRecipe, NVFP4BlockScaling, autocast, get
from linear_model import draw_like_a_module, equal, quantized_linear, run

STOCHASTIC = tuple(name for name in recipes.names() if recipes.bind(get(name)).is_stochastic)
#: Delayed scaling depends on what came before: tests/nn/delayed_scaling/test_delayed_compile.py.
DETERMINISTIC = (
    *(
        name
        for name in recipes.names()
        if name not in STOCHASTIC and not recipes.bind(get(name)).is_delayed
    ),
    NVFP4BlockScaling(disable_stochastic_rounding=True),
)


def _factory(role):
    return MXFP8Quantizer() if role.name == "0" else NVFP4Quantizer()


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def _graphs() -> int:
    assert not counters["graph_break"]
    return counters["stats"]["unique_graphs"]


def _model():
    return convert(nn.Sequential(nn.Linear(40, 48), nn.ReLU(), nn.Linear(48, 24, bias=False)))


def _data(rows):
    return torch.randn(rows, 40), torch.randn(rows, 24)


class Inside(nn.Module):
    """A model that runs its own part under a recipe, and breaks the graph there."""

    def __init__(self, model: nn.Sequential, region) -> None:
        super().__init__()
        self.model, self.region = model, region

    def forward(self, x):
        first, *others = self.model
        with self.region():
            h = first(x)
            torch._dynamo.graph_break()
            for one in others:
                h = one(h)
        return h


@pytest.mark.parametrize("kind", ["hybridq", "te", "decorated"])
def test_a_graph_that_breaks_inside_of_the_region_keeps_its_recipe(kind):
    model = _model()
    regions = {
        "hybridq": lambda: autocast(recipe="mxfp8"),
        "te": lambda: te.autocast(recipe=te.common.recipe.MXFP8BlockScaling()),
    }
    if kind == "decorated":
        module = Inside(model, contextlib.nullcontext)
        module.forward = autocast(recipe="mxfp8")(module.forward)
    else:
        module = Inside(model, regions[kind])
    x, dy = _data(12)
    expected = run(model, x, dy, recipe="mxfp8")
    compiled = torch.compile(module, backend="aot_eager")
    for _ in range(2):
        assert equal(run(compiled, x, dy, enabled=False), expected)


@pytest.mark.more
@pytest.mark.parametrize("backend", BOTH_BACKENDS)
def test_some_recipes(backend):
    # Inductor makes code of what has been traced, whatever the recipe.
    traced = (*DETERMINISTIC[::4], CustomRecipe(_factory))
    one_after_another(traced if backend == "aot_eager" else DETERMINISTIC[:1], backend)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_deterministic_recipe(backend):
    traced = (*DETERMINISTIC, CustomRecipe(_factory))
    one_after_another(traced if backend == "aot_eager" else traced[::6], backend)


def one_after_another(todo, backend) -> None:
    """One module and many recipes: right from the first call on, and when they change."""
    model = _model()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    x, dy = _data(70)
    with torch._dynamo.config.patch(recompile_limit=2 * len(todo)):
        for recipe in todo:
            expected = run(model, x, dy, recipe=recipe)
            assert equal(run(compiled, x, dy, recipe=recipe), expected), recipe
            graphs = _graphs()
            assert equal(run(compiled, x, dy, recipe=recipe), expected), recipe
            assert _graphs() == graphs, recipe
        graphs = _graphs()
        for recipe in reversed(todo):  # all known by now
            assert equal(run(compiled, x, dy, recipe=recipe), run(model, x, dy, recipe=recipe)), (
                recipe
            )
        assert _graphs() == graphs


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("recipe", STOCHASTIC)
def test_stochastic_recipes(recipe, backend):
    """The forward is deterministic; gradients are those of some seed, another in every call."""
    layer = Linear(48, 40)
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    x, dy = torch.randn(70, 48), torch.randn(70, 40)
    eager, one, two = (
        run(layer, x, dy, recipe=recipe),
        *(run(compiled, x, dy, recipe=recipe) for _ in range(2)),
    )
    assert torch.equal(one[0], eager[0]) and torch.equal(two[0], eager[0])
    assert not torch.equal(one[1], two[1]) and not torch.equal(one[2], two[2])
    assert _graphs() == 1
    if backend == "aot_eager":  # draws from torch's own generator
        torch.manual_seed(2)
        seed = draw_like_a_module()
        model = quantized_linear(x, layer.weight.detach(), layer.bias.detach(), dy, recipe, seed)
        torch.manual_seed(2)
        got = run(compiled, x, dy, recipe=recipe)
        for tensor, name in zip(got, ("y", "dx", "dw"), strict=False):
            assert ((tensor.double() - model[name].value).abs() <= model[name].bound).all()


def test_switching_off_and_on():
    model = _model()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x, dy = _data(6)
    for options in ({"enabled": False}, {"recipe": "mxfp8"}, {"enabled": False}) * 2:
        assert equal(run(compiled, x, dy, **options), run(model, x, dy, **options))
    assert _graphs() == 2


@pytest.mark.more
def test_dynamic_batch_sizes():
    model = _model()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for rows in (6, 9, 13, 21):
        x, dy = _data(rows)
        for recipe in ("mxfp8", "nvfp4_fwd_mxfp8_bwd"):
            assert equal(run(compiled, x, dy, recipe=recipe), run(model, x, dy, recipe=recipe))
    assert _graphs() <= 4  # per recipe one for the first size and one for all others


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("amp", [None, torch.bfloat16])
def test_torch_autocast_and_bf16(backend, amp):
    model = _model() if amp else _model().bfloat16()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    x, dy = _data(33)
    if amp is None:
        x = x.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=amp is not None):
        results = [run(m, x, dy.bfloat16(), recipe="mxfp8") for m in (model, compiled, compiled)]
    assert equal(results[0], results[1]) and equal(results[0], results[2])
    assert _graphs() == 1


def test_autocast_inside_the_compiled_function():
    model = _model()

    def step(x, recipe):
        with autocast(recipe=recipe):
            y = model(x)
            with autocast(enabled=False):
                return y, model(x)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    x, _ = _data(5)
    for recipe in ("mxfp8", "fp8_current", get("nvfp4_fwd_mxfp8_bwd")):
        assert equal(compiled(x, recipe), step(x, recipe))
    assert recipes.autocast is autocast and not torch.equal(*step(x, "mxfp8"))


def test_blocks_that_differ_in_their_names_only_share_one_graph():
    blocks = convert(nn.Sequential(*(nn.Linear(16, 16) for _ in range(12))))
    x = torch.randn(3, 16, requires_grad=True)
    with autocast(recipe="mxfp8"):
        expected = blocks(x)
    for block in blocks:
        block.compile(fullgraph=True, backend="aot_eager")
    with autocast(recipe="mxfp8"):
        assert torch.equal(blocks(x), expected)
    assert _graphs() == 1


def test_a_factory_that_reads_names_is_never_shared_wrongly():
    one, two = Linear(40, 8, name="0"), Linear(40, 8, name="1")
    two.load_state_dict(one.state_dict())
    x, dy = torch.randn(5, 40), torch.randn(5, 8)
    recipe = CustomRecipe(_factory)
    expected = [run(layer, x, dy, recipe=recipe) for layer in (one, two)]
    assert not equal(*expected)
    for layer, wanted in zip((one, two), expected, strict=True):
        layer.compile(fullgraph=True, backend="aot_eager")
        assert equal(run(layer, x, dy, recipe=recipe), wanted)


def test_equal_recipes_do_not_recompile_and_different_factories_do():
    layer = Linear(40, 8)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x, dy = torch.randn(5, 40), torch.randn(5, 8)
    for _ in range(3):
        run(compiled, x, dy, recipe=recipes.MXFP8BlockScaling())
        run(compiled, x, dy, recipe=CustomRecipe(_factory))
    assert _graphs() == 2
    other = CustomRecipe(lambda role: MXFP8Quantizer("e5m2"))
    assert equal(run(compiled, x, dy, recipe=other), run(layer, x, dy, recipe=other))
    assert _graphs() == 3


def test_errors_keep_their_text():
    layer = Linear(8, 8, name="enc.q")
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with autocast(recipe=CustomRecipe(lambda role: None)), pytest.raises(Exception) as caught:
        compiled(torch.randn(2, 8))
    text = str(caught.value) + str(caught.value.__cause__)
    assert "IdentityQuantizer" in text and "enc.q" in text


@pytest.mark.thinned(1, "slow", few=1)
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4_fwd_mxfp8_bwd"])
def test_checkpoint_under_compile_and_compile_under_checkpoint(recipe):
    model = _model()
    x, dy = _data(12)
    expected = run(model, x, dy, recipe=recipe)
    recompute = nn.Module()
    recompute.inner = model
    recompute.forward = lambda x: checkpoint(model, x, use_reentrant=False)
    inside = torch.compile(recompute, fullgraph=True, backend="aot_eager")
    assert equal(run(inside, x, dy, recipe=recipe), expected)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    recompute.forward = lambda x: checkpoint(compiled, x, use_reentrant=False)
    assert equal(run(recompute, x, dy, recipe=recipe), expected)


class Noting(nn.Module):
    """A model that writes a dict before its layers run, as transformers' models do."""

    def __init__(self, first: bool | None = None) -> None:
        super().__init__()
        self.up, self.mlp = hybridq.Linear(32, 48), hybridq.LayerNormMLP(48, 64)
        self.grouped = hybridq.GroupedLinear(2, 48, 32)
        self.notes: dict[str, int] = {}
        self.first = first

    def forward(self, x):
        self.notes["rows"] = x.shape[0]
        y = self.mlp(self.up(x, is_first_microbatch=self.first), is_first_microbatch=self.first)
        return self.grouped(y, [x.shape[0] // 2] * 2)


@pytest.mark.parametrize("first", [None, True])
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_delayed"])
def test_a_model_that_writes_a_dict_first_is_one_graph(recipe, quantized, first):
    with hybridq.quantized_model_init(recipe, enabled=quantized):
        model = Noting(first)
    x = torch.randn(8, 32)
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend="aot_eager")
    with autocast(recipe=recipe):
        y, expected = compiled(x), model(x)
    y.sum().backward(), expected.sum().backward()
    assert model.notes == compiled.notes == {"rows": 8}
    assert torch.equal(y, expected)
    for got, want in zip(compiled.parameters(), model.parameters(), strict=True):
        assert torch.equal(got.grad, want.grad)


@pytest.mark.parametrize("backend", BOTH_BACKENDS)
def test_a_served_model_that_writes_a_dict_first_is_one_graph(backend):
    model = hybridq.quantize_model(Noting(), "mxfp8")
    x = torch.randn(8, 32)
    with torch.no_grad():
        y = torch.compile(model, fullgraph=True, backend=backend)(x)
        assert torch.equal(y, model(x))
