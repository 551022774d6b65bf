"""What the rules share: the pool, the counts, the log of the example that runs."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

from hypothesis import strategies as st
from hypothesis.stateful import rule

from hybridq import QuantizedTensor

from .invariants import check_sound

__all__ = ["COUNTS", "HOOKS", "Pool", "fuzz", "indices"]

#: How often each rule ran.
COUNTS: Counter[str] = Counter()
#: Called with the text of every step, before it runs; filled by the runner.
HOOKS: list[Callable[[str], None]] = []
#: None, or what takes a failure instead of ending the example: to see all kinds of them at once.
SURVEY: Callable[[str, Exception], None] | None = None
_CAPACITY: Final = 6


def indices() -> st.SearchStrategy[int]:
    """Which tensor of the pool; rules take it modulo the number of tensors."""
    return st.integers(0, _CAPACITY - 1)


def fuzz(_decorator: Any = rule, **strategies: Any) -> Callable[[Callable[..., None]], Any]:
    """Return hypothesis's `_decorator`, with what it decorates counted and logged."""

    def decorate(method: Callable[..., None]) -> Any:
        @functools.wraps(method)
        def counted(self: Any, **arguments: Any) -> None:
            COUNTS[method.__name__] += 1
            if HOOKS:
                text = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
                for hook in HOOKS:
                    hook(f"{method.__name__}({text})")
            if SURVEY is None:
                method(self, **arguments)
                return
            try:
                method(self, **arguments)
            except Exception as error:
                SURVEY(method.__name__, error)

        counted.__signature__ = inspect.signature(method)  # type: ignore[attr-defined]
        return _decorator(**strategies)(counted)

    return decorate


class Pool:
    """The quantized tensors that an example has made so far."""

    pool: list[Any]

    def keep(self, tensor: Any, where: str) -> None:
        """Check `tensor` if it is quantized and put it into the pool."""
        if not isinstance(tensor, QuantizedTensor):
            return
        if tensor.device.type == "meta":
            return  # has no bytes
        check_sound(tensor, where)
        self.pool.append(tensor)
        del self.pool[: max(0, len(self.pool) - _CAPACITY)]

    def take(self, index: int) -> Any:
        """Return a tensor of the pool, or None where it is empty."""
        return self.pool[index % len(self.pool)] if self.pool else None
