"""Tensors that are made inside code that torch compiles: one node of dynamo's graph.

Dynamo cannot trace the making of a wrapper subclass. So `QuantizedTensor.make`, when traced, calls
a function that dynamo keeps as a node, and that takes what a node can: tensors, numbers, strings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from types import SimpleNamespace
from typing import Any, ParamSpec, TypeVar

import torch

from ..direction import COLUMNWISE, ROWWISE
from ..formats import PlaneSpec
from ..storage import Plane, TensorStorage
from ..storage.plane_stack import plane_of

__all__ = [
    "PlaneEntry",
    "assemble",
    "constructor",
    "entries",
    "parses_quantizers",
    "quantizer_of",
    "runs_at_once",
]

P = ParamSpec("P")
T = TypeVar("T")

#: A plane without its buffers: spec, direction, rows, columns, number of buffers, of matrices.
PlaneEntry = tuple[str, Any, int, int, int, int | None]

_parsers: list[Callable[[str], Any]] = []
#: What constructors made in graphs. No dict: dynamo reads a dict of the module once per trace.
_quantizers = SimpleNamespace()


def entries(storage: TensorStorage) -> tuple[list[torch.Tensor], list[PlaneEntry]]:
    """Return all buffers, a shared one once per plane, and the planes without them."""
    ordered = storage.ordered  # as in a layout, the one with the values first
    planes = [(p.spec.text, p.direction, p.rows, p.cols, len(p.tensors), p.count) for p in ordered]
    return [buffer for p in ordered for buffer in p.tensors], planes


def assemble(buffers: Sequence[torch.Tensor], planes: Sequence[PlaneEntry]) -> TensorStorage:
    """Return the storage that `entries` took apart."""
    made: dict[str, Plane] = {}
    for text, direction, rows, cols, size, count in planes:
        spec = PlaneSpec.parse(text)
        own, buffers = buffers[:size], buffers[size:]
        names = [buffer.name for buffer in spec.buffers(1, 1)]
        named = dict(zip(names, own, strict=True))
        made[direction] = plane_of(spec, direction, rows, cols, named, count)
    return TensorStorage(made.get(ROWWISE), made.get(COLUMNWISE), planes[0][1])


def runs_at_once(function: Any) -> Any:
    """Mark `function` as one that dynamo runs while it traces the caller, instead of tracing it.

    By hand, since torch's own decorator would import dynamo with the package.
    """
    function._dynamo_marked_constant = True
    return function


def parses_quantizers(function: Callable[[str], T]) -> Callable[[str], T]:
    """Make `function` the one that turns the string by which a graph holds a quantizer into it."""
    _parsers.append(function)
    return function


def quantizer_of(text: str) -> Any:
    """Return the quantizer whose string is `text`."""
    return _parsers[0](text)


def constructor(function: Callable[P, T]) -> Callable[P, T]:
    """Make a function that returns a quantizer callable in code that torch compiles.

    Dynamo can neither trace the making of a quantizer nor call a method of one that it made, but
    it can read one from a place that it knows: `function` runs while dynamo traces the caller, and
    the traced code finds the result by its name.

    Args:
        function: its arguments must be what dynamo knows as constants; or, where torch takes
            them (2.13 does, 2.11 does not), other quantizers, formats and specs.
    """

    @runs_at_once
    def known(*args: P.args, **kwargs: P.kwargs) -> str:
        made: Any = function(*args, **kwargs)
        name = "q" + made.text.encode().hex()
        if not hasattr(_quantizers, name):  # else the equal one stays: graphs guard the object
            setattr(_quantizers, name, made)
        return name

    @wraps(function)
    def construct(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_dynamo_compiling():
            made: T = getattr(_quantizers, known(*args, **kwargs))
            return made
        return function(*args, **kwargs)

    return construct
