"""DelayedScaling: per-tensor FP8 whose scales follow from the amaxes of earlier steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..quantizers import DelayedScalingRequest, Quantizer, delayed_quantizer
from .builtin import FloatFormat, _Float8Recipe
from .recipe import _set
from .roles import QuantizerRole

__all__ = ["DelayedScaling"]


@dataclass(frozen=True, repr=False)
class DelayedScaling(_Float8Recipe):
    """FP8 with one scale per tensor, from the amaxes of earlier steps.

    Every slot of a module keeps its own history, and takes the largest amax in it for that of the
    tensor to come: encode needs no pass over the tensor before it writes. See
    docs/guides/recipes.md for when the scales are updated.

    Args:
        margin: the scale leaves `2^margin` of room above the amax.
        fp8_format: `HYBRID` (E4M3 forward, E5M2 for gradients) or `E4M3`; a FloatFormat, its name,
            or any enumeration member of that name.
        amax_history_len: number of steps that are looked back on.
        amax_compute_algo: `"max"` of the history, `"most_recent"`, or a name that
            `hybridq.quantizers.register_scaling_algorithm` was given.
        reduce_amax: all ranks of a group take the largest of their amaxes, once per step.
        amax_reduction_group: a process group or its name; None: torch.distributed's default group,
            if it is initialized.
        precision, columnwise_source: as in `Recipe`; by keyword only.
        backward_override: must be None, as in Transformer Engine.

    Raises:
        ValueError: an unknown choice, a number out of range, or a `backward_override`.
        TypeError: `amax_reduction_group` is no process group.

    Source: Transformer Engine's DelayedScaling.
    """

    margin: int = 0
    fp8_format: FloatFormat | str = FloatFormat.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    reduce_amax: bool = True
    amax_reduction_group: Any = None

    def __post_init__(self) -> None:
        if self.backward_override is not None:
            raise ValueError(
                "DelayedScaling: the backward multiplies the recipe's planes, backward_override "
                f"must be None, got {self.backward_override!r}"
            )
        # The group as its name: a recipe is compared by its text.
        _set(self, amax_reduction_group=self.request.amax_reduction_group)
        super().__post_init__()

    @property
    def request(self) -> DelayedScalingRequest:
        """What every slot asks for."""
        return DelayedScalingRequest(
            self.fp8_format,
            self.margin,
            self.amax_history_len,
            self.amax_compute_algo,
            self.reduce_amax,
            self.amax_reduction_group,
        )

    def quantizer(self, role: QuantizerRole) -> Quantizer:
        return delayed_quantizer(self.request, role.is_gradient)
