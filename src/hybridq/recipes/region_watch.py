"""Whether an `autocast` region did what it is for: a warning, once, where it quantized nothing.

Two mistakes are silent otherwise. The model was not converted, so that torch's own linear layers
ran in the region; or it ran in another thread, while settings belong to the one that entered.

What can be known, and at which cost:

- The first regions of a process are watched, as long as no module of hybridq was ever asked for
  its plan under a recipe; from then on nothing is, and a region costs one test of a bool. Of
  regions in which no linear layer ran at all (data, an optimizer) `MOST_REGIONS` are watched.
- A watched region has a forward pre-hook of torch on all modules. It sees what is called as a
  module: not `torch.nn.functional.linear`, and nothing inside of compiled code. Where anything was
  given to `torch.compile` before, no hook is set: compiled code would be compiled again for it.
- Nothing is missed in regions under `"bf16"`, in regions inside of another one, and in those that
  an exception leaves; nor by a linear layer whose weight is quantized.
"""

from __future__ import annotations

import threading
from typing import Any, Final

import torch
from torch import nn

from .. import settings
from .._torch_private import has_compiled
from ..errors import warn
from ..tensor import is_quantized

__all__ = ["MOST_REGIONS", "WATCH", "RegionWatch"]

#: How many regions without any linear layer are watched before the watch ends.
MOST_REGIONS: Final = 32
_TRACED: Final = (
    "hybridq: this region was watched by a hook on modules, as a process's first autocast regions "
    "are, and torch.export.export(strict=True) traces no hooks; none is there from now on, so that "
    "the same call may pass when it is made again"
)


class RegionWatch:
    """Watches one region at a time, until the first one that tells how things are.

    Attributes:
        is_open: whether a region may still be watched.
    """

    def __init__(self) -> None:
        self.is_open = True
        self._left = MOST_REGIONS
        self._lock = threading.Lock()
        self._hook: Any = None
        self._thread = 0
        self._num_linears = 0
        self._ran_elsewhere = False

    def begin(self) -> bool:
        """Watch the region that this thread enters; return whether it is watched."""
        with self._lock:
            self.is_open = self.is_open and not has_compiled()
            if not self.is_open or self._hook is not None:
                return False
            self._thread = threading.get_ident()
            self._num_linears, self._ran_elsewhere = 0, False
            self._hook = nn.modules.module.register_module_forward_pre_hook(self._see)
            return True

    def _see(self, module: nn.Module, args: Any) -> None:
        # Compiled in the region after all: it is traced, and nothing of this stays.
        if torch.compiler.is_compiling() or not self.is_open:
            return
        if hasattr(type(module), "plan_of"):  # a module of hybridq; this thread's closes the watch
            is_other = threading.get_ident() != self._thread
            if is_other and settings.current().recipe is None:
                self._ran_elsewhere = True
        elif isinstance(module, nn.Linear) and threading.get_ident() == self._thread:
            self._num_linears += not is_quantized(module.weight)

    def end(self, is_error: bool, error: BaseException | None = None) -> None:
        """End the watch of a region, which `begin` began; warn if it quantized nothing.

        Where torch cannot trace the watch's hook, the error says so, and nothing is watched again.

        Args:
            is_error: an exception leaves it, or it does not count.
            error: that exception.
        """
        with self._lock:
            if self._hook is None:
                return  # a module was asked for its plan
            self._remove()
            if error is not None and type(error).__module__.startswith("torch._dynamo"):
                self.is_open = False
                _add_note(error, _TRACED)
            if is_error or not self.is_open:
                return
            text = self._reason()
            self._left -= 1
            self.is_open = not text and self._left > 0
        if text:
            warn(f"autocast: nothing was quantized: {text}")

    def _reason(self) -> str:
        if self._num_linears:
            return (
                f"{self._num_linears} calls of torch.nn.Linear ran in the region, and no module of "
                "hybridq; convert the model first, hybridq.convert(model)"
            )
        if self._ran_elsewhere:
            return (
                "modules of hybridq ran without a recipe in another thread, and autocast is for "
                "the thread that enters it; enter it where the model runs"
            )
        return ""

    def close(self, is_traced: bool = False) -> None:
        """End the watch for good: something is quantized in this process.

        Args:
            is_traced: dynamo is tracing, and reads the hooks: they stay until the region ends.
        """
        if self.is_open:
            with self._lock:
                self.is_open = False
                if self._hook is not None and not is_traced:
                    self._remove()

    def _remove(self) -> None:
        self._hook.remove()
        self._hook = None


def _add_note(error: BaseException, text: str) -> None:
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note(text)
    else:
        warn(text)


WATCH: Final = RegionWatch()
