"""Permutations under the names that Megatron's and Transformer Engine's users know.

Source: names, arguments and meanings: Transformer Engine's permutation functions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..errors import must_be_one_of
from ..nn.autograd import TokenRows, take_rows
from .permutation import Routes, permute, unpermute

__all__ = [
    "RowIdMap",
    "moe_permute",
    "moe_permute_and_pad_with_probs",
    "moe_permute_with_probs",
    "moe_sort_chunks_by_index",
    "moe_sort_chunks_by_index_with_probs",
    "moe_unpermute",
]

_MAP_TYPES = ("mask", "index")


class RowIdMap(NamedTuple):
    """What `moe_unpermute` wants to know of `moe_permute`; opaque to callers.

    Attributes:
        routes: of the tokens.
        experts: int64 `[T, k]`, the expert of each; as many as there are: none.
        rows: how many were returned.
        places: int64, where each row lies between rows of padding, or None.
    """

    routes: Routes
    experts: torch.Tensor
    rows: int
    places: torch.Tensor | None = None


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
            waits for the device if the map is a mask. Rows behind those are of no expert.
        max_token_num: not used: nothing is allocated ahead.
        map_type: `"mask"` or `"index"`.

    Returns:
        `[num_out_tokens, H]`, and a RowIdMap.

    Raises:
        ValueError: another map type, a map of another number of tokens, or more rows than there
            are routes.

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
    if size > rows.shape[0]:
        raise ValueError(
            f"moe_permute: num_out_tokens must be at most {rows.shape[0]}, as many as the map has "
            f"routes, got {size}"
        )
    return rows.narrow(0, 0, size), RowIdMap(routes, experts, size)


def moe_permute_with_probs(
    inp: torch.Tensor,
    probs: torch.Tensor,
    routing_map: torch.Tensor,
    num_out_tokens: int = -1,
) -> tuple[torch.Tensor, torch.Tensor, RowIdMap]:
    """Return `moe_permute` of a mask, with the weight of each row between.

    Args:
        inp: `[T, H]`.
        probs: weights `[T, E]`, of any floating dtype; their gradients are those of their rows.
        routing_map: the mask `[T, E]`.
        num_out_tokens: as of `moe_permute`; rows of no expert have the weight 0.

    Returns:
        Rows `[num_out_tokens, H]`, their weights `[num_out_tokens]`, and a RowIdMap.

    Raises:
        ValueError: as `moe_permute`, or weights of another shape than the mask's.

    Example:
        >>> import torch
        >>> from hybridq.moe import moe_permute_with_probs
        >>> x, probs = torch.arange(4.0).view(2, 2), torch.tensor([[0.25, 0.75], [0.5, 0.0]])
        >>> rows, weights, row_id_map = moe_permute_with_probs(x, probs, probs > 0)
        >>> rows.tolist(), weights.tolist()
        ([[0.0, 1.0], [2.0, 3.0], [0.0, 1.0]], [0.25, 0.5, 0.75])
    """
    if probs.shape != routing_map.shape:
        raise ValueError(
            f"moe_permute_with_probs: probs must be {tuple(routing_map.shape)}, as the mask is, "
            f"got {tuple(probs.shape)}"
        )
    rows, ids = moe_permute(inp, routing_map, num_out_tokens)
    places = ids.routes.order[: ids.rows]
    experts = ids.experts.flatten()[places]  # E: none, whose weight is the column added here
    tokens = torch.div(places, ids.experts.shape[1], rounding_mode="floor")
    padded = torch.nn.functional.pad(probs, (0, 1))
    return rows, padded.flatten()[tokens * padded.shape[1] + experts], ids


def moe_permute_and_pad_with_probs(
    inp: torch.Tensor,
    probs: torch.Tensor,
    routing_map: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    align_size: int,
) -> tuple[torch.Tensor, torch.Tensor, RowIdMap, torch.Tensor | None, torch.Tensor]:
    """Return `moe_permute_with_probs` with zeros behind the rows of each expert, up to a multiple.

    `hybridq.GroupedLinear` needs none of them: it takes groups of any size. Waits for the device.

    Args:
        inp: `[T, H]`.
        probs: weights `[T, E]`.
        routing_map: the mask `[T, E]`.
        tokens_per_expert: integers `[E]`, the sums of the mask's columns.
        align_size: what the rows of each expert are a multiple of.

    Returns:
        Rows, their weights (0 in the padding), a RowIdMap, int64 `[E]` how many rows of padding
        lie before each expert (None: there are none), and int64 `[E]` the padded sizes.

    Raises:
        ValueError: as `moe_permute_with_probs`, sizes that are not the mask's, or a multiple
            below 1.
    """
    where = "moe_permute_and_pad_with_probs"
    if align_size < 1:
        raise ValueError(f"{where}: align_size must be 1 or more, got {align_size}")
    rows, weights, ids = moe_permute_with_probs(inp, probs, routing_map)
    sizes = tokens_per_expert.to(inp.device, torch.int64)
    ends = ids.routes.offsets.to(torch.int64)
    own = torch.diff(ends, prepend=ends.new_zeros(1))
    if not torch.equal(sizes, own):
        raise ValueError(
            f"{where}: tokens_per_expert must be {own.tolist()}, the sums of the mask's columns, "
            f"got {sizes.tolist()}"
        )
    target = (sizes + align_size - 1) // align_size * align_size
    if torch.equal(target, sizes):
        return rows, weights, ids, None, target
    offsets = (target - sizes).cumsum(0) - (target - sizes)
    total = int(target.sum())
    experts = torch.repeat_interleave(offsets, sizes, output_size=ids.rows)
    places = torch.arange(ids.rows, dtype=torch.int64, device=inp.device) + experts
    padded = rows.new_zeros(total, rows.shape[1]).index_copy(0, places, rows)
    weights = weights.new_zeros(total).index_copy(0, places, weights)
    return padded, weights, ids._replace(rows=total, places=places), offsets, target


def moe_unpermute(
    inp: torch.Tensor,
    row_id_map: RowIdMap,
    merging_probs: torch.Tensor | None = None,
    restore_shape: torch.Size | None = None,
    map_type: str = "mask",
    probs: torch.Tensor | None = None,
    pad_offsets: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the sum of each token's rows, `[T, H]`: the way back of `moe_permute`.

    Summed in FP32 in the order of the map, and rounded once.

    Args:
        inp: `[num_out_tokens, H]`, rows in the order of the experts.
        row_id_map: of `moe_permute`.
        merging_probs: weights: of map type `"mask"` `[T, E]`, of `"index"` `[T, k]`; None: ones.
        restore_shape: of the result, where it is not `[T, H]`.
        map_type: as `moe_permute` was given.
        probs: an older name of `merging_probs`.
        pad_offsets: of `moe_permute_and_pad_with_probs`; `row_id_map` itself knows where rows of
            padding lie.

    Raises:
        ValueError: another map type, other rows than were returned, weights under both names, or
            offsets of padding that the map has not.
    """
    if probs is not None and merging_probs is not None:
        raise ValueError("moe_unpermute: probs must be None beside merging_probs, got both")
    if map_type not in _MAP_TYPES:
        raise ValueError(f"moe_unpermute: map_type {must_be_one_of(_MAP_TYPES, map_type)}")
    routes, experts, count, places = row_id_map
    if inp.dim() != 2 or inp.shape[0] != count:
        raise ValueError(
            f"moe_unpermute: inp must be [{count}, H], as many rows as moe_permute returned, got "
            f"{tuple(inp.shape)}"
        )
    if places is None and pad_offsets is not None:
        raise ValueError(
            "moe_unpermute: pad_offsets must be None of a map without padding, got some"
        )
    if places is not None:
        inp, count = inp.index_select(0, places), places.shape[0]
    weights = probs if merging_probs is None else merging_probs
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
    return take_rows(inp, _sorted_chunks(inp.shape[0], inp.device, split_sizes, sorted_index))


