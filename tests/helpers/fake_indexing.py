"""Indexing of fake CUDA tensors where this build of torch has no CUDA."""

from __future__ import annotations

import torch
from torch.overrides import TorchFunctionMode


class Indexing(TorchFunctionMode):
    """Indexing by operators: Python's own asks for a CUDA that this build of torch may not have."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.__getitem__:
            return self.view(*args)
        if function is torch.Tensor.__setitem__:
            tensor, index, value = args
            return torch.ops.aten.copy_.default(self.view(tensor, index), value)
        if function is torch.Tensor.__invert__:
            return torch.ops.aten.bitwise_not.default(*args)
        if function is torch.Tensor.contiguous:
            return torch.ops.aten.contiguous.default(*args)
        return function(*args, **(kwargs or {}))

    def view(self, tensor, index):
        """`tensor[index]` of integers, slices, None, `...` and one tensor."""
        dim, parts = 0, index if isinstance(index, tuple) else (index,)
        if any(one is Ellipsis for one in parts):
            at = next(i for i, one in enumerate(parts) if one is Ellipsis)
            rest = tensor.dim() - sum(one is not None for one in parts) + 1
            parts = (*parts[:at], *[slice(None)] * rest, *parts[at + 1 :])
        for one in parts:
            if one is None:
                tensor, dim = tensor.unsqueeze(dim), dim + 1
            elif isinstance(one, int):
                tensor = torch.ops.aten.select.int(tensor, dim, one)
            elif isinstance(one, slice):
                tensor = torch.ops.aten.slice.Tensor(
                    tensor, dim, one.start, one.stop, one.step or 1
                )
                dim += 1
            else:
                tensor = torch.ops.aten.index.Tensor(tensor, [None] * dim + [one])
                dim += one.dim()
        return tensor
