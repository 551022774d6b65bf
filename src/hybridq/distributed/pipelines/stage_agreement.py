"""What ranks of a pipeline must agree on, compared once before a stage's first microbatch."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from ... import settings
from ...errors import RecipeError
from ...nn import QuantizedModule
from ...nn.delayed_scaling import has_own_group, reduces_by_default
from ...recipes import Recipe, bind
from ...shards import Facts
from ...shards import compare as compare_facts
from ..agreement import compare, gathered_values, pipeline_fingerprint

__all__ = ["Agreed", "compare_recipes", "compare_stages"]


class Agreed(NamedTuple):
    """What the stages of all ranks have in common.

    Attributes:
        num_stages: of the pipeline.
        communication: formats of what travels forward and backward, as texts.
        keeps_weights: over microbatches.
        num_replicas: ranks that hold the same stage; 0: not said.
        num_microbatches: of a step; 0: not known yet.
    """

    num_stages: int
    communication: tuple[str, str]
    keeps_weights: bool
    num_replicas: int
    num_microbatches: int = 0

    @property
    def lines(self) -> list[tuple[str, str]]:
        """What, and its value."""
        forward, backward = self.communication
        return [
            ("the number of stages", str(self.num_stages)),
            ("the format of activations between stages", forward),
            ("the format of gradients between stages", backward),
            ("keep_weights", str(self.keeps_weights)),
            ("the ranks of a stage (replicas)", str(self.num_replicas or "not given")),
            ("the number of microbatches", str(self.num_microbatches)),
        ]


def compare_stages(agreed: Agreed, module: nn.Module, group: Any) -> None:
    """Raise on every rank of a pipeline if one of them is about to run something else.

    Every rank must call it: once, before the first microbatch of a stage.

    Args:
        agreed: of this rank's stage.
        module: of the stage.
        group: process group of the pipeline.

    Raises:
        RuntimeError: with what differs, and what each rank has; or delayed scaling would reduce
            amaxes of one stage with those of another.
    """
    recipe = settings.current().recipe
    own = pipeline_fingerprint(agreed.lines, recipe if isinstance(recipe, Recipe) else None)
    compare(own, group, "pipeline_stage")
    if agreed.num_replicas:
        return
    is_open = isinstance(recipe, Recipe) and _reduces_over_all(module, recipe)
    if any(gathered_values(is_open, group)):
        raise RuntimeError(
            "pipeline_stage: delayed scaling reduces amaxes over the ranks that hold the same "
            "stage, which are not known where a pipeline does not span all ranks; give "
            "replicas=mesh['dp'] (or its process group) to pipeline_stage, or take a recipe with "
            "reduce_amax=False or amax_reduction_group=, got none of them"
        )


def compare_recipes(group: Any) -> None:
    """Raise on every rank of a pipeline if another recipe begins, and not the same on all of them.

    Every rank that has another recipe must call it before it waits for a message; the others are
    missed after the timeout of the group's store.

    Args:
        group: process group of the pipeline.

    Raises:
        RuntimeError: with the formats of a linear module on each rank, or who did not come.
    """
    recipe = settings.current().recipe
    formats: tuple[str, ...] = ()
    if isinstance(recipe, Recipe):
        try:
            plan = bind(recipe)
        except (RecipeError, TypeError, ValueError) as error:  # the module's own forward raises it
            formats = (f"refused: {error}",)
        else:
            slots = (plan.input, plan.weight, plan.grad_output)
            formats = tuple([str(one.spec) for slot in slots for one in (slot.row, slot.col)])
    where = "pipeline_stage, whose recipe changes"
    compare_facts(group.group_name, Facts(where, formats, "", (), -1, (), ()))


def _reduces_over_all(module: nn.Module, recipe: Recipe) -> bool:
    """Return whether a history of the module would be reduced over the default group."""
    for one in module.modules():
        if not isinstance(one, QuantizedModule) or has_own_group(one):
            continue
        if any(reduces_by_default(one.plan_of(recipe, part)) for part in one.parts_of(recipe)):
            return True
    return False
