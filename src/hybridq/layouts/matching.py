"""How readers match names of modules with the entries of a list of exclusions.

Source: each function names its reader; written from what these do, and held by tests to those that
are installed there.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

__all__ = [
    "by_name",
    "by_name_or_pattern",
    "by_name_pattern_or_glob",
    "by_start_or_end",
    "by_substring_or_glob",
]

#: What readers call the linears that they stack, beside the parts' own names.
_STACKED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}


def by_name(entry: str, name: str) -> bool:
    """Return whether a module is left out with another: where there is no list, only itself.

    Args:
        entry: name of the module that is left out.
        name: qualified name of a module.
    """
    return entry == name


def by_name_or_pattern(entry: str, name: str) -> bool:
    """Return whether compressed-tensors' `match_name` takes `entry` for the module `name`.

    Args:
        entry: a name, or `re:` and a pattern that matches from the start.
        name: qualified name of a module.
    """
    if entry.startswith("re:"):
        return re.match(entry[3:], name) is not None
    return entry == name


def by_name_pattern_or_glob(entry: str, name: str) -> bool:
    """Return whether Quark leaves the module `name` out, or vLLM one of its checkpoints.

    Args:
        entry: a name; a glob, to Quark; `re:` and a pattern that matches from the start, to vLLM.
        name: qualified name of a module.
    """
    return by_name_or_pattern(entry, name) or fnmatchcase(name, entry)


def by_start_or_end(entry: str, name: str) -> bool:
    """Return whether transformers' `should_convert_module` leaves the module `name` out.

    Args:
        entry: matches as a pattern from the start up to a dot or the end, or as a suffix.
        name: qualified name of a module.
    """
    start = re.match(rf"(?:{entry})(?:(?<=\.)|(?=\.|$))", name)
    return start is not None or name.endswith(entry)


def by_substring_or_glob(entry: str, name: str) -> bool:
    """Return whether vLLM's `is_layer_excluded` of ModelOpt checkpoints leaves `name` out.

    Args:
        entry: a glob, or any part of a name, of the name that stacked linears have there too.
        name: qualified name of a module.
    """
    parent, dot, last = name.rpartition(".")
    stacked = f"{parent}{dot}{_STACKED.get(last, last)}"
    return any(entry in one or fnmatchcase(one, entry) for one in (name, stacked))
