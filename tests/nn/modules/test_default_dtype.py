"""Torch's default dtype belongs to the caller: no number of hybridq's depends on it."""

from __future__ import annotations

import ast
import re
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import hybridq
from delayed_model import batch, forward
from hybridq.nn.delayed_scaling.state import states_of
from module_matrix import CASES, RECIPES, step

PACKAGE = Path(hybridq.__file__).parent
#: Functions of torch whose result has the default dtype, or the default device, if none is given.
FACTORIES = re.compile(
    "arange|asarray|as_tensor|empty|empty_permuted|empty_strided|eye|full|hann_window|linspace|"
    "logspace|normal|ones|rand|randint|randn|randperm|range|scalar_tensor|tensor|tril_indices|"
    "triu_indices|zeros"
)
CALLED = re.compile(rf"\btorch\s*\.\s*(?:{FACTORIES.pattern})\s*\(")
DTYPES = (torch.bfloat16, torch.float16, torch.float64)


@contextmanager
def default(dtype):
    """The caller's default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def two_steps(case, recipe, parameters, data) -> list[torch.Tensor]:
    """Results of two optimizer steps of a module that is made, and runs, as the default is."""
    module = CASES[case].make().to(torch.float32)
    if not parameters:
        parameters += [p.detach().clone() for p in module.parameters()]
    with torch.no_grad():
        for p, value in zip(module.parameters(), parameters, strict=True):
            p.copy_(value)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-2)
    made = []
    for number, (x, dy) in enumerate(data):
        made += step(module, module, x, dy, RECIPES[recipe], seed=number)
        optimizer.step()
    return made


@pytest.mark.thinned(1)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("case", CASES)
def test_every_module_computes_what_it_does_under_float32(case, recipe) -> None:
    data, parameters = [CASES[case].data(torch.float32) for _ in range(2)], []
    want = two_steps(case, recipe, parameters, data)
    turn = (list(CASES).index(case) + list(RECIPES).index(recipe)) % len(DTYPES)
    for dtype in DTYPES if "delayed" in recipe else DTYPES[turn : turn + 1]:
        with default(dtype):
            got = two_steps(case, recipe, parameters, data)
        for i, (one, two) in enumerate(zip(got, want, strict=True)):
            assert one.dtype == two.dtype and torch.equal(one, two), f"{dtype}, result {i}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_states_of_delayed_scaling_are_float32(dtype) -> None:
    with default(dtype):
        layer = hybridq.Linear(40, 24, dtype=torch.float32)
        x, dy = batch(0, torch.float32)
        forward(layer, x).backward(dy)
        (state,) = states_of(layer).values()
        exported = state.exported()
    for name in ("forward_stats", "forward_amaxes", "backward_stats", "backward_amaxes"):
        assert getattr(state, name).dtype == torch.float32, name
    assert exported and all(tensor.dtype == torch.float32 for tensor in exported.values())


def made_without(text: str, keyword: str) -> list[str]:
    """Calls of torch's factories in a program that do not give a keyword."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id == "torch"
            and FACTORIES.fullmatch(node.func.attr)
            and all(given.arg not in (keyword, None) for given in node.keywords)
        ):
            found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


def test_every_tensor_that_the_package_makes_is_given_its_dtype() -> None:
    for file in PACKAGE.rglob("*.py"):
        text = file.read_text()
        found = made_without(text, "dtype") if CALLED.search(text) else []
        assert not found, f"{file.name}, line {', '.join(found)}"


def test_the_search_finds_a_factory_without_a_dtype() -> None:
    text = "a = torch.zeros(3)\nb = torch.zeros(3, dtype=torch.int8)\nc = torch.ones(2, **like)\n"
    assert made_without(text, "dtype") == ["1: torch.zeros(3)"]
