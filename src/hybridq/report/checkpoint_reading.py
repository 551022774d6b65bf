"""checkpoint_summary: reads a checkpoint of any layout, weight by weight."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from typing import Any, Final

import torch

from ..calibration import Calibration, projection_of
from ..direction import COLUMNWISE, ROWWISE
from ..layouts import get, kv_cache_of
from ..ptq import Checkpoint, load_checkpoint
from ..ptq.found import Found, Weight, find, hf_quant_config
from ..ptq.source import open_source
from ..tensor import QuantizedTensor
from .checkpoint_summary import CacheScale, CheckpointSummary, WeightSummary

__all__ = ["checkpoint_summary"]

#: Values that are compared at a time.
_PIECE: Final = 1 << 22
_LAYER: Final = re.compile(r"(?:[^.]*[^.\d][^.]*\.)*(?:\d+(?=\.))?")
_EXPERT: Final = re.compile(r"(.*experts?)\.(\d+)\.")


def checkpoint_summary(
    path: str | os.PathLike[str],
    *,
    source: str | os.PathLike[str] | None = None,
    calibration: Calibration | str | os.PathLike[str] | None = None,
    reads_values: bool = True,
    layout: str | None = None,
) -> CheckpointSummary:
    """Return what a checkpoint holds, in whatever layout of `hybridq.layouts` it is.

    One weight is in memory at a time, and of its values those of one matrix.

    Args:
        path: a `.safetensors` file, or a folder with `model.safetensors` or an index.
        source: the checkpoint that it was made of, for errors: weights of the same names.
        calibration: tokens per expert, and amaxes of inputs that the files do not have.
        reads_values: whether weights are read, for their amaxes and errors; else only headers are.
        layout: of `hybridq.layouts`, that the checkpoint has; None: what its configuration and its
            tensors' names say.

    Raises:
        SpecError: there is no such layout.
        CheckpointError: a checkpoint cannot be read, or is quantized in a way that no layout reads.
        ValueError: errors were asked for, but no values.
        ImportError: safetensors is not installed.

    Example:
        >>> import tempfile, torch, hybridq
        >>> from safetensors.torch import save_file
        >>> folder = tempfile.mkdtemp()
        >>> save_file({"up.weight": torch.randn(64, 64)}, folder + "/model.safetensors")
        >>> _ = hybridq.convert_checkpoint(folder, folder + "-out", hybridq.quantizer("mxfp8"))
        >>> found = hybridq.report.checkpoint_summary(folder + "-out", source=folder)
        >>> found.layout, found.weights[0].text, found.weights[0].nbytes
        ('hybridq', 'rowwise mxfp8, columnwise mxfp8', 8448)
    """
    if source is not None and not reads_values:
        raise ValueError("checkpoint_summary: errors need values, got reads_values=False")
    if isinstance(calibration, str | os.PathLike):
        calibration = Calibration.load(calibration)
    checkpoint = load_checkpoint(path, layout)
    beside = None if source is None else load_checkpoint(source)
    found = find(open_source(path), None if layout is None else get(layout))
    inputs, caches = _scalars(found, checkpoint)
    weights, missing = [], []
    plain: dict[str, list[int]] = {}
    for item in (one for shard in found.source.shards for one in found.items(shard)):
        if not isinstance(item, Weight):
            counts = plain.setdefault(item.dtype, [0, 0, 0])
            for place, more in enumerate((1, math.prod(item.shape), item.nbytes)):
                counts[place] += more
            continue
        name, amax, error = item.entry.name, None, None
        if reads_values:
            own = None if beside is None else beside.get(name)
            amax, error = _measured(checkpoint[name], own)
            missing += [name] if beside is not None and error is None else []
        module = name.removesuffix(".weight")
        input_amax = inputs.get(module, _input_amax(calibration, module))
        shared = (amax, input_amax, error, _tokens(calibration, module))
        scheme = "" if item.scheme is None else item.scheme.name
        weights.append(
            WeightSummary(name, _formats(item), scheme, item.entry.shape, _nbytes(item), *shared)
        )
    return CheckpointSummary(
        os.fspath(path),
        None if found.layout is None else found.layout.name,
        tuple(weights),
        tuple(caches),
        tuple((dtype, own[0], own[1], own[2]) for dtype, own in sorted(plain.items())),
        tuple(missing),
    )


def _scalars(found: Found, checkpoint: Checkpoint) -> tuple[dict[str, float], list[CacheScale]]:
    """Return the amaxes that scales of activations stand for: of inputs by module, of caches."""
    inputs: dict[str, float] = {}
    caches: list[CacheScale] = []
    if found.layout is None:
        return inputs, caches
    kinds = {
        one.entry.name.removesuffix(".weight"): one.scheme
        for one in found.weights.values()
        if one.scheme is not None
    }
    kv_cache = kv_cache_of(found.config, hf_quant_config(found.source))
    for name in found.scalars:
        known, value = found.layout.scalar_of(name, kinds, kv_cache), checkpoint[name]
        if known is None or not isinstance(value, torch.Tensor):
            continue
        part, module = known
        amax = float(part.read(value))
        if part.slot == "input":
            inputs[module] = amax
        else:
            caches.append(CacheScale(module, part.slot, amax))
    return inputs, caches


def _formats(weight: Weight) -> tuple[tuple[str, str], ...]:
    """Return the formats of a weight's planes by direction."""
    if weight.record is None:
        return ((ROWWISE, weight.view.spec.short_text),)
    both = ((ROWWISE, weight.record.row), (COLUMNWISE, weight.record.col))
    return tuple((direction, spec.short_text) for direction, spec in both if spec is not None)


