"""Planes of each expert's matrices become those of the model's one tensor of all experts.

Mixtures have a matrix for each expert (and one for gate and one for up) in files, and one tensor in
memory. Where a merge only puts rows and matrices beside each other, the planes of the parts are
those of the whole. Other merges are of values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose

from ...storage import Plane, TensorStorage
from ...tensor import QuantizedTensor

__all__ = ["leaves_alone", "merged", "puts_together"]


def leaves_alone(operations: Sequence[Any]) -> bool:
    """Return whether a converter's operations leave a tensor of its parameter's shape as it is.

    Args:
        operations: of the converter.
    """
    return all(isinstance(one, Transpose) and one.check_dims for one in operations)


def puts_together(operations: Sequence[Any]) -> bool:
    """Return whether a converter's operations put matrices into a stack, and their rows together.

    Args:
        operations: of the converter, which takes a list of matrices for each of its patterns.
    """
    found = [(type(one), getattr(one, "dim", None)) for one in operations]
    return found in ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)])


def merged(parts: Sequence[Sequence[QuantizedTensor]]) -> QuantizedTensor | None:
    """Return one tensor of several matrices, each made of the rows of its parts.

    None: the parts' planes are not those of the whole, since blocks would be cut, or amaxes differ.

    Args:
        parts: for each part of the rows, that part of every matrix.
    """
    first = parts[0][0]
    every = [one for part in parts for one in part]
    if any(one.quantizer != first.quantizer for one in every):
        return None
    if len({len(part) for part in parts}) > 1:
        return None
    storages = []
    for matrices in zip(*parts, strict=True):
        storage: TensorStorage | None = matrices[0].tensor_storage
        if len(matrices) > 1:
            storage = TensorStorage.cat(_sharing([one.tensor_storage for one in matrices]), 0)
        planes = () if storage is None else [plane.direction for plane in storage.planes]
        if storage is None or planes != [one.direction for one in first.tensor_storage.planes]:
            return None
        storages.append(storage)
    shape = (len(storages), storages[0].first.rows, storages[0].first.cols)
    if any((one.first.rows, one.first.cols) != shape[1:] for one in storages):
        return None
    whole = TensorStorage.stack(storages)
    return QuantizedTensor.make(whole, shape, first.dtype, quantizer=first.quantizer)


def _sharing(storages: Sequence[TensorStorage]) -> list[TensorStorage]:
    """Return the storages; what each has for its whole matrix is one object where it is equal."""

    def shared(plane: Plane | None, others: Plane | None) -> Plane | None:
        if plane is None or others is None:
            return plane
        own = dict(plane.buffers)
        for name, grows in plane.spread(0).items():
            its = others.buffers[name]
            if not grows and torch.equal(own[name].view(torch.uint8), its.view(torch.uint8)):
                own[name] = its
        return Plane(plane.spec, plane.direction, plane.rows, plane.cols, own)

    head = storages[0]
    return [
        TensorStorage(shared(one.rowwise, head.rowwise), shared(one.columnwise, head.columnwise))
        for one in storages
    ]
