"""What an update says of the amaxes that it was given: no finite numbers, or values that were cut.

A scale of earlier steps cuts what grows between two updates. A factor of two is nothing of note (a
loss scaler doubles); more than `_NOTED` is what a replaced weight, other data, or a run that goes
wrong looks like.
"""

from __future__ import annotations

import threading
from typing import Any, Final, TypeAlias

import torch

from ...errors import warn_once

__all__ = ["note_amaxes", "warn_of_earlier"]

#: Name of the module and place, of each amax.
_Labels: TypeAlias = list[tuple[str, str]]
#: How many times the largest value that its scale holds an amax must be, to be named.
_NOTED: Final = 4.0
#: Slots that a warning names.
_MOST_NAMED: Final = 3

_lock = threading.Lock()
#: What was found on devices that may not be done yet, and the event that says so.
_pending: list[tuple[torch.Tensor, Any, _Labels]] = []


def note_amaxes(
    amax: torch.Tensor, scale: torch.Tensor, limit: torch.Tensor, labels: _Labels
) -> None:
    """Warn once of amaxes that are no finite numbers, and of those that were cut by far.

    On a CUDA device it is the next update that warns, so that nothing waits.

    Args:
        amax: FP32 `[n]`; below 0 where none was recorded.
        scale: FP32 `[n]`, under which they were recorded.
        limit: FP32 `[n]`, the largest values that the elements are meant to hold.
        labels: name of the module, and place, of each.
    """
    excess = (amax / limit * scale).clamp(max=torch.finfo(torch.float32).max)
    excess = torch.where(amax.isfinite(), excess, torch.nan)
    if not excess.is_cuda:
        _warn(excess, labels)
    elif not torch.cuda.is_current_stream_capturing():
        copy = torch.empty(excess.shape, dtype=torch.float32, pin_memory=True, device="cpu")
        copy.copy_(excess, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        with _lock:
            _pending.append((copy, event, labels))


def warn_of_earlier() -> None:
    """Warn of what earlier updates found on devices that are done with them."""
    with _lock:
        waiting = [(entry, entry[1].query()) for entry in _pending]
        _pending[:] = [entry for entry, is_done in waiting if not is_done]
    for (excess, _, labels), is_done in waiting:
        if is_done:
            _warn(excess, labels)


def _warn(excess: torch.Tensor, labels: _Labels) -> None:
    """Warn once of each amax that is NaN here, and of those above `_NOTED`.

    Args:
        excess: FP32 `[n]`: how many times the largest value that the scale holds.
        labels: as for `note_amaxes`.
    """
    if bool((excess <= _NOTED).all()):
        return
    found = excess.tolist()
    cut = []
    for times, (name, place) in zip(found, labels, strict=True):
        where = f"slot {place!r} of {name or 'an unnamed module'}"
        if times != times:
            warn_once(
                f"scaling.{name}.{place}",
                f"delayed scaling: the amax of {where} is infinite or NaN; its old scale stays as "
                "long as that stands in the history",
            )
        elif times > _NOTED:
            cut.append((times, where))
    if not cut:
        return
    cut.sort(key=lambda one: -one[0])
    named = ", ".join(f"{where} ({times:.3g} times)" for times, where in cut[:_MOST_NAMED])
    more = f" and {len(cut) - _MOST_NAMED} more" if len(cut) > _MOST_NAMED else ""
    warn_once(
        "scaling.cut",
        "delayed scaling: values were cut to what the scales of earlier steps hold (1 before the "
        f"first), in a step with a larger amax: {named}{more}. The next step takes the new "
        "amaxes. A weight that is replaced, or loaded without its history, does this, and so "
        "does other data; recipe 'fp8_current' never cuts",
    )
