"""Layout: how a reader wants quantized weights named, shaped and described; their table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from ..direction import ROWWISE, Direction
from ..errors import CheckpointError, SpecError, must_be_one_of, warn
from ..formats import PlaneSpec
from .part import ScalarPart
from .said import Said
from .scheme import Scheme
from .stored import StoredWeight, TensorInfo

__all__ = ["Described", "Layout", "get", "names", "register"]

_FP8: Final = (torch.float8_e4m3fn, torch.float8_e5m2)
#: dtypes that are codes or scales wherever they stand.
_CODES: Final = (
    *_FP8,
    torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
)


@dataclass(frozen=True)
class Described:
    """What a configuration is to say of a checkpoint.

    Args:
        schemes: the scheme of each quantized linear, by its name in the checkpoint.
        kept: names of the linears (routers and heads among them) that stay as they are.
        inputs: how inputs are quantized: `none`, `dynamic` or `static`; "" for what each scheme
            has first.
        kv_cache: `fp8` or another of the layout's, or None: caches stay as they are.
    """

    schemes: Mapping[str, Scheme]
    kept: tuple[str, ...] = ()
    inputs: str = ""
    kv_cache: str | None = None


@dataclass(frozen=True)
class Layout:
    """A reader's layout, as data; its configurations are functions of the record beside it.

    Args:
        name: key of the table.
        summary: one line.
        source: where the layout is specified.
        schemes: the formats that it holds, the first that fits a plane is taken.
        holds_stacks: a stack `[E, rows, cols]` is held as such; otherwise each matrix of it by
            itself, under a name of its own.
        holds_matrices: single matrices are held.
        stacks: schemes of stacks that are read, and not written; others may be among them.
        others: schemes of matrices that are read, and not written.
        marks: ends of names of tensors that say how modules are held, and hold no values.
        has_plain_codes: codes of FP8 without a scale are values, which readers cast.
        check: raises where weights that were found are not what their files say of them.
        instead: what to write where the layout has no schemes that are written.
        methods: what `quant_method` of a configuration may say of this layout.
        kv: scales of KV caches, by what the cache is held in.
        config: makes `quantization_config` of `config.json`.
        config_keys: the entries of `config.json` that it is.
        hf_quant_config: makes `hf_quant_config.json`, or None where there is no such file.
        excludes: whether an entry of the configuration's list of exclusions means a module.
        scheme_for: makes the scheme of any spec and direction, for the layout that holds all.
    """

    name: str
    summary: str
    source: str
    schemes: tuple[Scheme, ...]
    methods: tuple[str, ...]
    config: Callable[[Described], dict[str, Any]]
    excludes: Callable[[str, str], bool]
    config_keys: tuple[str, ...] = ("quantization_config",)
    hf_quant_config: Callable[[Described], dict[str, Any]] | None = None
    holds_stacks: bool = False
    holds_matrices: bool = True
    stacks: tuple[Scheme, ...] = ()
    others: tuple[Scheme, ...] = ()
    marks: tuple[str, ...] = ()
    has_plain_codes: bool = False
    check: Callable[[Mapping[str, StoredWeight], Said], None] | None = None
    instead: str = ""
    kv: Mapping[str, tuple[ScalarPart, ...]] = field(default_factory=dict)
    scheme_for: Callable[[PlaneSpec, Direction], Scheme] | None = None

    @property
    def read_schemes(self) -> tuple[Scheme, ...]:
        """All schemes that are read; the first that fits is taken."""
        others = (one for one in self.others if one not in self.stacks)
        return (*self.schemes, *self.stacks, *others)

    def is_mark(self, name: str) -> bool:
        """Return whether a tensor says how a module is held, and holds no values.

        Args:
            name: of a tensor of a file.
        """
        return bool(self.marks) and f".{name}".endswith(self.marks)

    def scheme(self, name: str) -> Scheme:
        """Return the scheme called `name`.

        Raises:
            SpecError: the layout has none of this name.
        """
        for one in self.schemes:
            if one.name == name:
                return one
        known = [one.name for one in self.schemes]
        raise SpecError(f"layouts: a scheme of {self.name} {must_be_one_of(known, name)}")

    def reason_against(self, spec: PlaneSpec, shape: Sequence[int]) -> str | None:
        """Return why weights of this spec and shape cannot be held, or None if they can.

        Args:
            spec: of the rowwise plane.
            shape: `[rows, cols]`, or `[E, rows, cols]` of a stack.
        """
        if self.scheme_for is not None:
            return None
        if self.instead:
            return f"it is read, and not written; take {self.instead}"
        if len(shape) == 3 and not self.holds_stacks:
            return "each expert has a name of its own; ask for its matrix"
        if len(shape) == 2 and not self.holds_matrices:
            return "it holds stacks of experts only"
        reasons = [one.reason_against(spec, shape) for one in self.schemes]
        if None in reasons:
            return None
        for one in self.others:
            if one.reason_against(spec, shape) is None:
                return f"{one.name} is read, and not written"
        return "; ".join(dict.fromkeys(filter(None, reasons)))

    def scheme_of(self, spec: PlaneSpec, shape: Sequence[int]) -> Scheme:
        """Return the scheme that holds weights of this spec and shape.

        Args:
            spec: of the rowwise plane.
            shape: `[rows, cols]`, or `[E, rows, cols]` of a stack.

        Raises:
            SpecError: there is none; the text has every reason.
        """
        reason = self.reason_against(spec, shape)
        if reason is not None:
            raise SpecError(
                f"layouts: {self.name} cannot hold {spec.short_text} of {list(shape)}: {reason}"
            )
        fits = (one for one in self.schemes if one.reason_against(spec, shape) is None)
        return next(fits)

    def stored(
        self, name: str, spec: PlaneSpec, shape: Sequence[int], direction: Direction = ROWWISE
    ) -> StoredWeight:
        """Return what a weight becomes in a file, from its shape alone.

        Args:
            name: of the weight, such as `model.layers.0.mlp.up_proj.weight`.
            spec: of its plane.
            shape: `[rows, cols]`, or `[E, rows, cols]` of a stack.
            direction: of the plane; only the layout `hybridq` holds columnwise ones.

        Raises:
            SpecError: the layout cannot hold it.
        """
        if self.scheme_for is not None:
            return StoredWeight.of(self.scheme_for(spec, direction), name, tuple(shape), direction)
        if direction != ROWWISE:
            raise SpecError(
                f"layouts: {self.name} holds rowwise planes, the forward's, got a {direction} one"
            )
        return StoredWeight.of(self.scheme_of(spec, shape), name, tuple(shape))

    def find(
        self, entries: Mapping[str, TensorInfo], said: Said | None = None
    ) -> dict[str, StoredWeight]:
        """Return the quantized weights among the tensors of a checkpoint, by name.

        Args:
            entries: dtype and shape of every tensor of the checkpoint, by name.
            said: what its files say beside that, against which the weights are held; None: nothing
                is known of it.

        Tensors in the name of a quantized linear that the layout does not know are warned of.

        Raises:
            CheckpointError: a tensor holds codes or scales that the layout cannot read, or the
                files say that they are another layout's, or something else than they are.
        """
        self._check_marks(entries)
        made: dict[str, StoredWeight] = {}
        for name, (_, shape) in entries.items():
            for scheme in self.read_schemes:
                found = self._found(scheme, name, shape, entries)
                if found is not None:
                    made[found.name] = found
                    break
        claimed = {one.name for weight in made.values() for one in weight.tensors}
        claimed |= {
            one.scheme.input.file_name(one.name.removesuffix(".weight"))
            for one in made.values()
            if one.scheme.input is not None
        }
        for name, (dtype, shape) in entries.items():
            if name in claimed or self.is_mark(name) or self._is_value(name, dtype, entries):
                continue
            if self._is_quantized(name, dtype):
                raise CheckpointError(
                    f"layouts: {self.name} cannot tell what {name!r} is, {dtype} {list(shape)}: "
                    "its codes or scales are missing, or of shapes that do not fit each other"
                )
        self._tell_of_others(made, [name for name in entries if name not in claimed])
        if said is not None and self.check is not None:
            self.check(made, said)
        return made

    def _check_marks(self, names: Iterable[str]) -> None:
        """Raise where a tensor says that a weight is held as another layout holds it."""
        others = {
            scheme.mark.end: other.name
            for other in _table.values()
            for scheme in other.schemes
            if scheme.mark is not None and other is not self
        }
        for name in names if others else ():
            if f".{name}".endswith(tuple(others)):
                other = next(one for end, one in others.items() if f".{name}".endswith(end))
                raise CheckpointError(
                    f"layouts: {self.name} must be the layout of all weights, got {name!r}, which "
                    f"says of one how {other} holds it, and the bytes differ; name that layout "
                    "(--from, or the second argument of load_checkpoint)"
                )

    def _tell_of_others(self, weights: Mapping[str, StoredWeight], names: Iterable[str]) -> None:
        """Warn of tensors in a quantized linear that the layout does not know.

        Args:
            weights: that are quantized, by name.
            names: of the other tensors of the checkpoint.
        """
        modules = {name.removesuffix(".weight") for name in weights}
        known = {one.input for one in self.read_schemes}
        known |= {one for own in self.kv.values() for one in own}
        found = []
        for name in names:
            if self.is_mark(name):
                continue
            module, _, own = name.rpartition(".")
            while module and module not in modules:
                module, _, last = module.rpartition(".")
                own = f"{last}.{own}"
            if module and own != "bias" and not any(one and one.module_of(name) for one in known):
                found.append(name)
        if found:
            warn(
                f"layouts: {self.name} does not know what {found[0]!r} is"
                f"{f' and {len(found) - 1} tensors more' if len(found) > 1 else ''}, beside a "
                "quantized weight; if products need it (a zero point, factors, a rotation, a "
                "low-rank part), the weight without it is not the model's",
            )

    def _found(
        self,
        scheme: Scheme,
        name: str,
        shape: tuple[int, ...],
        entries: Mapping[str, TensorInfo],
    ) -> StoredWeight | None:
        codes = scheme.parts[0]
        weight = codes.weight_of(name)
        if weight is None or entries[name][0] not in codes.read_dtypes:
            return None
        found = StoredWeight.read(scheme, weight, shape, entries)
        if found is None:
            return None
        if len(found.shape) == 3:
            is_held = scheme in self.stacks or (self.holds_stacks and scheme in self.schemes)
        else:
            is_held = scheme in self.others or (self.holds_matrices and scheme in self.schemes)
        return found if is_held else None

    def _is_value(self, name: str, dtype: torch.dtype, entries: Mapping[str, TensorInfo]) -> bool:
        """Return whether codes of FP8 have no scale, and the layout takes such for values."""
        if not self.has_plain_codes or dtype not in _FP8:
            return False
        scales = [part for one in self.read_schemes for part in one.parts[1:]]
        weight = f".{name}".removesuffix(".weight") + ".weight"
        weight = weight.removeprefix(".")
        return not any(
            part.weight_of(name) is not None or part.file_name(weight) in entries for part in scales
        )

    def _is_quantized(self, name: str, dtype: torch.dtype) -> bool:
        """Return whether a tensor holds codes or scales, whatever a scheme makes of it."""
        if dtype in _CODES:
            return True
        parts = [part for scheme in self.read_schemes for part in scheme.parts]
        return any(part.weight_of(name) is not None and dtype in part.read_dtypes for part in parts)

    def scalar_of(
        self, name: str, schemes: Mapping[str, Scheme], kv_cache: str
    ) -> tuple[ScalarPart, str] | None:
        """Return the scale of activations that a tensor is, and of which module; None: it is none.

        Names do not tell: scales of two formats have the same one, and other bounds.

        Args:
            name: of a tensor of a file.
            schemes: the scheme of each quantized linear, by its name in the checkpoint.
            kv_cache: what KV caches are held in (`kv_cache_of`).
        """
        for part in dict.fromkeys(one.input for one in self.read_schemes if one.input is not None):
            module = part.module_of(name)
            if module is not None and module in schemes and schemes[module].input == part:
                return part, module
        for part in self.kv.get(kv_cache, ()):
            module = part.module_of(name)
            if module is not None:
                return part, module
        return None

    def quantization_config(
        self,
        schemes: Mapping[str, Scheme],
        kept: Iterable[str] = (),
        *,
        inputs: str = "",
        kv_cache: str | None = None,
    ) -> dict[str, Any]:
        """Return the entry `quantization_config` of the model's `config.json`.

        Args:
            schemes: the scheme of each quantized linear, by its name in the checkpoint.
            kept: names of the linears (routers and heads among them) that stay as they are.
            inputs: how inputs are quantized: `none`, `dynamic` or `static`; by default what the
                scheme has first.
            kv_cache: what KV caches are held in, or None.

        Raises:
            SpecError: the reader knows no such inputs or caches, or not these schemes together.
            CheckpointError: by the reader's rules, an entry of the list of exclusions would take
                a quantized linear too.
        """
        return self.config(self._checked(schemes, kept, inputs, kv_cache))

    def hf_quant_json(
        self,
        schemes: Mapping[str, Scheme],
        kept: Iterable[str] = (),
        *,
        inputs: str = "",
        kv_cache: str | None = None,
    ) -> dict[str, Any] | None:
        """Return what `hf_quant_config.json` holds, or None if the layout has no such file.

        Args:
            schemes, kept, inputs, kv_cache: as `quantization_config` takes them.

        Raises:
            SpecError, CheckpointError: as `quantization_config`.
        """
        if self.hf_quant_config is None:
            return None
        return self.hf_quant_config(self._checked(schemes, kept, inputs, kv_cache))

    def _checked(
        self, schemes: Mapping[str, Scheme], kept: Iterable[str], inputs: str, kv: str | None
    ) -> Described:
        if not schemes:
            raise SpecError(f"layouts: {self.name} needs a quantized linear, got none")
        for scheme in schemes.values():
            if inputs and inputs not in scheme.inputs:
                raise SpecError(
                    f"layouts: inputs of {scheme.name} in {self.name} "
                    f"{must_be_one_of(scheme.inputs, inputs)}"
                )
        if kv is not None and kv not in self.kv:
            known = tuple(self.kv) or ("None",)
            raise SpecError(f"layouts: kv_cache of {self.name} {must_be_one_of(known, kv)}")
        left = tuple(dict.fromkeys(kept))
        for entry in left:
            taken = [name for name in schemes if self.excludes(entry, name)]
            if taken:
                raise CheckpointError(
                    f"layouts: readers of {self.name} would leave out {taken[0]!r} too, which is "
                    f"quantized, because {entry!r} is; quantize both or neither"
                )
        return Described(dict(schemes), left, inputs, kv)


_table: dict[str, Layout] = {}


def register(layout: Layout) -> Layout:
    """Put a layout into the table.

    Args:
        layout: of a new name.

    Returns:
        The layout itself.

    Raises:
        SpecError: the name is taken.
    """
    if _table.get(layout.name, layout) is not layout:
        raise SpecError(f"layouts: the name {layout.name!r} is taken")
    _table[layout.name] = layout
    return layout


def names() -> tuple[str, ...]:
    """Return the names of all layouts."""
    return tuple(_table)


def get(name: str | Layout) -> Layout:
    """Return the layout called `name`, or `name` itself if it is one.

    Raises:
        SpecError: there is none.
    """
    if isinstance(name, Layout):
        return name
    if not isinstance(name, str) or name not in _table:
        raise SpecError(f"layouts: a layout {must_be_one_of(_table, name)}")
    return _table[name]
