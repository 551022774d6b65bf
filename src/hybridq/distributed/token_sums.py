"""`quantize_token_sums`: reduce-scatters of sequence parallelism whose terms are quantized."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn

from .._log import log_once
from .._torch_ranks import process_group
from ..nn import QuantizedModule
from ..nn.modules.token_sums import BY_RECIPE, sum_format
from .agreement import Fingerprint, compare
from .collectives import formats_of_directions

__all__ = ["quantize_token_sums"]

_Model = TypeVar("_Model", bound=nn.Module)
_WHERE = "quantize_token_sums"


def quantize_token_sums(model: _Model, communication: Any) -> _Model:
    """Quantize the sums over ranks of which each gets its tokens; return the model.

    With sequence parallelism the output of a row parallel layer is a sum of which each rank takes
    its tokens, and so is, in the backward, the gradient of a column parallel layer's input. Each
    rank quantizes its term, row by row, and sends each other rank its rows; the receiver decodes,
    adds in FP32 in the order of ranks, and rounds once. Terms are quantized, and each brings an
    error of its own, so formats of 8 bits are what to begin with.

    Args:
        model: with modules that are parts: made with `tp_group=` and `sequence_parallel=True`, or
            split by `hybridq.distributed.ColwiseParallel` and `RowwiseParallel`.
        communication: the name of a format whose scales are of one row each (`"mxfp8"`,
            `"fp8_1x128"`, `"nvfp4"`), for both directions; a pair, of outputs and of gradients;
            `"recipe"`: the recipe's factory is asked for the roles `"output_sum"` and
            `"grad_input_sum"`; None: values.

    Raises:
        TypeError: an argument is of another type.
        ValueError: the model has no such module.
        SpecError: no such format, one whose scales are of several rows, or one that is rounded
            stochastically.
        RuntimeError: ranks differ in the formats.

    Source: ours; one quantization for each value: ZeRO++ (Wang et al., arXiv:2306.10209).

    Example:
        >>> import hybridq
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> group = {"tp_group": dist.group.WORLD, "sequence_parallel": True}
        >>> layer = hybridq.Linear(64, 64, parallel_mode="row", **group)
        >>> layer = hybridq.distributed.quantize_token_sums(layer, "mxfp8")
        >>> layer.token_sums
        ('e4m3/1x32/e8m0/rceil/mxfp8', 'e4m3/1x32/e8m0/rceil/mxfp8')
        >>> dist.destroy_process_group()
    """
    given: object = model
    if not isinstance(given, nn.Module):
        raise TypeError(f"{_WHERE}: model must be an nn.Module, got {type(given).__name__}")
    both = formats_of_directions(_WHERE, communication, (BY_RECIPE,))
    values, grads = (one if one in ("", BY_RECIPE) else sum_format(_WHERE, one) for one in both)
    sums = (values, grads)
    found = {name: one for name, one in model.named_modules() if isinstance(one, QuantizedModule)}
    parts = {name: group for name, one in found.items() if (group := _group_of(one)) is not None}
    if not parts:
        raise ValueError(
            f"{_WHERE}: the model must have parts whose tokens are dealt out, got "
            f"{type(model).__name__} without any; make modules with tp_group= and "
            "sequence_parallel=True, or call parallelize_module with hybridq.distributed's styles"
        )
    for group in sorted(set(parts.values())):
        told = Fingerprint((("the formats of sums", " and ".join(sums)),))
        compare(told, process_group(group), _WHERE, "every rank must choose the same formats")
    for name in parts:
        found[name].token_sums = sums if any(sums) else None
    left = [name for name, one in found.items() if name not in parts and _is_split(one)]
    if left:
        log_once(
            f"{_WHERE} {left[0]}",
            f"{_WHERE}: sums of {len(left)} modules stay values, {left[0]} the first of them: "
            "tokens are not dealt out (sequence_parallel=True), or torch's own styles reduce them",
        )
    return model


def _group_of(module: Any) -> str | None:
    """Return the group over which a module's tokens are dealt out; None: they are not."""
    for parallel in module.parallel.values():
        if parallel.sequence_parallel and parallel.rank >= 0:
            own: str = parallel.group
            return own
    if module.scatters_tokens is not None or module.gathers_tokens:
        name: str = module.weight.device_mesh.get_group().group_name
        return name
    return None


def _is_split(module: Any) -> bool:
    """Return whether a weight of a module is a part of one."""
    weights = (getattr(one, "device_mesh", None) for one in module.parameters(recurse=False))
    return bool(module.is_parallel) or any(mesh is not None for mesh in weights)
