"""Whether writes by arithmetic reach a quantized tensor: a warning, once, where they do not.

A step below half a step of the format is rounded back to what was there. An average with a decay of
0.999, or a weight under a small rate, so stands still for ever, and nothing else shows it.

Looked at are the writes of a process number 1, 2, 4, 8, ... of each operator, one tensor of each:
what is done to thousands of parameters in each step costs a count. Not looked at is what compiled
code and captured CUDA graphs write, and what must not wait for a GPU (`set_sync_debug_mode`).
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

import torch

from ..errors import warn_once
from ..kernels.inputs import wide

__all__ = ["LostUpdate", "watch_update"]

_NAMES: Final = ("lerp_", "add_", "sub_", "mul_", "div_", "addcdiv_", "addcmul_")
#: So much of a wanted change, at least, is there after a write: on the average all of it, where
#: values are rounded up and down.
_LEAST: Final = 0.25
#: Elements of a tensor that are looked at, the first ones.
_MOST: Final = 1 << 20
_counts: Counter[str] = Counter()


class LostUpdate:
    """One write that is looked at.

    Args:
        name: of the operator.
        tensor: a QuantizedTensor that it will write.
        values: of the tensor, plain, which the operator will write.
    """

    def __init__(self, name: str, tensor: Any, values: torch.Tensor) -> None:
        self._name, self._tensor, self._values = name, tensor, values
        self._before = _looked_at(values).clone()

    def end(self, after: torch.Tensor) -> None:
        """Warn if little of the change is there.

        Args:
            after: what the tensor decodes to after the write.
        """
        before = wide(self._before)
        wanted = wide(_looked_at(self._values)) - before
        made = wide(_looked_at(after)) - before
        share = min(_share(made, wanted), _share(_turn(made, before), _turn(wanted, before)))
        if share < _LEAST:
            warn_once(
                "tensor.lost_updates",
                f"{self._name}: {type(self._tensor).__name__} {list(self._tensor.shape)} rounds "
                f"what is written, and kept {max(share, 0.0):.0%} of this change: what is below "
                "half a step of its format is lost in every such write, and an average or a weight "
                "that moves by small steps stands still; average in a plain model (see Averages in "
                "docs/guides/quantized-parameters.md), and train by hybridq.optim, which has "
                "masters",
            )


def _looked_at(values: torch.Tensor) -> torch.Tensor:
    return values.flatten()[:_MOST]


def _share(made: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return how much of a wanted change was made, 1 where none was wanted."""
    size = float(wanted.dot(wanted))
    return float(made.dot(wanted)) / size if 0.0 < size < float("inf") else 1.0


def _turn(change: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Return a change without what only scales `before`, which a scale of the tensor may hold.

    Where that is nearly all of it, what is left is rounding: zero.
    """
    size = float(before.dot(before))
    if not 0.0 < size < float("inf"):
        return change
    rest = change - before * (change.dot(before) / size)
    is_rounding = float(rest.dot(rest)) < 0.01 * float(change.dot(change))
    return torch.zeros_like(rest) if is_rounding else rest


def watch_update(func: Any, targets: list[Any], values: dict[int, Any]) -> LostUpdate | None:
    """Return the write that `func` will do, if it is one of those that are looked at.

    Args:
        func: an operator.
        targets: the QuantizedTensors that it writes.
        values: plain values of tensors by `id`, which it will write in their place.
    """
    name = func.overloadpacket.__name__
    own = name.removeprefix("_foreach_")
    if not targets or not (own in _NAMES or name.startswith("_fused_")):
        return None
    _counts[name] += 1
    if _counts[name].bit_count() != 1 or not _can_look(values[id(targets[0])]):
        return None
    return LostUpdate(name, targets[0], values[id(targets[0])])


def _can_look(values: torch.Tensor) -> bool:
    if type(values) is not torch.Tensor or values.is_meta or torch.compiler.is_compiling():
        return False
    if not values.is_cuda:
        return True
    return not (torch.cuda.is_current_stream_capturing() or torch.cuda.get_sync_debug_mode())
