"""The constructor's arguments of tensor parallelism, and what follows from them.

Weights are then parts: plain parameters `[out / size, in]` (column) or `[out, in / size]` (row).

Source: names and meanings: Transformer Engine's modules.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

from torch import nn

from ...errors import must_be_one_of
from ...quantizers.statistics import group_name
from .marks import mark_parameter, marked
from .tensor_parallel import COLUMN, ROW, Parallel

__all__ = ["ParallelOptions", "mark", "mark_own_tokens", "parameters_of_own_tokens"]

_MODES = (COLUMN, ROW)


class ParallelOptions(NamedTuple):
    """What a module is told of its ranks.

    Args:
        tp_group: the process group of the ranks that have its parts; None: it comes by
            `set_tensor_parallel_group`, or there is none.
        tp_size: how many they are, where `tp_group` is None; else it is the group's own.
        sequence_parallel: inputs of column parallel parts, and outputs of row parallel ones, are
            this rank's part of the tokens, along the first dimension.
        get_rng_state_tracker: returns what has a method `fork(name)`, a context in which initial
            values of parts are drawn, which must differ between ranks; None: torch's generator.
        rng_tracker_name: given to `fork`; None: it is called without.
    """

    tp_group: Any = None
    tp_size: int = 1
    sequence_parallel: bool = False
    get_rng_state_tracker: Callable[[], Any] | None = None
    rng_tracker_name: str | None = None

    def size(self, owner: str) -> int:
        """Return how many ranks there are.

        Args:
            owner: the class, for the error.

        Raises:
            ValueError: it is less than one, or no whole number.
        """
        if self.tp_group is not None:
            import torch.distributed as dist  # not every build of torch has it

            return dist.get_world_size(_resolved(self.tp_group))
        if isinstance(self.tp_size, bool) or not isinstance(self.tp_size, int) or self.tp_size < 1:
            raise ValueError(f"{owner}: tp_size must be a positive int, got {self.tp_size!r}")
        return self.tp_size

    def share(self, owner: str, what: str, whole: int) -> int:
        """Return a rank's part of a size.

        Args:
            owner: the class, for the error.
            what: the size's name.
            whole: of all ranks together.

        Raises:
            ValueError: the ranks do not divide it.
        """
        size = self.size(owner)
        if whole % size:
            raise ValueError(f"{owner}: tp_size must divide {what}, got {size} and {whole}")
        return whole // size

    def split(
        self, owner: str, mode: str | None, in_features: int, out_features: int
    ) -> tuple[int, int]:
        """Return the features of a rank's part of one linear part.

        Args:
            owner: the class, for the error.
            mode: `"column"`, `"row"` or None.
            in_features, out_features: of all ranks together.

        Raises:
            ValueError: the ranks do not divide them, or there is no such mode.
        """
        if mode is None:
            return in_features, out_features
        if mode not in _MODES:
            raise ValueError(f"{owner}: parallel_mode {must_be_one_of(_MODES, mode)}, or None")
        if mode == ROW:
            return self.share(owner, "in_features", in_features), out_features
        return in_features, self.share(owner, "out_features", out_features)

    def parallel(self, owner: str, mode: str | None, part: int) -> Parallel | None:
        """Return how one linear part lies over ranks; None: it does not.

        Args:
            owner: the class, for the error.
            mode: `"column"`, `"row"` or None.
            part: rows or columns that each rank has.
        """
        if mode is None:
            return None
        size = self.size(owner)
        if size == 1 and self.tp_group is None:
            return None
        made = Parallel("", -1, mode, (part,) * size, bool(self.sequence_parallel))
        return made if self.tp_group is None else in_group(owner, made, self.tp_group)

    def drawing(self) -> Any:
        """Return the context in which initial values of parts are drawn."""
        if self.get_rng_state_tracker is None:
            return nullcontext()
        tracker = self.get_rng_state_tracker()
        name = self.rng_tracker_name
        return tracker.fork() if name is None else tracker.fork(name)


def in_group(owner: str, parallel: Parallel, group: Any) -> Parallel:
    """Return how a part lies over the ranks of a group.

    Args:
        owner: the class, for the error.
        parallel: how it lies over as many ranks.
        group: a process group, or its name.

    Raises:
        ValueError: it has another number of ranks.
    """
    import torch.distributed as dist  # not every build of torch has it

    resolved = _resolved(group)
    size = dist.get_world_size(resolved)
    if size != len(parallel.sizes):
        raise ValueError(
            f"{owner}: the tensor-parallel group must have tp_size={len(parallel.sizes)} ranks, "
            f"got {size}"
        )
    name = group_name(resolved)
    return parallel._replace(group=name or "", rank=dist.get_rank(resolved))


def _resolved(group: Any) -> Any:
    """Return a process group, given itself or by its name."""
    from ..._torch_ranks import process_group

    return process_group(group) if isinstance(group, str) else group


def mark(module: nn.Module, name: str, parallel: Parallel | None, dim: int | None) -> None:
    """Tell others that a parameter is a part, as Megatron's optimizers ask.

    Args:
        module: that has it.
        name: of the parameter; one that is not there is not marked.
        parallel: how it lies over ranks; None: nothing is marked.
        dim: that is dealt out; None: each rank has it whole, and with sequence parallelism sees a
            part of its gradient.
    """
    if parallel is None:
        return
    if dim is not None:
        own = {"partition_dim": dim, "partition_stride": 1}
        mark_parameter(module, name, tensor_model_parallel=True, **own)
    elif parallel.sequence_parallel:
        mark_own_tokens(module, name)


def mark_own_tokens(module: nn.Module, name: str) -> None:
    """Mark a parameter of which a rank sees its own tokens: `sequence_parallel`, as Megatron asks.

    Args:
        module: that has it.
        name: of the parameter.
    """
    mark_parameter(module, name, sequence_parallel=True)


def parameters_of_own_tokens(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that `mark_own_tokens` or a caller marked, each once, in order.

    Args:
        module: with others inside.
    """
    found: dict[int, nn.Parameter] = {}
    for one in module.modules():
        names = marked(one, "sequence_parallel")
        for name, parameter in one.named_parameters(recurse=False):
            if name in names or getattr(parameter, "sequence_parallel", False):
                found.setdefault(id(parameter), parameter)
    return list(found.values())
