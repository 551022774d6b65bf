"""Prepared forwards and backwards of groups, in the emulator: their products' operands, bit by bit.

What multiplies is a stand-in that notes what it was given: by the prepared way, and by the general
one, which encodes, stacks, folds and lays down by operations of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch

import emulated
import hybridq
import kernel_cases as cases
from hybridq.formats import PlaneSpec
from hybridq.kernels import folded_backend, folded_groups
from hybridq.kernels.choice import BlockSide, GroupedArgs, GroupedOperand, OpQuery
from hybridq.kernels.choice.registry import register_backend, unregister_backend
from hybridq.kernels.inputs import Chip
from hybridq.kernels.operators import GpuGroupedPlan
from hybridq.kernels.ragged import capacity, group_ends, padded_offsets
from hybridq.nn.autograd import grouped_function, prepared_groups, product_operands
from hybridq.nn.autograd.grouped_function import GroupedCall, _forward
from hybridq.nn.autograd.grouped_products import Layout
from hybridq.nn.autograd.grouped_tokens import encode_tokens
from hybridq.nn.autograd.prepared_groups import PreparedGroups, PreparedGroupsBackward
from hybridq.nn.autograd.product_operands import plan_of_products
from hybridq.nn.autograd.slot_encoder import SlotEncoder
from hybridq.recipes import Plan, bind

MODULE = emulated.load()
if MODULE is None:
    pytest.skip("the emulated kernels are not built (make emulation)", allow_module_level=True)

BACKEND = emulated.make_backend(MODULE)
TOKENS, OUTER, GROUPS = 165, 128, 4
INNER = 256
OFFSETS = torch.tensor([0, 37, 150, 161], dtype=torch.int32)
HOPPER = Chip("cuda", (9, 0), (13, 0), (2, 11))


class Product(NamedTuple):
    """What a product of groups was given."""

    a: BlockSide
    b: BlockSide
    args: GroupedArgs
    is_stack: bool


@pytest.fixture
def products(seed: int, monkeypatch) -> Iterator[list[Product]]:
    MODULE.set_seed(seed)
    seen: list[Product] = []

    def product(*given: object) -> torch.Tensor:
        seen.append(Product(*given))
        a, b, args, is_stack = seen[-1]
        shape = (args.tokens, b.rows) if is_stack else (GROUPS, a.rows, b.rows)
        return torch.zeros(shape, dtype=args.out_dtype)

    def planned(a: str, b: str, dtype, precision, sizes, groups, is_stack, device):
        left, right = (PlaneSpec.parse(text).resolve(dtype) for text in (a, b))
        depth = (groups[0] * groups[1], *sizes) if is_stack else (*sizes, 128 * groups[0])
        own = ("grouped_gemm", "cuda", dtype, left, right, precision, depth, HOPPER)
        average = groups[1] if is_stack else None
        query = OpQuery(*own, groups=groups[0], tokens_per_group=average)
        run = folded_groups.planned_groups(query, None)  # nothing is left to the general path
        return GpuGroupedPlan(left, right, run)

    monkeypatch.setattr(folded_groups, "multiply_sides", product)
    monkeypatch.setattr(folded_groups, "_by_core", lambda chip: product)
    monkeypatch.setattr(prepared_groups, "gpu_grouped_plan", planned)
    register_backend(BACKEND)
    with hybridq.backend("emulated"), torch.no_grad():
        yield seen
    unregister_backend("emulated")


def _fold(operand) -> object:
    return BACKEND.ops["fold"](operand.buffers, operand.spec, operand.rows, operand.cols, 1)


def _plans(recipe: str, monkeypatch) -> tuple[Plan, Plan]:
    """The plan of a module, and that in which Hopper's products get their planes."""
    plan = bind(hybridq.recipe(recipe), "", "grouped_linear")

    def wanted(query: OpQuery) -> tuple[PlaneSpec, PlaneSpec]:
        assert query.op == "grouped_gemm" and query.groups == GROUPS
        return folded_backend._operands(query)

    monkeypatch.setattr(product_operands, "operand_specs", wanted)
    sizes = (TOKENS, INNER, OUTER)
    own = plan_of_products(plan, sizes, torch.bfloat16, "cuda", HOPPER, False, GROUPS)
    assert (own == plan) == (recipe == "fp8_current")  # whose scales lie in no way of their own
    return plan, own


