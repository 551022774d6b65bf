"""The collectives themselves: what is sent, what is made of what arrives, and the duals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..._torch_ranks import functional_all_gather, functional_all_to_all, wait_tensor
from ...direction import ROWWISE
from ...kernels.operators import StatedFunction
from ...quantizers import draw_seed, group_amax
from .error_feedback import Residual
from .wire import decode_parts, encode_parts, facts_of, layout_of, part_shapes

__all__ = [
    "Call",
    "Differentiable",
    "Flight",
    "dual",
    "finish",
    "landed",
    "run",
    "start",
]


class Call(NamedTuple):
    """A collective of one tensor, without its values.

    Attributes:
        kind: `"gather"`, `"scatter"` (a reduce-scatter), `"exchange"` (an all-to-all) or
            `"reduce"` (an all-reduce).
        text: spec string of its messages.
        back: spec string of its dual's.
        name, rank, world: of the group, and this rank in it.
        dim: along which parts stand.
        own: sizes along `dim` of the parts that this rank sends; of a gather one for each rank.
        theirs: of those that it receives.
        is_mean: whether the result is divided by the number of ranks.
        shares_amax: whether the parts of a gather are scaled by their common amax.
        table: of an exchange by symmetric memory the sizes of all parts, by sender and by receiver;
            empty: it is the process group's.
    """

    kind: str
    text: str
    back: str
    name: str
    rank: int
    world: int
    dim: int
    own: tuple[int, ...]
    theirs: tuple[int, ...]
    is_mean: bool
    shares_amax: bool
    table: tuple[tuple[int, ...], ...] = ()


class Flight(NamedTuple):
    """What is on its way.

    Attributes:
        payload: uint8: what arrives, complete once it was waited for.
        seed: int64 `[1]` or None, of an all-reduce's second message.
        residual: of the same, or None.
    """

    payload: torch.Tensor
    seed: torch.Tensor | None
    residual: Residual | None


_DUALS = {"gather": "scatter", "scatter": "gather", "exchange": "exchange", "reduce": "reduce"}


def dual(call: Call) -> Call:
    """Return the collective that brings the gradients back.

    Args:
        call: of the forward.
    """
    own, theirs = call.own, call.theirs
    if call.kind == "exchange":
        own, theirs = theirs, own
    return Call(
        _DUALS[call.kind],
        call.back,
        call.back,
        call.name,
        call.rank,
        call.world,
        call.dim,
        own,
        theirs,
        call.is_mean,
        call.shares_amax,
        tuple(zip(*call.table, strict=True)),
    )


# ---- a tensor as a matrix whose rows or columns are dealt out


def _axis(shape: Sequence[int], dim: int) -> int:
    return 1 if dim == len(shape) - 1 else 0


def _per(shape: Sequence[int], dim: int) -> int:
    """Return how many rows of the matrix an index along `dim` has."""
    made = 1
    for number, size in enumerate(shape[:-1]):
        if number != dim and _axis(shape, dim) == 0:
            made *= size
    return made


def _matrix(x: torch.Tensor, dim: int) -> torch.Tensor:
    if x.dim() == 1:
        return x.unsqueeze(0)
    if _axis(x.shape, dim) == 1:
        return x.flatten(0, -2)
    return x.movedim(dim, 0).flatten(0, -2)


def _tensor(matrix: torch.Tensor, shape: Sequence[int], dim: int, size: int) -> torch.Tensor:
    """Return the tensor of a matrix; `shape` with `size` along `dim`."""
    made = list(shape)
    made[dim] = size
    if _axis(shape, dim) == 1 or dim == 0:
        return matrix.reshape(made)
    del made[dim]
    return matrix.reshape([size, *made]).movedim(0, dim)


def _units(sizes: Sequence[int], shape: Sequence[int], dim: int) -> list[int]:
    """Return sizes along `dim` as rows or columns of the matrix."""
    per = _per(shape, dim)
    return [size * per for size in sizes]


def _rest(shape: Sequence[int], dim: int) -> tuple[int, int]:
    """Return rows and columns of the matrix, of which the cut one does not count."""
    if _axis(shape, dim) == 0:
        return 0, shape[-1]
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return rows, 0


def _nbytes(call: Call, shapes: Sequence[tuple[int, int]]) -> list[int]:
    return [layout_of(call.text, *shape).nbytes for shape in shapes]


# ---- all-reduce: the tensor as one row, dealt out in whole blocks


def flat_sizes(count: int, world: int, unit: int) -> list[int]:
    """Return how many values of a flat tensor each rank sums up: whole blocks, what is left last.

    Args:
        count: of values.
        world: number of ranks.
        unit: values of a block.
    """
    size = -(-count // (world * unit)) * unit
    return [max(0, min(size, count - rank * size)) for rank in range(world)]


def _flat(call: Call, count: int) -> Call:
    """Return the reduce-scatter that an all-reduce begins with."""
    sizes = tuple(flat_sizes(count, call.world, facts_of(call.text).units[1]))
    return call._replace(kind="scatter", dim=0, own=sizes, theirs=sizes)


# ---- start and finish


def start(
    call: Call,
    x: torch.Tensor,
    seed: torch.Tensor | None = None,
    residual: Residual | None = None,
) -> Flight:
    """Send this rank's message; nothing waits.

    Args:
        call: which collective.
        x: the tensor, outside of autograd.
        seed: int64 `[1]`, or None: one is drawn where the format rounds stochastically.
        residual: of earlier messages, or None.
    """
    if facts_of(call.text).is_stochastic and seed is None:
        seed = draw_seed(x.device)
    if call.kind == "reduce":
        x = x.reshape(-1)
        flight = start(_flat(call, x.shape[0]), x, seed, residual)
        second = None if seed is None else seed + call.world * call.world
        return Flight(flight.payload, second, residual)
    own_seed = None if seed is None else seed + call.rank * call.world
    if call.kind == "gather":
        return Flight(_send_gather(call, x, own_seed), None, None)
    wanted = x if residual is None else residual.added("sent", x)
    axis = _axis(x.shape, call.dim)
    matrix = _matrix(wanted, call.dim)
    sizes = _units(call.own, x.shape, call.dim)
    payload = encode_parts(matrix, call.text, axis, sizes, own_seed)
    rest = _rest(x.shape, call.dim)
    shapes = part_shapes(*rest, axis, sizes)
    if residual is not None:
        sent = decode_parts(payload, call.text, shapes, axis, torch.float32)
        residual.keep("sent", wanted, _tensor(sent, x.shape, call.dim, x.shape[call.dim]))
    if call.kind == "scatter":
        size = sizes[call.rank]
        arrives = part_shapes(*rest, axis, [size] * call.world)
    else:
        arrives = part_shapes(*rest, axis, _units(call.theirs, x.shape, call.dim))
    if call.table:
        rows = [part_shapes(*rest, axis, _units(row, x.shape, call.dim)) for row in call.table]
        every = [size for row in rows for size in _nbytes(call, row)]
        sent = torch.ops.hybridq.all_to_all_bytes(payload, every, call.rank, call.name)
        return Flight(sent, None, None)
    given, taken = _nbytes(call, shapes), _nbytes(call, arrives)
    return Flight(functional_all_to_all(payload, taken, given, call.name), None, None)


def _send_gather(call: Call, x: torch.Tensor, seed: torch.Tensor | None) -> torch.Tensor:
    matrix, axis = _matrix(x, call.dim), _axis(x.shape, call.dim)
    amax = None
    if call.shares_amax and facts_of(call.text).needs_amax:
        amax = torch.ops.hybridq.amax(matrix, call.text, ROWWISE)
        amax = group_amax(amax, call.name)
    payload = encode_parts(matrix, call.text, axis, [matrix.shape[axis]], seed, amax)
    if all(size == call.own[0] for size in call.own):
        return functional_all_gather(payload, call.world, call.name)
    shapes = part_shapes(*_rest(x.shape, call.dim), axis, _units(call.own, x.shape, call.dim))
    given = [payload.shape[0]] * call.world
    taken = _nbytes(call, shapes)
    return functional_all_to_all(payload.repeat(call.world), taken, given, call.name)


def finish(
    call: Call,
    flight: Flight,
    shape: Sequence[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the result of a collective: wait, decode, and sum in FP32 in the order of ranks.

    Args:
        call, flight: which, and what `start` returned.
        shape, dtype: of the tensor that `start` was given.
    """
    if call.kind == "reduce":
        return _finish_reduce(call, flight, shape, dtype)
    payload = wait_tensor(flight.payload)
    axis, rest = _axis(shape, call.dim), _rest(shape, call.dim)
    if call.kind == "scatter":
        total = _summed(call, payload, shape).to(dtype)
        return _tensor(total, shape, call.dim, call.own[call.rank])
    sizes = call.own if call.kind == "gather" else call.theirs
    shapes = part_shapes(*rest, axis, _units(sizes, shape, call.dim))
    shares = call.kind == "gather" and call.shares_amax
    values = decode_parts(payload, call.text, shapes, axis, dtype, shares)
    if call.is_mean:
        values = values / call.world
    return _tensor(values, shape, call.dim, sum(sizes))


