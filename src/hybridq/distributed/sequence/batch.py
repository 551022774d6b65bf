"""A batch cut along its sequences: each rank's part, with labels and positions of the whole."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping
from typing import Any, Final

import torch
import torch.nn.functional as F

from ..._torch_ranks import process_group
from ..agreement import Fingerprint, compare
from .mesh import exchange_of

__all__ = ["shard_sequence"]

#: What a batch may hold, and what stands where it is made longer; None: the caller says.
_FILLED: Final[dict[str, int | None]] = {
    "input_ids": None,
    "labels": -100,
    "shift_labels": -100,
    "attention_mask": 0,
    "position_ids": 0,
    "inputs_embeds": 0,
    "token_type_ids": 0,
    "mm_token_type_ids": 0,
}
#: What every rank has whole: what stands in the places of images, videos and audio.
_WHOLE: Final = (
    *("pixel_values", "image_position_ids"),
    *("pixel_values_videos", "video_position_ids", "num_frames_per_video"),
    *("input_features", "input_features_mask"),
)

_RULE: Final = "ranks that share sequences must be given the same batch"


def shard_sequence(
    batch: Mapping[str, Any],
    mesh: Any = None,
    *,
    cu_seqlens: torch.Tensor | None = None,
    pad_token_id: int | None = None,
) -> dict[str, Any]:
    """Return this rank's part of a batch whose sequences the ranks of a mesh share.

    Every rank must call it with the same batch, which is compared. Rank r gets tokens
    `r * length / ranks` and so on. Labels are shifted before they are cut, so that a part's last
    token keeps its label, the first token of the next part. Positions of the whole travel along.

    Args:
        batch: `input_ids` `[batch, length]` or `inputs_embeds` `[batch, length, features]`; and of
            the following those that there are: `labels` `[batch, length]`, not shifted, as models
            of transformers take them, or `shift_labels`; `position_ids` `[batch or 1, length]`;
            `attention_mask`, `token_type_ids` or `mm_token_type_ids` `[batch, length]`. Images,
            videos and audio (`pixel_values` and their like, as models of transformers take them)
            are left whole.
        mesh: a DeviceMesh of one dimension, a process group, or None: all ranks.
        cu_seqlens: integers: where packed sequences begin, and the end of the last one, of a batch
            of one row without an `attention_mask`: positions start anew at each.
        pad_token_id: fills sequences up at their end to a multiple of the number of ranks, without
            labels; None: other lengths are refused. What follows a token is hidden by a causal
            mask alone: a model that looks ahead needs an `attention_mask` too.

    Returns:
        The parts: what `batch` has, `position_ids` `[batch or 1, length / ranks]`, and with labels
        `shift_labels` and `labels`, both the shifted ones. Where sequences are packed (positions
        that start anew, and no attention_mask) the last token of each has no label.

    Raises:
        ValueError: a length that the ranks do not divide, shapes that do not fit, or what cannot be
            cut.
        RuntimeError: ranks have different batches; on every rank.

    Source: ours.

    Example:
        >>> import torch, hybridq
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> ids = torch.arange(6)[None]
        >>> part = hybridq.distributed.shard_sequence(
        ...     {"input_ids": ids, "labels": ids}, cu_seqlens=torch.tensor([0, 2, 6]))
        >>> part["position_ids"].tolist(), part["shift_labels"].tolist()
        ([[0, 1, 0, 1, 2, 3]], [[1, -100, 3, 4, 5, -100]])
        >>> dist.destroy_process_group()
    """
    exchange = exchange_of("shard_sequence", mesh)
    given = {name: value for name, value in batch.items() if value is not None}
    problem = _problem(given)
    said = ("what else is given", f"cu_seqlens {cu_seqlens}, pad_token_id {pad_token_id}")
    _compare(given, said, problem, exchange.name)
    tokens = given["input_ids"] if "input_ids" in given else given["inputs_embeds"]
    rows, length = tokens.shape[:2]
    whole = {name: x for name, x in given.items() if name not in _WHOLE}
    if cu_seqlens is not None:
        if "attention_mask" in given:
            raise ValueError(
                "shard_sequence: cu_seqlens must be given without an attention_mask, under which "
                "models attend across packed sequences; leave the mask out, got both"
            )
        whole["position_ids"] = _restarted(cu_seqlens, rows, length, "position_ids" in given)
    if "position_ids" not in whole:
        whole["position_ids"] = torch.arange(length, dtype=torch.int64, device=tokens.device)[None]
    whole["position_ids"] = whole["position_ids"].to(tokens.device)
    if "labels" in whole:
        is_packed = "attention_mask" not in whole
        ends = _ends(whole["position_ids"]) if is_packed else None
        whole["shift_labels"] = _shifted(whole["labels"], ends)
    rest = -length % exchange.world
    if rest:
        if pad_token_id is None:
            raise ValueError(
                f"shard_sequence: the ranks must divide the length, got {length} tokens on "
                f"{exchange.world} ranks; give pad_token_id= to fill them up"
            )
        whole = {name: _longer(name, x, rest, pad_token_id) for name, x in whole.items()}
    if "labels" in whole:
        whole["labels"] = whole["shift_labels"]
    own = (length + rest) // exchange.world
    parts = {name: x.narrow(1, exchange.rank * own, own).contiguous() for name, x in whole.items()}
    return {**parts, **{name: given[name] for name in _WHOLE if name in given}}


def _problem(given: Mapping[str, Any]) -> str:
    """Return why a batch cannot be cut, or nothing."""
    unknown = [name for name in given if name not in _FILLED and name not in _WHOLE]
    if unknown:
        names = ", ".join((*_FILLED, *_WHOLE))
        return f"the batch may have {names}, got {', '.join(unknown)} too"
    if ("input_ids" in given) is ("inputs_embeds" in given):
        return f"the batch must have input_ids or inputs_embeds, got {', '.join(given) or 'none'}"
    if "labels" in given and "shift_labels" in given:
        return "the batch must have labels or shift_labels, got both"
    tokens = given["input_ids"] if "input_ids" in given else given["inputs_embeds"]
    for name, x in given.items():
        if name in _WHOLE:
            continue
        dims = 3 if name == "inputs_embeds" else 2
        is_one = name == "position_ids" and x.shape[:1] == (1,)
        fits = x.dim() == dims and x.shape[1] == tokens.shape[1]
        if not fits or not (is_one or x.shape[0] == tokens.shape[0]):
            return f"{name} must be [batch, length] as the tokens are, got {tuple(x.shape)}"
    return ""


def _compare(given: Mapping[str, Any], said: tuple[str, str], problem: str, name: str) -> None:
    """Raise on every rank if batches differ, or if one of them cannot be cut."""
    if problem:
        lines = [("the batch", problem)]
    else:
        lines = [(f"the shape of {key}", str(tuple(x.shape))) for key, x in sorted(given.items())]
        lines.append(said)
        for key, x in sorted(given.items()):
            data = x.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
            lines.append((f"the digest of {key}", hashlib.blake2b(data, digest_size=8).hexdigest()))
    compare(Fingerprint(tuple(lines)), process_group(name), "shard_sequence", _RULE)
    if problem:
        raise ValueError(f"shard_sequence: {problem}")


def _restarted(bounds: torch.Tensor, rows: int, length: int, has_positions: bool) -> torch.Tensor:
    """Return the positions `[1, length]` of packed sequences."""
    begins = bounds.to(torch.int64)
    told = begins.tolist()
    is_sorted = all(a <= b for a, b in itertools.pairwise(told))
    if rows != 1 or has_positions or begins.dim() != 1 or not is_sorted or not told:
        raise ValueError(
            "shard_sequence: cu_seqlens must be sorted [sequences + 1], for a batch of one row "
            f"without position_ids, got {told} for {rows} rows"
        )
    if told[0] != 0 or told[-1] != length:
        raise ValueError(
            f"shard_sequence: cu_seqlens must begin with 0 and end with the length {length}, got "
            f"{told[0]} and {told[-1]}"
        )
    place = torch.arange(length, dtype=torch.int64, device=begins.device)
    first = begins[:-1][torch.searchsorted(begins[1:], place, right=True)]
    return (place - first)[None]


def _ends(positions: torch.Tensor) -> torch.Tensor:
    """Return where a packed sequence has its last token, of all tokens but the last."""
    return positions[:, 1:] != positions[:, :-1] + 1


def _shifted(labels: torch.Tensor, ends: torch.Tensor | None) -> torch.Tensor:
    after = labels[:, 1:]
    if ends is not None:
        after = after.masked_fill(ends.to(after.device), -100)
    return F.pad(after, (0, 1), value=-100)


def _longer(name: str, x: torch.Tensor, rest: int, pad_token_id: int) -> torch.Tensor:
    if name == "position_ids":  # they go on: no further sequence begins
        after = torch.arange(1, rest + 1, device=x.device, dtype=x.dtype)
        return torch.cat([x, x[:, -1:] + after], 1)
    value = _FILLED[name]
    pad = (0, 0, 0, rest) if x.dim() == 3 else (0, rest)
    return F.pad(x, pad, value=pad_token_id if value is None else value)