def _assert_side(mine: BlockSide, theirs: BlockSide, what: str) -> None:
    cases.assert_same(mine.codes, theirs.codes, f"codes of {what}")
    rows = slice(theirs.codes.shape[0]) if theirs.per == "row" else slice(None)
    cases.assert_same(mine.scale[..., rows], theirs.scale[..., rows], f"scales of {what}")
    if mine.per == "row":
        assert mine.scale.is_contiguous() and mine.scale.shape[1] % 4 == 0
    assert mine[2:] == theirs[2:]


def _assert_product(mine: Product, theirs: Product, what: str) -> None:
    _assert_side(mine.a, theirs.a, f"a, {what}")
    _assert_side(mine.b, theirs.b, f"b, {what}")
    cases.assert_same(mine.args.offsets, group_ends(OFFSETS, TOKENS), what)
    for name in ("bias", "padded"):
        own, other = (getattr(one.args, name) for one in (mine, theirs))
        assert (own is None) == (other is None) and (own is None or torch.equal(own, other))
    assert mine.args.tokens == theirs.args.tokens and mine.is_stack == theirs.is_stack


def _general(a: GroupedOperand, b: GroupedOperand, args: GroupedArgs) -> None:
    folded_groups.multiply_groups(a, b, args, _fold)


def _stacked(buffers: list[torch.Tensor], count: int) -> list[torch.Tensor]:
    return [torch.stack(buffers[i::count]) for i in range(count)]


