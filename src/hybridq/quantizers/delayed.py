"""Delayed scaling: the scale of a tensor follows from the amaxes of earlier steps.

A quantizer is a frozen value and holds no tensor. What a slot asks for is a
`DelayedScalingRequest`; the tensors live in the module (`hybridq.nn`) or in a `Float8Quantizer`.

Source: docs/reference/numerics.md, "Per-tensor FP8, delayed scaling"; names and defaults:
Transformer Engine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final

import torch

from ..direction import DIRECTIONS
from ..errors import SpecError, must_be_one_of
from ..formats import PlaneSpec, element
from .statistics import group_name

__all__ = [
    "DelayedScalingRequest",
    "described",
    "epoch",
    "next_scale",
    "no_history",
    "parsed",
    "register_scaling_algorithm",
    "resolved",
]

#: Elements of forward tensors and of gradients, by the name of the pair.
_ELEMENTS: Final = {"E4M3": ("e4m3", "e4m3"), "HYBRID": ("e4m3", "e5m2")}
_ALGORITHMS: Final = ("max", "most_recent")
#: What callers have registered, by name: history, scale and numerator to the new scale.
_registered: Final[dict[str, Callable[..., torch.Tensor]]] = {}
#: So that fmax * 2^-margin is a normal FP32 number.
_MOST_MARGIN: Final = 100
_MOST_HISTORY: Final = 1 << 20


class _Epoch:
    """How many updates of delayed scaling there were in this process."""

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()

    def advance(self) -> None:
        """Count one more; it never goes back, whichever threads count at once."""
        with self._lock:
            self.count += 1


epoch = _Epoch()


@dataclass(frozen=True)
class DelayedScalingRequest:
    """What a factory returns for a slot whose scale follows from a history of amaxes.

    It may stand for a whole slot, or for either direction in a `HybridQuantizer`.

    Args:
        fp8_format: `"HYBRID"` (E4M3, and E5M2 for gradients) or `"E4M3"`: a name, or any
            enumeration member of that name.
        margin: the scale leaves `2^margin` of room above the amax.
        amax_history_len: number of steps that are looked back on.
        amax_compute_algo: `"max"` of the history, `"most_recent"`, or a name that
            `register_scaling_algorithm` was given.
        reduce_amax: whether all ranks of a group take the largest of their amaxes. Without a
            group named below that is torch.distributed's default group, if it is initialized.
        amax_reduction_group: a process group or its name; None: the default group.

    Raises:
        SpecError: an unknown choice, or a number out of range.
        TypeError: `amax_reduction_group` is no process group.

    Source: Transformer Engine's DelayedScalingRequest.

    Example:
        >>> import hybridq
        >>> hybridq.HybridQuantizer(
        ...     rowwise_quantizer=hybridq.DelayedScalingRequest(amax_history_len=16),
        ...     columnwise_quantizer=hybridq.MXFP8Quantizer(),
        ... ).rowwise_delay.amax_history_len
        16
    """

    fp8_format: Any = "HYBRID"
    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    reduce_amax: bool = True
    amax_reduction_group: Any = None

    def __post_init__(self) -> None:
        given = self.fp8_format
        name = given if isinstance(given, str) else getattr(given, "name", None)
        if not isinstance(name, str) or name.upper() not in _ELEMENTS:
            raise SpecError(f"DelayedScalingRequest: fp8_format {must_be_one_of(_ELEMENTS, given)}")
        object.__setattr__(self, "fp8_format", name.upper())
        self._check_numbers()
        group = group_name(self.amax_reduction_group)
        if group is not None and not (group and set("|@;").isdisjoint(group)):
            raise SpecError(
                "DelayedScalingRequest: a group's name must not be empty or hold | @ or ;, got "
                f"{group!r}"
            )
        object.__setattr__(self, "amax_reduction_group", group)

    def _check_numbers(self) -> None:
        for field, low, high in (
            ("margin", -_MOST_MARGIN, _MOST_MARGIN),
            ("amax_history_len", 1, _MOST_HISTORY),
        ):
            value = getattr(self, field)
            if type(value) is not int or not low <= value <= high:
                raise SpecError(
                    f"DelayedScalingRequest: {field} must be an integer from {low} to {high}, got "
                    f"{value!r}"
                )
        algorithm = self.amax_compute_algo
        if algorithm not in _ALGORITHMS and algorithm not in _registered:
            raise SpecError(
                f"DelayedScalingRequest: amax_compute_algo {must_be_one_of(_ALGORITHMS, algorithm)}"
            )
        if not isinstance(self.reduce_amax, bool):
            raise SpecError(
                f"DelayedScalingRequest: reduce_amax must be a bool, got {self.reduce_amax!r}"
            )

    def element(self, is_gradient: bool) -> str:
        """Return the name of the element.

        Args:
            is_gradient: of a gradient, or of a forward tensor.
        """
        return _ELEMENTS[self.fp8_format][is_gradient]

    def numerator(self, fmax: float) -> float:
        """Return `fmax * 2^-margin`, which the amax divides.

        Args:
            fmax: largest finite value of the element.
        """
        return fmax * 2.0**-self.margin

    @property
    def text(self) -> str:
        """Canonical string; `parse` inverts it."""
        values = (self.fp8_format, self.margin, self.amax_history_len, self.amax_compute_algo)
        return ",".join(map(str, (*values, int(self.reduce_amax), self.amax_reduction_group or "")))

    @staticmethod
    def parse(text: str) -> DelayedScalingRequest:
        """Return the request whose canonical string is `text`."""
        return _parse(text)


@lru_cache(maxsize=256)
def _parse(text: str) -> DelayedScalingRequest:
    try:
        name, margin, length, algorithm, reduces, group = text.split(",", 5)
        return DelayedScalingRequest(
            name, int(margin), int(length), algorithm, reduces == "1", group or None
        )
    except ValueError as error:
        if isinstance(error, SpecError):
            raise
        raise SpecError(
            f"DelayedScalingRequest.parse: not a request's canonical string, got {text!r}"
        ) from error


def described(quantizer: Any) -> tuple[str, str]:
    """Return the strings of a quantizer's planes: `spec`, or `spec@request`; `parsed` inverts it.

    Raises:
        SpecError: a delay of a plane that has no scale of the whole tensor, or has a transform, or
            beside an `amax_group`.
    """
    strings = []
    for direction in DIRECTIONS:
        spec, delay = getattr(quantizer, direction), getattr(quantizer, f"{direction}_delay")
        strings.append("" if spec is None else str(spec))
        if delay is None:
            continue
        if not isinstance(delay, DelayedScalingRequest):
            raise SpecError(
                f"Quantizer: a delay is a DelayedScalingRequest, got {type(delay).__name__}"
            )
        if spec is None or not spec.format.is_tensor_scaled or spec.signs is not None:
            raise SpecError(
                "Quantizer: delayed scaling takes planes with one scale for the tensor and no "
                f"transform, got {spec}"
            )
        if quantizer.amax_group is not None:
            raise SpecError(
                "Quantizer: delayed scaling reduces its own amaxes, once per step; amax_group "
                f"must be None, got {quantizer.amax_group!r}"
            )
        strings[-1] += f"@{delay.text}"
    return strings[0], strings[1]


def parsed(text: str) -> tuple[PlaneSpec | None, DelayedScalingRequest | None]:
    """Return the spec and the request, if there are any, that `described` gave as `text`."""
    spec, _, delay = text.partition("@")
    own = PlaneSpec.parse(spec) if spec else None
    return own, DelayedScalingRequest.parse(delay) if delay else None


def resolved(
    spec: PlaneSpec | None, delay: DelayedScalingRequest | None, is_gradient: bool
) -> PlaneSpec | None:
    """Return `spec` with the element that `delay` asks for, if there is a delay."""
    if delay is None or spec is None:
        return spec
    return replace(spec, format=replace(spec.format, element=element(delay.element(is_gradient))))


def no_history(where: str) -> str:
    """Return the error's text of a function that got no history to take a scale from."""
    return (
        f"{where}: a scale of this quantizer follows from the history of a module's slot, got "
        "none; outside of modules use hybridq.Float8Quantizer(scale, amax, fp8_dtype)"
    )


