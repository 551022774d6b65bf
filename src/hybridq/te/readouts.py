"""What scripts read off a tensor under Transformer Engine's names: views of its planes, or copies.

`hybridq.tensor.add_readouts` gives every quantized tensor these attributes when this is imported.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from .. import tensor as tensors
from ..storage import TensorStorage
from ..tensor import QuantizedTensor, SavedTensor, drop_plane
from .buffers import data_of, scale_of
from .constants import DType
from .hybrid import quantizer_of
from .tensor import is_of_two

__all__: list[str] = []

_SIDES: Final = ("rowwise", "columnwise")
_FP8: Final = ("float8",)


def _side(tensor: Any, side: str) -> Any:
    """Return the tensor of one plane alone, a view of its buffers, or None."""
    plane = getattr(tensor, side)
    if plane is None:
        return None
    known = vars(tensor).setdefault("_known_sides", {}).get(side, lambda: None)()
    if known is not None and getattr(known, side) is plane and known.dtype is tensor.dtype:
        return known  # one object as long as somebody has it
    planes = (plane, None) if side == "rowwise" else (None, plane)
    quantizer = quantizer_of(tensor.own_quantizer)
    child = getattr(quantizer, f"{side}_quantizer", quantizer)
    own = None if child is None else child.frozen
    made = QuantizedTensor.make(TensorStorage(*planes), tensor.shape, tensor.dtype, quantizer=own)
    vars(tensor)["_known_sides"][side] = weakref.ref(made)
    return made


def _data(tensor: Any, side: str, families: tuple[str, ...] = ()) -> torch.Tensor | None:
    plane = getattr(tensor, side)
    if plane is None or (families and plane.spec.format.family not in families):
        return None
    return data_of(plane, tensor.shape)


def _values(tensor: Any) -> torch.Tensor | None:
    """Return the values of planes that quantize nothing, a view of the one that there is."""
    plane = tensor.columnwise
    if tensor.rowwise is not None or plane is None or plane.spec.format.family != "identity":
        return _data(tensor, "rowwise", ("identity",))
    made: torch.Tensor = plane.data.mT.view(tensor.shape)
    return made


def _scale(tensor: Any, side: str) -> torch.Tensor | None:
    plane = getattr(tensor, side)
    return None if plane is None else scale_of(plane)


def _amax(tensor: Any, side: str) -> torch.Tensor | None:
    plane = getattr(tensor, side)
    return None if plane is None else plane.amax


def _dtype(tensor: Any) -> DType:
    return DType.cast(tensor.tensor_storage.first.spec.format.element)


def _is_square(tensor: Any) -> bool:
    fmt = tensor.tensor_storage.first.spec.format
    if fmt.family != "float8_block":
        raise AttributeError(f"_is_2D_scaled: must be FP8 by blocks, got {fmt.family}")
    return bool(fmt.is_square)


def _of_nvfp4(name: str, read: Callable[[Any], Any]) -> property:
    """Return the property of what the spec of NVFP4 planes says."""

    def of(tensor: Any) -> Any:
        spec = tensor.tensor_storage.first.spec
        if spec.format.family != "nvfp4":
            raise AttributeError(f"{name}: must be NVFP4, got {spec.format.family}")
        return read(spec)

    return property(of)


def get_metadata(self: Any) -> dict[str, Any]:
    """Return the buffers in Transformer Engine's layout, by its constructors' names."""
    first, quantizer = self.tensor_storage.first.spec, quantizer_of(self.own_quantizer)
    family = first.format.family
    if is_of_two(self):
        sides = {f"{side}_storage": _side(self, side) for side in _SIDES}
        return {**sides, "quantizer": quantizer}
    if family == "identity":
        return {"hp_data": self.dequantize(), "quantizer": quantizer}
    if family == "float8":
        made = {"data": _data(self, "rowwise"), "data_transpose": _data(self, "columnwise")}
        scale = self.tensor_storage.first.scale
        return {**made, "fp8_scale_inv": scale, "fp8_dtype": _dtype(self), "quantizer": quantizer}
    made = {}
    for side in _SIDES:
        made[f"{side}_data"], made[f"{side}_scale_inv"] = _data(self, side), _scale(self, side)
    if family == "nvfp4":
        made |= {f"amax_{side}": _amax(self, side) for side in _SIDES}
    name = "fp4_dtype" if family == "nvfp4" else "fp8_dtype"
    if family == "float8_block":
        made["is_2D_scaled"] = _is_square(self)  # type: ignore[assignment]
    return {**made, name: _dtype(self), "quantizer": quantizer}


def get_data_tensors(self: Any, rowwise_data: bool = True, columnwise_data: bool = True) -> Any:
    """Return the codes of both planes, or of the one asked for; None where there is none.

    Of a hybrid those of both of its tensors, one behind the other.

    Args:
        rowwise_data, columnwise_data: which.
    """
    if is_of_two(self):
        sides = [one for one in (_side(self, side) for side in _SIDES) if one is not None]
        return tuple(data for one in sides for data in one.get_data_tensors())
    found = tuple(_data(self, side) for side in _SIDES)
    if rowwise_data and columnwise_data:
        return found
    return found[0] if rowwise_data else found[1]


def prepare_for_saving(self: Any) -> tuple[list[torch.Tensor], Any]:
    """Give the buffers away, for `ctx.save_for_backward`, and return them and the tensor itself.

    Until `restore_from_saved` puts them back the tensor has no planes, and says so when it is read.
    """
    buffers, self._given_away = SavedTensor.of(self)
    self.clear()
    return buffers, self


def restore_from_saved(self: Any, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Take the first of `tensors` back as the tensor's buffers; return the rest.

    Args:
        tensors: what `prepare_for_saving` returned first, and maybe more behind it.

    Raises:
        RuntimeError: the buffers were not given away.
    """
    entry = vars(self).pop("_given_away", None)
    if entry is None:
        raise RuntimeError("restore_from_saved: prepare_for_saving must have been called before")
    made, rest = entry.restore_from_saved(tensors)
    self.tensor_storage = made.tensor_storage
    self.take_class()
    return list(rest)


