"""Linear modules whose weight is dealt out over ranks: tensor parallelism.

Column parallel: a rank has rows of the weight `[out, in]`, takes the whole input, and makes
columns of the output; the gradient of the input is a sum over ranks. Row parallel: a rank has
columns of the weight and of the input, and its output is one term of a sum over ranks.

Planes are those of the whole: a rank's part is encoded as a window of the whole matrix (see
`shards.Cut`), so results differ from one process's by the order of FP32 sums only.

Source: the two ways to split a linear layer: arXiv:1909.08053.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..._log import log_once
from ..._torch_ranks import functional_all_gather, wait_tensor
from ...recipes import Plan
from ...shards import Cut, TokenGather, common_unit
from ..autograd import Cuts, add_once, gather_tokens, scatter_tokens, share, sum_over

if TYPE_CHECKING:
    from .quantized_module import QuantizedModule

__all__ = [
    "COLUMN",
    "ROW",
    "Parallel",
    "dtensor_forward",
    "is_dtensor",
    "run_windows",
    "sharing_group",
    "whole_input",
]

COLUMN, ROW = "column", "row"


class Parallel(NamedTuple):
    """How the weight of one linear part lies over ranks.

    Args:
        group: the process group's name.
        rank: this rank's number in the group.
        mode: `"column"` (rows of the weight `[out, in]` are dealt out) or `"row"` (its columns).
        sizes: rows or columns of each rank, in order.
        sequence_parallel: outside of a pair of layers each rank has a part of the tokens.
        dim: along which dimension of inputs and outputs tokens are dealt out.
        sums: spec strings of the terms of sums over ranks each of which gets its tokens: of
            outputs, and of gradients; empty: values travel.
    """

    group: str
    rank: int
    mode: str
    sizes: tuple[int, ...]
    sequence_parallel: bool = False
    dim: int = 0
    sums: tuple[str, str] = ("", "")

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the part multiplies, of what the module was given.

        Column parallel: every rank takes all tokens. Row parallel: x is this rank's part already.

        Args:
            x: `[tokens, ..., features]`; with `sequence_parallel` this rank's tokens.
        """
        if self.mode == ROW:
            return x
        if self.sequence_parallel:
            return gather_tokens(x, self.group, len(self.sizes), self.sums[1])
        return share(x, self.group)

    def leave(self, y: torch.Tensor) -> torch.Tensor:
        """Return what the module returns, of what its part has made.

        Args:
            y: `[tokens, ..., features]`: row parallel: this rank's term of a sum.
        """
        if self.mode == COLUMN:
            return y
        if self.sequence_parallel:
            return scatter_tokens(y, self.group, len(self.sizes), self.sums[0])
        return sum_over(y, self.group)

    def whole(self, part: torch.Tensor, dim: int, sizes: tuple[int, ...] = ()) -> torch.Tensor:
        """Return what the ranks have parts of; every rank must ask, and no gradient passes.

        Args:
            part: this rank's.
            dim: along which it is dealt out.
            sizes: of each rank's part; empty: those of the layer.
        """
        sizes = sizes or self.sizes
        own = part.detach().movedim(dim, 0)
        sent = own.new_zeros(max(sizes), *own.shape[1:])
        sent[: own.shape[0]] = own
        rows = wait_tensor(functional_all_gather(sent, len(sizes), self.group))
        parts = rows.view(len(sizes), *sent.shape)
        kept = [one[:size] for one, size in zip(parts, sizes, strict=True)]
        return torch.cat(kept).movedim(0, dim)

    def tokens(self, plan: Plan | None, shape: torch.Size) -> TokenGather | None:
        """Return how tokens are dealt out whose planes travel; None: values do, or nothing.

        Column parallel those of the input, row parallel those of the gradient of the output.

        Args:
            plan: under which the part computes, or None.
            shape: `[..., features]` of this rank's input.
        """
        world = len(self.sizes)
        if not self.sequence_parallel or plan is None or plan.is_plain:
            return None
        is_column = self.mode == COLUMN
        slot = plan.input if is_column else plan.grad_output
        if slot.row.is_plain and slot.col.is_plain:
            return None
        if not is_column and (shape[self.dim] % world or plan.is_forward_only):
            return None
        runs = math.prod(shape[: self.dim])
        made = TokenGather(self.group, self.rank, world, runs, self.sums[1 if is_column else 0])
        unit = made.unit(slot.row, None if plan.is_forward_only else slot.col)
        tokens = math.prod(shape[self.dim : -1]) // (1 if is_column else world)
        if tokens % unit == 0:
            return made
        if not torch.compiler.is_compiling():
            log_once(
                f"sequence parallel values: {slot.row.spec} {slot.col.spec} {unit}",
                f"sequence parallelism gathers values, and no planes, since each rank has {tokens} "
                f"tokens, and blocks are of {unit}; pad the sequence so that each rank has a "
                "multiple of that",
            )
        return None

    def leading(self, shape: torch.Size) -> list[int]:
        """Return the shape of the output but its features, where planes of tokens travel.

        Args:
            shape: `[..., features]` of this rank's input.
        """
        made, world = list(shape[:-1]), len(self.sizes)
        own = made[self.dim]
        made[self.dim] = own * world if self.mode == COLUMN else own // world
        return made

    def cut(self, plan: Plan) -> tuple[Cut, Cuts]:
        """Return how the weight is cut, and what its slots' encoders are told.

        Args:
            plan: under which the part computes.
        """
        x, w, dy = plan.input, plan.weight, plan.grad_output
        if self.mode == COLUMN:
            unit = common_unit([(w.row, 0), (w.col, 1), (dy.row, 1), (dy.col, 0)])
            of_weight = Cut(self.group, self.rank, self.sizes, 0, unit)
            of_grad = of_weight._replace(dim=1)
            has_grad = not plan.is_forward_only and of_grad.is_seen(dy.row, dy.col)
            return of_weight, Cuts(
                None,
                of_weight if of_weight.is_seen(w.row, w.col) else None,
                of_grad if has_grad else None,
            )
        unit = common_unit([(x.row, 1), (x.col, 0), (w.row, 1), (w.col, 0)])
        one = Cut(self.group, self.rank, self.sizes, 1, unit)
        of_input = one if one.is_seen(x.row, x.col) else None
        return one, Cuts(of_input, one if one.is_seen(w.row, w.col) else None, None)

    def has_whole_blocks(self, plan: Plan) -> bool:
        """Return whether no block of an operand lies on two ranks: then windows are parts.

        Args:
            plan: under which the part computes.
        """
        unit, whole = self.cut(plan)[0].unit, sum(self.sizes)
        starts = (sum(self.sizes[:rank]) for rank in range(1, len(self.sizes)))
        return not any(start % unit for start in starts if start < whole)

    def as_of_whole(self, weight: torch.Tensor, init_method: Any) -> None:
        """Give values that were drawn for a part the range that the whole weight has, in place.

        torch's own range is `1 / sqrt(in_features)`; a row parallel part has fewer.

        Args:
            weight: of one linear part.
            init_method: the caller's, whose values stay, or None.
        """
        if init_method is None and self.mode == ROW:
            weight.mul_(len(self.sizes) ** -0.5)

    @property
    def adds_bias(self) -> bool:
        """Whether this rank's term of a sum has the bias in it."""
        return self.mode == COLUMN or self.rank == 0


