"""Groups of ranks that share sequences, as Transformer Engine's attention is told of them."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["WholeSequences", "ranks_of", "refuse_parts"]


def ranks_of(group: Any) -> int:
    """Return how many ranks a process group has.

    Args:
        group: given itself or by its name.
    """
    from .._torch_ranks import process_group

    whole = process_group(group) if isinstance(group, str) else group
    return torch.distributed.get_world_size(whole)


def refuse_parts(where: str, cp_group: Any) -> None:
    """Raise for a group of several ranks, each of which would have parts of the sequences.

    Args:
        where: what is called.
        cp_group: a process group, several of them, or None.

    Raises:
        NotImplementedError: one has more ranks than one.
    """
    groups = cp_group if isinstance(cp_group, tuple | list) else [cp_group]
    sizes = [ranks_of(one) for one in groups if one is not None]
    if max(sizes, default=1) > 1:
        raise NotImplementedError(
            f"{where}: cp_group must be None or of one rank, got {max(sizes)} ranks; "
            "hybridq.distributed.context_parallel and sequence_parallel share sequences"
        )


class WholeSequences:
    """Attention, or what has some, that is told of a group of ranks."""

    def set_context_parallel_group(
        self,
        cp_group: Any,
        cp_global_ranks: Any = None,
        cp_stream: Any = None,
        cp_comm_type: str | None = "p2p",
    ) -> None:
        """Change nothing: sequences are whole, as they are over one rank.

        Args:
            cp_group: None, or a process group of one rank.
            cp_global_ranks, cp_stream, cp_comm_type: have no effect.

        Raises:
            NotImplementedError: it has more ranks.
        """
        refuse_parts(f"te.{type(self).__name__}.set_context_parallel_group", cp_group)