def update_quantizer(self: Any, quantizer: Any) -> None:
    """Take another quantizer for later writes.

    Args:
        quantizer: of `hybridq.te` or of hybridq.

    Raises:
        RuntimeError: the tensor has none.
    """
    if self.quantizer is None:
        raise RuntimeError("update_quantizer: the tensor must have a quantizer, got none")
    self.quantizer = getattr(quantizer, "frozen", quantizer)


def _get_quantizer(self: Any) -> Any:
    return quantizer_of(self.own_quantizer)


def _read(function: Callable[..., Any], *given: Any, doc: str = "") -> property:
    return property(lambda self: function(self, *given), doc=doc or None)


def _codes(side: str) -> property:
    """Return the property of FP8's codes of one plane: None may be assigned, and drops it."""

    def drop(self: Any, value: None) -> None:
        if value is not None:
            raise AttributeError("a plane is written by quantize_; None drops it")
        drop_plane(self, side)

    return property(lambda self: _data(self, side, _FP8), drop)


def _initial(tensor: Any) -> torch.Tensor:
    """Return the initial value; only where one is kept: `hasattr` says whether."""
    value: torch.Tensor | None = tensor.get_high_precision_init_val()
    if value is None:
        raise AttributeError("_high_precision_init_val: was freed")
    return value


def _scale_inv(tensor: Any) -> torch.Tensor | None:
    scale: torch.Tensor | None = tensor.tensor_storage.first.scale
    return scale


tensors.add_readouts(
    {
        "_data": _codes("rowwise"),
        "_transpose": _codes("columnwise"),
        "_transpose_invalid": property(lambda self: _data(self, "columnwise", _FP8) is None),
        "_scale_inv": property(_scale_inv),
        "_hp_data": property(_values),
        "_high_precision_init_val": property(_initial),
        **{f"_{side}_scale_inv": _read(_scale, side) for side in _SIDES},
        **{f"_amax_{side}": _read(_amax, side) for side in _SIDES},
        **{f"_{side}_storage": _read(_side, side) for side in _SIDES},
        **{
            f"{side}_sub_storage": _read(_side, side, doc=f"The {side} plane as a tensor, or None.")
            for side in _SIDES
        },
        "_fp8_dtype": property(_dtype),
        "_fp4_dtype": property(_dtype),
        "_is_2D_scaled": property(_is_square),
        "_row_scaled_nvfp4": _of_nvfp4("_row_scaled_nvfp4", lambda spec: spec.row_scaled),
        "_nvfp4_use_4over6": _of_nvfp4(
            "_nvfp4_use_4over6", lambda spec: spec.four_over_six is not None
        ),
        "_nvfp4_e4m3_max": _of_nvfp4("_nvfp4_e4m3_max", lambda spec: int(spec.tensor_bound)),
        "_quantizer": property(_get_quantizer),
        "_get_quantizer": _get_quantizer,
        "get_metadata": get_metadata,
        "get_data_tensors": get_data_tensors,
        "prepare_for_saving": prepare_for_saving,
        "restore_from_saved": restore_from_saved,
        "update_quantizer": update_quantizer,
    }
)
