"""The CPU's flash attention as an operator of torch's ring attention, which has only those of GPUs.

torch rotates keys and values and merges blocks by templates over any operator that returns the
logarithm of the sum too, as the CPU's does. Two entries of its table are all there is to add.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

from ..._torch_ranks import RingAttention

__all__ = ["cpu_operators"]

#: The dimension of tokens in `[batch, heads, tokens, features]`.
_TOKENS: Final = 2


def _local(args: tuple[Any, ...]) -> list[Any]:
    from torch.distributed.tensor import DTensor

    return [one.to_local() if isinstance(one, DTensor) else one for one in args]


def _of_ranks(made: tuple[torch.Tensor, ...], mesh: Any) -> tuple[Any, ...]:
    from torch.distributed.tensor import DTensor, Shard

    places = [Shard(_TOKENS)]
    return tuple([DTensor.from_local(one, mesh, places, run_check=False) for one in made])


@contextmanager
def cpu_operators(ring: RingAttention) -> Iterator[None]:
    """Let torch's context parallelism answer the CPU's flash attention in the block.

    Args:
        ring: what it is made of.
    """
    flash, gradient = ring.cpu_flash, ring.cpu_flash_backward

    def forward(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        mesh = args[0].device_mesh
        query, key, value, *rest = _local(args)
        options = dict(zip(("dropout_p", "is_causal"), rest, strict=False))
        options["scale"] = kwargs.get("scale")
        out, *rest = ring.forward(
            mesh.get_group(), _TOKENS, flash, query=query, key=key, value=value, **options
        )
        # Heads of a token together, as the operator itself leaves them: what follows needs no copy.
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
        return _of_ranks((out, *rest), mesh)

    def backward(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        mesh = args[0].device_mesh
        dy, query, key, value, out, logsumexp, dropout, is_causal = _local(args)
        made = ring.backward(
            *(mesh.get_group(), _TOKENS, gradient, dy, "grad_out"),
            *(query, key, value, out, logsumexp, is_causal),
            dropout_p=dropout,
            scale=kwargs.get("scale"),
        )
        return _of_ranks(made, mesh)

    added = {flash.default: forward, gradient.default: backward}
    added = {name: one for name, one in added.items() if name not in ring.operators}
    ring.operators.update(added)
    try:
        yield
    finally:
        for name in added:
            ring.operators.pop(name, None)
