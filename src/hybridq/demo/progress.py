"""Live progress of a comparison in the terminal."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars

from .train import Progress, RecipeResult

LINE_SECONDS = 8.0
"""Without a terminal, a line of progress is due so long after the last one."""


class Pace:
    """Says when the next plain line of progress is due.

    Args:
        clock: seconds from any start.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()

    def is_due(self, is_wanted: bool = False) -> bool:
        """Return whether to print a line now, and count from now on if so.

        Args:
            is_wanted: there is something to say, at any pace.
        """
        now = self._clock()
        if not is_wanted and now - self._last < LINE_SECONDS:
            return False
        self._last = now
        return True


class ProgressView:
    """An ``Observer``: one bar per recipe, and plain lines where there is no terminal."""

    def __init__(
        self,
        console: Console,
        recipes: list[str],
        steps: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console, self._pace = console, Pace(clock)
        self._steps = steps
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            # Without a terminal, bars would only leave one late and useless frame in the log.
            disable=not console.is_terminal,
        )
        width = max(len(recipe) for recipe in recipes)
        self._tasks: dict[str, TaskID] = {
            recipe: self._bars.add_task(recipe.ljust(width), start=False, total=steps, text="")
            for recipe in recipes
        }
        self._validation = ""

    def __enter__(self) -> ProgressView:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bars.stop()

    def start(self, recipe: str) -> None:
        self._validation = ""
        self._bars.start_task(self._tasks[recipe])

    def progress(self, recipe: str, progress: Progress) -> None:
        is_evaluated = progress.validation_loss is not None
        if is_evaluated:
            self._validation = f" validation {progress.validation_loss:.4f}"
        if self._pace.is_due(is_evaluated):
            validation = f",{self._validation}" if is_evaluated else ""
            self._line(
                f"{recipe}: step {progress.step}/{self._steps}, loss {progress.loss:.4f}"
                f"{validation} nats/byte"
            )
        text = f"loss {progress.loss:.3f}{self._validation}"
        if progress.tokens_per_second is not None:
            text += f" {progress.tokens_per_second:,.0f} tokens/s"
        self._bars.update(self._tasks[recipe], completed=progress.step, text=text)

    def finish(self, result: RecipeResult) -> None:
        self._bars.stop_task(self._tasks[result.recipe])
        self._line(f"{result.recipe}: {result.status} after {result.seconds:.1f} s")

    def _line(self, text: str) -> None:
        if not self._console.is_terminal:
            self._console.print(text, highlight=False, soft_wrap=True)
            self._console.file.flush()  # a pipe would hold lines back
