"""Attention of one sequence in FP64, by its formula, for tests of attention modules."""

from __future__ import annotations

import math

import torch


def attention(
    query,
    key,
    value,
    sees=lambda i, j: True,
    scale=None,
    bias=None,
    extra=None,
):
    """Return `[queries, heads * features]` of `[queries, heads, features]`, in FP64.

    `sees(i, j)` says whether query i sees key j, `bias` `[heads, queries, keys]` is added to scaled
    scores, `extra` `[heads]` to the denominator. A query that sees nothing gives zeros.
    """
    q, k, v = (one.double() for one in (query, key, value))
    heads, repeat = q.shape[1], q.shape[1] // k.shape[1]
    scale = 1 / math.sqrt(q.shape[2]) if scale is None else scale
    seen = torch.tensor([[sees(i, j) for j in range(len(k))] for i in range(len(q))]).bool()
    made = []
    for head in range(heads):
        own = head // repeat
        scores = q[:, head] @ k[:, own].T * scale
        if bias is not None:
            scores = scores + bias[head].double()
        weights = scores.exp() * seen.view(scores.shape)
        below = weights.sum(-1, keepdim=True) + (0.0 if extra is None else extra[head])
        made.append(weights / torch.where(below == 0, 1.0, below) @ v[:, own])
    return torch.cat(made, -1)
