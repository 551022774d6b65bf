"""What other packages ask of a module with quantized weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch

from ...recipes import Plan, Recipe

__all__ = ["WeightOwner"]


class WeightOwner(Protocol):
    """What sharding, plans of runs and reports ask of a module; every `QuantizedModule` is one.

    Attributes:
        training: as of any module of torch.
        module_type: what `role.module_type` says of its slots.
        holds_transposed: weights are `[in, out]`, and not `[out, in]`; of several matrices, each.
        last_recipe: the recipe, or None, of the last training forward, in a tuple; empty before.
        prepared_weights: by name, what keeps a weight prepared for sharded training.
    """

    training: bool
    module_type: str
    holds_transposed: bool
    last_recipe: tuple[Any, ...]

    @property
    def weight_parts(self) -> Mapping[str, str]:
        """Names of the weights, and the part of the module that each belongs to."""

    def initial_weights(self) -> Iterable[tuple[str, str]]:
        """Return the same pairs, with weights that no GEMM has but which may be quantized."""

    @property
    def prepared_weights(self) -> Mapping[str, Any]:
        """By name, what keeps a weight prepared for sharded training."""

    def held(self, name: str) -> Any:
        """Return the parameter of a name as it is now: sharded or whole, or None.

        Args:
            name: of a weight.
        """

    def keep_prepared(self, name: str, prepared: Any) -> None:
        """Have a weight prepared again whenever the module is given another tensor for it.

        Args:
            name: of the weight.
            prepared: what prepares it.
        """

    def parts_of(self, recipe: Recipe | None) -> tuple[str, ...]:
        """Return the parts that a recipe is asked about.

        Args:
            recipe: any, or None.
        """

    def matrix_parts(self, part: str, count: int, recipe: Recipe | None) -> tuple[str, ...]:
        """Return what a recipe is asked about for a weight of several matrices: once, or each.

        Args:
            part: of the module, that the weight belongs to.
            count: how many matrices there are.
            recipe: any, or None.
        """

    def plan_of(self, recipe: Recipe, part: str = "") -> Plan:
        """Return the plan of one part under a recipe.

        Args:
            recipe: any.
            part: of the module.
        """

    def recipe_now(self) -> Recipe | None:
        """Return the recipe that the module computes under now; None: nothing is quantized."""

    def plan_now(self, part: str) -> Plan | None:
        """Return how a part computes now; None: nothing is quantized.

        Args:
            part: of the module.
        """

    def scaled_weights(self) -> list[tuple[str, torch.Tensor]]:
        """Return each part with its weight, those that are there."""

    def weight_statistics(self, part: str) -> tuple[int, torch.Tensor]:
        """Return a number for the scales of a part's weight as they are now, and their statistics.

        Statistics are FP32 `[2]`, of the rowwise and of the columnwise plane.

        Args:
            part: of the module.

        Raises:
            PlaneError: it keeps no history.
        """

    def scale_changes(self, part: str, is_training: bool) -> int:
        """Return another number after each change of a part's scales of delayed scaling.

        Args:
            part: of the module.
            is_training: whether -1 is wanted where nobody tells of steps, which must be looked for.
        """

    def misses_step(self, part: str, stamp: object) -> bool:
        """Return whether delayed scales wait for a step that nobody told of.

        Args:
            part: of the module.
            stamp: another one when the part's weight was written.
        """

    def take_step(self, part: str, stamp: object) -> None:
        """Update delayed scales, if the module's plan has any; all ranks must call it.

        Args:
            part, stamp: as for `misses_step`.
        """
