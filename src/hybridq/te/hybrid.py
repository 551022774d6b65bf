"""HybridQuantizer, and the quantizer of `hybridq.te` that a frozen one is."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from .. import quantizers as ours
from ..formats import PlaneSpec
from .python_quantizers import coded_quantizer, quantizer_of_codec
from .quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)

__all__ = ["ForeignQuantizer", "HybridQuantizer", "quantizer_of"]


def _value(child: Any) -> Any:
    """Return what a direction is made of: a quantizer of hybridq, or its request."""
    return child.slot_value if isinstance(child, Quantizer) else child.frozen


class HybridQuantizer(Quantizer):
    """Its rowwise plane is of one quantizer, its columnwise plane of another one.

    It owns both: each is told to make its own direction alone.

    Args:
        rowwise_quantizer, columnwise_quantizer: two objects; a DelayedScalingRequest is taken too.
        columnwise_source: `"original"` or `"rowwise_dequantized"`.

    Raises:
        TypeError: one is no quantizer.
        ValueError: both are one object, or the source is another word.
    """

    def __init__(
        self,
        *,
        rowwise_quantizer: Any,
        columnwise_quantizer: Any,
        columnwise_source: str = "original",
    ) -> None:
        super().__init__(rowwise=True, columnwise=True)
        if rowwise_quantizer is columnwise_quantizer:
            raise ValueError(
                "HybridQuantizer: requires distinct rowwise and columnwise quantizers, since it "
                "changes both, got one object; use its copy()"
            )
        if columnwise_source not in ("original", "rowwise_dequantized"):
            raise ValueError(
                "HybridQuantizer: columnwise_source must be 'original' or 'rowwise_dequantized', "
                f"got {columnwise_source!r}"
            )
        for child in (rowwise_quantizer, columnwise_quantizer):
            if not hasattr(child, "frozen"):
                got = type(child).__name__
                raise TypeError(f"HybridQuantizer: must be of two quantizers of te, got {got}")
        self.rowwise_quantizer = rowwise_quantizer
        self.columnwise_quantizer = columnwise_quantizer
        self.columnwise_source = columnwise_source
        if isinstance(rowwise_quantizer, Quantizer):
            rowwise_quantizer.set_usage(rowwise=True, columnwise=False)
        if isinstance(columnwise_quantizer, Quantizer):
            columnwise_quantizer.set_usage(rowwise=False, columnwise=True)

    @property
    def frozen(self) -> Any:
        """The quantizer of hybridq that this one, and its two, are now."""
        made = coded_quantizer(self) if self._is_users() else self._freeze()
        return made.with_usage(bool(self.rowwise_usage), bool(self.columnwise_usage))

    def _freeze(self) -> ours.Quantizer:
        made: Any = ours.HybridQuantizer(
            rowwise_quantizer=_value(self.rowwise_quantizer),
            columnwise_quantizer=_value(self.columnwise_quantizer),
            columnwise_source=self.columnwise_source,
        )
        is_one = made.rowwise.format == made.columnwise.format
        # What tells it from the quantizer of that format, where nothing else does.
        return replace(made, is_pair=is_one and self.columnwise_source == "original")

    def copy(self) -> HybridQuantizer:
        """Return another quantizer with copies of the two."""
        made = copy.copy(self)
        for name in ("rowwise_quantizer", "columnwise_quantizer"):
            child = getattr(self, name)
            setattr(made, name, child.copy() if isinstance(child, Quantizer) else child)
        return made

    def _shared(self, name: str) -> Any:
        children = (self.rowwise_quantizer, self.columnwise_quantizer)
        found = [getattr(child, name) for child in children if hasattr(child, name)]
        if any(value != found[0] for value in found):
            raise ValueError(f"HybridQuantizer: {name} must be one for both, got {found}")
        return found[0] if found else None

    def _share(self, name: str, value: Any) -> None:
        for child in (self.rowwise_quantizer, self.columnwise_quantizer):
            if hasattr(child, name):
                setattr(child, name, value)

    @property
    def with_amax_reduction(self) -> bool:
        """Whether both reduce the tensor's amax first, those that could."""
        return bool(self._shared("with_amax_reduction"))

    @with_amax_reduction.setter
    def with_amax_reduction(self, value: bool) -> None:
        self._share("with_amax_reduction", value)

    @property
    def amax_reduction_group(self) -> Any:
        """The process group of both, those that could reduce an amax."""
        return self._shared("amax_reduction_group")

    @amax_reduction_group.setter
    def amax_reduction_group(self, value: Any) -> None:
        self._share("amax_reduction_group", value)

    def allows_save_original_input_for_backward(self) -> bool:
        return self.columnwise_source == "original"

    def supports_only_rowwise_all_gather(self) -> bool:
        row = self.rowwise_quantizer
        of_row = isinstance(row, Quantizer) and row.supports_only_rowwise_all_gather()
        return of_row or getattr(self.columnwise_quantizer, "has_transform", False)