@pytest.mark.parametrize(
    ("recipe", "inner"), [("mxfp8", 144), ("fp8_block", 256), ("fp8_current", 144)]
)
@pytest.mark.parametrize("is_indexed", [False, True])
def test_a_prepared_forward_and_backward_of_groups(
    recipe: str, inner: int, is_indexed: bool, products: list[Product], monkeypatch
) -> None:
    plan, own = _plans(recipe, monkeypatch)
    x = cases.matrix(TOKENS, inner, torch.bfloat16, 1, "normal")
    weights = [cases.matrix(OUTER, inner, torch.bfloat16, 2 + g, "normal") for g in range(GROUPS)]
    dy = cases.matrix(TOKENS, OUTER, torch.bfloat16, 9, "normal")
    bias = torch.randn(GROUPS, OUTER).bfloat16()
    index = torch.randperm(TOKENS) if is_indexed else None
    features, groups, device = (inner, OUTER), (GROUPS, 32), x.device

    ready = PreparedGroups(own, features, groups, (True, True), x.dtype, device)
    assert ready.takes_tokens
    y, x_col, w_cols = ready.forward(x, OFFSETS, weights, bias, index)
    assert y.shape == (TOKENS, OUTER)
    back = PreparedGroupsBackward(own, features, groups, True, x.dtype, device)
    (dy_row, dy_col), lie = back.encode(dy, OFFSETS)
    assert back.dgrad(dy_row, w_cols, lie, TOKENS).shape == (TOKENS, inner)
    assert back.wgrad(dy_col, x_col, lie, TOKENS).shape == (GROUPS, OUTER, inner)
    found = list(products)
    products.clear()

    # The general path: planes as the recipe has them, a stack of copies, and folds.
    moved = x if index is None else x[index]
    made = encode_tokens(moved, OFFSETS, SlotEncoder(plan.input, "input"), True, True)
    pairs = [SlotEncoder(plan.weight, "weight").encode(w, True, True) for w in weights]
    grads = encode_tokens(dy, OFFSETS, SlotEncoder(plan.grad_output, "grad_output"), True, True)
    rows, cols = ([b for pair in pairs for b in pair[i]] for i in range(2))
    specs = {
        name: [PlaneSpec.parse(p.spec).resolve(x.dtype) for p in (slot.row, slot.col)]
        for name, slot in (("x", plan.input), ("w", plan.weight), ("dy", plan.grad_output))
    }
    room, ends = capacity(TOKENS, GROUPS), group_ends(OFFSETS, TOKENS)

    def padded(buffers: list[torch.Tensor], spec: PlaneSpec, size: int) -> GroupedOperand:
        return GroupedOperand(buffers, spec, size, room, is_padded=True, by_group=spec.needs_amax)

    def stack(buffers: list[torch.Tensor], spec: PlaneSpec, *size: int) -> GroupedOperand:
        return GroupedOperand(_stacked(buffers, 2), spec, *size, is_stack=True)

    args = GroupedArgs(ends, TOKENS, None, bias, None, x.dtype)
    of_group = specs["x"][0].needs_amax
    _general(GroupedOperand(made[0], specs["x"][0], TOKENS, inner, by_group=of_group),
             stack(rows, specs["w"][0], OUTER, inner), args)  # fmt: skip
    args = GroupedArgs(ends, TOKENS, None, None, None, x.dtype)
    _general(GroupedOperand(grads[0], specs["dy"][0], TOKENS, OUTER, by_group=of_group),
             stack(cols, specs["w"][1], inner, OUTER), args)  # fmt: skip
    args = GroupedArgs(ends, TOKENS, padded_offsets(OFFSETS, TOKENS), None, None, x.dtype)
    _general(padded(grads[1], specs["dy"][1], OUTER), padded(made[1], specs["x"][1], inner), args)
    for mine, theirs, what in zip(found, products, ("fprop", "dgrad", "wgrad"), strict=True):
        _assert_product(mine, theirs, what)
    # What is saved keeps nothing alive that dies with the forward.
    saved = {one.untyped_storage()._cdata for one in (*x_col, *w_cols)}
    assert len(saved) == 2 and saved.isdisjoint(
        {one.untyped_storage()._cdata for one in (found[0].a.codes, found[0].b.codes)}
    )


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_block"])
def test_a_gradient_that_no_tile_kernel_reads_has_the_same_planes(
    recipe: str, products: list[Product], monkeypatch
) -> None:
    """One that is expanded, as of a sum: operators make the planes, in the plan's specs."""
    del products
    _, own = _plans(recipe, monkeypatch)
    ends = torch.tensor([0, 37, 150, TOKENS], dtype=torch.int32)  # every token is of a group
    wide = cases.matrix(1, OUTER, torch.bfloat16, 9, "normal").expand(TOKENS, OUTER)
    for dy in (wide, cases.matrix(OUTER, TOKENS, torch.bfloat16, 9, "normal").t()):
        back = PreparedGroupsBackward(own, (INNER, OUTER), (GROUPS, 32), True, dy.dtype, dy.device)
        made = back.encode(dy, ends)
        slot = SlotEncoder(own.grad_output, "grad_output")
        planes = made[0] if made else encode_tokens(dy, ends, slot, True, True)
        want = back.encode(dy.contiguous(), ends)[0]
        for mine, theirs in zip((*planes[0], *planes[1]), (*want.row, *want.col), strict=True):
            cases.assert_same(mine.contiguous(), theirs.contiguous(), recipe)


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8_current", "mxfp8", "fp8_block"])
def test_weights_of_any_recipe_are_one_stack(recipe: str, products: list[Product]) -> None:
    """Where tokens need a statistic of their group, the weights alone are prepared."""
    del products
    plan = bind(hybridq.recipe(recipe), "", "grouped_linear")
    weights = [cases.matrix(OUTER, INNER, torch.bfloat16, 2 + g, "normal") for g in range(GROUPS)]
    own = ((INNER, OUTER), (GROUPS, 32), (True, True), torch.bfloat16, weights[0].device)
    ready = PreparedGroups(plan, *own)
    assert ready.takes_weights
    assert ready.takes_tokens == (recipe != "nvfp4")
    row, col = ready.weights(weights)
    encoder = SlotEncoder(plan.weight, "weight")
    pairs = [encoder.encode(w, True, True) for w in weights]
    for mine, i in ((row, 0), (col, 1)):
        want = _stacked([b for pair in pairs for b in pair[i]], len(mine))
        for j, (one, other) in enumerate(zip(mine, want, strict=True)):
            cases.assert_same(one.contiguous(), other, f"{recipe}: plane {i}, buffer {j}")


@pytest.mark.parametrize("recipe", ["nvfp4"])
def test_a_forward_with_a_stack_has_the_bits_of_one_with_a_list(
    recipe: str, products: list[Product], monkeypatch
) -> None:
    del products
    plan = bind(hybridq.recipe(recipe), "", "grouped_linear")
    x = cases.matrix(TOKENS, INNER, torch.bfloat16, 1, "normal")
    weights = [cases.matrix(OUTER, INNER, torch.bfloat16, 2 + g, "normal") for g in range(GROUPS)]
    seeds = torch.arange(GROUPS) if plan.is_stochastic else None
    call = GroupedCall(Layout(GROUPS, False, False, False, (INNER, OUTER)), plan, seeds=seeds)
    want = _forward(x, OFFSETS, weights, call, (True, True))[0]
    own = ((INNER, OUTER), (GROUPS, 32), (True, True), x.dtype, x.device)
    ready = PreparedGroups(plan, *own)
    monkeypatch.setattr(grouped_function, "_prepared", lambda *_: ready)
    got = _forward(x, OFFSETS, weights, call, (True, True))
    assert got[2].rows[0].dim() == 3
    cases.assert_same(got[0], want, recipe)