def is_dtensor(tensor: torch.Tensor | None) -> bool:
    """Return whether a tensor is a DTensor, without importing what defines it."""
    return getattr(tensor, "device_mesh", None) is not None


def sharing_group(weight: Any) -> str:
    """Return the name of the group whose ranks have parts of a weight; empty: it is whole.

    Args:
        weight: any tensor.
    """
    if not is_dtensor(weight) or weight.device_mesh.ndim != 1:
        return ""
    if not weight.placements[0].is_shard():
        return ""
    name: str = weight.device_mesh.get_group().group_name
    return name


def _parallel_of(module: QuantizedModule, weight: Any) -> tuple[Any, str, tuple[int, ...]]:
    """Return the mesh of a DTensor weight, how it is dealt out, and the sizes of ranks' parts.

    Raises:
        NotImplementedError: it is dealt out over two dimensions of a mesh, or in another way.
    """
    mesh, placements = weight.device_mesh, weight.placements
    if mesh.ndim != 1:
        raise module._error(
            NotImplementedError,
            f"the weight must be dealt out over one dimension of a mesh, got {tuple(placements)}",
        )
    (placement,) = placements
    if placement.is_replicate():
        return mesh, "", ()
    if not placement.is_shard():
        raise module._error(
            NotImplementedError, f"the weight must be sharded or replicated, got {placement}"
        )
    world = mesh.size()
    dim = placement.dim % 2
    whole = weight.shape[dim]
    chunk = -(-whole // world)
    sizes = tuple(max(0, min(chunk, whole - rank * chunk)) for rank in range(world))
    return mesh, COLUMN if dim == 0 else ROW, sizes


def dtensor_forward(
    module: QuantizedModule,
    x: torch.Tensor,
    weight: Any,
    bias: Any,
    plan: Plan,
    run: Any,
    sums: tuple[str, str] = ("", ""),
) -> torch.Tensor:
    """Return what a linear part makes of x, both DTensors over one mesh, as a DTensor.

    As torch's own linear would: of a column parallel weight it is sharded along its last dimension,
    of a row parallel one it is a partial sum; or, where the module `scatters_tokens`, sharded along
    these. Tokens that are dealt out travel as planes where they can.

    Args:
        module: whose part it is.
        x: `[..., in_features]`, a DTensor.
        weight: `[out_features, in_features]`, a DTensor.
        bias: `[out_features]`, a DTensor, or None.
        plan: under which the part computes.
        run: called with local tensors and how they lie, `run(x, weight, bias, parallel, tokens)`.
        sums: as `Parallel` has them; taken where planes of tokens travel.

    Raises:
        RuntimeError: x is no DTensor.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    if not is_dtensor(x):
        raise module._error(
            RuntimeError,
            "the weight is a DTensor, and so must be the input, got a plain tensor; parallelize "
            "the module by ColwiseParallel or RowwiseParallel, or wrap the input by "
            "DTensor.from_local",
        )
    given: Any = x
    mesh, mode, sizes = _parallel_of(module, weight)
    if mode == "":
        return _replicated(given, weight, bias, run)
    last = given.dim() - 1
    name = mesh.get_group().group_name
    parallel = Parallel(name, mesh.get_local_rank(), mode, sizes, sums=sums)
    if mode == COLUMN:
        parallel, tokens = _dealt_tokens(parallel, given, plan)
        if tokens is None:
            given = whole_input(given, weight)
        enters = Partial() if tokens is None else Shard(parallel.dim)
        own = given.to_local(grad_placements=[enters])
        local = weight.to_local(grad_placements=[Shard(0)])
        own_bias = None if bias is None else bias.to_local(grad_placements=[Shard(0)])
        y = run(own, local, own_bias, parallel, tokens)
        leaves: Any = Shard(last)
    else:
        if given.placements[0] != Shard(last):
            given = given.redistribute(mesh, [Shard(last)])
        own = given.to_local(grad_placements=[Shard(last)])
        local = weight.to_local(grad_placements=[Shard(1)])
        tokens = None
        if module.scatters_tokens is not None:
            parallel = parallel._replace(sequence_parallel=True, dim=module.scatters_tokens % last)
            tokens = parallel.tokens(plan, own.shape)
        if tokens is None:
            own_bias = None if bias is None else bias.to_local(grad_placements=[Replicate()])
            y, leaves = run(own, local, own_bias, parallel, None), Partial()
        else:
            y, leaves = run(own, local, None, parallel, tokens), Shard(parallel.dim)
            if bias is not None:
                y = y + bias.to_local(grad_placements=[Partial()]).to(y.dtype)
    shape = torch.Size((*given.shape[:-1], weight.shape[0]))
    strides = torch.empty(shape, dtype=x.dtype, device="meta").stride()
    return DTensor.from_local(y, mesh, [leaves], run_check=False, shape=shape, stride=strides)


def _dealt_tokens(parallel: Parallel, x: Any, plan: Plan) -> tuple[Parallel, TokenGather | None]:
    """Return how a column parallel input's tokens are dealt out, if their planes can travel.

    Args:
        parallel: how the weight lies over ranks.
        x: `[..., features]`, a DTensor.
        plan: under which the part computes.
    """
    placement = x.placements[0]
    if not placement.is_shard() or placement.dim == x.dim() - 1:
        return parallel, None
    if x.shape[placement.dim] % len(parallel.sizes):
        return parallel, None
    parallel = parallel._replace(sequence_parallel=True, dim=placement.dim)
    return parallel, parallel.tokens(plan, x.to_local().shape)


def whole_input(x: torch.Tensor, weight: Any) -> torch.Tensor:
    """Return what a column parallel weight takes: the whole of x, on every rank.

    Args:
        x: `[..., features]`, a DTensor, or what will be refused.
        weight: a DTensor; x stays if it is dealt out otherwise.
    """
    given: Any = x
    placement = weight.placements[0]
    if not is_dtensor(x) or not placement.is_shard() or placement.dim % 2 == 1:
        return x
    if given.placements[0].is_replicate():
        return x
    from torch.distributed.tensor import Replicate

    whole: torch.Tensor = given.redistribute(given.device_mesh, [Replicate()])
    return whole


def _replicated(x: Any, weight: Any, bias: Any, run: Any) -> torch.Tensor:
    """Return the product with a weight that every rank has whole: each of its own tokens.

    Planes along tokens are of the rank's own tokens.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate

    mesh, placement = x.device_mesh, x.placements[0]
    if placement.is_partial() or (placement.is_shard() and placement.dim == x.dim() - 1):
        x, placement = x.redistribute(mesh, [Replicate()]), Replicate()
    grads = [Replicate() if placement.is_replicate() else Partial()]
    local = weight.to_local(grad_placements=grads)
    own_bias = None if bias is None else bias.to_local(grad_placements=grads)
    y = run(x.to_local(grad_placements=[placement]), local, own_bias, None, None)
    shape = torch.Size((*x.shape[:-1], weight.shape[0]))
    strides = torch.empty(shape, dtype=x.dtype, device="meta").stride()
    return DTensor.from_local(y, mesh, [placement], run_check=False, shape=shape, stride=strides)


def run_windows(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    plan: Plan,
    parallel: Parallel,
    tokens: TokenGather | None,
    run: Any,
) -> torch.Tensor:
    """Return this rank's part of the output, or its term: a product of windows.

    Args:
        x: `[rows, in]`, this rank's part of the input if the mode is `"row"`.
        weight: this rank's part.
        bias: this rank's part if the mode is `"column"`, else all of it, or None.
        plan: under which the part computes.
        parallel: how the weight lies over ranks.
        tokens: how those are dealt out whose planes travel: of the input if the mode is
            `"column"`, else of the output, which is then a part of the sum; or None.
        run: called with windows and how they are cut, `run(x, weight, bias, cuts)`.
    """
    cut, cuts = parallel.cut(plan)
    if parallel.mode == COLUMN:
        if tokens is not None:
            of_input = tokens.cut(x.shape[0], plan.input.row, plan.input.col)
            cuts = cuts._replace(input=of_input, gathered=tokens)
        own = None if bias is None else cut.padded(bias, 0)
        return cut.part(run(x, cut.padded(weight, 0), own, cuts), 1)
    if tokens is not None:
        grad, rows = plan.grad_output, x.shape[0] // tokens.world
        of_grad = tokens.cut(rows, grad.row, grad.col)
        cuts = cuts._replace(grad_output=of_grad, scattered=tokens)
    y = run(cut.padded(x, 1), cut.padded(weight, 1), None, cuts)
    return y if bias is None else add_once(y, bias, parallel.adds_bias)