def moe_sort_chunks_by_index_with_probs(
    inp: torch.Tensor, probs: torch.Tensor, split_sizes: torch.Tensor, sorted_index: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `moe_sort_chunks_by_index`, and weights of the rows in the same order.

    Args:
        inp: `[rows, H]`.
        probs: weights `[rows]`, of any floating dtype.
        split_sizes, sorted_index: as there.

    Raises:
        ValueError: as there, or weights of another number of rows.
    """
    if probs.shape != inp.shape[:1]:
        raise ValueError(
            f"moe_sort_chunks_by_index_with_probs: probs must be [{inp.shape[0]}], a weight for "
            f"each row, got {tuple(probs.shape)}"
        )
    rows = _sorted_chunks(inp.shape[0], inp.device, split_sizes, sorted_index)
    return take_rows(inp, rows), probs.index_select(0, rows.tokens)


def _sorted_chunks(
    count: int, device: torch.device, split_sizes: torch.Tensor, sorted_index: torch.Tensor
) -> TokenRows:
    """Return the order of rows whose chunks are put into another one."""
    if split_sizes.shape != sorted_index.shape or split_sizes.dim() != 1:
        raise ValueError(
            "moe_sort_chunks_by_index: split_sizes and sorted_index must be [n] both, got "
            f"{tuple(split_sizes.shape)} and {tuple(sorted_index.shape)}"
        )
    sizes, order = (one.to(device, torch.int64) for one in (split_sizes, sorted_index))
    place = torch.empty_like(order)
    place[order] = torch.arange(order.shape[0], dtype=torch.int64, device=device)
    chunks = torch.repeat_interleave(place, sizes, output_size=count)
    routes = Routes.of(chunks[:, None], order.shape[0])
    return TokenRows(routes.order, routes.inverse)


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
