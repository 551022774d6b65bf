"""Write a checkpoint, whatever it is quantized in, in a layout that other programs read."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from ..calibration import Calibration
from ..calibration.batches import unwrapped
from ..converters import adapted
from ..errors import CheckpointError, SpecError, must_be_one_of, names_in, path_in
from ..formats import PlaneSpec
from ..layouts import HYBRIDQ, Layout, get, names
from ..nn import QuantizedModule
from ..nn.modules.parallel_weights import first_own_part
from ..quantizers import Quantizer
from ..recipes import Recipe
from .choice import choice_of
from .convert import check_paths, options_of
from .draft import CheckpointScheme
from .exporting import ExportScheme
from .found import Found, find
from .in_memory import source_of, tied_without_telling
from .model_word import ModelWord, tell_of_unknown, word_of, word_of_source
from .observer import Observer
from .options import ConvertOptions
from .outcome import Conversion
from .pieces import is_of_one_expert
from .plain import PLAIN_LAYOUTS, PlainScheme
from .run import Run
from .scales import Scales
from .select import Selection, tell_of_dtypes, tell_of_unused
from .sharded_model import ShardedModel, holds_parts
from .source import CONFIG, open_source
from .training import TrainingScheme

__all__ = ["export"]


def export(
    source: str | os.PathLike[str] | nn.Module,
    target: str | os.PathLike[str],
    *,
    layout: str | Layout,
    format: str | Quantizer | None = None,
    recipe: str | Recipe | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    calibration: Calibration | str | os.PathLike[str] | None = None,
    kv_cache: str | None = None,
    source_layout: str | None = None,
    options: ConvertOptions | None = None,
    observer: Observer | None = None,
) -> Conversion:
    """Write the weights of a checkpoint, or of a model, in a layout that other programs read.

    The source may be plain or quantized in any layout of `hybridq.layouts`. Weights that are in the
    format already keep their codes and scales; others are decoded exactly and encoded anew. It is
    streamed, and continued after a stop, as `convert_checkpoint` is. Of a model whose parameters
    are shared out to ranks (DTensors: FSDP2, tensor parallelism) all ranks call it alike; the first
    one writes, and no rank has more than one whole tensor at a time. See docs/guides/export.md.

    Args:
        source: a `.safetensors` file, a folder with `model.safetensors` or an index, or a model:
            its tensors get the names that transformers would save them under, and planes that it
            has in the format stay as they are. What is no tensor is not written; of a tokenizer
            nothing is known.
        target: a file for a file, a folder for a folder; outside of the source.
        layout: of the new checkpoint: a name in `hybridq.layouts`; or `"bf16"`, `"fp16"` or
            `"fp32"`, to decode what is quantized.
        format: of the weights: a name, a PlaneSpec's string, a scheme's name of the layout
            (`"fp8_channel"`), or a quantizer; None: weights that are quantized stay in theirs.
        recipe: instead of a format, a recipe, which is asked for each weight.
        include: globs of names of tensors to quantize; none: linear layers and experts but what
            the model keeps in high precision.
        exclude: globs of names to leave in high precision.
        calibration: amaxes of inputs, or the path of their file: scales of inputs are static then,
            where the layout knows them; None: those of the source, or dynamic ones.
        kv_cache: what the caches of attention are held in, `"fp8"` or another of the layout's;
            needs a calibration that has seen them, or a source that has such scales; None: as in
            the source.
        source_layout: name of the layout that the source has; None: what its configuration and its
            tensors say.
        options: memory, errors, what to refuse; None: the defaults.
        observer: is told how far it is, and of what is left in high precision.

    Raises:
        CheckpointError: the source is damaged or quantized in a way that no layout reads, nothing
            in it is chosen, an amax is missing, the target holds something else, the model has
            adapters that are not merged, or modules made for one rank of several, ...; on every
            rank, if the first one fails.
        RuntimeError: ranks have different models or ask for different exports.
        SpecError: there is no such layout, or it does not hold this format.
        TypeError: include or exclude is one text, and no collection of globs; source, target,
            options or observer is something else.
        ValueError: source or target is an empty path.
        ImportError: safetensors is not installed.

    Example:
        >>> import json, tempfile, torch, hybridq
        >>> from pathlib import Path
        >>> from safetensors.torch import load_file, save_file
        >>> folder = Path(tempfile.mkdtemp())
        >>> save_file({"mlp.up_proj.weight": torch.ones(64, 32)}, folder / "a.safetensors")
        >>> done = hybridq.export(
        ...     folder / "a.safetensors", folder / "b.safetensors", layout="modelopt",
        ...     format="nvfp4", observer=hybridq.ptq.Observer(),
        ... )
        >>> sorted(name.rpartition(".")[2] for name in load_file(folder / "b.safetensors"))
        ['weight', 'weight_scale', 'weight_scale_2']
    """
    options, observer = options_of("export", options, observer)
    into = path_in("export: target", target)
    asked = _Asked(
        layout,
        format,
        recipe,
        names_in("export: include", include),
        names_in("export: exclude", exclude),
        calibration,
        kv_cache,
        options,
        observer,
    )
    known = None if source_layout is None else get(source_layout)
    if not isinstance(source, nn.Module):
        check_paths(path_in("export: source", source), into)
        found = find(open_source(source), known)
        return asked.write(found, None, into)
    model = unwrapped(source)
    adapters = adapted(model)
    if adapters:
        raise CheckpointError(
            f"export: {adapters[0]} has adapters beside its weight, which no reader of a whole "
            "model adds; call merge_and_unload() first, or unload() to leave them out"
        )
    part = first_own_part(model)
    if part is not None:
        raise CheckpointError(
            f"export: {part} is made for one rank of several (tp_group= or tp_size=), and its "
            "parameters are parts; deal a whole model out by parallelize_module (FusedParallel), "
            "whose DTensors are put together, or load the parts into a whole one first"
        )

    def write(state: Mapping[str, torch.Tensor]) -> Conversion:
        names = [name for name, one in model.named_modules() if _has_static_scales(one)]
        if names and calibration is None:
            asked.observer.warn(
                f"static scales of the inputs of {len(names)} modules ({names[0]}, ...) are not "
                "exported; give the calibration that they are of"
            )
        tied = tied_without_telling(model)
        if tied:
            others = ", ".join(f"{name} (of {first})" for name, first in tied.items())
            asked.observer.warn(
                f"tied weights are written once, without {others}: load them into a model that "
                "ties them too, with strict=False, or give each a copy before the export"
            )
        return asked.write(find(source_of(model, state), known), word_of(model), into)

    state = model.state_dict(keep_vars=True)
    if holds_parts(state):
        said = (("the target", str(target)), ("the layout", str(layout)))
        made: Conversion = ShardedModel(model, state).run(write, said)
        return made
    tensors = {name: v.detach() for name, v in state.items() if isinstance(v, torch.Tensor)}
    return write(tensors)


def _has_static_scales(module: nn.Module) -> bool:
    return isinstance(module, QuantizedModule) and bool(module.static_state())


@dataclass(frozen=True)
class _Asked:
    """What an export is asked for; see `export`."""

    layout: str | Layout
    format: str | Quantizer | None
    recipe: str | Recipe | None
    include: tuple[str, ...]
    exclude: tuple[str, ...]
    calibration: Calibration | str | os.PathLike[str] | None
    kv_cache: str | None
    options: ConvertOptions
    observer: Observer

    def write(self, found: Found, word: ModelWord | None, target: Path) -> Conversion:
        """Write a checkpoint.

        Args:
            found: the source.
            word: what its model says, if that is in memory.
            target: the file or folder.
        """
        begun = time.monotonic()
        scheme = self._scheme(found, word)
        run = Run(found.source, target, scheme, self.options, self.observer)
        run.convert()
        return run.outcome(time.monotonic() - begun)

    def _scheme(self, found: Found, word: ModelWord | None) -> CheckpointScheme:
        """Return what the weights become; say what the user should know of it."""
        layout = self.layout
        if isinstance(layout, str) and layout in PLAIN_LAYOUTS:
            choices = (self.format, self.recipe, self.include, self.exclude)
            if any((*choices, self.calibration, self.kv_cache)):
                raise SpecError(f"export: {layout} decodes everything, so it takes no other choice")
            plain = PlainScheme(found, PLAIN_LAYOUTS[layout])
            weights = [one.entry.name for one in found.weights.values()]
            if any(is_of_one_expert(name) for name in weights):
                word = word_of_source(found) if word is None else word
                strange = word.tell_of_strangers(weights)
                if strange is not None:
                    self.observer.warn(strange)
            return plain
        if isinstance(layout, str) and layout not in names():
            known = (*(name for name in names() if not get(name).instead), *PLAIN_LAYOUTS)
            raise SpecError(f"export: layout {must_be_one_of(known, layout)}")
        calibration = _calibration(self.calibration)
        layout = get(layout)
        if layout.instead:
            raise SpecError(
                f"export: {layout.name} is read, and not written; take {layout.instead}"
            )
        if layout is not HYBRIDQ:
            return self._for_readers(found, word, layout, calibration)
        if calibration is not None or self.kv_cache is not None:
            raise SpecError("export: the layout hybridq holds no scales of inputs and caches")
        if found.scalars:
            first = next(iter(found.scalars))
            self.observer.warn(
                f"{len(found.scalars)} scales of inputs and KV caches ({first}, ...) are not "
                "carried over: the layout hybridq holds none"
            )
        own = self.format
        if own is None and self.recipe is None:
            raise SpecError(
                "export: the layout hybridq needs a format or a recipe, which says what planes "
                "are, got neither; weights that have that format already keep their codes"
            )
        quantizer = Quantizer(PlaneSpec.parse(own), None) if isinstance(own, str) else own
        chosen = Selection(quantizer, self.recipe, self.include, self.exclude)
        word = word_of_source(found) if word is None else word
        tell_of_unknown(word, found, self.observer.warn)
        tell_of_unused(chosen, found.names, found.has_stacks, self.observer.warn)
        tell_of_dtypes(chosen, found.plain, word.keeps, self.observer.warn)
        return TrainingScheme(chosen, found, word)

    def _for_readers(
        self, found: Found, known: ModelWord | None, layout: Layout, calibration: Calibration | None
    ) -> ExportScheme:
        _refuse_transposed(found, layout)
        word = word_of_source(found) if known is None else known
        warn = self.observer.warn
        if word.reason is not None:
            warn(f"what keeps its precision is known by names alone, since {word.reason}")
        choice = choice_of(layout, word, self.format, self.recipe, self.include, self.exclude)
        tell_of_unused(choice.selection, found.names, found.has_stacks, warn)
        if not choice.is_kept:
            tell_of_dtypes(choice.selection, found.plain, word.keeps, warn)
        scales = Scales(found, calibration, word.in_model)
        made = ExportScheme(found, choice, scales, self.kv_cache)
        is_told_by_config = not any(one.mark for one in layout.schemes)
        is_of_transformers = "model_type" in found.config
        if found.source.is_folder and not is_told_by_config and is_of_transformers:
            warn(
                f"transformers takes codes of {layout.name} for values, since no {CONFIG} says "
                "what they are: load the new folder by hybridq.integrations.transformers.load"
            )
        if found.source.is_folder and is_told_by_config and not is_of_transformers:
            warn(
                f"{found.source.path} has no {CONFIG} of a model, in which readers look for how "
                "weights are quantized: no program will load the new folder by itself"
            )
        for note in made.notes:
            warn(note)
        return made


def _calibration(given: Calibration | str | os.PathLike[str] | None) -> Calibration | None:
    return given if given is None or isinstance(given, Calibration) else Calibration.load(given)


def _refuse_transposed(found: Found, layout: Layout) -> None:
    """Raise where quantized weights have their blocks along the side that no reader expects.

    Raises:
        CheckpointError: one is of a model that keeps it as `[in, out]`.
    """
    weights = [one.entry for one in found.weights.values() if one.entry.is_transposed]
    if weights:
        raise CheckpointError(
            f"export: {weights[0].name} is quantized, and its model keeps it as [in, out], which "
            f"readers of {layout.name} do not expect; export the model as it was before it was "
            "quantized (such weights then stay in high precision), or with layout='bf16'"
        )
