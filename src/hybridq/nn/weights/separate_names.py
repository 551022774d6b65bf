"""Parameters of one fused projection, loaded from a checkpoint that names its parts apart.

Transformer Engine keeps `query_weight`, `key_weight`, `value_weight` by default and one `weight`
with `fuse_qkv_params=True`. Here there is one `weight`, whose rows are the queries', the keys' and
then the values'; a state_dict of the other kind is put together as it is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

__all__ = ["split_separate_names", "takes_separate_names"]


class _Joins:
    """A hook before a module loads a state_dict. No closure, so that modules copy and pickle."""

    def __call__(
        self,
        module: nn.Module,
        state_dict: dict[str, Any],
        prefix: str,
        metadata: Any,
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        of_parts: Mapping[str, int] = module.separate_rows  # type: ignore[assignment]
        for kind in ("weight", "bias"):
            own = [f"{prefix}{part}_{kind}" for part in of_parts]
            if f"{prefix}{kind}" in state_dict or not all(key in state_dict for key in own):
                continue  # torch says what is missing
            parts = [state_dict[key] for key in own]
            wrong = [
                f"{key}: must have {rows} rows, got shape {tuple(part.shape)}"
                for key, part, rows in zip(own, parts, of_parts.values(), strict=True)
                if part.dim() == 0 or part.shape[0] != rows
            ]
            errors += wrong
            if wrong:
                continue
            for key in own:
                del state_dict[key]
            state_dict[f"{prefix}{kind}"] = torch.cat(parts)


def takes_separate_names(module: nn.Module, rows: Mapping[str, int]) -> None:
    """Let `module` load `<part>_weight` and `<part>_bias` of several parts as its own.

    Args:
        module: with a `weight` and perhaps a `bias`.
        rows: of each part, in the order in which they lie in it; none: nothing is done.
    """
    if rows:
        module.__dict__["separate_rows"] = dict(rows)
        module.register_load_state_dict_pre_hook(_Joins())


def split_separate_names(module: nn.Module, world: int) -> None:
    """Let a module that has become a rank's part load as many rows of each part.

    Args:
        module: for which `takes_separate_names` was called; others stay as they are.
        world: number of ranks, which divides the rows.
    """
    rows = module.__dict__.get("separate_rows")
    if rows is not None:
        module.__dict__["separate_rows"] = {part: size // world for part, size in rows.items()}
