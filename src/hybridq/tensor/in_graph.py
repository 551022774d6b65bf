"""Tensors that are made inside code that torch compiles: one node of dynamo's graph.

Dynamo cannot trace the making of a wrapper subclass. So `QuantizedTensor.make`, when traced, calls
a function that dynamo keeps as a node, and that takes what a node can: tensors, numbers, texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..direction import COLUMNWISE, ROWWISE
from ..formats import PlaneSpec
from ..storage import Plane, TensorStorage

__all__ = ["PlaneEntry", "assemble", "entries", "recall", "remember", "runs_at_once"]

#: A plane without its buffers: spec, direction, rows, columns, number of buffers.
PlaneEntry = tuple[str, Any, int, int, int]

_quantizers: dict[str, Any] = {}


def entries(storage: TensorStorage) -> tuple[list[torch.Tensor], list[PlaneEntry]]:
    """Return all buffers, a shared one once per plane, and the planes without them."""
    planes = [
        (spec_text(p.spec), p.direction, p.rows, p.cols, len(p.tensors)) for p in storage.planes
    ]
    return [buffer for p in storage.planes for buffer in p.tensors], planes


def assemble(buffers: Sequence[torch.Tensor], planes: Sequence[PlaneEntry]) -> TensorStorage:
    """Return the storage that `entries` took apart."""
    made: dict[str, Plane] = {}
    for text, direction, rows, cols, count in planes:
        spec = PlaneSpec.parse(text)
        own, buffers = buffers[:count], buffers[count:]
        names = [buffer.name for buffer in spec.buffers(1, 1)]
        made[direction] = Plane(spec, direction, rows, cols, dict(zip(names, own, strict=True)))
    return TensorStorage(made.get(ROWWISE), made.get(COLUMNWISE))


def runs_at_once(function: Any) -> Any:
    """Mark `function` as one that dynamo runs while it traces the caller, instead of tracing it.

    By hand, since torch's own decorator would import dynamo with the package.
    """
    function._dynamo_marked_constant = True
    return function


@runs_at_once
def spec_text(spec: PlaneSpec) -> str:
    """Return a spec's text. Runs while dynamo traces the caller."""
    return spec.text


@runs_at_once
def remember(quantizer: Any) -> str:
    """Return the text by which a graph holds a quantizer. Runs while dynamo traces the caller."""
    _quantizers[quantizer.text] = quantizer
    return quantizer.text


def recall(text: str) -> Any:
    """Return the quantizer that was remembered as `text`."""
    return _quantizers[text]
