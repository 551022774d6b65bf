"""States whose names are the same whether fused modules are whole or dealt out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import nn

from ..nn.weights import separate_names

__all__ = ["joined_state", "separate_state"]

#: What wrappers of torch put into names, and its checkpoints do not.
_WRAPPERS: Final = {"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
#: Names of the parts of a parameter, with their rows.
_Rows = Mapping[str, int]


def separate_state(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state in which each matrix has a name of its own, as `FusedParallel` leaves them.

    A whole `MultiheadAttention` has queries, keys and values in one parameter, `qkv.weight`, and a
    whole `LayerNormMLP` both halves of a gated activation in `fc1_weight`. Over ranks they are
    `qkv.query_weight`, `fc1_gate_weight` and so on, each a DTensor. With these names a checkpoint
    (DCP) that any number of ranks has saved is read by any other, one whole process included.

    Args:
        model: whose state it is. Of modules that are dealt out nothing changes.
        state: of the model, or of its optimizer as `get_optimizer_state_dict` and
            `get_state_dict` return it, not flattened.

    Returns:
        The state with views of the same memory, so that loading into it writes to the parameters.

    Raises:
        ValueError: a tensor of the optimizer has another number of rows than its parameter.

    Source: ours; names of queries, keys and values: Transformer Engine's.

    Example:
        >>> import hybridq
        >>> mlp = hybridq.LayerNormMLP(64, 128, activation="swiglu", bias=False)
        >>> state = hybridq.distributed.separate_state(mlp, mlp.state_dict())
        >>> [(name, tuple(one.shape)) for name, one in state.items() if name.startswith("fc1")]
        [('fc1_gate_weight', (128, 64)), ('fc1_up_weight', (128, 64))]
        >>> sorted(hybridq.distributed.joined_state(mlp, state)) == sorted(mlp.state_dict())
        True
    """
    names = _names(model)

    def apart(found: dict[str, Any], key: str, value: Any) -> None:
        rows = names.get(_plain(key))
        if rows is None:
            found[key] = value
            return
        head = key.rpartition(".")[0]
        for name, part in zip(rows, _cut(key, value, list(rows.values())), strict=True):
            found[f"{head}.{name}" if head else name] = part

    def listed(keys: list[str]) -> list[str]:
        found: dict[str, Any] = {}
        for key in keys:
            apart(found, key, None)
        return list(found)

    return _changed(state, apart, listed)


def joined_state(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `separate_state` was given: one name where the model has one parameter.

    Args:
        model: whose state it is.
        state: of the model or of its optimizer, with a name for each matrix.

    Example:
        >>> import torch, hybridq
        >>> layer = hybridq.TransformerLayer(64, 128, 4, num_gqa_groups=2)
        >>> state = hybridq.distributed.separate_state(layer, layer.state_dict())
        >>> joined = hybridq.distributed.joined_state(layer, state)
        >>> torch.equal(joined["self_attention.layernorm_qkv.weight"], layer.state_dict()[
        ...     "self_attention.layernorm_qkv.weight"])
        True
    """
    firsts: dict[str, tuple[str, list[str]]] = {}
    others: set[str] = set()
    for key, rows in _names(model).items():
        head = key.rpartition(".")[0]
        parts = [f"{head}.{name}" if head else name for name in rows]
        firsts[parts[0]] = (key.rpartition(".")[2], list(rows))
        others.update(parts[1:])

    def together(found: dict[str, Any], key: str, value: Any, given: Mapping[str, Any]) -> None:
        plain = _plain(key)
        if plain in others:
            return
        if plain not in firsts:
            found[key] = value
            return
        name, leaves = firsts[plain]
        prefix = key.removesuffix(leaves[0])
        found[prefix + name] = _put_together([given.get(prefix + leaf) for leaf in leaves])

    def listed(keys: list[str]) -> list[str]:
        found: dict[str, Any] = {}
        for key in keys:
            together(found, key, None, {})
        return list(found)

    if _is_of_optimizer(state):
        made: dict[str, Any] = {}
        for key, value in state["state"].items():
            together(made, key, value, state["state"])
        return {**state, "state": made, "param_groups": _groups(state, listed)}
    made = {}
    for key, value in state.items():
        together(made, key, value, state)
    return made


def _plain(key: str) -> str:
    return ".".join(part for part in key.split(".") if part not in _WRAPPERS)


def _names(model: nn.Module) -> dict[str, _Rows]:
    """Return by the name of each parameter that has several matrices the names of these."""
    given: object = model
    if not isinstance(given, nn.Module):
        raise TypeError(f"separate_state: model must be an nn.Module, got {type(given).__name__}")
    return {
        _plain(f"{path}.{name}" if path else name): rows
        for path, module in model.named_modules(remove_duplicate=False)
        for name, rows in separate_names(module).items()
        if len(rows) > 1
    }


def _is_of_optimizer(state: Mapping[str, Any]) -> bool:
    return isinstance(state.get("state"), Mapping) and isinstance(state.get("param_groups"), list)


def _groups(state: Mapping[str, Any], listed: Callable[[list[str]], list[str]]) -> list[Any]:
    return [{**group, "params": listed(list(group["params"]))} for group in state["param_groups"]]


def _changed(
    state: Mapping[str, Any],
    change: Callable[[dict[str, Any], str, Any], None],
    listed: Callable[[list[str]], list[str]],
) -> dict[str, Any]:
    made: dict[str, Any] = {}
    if _is_of_optimizer(state):
        for key, value in state["state"].items():
            change(made, key, value)
        return {**state, "state": made, "param_groups": _groups(state, listed)}
    for key, value in state.items():
        change(made, key, value)
    return made


def _cut(key: str, value: Any, rows: list[int]) -> list[Any]:
    """Return of a parameter, or of what an optimizer keeps of it, the part of each matrix."""
    if isinstance(value, Mapping):
        parts = {name: _cut(f"{key}: {name}", one, rows) for name, one in value.items()}
        return [{name: one[i] for name, one in parts.items()} for i in range(len(rows))]
    if not isinstance(value, torch.Tensor) or value.numel() == 1:
        return [value] * len(rows)
    if value.shape[0] != sum(rows):
        raise ValueError(
            f"separate_state: {key} must have {sum(rows)} rows, those of its parameter, got shape "
            f"{tuple(value.shape)}"
        )
    return list(value.split(rows))


def _put_together(parts: list[Any]) -> Any:
    first = parts[0]
    if isinstance(first, Mapping):
        return {name: _put_together([one[name] for one in parts]) for name in first}
    if not isinstance(first, torch.Tensor) or first.dim() == 0:
        return first
    return torch.cat(parts)