def _summed(call: Call, payload: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return the sum, or mean, of the ranks' parts: FP32 `[rows, cols]` of the own part."""
    axis = _axis(shape, call.dim)
    size = _units(call.own, shape, call.dim)[call.rank]
    (own,) = part_shapes(*_rest(shape, call.dim), axis, [size])
    values = decode_parts(payload, call.text, [own] * call.world, 0, torch.float32)
    parts = values.view(call.world, *own)
    total = parts[0].clone()
    for number in range(1, call.world):
        total += parts[number]
    return total / call.world if call.is_mean else total


def _finish_reduce(
    call: Call, flight: Flight, shape: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    count = 1
    for size in shape:
        count *= size
    first = _flat(call, count)
    total = _summed(first, wait_tensor(flight.payload), (count,)).view(-1)
    # Each rank's sum is rounded once to the tensor's dtype, and quantized by itself.
    total = total.to(dtype)
    wanted = total if flight.residual is None else flight.residual.added("reduced", total)
    second = first._replace(kind="gather", is_mean=False, shares_amax=False)
    seed = None if flight.seed is None else flight.seed + call.rank * call.world
    arrives = _send_gather(second, wanted, seed)
    if flight.residual is not None:
        own = encode_parts(wanted.unsqueeze(0), call.text, 1, [wanted.shape[0]], seed)
        shapes = [(1, wanted.shape[0])]
        sent = decode_parts(own, call.text, shapes, 1, torch.float32)
        flight.residual.keep("reduced", wanted, sent)
    made = finish(second, Flight(arrives, None, None), (first.own[call.rank],), dtype)
    return made.view(list(shape))


def run(
    call: Call,
    x: torch.Tensor,
    seed: torch.Tensor | None = None,
    residual: Residual | None = None,
) -> torch.Tensor:
    """Return the result of a collective; its derivative is the dual collective.

    Args:
        call: which.
        x: the tensor.
        seed, residual: as `start` takes them.
    """
    return landed(call, start(call, x.detach(), seed, residual), x)


def landed(call: Call, flight: Flight, x: torch.Tensor) -> torch.Tensor:
    """Return the result of a collective that was started, as a function of what was sent.

    Args:
        call, flight: which, and what `start` returned.
        x: the tensor that was sent.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        made: torch.Tensor = Differentiable.apply(x, flight.payload, flight.seed, call)
        return made
    return finish(call, flight, x.shape, x.dtype)


class Differentiable(StatedFunction):
    """The second half of a collective; its backward is the dual collective."""

    second = "exact"

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        payload: torch.Tensor,
        seed: torch.Tensor | None,
        call: Call,
    ) -> torch.Tensor:
        """Return what `finish` returns.

        Args:
            ctx: of autograd.
            x: the tensor that was sent; its shape and dtype count.
            payload, seed: the fields of a Flight.
            call: which collective.
        """
        ctx.call = call
        return finish(call, Flight(payload, seed, None), x.shape, x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Return the gradient of x: the dual collective of `grad`.

        Args:
            ctx: of autograd.
            grad: of the result.
        """
        return run(dual(ctx.call), grad), None, None, None
