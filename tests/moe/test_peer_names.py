"""Permutations under a peer's names, against plain indexing."""

from __future__ import annotations

import pytest
import torch

from hybridq.moe import moe_permute, moe_sort_chunks_by_index, moe_unpermute


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["mask", "index"])
def test_rows_go_by_expert_and_come_back_weighted(kind, dtype) -> None:
    torch.manual_seed(0)
    tokens, experts, top = 20, 6, 3
    x = torch.randn(tokens, 8, dtype=dtype, requires_grad=True)
    index = torch.rand(tokens, experts).topk(top).indices
    mask = torch.zeros(tokens, experts, dtype=torch.int32).scatter_(1, index, 1)
    if kind == "mask":
        mask[3] = 0  # a token without experts, and one with fewer
        mask[5, mask[5].nonzero()[0]] = 0
    probs = torch.rand(tokens, experts, dtype=dtype)
    given, weights = (mask, probs) if kind == "mask" else (index, probs.gather(1, index))
    weights = weights.detach().requires_grad_()
    rows, ids = moe_permute(x, given, map_type=kind)
    pairs = [(e, t) for e in range(experts) for t in range(tokens) if mask[t, e]]
    assert torch.equal(rows, x[[t for _, t in pairs]])
    back = moe_unpermute(rows, ids, weights, map_type=kind)
    dense = probs * mask.to(dtype)
    wanted = (x.detach().float() * dense.float().sum(1, keepdim=True)).to(dtype)
    assert torch.allclose(back, wanted, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5)
    back.sum().backward()
    rtol = 2e-2 if dtype == torch.bfloat16 else 1e-5
    assert torch.allclose(x.grad[:, 0], dense.sum(1), rtol=rtol)
    each = x.detach().float().sum(1, keepdim=True)
    where = mask != 0 if kind == "mask" else torch.ones_like(index, dtype=torch.bool)
    found = weights.grad.float()
    assert torch.allclose(found[where], each.expand_as(found)[where], rtol=rtol, atol=0.05)
    plain = moe_unpermute(rows, ids, restore_shape=torch.Size((4, 5, 8)), map_type=kind)
    assert plain.shape == (4, 5, 8)


def test_chunks_are_sorted() -> None:
    x = torch.randn(10, 3, requires_grad=True)
    sizes, order = torch.tensor([2, 0, 5, 3], dtype=torch.int32), torch.tensor([3, 2, 0, 1])
    made = moe_sort_chunks_by_index(x, sizes, order)
    chunks = x.split(sizes.tolist())
    wanted = torch.cat([chunks[i] for i in order.tolist()])
    assert torch.equal(made, wanted)
    weight = torch.randn(10, 3)
    (made * weight).sum().backward()
    own, x.grad = x.grad.clone(), None
    (wanted * weight).sum().backward()
    assert torch.equal(own, x.grad)


def test_bad_input_is_told() -> None:
    x = torch.randn(4, 2)
    with pytest.raises(ValueError, match=r"map_type must be one of mask, index, got 'indx'"):
        moe_permute(x, torch.zeros(4, 1), map_type="indx")
    with pytest.raises(ValueError, match=r"inp must be \[3, H\]"):
        moe_permute(x, torch.zeros(3, 1, dtype=torch.int64), map_type="index")
    rows, ids = moe_permute(x, torch.zeros(4, 1, dtype=torch.int64), map_type="index")
    with pytest.raises(ValueError, match=r"inp must be \[4, H\], as many rows"):
        moe_unpermute(rows[:2], ids, map_type="index")
    with pytest.raises(ValueError, match=r"must be \[n\] both"):
        moe_sort_chunks_by_index(x, torch.tensor([4]), torch.tensor([0, 1]))
