"""The comparison: one run per recipe, one after the other, from the same seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import nn

from .data import Corpus
from .train import Progress, RecipeResult, Run, TrainConfig

DEFAULT_RECIPES = ("bf16", "fp8_current", "mxfp8", "nvfp4", "mxfp8_fwd_nvfp4_bwd")


class Observer(Protocol):
    """Told what happens, as it happens."""

    def start(self, recipe: str) -> None: ...

    def progress(self, recipe: str, progress: Progress) -> None: ...

    def finish(self, result: RecipeResult) -> None: ...


class SilentObserver:
    """Shows nothing."""

    def start(self, recipe: str) -> None:
        pass

    def progress(self, recipe: str, progress: Progress) -> None:
        pass

    def finish(self, result: RecipeResult) -> None:
        pass


@dataclass
class Comparison:
    """Trains once per recipe; what is known is in ``results`` at any moment, errors included.

    Args:
        config: sizes and schedule, the same for all.
        recipes: names, in the order to run them.
        corpus: the data.
        linear: class of the projections (default: ``hybridq.Linear``).

    Attributes:
        results: one per recipe that was started.
        is_interrupted: Ctrl-C ended it early.
    """

    config: TrainConfig
    recipes: Sequence[str]
    corpus: Corpus
    linear: type[nn.Linear] | None = None
    results: list[RecipeResult] = field(default_factory=list)
    is_interrupted: bool = False

    def estimate(self, tell: Callable[[str], object] = str) -> dict[str, float]:
        """Return about how many seconds each recipe will take, by two timed steps of each.

        Ctrl-C ends the comparison: nothing runs after it.

        Args:
            tell: called with each recipe before its steps.
        """
        found: dict[str, float] = {}
        try:
            for recipe in self.recipes:
                tell(recipe)
                run = Run(self.config, recipe, self.corpus, self.linear)
                found[recipe] = run.estimate()
        except KeyboardInterrupt:
            self.is_interrupted = True
        return found

    def run(self, observer: Observer | None = None) -> None:
        """Train recipe after recipe.

        Ctrl-C (``KeyboardInterrupt``) ends the comparison and not the program: the unfinished run
        gets status ``"interrupted"``. An error in a run passes on, with its status ``"failed"``.

        Args:
            observer: told of every step.
        """
        watch = SilentObserver() if observer is None else observer
        if self.is_interrupted:
            return
        for recipe in self.recipes:
            result = RecipeResult(recipe)
            self.results.append(result)
            try:
                watch.start(recipe)
                run = Run(self.config, recipe, self.corpus, self.linear, result)
                for progress in run.steps():
                    watch.progress(recipe, progress)
                watch.finish(result)
            except KeyboardInterrupt:
                self.is_interrupted = True
                if result.status == "running":
                    result.status = "interrupted"
                return
            finally:
                if result.status == "running":
                    result.status = "failed"
