"""Experts placed by their loads: an order in which ranks with equal numbers have equal work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..moe import Experts
from ..tensor import is_quantized
from .loads import BIAS, blocks_of_experts
from .plans import experts_by_rank

__all__ = ["expert_placement", "loads_of", "permute_experts_"]

#: Names that blocks of transformers give their routers.
_ROUTERS = ("gate", "router")


def expert_placement(loads: Any, ranks: int, groups: int = 1) -> torch.Tensor:
    """Return an order of experts under which the loads of ranks are as equal as a greedy way gets.

    Experts are taken by load, the greatest first, and each goes to the rank that has the least so
    far and room left. On a rank they stand by number.

    Args:
        loads: `[E]`, of each expert: counts of tokens, or any measure.
        ranks: over which experts are dealt out, as `parallelize_experts` does it.
        groups: of experts that the router chooses among first (`n_group` of DeepSeek-V3): experts
            stay in their group, and groups in their place.

    Returns:
        int64 `[E]`: place i takes expert `order[i]`.

    Raises:
        ValueError: loads are none, a rank would have no expert, or groups and ranks do not fit.

    Source: longest processing time first (Graham 1969); DeepSeek's EPLB balances by the same rule.

    Example:
        >>> from hybridq.moe import expert_placement
        >>> expert_placement([9, 8, 1, 1], 2).tolist()
        [0, 3, 1, 2]
    """
    where = "expert_placement"
    given = loads_of(where, loads)
    if not isinstance(groups, int) or groups < 1 or given.numel() % groups:
        raise ValueError(f"{where}: groups must divide {given.numel()} experts, got {groups!r}")
    sizes = experts_by_rank(given.numel(), ranks)
    if groups == 1:
        return torch.tensor(_placed(given.tolist(), sizes), dtype=torch.int64, device="cpu")
    if ranks % groups or len(set(sizes)) > 1:
        raise ValueError(
            f"{where}: each group must lie on ranks of its own, with as many experts each, got "
            f"{groups} groups of {given.numel()} experts on {ranks} ranks"
        )
    own, order = ranks // groups, []
    for number, part in enumerate(given.chunk(groups)):
        first = number * part.numel()
        order += [first + one for one in _placed(part.tolist(), sizes[:own])]
    return torch.tensor(order, dtype=torch.int64, device="cpu")


def loads_of(where: str, loads: Any) -> torch.Tensor:
    """Return the loads of experts, float64 `[E]`.

    Args:
        where: the function, for errors.
        loads: numbers.

    Raises:
        ValueError: they are none.
    """
    given = torch.as_tensor(loads, dtype=torch.float64, device="cpu")
    if given.dim() != 1 or not bool(torch.isfinite(given).all()) or bool((given < 0).any()):
        raise ValueError(f"{where}: loads must be numbers from 0 on, of each expert, got {loads!r}")
    return given


def _placed(loads: Sequence[float], sizes: Sequence[int]) -> list[int]:
    """Return the experts of all ranks, rank by rank."""
    ranks: list[list[int]] = [[] for _ in sizes]
    sums = [0.0] * len(sizes)
    for expert in sorted(range(len(loads)), key=lambda one: -loads[one]):
        open_ranks = [one for one, size in enumerate(sizes) if len(ranks[one]) < size]
        rank = min(open_ranks, key=lambda one: (sums[one], one))
        ranks[rank].append(expert)
        sums[rank] += loads[expert]
    return [expert for rank in ranks for expert in sorted(rank)]


@torch.no_grad()
def permute_experts_(
    model: nn.Module, orders: Mapping[str, Any], *, routers: Iterable[str] = _ROUTERS
) -> None:
    """Put a model's experts into other places, and their routers' rows with them.

    The model is the same function: logits of routers stand in the new order, and what is saved is a
    checkpoint like any other. Before `parallelize_experts`, `fully_shard` and the optimizer.

    Args:
        model: with converted experts, all on this rank.
        orders: int64 `[E]` by the name of a module of experts: place i takes expert `order[i]`.
        routers: names, in the block that has the experts, of the modules all of whose parameters
            and buffers have one row or value for each expert; and of tensors of the block that have
            one, which need naming only where the experts are as many as a token's features.

    Raises:
        TypeError: `model` is no module, or `orders` no mapping.
        ValueError: no such module of experts, no permutation, experts over ranks or quantized, no
            router, or one with a tensor that has no row for each expert; another one beside it that
            is not named; or experts that leave the group that the router chooses first. Nothing was
            moved then.

    Source: ours.

    Example:
        >>> import torch
        >>> from hybridq.moe import ExpertsLayout, convert_experts, permute_experts_
        >>> class Own(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.up = torch.nn.Parameter(torch.randn(4, 32, 16))
        ...         self.down = torch.nn.Parameter(torch.randn(4, 16, 32))
        >>> layout = ExpertsLayout("up", "down", has_gate=False)
        >>> parts = {"gate": torch.nn.Linear(16, 4), "experts": convert_experts(Own(), layout)}
        >>> block = torch.nn.ModuleDict(parts)
        >>> before = block["gate"].weight[1].clone()
        >>> permute_experts_(block, {"experts": [0, 2, 1, 3]})
        >>> torch.equal(block["gate"].weight[2], before)
        True
    """
    where = "permute_experts_"
    given: object = model
    if not isinstance(given, nn.Module) or not isinstance(orders, Mapping):
        raise TypeError(
            f"{where}: takes an nn.Module and orders by name, got {type(given).__name__} and "
            f"{type(orders).__name__}"
        )
    found = {name: (module, block) for name, module, block in blocks_of_experts(model)}
    names, moves = tuple(routers), []
    for name, order in orders.items():
        if name not in found:
            raise ValueError(
                f"{where}: orders name converted modules of experts, {', '.join(found) or 'none'}, "
                f"got {name!r}"
            )
        module, block = found[name]
        tensors = [*_stacks(where, name, module), *_routers(where, name, block, names, module)]
        count = tensors[0].shape[0]
        index = torch.as_tensor(order, dtype=torch.int64, device="cpu")
        if index.shape != (count,) or index.sort().values.tolist() != list(range(count)):
            raise ValueError(
                f"{where}: the order of {name} must be of {count} experts, got {order}"
            )
        _check_groups(where, name, block, names, index)
        moves += [(tensor, index) for tensor in tensors]
    for tensor, index in moves:
        dim = 0 if tensor.shape[0] == index.numel() else tensor.dim() - 1
        tensor.copy_(tensor.index_select(dim, index.to(tensor.device)))


def _check_groups(
    where: str, name: str, block: nn.Module, names: tuple[str, ...], index: torch.Tensor
) -> None:
    """Raise where an expert would leave the group that its router chooses among first."""
    for one in (block, *(getattr(block, own, None) for own in names)):
        groups = getattr(one, "n_group", None) or 1
        size = index.numel() // groups
        places = torch.arange(index.numel(), dtype=torch.int64, device="cpu")
        if isinstance(groups, int) and bool((places // size != index // size).any()):
            raise ValueError(
                f"{where}: the router beside {name} chooses among {groups} groups first, so "
                f"experts must stay in theirs, got {index.tolist()}; see expert_placement(groups=)"
            )


def _stacks(where: str, name: str, module: Experts) -> list[torch.Tensor]:
    """Return the tensors of a module of experts; each has one part for each expert."""
    layout: Any = module.experts_layout
    names = [*layout.weights, *layout.first_biases, layout.down_bias, layout.scale]
    found: list[torch.Tensor] = [getattr(module, one) for one in names if one is not None]
    for one in found:
        if module.exchange is not None or is_quantized(one) or type(one.data) is not torch.Tensor:
            raise ValueError(
                f"{where}: {name} must have all its experts on this rank, in high precision, got a "
                f"{type(one).__name__}; permute before parallelize_experts"
            )
    return found


def _routers(
    where: str, name: str, block: nn.Module, names: tuple[str, ...], module: Experts
) -> list[torch.Tensor]:
    """Return the tensors of the routers beside a module of experts."""
    count = getattr(module, module.experts_layout.down).shape[0]
    given = {one: getattr(block, one, None) for one in names}
    found = [one for one in given.values() if isinstance(one, nn.Module)]
    beside = _beside(where, name, block, names, module)
    if not found:
        raise ValueError(
            f"{where}: the block of {name} must have a router, got none called "
            f"{' or '.join(names)}; give routers="
        )
    made = []
    for router in found:
        for own, tensor in (*router.named_parameters(), *router.named_buffers()):
            if count not in (tensor.shape[:1] or (0,)) and tensor.numel() != count:
                raise ValueError(
                    f"{where}: {own} of the router beside {name} must have a row for each of "
                    f"{count} experts, got {list(tensor.shape)}"
                )
            made.append(tensor)
    return made + beside


def _beside(
    where: str, name: str, block: nn.Module, names: tuple[str, ...], module: Experts
) -> list[torch.Tensor]:
    """Return the block's own tensors that have a value for each expert, as a bias of the choice.

    Raises:
        ValueError: it may be of something else; or there is another router than those named.
    """
    count, hidden = getattr(module, module.experts_layout.down).shape[0], _hidden(module)
    own = (*block.named_parameters(recurse=False), *block.named_buffers(recurse=False))
    each = {one: tensor for one, tensor in own if tensor.numel() == count}
    unclear = [one for one in each if one not in (*names, BIAS)] if count == hidden else []
    if names == _ROUTERS:
        unclear += [
            f"{one}.weight"
            for one, child in block.named_children()
            if one not in names and isinstance(child, nn.Linear) and child.out_features == count
        ]
    if unclear and count > 1:
        raise ValueError(
            f"{where}: it must be known what has a row or value for each of {count} experts beside "
            f"{name}, got {', '.join(unclear)} of as many; name all that does, routers="
            f"{(*names, *(one.partition('.')[0] for one in unclear))}, or give routers= without it"
        )
    return [tensor for one, tensor in each.items() if count != hidden or one in (*names, BIAS)]


def _hidden(module: Experts) -> int | None:
    features = module.experts_layout.features(module)
    return None if features is None else features[0]
