"""A warning names the line of the caller, wherever in hybridq or in a hook of torch it is given."""

from __future__ import annotations

import ast
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import hybridq
from hybridq import errors

PACKAGE = Path(hybridq.__file__).parent


def in_an_optimizers_hook() -> None:
    linear = hybridq.Linear(32, 32)
    optimizer = torch.optim.SGD(linear.parameters(), lr=1.0)
    for scale in (1.0, 1e6):
        with hybridq.autocast(recipe="fp8_delayed"):
            loss = linear(torch.full((32, 32), scale)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def in_an_optimizers_step() -> None:
    model = nn.Sequential(nn.Linear(32, 32))
    optimizer = torch.optim.SGD(model.parameters())
    with hybridq.quantized_model_init("mxfp8"):
        hybridq.convert(model)
    model(torch.ones(2, 32)).sum().backward()
    optimizer.step()


def in_an_operation_of_a_tensor() -> None:
    with hybridq.quantized_model_init("mxfp8"):
        weight = hybridq.Linear(32, 32).weight
    with torch.no_grad():
        weight.add_(1e-8)


def in_a_forward() -> None:
    model = hybridq.quantize_model(nn.Sequential(nn.Linear(32, 32)), "mxfp8")
    with hybridq.autocast(recipe="nvfp4"):
        model(torch.ones(2, 32))


def in_a_constructor() -> None:
    hybridq.RecipeSchedule([(0, "mxfp8"), (10, "nvfp4")], total_steps=5)


@pytest.mark.parametrize(
    ("case", "said"),
    [
        (in_an_optimizers_hook, "values were cut"),
        (in_an_optimizers_step, "are not trained"),
        (in_an_operation_of_a_tensor, "rounds what is written"),
        (in_a_forward, "keep it"),
        (in_a_constructor, "never runs"),
    ],
)
def test_the_callers_line_is_named(case: Callable[[], None], said: str) -> None:
    with pytest.warns(hybridq.HybridQWarning, match=said) as found:
        case()
    assert {one.filename for one in found} == {__file__}


def test_a_thread_of_ours_names_the_line_that_warns() -> None:
    with pytest.warns(hybridq.HybridQWarning) as found:
        thread = threading.Thread(target=errors.warn_once, args=("a thread", "text"))
        thread.start()
        thread.join()
    assert [Path(one.filename).name for one in found] == ["errors.py"]


def test_what_a_program_ignores_or_raises_is_known_by_its_own_module() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", module=__name__.replace(".", r"\."))
        with pytest.raises(hybridq.HybridQWarning, match="never runs"):
            in_a_constructor()


def test_every_warning_leaves_by_one_door() -> None:
    for file in PACKAGE.rglob("*.py"):
        if file == PACKAGE / "errors.py":
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr in ("warn", "warn_explicit"):
                owner = getattr(node.value, "id", "")
                assert owner != "warnings", f"{file.name}:{node.lineno}"
