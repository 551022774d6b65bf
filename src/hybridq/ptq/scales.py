"""Scales of inputs and KV caches in a checkpoint: of a calibration, or as the source has them."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import torch

from ..calibration import Calibration
from ..errors import CheckpointError, SpecError, must_be_one_of
from ..layouts import Layout, ScalarPart, Scheme, kv_cache_of
from .draft import Draft, fixed
from .files import as_bytes
from .found import Found, Weight, hf_quant_config
from .header import TORCH_DTYPES

__all__ = ["Scales"]

_SUFFIX: Final = ".weight"
_EXPERT: Final = re.compile(r"(.*\.experts)\.(\d+)\.([^.]+)")
#: What separate experts call their matrices, to what stacks of them are called.
_STACKS: Final = {
    **dict.fromkeys(("gate_proj", "up_proj", "w1", "w3"), "gate_up_proj"),
    **dict.fromkeys(("down_proj", "w2"), "down_proj"),
}


class Scales:
    """Knows the amaxes of inputs and KV caches.

    Args:
        found: the source, whose own scales count where there is no calibration.
        calibration: of the model, or None.
        in_model: gives the parameter of the model that a tensor of the checkpoint becomes.

    Attributes:
        notes: what the user should know.
    """

    def __init__(
        self, found: Found, calibration: Calibration | None, in_model: Callable[[str], str]
    ) -> None:
        self._found = found
        self._calibration = calibration
        self._in_model = in_model
        self.notes: list[str] = []
        many = [name for name, (_, one) in found.scalars.items() if math.prod(one.shape) > 1]
        if many and calibration is None:
            self.notes.append(
                f"{len(many)} scales of inputs and KV caches ({many[0]}, ...) have several values "
                "each; the largest amax stands for all of them"
            )

    @property
    def is_calibrated(self) -> bool:
        """Whether a calibration was given."""
        return self._calibration is not None

    def digest(self) -> str:
        """Return what tells one calibration from another."""
        digest = hashlib.sha256()
        for name, slot, value in () if self._calibration is None else self._calibration.entries():
            digest.update(f"{name}\0{slot}\0".encode())
            digest.update(as_bytes(value.contiguous().clone()))
        return "" if self._calibration is None else digest.hexdigest()

    def has(self, weight: Weight | None) -> bool:
        """Return whether the source has a scale of the input of a weight.

        Args:
            weight: of the source; None: it is not quantized there.
        """
        return weight is not None and self._scalar(weight) in self._found.scalars

    @staticmethod
    def _scalar(weight: Weight) -> str:
        part = None if weight.scheme is None else weight.scheme.input
        return "" if part is None else part.name.format(module=weight.entry.name[: -len(_SUFFIX)])

    def input(self, module: str, weight: Weight | None) -> torch.Tensor | None:
        """Return the amax of a linear's input, FP32 `[1]`; None: it is not known.

        Args:
            module: name of the linear in the new checkpoint.
            weight: of the source, if it is quantized there.
        """
        if self._calibration is not None:
            return self._of_calibration(module, "input")
        if weight is None or weight.scheme is None or weight.scheme.input is None:
            return None
        return weight.scheme.input.read(self._read(self._scalar(weight)))

    def _of_calibration(self, name: str, slot: str) -> torch.Tensor | None:
        if self._calibration is None:
            return None
        for one in self._names(name):
            value = self._calibration.amax(one, slot)
            if value is not None:
                return value.reshape(-1).max().reshape(1)
        return None

    def _names(self, name: str) -> Iterable[str]:
        """Yield what a calibration may call a module, which may be one of a stack of experts."""
        target = self._in_model(f"{name}{_SUFFIX}")
        yield target.removesuffix(_SUFFIX)
        expert = _EXPERT.fullmatch(name)
        if expert is not None:
            yield f"{target}.{expert[2]}"
            yield f"{expert[1]}.{_STACKS.get(expert[3], expert[3])}.{expert[2]}"

    def way(self, layout: Layout, schemes: Iterable[Scheme], has_all: bool) -> str:
        """Return how inputs are quantized, in the layout's words.

        Args:
            layout: of the new checkpoint.
            schemes: of its weights.
            has_all: the source has a scale for the input of each.

        Raises:
            SpecError: they must be static, and no scale is known.
        """
        known = set.intersection(*(set(scheme.inputs) for scheme in schemes))
        is_static = self._calibration is not None or has_all
        order = (*(("static",) if is_static else ()), "dynamic", "none")
        found = next((one for one in order if one in known), "")
        if not found and known == {"static"}:
            raise SpecError(
                f"export: inputs in {layout.name} have static scales for this format, so it needs "
                "a calibration"
            )
        return found

    def input_draft(self, module: str, weight: Weight | None, part: ScalarPart) -> Draft:
        """Return what writes the scale of a linear's input.

        Args:
            module: name of the linear in the new checkpoint.
            weight: of the source, if it is quantized there.
            part: of the new checkpoint.

        Raises:
            CheckpointError: it is not known.
        """
        amax = self.input(module, weight)
        if amax is None:
            raise CheckpointError(
                f"export: {module} has no amax of its input, which a static scale needs; "
                "calibrate with data that reaches it, leave it out with an exclude pattern, or "
                "export without a calibration"
            )
        return fixed(part.name.format(module=module), part.write(amax))

    def caches(
        self, layout: Layout, kind: str | None, attentions: Mapping[str, str]
    ) -> tuple[str | None, dict[str, dict[str, torch.Tensor]]]:
        """Return what KV caches are held in, and their scales, by file and name.

        Those of the calibration; without one, or where none are asked for, those of the source.

        Args:
            layout: of the new checkpoint.
            kind: what the caches are held in, as the layout calls it; None: as in the source.
            attentions: names of modules of the checkpoint, and the files that they are in.

        Raises:
            SpecError: the layout knows no such caches.
            CheckpointError: no scale is known.
        """
        if kind is None:
            return self._carried(layout)
        if not layout.kv:
            raise SpecError(
                f"export: {layout.name} has no names for scales of KV caches, got kv_cache={kind!r}"
            )
        if not isinstance(kind, str) or kind not in layout.kv:
            raise SpecError(f"export: kv_cache of {layout.name} {must_be_one_of(layout.kv, kind)}")
        made: dict[str, dict[str, torch.Tensor]] = {}
        missed: dict[str, None] = {}
        for attention, file in attentions.items():
            for part in layout.kv[kind]:
                amax = self._of_calibration(attention, part.slot)
                if amax is not None:
                    name = part.name.format(attention=attention)
                    made.setdefault(file, {})[name] = part.write(amax)
                else:
                    missed[attention] = None
        if made and missed:
            self.notes.append(
                f"the calibration has no amaxes of keys and values of {len(missed)} attentions "
                f"({next(iter(missed))}, ...), so that readers take another scale there"
            )
        if self._calibration is None:
            own, carried = self._carried(layout)
            made = carried if own == kind else {}
        if not made:
            raise CheckpointError(
                "export: scales of KV caches need a calibration that has seen them, or a source "
                f"that has them for {kind}, got none"
            )
        return kind, made

    def _carried(self, layout: Layout) -> tuple[str | None, dict[str, dict[str, torch.Tensor]]]:
        """Return the source's own scales of KV caches, and what it holds these in."""
        source, scalars = self._found.layout, self._found.scalars
        known = () if source is None else {part for kind in source.kv.values() for part in kind}
        names = [name for name in scalars if any(part.module_of(name) for part in known)]
        if source is None or not names:
            return None, {}
        kind = kv_cache_of(self._found.config, hf_quant_config(self._found.source))
        wanted = {part.slot: part for part in layout.kv.get(kind, ())}
        made: dict[str, dict[str, torch.Tensor]] = {}
        for part in source.kv.get(kind, ()) if wanted else ():
            to = wanted[part.slot]
            for name in names:
                attention = part.module_of(name)
                if attention is not None:
                    value = self._read(name)
                    is_same = (part.value, part.bound) == (to.value, to.bound)
                    is_same = is_same and value.numel() == 1
                    own = value.float().reshape(to.shape) if is_same else to.write(part.read(value))
                    file = scalars[name][0].name
                    made.setdefault(file, {})[to.file_name(attention)] = own
        if not made:
            self.notes.append(
                f"{len(names)} scales of KV caches in {kind} ({names[0]}, ...) are not carried "
                f"over, since {layout.name} has no names for such"
            )
            return None, {}
        return kind, made

    def _read(self, name: str) -> torch.Tensor:
        shard, entry = self._found.scalars[name]
        value = shard.read(entry.begin, entry.nbytes).view(TORCH_DTYPES[entry.dtype])
        if not value.numel():
            raise CheckpointError(f"checkpoint: {name!r} of {shard.path} must have a value")
        return value
