"""What torch's sharding asks of a quantized parameter that nobody has prepared for it.

FSDP2 itself gets an error, and not other bits. Who gathers by himself, without a mesh, gets the
planes: they are put together as they are, or not at all.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from ..errors import PlaneError
from ..storage import StorageLayout, TensorStorage
from .table import HIGH, matrix_shape

__all__ = ["Unflattened", "Unprepared"]

#: Layout and sizes of the buffers of one part, and its shape.
_About = tuple[StorageLayout, tuple[torch.Size, ...], torch.Size]


class Unflattened:
    """What torch's FullyShardedDataParallel asks of a tensor that is no part of a flat parameter.

    It would write decoded values into a flat tensor, and have the parameter itself be a view of it.
    """

    shape: torch.Size

    @property
    def _fsdp_flattened(self) -> bool:
        """Not there, since it is part of none; `hasattr` of others (Prodigy) must not find it.

        Raises:
            AttributeError: always, but
            RuntimeError: where it is asked in order to become one.
        """
        asked = sys._getframe(1).f_back
        if asked is not None and asked.f_code.co_name == "_get_orig_params":  # not of the ignored
            raise self._not_flat()
        raise AttributeError("_fsdp_flattened: a quantized tensor is part of no flat parameter")

    @_fsdp_flattened.setter
    def _fsdp_flattened(self, value: bool) -> None:
        raise self._not_flat()

    def _not_flat(self) -> RuntimeError:
        return RuntimeError(
            "FullyShardedDataParallel: a flat parameter is made of plain ones, got one that is "
            f"quantized, or that prepare_fsdp2 prepared, {list(self.shape)}; shard the model by "
            "hybridq.distributed.prepare_fsdp2(model) and torch's fully_shard, or give modules "
            "that are not trained as ignored_modules"
        )


class Unprepared(Unflattened):
    """The two hooks of FSDP2, for tensors that it would quantize shard by shard."""

    def fsdp_pre_all_gather(
        self: Any,
        mesh: Any,
        orig_size: Any,
        contiguous_orig_stride: Any,
        module: Any,
        mp_policy: Any,
    ) -> tuple[tuple[torch.Tensor, ...], _About]:
        """Return the buffers of the planes, each to be gathered along dim 0, and what they are.

        Args:
            mesh: None; FSDP2 gives one.
            orig_size, contiguous_orig_stride, module, mp_policy: as FSDP2 gives them; not used.

        Raises:
            RuntimeError: there is a mesh: under `fully_shard` each shard would take the amaxes of
                its own rows, and travel decoded.
        """
        if mesh is not None:
            raise RuntimeError(
                f"fully_shard: a quantized parameter {list(orig_size)} must be prepared, or ranks "
                "would quantize their shards apart; call "
                "hybridq.distributed.prepare_fsdp2(model) before fully_shard"
            )
        buffers, layout = self.tensor_storage.flatten()
        return tuple(buffers), (layout, tuple(one.shape for one in buffers), self.shape)

    def fsdp_post_all_gather(
        self: Any,
        all_gather_outputs: Sequence[torch.Tensor],
        metadata: _About,
        param_dtype: torch.dtype,
        *,
        out: Any = None,
    ) -> tuple[Any, Sequence[torch.Tensor]]:
        """Return the tensor whose rows are those of all parts, and the outputs as they came.

        Of one part it has the very buffers that came.

        Args:
            all_gather_outputs: for each buffer those of all parts, one behind the other.
            metadata: what `fsdp_pre_all_gather` returned second.
            param_dtype: of the result; another one than FP32, BF16 and FP16 has no effect.
            out: a tensor that an earlier call returned, which is written and returned, or None.

        Raises:
            PlaneError: parts cannot be put together: they differ in a scale of the whole tensor,
                or end inside of a block.
        """
        layout, sizes, shape = metadata
        count = all_gather_outputs[0].shape[0] // sizes[0][0] if sizes[0][0] else 1
        every = [_chunks(one, count) for one in all_gather_outputs]
        rows, cols = matrix_shape(shape)
        parts = [
            TensorStorage.unflatten([one[i] for one in every], layout, rows, cols)
            for i in range(count)
        ]
        storage = parts[0] if count == 1 else TensorStorage.cat(parts, 0)
        if storage is None or len(storage.planes) != len(layout):
            raise PlaneError(
                f"fsdp_post_all_gather: {count} parts {list(shape)} must have the same scales of "
                "the whole tensor and end at blocks, got others; quantize the whole, or let "
                "hybridq.distributed.prepare_fsdp2(model) do it"
            )
        whole = (count * shape[0], *shape[1:])
        dtype = param_dtype if param_dtype in HIGH else None
        made = self.remake(storage, shape=whole, dtype=dtype, quantizer=self.own_quantizer)
        if out is None:
            return made, all_gather_outputs
        with torch.no_grad():
            out.copy_(made)
        return out, all_gather_outputs


def _chunks(buffer: torch.Tensor, count: int) -> Sequence[torch.Tensor]:
    """Return each part's own buffer; one value that all of them have is one tensor."""
    chunks = buffer.chunk(count)
    is_shared = chunks[0].numel() == 1 and all(torch.equal(one, chunks[0]) for one in chunks)
    return [chunks[0]] * count if is_shared else chunks
