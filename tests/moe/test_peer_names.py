"""Permutations under a peer's names, against plain indexing."""

from __future__ import annotations

import pytest
import torch

from hybridq.moe import (
    moe_permute,
    moe_permute_and_pad_with_probs,
    moe_permute_with_probs,
    moe_sort_chunks_by_index,
    moe_sort_chunks_by_index_with_probs,
    moe_unpermute,
)


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


def routed(tokens: int = 20, experts: int = 6) -> tuple[torch.Tensor, torch.Tensor, list]:
    """A mask with a token of no expert, weights, and the pairs (expert, token) in order."""
    torch.manual_seed(0)
    mask = (torch.rand(tokens, experts) < 0.4).int()
    mask[3] = 0
    mask[:, 2] = 0  # an expert without tokens
    probs = torch.rand(tokens, experts, requires_grad=True)
    pairs = [(e, t) for e in range(experts) for t in range(tokens) if mask[t, e]]
    return mask, probs, pairs


def test_weights_go_with_their_rows() -> None:
    mask, probs, pairs = routed()
    x = torch.randn(20, 8, requires_grad=True)
    rows, weights, ids = moe_permute_with_probs(x, probs, mask)
    assert torch.equal(rows, x[[t for _, t in pairs]])
    assert torch.equal(weights, torch.stack([probs[t, e] for e, t in pairs]))
    each = torch.randn(len(pairs))
    (weights * each).sum().backward()
    wanted = torch.zeros_like(probs)
    for (e, t), value in zip(pairs, each, strict=True):
        wanted[t, e] = value
    assert torch.equal(probs.grad, wanted)
    merged = moe_unpermute(rows * weights[:, None], ids)
    dense = x * (probs * mask).sum(1, keepdim=True)
    assert torch.allclose(merged, dense, rtol=1e-5, atol=1e-6)
    # More rows than go to an expert: their weight is zero.
    most = mask.sum(1).max() * 20
    more, weights, _ = moe_permute_with_probs(x, probs, mask, int(most))
    assert more.shape[0] == most and torch.equal(more[: len(pairs)], rows)
    assert weights[len(pairs) :].eq(0).all() and weights[: len(pairs)].gt(0).all()


@pytest.mark.parametrize("align", [1, 4, 16])
def test_rows_are_padded_to_a_multiple(align) -> None:
    mask, probs, pairs = routed()
    x = torch.randn(20, 8, requires_grad=True)
    sizes = mask.sum(0)
    rows, weights, ids, offsets, target = moe_permute_and_pad_with_probs(
        x, probs, mask, sizes, align
    )
    assert (offsets is None) == (align == 1) and (target % align == 0).all()
    assert rows.shape[0] == weights.shape[0] == target.sum()
    at = 0
    for e, (size, all_rows) in enumerate(zip(sizes.tolist(), target.tolist(), strict=True)):
        own = [t for f, t in pairs if f == e]
        assert torch.equal(rows[at : at + size], x[own])
        assert torch.equal(weights[at : at + size], probs[own, e])
        assert not rows[at + size : at + all_rows].any()
        assert not weights[at + size : at + all_rows].any()
        if offsets is not None:
            assert at == sizes[:e].sum() + offsets[e]
        at += all_rows
    back = moe_unpermute(rows, ids, probs, pad_offsets=offsets)
    dense = x * (probs * mask).sum(1, keepdim=True)
    assert torch.allclose(back, dense, rtol=1e-5, atol=1e-6)
    own = torch.autograd.grad(back.sum() + weights.sum(), (x, probs))
    plain = torch.autograd.grad(dense.sum() + (probs * mask).sum(), (x, probs))
    for mine, wanted in zip(own, plain, strict=True):
        assert torch.allclose(mine, wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(moe_unpermute(rows, ids, probs=probs), back)  # its older name


def test_chunks_are_sorted_with_their_weights() -> None:
    x, probs = torch.randn(10, 3), torch.rand(10, requires_grad=True)
    sizes, order = torch.tensor([2, 0, 5, 3]), torch.tensor([3, 2, 0, 1])
    rows, weights = moe_sort_chunks_by_index_with_probs(x, probs, sizes, order)
    assert torch.equal(rows, moe_sort_chunks_by_index(x, sizes, order))
    chunks = probs.split(sizes.tolist())
    assert torch.equal(weights, torch.cat([chunks[i] for i in order.tolist()]))
    (weights * torch.arange(10.0)).sum().backward()
    assert probs.grad.tolist() == [8, 9, 3, 4, 5, 6, 7, 0, 1, 2]


def test_bad_input_is_told() -> None:
    x = torch.randn(4, 2)
    with pytest.raises(ValueError, match=r"map_type must be one of mask, index, got 'indx'"):
        moe_permute(x, torch.zeros(4, 1), map_type="indx")
    with pytest.raises(ValueError, match=r"inp must be \[3, H\]"):
        moe_permute(x, torch.zeros(3, 1, dtype=torch.int64), map_type="index")
    rows, ids = moe_permute(x, torch.zeros(4, 1, dtype=torch.int64), map_type="index")
    with pytest.raises(ValueError, match=r"inp must be \[4, H\], as many rows"):
        moe_unpermute(rows[:2], ids, map_type="index")
    with pytest.raises(ValueError, match="at most 4, as many as the map has routes, got 5"):
        moe_permute(x, torch.zeros(4, 1, dtype=torch.int64), 5, map_type="index")
    mask, probs = torch.ones(4, 3), torch.rand(4, 3)
    with pytest.raises(ValueError, match=r"probs must be \(4, 3\), as the mask is"):
        moe_permute_with_probs(x, probs[:, :2], mask)
    with pytest.raises(ValueError, match="align_size must be 1 or more, got 0"):
        moe_permute_and_pad_with_probs(x, probs, mask, mask.sum(0), 0)
    with pytest.raises(ValueError, match=r"tokens_per_expert must be \[4, 4, 4\]"):
        moe_permute_and_pad_with_probs(x, probs, mask, torch.tensor([4, 4, 3]), 8)
    with pytest.raises(ValueError, match="pad_offsets must be None of a map without padding"):
        moe_unpermute(rows, ids, map_type="index", pad_offsets=torch.zeros(1))
    with pytest.raises(ValueError, match="probs must be None beside merging_probs"):
        moe_unpermute(rows, ids, probs, map_type="index", probs=probs)
    with pytest.raises(ValueError, match=r"probs must be \[4\], a weight for each row"):
        one = torch.tensor([4]), torch.tensor([0])
        moe_sort_chunks_by_index_with_probs(x, probs, *one)
    with pytest.raises(ValueError, match=r"must be \[n\] both"):
        moe_sort_chunks_by_index(x, torch.tensor([4]), torch.tensor([0, 1]))
