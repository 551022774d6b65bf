"""What modules of experts ask of ranks each of which has some of the experts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from ..nn.autograd import GradientPlane, TokenRows
from ..recipes import Recipe

__all__ = ["ExpertExchange"]

#: Rows that arrived, where each own expert's end in their order, that order, and the place of the
#: plane in which the outputs' gradient arrives; to the experts' outputs in that order.
Compute = Callable[[torch.Tensor, torch.Tensor, TokenRows, GradientPlane | None], torch.Tensor]


class ExpertExchange(Protocol):
    """Ranks each of which has a part of a module's experts, one after the other."""

    def recipe(self) -> AbstractContextManager[Any]:
        """Return the context of a forward: the recipe in force, or the exchange's own."""
        ...

    def own_part(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a parameter of the experts.

        Args:
            parameter: `[experts, ...]` of all ranks.
        """
        ...

    def own_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's part, copies included, of what every rank has whole.

        Args:
            tensor: `[experts, ...]`.
        """
        ...

    def with_copies(self, module: Any, own: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a parameter, and copies of other ranks' experts behind.

        Args:
            module: the experts.
            own: as `own_part` returned it.
        """
        ...

    def local_tokens(
        self, module: Any, given: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor], Any, Any]:
        """Return what this rank has of tokens, what ranks have the same ones, and how they lie.

        Args:
            module: the experts.
            given: what the forward takes, plain tensors or DTensors.
        """
        ...

    def own_tokens(self, module: Any, given: list[torch.Tensor], lanes: Any) -> list[torch.Tensor]:
        """Return of what each token has the rows that this rank sends.

        Args:
            module: the experts.
            given: `[tokens, ...]` each.
            lanes: the ranks that have the same tokens, as `local_tokens` returned them.
        """
        ...

    def own_sorted(
        self, module: Any, x: torch.Tensor, offsets: torch.Tensor, lanes: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return of rows sorted by expert those that this rank sends, and where experts' end.

        Args:
            module: the experts.
            x: `[rows, in]`.
            offsets: int32 `[experts]`, where each expert's rows end.
            lanes: as for `own_tokens`.
        """
        ...

    def all_tokens(self, y: torch.Tensor, count: int, lanes: Any) -> torch.Tensor:
        """Return what all ranks have made of the tokens of which each has sent its rows.

        Args:
            y: `[rows, out]`, of this rank's.
            count: of all tokens.
            lanes: as for `own_tokens`.
        """
        ...

    def placed_result(self, y: torch.Tensor, placed: Any) -> torch.Tensor:
        """Return the result as the tokens lie.

        Args:
            y: `[..., out]`, of this rank's tokens.
            placed: as `local_tokens` returned it.
        """
        ...

    def run(
        self,
        module: Any,
        recipe: Recipe | None,
        x: torch.Tensor,
        offsets: torch.Tensor,
        compute: Compute,
    ) -> torch.Tensor:
        """Return what the experts of all ranks make of this rank's rows, `[rows, out]`.

        Args:
            module: the experts.
            recipe: of this forward.
            x: `[rows, in]`, sorted by expert.
            offsets: int32 `[experts]`, where each expert's rows end; those behind give zeros.
            compute: what this rank's experts make of rows that arrived.
        """
        ...
