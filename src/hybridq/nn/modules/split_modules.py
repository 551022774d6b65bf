"""Whole fused modules made into parts, one on each rank, as their arguments would have made them.

A part of a weight whose rows are several matrices one behind the other (queries, keys and values;
both halves of a gated activation) has its part of each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ...tensor import is_quantized
from ..weights import split_separate_names
from .attention import MultiheadAttention
from .layernorm_linear import LayerNormLinear
from .layernorm_mlp import LayerNormMLP
from .parallel_options import ParallelOptions
from .plain_norm import PlainNorm
from .quantized_module import QuantizedModule
from .tensor_parallel import COLUMN, ROW, is_dtensor
from .transformer_layer import TransformerLayer

__all__ = ["SPLIT_TOGETHER", "Split", "split_module", "splits_of"]

#: Modules with several weights, or a norm and a weight, that are split together.
SPLIT_TOGETHER = (LayerNormLinear, LayerNormMLP, MultiheadAttention, TransformerLayer)


@dataclass(frozen=True)
class Split:
    """What becomes of one module when each rank takes its part of it.

    Attributes:
        module: with parameters of its own.
        sizes: sizes that ranks must divide, by what they are called.
        parameters: by name, the dimension that is dealt out, and the sizes along it of the
            matrices that lie one behind the other.
        parts: by linear part, its mode, and the rows or columns that are dealt out.
        attributes: sizes that the module keeps, of which it then has a rank's part.
    """

    module: nn.Module
    sizes: Mapping[str, int]
    parameters: Mapping[str, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    parts: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    attributes: tuple[str, ...] = ()


def splits_of(module: nn.Module) -> Iterator[Split]:
    """Yield what becomes of a fused module, and of those in it.

    Args:
        module: one of `SPLIT_TOGETHER`.
    """
    if isinstance(module, TransformerLayer):
        for child in (module.self_attention, module.inter_attention, module.layernorm_mlp):
            if child is not None:
                yield from splits_of(child)
    elif isinstance(module, MultiheadAttention):
        yield from _of_attention(module)
    elif isinstance(module, LayerNormMLP):
        ffn = module.ffn_hidden_size
        width = module.fc1_weight.shape[0]
        halves = (ffn,) * (width // ffn)
        yield Split(
            module,
            {"ffn_hidden_size": ffn},
            {"fc1_weight": (0, halves), "fc1_bias": (0, halves), "fc2_weight": (1, (ffn,))},
            {"fc1": (COLUMN, width), "fc2": (ROW, ffn)},
            ("ffn_hidden_size",),
        )
    elif isinstance(module, LayerNormLinear):
        yield _columns(module, (module.out_features,), {"out_features": module.out_features})


def _columns(module: Any, rows: tuple[int, ...], sizes: Mapping[str, int]) -> Split:
    """Return what becomes of a linear module of which each rank takes rows of each matrix."""
    return Split(
        module,
        sizes,
        {"weight": (0, rows), "bias": (0, rows)},
        {"": (COLUMN, sum(rows))},
        ("out_features",),
    )


def _of_attention(module: MultiheadAttention) -> Iterator[Split]:
    heads, groups, features = (
        module.num_attention_heads,
        module.num_gqa_groups,
        module.kv_channels,
    )
    sizes = {"num_attention_heads": heads, "num_gqa_groups": groups}
    yield Split(module, sizes, attributes=tuple(sizes))
    core = module.core_attention
    offset = {"softmax_offset": (0, (heads,))}
    yield Split(core, sizes, offset, attributes=tuple(sizes))
    queries, keys = heads * features, groups * features
    is_one = module.qkv_weight_interleaved
    for first in (module.qkv, module.layernorm_qkv):
        if first is not None:
            yield _columns(first, (queries + 2 * keys,) if is_one else (queries, keys, keys), sizes)
    for first in (module.query_layer, module.layernorm_query):
        if first is not None:
            yield _columns(first, (queries,), sizes)
    if module.key_value is not None:
        yield _columns(module.key_value, (2 * keys,) if is_one else (keys, keys), sizes)
    yield Split(
        module.proj, sizes, {"weight": (1, (queries,))}, {"": (ROW, queries)}, ("in_features",)
    )


def _problem(module: nn.Module, splits: list[Split], options: ParallelOptions, world: int) -> str:
    """Return why a module cannot be split, or nothing."""
    for one in module.modules():
        if isinstance(one, QuantizedModule) and one.is_parallel:
            return f"the module must be whole, got {one.name or type(one).__name__} that is a part"
        if (
            isinstance(one, MultiheadAttention)
            and options.sequence_parallel
            and one.qkv_format == "bshd"
        ):
            return (
                "sequence_parallel takes qkv_format='sbhd' or 'thd', whose tokens lie along the "
                f"first dimension, got {one.qkv_format!r}"
            )
    for name, parameter in module.named_parameters():
        if is_dtensor(parameter):
            return f"parameters must be plain tensors, got {name} that is a DTensor"
        if is_quantized(parameter):
            return (
                f"parameters must be in high precision, got {name} that is a "
                f"{type(parameter).__name__}; make the module with tp_group= under "
                "quantized_model_init, or quantize afterwards"
            )
    for split in splits:
        for what, size in split.sizes.items():
            if size % world:
                return f"the number of ranks must divide {what}, got {world} and {size}"
    return ""


def split_module(
    where: str,
    module: nn.Module,
    options: ParallelOptions,
    share: Callable[[torch.Tensor], None],
) -> None:
    """Make a whole module this rank's part, in place; nothing is changed if that cannot be.

    Parameters are replaced by plain ones with this rank's part, marked as a constructor with
    `tp_group` marks them; those that every rank has whole stay. With `sequence_parallel` their
    gradients are summed over ranks in the backward.

    Args:
        where: who asks, for errors.
        module: one of `SPLIT_TOGETHER`.
        options: with the group.
        share: called with each parameter, while it is whole, to give all ranks the same values.

    Raises:
        ValueError: ranks do not divide a size, the module is a part already, or it has a layout
            that `sequence_parallel` does not take.
    """
    import torch.distributed as dist  # not every build of torch has it

    splits = list(splits_of(module))
    world = options.size(where)
    problem = _problem(module, splits, options, world)
    if problem:
        raise ValueError(f"{where}: {problem}")
    for parameter in module.parameters():
        share(parameter.detach())
    rank = dist.get_rank(options.tp_group)
    for split in splits:
        _take_part(split, options, world, rank)
    for one in module.modules():
        if isinstance(one, MultiheadAttention):
            one._size = world
            for child in one.children():
                split_separate_names(child, world)
            one._share_norms()
        elif isinstance(one, TransformerLayer) and options.sequence_parallel:
            norm: PlainNorm | None = one.layernorm
            if norm is not None:
                norm.group = next(iter(one.layernorm_mlp.parallel.values())).group


def _take_part(split: Split, options: ParallelOptions, world: int, rank: int) -> None:
    module: Any = split.module
    for name, (dim, sizes) in split.parameters.items():
        whole = getattr(module, name)
        if whole is None:
            continue
        matrices = whole.detach().split(list(sizes), dim)
        own = torch.cat([one.chunk(world, dim)[rank] for one in matrices], dim)
        module.register_parameter(name, nn.Parameter(own.contiguous(), whole.requires_grad))
    for name in split.attributes:
        setattr(module, name, getattr(module, name) // world)
    if split.parts:
        owner = type(module).__name__
        module.become_part(
            {
                part: options.parallel(owner, mode, whole // world)
                for part, (mode, whole) in split.parts.items()
            }
        )
