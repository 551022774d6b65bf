"""The largest score of each head, which QK-clip asks for, against scores made one by one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import hybridq.te as te

_HEADS, _GROUPS, _FEATURES = 4, 2, 16


def tokens(length: int, heads: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(length, 2, heads, _FEATURES, generator=made).to(dtype)


def largest(
    query: torch.Tensor, key: torch.Tensor, sees: Any, scale: float = 0.25, added: Any = None
) -> torch.Tensor:
    """Return the largest scores of all pairs that `sees(sequence, query, key)` allows."""
    found = torch.full((_HEADS,), -torch.inf)
    for b in range(query.shape[1]):
        for head in range(_HEADS):
            for i in range(query.shape[0]):
                for j in range(key.shape[0]):
                    if sees(b, i, j):
                        one = query[i, b, head].double() @ key[j, b, head // 2].double() * scale
                        one = one + (0 if added is None else added[0, head, i, j].double())
                        found[head] = max(found[head], one.float())
    return found


@pytest.mark.parametrize(
    ("options", "sees"),
    [
        ({"attn_mask_type": "no_mask"}, lambda b, i, j: True),
        ({"attn_mask_type": "causal"}, lambda b, i, j: j <= i),
        ({"attn_mask_type": "causal", "window_size": (2, 0)}, lambda b, i, j: i - 2 <= j <= i),
        ({"softmax_type": "learnable"}, lambda b, i, j: j <= i),
        ({"softmax_scale": 3.0}, lambda b, i, j: j <= i),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("again", [False, True], ids=["saved", "computed-again"])
def test_it_is_the_largest_of_all_scores_that_are_seen(
    options: dict[str, Any], sees: Any, dtype: torch.dtype, again: bool
) -> None:
    query, key, value = (tokens(7, n, n + i, dtype) for i, n in enumerate((4, 2, 2)))
    module = te.DotProductAttention(_HEADS, _FEATURES, _GROUPS, return_max_logit=True, **options)
    if module.softmax_offset is not None:
        module.softmax_offset.data.fill_(99.0)  # no score
    plain = copy.deepcopy(module)
    plain.return_max_logit = False
    made = []
    for one in (module, plain):
        given = [x.clone().requires_grad_() for x in (query, key, value)]
        y = one(*given, checkpoint_core_attention=again)
        y, found = y if one is module else (y, None)
        y.square().sum().backward()
        made.append([y, *(x.grad for x in given)])
        if found is not None:
            assert found.dtype == torch.float32 and not found.requires_grad
            want = largest(query, key, sees, options.get("softmax_scale", 0.25))
            torch.testing.assert_close(found, want, rtol=1e-6, atol=1e-6)
    assert all(map(torch.equal, *made))


def test_a_bias_is_part_of_a_score() -> None:
    query, key, value = (tokens(5, n, n) for n in (4, 2, 2))
    bias = torch.randn(1, _HEADS, 5, 5, generator=torch.Generator().manual_seed(9))
    module = te.DotProductAttention(_HEADS, _FEATURES, _GROUPS, return_max_logit=True)
    _, found = module(
        query, key, value, core_attention_bias_type="post_scale_bias", core_attention_bias=bias
    )
    torch.testing.assert_close(found, largest(query, key, lambda b, i, j: j <= i, added=bias))


def test_padding_has_no_score() -> None:
    """Packed sequences, which are computed apart or as a padded batch, and a batch with lengths."""
    lengths = (3, 6)
    query, key, value = (tokens(6, n, n) for n in (4, 2, 2))
    for one in (query, key):
        one[3:, 0] = 50.0  # behind the end of the first sequence
    starts = torch.tensor([0, 3, 9], dtype=torch.int32)

    def sees(b: int, i: int, j: int) -> bool:
        return i < lengths[b] and j <= i

    want = largest(query, key, sees)
    made = {"attn_mask_type": "padding_causal", "return_max_logit": True}
    module = te.DotProductAttention(_HEADS, _FEATURES, _GROUPS, **made)
    both = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts}
    _, found = module(query, key, value, **both)
    torch.testing.assert_close(found, want)
    packed = [torch.cat([x[:n, b] for b, n in enumerate(lengths)]) for x in (query, key, value)]
    for recipe in (None, te.common.recipe.Float8CurrentScaling(fp8_dpa=True)):
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            _, found = module(*packed, qkv_format="thd", **both)
        torch.testing.assert_close(found, want)


def test_compiled_code_returns_it_too() -> None:
    module = te.DotProductAttention(_HEADS, _FEATURES, _GROUPS, return_max_logit=True)
    query, key, value = (tokens(5, n, n) for n in (4, 2, 2))
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for one, want in zip(compiled(query, key, value), module(query, key, value), strict=True):
        torch.testing.assert_close(one, want)
