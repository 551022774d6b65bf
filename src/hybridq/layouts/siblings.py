"""Which linears readers multiply as one, and so want with one scale for the tensor.

Source: vLLM and SGLang, `packed_modules_mapping` of their models: `qkv_proj` of q, k and v;
`gate_up_proj` of gate and up; ModelOpt shares the same groups before it exports.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

__all__ = ["GROUPS", "sibling_groups", "siblings"]

#: Last components of names, in the order in which readers stack them.
GROUPS: Final = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"),
)


def siblings(name: str) -> tuple[str, ...]:
    """Return the names of the linears that are stacked with this one, itself among them.

    Args:
        name: qualified name of a linear, with or without `.weight`.

    Example:
        >>> siblings("model.layers.0.mlp.up_proj")
        ('model.layers.0.mlp.gate_proj', 'model.layers.0.mlp.up_proj')
    """
    suffix = ".weight" if name.endswith(".weight") else ""
    parent, dot, last = name.removesuffix(suffix).rpartition(".")
    for group in GROUPS:
        if last in group:
            return tuple(f"{parent}{dot}{one}{suffix}" for one in group)
    return (name,)


def sibling_groups(names: Iterable[str]) -> list[tuple[str, ...]]:
    """Return the names in groups of siblings, in their order; those without any by themselves.

    Args:
        names: of linears, or of their weights.
    """
    known = list(dict.fromkeys(names))
    present = set(known)
    done: set[str] = set()
    made = []
    for name in known:
        if name not in done:
            group = tuple(one for one in siblings(name) if one in present)
            done.update(group)
            made.append(group)
    return made
