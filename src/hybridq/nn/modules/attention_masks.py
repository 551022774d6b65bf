"""Which keys a query sees: kinds of masks, windows, and masks given with a call."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from ...errors import must_be_one_of
from .constructor_arguments import is_whole

__all__ = [
    "MASKS",
    "WITHOUT_PADDING",
    "Lengths",
    "band",
    "check_given",
    "check_mask_type",
    "diagonal",
    "visible",
]


class _Kind(NamedTuple):
    """What a mask type says.

    Attributes:
        is_causal: a query sees no key behind the diagonal.
        needs_mask: a mask is given with the call.
        is_at_end: the diagonal ends at the last query and the last key, where there are more keys
            than queries; else it begins at the first of both.
    """

    is_causal: bool
    needs_mask: bool
    is_at_end: bool


MASKS: Final = {
    "no_mask": _Kind(False, False, True),
    "causal": _Kind(True, False, False),
    "causal_bottom_right": _Kind(True, False, True),
    "padding": _Kind(False, True, True),
    "padding_causal": _Kind(True, True, False),
    "causal_padding": _Kind(True, True, False),
    "padding_causal_bottom_right": _Kind(True, True, True),
    "arbitrary": _Kind(False, True, True),
}

#: What a mask type that takes padding says of sequences that have none.
WITHOUT_PADDING: Final = {
    "padding": "no_mask",
    "padding_causal": "causal",
    "causal_padding": "causal",
    "padding_causal_bottom_right": "causal_bottom_right",
}


def check_mask_type(kind: str, window: tuple[int, int] | None) -> None:
    """Raise unless `kind` and `window` are ones that `visible` takes.

    Args:
        kind: a key of `MASKS`.
        window: two whole numbers, each at least -1, or None.

    Raises:
        ValueError: they are not.
    """
    if kind not in MASKS:
        raise ValueError(f"attention: mask type {must_be_one_of(MASKS, kind)}")
    if window is None:
        return
    is_pair = isinstance(window, tuple | list) and len(window) == 2
    if not is_pair or not all(is_whole(n) and n >= -1 for n in window):
        raise ValueError(
            f"attention: window_size must be two whole numbers, each at least -1, got {window!r}"
        )


class Lengths(NamedTuple):
    """How much of each sequence of a padded batch is there.

    Attributes:
        queries, keys: int `[batch]`; what lies behind them is padding.
    """

    queries: torch.Tensor
    keys: torch.Tensor


def diagonal(
    kind: str, queries: int, keys: int, lengths: Lengths | None, at_end: bool | None = None
) -> int | torch.Tensor:
    """Return the position of the first query among the keys; int `[batch, 1, 1, 1]` of lengths.

    Args:
        kind: a key of `MASKS`.
        queries, keys: how many there are.
        lengths: of each sequence, or None.
        at_end: the last query stands at the last key; None: as the kind says.
    """
    if not (MASKS[kind].is_at_end if at_end is None else at_end):
        return 0
    if lengths is None:
        return keys - queries
    return (lengths.keys - lengths.queries).view(-1, 1, 1, 1)


def visible(
    kind: str,
    window: tuple[int, int] | None,
    given: torch.Tensor | None,
    queries: int,
    keys: int,
    device: torch.device,
    lengths: Lengths | None = None,
    begin: int | torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, bool]:
    """Return the mask of SDPA, True where a key is seen, and whether it is plainly causal.

    Args:
        kind: a key of `MASKS`.
        window: how many keys before and after the diagonal a query sees, -1 for all; or None.
        given: bool, True where a key is hidden, broadcastable to `[batch, heads, queries, keys]`.
        queries, keys: how many there are.
        device: of the mask.
        lengths: of each sequence, behind which keys are hidden: then a mask need not be given.
        begin: where the first query stands among the keys, by `diagonal`; None: as the kind says.

    Raises:
        ValueError: a mask that the type does not take, none where it needs one, no bool, or one of
            another shape.

    Source: names and alignment: Transformer Engine's mask types.
    """
    check_given(kind, given, lengths)
    if given is not None:
        _check_shape(kind, given, queries, keys)
    is_causal, left = MASKS[kind].is_causal, (window or (-1, -1))[0]
    begin = diagonal(kind, queries, keys, lengths) if begin is None else begin
    is_plain = given is None and lengths is None
    if is_causal and left < 0 and is_plain and begin == 0:
        return None, True
    query = torch.arange(queries, dtype=torch.int64, device=device)[:, None] + begin
    seen = band(kind, window, query, keys)
    if lengths is not None:
        there = torch.arange(keys, dtype=torch.int64, device=device)
        there = there < lengths.keys.view(-1, 1, 1, 1)
        seen = there if seen is None else seen & there
    if given is None:
        return seen, False
    return ~given if seen is None else seen & ~given, False


def check_given(kind: str, given: torch.Tensor | None, lengths: Lengths | None = None) -> None:
    """Raise where a mask that is given, or is not, does not go with a mask type.

    Args:
        kind, given, lengths: as for `visible`.

    Raises:
        ValueError: a mask that the type does not take, none where it needs one, or no bool.
    """
    needs_mask = MASKS[kind].needs_mask
    is_known = lengths is not None and kind != "arbitrary"
    if needs_mask is (given is None) and not (needs_mask and is_known):
        lengths_do = " (or cu_seqlens_q and cu_seqlens_kv)" if kind != "arbitrary" else ""
        rule = f"needs an attention_mask{lengths_do}" if needs_mask else "takes no attention_mask"
        got = "none" if given is None else tuple(given.shape)
        raise ValueError(f"attention: mask type {kind!r} {rule}, got {got}")
    if given is not None and given.dtype != torch.bool:
        raise ValueError(
            f"attention: attention_mask must be bool, True where hidden, got {given.dtype}"
        )


def _check_shape(kind: str, given: torch.Tensor, queries: int, keys: int) -> None:
    """Raise where a mask is of other queries or keys, or says not which sequences it is of."""
    shape = tuple(given.shape)
    own = shape[-2:]
    if not 2 <= len(shape) <= 4 or own[0] not in (1, queries) or own[1] not in (1, keys):
        raise ValueError(
            "attention: attention_mask must be [batch, heads, queries, keys], each of them or 1, "
            f"got {shape} for {queries} queries and {keys} keys"
        )
    # [batch, keys] would be taken for [queries, keys] where a batch has as many sequences.
    if "padding" in kind and len(shape) < 4 and any(size != 1 for size in shape[:-1]):
        raise ValueError(
            f"attention: the attention_mask of {kind!r} must say which sequence it is of, "
            f"[batch, 1, 1, keys], got {shape}"
        )


def band(
    kind: str, window: tuple[int, int] | None, query: torch.Tensor, keys: int
) -> torch.Tensor | None:
    """Return what a mask type and a window let queries see; None: every key.

    Args:
        kind, window, keys: as for `visible`.
        query: int64 `[queries, 1]`, or that of each sequence: where they stand among the keys.
    """
    is_causal, (left, right) = MASKS[kind].is_causal, window or (-1, -1)
    if not is_causal and max(left, right) < 0:
        return None
    ahead = torch.arange(keys, dtype=torch.int64, device=query.device) - query
    seen = ahead >= -left if left >= 0 else torch.ones_like(ahead, dtype=torch.bool)
    if is_causal or right >= 0:
        seen = seen & (ahead <= (0 if is_causal else right))
    return seen
