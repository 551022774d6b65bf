"""The merges of PEFT's layers into quantized weights: rounded once, and taken back to the bit."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
from torch import nn

from ..errors import warn_once
from ..storage import TensorStorage
from ..tensor import is_quantized
from . import require
from .merging import lost, rounded_stochastically, stamps, tensor_of

require("peft")

from peft.tuners.ia3 import IA3Layer  # noqa: E402
from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge  # noqa: E402

__all__ = ["RoundsOnce", "check_factors"]

#: Of a module that scales its input: `hybridq.calibration.smooth(in_front=True)`, ModelOpt.
_FACTORS: Final = "pre_quant_scale"


def check_factors(model: nn.Module) -> None:
    """Refuse to merge adapters into modules that multiply their input by factors first.

    An adapter is given the input as it comes, and the weight that it would be merged into is not.
    IA3's, which are factors of channels themselves, may be merged: the order does not count.

    Args:
        model: with layers that PEFT has adapted; or one such layer.

    Raises:
        RuntimeError: a base has `pre_quant_scale`.
    """
    found = [
        name
        for name, one in model.named_modules()
        if isinstance(one, BaseTunerLayer)
        and not isinstance(one, IA3Layer)
        and hasattr(one.get_base_layer(), _FACTORS)
    ]
    if found:
        some = ", ".join(name for name in found[:4] if name) or "this layer"
        more = f" and {len(found) - 4} more" if len(found) > 4 else ""
        raise RuntimeError(
            "merge: the base must multiply its input as it comes, which its adapters are given, "
            f"got {_FACTORS} of {some}{more}; leave the adapters unmerged, or smooth the model "
            "without in_front, which folds the factors into the layer before"
        )


class _Kept(NamedTuple):
    """A base before adapters were merged into it.

    Attributes:
        storage: a copy of its planes.
        bias: a copy, or None.
    """

    storage: TensorStorage
    bias: torch.Tensor | None


class RoundsOnce:
    """What adapter layers with a quantized base share: merges that round once and can be undone.

    A merge into a quantized weight computes the sum in FP32 from the values before any merge, and
    rounds it once, to nearest or stochastically (`set_merging`). Unmerging gives the bits that were
    there. A weight that is not quantized is merged as PEFT does it, in the weight's own dtype.
    """

    #: How a merge rounds, and whether the bits before it are kept, until it is taken back.
    merge_rounding: str = "nearest"
    keeps_unmerged: bool = True
    merged_adapters: list[str]
    _kept: _Kept | None = None
    _written: tuple[tuple[int, int], ...] = ()

    def merge(self: Any, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Merge adapters into the base.

        Args:
            safe_merge: raise where a merged value is not finite.
            adapter_names: which; None: those that are active.

        Raises:
            ValueError: `safe_merge` found such a value.
            RuntimeError: an adapter is merged already, and the bits before it were not kept; an
                adapter has a bias and the base none; or the base scales its input first.
        """
        check_factors(self)
        base, weight = self.get_base_layer(), self.merged_weight()
        if not is_quantized(weight):
            super().merge(safe_merge=safe_merge, adapter_names=adapter_names)  # type: ignore[misc]
            return
        asked = check_adapters_to_merge(self, adapter_names)
        names = [name for name in asked if name in self.scaling]
        if not names:
            return
        if self.merged and self._kept is None:
            raise RuntimeError(
                f"merge: {', '.join(self.merged_adapters)} is merged already, and the weight "
                f"before was not kept, got {', '.join(names)}; merge all of them in one call, or "
                "keep it: set_merging(model, keep=True)"
            )
        kept = self._kept
        if kept is None:
            storage = weight.tensor_storage.map(lambda one: one.detach().clone())
            own = getattr(base, "bias", None)
            own = None if own is None else own.detach().clone()
            kept = _Kept(storage, own)
        else:
            self._check_unwritten("merge")
        with torch.no_grad():
            before = tensor_of(kept.storage, weight).dequantize(dtype=torch.float32)
            values, bias = before, kept.bias
            for name in (*self.merged_adapters, *names):
                values = self._with(name, values, before)
                bias = self._with_bias(name, bias)
            finite = [one for one in (values, bias) if one is not None]
            if safe_merge and not all(bool(one.isfinite().all()) for one in finite):
                raise ValueError(
                    f"merge: merged values must be finite, got others of {', '.join(names)}; "
                    "the adapter seems to be broken"
                )
            self._write(weight, values)
            if bias is not None:
                base.bias.copy_(bias)
            loss = lost(weight, values, before)
        base.__dict__["merge_loss"] = loss
        self._kept = kept if self.keeps_unmerged else None
        self._written = stamps(weight)
        self.merged_adapters += names
        _tell(weight, loss, self.merge_rounding)

    def unmerge(self: Any) -> None:
        """Give the base the bits that it had before the first merge.

        Raises:
            RuntimeError: they were not kept, or the weight was written since.
        """
        base, weight = self.get_base_layer(), self.merged_weight()
        if not (self.merged and is_quantized(weight)):
            super().unmerge()  # type: ignore[misc]
            return
        if self._kept is None:
            raise RuntimeError(
                "unmerge: the weight before the merge was not kept, and a rounded sum does not "
                f"give it back, got {', '.join(self.merged_adapters)} merged; load the base again, "
                "or merge with set_merging(model, keep=True)"
            )
        self._check_unwritten("unmerge")
        with torch.no_grad():
            weight.copy_(tensor_of(self._kept.storage, weight))
            if self._kept.bias is not None:
                base.bias.copy_(self._kept.bias)
        base.__dict__.pop("merge_loss", None)
        self._kept = None
        self.merged_adapters = []

    def merged_weight(self: Any) -> Any:
        """Return the parameter that adapters are merged into."""
        return self.get_base_layer().weight

    def _check_unwritten(self: Any, where: str) -> None:
        now = stamps(self.merged_weight())
        pairs = zip(now, self._written, strict=False)
        if any(one[0] == other[0] and one[1] != other[1] for one, other in pairs):
            raise RuntimeError(
                f"{where}: the merged weight was written since the merge, got "
                f"{', '.join(self.merged_adapters)} merged; unmerge before writing a base"
            )

    def _with(self: Any, name: str, values: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Return the values with an adapter added, FP32.

        Args:
            name: of the adapter.
            values: FP32, of the weight, perhaps with other adapters in them.
            before: the same without any.
        """
        variant, is_dora = self.lora_variant.get(name), name in self.lora_magnitude_vector
        if variant is not None and not is_dora:
            made: torch.Tensor = variant.merge_safe(self, name, values)
            return made.float()
        delta = self.delta(name).to(values.device)
        if not is_dora:
            return values + delta
        dim = 0 if self.fan_in_fan_out else 1
        norms = torch.linalg.vector_norm(before + delta, dim=dim, keepdim=True)
        magnitude = self.lora_magnitude_vector[name].weight.float().to(values.device)
        return magnitude.view(norms.shape) / norms * (values + delta)

    def delta(self: Any, name: str) -> torch.Tensor:
        """Return what an adapter adds to the weight, FP32, in the weight's own layout.

        Args:
            name: of the adapter.
        """
        made: torch.Tensor = self.get_delta_weight(name)
        return made.float()

    def _with_bias(self: Any, name: str, bias: torch.Tensor | None) -> torch.Tensor | None:
        if not self.lora_bias.get(name):
            return bias
        if bias is None:
            raise RuntimeError(
                f"merge: an adapter with lora_bias=True needs a base with a bias, got {name}"
            )
        return bias + self.lora_B[name].bias.to(bias.device) * self.scaling[name]

    def _write(self, weight: Any, values: torch.Tensor) -> None:
        """Round FP32 values into a quantized weight."""
        values = values.to(weight.device)
        if self.merge_rounding == "nearest":
            weight.quantize_(values)
            return
        weight.copy_(tensor_of(rounded_stochastically(values, weight.tensor_storage), weight))


def _tell(weight: Any, loss: float, rounding: str) -> None:
    warn_once(
        "peft.merge",
        f"merge: merged weights are rounded to {weight.tensor_storage.first.spec} ({rounding}), "
        f"which changes those of the first layer by {loss:.2g} of the norm of their update; "
        "hybridq.integrations.peft.merge_losses(model) has all layers; a base that was loaded in "
        "high precision loses next to nothing",
    )