def _nbytes(weight: Weight) -> int:
    """Return the bytes of all planes of a weight."""
    if weight.record is not None:
        return sum(one.nbytes for one in weight.record.stored())
    return sum(entry.nbytes for _, entry in weight.view.entries)


def _count(value: Any) -> int:
    """Return how many matrices a weight has."""
    if isinstance(value, list):
        return len(value)
    return value.shape[0] if value.dim() == 3 else 1


def _matrices(value: Any) -> Iterator[torch.Tensor]:
    """Yield the values of a weight in FP32, matrix by matrix."""
    for one in value if isinstance(value, list) else [value]:
        values = one.dequantize() if isinstance(one, QuantizedTensor) else one
        for matrix in values if values.dim() == 3 else [values]:
            yield matrix.float()


def _measured(value: Any, source: Any) -> tuple[float, float | None]:
    """Return the largest magnitude of a weight, and its relative error beside the source's.

    None: the source has it not, or in another shape, or values are not finite.
    """
    has_source = source is not None and _count(source) == _count(value)
    others = _matrices(source) if has_source else (None for _ in range(_count(value)))
    amax, signal, noise = 0.0, 0.0, 0.0
    for made, found in zip(_matrices(value), others, strict=True):
        amax = max(amax, float(made.abs().max()) if made.numel() else 0.0)
        # Some layouts hold the transposed matrix of what the source has.
        want = found.t() if found is not None and found.shape != made.shape else found
        if want is None or want.shape != made.shape:
            has_source = False
            continue
        rows = max(_PIECE // max(made.shape[1], 1), 1)
        for at in range(0, made.shape[0], rows):
            wide = want[at : at + rows].double()
            signal += float(wide.square().sum())
            noise += float((made[at : at + rows].double() - wide).square().sum())
    is_known = has_source and math.isfinite(signal + noise) and (signal > 0 or noise == 0)
    return amax, math.sqrt(noise / signal if signal else 0.0) if is_known else None


def _stacks(calibration: Calibration, module: str) -> Iterator[tuple[str, int]]:
    """Yield the stacks of a calibration that an expert with a name of its own may be part of.

    The module may have another name in the model than in its files: then all of its layer's.
    """
    expert = _EXPERT.match(f"{module}.")
    if expert is None:
        return
    own = [
        name
        for name, count in calibration.tokens.items()
        if count.dim() and int(expert[2]) < len(count) and _layer(name) == _layer(module)
    ]
    same = [name for name in own if name.startswith(f"{expert[1]}.")]
    yield from ((name, int(expert[2])) for name in same or own)


def _layer(name: str) -> str:
    """Return a name up to the number of its layer."""
    return _LAYER.match(name)[0]  # type: ignore[index]  # it matches everything


def _tokens(calibration: Calibration | None, module: str) -> tuple[int, ...]:
    """Return how many tokens the experts of a weight had; nothing for one that is no expert."""
    if calibration is None:
        return ()
    count = calibration.tokens.get(module)
    if count is not None:
        is_expert = count.dim() or projection_of(module) != module
        return tuple(count.reshape(-1).tolist()) if is_expert else ()
    return next(
        ((int(calibration.tokens[stack][e]),) for stack, e in _stacks(calibration, module)), ()
    )


def _input_amax(calibration: Calibration | None, module: str) -> float | None:
    """Return the amax of a module's input by a calibration; None: it has none."""
    if calibration is None:
        return None
    amax = calibration.amax(module, "input")
    if amax is None:
        for stack, e in _stacks(calibration, module):
            if _is_second(stack) == _is_second(module):
                amax = calibration.amax(f"{stack}.{e}", "input")
    return None if amax is None else float(amax.max())


def _is_second(name: str) -> bool:
    """Return whether a product is the second of an expert, by its name."""
    return any(part in name.rpartition(".")[2] for part in ("down", "w2"))
