"""Whole fused modules made into parts, one on each rank, as their arguments would have made them.

A part of a weight whose rows are several matrices one behind the other (queries, keys and values;
both halves of a gated activation) has its part of each of them, which are parameters of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ...tensor import is_quantized
from ..weights import separate_names
from .attention import MultiheadAttention
from .dealt_parameters import deal_out
from .layernorm_linear import LayerNormLinear
from .layernorm_mlp import LayerNormMLP
from .parallel_options import ParallelOptions, mark
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
            matrices that lie one behind the other, by the names that these get.
        parts: by linear part, its mode, and the rows or columns that are dealt out.
        attributes: sizes that the module keeps, of which it then has a rank's part.
    """

    module: nn.Module
    sizes: Mapping[str, int]
    parameters: Mapping[str, tuple[int, Mapping[str, int]]] = field(default_factory=dict)
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
        yield Split(
            module,
            {"ffn_hidden_size": ffn},
            {
                **_rows(module, ("fc1_weight", "fc1_bias"), width),
                "fc2_weight": (1, {"fc2_weight": ffn}),
            },
            {"fc1": (COLUMN, width), "fc2": (ROW, ffn)},
            ("ffn_hidden_size",),
        )
    elif isinstance(module, LayerNormLinear):
        yield _columns(module, {"out_features": module.out_features})


def _rows(module: Any, names: tuple[str, ...], rows: int) -> dict[str, tuple[int, dict[str, int]]]:
    """Return how parameters are cut that have matrices of several names, or one."""
    apart = separate_names(module)
    several = {name for name in names if len(apart.get(name, ())) > 1}
    return {name: (0, apart[name] if name in several else {name: rows}) for name in names}


def _columns(module: Any, sizes: Mapping[str, int]) -> Split:
    """Return what becomes of a linear module of which each rank takes rows of each matrix."""
    rows = module.out_features
    cuts = _rows(module, ("weight", "bias"), rows)
    return Split(module, sizes, cuts, {"": (COLUMN, rows)}, ("out_features",))


def _of_attention(module: MultiheadAttention) -> Iterator[Split]:
    heads, groups, features = (
        module.num_attention_heads,
        module.num_gqa_groups,
        module.kv_channels,
    )
    sizes = {"num_attention_heads": heads, "num_gqa_groups": groups}
    yield Split(module, sizes, attributes=tuple(sizes))
    core = module.core_attention
    offset = {"softmax_offset": (0, {"softmax_offset": heads})}
    yield Split(core, sizes, offset, attributes=tuple(sizes))
    for first in (module.qkv, module.layernorm_qkv, module.query_layer, module.layernorm_query):
        if first is not None:
            yield _columns(first, sizes)
    if module.key_value is not None:
        yield _columns(module.key_value, sizes)
    queries = heads * features
    columns = {"weight": (1, {"weight": queries})}
    yield Split(module.proj, sizes, columns, {"": (ROW, queries)}, ("in_features",))


def _problem(module: nn.Module, splits: list[Split], options: ParallelOptions, world: int) -> str:
    """Return why a module cannot be split, or nothing."""
    for one in module.modules():
        if isinstance(one, QuantizedModule) and one.is_parallel:
            return f"the module must be whole, got {one.name or type(one).__name__} that is a part"
        if isinstance(one, QuantizedModule) and (
            one.fuse_wgrad_accumulation or one.delay_wgrad_compute
        ):
            return (
                "fuse_wgrad_accumulation and delay_wgrad_compute take plain parameters, and these "
                f"become DTensors, got them of {one.name or type(one).__name__}; leave them off, "
                "or make the module with tp_group="
            )
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
    mesh: Any,
    share: Callable[[torch.Tensor], None],
) -> None:
    """Make a whole module this rank's part, in place; nothing is changed if that cannot be.

    Parameters are replaced by DTensors, those that are dealt out marked as a constructor with
    `tp_group` marks them. With `sequence_parallel` the gradients of those that every rank has whole
    are summed over ranks in the backward.

    Args:
        where: who asks, for errors.
        module: one of `SPLIT_TOGETHER`.
        options: with the group.
        mesh: of the ranks of the group.
        share: called with each parameter, while it is whole, to give all ranks the same values.

    Raises:
        ValueError: ranks do not divide a size, the module is a part already, or it has a layout
            that `sequence_parallel` does not take.
    """
    splits = list(splits_of(module))
    world = options.size(where)
    problem = _problem(module, splits, options, world)
    if problem:
        raise ValueError(f"{where}: {problem}")
    for parameter in module.parameters():
        share(parameter.detach())
    by_module = {split.module: split for split in splits}
    for one in module.modules():
        if one in by_module:
            _take_part(by_module[one], options, mesh)
        elif one._parameters:
            deal_out(one, {}, mesh)
    for one in module.modules():
        if isinstance(one, MultiheadAttention):
            one._size = world
            one._share_norms()
        elif isinstance(one, TransformerLayer) and options.sequence_parallel:
            norm: PlainNorm | None = one.layernorm
            if norm is not None:
                norm.group = next(iter(one.layernorm_mlp.parallel.values())).group


def _take_part(split: Split, options: ParallelOptions, mesh: Any) -> None:
    module: Any = split.module
    world, apart = mesh.size(), separate_names(module)
    cuts = {name: cut for name, cut in split.parameters.items() if name in module._parameters}
    deal_out(module, cuts, mesh)
    if any(len(cuts.get(name, (0, ()))[1]) > 1 for name in apart):
        module.__dict__["separate_rows"] = {}  # they are parameters now
    for name in split.attributes:
        setattr(module, name, getattr(module, name) // world)
    if not split.parts:
        return
    owner = type(module).__name__
    parts = {
        part: options.parallel(owner, mode, whole // world)
        for part, (mode, whole) in split.parts.items()
    }
    module.become_part(parts)
    module.become_dealt()
    for dim, matrices in cuts.values():
        for name in matrices:
            mark(module, name, next(iter(parts.values())), dim)
