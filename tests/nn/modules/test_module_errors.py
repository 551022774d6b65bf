"""What every module refuses, with what words; and modules under recipes of several threads."""

from __future__ import annotations

import copy
import re
import threading

import pytest
import torch
from torch import nn

import hybridq
from hybridq.errors import RecipeError
from hybridq.quantizers import IdentityQuantizer, MXFP8Quantizer
from hybridq.recipes import CustomRecipe, autocast
from linear_model import equal
from module_matrix import CASES, HIDDEN, RECIPES, step

#: With its own norm or activation torch may be the one who refuses, and with torch's words.
QUANTIZED = [name for name in RECIPES if name not in ("bf16", "high_precision")]


@pytest.mark.thinned(1)
@pytest.mark.parametrize("recipe", QUANTIZED)
@pytest.mark.parametrize("case", CASES)
def test_dtypes_that_differ(case, recipe) -> None:
    module = CASES[case].make()
    x, _ = CASES[case].data(torch.bfloat16)
    words = r"same dtype, got torch.bfloat16 and torch.float32|one dtype and one device"
    with autocast(recipe=RECIPES[recipe]), pytest.raises(RuntimeError, match=words):
        module(x)
    with (
        autocast(recipe=RECIPES[recipe]),
        pytest.raises((TypeError, RuntimeError), match=r"float32, bfloat16 or float16|one dtype"),
    ):
        module.double()(x.double())


@pytest.mark.parametrize("case", CASES)
def test_inputs_that_are_none(case) -> None:
    module = CASES[case].make()
    with autocast(recipe="mxfp8"):
        for given, error, words in (
            (None, (TypeError, AttributeError), "must be a Tensor|NoneType"),
            (torch.randn(3, HIDDEN - 1), RuntimeError, "last dimension of the input must be"),
            (torch.tensor(1.0), RuntimeError, "last dimension of the input must be"),
            (torch.ones(3, HIDDEN, dtype=torch.int64), (RuntimeError, TypeError), "dtype|Long"),
        ):
            with pytest.raises(error, match=words):
                module(given)


def test_a_symbolic_trace_is_told_of_leaves() -> None:
    model = nn.Sequential(hybridq.Linear(HIDDEN, HIDDEN), nn.ReLU())
    with pytest.raises(TypeError, match=r"got Proxy; torch\.fx\.symbolic_trace.*is_leaf_module"):
        torch.fx.symbolic_trace(model)

    class Leaves(torch.fx.Tracer):
        def is_leaf_module(self, module: nn.Module, name: str) -> bool:
            return type(module).__module__.startswith("hybridq") or super().is_leaf_module(
                module, name
            )

    traced, x = torch.fx.GraphModule(model, Leaves().trace(model)), torch.randn(3, HIDDEN)
    with autocast(recipe="mxfp8"):
        assert torch.equal(traced(x), model(x))


@pytest.mark.parametrize(
    ("slot", "usage", "words"),
    [
        ("input", {"rowwise": False}, "fprop.*'input' makes no rowwise"),
        ("weight", {"columnwise": False}, "dgrad.*'weight' makes no columnwise"),
        ("grad_output", {"columnwise": False}, "wgrad.*'grad_output' makes no columnwise"),
    ],
)
@pytest.mark.parametrize("case", CASES)
def test_quantizers_that_a_gemm_cannot_use(case, slot, usage, words) -> None:
    """An error of the first forward that names the module, the GEMM and the slot."""
    model = hybridq.convert(nn.ModuleDict({"blocks": CASES[case].make()}))

    def factory(role):
        return MXFP8Quantizer(**usage) if role.tensor_type == slot else MXFP8Quantizer()

    x, dy = CASES[case].data()
    with autocast(recipe=CustomRecipe(factory)), pytest.raises(RecipeError) as caught:
        model["blocks"](x)
    text = str(caught.value)
    assert "blocks" in text and re.search(words, text, re.DOTALL), text
    for wrong, error in ((lambda role: None, ValueError), (lambda role: "mxfp8", TypeError)):
        with autocast(recipe=CustomRecipe(wrong)), pytest.raises(error, match="blocks"):
            model["blocks"](x)
    # The module is as good as before.
    assert len(step(model, model["blocks"], x, dy, "mxfp8")) > 2


@pytest.mark.thinned(1)
@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("recipe", QUANTIZED)
@pytest.mark.parametrize("case", CASES)
def test_double_backward(case, recipe) -> None:
    module = CASES[case].make()
    x = CASES[case].data()[0].requires_grad_()
    with autocast(recipe=RECIPES[recipe]):
        y = module(x)
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        dx.sum().backward()


@pytest.mark.parametrize("case", CASES)
def test_a_recipe_of_one_thread_only(case) -> None:
    """One module in three threads at once, each with a recipe of its own or none."""
    module, (x, dy) = CASES[case].make(), CASES[case].data()
    names = ("mxfp8", "fp8_current", None)
    copies = [copy.deepcopy(module) for _ in names]
    want = [step(own, own, x, dy, name) for own, name in zip(copies, names, strict=True)]
    barrier, wrong = threading.Barrier(len(names), timeout=30), []

    def work(name, wanted):
        try:
            for _ in range(3):
                leaf = x.clone().requires_grad_()
                with autocast(enabled=name is not None, recipe=name or "mxfp8"):
                    barrier.wait()
                    y = module(leaf)
                    barrier.wait()
                (dx,) = torch.autograd.grad(y, leaf, dy)
                if not equal([y.detach(), dx], wanted[:2]):
                    wrong.append(name)
        except Exception as error:
            wrong.append(error)
            barrier.abort()

    pairs = zip(names, want, strict=True)
    threads = [threading.Thread(target=work, args=pair) for pair in pairs]
    with autocast(recipe="nvfp4"):  # of this thread, and of no other
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert wrong == []


@pytest.mark.parametrize("case", CASES)
def test_identity_quantizers_are_no_error(case) -> None:
    module, (x, dy) = CASES[case].make(), CASES[case].data()
    own = copy.deepcopy(module)
    identity = CustomRecipe(lambda role: IdentityQuantizer())
    assert equal(step(module, module, x, dy, identity), step(own, own, x, dy, None))
