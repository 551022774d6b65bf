"""Permutations under the names that Megatron's and Transformer Engine's users know.

Source: names, arguments and meanings: Transformer Engine's permutation functions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..errors import must_be_one_of
from ..nn.autograd import TokenRows, take_rows
from .permutation import Routes, permute, unpermute

__all__ = ["RowIdMap", "moe_permute", "moe_sort_chunks_by_index", "moe_unpermute"]

_MAP_TYPES = ("mask", "index")


class RowIdMap(NamedTuple):
    """What `moe_unpermute` wants to know of `moe_permute`; opaque to callers.

    Attributes:
        routes: of the tokens.
        experts: int64 `[T, k]`, the expert of each; as many as there are: none.
        rows: how many were returned.
    """

    routes: Routes
    experts: torch.Tensor
    rows: int


def moe_permute(
    inp: torch.Tensor,
    routing_map: torch.Tensor,
    num_out_tokens: int = -1,
    max_token_num: int = -1,
    map_type: str = "mask",
) -> tuple[torch.Tensor, RowIdMap]:
    """Return the tokens in the order of their experts, and what `moe_unpermute` takes.

    Tokens of one expert keep their order. `hybridq.moe.permute` is the same of routes.

    Args:
        inp: `[T, H]`.
        routing_map: of map type `"mask"` `[T, E]`, not zero where a token goes to an expert; of
            `"index"` `[T, k]`, the experts of each token.
        num_out_tokens: rows that are returned, the first ones; -1: all that go to an expert, which
            waits for the device if the map is a mask.
        max_token_num: not used: nothing is allocated ahead.
        map_type: `"mask"` or `"index"`.

    Returns:
        `[num_out_tokens, H]`, and a RowIdMap.

    Raises:
        ValueError: another map type, or a map of another number of tokens.

    Example:
        >>> import torch
        >>> from hybridq.moe import moe_permute, moe_unpermute
        >>> x = torch.arange(6.0).view(3, 2)
        >>> rows, row_id_map = moe_permute(x, torch.tensor([[1], [0], [1]]), map_type="index")
        >>> rows.tolist()
        [[2.0, 3.0], [0.0, 1.0], [4.0, 5.0]]
        >>> torch.equal(moe_unpermute(rows, row_id_map, map_type="index"), x)
        True
    """
    del max_token_num
    experts, count = _experts("moe_permute", routing_map, map_type)
    if inp.dim() != 2 or inp.shape[0] != routing_map.shape[0]:
        raise ValueError(
            f"moe_permute: inp must be [{routing_map.shape[0]}, H], as many tokens as the map has, "
            f"got {tuple(inp.shape)}"
        )
    routes = Routes.of(experts, count)
    rows = permute(inp, routes)
    size = num_out_tokens
    if size < 0:
        size = int(routes.offsets[-1]) if map_type == "mask" and count else rows.shape[0]
    return rows.narrow(0, 0, size), RowIdMap(routes, experts, size)


def moe_unpermute(
    inp: torch.Tensor,
    row_id_map: RowIdMap,
    merging_probs: torch.Tensor | None = None,
    restore_shape: torch.Size | None = None,
    map_type: str = "mask",
) -> torch.Tensor:
    """Return the sum of each token's rows, `[T, H]`: the way back of `moe_permute`.

    Summed in FP32 in the order of the map, and rounded once.

    Args:
        inp: `[num_out_tokens, H]`, rows in the order of the experts.
        row_id_map: of `moe_permute`.
        merging_probs: weights: of map type `"mask"` `[T, E]`, of `"index"` `[T, k]`; None: ones.
        restore_shape: of the result, where it is not `[T, H]`.
        map_type: as `moe_permute` was given.

    Raises:
        ValueError: another map type, or other rows than were returned.
    """
    if map_type not in _MAP_TYPES:
        raise ValueError(f"moe_unpermute: map_type {must_be_one_of(_MAP_TYPES, map_type)}")
    routes, experts, count = row_id_map
    if inp.dim() != 2 or inp.shape[0] != count:
        raise ValueError(
            f"moe_unpermute: inp must be [{count}, H], as many rows as moe_permute returned, got "
            f"{tuple(inp.shape)}"
        )
    weights = merging_probs
    if weights is not None and map_type == "mask":  # a token with fewer experts has none more
        padded = torch.nn.functional.pad(weights, (0, 1))
        weights = padded.gather(1, experts)
    rest = routes.order.shape[0] - count
    rows = torch.nn.functional.pad(inp, (0, 0, 0, rest)) if rest else inp
    made = unpermute(rows, weights, routes, inp.dtype)
    return made if restore_shape is None else made.view(restore_shape)


def moe_sort_chunks_by_index(
    inp: torch.Tensor, split_sizes: torch.Tensor, sorted_index: torch.Tensor
) -> torch.Tensor:
    """Return chunks of rows in another order.

    Args:
        inp: `[rows, H]`.
        split_sizes: integers `[n]`: rows of each chunk, which add up to `rows`.
        sorted_index: integers `[n]`: the chunk that stands at each place of the result.

    Raises:
        ValueError: sizes and order have different lengths.

    Example:
        >>> import torch
        >>> from hybridq.moe import moe_sort_chunks_by_index
        >>> x = torch.arange(4.0).view(4, 1)
        >>> sizes, order = torch.tensor([1, 2, 1]), torch.tensor([1, 2, 0])
        >>> moe_sort_chunks_by_index(x, sizes, order).flatten().tolist()
        [1.0, 2.0, 3.0, 0.0]
    """
    if split_sizes.shape != sorted_index.shape or split_sizes.dim() != 1:
        raise ValueError(
            "moe_sort_chunks_by_index: split_sizes and sorted_index must be [n] both, got "
            f"{tuple(split_sizes.shape)} and {tuple(sorted_index.shape)}"
        )
    sizes, order = (one.to(inp.device, torch.int64) for one in (split_sizes, sorted_index))
    place = torch.empty_like(order)
    place[order] = torch.arange(order.shape[0], dtype=torch.int64, device=inp.device)
    chunks = torch.repeat_interleave(place, sizes, output_size=inp.shape[0])
    routes = Routes.of(chunks[:, None], order.shape[0])
    return take_rows(inp, TokenRows(routes.order, routes.inverse))


def _experts(where: str, routing_map: torch.Tensor, map_type: str) -> tuple[torch.Tensor, int]:
    """Return the experts of each token, `[T, k]`, and how many experts there are at most."""
    if map_type not in _MAP_TYPES:
        raise ValueError(f"{where}: map_type {must_be_one_of(_MAP_TYPES, map_type)}")
    if routing_map.dim() != 2:
        raise ValueError(f"{where}: routing_map must have two axes, got {tuple(routing_map.shape)}")
    if map_type == "index":
        experts = routing_map.to(torch.int64)
        return experts, int(experts.max()) + 1 if experts.numel() else 0
    count = routing_map.shape[1]
    mask = routing_map != 0
    most = int(mask.sum(1).max()) if mask.numel() else 0
    numbers = torch.arange(count, dtype=torch.int64, device=mask.device)
    experts = torch.where(mask, numbers, count).sort(1).values
    return experts[:, : max(most, 1)], count
