"""What a grouped product makes of a list of planes: kept until any of them changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

import hybridq
from cuda_costs import Costs, backward, counted, fake_gpu
from hybridq.kernels import folded_groups, reference_backend
from hybridq.kernels.choice import BlockSide, GroupedArgs, GroupedOperand, Operand
from hybridq.kernels.inputs import OperandCache, operand_cache
from hybridq.kernels.ragged import product_by_group, stacked
from hybridq.nn.weights import weight_cache
from hybridq.reference import fold_plane

GROUPS, ROWS, COLS = 3, 8, 256


def _list() -> tuple[GroupedOperand, list[OperandCache]]:
    planes = [hybridq.quantize(torch.randn(ROWS, COLS), "mxfp8").rowwise for _ in range(GROUPS)]
    buffers = [buffer.clone() for plane in planes for buffer in plane.tensors]
    operand = GroupedOperand(buffers, planes[0].spec, ROWS, COLS, is_stack=True, is_list=True)
    return operand, [OperandCache(at_once=True) for _ in planes]


@pytest.fixture
def folds(monkeypatch) -> list[Operand]:
    """Every operand that is folded; a product returns the sides that it was given."""
    monkeypatch.setattr(folded_groups, "multiply_sides", lambda *sides: sides[:2])
    return []


def _multiply(b: GroupedOperand, folds: list[Operand]) -> BlockSide:
    """Return the second side of the product of b with some tokens."""

    def fold(operand: Operand) -> object:
        folds.append(operand)
        return fold_plane(operand.buffers, operand.spec, operand.rows, operand.cols)

    x = hybridq.quantize(torch.randn(16, COLS), "mxfp8").rowwise
    a = GroupedOperand(list(x.tensors), x.spec, 16, COLS)
    args = GroupedArgs(torch.tensor([4, 9, 16]).int(), 16, None, None, None, torch.bfloat16)
    return folded_groups.multiply_groups(a, b, args, fold)[1]


def test_a_folded_stack_is_kept_with_its_planes(folds: list[Operand], monkeypatch) -> None:
    b, caches = _list()
    whole = stacked(b)
    flat = [buffer.flatten(0, 1) for buffer in whole.buffers]
    want = fold_plane(flat, b.spec, GROUPS * ROWS, COLS)

    def multiply() -> BlockSide:
        side = _multiply(replace(b, cache=caches[0].of_stack(caches)), folds)
        assert torch.equal(side.scale, want.scale.t()) and torch.equal(side.codes, want.codes)
        return side

    first, second = multiply(), multiply()
    assert len(folds) == 3 and second.codes is first.codes  # tokens twice, the stack once
    assert caches[0].nbytes >= GROUPS * ROWS * COLS and caches[1].nbytes == 0
    monkeypatch.setattr(operand_cache, "stream_of", lambda _: 7)
    assert multiply().codes is not first.codes  # another stream
    monkeypatch.undo()
    monkeypatch.setattr(folded_groups, "multiply_sides", lambda *sides: sides[:2])
    b.buffers[-2].add_(0)  # the same codes, written
    assert multiply().codes is not first.codes
    caches[1] = OperandCache(at_once=True)  # another plane, which may lie where the old one did
    folds.clear()
    multiply()
    assert len(folds) == 2
    caches[0].forget()
    assert caches[0].nbytes == 0 and not caches[0].tensors


def test_what_nobody_keeps_is_stacked_and_folded_each_time(folds: list[Operand]) -> None:
    b, caches = _list()
    caches[2] = operand_cache.NoOperandCache()
    for kept in (None, caches[0].of_stack(caches)):
        folds.clear()
        for _ in range(3):
            _multiply(replace(b, cache=kept), folds)
        assert len(folds) == 6


def test_a_backend_that_stacks_nothing_gets_a_stack() -> None:
    b, caches = _list()
    b, seen = replace(b, cache=caches[0].of_stack(caches)), []

    def grouped(a: GroupedOperand, given: GroupedOperand, args: GroupedArgs) -> torch.Tensor:
        seen.append(given)
        return torch.zeros(16, ROWS)

    for stacks in (False, True):
        ops = {"grouped_gemm": grouped}
        backend = replace(reference_backend.REFERENCE, ops=ops, stacks_lists=stacks)
        args = GroupedArgs(torch.tensor([4, 9, 16]).int(), 16, None, None, None, torch.float32)
        a = GroupedOperand([torch.zeros(16, COLS)], b.spec, 16, COLS)
        product_by_group(lambda *_, own=backend: own, a, b, args)
    assert [one.is_list for one in seen] == [False, True]
    assert seen[0].cache is None and seen[0].buffers[0].shape == (GROUPS, ROWS, COLS)


@pytest.fixture
def costs(monkeypatch) -> Iterator[list[Costs]]:
    with fake_gpu(monkeypatch) as made:
        yield made


def test_a_layer_folds_cached_weights_once_in_a_step(costs, monkeypatch) -> None:
    """Of G weights one fold each way; in the next microbatch of tokens and gradients alone."""

    def product(a: BlockSide, b: BlockSide, args: GroupedArgs, is_stack: bool) -> torch.Tensor:
        return torch.empty(args.tokens, b.rows, dtype=args.out_dtype, device=a.codes.device)

    monkeypatch.setattr(folded_groups, "multiply_sides", product)
    monkeypatch.setattr(weight_cache, "is_plain", lambda _: True)
    layer = hybridq.GroupedLinear(GROUPS, 256, 512, bias=False, device="meta", dtype=torch.bfloat16)
    for name, parameter in list(layer.named_parameters()):
        made = torch.empty(parameter.shape, dtype=parameter.dtype, device="cuda")
        setattr(layer, name, torch.nn.Parameter(made))
    x = torch.empty(1536, 256, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    sizes = torch.full((GROUPS,), 512, dtype=torch.int32, device="cuda")
    found = []
    for is_first in (True, False, True):
        with hybridq.autocast(recipe="mxfp8"):
            y, forward = counted(costs, lambda first=is_first: layer(x, sizes, first))
        costs.append(Costs())
        dy = torch.empty(y.shape, dtype=y.dtype, device="cuda")
        _, back = counted(costs, lambda dy=dy: backward(dy))
        found.append((forward.kernels["fold"], back.kernels["fold"]))
    assert found == [(2, 2), (1, 1), (2, 2)]
