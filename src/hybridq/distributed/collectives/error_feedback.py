"""Error feedback: what rounding took from a message is added to the next one of the same tensor.

Source: 1-bit SGD (Seide et al., Interspeech 2014); Karimireddy et al., arXiv:1901.09847.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

__all__ = ["ErrorFeedback", "Residual"]


class Residual:
    """What rounding has taken so far from the messages of one tensor on this rank.

    Attributes:
        sent: FP32, of the tensor's shape: of what this rank sent; None before the first message.
        reduced: FP32: of an all-reduce, the same of the part that this rank sums up; or None.

    Source: ours.
    """

    def __init__(self) -> None:
        self.sent: torch.Tensor | None = None
        self.reduced: torch.Tensor | None = None

    def added(self, which: str, x: torch.Tensor) -> torch.Tensor:
        """Return x, in FP32, with what earlier messages lack.

        Args:
            which: `"sent"` or `"reduced"`.
            x: what will be sent.

        Raises:
            ValueError: x has another shape than the last one.
        """
        kept: torch.Tensor | None = getattr(self, which)
        if kept is None:
            return x.float()
        if kept.shape != x.shape:
            raise ValueError(
                "error_feedback: a residual belongs to one tensor, whose shape stays "
                f"{tuple(kept.shape)}, got {tuple(x.shape)}; take one residual for each"
            )
        return x.float() + kept

    def keep(self, which: str, wanted: torch.Tensor, sent: torch.Tensor) -> None:
        """Keep what a message lacks; where it is not finite, nothing.

        Args:
            which: `"sent"` or `"reduced"`.
            wanted: FP32, what `added` returned.
            sent: FP32, what the message decodes to.
        """
        lack = (wanted - sent.view(wanted.shape)).nan_to_num_(0.0, 0.0, 0.0)
        setattr(self, which, lack)


class ErrorFeedback:
    """The residuals of the tensors that a rank reduces, by a name of the caller's.

    `feedback["layer.weight"]` is the `Residual` of that tensor, made when it is first asked for;
    reductions take it as `error_feedback`. The sum of what was sent over steps then differs from
    the sum of the values by one rounding, not by one for each step.

    Source: ours.

    Example:
        >>> import torch, hybridq
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> feedback = hybridq.distributed.ErrorFeedback()
        >>> sent = torch.zeros(64)
        >>> for _ in range(8):  # 0.3 and 5 in one block of MXFP4: 0.3 alone becomes 0.5 or 0
        ...     x = torch.full((64,), 0.3).index_fill_(0, torch.tensor([0, 32]), 5.0)
        ...     sent += hybridq.distributed.all_reduce(
        ...         x, "mxfp4", error_feedback=feedback["x"])
        >>> bool((sent[1] - 8 * 0.3).abs() <= 0.5)
        True
        >>> dist.destroy_process_group()
    """

    def __init__(self) -> None:
        self._residuals: dict[Hashable, Residual] = {}

    def __getitem__(self, name: Hashable) -> Residual:
        return self._residuals.setdefault(name, Residual())

    def __len__(self) -> int:
        return len(self._residuals)

    @property
    def nbytes(self) -> int:
        """Bytes of all residuals."""
        kept = [one for r in self._residuals.values() for one in (r.sent, r.reduced)]
        return sum(one.numel() * one.element_size() for one in kept if one is not None)

    def state_dict(self) -> dict[Hashable, Any]:
        """Return the residuals of this rank, for a checkpoint: name to both tensors or None."""
        return {name: (one.sent, one.reduced) for name, one in self._residuals.items()}

    def load_state_dict(self, state: dict[Hashable, Any]) -> None:
        """Take the residuals of `state_dict`.

        Args:
            state: of the same rank.
        """
        self._residuals.clear()
        for name, (sent, reduced) in state.items():
            own = self[name]
            own.sent, own.reduced = sent, reduced
