"""Quantizer: how to make the pair of planes. A frozen value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import torch

from ..direction import Direction
from ..errors import PlaneError, SpecError, must_be_one_of
from ..formats import PlaneSpec
from ..kernels.choice import EncodeRequest
from ..kernels.inputs import HIGH_PRECISION, can_bypass_dispatcher, check_seed
from ..storage import StoragePlan, TensorStorage
from ..tensor import QuantizedTensor, is_flat, is_quantized, matrix_shape
from ..tensor.in_graph import parses_quantizers
from .checks import check_dtype, check_source
from .delayed import DelayedScalingRequest, described, no_history, parsed, resolved
from .stacks import MakesStacks
from .statistics import with_statistics
from .writing import Quantize, check_target, overwrite_planes

__all__ = ["SOURCES", "Quantizer", "draw_seed"]

SOURCES = ("original", "rowwise_dequantized")
_NO_SEED = EncodeRequest()


def draw_seed(device: torch.device | str) -> torch.Tensor:
    """Return a random seed, int64 `[1]`, from torch's generator of `device`."""
    return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device)


class _Plan(NamedTuple):
    """What a quantizer comes to for tensors of one dtype."""

    storage: StoragePlan
    is_stochastic: bool


@dataclass(frozen=True, repr=False)
class Quantizer(MakesStacks):
    """A PlaneSpec per direction, the columnwise source, and where amax comes from.

    Frozen and hashable: a change of usage is a new value (`with_usage`).

    Args:
        rowwise, columnwise: spec of each plane, or None where there never is one.
        columnwise_source: `"original"`, or `"rowwise_dequantized"`: the columnwise plane is made
            of what the rowwise plane decodes to, rounded to the tensor's dtype.
        rowwise_usage, columnwise_usage: whether to make each plane.
        amax_group: name of the process group over which the tensor's amax is reduced, or None.
            A row-scaled plane is never reduced: whether the ranks' rows are the same rows (K is
            split) or others (rows are split) is not known here, and where each rank holds whole
            rows there is nothing to reduce.
        rowwise_delay, columnwise_delay: how the scale of that plane follows from earlier steps,
            or None. A module's slot keeps their history; by itself it quantizes nothing.
        is_pair: whether two quantizers of one format were put together. It says nothing of the
            planes: `hybridq.te` tells its HybridQuantizer by it.

    Raises:
        SpecError: no plane is described, the source needs a rowwise spec that is missing, an
            amax group is given for planes that are all row-scaled, or a delay does not fit.

    Example:
        >>> import torch, hybridq
        >>> q = hybridq.MXFP8Quantizer().with_usage(columnwise=False)
        >>> q(torch.randn(3, 40)).columnwise is None
        True
    """

    rowwise: PlaneSpec | None
    columnwise: PlaneSpec | None
    columnwise_source: str = "original"
    rowwise_usage: bool = True
    columnwise_usage: bool = True
    amax_group: str | None = None
    rowwise_delay: DelayedScalingRequest | None = None
    columnwise_delay: DelayedScalingRequest | None = None
    is_pair: bool = False
    #: Whether the caller gives the scale, and the amax is recorded.
    has_given_scale: ClassVar[bool] = False
    # As in PlaneSpec: of each quantizer, and made with it, so that torch.compile can read it.
    _text: ClassVar[str]

    def __post_init__(self) -> None:
        if self.columnwise_source not in SOURCES:
            raise SpecError(
                f"Quantizer: columnwise_source {must_be_one_of(SOURCES, self.columnwise_source)}"
            )
        for spec in (self.rowwise, self.columnwise):
            if spec is not None and not isinstance(spec, PlaneSpec):
                raise SpecError(f"Quantizer: a plane is described by a PlaneSpec, got {spec!r}")
        usages = (self.rowwise_usage, self.columnwise_usage)
        if not all(isinstance(usage, bool) for usage in usages):
            raise SpecError(f"Quantizer: usages must be bools, got {usages}")
        if self.amax_group is not None and not isinstance(self.amax_group, str):
            raise SpecError(
                f"Quantizer: amax_group must be a process group's name, got {self.amax_group!r}"
            )
        if self.rowwise is None and self.columnwise is None:
            raise SpecError("Quantizer: needs a spec for at least one direction, got none")
        if self.columnwise_source != "original" and self.rowwise is None:
            raise SpecError(
                "Quantizer: columnwise_source 'rowwise_dequantized' needs a rowwise spec"
            )
        specs = [spec for spec in (self.rowwise, self.columnwise) if spec is not None]
        if self.amax_group is not None and any(spec.row_scaled for spec in specs):
            self._check_row_scaled_group(specs)
        row, col = described(self)
        flags = f"{int(self.rowwise_usage)}{int(self.columnwise_usage)}{'p' * self.is_pair}"
        parts = (row, col, self.columnwise_source, flags)
        text = "|".join((*map(str, parts), self.amax_group or ""))
        object.__setattr__(self, "_text", text)

    def _check_row_scaled_group(self, specs: list[PlaneSpec]) -> None:
        if not any(spec.needs_tensor_amax for spec in specs):
            raise SpecError(
                "Quantizer: a row-scaled plane has one amax per row, which is not reduced over a "
                f"group, got amax_group {self.amax_group!r}; where ranks hold whole rows leave "
                "it out, where they hold parts of a row gather the tensor first"
            )

    def __repr__(self) -> str:
        planes = []
        for spec, delay in (
            (self.rowwise, self.rowwise_delay),
            (self.columnwise, self.columnwise_delay),
        ):
            text = "None" if spec is None else spec.short_text
            planes.append(text if delay is None else f"{text}@{delay.text}")
        shown = [planes[0] if planes[0] == planes[1] else " | ".join(planes)]
        defaults = {field.name: field.default for field in fields(self)}
        for name in ("columnwise_source", "rowwise_usage", "columnwise_usage", "amax_group"):
            value = getattr(self, name)
            if value != defaults[name]:
                shown.append(f"{name}={value!r}")
        return f"Quantizer({', '.join(shown)})"

    def __hash__(self) -> int:
        return hash(self._text)  # quantizers are looked up on every call; a text keeps its hash

    # ---- usage

    def with_usage(self, rowwise: bool | None = None, columnwise: bool | None = None) -> Quantizer:
        """Return this quantizer with other usages.

        Args:
            rowwise, columnwise: whether that plane is made; None leaves it as it is.
        """
        return replace(
            self,
            rowwise_usage=self.rowwise_usage if rowwise is None else rowwise,
            columnwise_usage=self.columnwise_usage if columnwise is None else columnwise,
        )

    def with_spec(self, direction: Direction, spec: PlaneSpec) -> Quantizer:
        """Return this quantizer with another spec for one plane.

        Args:
            direction: of the plane.
            spec: of it.
        """
        return replace(self, **{direction: spec})  # type: ignore[arg-type]

    def set_usage(self, **usages: bool | None) -> None:
        """Refuse: a Quantizer is frozen.

        Raises:
            TypeError: always; it names `with_usage`.
        """
        raise TypeError("set_usage: a Quantizer is frozen; use q = q.with_usage(...)")

    def get_usages(self) -> dict[str, bool]:
        """Return which planes are made."""
        return {"rowwise": self.makes_rowwise, "columnwise": self.makes_columnwise}

    @property
    def makes_rowwise(self) -> bool:
        """Whether a rowwise plane is made."""
        return self.rowwise_usage and self.rowwise is not None

    @property
    def makes_columnwise(self) -> bool:
        """Whether a columnwise plane is made."""
        return self.columnwise_usage and self.columnwise is not None

    @property
    def is_stochastic(self) -> bool:
        """Whether a plane that is made, or the source of one, is rounded stochastically."""
        needs_row = self.makes_rowwise or (
            self.makes_columnwise and self.columnwise_source != "original"
        )
        made = (
            self.rowwise if needs_row else None,
            self.columnwise if self.makes_columnwise else None,
        )
        return any(spec is not None and spec.stochastic for spec in made)

    @property
    def is_identity(self) -> bool:
        """Whether no plane that is made is quantized."""
        specs = (
            self.rowwise if self.makes_rowwise else None,
            self.columnwise if self.makes_columnwise else None,
        )
        return all(spec is None or spec.format.is_identity for spec in specs)

    @property
    def is_delayed(self) -> bool:
        """Whether the scale of a plane follows from the amaxes of earlier steps."""
        return self.rowwise_delay is not None or self.columnwise_delay is not None

    def resolved(self, is_gradient: bool) -> Quantizer:
        """Return this quantizer with the elements that its delays ask for.

        Args:
            is_gradient: the slot is a gradient's: `"HYBRID"` means E5M2.
        """
        row = resolved(self.rowwise, self.rowwise_delay, is_gradient)
        col = resolved(self.columnwise, self.columnwise_delay, is_gradient)
        return replace(self, rowwise=row, columnwise=col) if self.is_delayed else self

    def undelayed(self) -> Quantizer:
        """Return the quantizer of the same planes that takes the tensor's own amax."""
        return replace(self, rowwise_delay=None, columnwise_delay=None) if self.is_delayed else self

    def is_requantization_safe(self) -> bool:
        """Return whether quantizing the same values again gives the same bits."""
        return not self.is_stochastic

    def mirrored(self) -> Quantizer | None:
        """Return the quantizer of the transposed tensor, or None where there is none."""
        if self.columnwise_source != "original":
            return None
        return replace(
            self,
            rowwise=self.columnwise,
            columnwise=self.rowwise,
            rowwise_usage=self.columnwise_usage,
            columnwise_usage=self.rowwise_usage,
            rowwise_delay=self.columnwise_delay,
            columnwise_delay=self.rowwise_delay,
        )

    # ---- quantization

    def __call__(self, tensor: torch.Tensor, **options: Any) -> QuantizedTensor:
        """Quantize `tensor`; the same as `quantize`."""
        return self.quantize(tensor, **options)

    def quantize(
        self,
        tensor: torch.Tensor,
        *,
        out: QuantizedTensor | None = None,
        dtype: torch.dtype | None = None,
        seed: torch.Tensor | None = None,
    ) -> QuantizedTensor:
        """Return `tensor` quantized; the gradient passes unchanged (straight-through).

        Args:
            tensor: `(..., K)` float32, bfloat16 or float16, any strides, also empty.
            out: a QuantizedTensor of this shape to write into, or None.
            dtype: nominal dtype of the result; None: that of `tensor`.
            seed: int64 `[1]` for stochastic rounding; None draws one from torch's generator.

        Raises:
            TypeError: dtype or layout of `tensor` cannot be quantized, or `seed` is no tensor.
            PlaneError: both usages are off, or `out` does not fit.
            RuntimeError: `tensor` requires grad and is written into `out`.
        """
        if out is None and tensor is not None and can_bypass_dispatcher(tensor, seed):
            return self._make_directly(tensor, dtype, seed)
        check_source(tensor, "quantize")
        if out is not None:
            return self.update_quantized(tensor, out, seed=seed)
        if is_quantized(tensor):
            tensor = tensor.dequantize()
        nominal = tensor.dtype if dtype is None else dtype
        check_dtype(nominal, "quantize")
        if torch.is_grad_enabled() and tensor.requires_grad:
            return Quantize.apply(tensor, self, nominal, seed)
        return self._make(tensor, nominal, seed)

    def _make_directly(
        self, tensor: torch.Tensor, dtype: torch.dtype | None, seed: torch.Tensor | None
    ) -> QuantizedTensor:
        """Return `quantize` past the dispatcher: no operator, no autograd, no part twice."""
        given = tensor.dtype
        if given not in HIGH_PRECISION:
            check_source(tensor, "quantize")
        if dtype is not None:
            check_dtype(dtype, "quantize")
        if seed is not None:
            check_seed(seed, tensor, "encode")
        shape = tensor.shape
        matrix = tensor if len(shape) == 2 else tensor.reshape(matrix_shape(shape))
        plan = _plan(self._text, given)
        if self.amax_group:
            storage = self._encode(matrix, seed, True)
        else:
            if seed is None and plan.is_stochastic:
                seed = draw_seed(tensor.device)
            rest = _NO_SEED if seed is None else EncodeRequest(seed=seed)
            storage = plan.storage.build(matrix, rest, direct=True)
        return QuantizedTensor.make(storage, shape, dtype or given, quantizer=self)

    def _make(
        self, tensor: torch.Tensor, dtype: torch.dtype, seed: torch.Tensor | None
    ) -> QuantizedTensor:
        storage = self.encode(tensor.detach().reshape(matrix_shape(tensor.shape)), seed=seed)
        return QuantizedTensor.make(storage, tensor.shape, dtype, quantizer=self)

    def encode(self, matrix: torch.Tensor, *, seed: torch.Tensor | None = None) -> TensorStorage:
        """Return the storage of a plain matrix `[rows, cols]`, outside autograd.

        Args:
            matrix: float32, bfloat16 or float16.
            seed: int64 `[1]`; None draws one where a spec is stochastic.

        Raises:
            PlaneError: both usages are off.
        """
        return self._encode(matrix, seed, False)

    def _encode(
        self, matrix: torch.Tensor, seed: torch.Tensor | None, direct: bool
    ) -> TensorStorage:
        # Compiled code remakes it while it is traced: dynamo knows no cache of objects.
        is_cached = direct or not torch.compiler.is_compiling()
        plan = _plan(self._text, matrix.dtype) if is_cached else self._make_plan(matrix.dtype)
        if seed is not None:
            check_seed(seed, matrix, "encode")
        elif plan.is_stochastic:
            seed = draw_seed(matrix.device)
        if not self.amax_group:
            return plan.storage.build(matrix, EncodeRequest(seed=seed), direct=direct)
        storage, rest = plan.storage, EncodeRequest(seed=seed, col_source=self.columnwise_source)
        rest = with_statistics(rest, matrix, storage.row_text, storage.col_text, self.amax_group)
        return storage.build(matrix, rest)

    def _make_plan(self, dtype: torch.dtype) -> _Plan:
        row, col = self.specs_to_encode()
        storage = StoragePlan(row, col, dtype, self.columnwise_source, self.makes_rowwise)
        return _Plan(storage, self.is_stochastic)

    def specs_to_encode(self, where: str = "quantize") -> tuple[PlaneSpec | None, PlaneSpec | None]:
        """Return the specs that encode takes; the rowwise one may be only the other's source.

        Args:
            where: the function in whose name an error is raised.

        Raises:
            PlaneError: both usages are off, or a scale follows from a history that is not here.
        """
        if self.is_delayed:
            raise PlaneError(no_history(where))
        if not (self.makes_rowwise or self.makes_columnwise):
            raise PlaneError(f"{where}: both usages are off, nothing to make; see with_usage")
        row, col = self.rowwise, self.columnwise if self.makes_columnwise else None
        if not self.makes_rowwise and (col is None or self.columnwise_source == "original"):
            row = None
        return row, col

    def update_quantized(
        self,
        source: torch.Tensor,
        target: QuantizedTensor,
        *,
        seed: torch.Tensor | None = None,
    ) -> QuantizedTensor:
        """Quantize `source` into `target`'s own buffers; return `target`.

        Every plane that `target` has is rewritten, whatever this quantizer's usages say, so
        that no plane keeps stale values; autograd sees the write.

        Args:
            source: of `target`'s shape.
            target: its planes must have this quantizer's specs.
            seed: as in `quantize`.

        Raises:
            TypeError: `source` is no tensor to quantize, or `target` no QuantizedTensor.
            ValueError: the shapes differ.
            PlaneError: a plane of `target` has another spec than this quantizer's, or a seed is
                given for a part of a tensor.
            RuntimeError: `source` requires grad, or `target` is a leaf that does, outside
                `torch.no_grad()`.
        """
        check_target(source, target)
        if target.part is not None or is_flat(target):
            if seed is not None:
                raise PlaneError(
                    "update_quantized: a part or a flat view of a tensor is written as a whole, "
                    "which takes no seed"
                )
            return target.write(source, "update_quantized")

        def encode(plain: torch.Tensor, usages: dict[str, bool]) -> TensorStorage:
            own = self._fixed_as(target).with_usage(**usages)
            return own.encode_as(plain, target.tensor_storage.count, seed)

        return overwrite_planes(source, target, encode)

    def _fixed_as(self, target: QuantizedTensor) -> Quantizer:
        """Return this quantizer with an open identity dtype fixed to that of `target`'s plane.

        `target.to(dtype)` changes what a tensor appears as and not its planes.
        """
        changes: dict[str, Any] = {}
        for plane in target.tensor_storage.planes:
            own: PlaneSpec | None = getattr(self, plane.direction)
            is_open = own is not None and own.format.is_identity and own.format.element is None
            if is_open and plane.spec.format.is_identity:
                changes[plane.direction] = plane.spec
        return replace(self, **changes) if changes else self

    def make_empty(
        self,
        shape: Sequence[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        requires_grad: bool = False,
    ) -> QuantizedTensor:
        """Return a QuantizedTensor of `shape` with zeroed buffers, to be written into.

        Args:
            shape: logical shape.
            dtype: nominal dtype.
            device: of the buffers; None: torch's default device.
            requires_grad: as of any tensor.

        Raises:
            ValueError: `shape` holds something else than sizes.
        """
        check_dtype(dtype, "make_empty")
        sizes = (int, torch.SymInt)
        if not isinstance(shape, Sequence) or not all(
            isinstance(n, sizes) and n >= 0 for n in shape
        ):
            raise ValueError(f"make_empty: shape must hold sizes, not negative, got {shape!r}")
        zeros = torch.zeros(*matrix_shape(shape), dtype=dtype, device=device)
        storage = self.encode(zeros, seed=torch.zeros(1, dtype=torch.int64, device=zeros.device))
        return QuantizedTensor.make(
            storage, shape, dtype, quantizer=self, requires_grad=requires_grad
        )

    # ---- text form, for pickling

    @property
    def text(self) -> str:
        """Canonical string; `parse` inverts it."""
        return self._text

    @staticmethod
    def parse(text: str) -> Quantizer:
        """Return the Quantizer whose canonical string is `text`."""
        return _parse(text)

    def __reduce__(self) -> Any:
        return _parse, (self.text,)


def _parse(text: str) -> Quantizer:
    if not isinstance(text, str):
        raise SpecError(f"Quantizer.parse: takes a text, got {type(text).__name__}")
    parts = text.split("|", 4)
    if len(parts) != 5 or len(parts[3].removesuffix("p")) != 2:
        raise SpecError(f"Quantizer.parse: not a quantizer's canonical string, got {text!r}")
    row, col, source, usages, group = parts
    (row_spec, row_delay), (col_spec, col_delay) = parsed(row), parsed(col)
    return Quantizer(
        row_spec,
        col_spec,
        source,
        usages[0] == "1",
        usages[1] == "1",
        group or None,
        row_delay,
        col_delay,
        usages.endswith("p"),
    )


@lru_cache(maxsize=4096)
def _plan(text: str, dtype: torch.dtype) -> _Plan:
    return _parse(text)._make_plan(dtype)


torch.serialization.add_safe_globals([_parse])
parses_quantizers(lru_cache(maxsize=4096)(_parse))  # compiled code asks at every call
