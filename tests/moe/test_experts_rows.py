"""Experts without copies: tokens are read where they are, activations encoded as they are computed.

What is compared with is the same module whose products are given `permute(tokens, routes)` and the
activation's result: made by taking rows and activations away from `grouped_product`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import hybridq
from hybridq.moe import ExpertsLayout, convert_experts
from hybridq.nn import GroupedModule
from hybridq.nn.autograd import apply, take_rows
from own_experts import HIDDEN, OwnExperts, routing

RECIPES = [
    *("mxfp8", "nvfp4", "fp8_current", "fp8_delayed", "fp8_block", "mxfp8_fwd_nvfp4_bwd"),
    "mxfp8_fwd_high_precision_bwd",
]


@pytest.fixture
def sorted_first(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Lets every grouped product take sorted copies from now on."""
    plain = GroupedModule.grouped_product

    def product(self, recipe, name, bias, x, offsets, rows=None, activation=None, arriving=None):
        x = x if rows is None else take_rows(x, rows)
        x = x if activation is None else apply(x, activation, None, None)
        return plain(self, recipe, name, bias, x, offsets)

    return lambda: monkeypatch.setattr(GroupedModule, "grouped_product", product)


def case(dtype: torch.dtype = torch.bfloat16, **options):
    """A module and its arguments: an expert without tokens, one with one, tokens of no expert."""
    torch.manual_seed(3)
    layout = ExpertsLayout(**options)
    module = convert_experts(OwnExperts(layout, dtype), layout)
    indices, weights = routing(37, seed=2)
    indices = torch.where(indices == 1, 5, indices)
    indices[0, 0] = 1
    indices[indices == 3] = 4
    x = torch.randn(37, HIDDEN).to(dtype).requires_grad_()
    return module, (x, indices, weights.to(dtype).requires_grad_())


def trained(module, args, recipe, call=None) -> list[torch.Tensor]:
    made = []
    for step in range(2):  # a second one: of delayed scaling with the amaxes of the first
        module.zero_grad()
        for one in args:
            one.grad = None
        torch.manual_seed(step)
        with hybridq.autocast(recipe=recipe):
            y = (call or module)(*args)
        y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(9)).to(y.dtype))
        made += [y.detach(), args[0].grad, args[2].grad, *(p.grad for p in module.parameters())]
    return made


def equal(got, want) -> None:
    assert len(got) == len(want)
    for number, (one, other) in enumerate(zip(got, want, strict=True)):
        assert (one is other is None) or torch.equal(one, other), number


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_bits_are_those_of_sorted_copies(recipe: str, sorted_first) -> None:
    module, args = case()
    got = trained(module, args, recipe)
    sorted_first()
    module, args = case()
    equal(got, trained(module, args, recipe))


@pytest.mark.parametrize(
    "options",
    [
        {"is_transposed": True, "is_concatenated": False},
        {"has_gate": False, "activation": "relu", "router_weights": "input"},
        {"router_weights": "none"},
    ],
    ids=str,
)
def test_other_layouts(options, sorted_first) -> None:
    module, args = case(**options)
    got = trained(module, args, "mxfp8")
    sorted_first()
    module, args = case(**options)
    equal(got, trained(module, args, "mxfp8"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_that_autocast_casts(dtype: torch.dtype, sorted_first) -> None:
    """Gradients are rounded to the tokens' dtype where they were."""

    def run() -> list[torch.Tensor]:
        module, args = case()
        args = (args[0].detach().to(dtype).requires_grad_(), *args[1:])
        cast = torch.float16 if dtype == torch.bfloat16 else torch.bfloat16
        with torch.autocast("cpu", cast):
            return trained(module, args, "mxfp8")

    got = run()
    sorted_first()
    equal(got, run())


def test_recomputed_it_has_the_same_bits() -> None:
    module, args = case()
    want = trained(module, args, "mxfp8")
    again = trained(module, args, "mxfp8", lambda *a: checkpoint(module, *a, use_reentrant=False))
    equal(again, want)


class Seen(TorchDispatchMode):
    """Shapes of the results of every operation, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, torch.Size, torch.dtype]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(one, torch.Tensor):
                self.made.append((str(func), one.shape, one.dtype))
        return out


def test_no_copy_of_tokens_or_of_the_hidden_values_is_made() -> None:
    module, args = case()
    with Seen() as seen, hybridq.autocast(recipe="mxfp8"):
        module(*args)
    rows = args[1].numel()
    copies = [
        name for name, shape, dtype in seen.made if shape[:1] == (rows,) and dtype.itemsize == 2
    ]
    assert copies == ["hybridq.grouped_gemm.default"] * 2


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_more_is_saved(recipe: str, sorted_first) -> None:
    def nbytes() -> int:
        module, args = case()
        saved: dict[int, int] = {}

        def pack(one: torch.Tensor) -> torch.Tensor:
            saved[one.data_ptr()] = one.untyped_storage().nbytes()
            return one

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one)
        with hooks, hybridq.autocast(recipe=recipe):
            module(*args)
        return sum(saved.values())

    got = nbytes()
    sorted_first()
    assert 0 < got <= nbytes()
