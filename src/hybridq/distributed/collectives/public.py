"""The public collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch

from ...errors import must_be_one_of
from ...kernels.inputs import check_seed, check_tensor
from ...quantizers import Quantizer
from ...shards import Shards, agree, refuse
from ...tensor import is_quantized
from .apart import departed
from .calls import Call, landed, start
from .error_feedback import Residual
from .gather_planes import gather_planes
from .groups import name_of, place
from .handle import CollectiveHandle
from .wire import wire_quantizer, wire_text

__all__ = [
    "Extras",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "exchange_call",
    "reduce_scatter",
]

#: Messages of the backward are made as those of the forward.
SAME: Final = "same"
_OPS: Final = ("sum", "mean")
#: What a rank refuses by itself; the others learn of it.
_REFUSALS: Final = (TypeError, ValueError, RuntimeError)


class Extras(NamedTuple):
    """What a call has besides its tensor and its place."""

    seed: torch.Tensor | None
    residual: Residual | None
    async_op: bool


def _formats(where: str, x: torch.Tensor, quantizer: Any, grad_quantizer: Any) -> tuple[str, str]:
    """Return the spec strings of messages forth and back."""
    text = wire_text(where, wire_quantizer(where, quantizer).text, x.dtype)
    if isinstance(grad_quantizer, str) and grad_quantizer == SAME:
        return text, text
    return text, wire_text(where, wire_quantizer(where, grad_quantizer).text, x.dtype)


def _check(where: str, x: torch.Tensor, dim: int, extras: Extras) -> int:
    """Return `dim`, counted from the front."""
    if not torch.compiler.is_compiling():  # in an autograd.Function a trace breaks at `layout`
        check_tensor(x, where, "x")
    if x.dim() == 0:
        raise ValueError(f"{where}: x must have at least one dimension, got a single value")
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"{where}: dim must name a dimension of {x.dim()}, got {dim}")
    if extras.seed is not None:
        check_seed(extras.seed, x, where)
    if extras.residual is not None:
        if not isinstance(extras.residual, Residual):
            raise TypeError(
                f"{where}: error_feedback must be the residual of one tensor, feedback[name], got "
                f"{type(extras.residual).__name__}"
            )
        if torch.is_grad_enabled() and x.requires_grad:
            raise ValueError(
                f"{where}: error feedback is for gradients, which need none themselves; call it "
                "under torch.no_grad(), or detach x"
            )
        if torch.compiler.is_compiling():
            raise RuntimeError(
                f"{where}: error feedback writes into an object, which compiled code must not; "
                "call it outside"
            )
    return dim % x.dim()


def _sizes(where: str, what: str, sizes: Any, world: int) -> tuple[int, ...]:
    made = tuple(sizes)
    if len(made) != world or not all(
        isinstance(size, (int, torch.SymInt)) and size >= 0 for size in made
    ):
        raise ValueError(f"{where}: {what} must be {world} sizes, one for each rank, got {made}")
    return made


def _facts(where: str, call: Call, x: torch.Tensor, local: bool, *options: Any) -> tuple[Any, ...]:
    """Return what ranks compare: the fields of `Facts`.

    Args:
        where: the function.
        call: of this rank.
        x: the tensor.
        local: the size along `call.dim` may differ between ranks, and so may those of the parts.
        options: further ones.
    """
    shape = [] if torch.compiler.is_compiling() else list(x.shape)
    if shape and local:
        shape[call.dim] = -1
    sizes = () if torch.compiler.is_compiling() or call.kind in ("exchange", "reduce") else call.own
    return (
        where,
        (call.text, call.back),
        str(x.dtype),
        tuple(shape),
        call.dim,
        sizes,
        (*(str(option) for option in options), "mean" if call.is_mean else "sum"),
    )


def _traced(call: Call, x: torch.Tensor, local: bool) -> tuple[int, ...]:
    """Return the sizes that a graph is made for, -1 where they are symbolic; nothing in eager code.

    Args:
        call, x, local: as for `_facts`.
    """
    if not torch.compiler.is_compiling():
        return ()
    from torch.fx.experimental.symbolic_shapes import has_static_value  # slow to import

    found = []
    for number, size in enumerate(x.shape):
        is_known = has_static_value(size) and not (local and number == call.dim)
        found.append(size if is_known else -1)
    return tuple(found)


def _prepared(where: str, group: Any, make: Callable[[str, int, int], Any]) -> Any:
    """Return `make(name, rank, world)`; where it raises, the other ranks are told."""
    name = name_of(where, group)
    rank, world = place(where, name)
    if torch.compiler.is_compiling():
        return make(name, rank, world)
    try:
        return make(name, rank, world)
    except _REFUSALS as error:
        refuse(name, where, error)
        raise


def _sent(call: Call, x: torch.Tensor, extras: Extras) -> Any:
    flight = start(call, x.detach(), extras.seed, extras.residual)
    if extras.async_op:
        return CollectiveHandle(departed(call, flight, x))
    return landed(call, flight, x)


def all_gather(
    x: torch.Tensor,
    quantizer: Any,
    group: Any = None,
    dim: int = 0,
    *,
    sizes: Sequence[int] | None = None,
    as_planes: bool = False,
    shared_amax: bool = True,
    grad_quantizer: Any = SAME,
    seed: torch.Tensor | None = None,
    async_op: bool = False,
) -> Any:
    """Return the tensors of all ranks, put together along `dim`, each quantized by its rank.

    By default the result is what the whole decodes to when one process quantizes it, bit for bit,
    wherever parts end at the ends of blocks: formats with one scale or amax per tensor take the
    largest of all ranks first, by one reduction of 4 bytes. Where a part ends inside a block, that
    part's last block is quantized by itself. The backward is a `reduce_scatter` (sum).

    Args:
        x: `(..., K)` float32, bfloat16 or float16; quantized as a matrix with rows of K.
        quantizer: a Quantizer, a format or its name; None: values travel as they are. Its
            rowwise planes travel.
        group: a ProcessGroup, its name, a 1-D DeviceMesh, `(mesh, dimension)`; None: all ranks.
        dim: along which ranks' tensors stand.
        sizes: of each rank's tensor along `dim`, zero included; None: the same on all ranks.
        as_planes: return a QuantizedTensor of the planes that arrive, all that the quantizer makes.
        shared_amax: False: each part has the scale or amax that it has by itself, and no reduction
            comes first. With `as_planes` it must be True.
        grad_quantizer: of the backward's messages; `"same"`: as here; None: not quantized.
        seed: int64 `[1]` for stochastic rounding; rank i of n adds `i * n`. None draws one.
        async_op: return a `CollectiveHandle`, whose `wait()` gives the result.

    Returns:
        A tensor of x's dtype, the same on all ranks.

    Raises:
        TypeError, ValueError: an argument is wrong; `as_planes` where a boundary cuts a block.
        SpecError, PlaneError: an unknown name; a quantizer that follows a history, or makes no
            rowwise plane.
        RuntimeError: torch.distributed is not initialized, or ranks differ in a call that is new
            to the group.

    Source: ours; weights gathered as blocks: ZeRO++ (Wang et al., arXiv:2306.10209).

    Example:
        >>> import torch, hybridq
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> x = torch.randn(4, 64)
        >>> y = hybridq.distributed.all_gather(x, "mxfp8")
        >>> torch.equal(y, hybridq.quantize(x, "mxfp8").dequantize())
        True
        >>> dist.destroy_process_group()
    """
    where = "all_gather"
    extras = Extras(seed, None, async_op)
    x = x.dequantize() if is_quantized(x) else x

    def make(name: str, rank: int, world: int) -> Call:
        at = _check(where, x, dim, extras)
        text, back = _formats(where, x, quantizer, grad_quantizer)
        every = (x.shape[at],) * world if sizes is None else _sizes(where, "sizes", sizes, world)
        if every[rank] != x.shape[at]:
            raise ValueError(
                f"{where}: sizes[{rank}] must be this rank's size along dim {dim}, {x.shape[at]}, "
                f"got {every[rank]}"
            )
        if as_planes and not (shared_amax and isinstance(quantizer, (str, Quantizer))):
            raise ValueError(
                f"{where}: as_planes takes a quantizer, or the name of a format, and a shared amax"
            )
        return Call(
            "gather", text, back, name, rank, world, at, every, every, False, bool(shared_amax)
        )

    call = _prepared(where, group, make)
    own = wire_quantizer(where, quantizer)
    planes = own.text if as_planes else ""
    local = sizes is not None
    facts = _facts(where, call, x, local, shared_amax, planes)
    agree(call.name, facts, (), _traced(call, x, local))
    if as_planes:
        return gather_planes(call, x, own, seed, async_op)
    return _sent(call, x, extras)


def reduce_scatter(
    x: torch.Tensor,
    quantizer: Any,
    group: Any = None,
    dim: int = 0,
    *,
    sizes: Sequence[int] | None = None,
    op: str = "sum",
    grad_quantizer: Any = SAME,
    seed: torch.Tensor | None = None,
    error_feedback: Residual | None = None,
    async_op: bool = False,
) -> Any:
    """Return this rank's part of the sum of all ranks' tensors; each value is quantized once.

    Each rank quantizes the part for each rank by itself and sends it there, by one all-to-all; the
    receiver decodes, adds in FP32 in the order of ranks, and rounds once to x's dtype. The
    backward is an `all_gather`.

    Args:
        x: `(..., K)` float32, bfloat16 or float16; each part is quantized as a matrix of rows of K
            values (of its own K values if `dim` is the last one).
        quantizer, group, grad_quantizer, async_op: as `all_gather` takes them.
        dim: along which x is dealt out.
        sizes: of the parts along `dim`, by rank; None: those of `torch.chunk`, then empty ones.
        op: `"sum"` or `"mean"`.
        seed: int64 `[1]` for stochastic rounding; the part of rank i of n for rank j adds
            `i * n + j`. None draws one.
        error_feedback: the residual of this tensor, `ErrorFeedback()[name]`, or None.

    Returns:
        The part of this rank, of x's dtype; or a CollectiveHandle.

    Raises:
        TypeError, ValueError, SpecError, PlaneError, RuntimeError: as `all_gather`.

    Source: ours; the all-to-all: ZeRO++ (Wang et al., arXiv:2306.10209).

    Example:
        >>> import torch, hybridq
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> hybridq.distributed.reduce_scatter(torch.ones(4, 32), "nvfp4").shape
        torch.Size([4, 32])
        >>> dist.destroy_process_group()
    """
    where = "reduce_scatter"
    extras = Extras(seed, error_feedback, async_op)
    x = x.dequantize() if is_quantized(x) else x

    def make(name: str, rank: int, world: int) -> Call:
        at = _check(where, x, dim, extras)
        text, back = _formats(where, x, quantizer, grad_quantizer)
        if sizes is None:
            every = Shards.chunks(x.shape[at], 1, world).sizes
        else:
            every = _sizes(where, "sizes", sizes, world)
        if sum(every) != x.shape[at]:
            raise ValueError(
                f"{where}: sizes must add up to the size along dim {dim}, {x.shape[at]}, got "
                f"{every}"
            )
        is_mean = _is_mean(where, op)
        return Call("scatter", text, back, name, rank, world, at, every, every, is_mean, True)

    call = _prepared(where, group, make)
    agree(call.name, _facts(where, call, x, False), (), _traced(call, x, False))
    return _sent(call, x, extras)


def all_to_all(
    x: torch.Tensor,
    quantizer: Any,
    group: Any = None,
    *,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    grad_quantizer: Any = SAME,
    seed: torch.Tensor | None = None,
    async_op: bool = False,
) -> Any:
    """Return what every rank has for this one, along dim 0; each part quantized by its sender.

    As `torch.distributed.all_to_all_single`. The backward is the same call with the splits
    exchanged. At the first call of a kind ranks compare their splits; at later ones, whose splits
    may be others, they must fit as torch's must.

    Args:
        x: `(..., K)` float32, bfloat16 or float16, at least 1-D.
        quantizer, group, grad_quantizer, async_op: as `all_gather` takes them.
        output_split_sizes: rows (indices along dim 0) that each rank sends to this one.
        input_split_sizes: rows of x for each rank, in order. Both or neither: then equal parts.
        seed: as `reduce_scatter` takes it.

    Returns:
        `[sum(output_split_sizes), ...]` of x's dtype; or a CollectiveHandle.

    Raises:
        TypeError, ValueError, SpecError, PlaneError, RuntimeError: as `all_gather`.

    Source: ours.

    Example:
        >>> import torch, hybridq
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> tokens = torch.randn(3, 64)
        >>> y = hybridq.distributed.all_to_all(
        ...     tokens, "mxfp8", output_split_sizes=[3], input_split_sizes=[3])
        >>> torch.equal(y, hybridq.quantize(tokens, "mxfp8").dequantize())
        True
        >>> dist.destroy_process_group()
    """
    where = "all_to_all"
    extras = Extras(seed, None, async_op)
    x = x.dequantize() if is_quantized(x) else x
    splits = (input_split_sizes, output_split_sizes)
    given = (quantizer, grad_quantizer)
    call = exchange_call(where, x, lambda: _formats(where, x, *given), group, splits, extras)
    return _sent(call, x, extras)


def exchange_call(
    where: str,
    x: torch.Tensor,
    formats: Callable[[], tuple[str, str]],
    group: Any,
    splits: tuple[Sequence[int] | None, Sequence[int] | None],
    extras: Extras,
) -> Call:
    """Return an all-to-all that ranks agree on.

    Args:
        where: the function.
        x: the tensor.
        formats: returns the spec strings of messages forth and back, or raises.
        group: of ranks.
        splits: rows for each rank, and from each.
        extras: further arguments.
    """
    sends, receives = splits

    def make(name: str, rank: int, world: int) -> Call:
        _check(where, x, 0, extras)
        text, back = formats()
        if (receives is None) != (sends is None):
            raise ValueError(f"{where}: both split sizes or neither must be given, got one")
        if sends is None:
            if x.shape[0] % world:
                raise ValueError(
                    f"{where}: without split sizes dim 0 must be a multiple of {world} ranks, got "
                    f"{x.shape[0]}"
                )
            own = theirs = (x.shape[0] // world,) * world
        else:
            own = _sizes(where, "input_split_sizes", sends, world)
            theirs = _sizes(where, "output_split_sizes", receives, world)
        if sum(own) != x.shape[0]:
            raise ValueError(
                f"{where}: input_split_sizes must add up to dim 0, {x.shape[0]}, got {own}"
            )
        return Call("exchange", text, back, name, rank, world, 0, own, theirs, False, True)

    call: Call = _prepared(where, group, make)
    compiles = torch.compiler.is_compiling()
    both = () if compiles else (call.own, call.theirs)
    agree(call.name, _facts(where, call, x, True), both, _traced(call, x, True))
    return call


def all_reduce(
    x: torch.Tensor,
    quantizer: Any,
    group: Any = None,
    *,
    op: str = "sum",
    grad_quantizer: Any = SAME,
    seed: torch.Tensor | None = None,
    error_feedback: Residual | None = None,
    async_op: bool = False,
) -> Any:
    """Return the sum of all ranks' tensors, the same bits on all ranks.

    x is taken as one row of values, dealt out to ranks in whole blocks: a reduce-scatter of it,
    then an all-gather of the sums, each quantized by itself. So each value is quantized twice,
    whatever the number of ranks. The backward is an `all_reduce`.

    Args:
        x: float32, bfloat16 or float16 of any shape.
        quantizer, group, grad_quantizer: as `all_gather` takes them.
        op: `"sum"` or `"mean"`.
        seed: int64 `[1]` for stochastic rounding: the part of rank i of n for rank j adds
            `i * n + j`; the sum of rank i adds `n * n + i * n`. None draws one.
        error_feedback: the residual of this tensor, `ErrorFeedback()[name]`, or None.
        async_op: return a `CollectiveHandle`. Its `wait` sends the sums: all ranks must wait in
            the same order.

    Returns:
        A new tensor of x's shape and dtype; or a CollectiveHandle.

    Raises:
        TypeError, ValueError, SpecError, PlaneError, RuntimeError: as `all_gather`.

    Source: ours.

    Example:
        >>> import torch, hybridq
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> hybridq.distributed.all_reduce(torch.ones(40), "mxfp8", op="mean")[:2]
        tensor([1., 1.])
        >>> dist.destroy_process_group()
    """
    where = "all_reduce"
    extras = Extras(seed, error_feedback, async_op)
    x = x.dequantize() if is_quantized(x) else x

    def make(name: str, rank: int, world: int) -> Call:
        _check(where, x, 0, extras)
        text, back = _formats(where, x, quantizer, grad_quantizer)
        is_mean = _is_mean(where, op)
        return Call("reduce", text, back, name, rank, world, 0, (), (), is_mean, True)

    call = _prepared(where, group, make)
    agree(call.name, _facts(where, call, x, False), (), _traced(call, x, False))
    return _sent(call, x, extras)


def _is_mean(where: str, op: str) -> bool:
    if op not in _OPS:
        raise ValueError(f"{where}: op {must_be_one_of(_OPS, op)}")
    return op == "mean"
