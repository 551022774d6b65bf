"""Parameters of one fused projection, loaded from a checkpoint that names its parts apart.

Transformer Engine keeps `query_weight`, `key_weight`, `value_weight` by default and one `weight`
with `fuse_qkv_params=True`. Here there is one `weight`, whose rows are the queries', the keys' and
then the values'; a state_dict of the other kind is put together as it is loaded. The same holds for
both halves of a gated activation, `fc1_gate_weight` and `fc1_up_weight`, which modules that
`FusedParallel` has dealt out have apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

__all__ = ["separate_names", "takes_separate_names"]


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
        for name, of_parts in separate_names(module).items():
            own = [f"{prefix}{part}" for part in of_parts]
            if f"{prefix}{name}" in state_dict or not all(key in state_dict for key in own):
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
            state_dict[f"{prefix}{name}"] = torch.cat(parts)


def takes_separate_names(module: nn.Module, rows: Mapping[str, int], head: str = "") -> None:
    """Let `module` load `<part>_weight` and `<part>_bias` of several parts as its own.

    Args:
        module: with a `<head>weight` and perhaps a `<head>bias`.
        rows: of each part, in the order in which they lie in it; none: nothing is done.
        head: what the names of parts begin with, too.
    """
    if rows:
        module.__dict__["separate_rows"] = {head: dict(rows)}
        module.register_load_state_dict_pre_hook(_Joins())


def separate_names(module: nn.Module) -> dict[str, dict[str, int]]:
    """Return by the name of a parameter the names that its parts have apart, with their rows.

    Args:
        module: any; one for which `takes_separate_names` was not called has none.
    """
    found: Mapping[str, Mapping[str, int]] = module.__dict__.get("separate_rows", {})
    return {
        f"{head}{kind}": {f"{head}{part}_{kind}": size for part, size in rows.items()}
        for head, rows in found.items()
        for kind in ("weight", "bias")
    }
