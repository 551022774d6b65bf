"""Convert a checkpoint shard by shard, with bounded memory, so that it can be stopped anywhere."""

from __future__ import annotations

import os
import time
from pathlib import Path

from ..errors import CheckpointError
from .observer import Observer
from .options import ConvertOptions
from .outcome import Conversion
from .run import Run
from .select import Selection
from .source import SUFFIX, open_source

__all__ = ["convert_checkpoint"]


def convert_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    selection: Selection,
    options: ConvertOptions | None = None,
    observer: Observer | None = None,
) -> Conversion:
    """Quantize the weights of a safetensors checkpoint into a new one.

    The source is only read. A shard of the target gets its name once it is whole and on the disk;
    a run that was stopped is continued by the same call. The bytes written follow from the source
    and the selection alone.

    Args:
        source: a `.safetensors` file, or a folder with `model.safetensors` or an index.
        target: a file for a file, a folder for a folder; outside of the source.
        selection: what is quantized, and by which quantizer.
        options: memory, errors, what to refuse; None: the defaults.
        observer: is told how far it is; None: only warnings.

    Raises:
        CheckpointError: the source is damaged or holds nothing to quantize, the target holds
            something else, the disk is full, ...; the source is as it was, finished shards stay.
        SpecError: a recipe gives a quantizer that a checkpoint cannot have.
        ImportError: safetensors is not installed.

    Example:
        >>> import tempfile, torch, hybridq
        >>> from safetensors.torch import save_file
        >>> folder = tempfile.mkdtemp()
        >>> save_file({"up.weight": torch.ones(64, 32)}, f"{folder}/a.safetensors")
        >>> chosen = hybridq.ptq.Selection(hybridq.quantizer("nvfp4", None))
        >>> done = hybridq.convert_checkpoint(
        ...     f"{folder}/a.safetensors", f"{folder}/b.safetensors", chosen
        ... )
        >>> done.source_nbytes, done.target_nbytes
        (8192, 1156)
    """
    begun = time.monotonic()
    options = options or ConvertOptions()
    observer = observer or Observer()
    _check_paths(Path(source), Path(target))
    found = open_source(source)
    run = Run(found, Path(target), selection, options, observer)
    run.convert()
    return run.outcome(time.monotonic() - begun)


def _check_paths(source: Path, target: Path) -> None:
    inside, outside = source.resolve(), target.resolve()
    if inside == outside:
        raise CheckpointError(f"checkpoint: source and target must differ, got {source} for both")
    if inside.is_dir() and inside in outside.parents:
        raise CheckpointError(
            f"checkpoint: the target {target} must not lie in the source {source}"
        )
    if outside in inside.parents:
        raise CheckpointError(
            f"checkpoint: the source {source} must not lie in the target {target}"
        )
    if target.is_dir() and inside.is_file():
        raise CheckpointError(
            f"checkpoint: the source is a file, so the target must be one, got the folder {target}"
        )
    if inside.is_file() and target.suffix != SUFFIX:
        raise CheckpointError(f"checkpoint: the target must end in {SUFFIX}, got {target}")
    if inside.is_dir() and target.exists() and not target.is_dir():
        raise CheckpointError(
            f"checkpoint: the source is a folder, so the target must be one, got the file {target}"
        )
