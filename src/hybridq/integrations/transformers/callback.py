"""HybridQCallback: a recipe, its schedule and its histories in transformers' Trainer."""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Iterable
from typing import Any, Final

from torch import nn
from transformers.trainer_callback import ExportableState, TrainerCallback

from ..._log import log_once
from ...converters import conversion, warn_of_unfollowed
from ...distributed import ScalingHistory
from ...errors import warn
from ...kernels.choice import fallbacks
from ...recipes import QuantizerRole, Recipe, RecipeSchedule
from ...recipes.as_text import recipe_of, text_of
from ...recipes.recipe import RecipeSource
from ...recipes.roles import LINEAR, SLOTS
from ..forward import check_converted, run_under
from ..sharding import prepare_for_sharding, reason_against

__all__ = ["HybridQCallback"]

_HISTORIES: Final = "histories"
_OF_EXPERTS: Final = "histories_of_experts"

#: A recipe, or pairs of a start and a recipe, as RecipeSchedule takes them.
Given = RecipeSource | str | os.PathLike[str] | Iterable[tuple[float, Recipe | str]]


class HybridQCallback(TrainerCallback, ExportableState):
    """Trains under a recipe: `Trainer(model, args, callbacks=[HybridQCallback("mxfp8")])`.

    From the beginning to the end of `train()` the model's forward runs under the recipe; gradient
    checkpointing, accumulation and compilation are Trainer's own. A schedule follows
    `state.global_step`. Histories of delayed scaling are in the checkpoint's `trainer_state.json`,
    and a run that is resumed goes on with them. Where `train()` ends by an error or an interrupt,
    Trainer tells nobody: the model stays under the recipe until the next `train()` with a callback
    of this kind, or until `detach()`.

    Logs have `quantized_share`, of the elements of matrices those in converted modules, and
    `fallbacks`, how many reasons there were so far in this process to run an operation on the slow
    reference backend.

    Args:
        recipe: a recipe, the name of one, a TOML file's path, or a RecipeSchedule; or phases of
            one, `(start, recipe)` pairs, whose fractions are those of the run's `max_steps`. None:
            the recipe of the HybridQConfig that the model was loaded with.
        evaluation: evaluate under the recipe as well.

    Raises:
        TypeError, ValueError: as `hybridq.autocast` and `hybridq.RecipeSchedule`; in `train()`, the
            model has no modules of hybridq, or no recipe is known.

    Example:
        >>> from hybridq.integrations.transformers import HybridQCallback
        >>> callback = HybridQCallback([(0, "nvfp4"), (0.9, "mxfp8")])
    """

    def __init__(self, recipe: Given | None = None, evaluation: bool = False) -> None:
        self._given: RecipeSource | list[Any] | None = None
        if isinstance(recipe, RecipeSource):
            self._given = recipe
        elif isinstance(recipe, str | os.PathLike):
            self._given = recipe_of(recipe)
        elif recipe is not None:
            self._given = [_phase(phase) for phase in recipe]
            RecipeSchedule(self._given, total_steps=1 << 30)  # raises where they are no phases
        self._evaluation = evaluation
        self._recipe: RecipeSource | None = None
        self._model: nn.Module | None = None
        self._undo: Callable[[], None] | None = None
        self._share = 0.0

    @property
    def recipe(self) -> Recipe | None:
        """The recipe of the next step; None before `train()` has begun."""
        return None if self._recipe is None else self._recipe.current

    def on_init_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Let weights travel as planes where FSDP2 will shard the model.

        Args:
            args, state, control, model, kwargs: Trainer's.
        """
        from accelerate.state import AcceleratorState  # which Trainer needs, and has made

        shared = AcceleratorState()
        if shared.is_fsdp2:
            why = reason_against(shared)
            if why is None:
                prepare_for_sharding(model, shared)
            else:
                log_once(
                    "integrations.fsdp2",
                    f"HybridQCallback: weights travel as values and not as planes, since {why}",
                )

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Put the model under the recipe, and take up histories where the run is resumed.

        Args:
            args, state, control, model, kwargs: Trainer's.

        Raises:
            ValueError: the model has no modules of hybridq, or no recipe is known.
        """
        check_converted(model, "HybridQCallback")
        self._recipe, self._model = self._chosen(model, state.max_steps), model
        self._seek(state)
        found = conversion(model, lambda module, name: False).elements
        self._share = found[0] / max(sum(found), 1)
        saved = state.stateful_callbacks.setdefault(type(self).__name__, {})
        if state.global_step:
            self._resume(model, saved)
        self.detach()
        warn_of_unfollowed("HybridQCallback", self._recipe, model)
        self._undo = run_under(model, self._recipe, self._evaluation)

    def _chosen(self, model: Any, max_steps: int) -> RecipeSource:
        if isinstance(self._given, list):
            return RecipeSchedule(self._given, total_steps=max_steps)
        if self._given is not None:
            return self._given
        quantizer = getattr(model, "hf_quantizer", None)
        text = getattr(getattr(quantizer, "quantization_config", None), "recipe", None)
        if text is None:
            raise ValueError(
                "HybridQCallback: needs a recipe, which neither it nor the model's HybridQConfig "
                'has; HybridQCallback("mxfp8"), or another of hybridq.recipes.names()'
            )
        return recipe_of(text)

    def _resume(self, model: nn.Module, saved: Any) -> None:
        histories = saved.get("attributes", {}).get(_HISTORIES) if isinstance(saved, dict) else None
        if histories is not None:
            given = {_HISTORIES: histories, **saved["attributes"].get(_OF_EXPERTS, {})}
            known = {key: base64.b64decode(text) for key, text in given.items()}
            history = ScalingHistory(model)
            history.load_state_dict(known)
            if missing := len(history.state_dict().keys() - known.keys()):
                warn(
                    f"HybridQCallback: the checkpoint lacks histories of {missing} experts, which "
                    "begin anew: those of other ranks are not in it; save ScalingHistory(model) by "
                    "torch.distributed.checkpoint",
                )
        elif self.recipe is not None and _is_delayed(self.recipe):
            warn(
                "HybridQCallback: the checkpoint has no histories of delayed scaling, which begin "
                "anew; it was saved without this callback",
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Let the schedule follow the step.

        Args:
            args, state, control, kwargs: Trainer's.
        """
        self._seek(state)

    def _seek(self, state: Any) -> None:
        if isinstance(self._recipe, RecipeSchedule):
            self._recipe.load_state_dict({"step": state.global_step})

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Add what is known of quantization to the logs of training.

        Args:
            args, state, control, logs, kwargs: Trainer's.
        """
        if self._undo is not None and logs is not None and "loss" in logs:
            more = {"quantized_share": self._share, "fallbacks": len(fallbacks())}
            logs.update(more)
            state.log_history[-1].update(more)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Give the model its own forward back.

        Args:
            args, state, control, kwargs: Trainer's.
        """
        self.detach()

    def detach(self) -> None:
        """Give the model its own forward back: for after a `train()` that was interrupted."""
        if self._undo is not None:
            self._undo()
            self._undo = None

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: the recipe's name, and histories of delayed scaling."""
        kept: dict[str, Any] = {}
        if self._model is not None:
            made = ScalingHistory(self._model).state_dict()
            texts = {key: base64.b64encode(value).decode() for key, value in made.items()}
            kept[_HISTORIES] = texts.pop(_HISTORIES)
            if texts:
                kept[_OF_EXPERTS] = texts
        return {
            "args": {"recipe": _written(self._given), "evaluation": self._evaluation},
            "attributes": kept,
        }


def _is_delayed(recipe: Recipe) -> bool:
    roles = [QuantizerRole(LINEAR, slot, "") for slot in SLOTS]
    return any(recipe.quantizer(role).is_delayed for role in roles)


def _phase(given: Any) -> Any:
    """Return a phase with its recipe; what is none as it is, for RecipeSchedule to refuse."""
    if isinstance(given, list | tuple) and len(given) == 2 and isinstance(given[1], str):
        return given[0], recipe_of(given[1])
    return given


def _written(given: Any) -> Any:
    """Return a recipe as JSON has it: as text, or where none can say it what it prints as."""
    if isinstance(given, RecipeSchedule):
        given = list(given.phases)
    if isinstance(given, list):
        return [[start, _written(recipe)] for start, recipe in given]
    if not isinstance(given, Recipe):
        return given
    try:
        return text_of(given)
    except ValueError:  # of a function of the caller's own
        return repr(given)