class ForeignQuantizer(Quantizer):
    """A quantizer of hybridq that Transformer Engine has no class for, such as of MXFP4.

    Args:
        quantizer: of hybridq.
    """

    def __init__(self, quantizer: Any) -> None:
        usages = quantizer.get_usages()
        super().__init__(rowwise=usages["rowwise"], columnwise=usages["columnwise"])
        self.quantizer = quantizer

    def _freeze(self) -> Any:
        return self.quantizer


def quantizer_of(frozen: Any) -> Any:
    """Return the quantizer of `hybridq.te` whose `frozen` is the one given, or None of None.

    Args:
        frozen: of hybridq; one that waits for a history becomes that of current scaling.
    """
    if frozen is None:
        return None
    made: Quantizer | None
    if frozen.has_given_scale:
        element = frozen.rowwise.format.element.name
        made = Float8Quantizer(frozen.scale, frozen.amax, element)
    else:
        frozen = frozen.undelayed()
        row, col = frozen.rowwise, frozen.columnwise
        made = _uniform(row, col, frozen.amax_group)
        if frozen.is_pair or frozen.columnwise_source != "original" or made is None:
            made = _hybrid(frozen) if row is not None and col is not None else None
        if made is None:
            made = ForeignQuantizer(frozen)
    made.set_usage(**frozen.get_usages())
    return made


def _hybrid(frozen: Any) -> HybridQuantizer:
    parts: list[Quantizer] = []
    for spec in (frozen.rowwise, frozen.columnwise):
        group = frozen.amax_group if spec.needs_tensor_amax else None
        row, col = (spec, None) if not parts else (None, spec)
        made = _uniform(row, col, group)
        if made is None:
            made = ForeignQuantizer(ours.Quantizer(spec, spec, amax_group=group))
        parts.append(made)
    return HybridQuantizer(
        rowwise_quantizer=parts[0],
        columnwise_quantizer=parts[1],
        columnwise_source=frozen.columnwise_source,
    )


def _uniform(row: PlaneSpec | None, col: PlaneSpec | None, group: str | None) -> Quantizer | None:
    """Return the quantizer of one class that makes these planes, or None where there is none."""
    one, other = row or col, col or row
    if one is None or other is None:
        return None
    made = _of_spec(one, group)
    if made is not None and made.has_transform and other.signs is not None:
        made.with_rht = made.with_post_rht_amax = True
        made.with_random_sign_mask = other.signs != 0
    if made is None:
        return None
    known = made.slot_value
    fits = row in (None, known.rowwise) and col in (None, known.columnwise)
    return made if fits and known.amax_group == group else None


def _of_spec(spec: PlaneSpec, group: str | None) -> Quantizer | None:
    """Return the quantizer of a family, options of the transform apart; None: there is no class."""
    fmt = spec.format
    if fmt.is_python:
        made: Quantizer | None = quantizer_of_codec(spec)
        return made
    if fmt.is_identity:
        return IdentityQuantizer(dtype=None if fmt.element is None else fmt.element.torch_dtype)
    element = "" if fmt.element is None else fmt.element.name
    if element not in ("e4m3", "e5m2", "e2m1"):
        return None
    pow2, eps = fmt.power_of_two, fmt.eps
    reduction: dict[str, Any] = {
        "with_amax_reduction": group is not None,
        "amax_reduction_group": group,
    }
    if fmt.family == "float8":
        options: dict[str, Any] = {"force_pow_2_scales": pow2, "amax_epsilon": eps, **reduction}
        return Float8CurrentScalingQuantizer(element, **options)
    if fmt.family == "float8_block":
        options = {"force_pow_2_scales": pow2, "amax_epsilon": eps}
        dim = 2 if fmt.is_square else 1
        return Float8BlockQuantizer(
            element, rowwise=True, columnwise=True, block_scaling_dim=dim, **options
        )
    if fmt.family == "mxfp8":
        return MXFP8Quantizer(element, with_2d_quantization=fmt.is_square)
    if fmt.family != "nvfp4":
        return None
    options = {
        "with_2d_quantization": fmt.is_square,
        "stochastic_rounding": spec.stochastic,
        "row_scaled_nvfp4": spec.row_scaled,
        "nvfp4_use_4over6": spec.four_over_six is not None,
        "nvfp4_e4m3_max": int(spec.tensor_bound),
        "nvfp4_4over6_err_mode": spec.four_over_six or "MAE",
    }
    return NVFP4Quantizer(**options, **reduction)
