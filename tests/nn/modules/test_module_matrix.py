"""Every module under every recipe: compiled, recomputed, in any shape, and without quantization."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import hybridq
from hybridq.quantizers import IdentityQuantizer
from hybridq.recipes import CustomRecipe
from linear_model import equal
from module_matrix import CASES, HIDDEN, MODES, RECIPES, attention, layer, step, train


def pairs(stride: int, wanted=lambda case: True):
    """Every module with every recipe; all but some are slow, each of both stays at least once."""
    made = []
    for i, case in enumerate(name for name, case in CASES.items() if wanted(case)):
        for j, recipe in enumerate(RECIPES):
            marks = () if (j - i) % stride == 0 else (pytest.mark.slow,)
            made.append(pytest.param(case, recipe, marks=marks, id=f"{case}-{recipe}"))
    return made


def triples(stride: int):
    """Every pair in every mode; of the pairs that are not slow, one mode is not."""
    made = []
    for number, one in enumerate(pairs(stride)):
        for i, mode in enumerate(MODES):
            marks = one.marks or (() if number % len(MODES) == i else (pytest.mark.slow,))
            made.append(pytest.param(*one.values, mode, marks=marks, id=f"{one.id}-{mode}"))
    return made


@pytest.fixture
def fresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def same(got, want) -> None:
    assert len(got) == len(want)
    for i, (one, two) in enumerate(zip(got, want, strict=True)):
        assert one.dtype == two.dtype and one.shape == two.shape, i
        assert torch.equal(one, two), f"result {i}: {(one.double() - two.double()).abs().max()}"


@pytest.mark.thinned(1, "slow", few=3)
@pytest.mark.parametrize(("case", "recipe", "mode"), triples(11))
def test_compiled(case, recipe, mode, fresh) -> None:
    """Training steps have eager's bits; no graph break; nothing is compiled after the first."""
    dtype = torch.bfloat16 if mode == "bf16" else torch.float32
    eager = CASES[case].make().to(dtype)
    batches = [CASES[case].data(dtype) for _ in range(3)]
    own = copy.deepcopy(eager)
    want = train(eager, eager, batches, RECIPES[recipe], mode)
    compiled = torch.compile(own, fullgraph=True, backend="aot_eager")
    graphs = []
    seen = lambda: graphs.append(counters["stats"]["unique_graphs"])  # noqa: E731
    same(train(own, compiled, batches, RECIPES[recipe], mode, seen), want)
    assert graphs == [1, 1, 1] and not counters["graph_break"]


_SAVED = [torch.ops.hybridq.gemm.default, torch.ops.hybridq.grouped_gemm.default]
WAYS = {
    "reentrant": lambda f: lambda x: checkpoint(f, x, use_reentrant=True),
    "non-reentrant": lambda f: lambda x: checkpoint(f, x, use_reentrant=False),
    "hybridq": lambda f: lambda x: hybridq.checkpoint(f, x),
    "selective": lambda f: (
        lambda x: checkpoint(
            f,
            x,
            use_reentrant=False,
            context_fn=functools.partial(create_selective_checkpoint_contexts, _SAVED),
        )
    ),
}


@pytest.mark.thinned(1)
@pytest.mark.parametrize(("case", "recipe"), pairs(4))
def test_recomputed(case, recipe) -> None:
    """Three training steps, recomputed in four ways: the bits of a run without."""
    module = CASES[case].make()
    batches = [CASES[case].data() for _ in range(3)]
    own = copy.deepcopy(module)
    want = train(own, own, batches, RECIPES[recipe])
    for name, way in WAYS.items():
        again = copy.deepcopy(module)
        same(train(again, way(again), batches, RECIPES[recipe]), want), name


def _identity(role):
    return IdentityQuantizer()


_identity.reads_names = False


@pytest.mark.thinned(1)
@pytest.mark.usefixtures("fast_products")
@pytest.mark.parametrize("recipe", [None, CustomRecipe(_identity)], ids=["none", "identity"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", [name for name, case in CASES.items() if case.twin])
def test_ten_adamw_steps_are_torchs(case, mode, recipe) -> None:
    dtype = torch.bfloat16 if mode == "bf16" else torch.float32
    module = CASES[case].make().to(dtype)
    twin = CASES[case].twin(module).to(dtype)
    with torch.no_grad():
        for one, two in zip(twin.parameters(), module.parameters(), strict=True):
            one.copy_(two)
    batches = [CASES[case].data(dtype) for _ in range(10)]
    same(train(module, module, batches, recipe, mode), train(twin, twin, batches, None, mode))


@pytest.mark.parametrize(("case", "recipe"), pairs(4, lambda case: case.any_lead))
def test_any_batch_shape(case, recipe) -> None:
    """No rows, one row without a batch, odd rows in five dimensions: the rows of a matrix."""
    module = CASES[case].make()
    for lead in [(), (0,), (1,), (2, 0, 3), (1, 3, 1, 7)]:
        x, dy = CASES[case].data(lead=lead)
        one, two = copy.deepcopy(module), copy.deepcopy(module)
        got = step(one, one, x, dy, RECIPES[recipe])
        assert got[0].shape == dy.shape and got[1].shape == x.shape
        flat = step(two, two, x.view(-1, HIDDEN), dy.view(-1, HIDDEN), RECIPES[recipe])
        assert equal([t.flatten() for t in got], [t.flatten() for t in flat]), lead


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", ["attention", "layer"])
def test_any_batch_of_sequences(kind, recipe) -> None:
    """Where length or batch is 1 or 0 the order of the tokens is one: both layouts, all bits."""
    make, option = (
        (attention, "qkv_format") if kind == "attention" else (layer, "attn_input_format")
    )
    first = make(**{option: "bshd"})
    second = make(**{option: "sbhd"})
    second.load_state_dict(first.state_dict())
    for lead in [(1, 7), (7, 1), (1, 1), (0, 3), (3, 0)]:
        x, dy = torch.randn(*lead, HIDDEN), torch.randn(*lead, HIDDEN)
        one, two = copy.deepcopy(first), copy.deepcopy(second)
        got = step(one, one, x, dy, RECIPES[recipe])
        transposed = step(two, two, x.transpose(0, 1), dy.transpose(0, 1), RECIPES[recipe])
        transposed[:2] = [t.transpose(0, 1) for t in transposed[:2]]
        assert equal(got, transposed), lead


@pytest.mark.parametrize("recipe", [name for name in RECIPES if "delayed" not in name])
def test_any_sizes_of_groups(recipe) -> None:
    """Groups of no, one and odd tokens, in a list and on the device."""
    for sizes in [(0, 0, 0), (0, 1, 0), (33, 1, 5), (1, 1, 1)]:
        module = hybridq.GroupedLinear(3, HIDDEN, HIDDEN)
        x, dy = (torch.randn(sum(sizes), HIDDEN) for _ in range(2))
        made = []
        for splits in (list(sizes), torch.tensor(sizes)):
            one = copy.deepcopy(module)
            call = lambda leaf, one=one, splits=splits: one(leaf, splits)  # noqa: E731
            made.append(step(one, call, x, dy, RECIPES[recipe]))
        assert equal(*made), sizes