def register_scaling_algorithm(name: str, function: Callable[..., torch.Tensor]) -> None:
    """Let `amax_compute_algo` be `name`: scales follow from histories as `function` says.

    Every process that reads such a request must have registered it.

    Args:
        name: an identifier, not one that is known already.
        function: `function(history, scale, numerator)` of FP32 `[n, length]` (slot 0 the newest)
            and two of FP32 `[n]`; returns the new scales, FP32 `[n]`. It is called once per step
            for all slots of one history length, and must not write to its arguments.

    Raises:
        ValueError: `name` is no identifier, or is taken by another function.
        TypeError: `function` is not callable.

    Source: ours; Transformer Engine takes callables in the recipe itself.

    Example:
        >>> import hybridq
        >>> def mean(history, scale, numerator):
        ...     return numerator / history.mean(-1).clamp(min=1e-6)
        >>> hybridq.quantizers.register_scaling_algorithm("mean_of_history", mean)
        >>> hybridq.recipes.DelayedScaling(amax_compute_algo="mean_of_history").amax_compute_algo
        'mean_of_history'
    """
    if not name.isidentifier():
        raise ValueError(f"register_scaling_algorithm: name must be an identifier, got {name!r}")
    given: object = function
    if not callable(given):
        got = type(given).__name__
        raise TypeError(f"register_scaling_algorithm: function must be callable, got {got}")
    if name in _ALGORITHMS or _registered.setdefault(name, function) is not function:
        raise ValueError(f"register_scaling_algorithm: {name!r} must be registered once")


def next_scale(
    history: torch.Tensor,
    scale: torch.Tensor,
    numerator: torch.Tensor,
    is_most_recent: bool = False,
    algorithm: str = "",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the history and the scale of the next step.

    `scale = numerator / amax` in FP32, at most the FP32 maximum; while amax is 0, infinite or NaN
    the old scale stays. The history then rolls: slot 0, the newest, goes to the end, the oldest
    (slot 1) is dropped, and slot 0 is zero.

    Args:
        history: FP32 `[..., length]`, slot 0 the newest.
        scale: FP32 `[...]`, what a value was multiplied with.
        numerator: FP32 `[...]`, `fmax * 2^-margin`.
        is_most_recent: amax is slot 0, and not the maximum of the history.
        algorithm: name of a registered one, which gives the scale instead.

    Source: Transformer Engine, delayed_scaling.cu, but that a NaN is not dropped.

    Example:
        >>> import torch, hybridq
        >>> history = torch.tensor([7.0, 3.5, 1.0])
        >>> hybridq.quantizers.next_scale(history, torch.ones(()), torch.tensor(448.0))
        (tensor([0., 1., 7.]), tensor(64.))
    """
    amax = history[..., 0] if is_most_recent else history.amax(-1)
    quotient = (numerator / amax).clamp(max=torch.finfo(torch.float32).max)
    is_usable = (amax > 0.0) & amax.isfinite()
    new = torch.where(is_usable, quotient, scale)
    if algorithm in _registered:
        new = _registered[algorithm](history, scale, numerator)
    rolled = history.roll(-1, -1)
    rolled[..., 0] = 0.0
    return rolled, new
