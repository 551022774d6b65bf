"""Convert a checkpoint shard by shard, with bounded memory, so that it can be stopped anywhere."""

from __future__ import annotations

import os
import time
from pathlib import Path

from ..errors import CheckpointError, path_in
from ..formats import PlaneSpec
from ..layouts import get
from ..quantizers import Quantizer
from .disk import kind_of
from .found import find
from .model_word import tell_of_unknown, word_of_source
from .observer import Observer
from .options import ConvertOptions
from .outcome import Conversion
from .run import Run
from .select import Selection, tell_of_dtypes, tell_of_unused
from .source import SUFFIX, open_source
from .training import TrainingScheme

__all__ = ["check_paths", "convert_checkpoint"]


def convert_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    selection: Selection | Quantizer | str,
    options: ConvertOptions | None = None,
    observer: Observer | None = None,
    *,
    source_layout: str | None = None,
) -> Conversion:
    """Quantize the weights of a safetensors checkpoint into a new one.

    The source is only read. A shard of the target gets its name once it is whole and on the disk;
    a run that was stopped is continued by the same call. The bytes written follow from the source
    and the selection alone.

    Args:
        source: a `.safetensors` file, or a folder with `model.safetensors` or an index.
        target: a file for a file, a folder for a folder; outside of the source.
        selection: what is quantized, and by which quantizer; or a quantizer, or the name of a
            format for rowwise planes, for what is quantized by default.
        options: memory, errors, what to refuse; None: the defaults.
        observer: is told how far it is; None: only warnings.
        source_layout: name of the layout of `hybridq.layouts` that a quantized source has; None:
            what its configuration and its tensors say.

    Raises:
        CheckpointError: the source is damaged or holds nothing to quantize, the target holds
            something else, the disk is full, ...; the source is as it was, finished shards stay.
        SpecError: a recipe gives a quantizer that a checkpoint cannot have, or there is no format
            or layout of that name.
        ValueError: `source` or `target` is an empty path.
        TypeError: `selection` is none of these.
        ImportError: safetensors is not installed.

    Example:
        >>> import tempfile, torch, hybridq
        >>> from safetensors.torch import save_file
        >>> folder = tempfile.mkdtemp()
        >>> save_file({"up.weight": torch.ones(64, 32)}, f"{folder}/a.safetensors")
        >>> done = hybridq.convert_checkpoint(
        ...     f"{folder}/a.safetensors", f"{folder}/b.safetensors", "nvfp4"
        ... )
        >>> done.source_nbytes, done.target_nbytes
        (8192, 1156)
    """
    begun = time.monotonic()
    chosen = _selection(selection)
    options, observer = options_of("convert_checkpoint", options, observer)
    known = None if source_layout is None else get(source_layout)
    own = path_in("convert_checkpoint: source", source)
    made = path_in("convert_checkpoint: target", target)
    check_paths(own, made)
    opened = open_source(source)
    found = find(opened, known)
    word = word_of_source(found)
    tell_of_unknown(word, found, observer.warn)
    tell_of_unused(chosen, found.names, found.has_stacks, observer.warn)
    tell_of_dtypes(chosen, found.plain, word.keeps, observer.warn)
    scheme = TrainingScheme(chosen, found, word, refuses_own=True)
    run = Run(opened, made, scheme, options, observer)
    run.convert()
    return run.outcome(time.monotonic() - begun)


def options_of(
    where: str, options: ConvertOptions | None, observer: Observer | None
) -> tuple[ConvertOptions, Observer]:
    """Return options and an observer, the usual ones for None.

    Args:
        where: who asks, for the error.
        options, observer: what the caller gave.

    Raises:
        TypeError: one is something else.
    """
    given: tuple[tuple[str, object, type], ...] = (
        ("options", options, ConvertOptions),
        ("observer", observer, Observer),
    )
    for name, one, kind in given:
        if one is not None and not isinstance(one, kind):
            raise TypeError(
                f"{where}: {name} must be a hybridq.ptq.{kind.__name__}, got {type(one).__name__}"
            )
    usual = ConvertOptions() if options is None else options
    return usual, Observer() if observer is None else observer


def _selection(given: object) -> Selection:
    if isinstance(given, Selection):
        return given
    if isinstance(given, str):
        given = Quantizer(PlaneSpec.parse(given), None)
    if not isinstance(given, Quantizer):
        raise TypeError(
            "convert_checkpoint: selection must be a Selection, a Quantizer or the name of a "
            f"format, got {type(given).__name__}"
        )
    return Selection(given)


def check_paths(source: Path, target: Path) -> None:
    """Raise CheckpointError unless `target` may be made of `source`.

    Args:
        source: a file or a folder.
        target: of the same kind, and outside of it.
    """
    kinds = kind_of(source), kind_of(target)
    inside, outside = source.resolve(), target.resolve()
    if inside == outside:
        raise CheckpointError(f"checkpoint: source and target must differ, got {source} for both")
    if kinds[0] == "folder" and inside in outside.parents:
        raise CheckpointError(
            f"checkpoint: the target {target} must not lie in the source {source}"
        )
    if outside in inside.parents:
        raise CheckpointError(
            f"checkpoint: the source {source} must not lie in the target {target}"
        )
    if kinds == ("file", "folder"):
        raise CheckpointError(
            f"checkpoint: the source is a file, so the target must be one, got the folder {target}"
        )
    if kinds[0] == "file" and target.suffix != SUFFIX:
        raise CheckpointError(f"checkpoint: the target must end in {SUFFIX}, got {target}")
    if kinds[0] == "folder" and kinds[1] not in ("", "folder"):
        raise CheckpointError(
            f"checkpoint: the source is a folder, so the target must be one, got the file {target}"
        )
