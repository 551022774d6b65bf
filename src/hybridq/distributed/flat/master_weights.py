"""FP32 masters in shards of a flat buffer, quantized into parameters that every rank holds whole.

Source: names and use: Transformer Engine's `quantize_master_weights` and
`post_all_gather_processing`; the rules that make ranges exact are ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

import torch

from ...kernels.choice import given_scale
from ...kernels.operators import update_amax
from ...quantizers import group_amax
from ...shards import reduce_maxima
from ...tensor import is_quantized
from .flat_agreement import Layout, agree
from .flat_codes import FlatCodes, FlatParameter, Pending, check_once, flat_parameter
from .flat_plane import FlatPlane

__all__ = ["post_all_gather_processing", "quantize_master_weights"]

_WHERE: Final = "quantize_master_weights"
#: Layouts that all ranks have compared, by the FlatCodes of the first parameter.
_known: WeakKeyDictionary[FlatCodes, Any] = WeakKeyDictionary()


class _Share(NamedTuple):
    """This rank's part of a parameter: FP32 values, flat, and where they begin."""

    codes: FlatCodes
    flat: FlatParameter
    values: torch.Tensor
    start: int


class _Job(NamedTuple):
    """One plane of one matrix, this rank's values of it, and its maxima, reduced in place."""

    share: _Share
    plane: FlatPlane
    matrix: int
    values: torch.Tensor
    start: int
    maxima: torch.Tensor


@torch.no_grad()
def quantize_master_weights(
    params: Sequence[Any],
    masters: Sequence[torch.Tensor | None],
    start_offsets: Sequence[int | None],
    group: Any,
) -> None:
    """Quantize FP32 masters, dealt out over ranks, into the codes of quantized parameters.

    Each rank writes the codes of the values that it has into the parameters' `FlatCodes`; all
    scales and amaxes it knows from one max-reduction for all parameters. The caller then gathers
    `FlatCodes.buffers` and calls `post_all_gather_processing`: every plane has byte for byte what
    `param.quantize_(master)` gives for the whole master on one rank. Until then the parameters
    keep their old values.

    A range may begin and end anywhere, in a row or in a block. A parameter whose planes do not
    follow from ranges and maxima (a Hadamard transform, four-over-six) takes the sum of all masters
    in FP32, and nothing of it is gathered. Of a `Float8Quantizer` the scale must be the same on all
    ranks, and the amax is recorded on all of them.

    Every rank of the group must call it. It waits for the device once: ranks tell each other
    whether one of them has an error. The first call with these parameters and ranges compares
    them too.

    Args:
        params: QuantizedTensors that lie in a FlatCodes, whole on every rank, in the same order.
        masters: of each FP32, any shape: this rank's range of the parameter, flattened row by row;
            None, or empty: it has none of it. Each value has its master on exactly one rank.
        start_offsets: of each where the range begins in the flattened parameter; None without one.
        group: a process group, or None: all ranks.

    Raises:
        TypeError: a parameter is not quantized, or a master is no FP32 tensor.
        ValueError: lengths, offsets or devices do not fit; parameters lie in no FlatCodes, are
            given twice or differ between ranks; a value has no master, or two; a byte of 4-bit
            codes lies on two ranks. On every rank, whichever has the fault.
        RuntimeError: torch.distributed is not initialized.

    Source: Transformer Engine's function of this name; there masters are rounded to the parameter's
        dtype first: pass `master.bfloat16().float()` for that.

    Example:
        >>> import torch, hybridq
        >>> import torch.distributed as dist
        >>> from hybridq import distributed as hd
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> master = torch.randn(48, 40)
        >>> weight = hybridq.quantizer("mxfp8", "nvfp4")(torch.zeros(48, 40))
        >>> flat = hd.FlatCodes([weight], [0])
        >>> hd.quantize_master_weights([weight], [master.view(-1)], [0], None)
        >>> for codes in flat.buffers:
        ...     dist.all_gather([codes], codes.clone())
        >>> hd.post_all_gather_processing([weight])
        >>> whole = weight.quantizer(master)
        >>> torch.equal(weight.columnwise.data, whole.columnwise.data)
        True
        >>> dist.destroy_process_group()
    """
    import torch.distributed as dist  # not every build of torch has it

    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(f"{_WHERE}: torch.distributed must be initialized, got no group")
    shares, layout, error = [], None, None
    try:
        shares = _shares(params, masters, start_offsets)
        layout = _layout(shares)
    except (TypeError, ValueError, RuntimeError) as fault:
        error = fault
    key = (group, layout, tuple(id(one.flat) for one in shares))
    is_known = bool(shares) and _known.get(shares[0].codes) == key
    agree(layout, error, is_known, group, _WHERE)
    if not shares:
        return
    _known[shares[0].codes] = key
    jobs = [job for share in shares if not share.flat.reason for job in _jobs(share)]
    recorded = {id(one.flat): _recorded(one) for one in shares if _is_delayed(one)}
    asked = [(one.maxima.numel(), [(0, one.maxima)]) for one in jobs if not _is_given(one)]
    asked += [(1, [(0, amax)]) for amax in recorded.values()]
    if asked:
        reduce_maxima(asked, group, shares[0].values.device)
    for share in shares:
        if id(share.flat) in recorded:
            update_amax(share.flat.parameter.quantizer.amax.view(1), recorded[id(share.flat)])
        whole = _whole(share, group) if share.flat.reason else None
        share.flat.pending = Pending([[] for _ in range(share.flat.count)], whole)
    for job, stat in zip(jobs, _statistics(jobs), strict=True):
        _encode(job, stat)


def post_all_gather_processing(params: Sequence[Any]) -> None:
    """Give parameters the planes whose codes were gathered.

    Columnwise planes that follow from the rowwise ones are made here: those of square blocks, and
    those that a recipe makes of decoded values. Autograd sees a write. Plain tensors are passed
    over.

    Args:
        params: those of the last `quantize_master_weights`, or some of them; every rank must name
            the same.

    Raises:
        ValueError: a quantized parameter lies in no FlatCodes, was not quantized since, or is given
            twice.

    Source: Transformer Engine's function of this name.

    Example:
        >>> import torch, hybridq
        >>> weight = hybridq.quantize(torch.zeros(32, 32), "mxfp8")
        >>> flat = hybridq.distributed.FlatCodes([weight], [0])
        >>> hybridq.distributed.post_all_gather_processing([weight])
        Traceback (most recent call last):
            ...
        ValueError: post_all_gather_processing: parameters must have been given to \
quantize_master_weights before, got parameter 0 of shape [32, 32]
    """
    where = "post_all_gather_processing"
    params = [one for one in params if is_quantized(one)]
    check_once(params, where)
    found = [flat_parameter(one, where) for one in params]
    for _, flat in found:
        if flat.pending is None:
            raise ValueError(
                f"{where}: parameters must have been given to quantize_master_weights before, got "
                f"parameter {flat.number} of shape {list(flat.shape)}"
            )
    with torch.no_grad():
        for codes, flat in found:
            codes.take(flat)


# ---- what a rank has


def _shares(params: Any, masters: Any, start_offsets: Any) -> list[_Share]:
    params, masters, offsets = list(params), list(masters), list(start_offsets)
    if not len(params) == len(masters) == len(offsets):
        raise ValueError(
            f"{_WHERE}: each parameter has a master and an offset, or None, got {len(params)} "
            f"parameters, {len(masters)} masters and {len(offsets)} offsets"
        )
    check_once(params, _WHERE)
    triples = enumerate(zip(params, masters, offsets, strict=True))
    return [_share(number, *one) for number, one in triples]


def _share(number: int, parameter: Any, master: Any, offset: Any) -> _Share:
    if not is_quantized(parameter):
        kind = type(parameter).__name__
        raise TypeError(f"{_WHERE}: parameters must be quantized, got {kind} (number {number})")
    codes, flat = flat_parameter(parameter, _WHERE)
    parameter.tensor_storage.check_write(_WHERE)
    now = flat.state_now()
    if now != flat.state:
        raise ValueError(
            f"{_WHERE}: parameters must be as they were when their FlatCodes was made, got {now} "
            f"and before {flat.state} (number {number}); make another FlatCodes"
        )
    if master is None:
        return _Share(codes, flat, torch.empty(0, dtype=torch.float32, device=parameter.device), 0)
    if not isinstance(master, torch.Tensor) or master.dtype != torch.float32:
        got = master.dtype if isinstance(master, torch.Tensor) else type(master).__name__
        raise TypeError(
            f"{_WHERE}: masters must be float32 tensors or None, got {got} (number {number})"
        )
    if master.device != parameter.device:
        raise ValueError(
            f"{_WHERE}: a master must be on its parameter's device {parameter.device}, got "
            f"{master.device} (number {number})"
        )
    last = parameter.numel() - master.numel()
    if master.numel() and (type(offset) is not int or not 0 <= offset <= last):
        raise ValueError(
            f"{_WHERE}: a range of {master.numel()} values of {parameter.numel()} must begin at an "
            f"offset from 0 to {last}, got {offset} (number {number})"
        )
    return _Share(codes, flat, master.detach().reshape(-1).contiguous(), offset or 0)


def _layout(shares: Sequence[_Share]) -> Layout:
    numbers: dict[int, int] = {}
    places: list[tuple[int, int] | None] = []
    for one in shares:
        buffer = numbers.setdefault(id(one.codes), len(numbers))
        has_half = any(plane.code_bits < 8 for plane in one.flat.planes)
        places.append((buffer, one.flat.offset) if has_half else None)
    return Layout(
        tuple(one.flat.text for one in shares),
        tuple(one.flat.numel for one in shares),
        tuple((one.start, one.start + one.values.numel()) for one in shares),
        tuple(places),
    )


# ---- maxima and codes


def _is_delayed(share: _Share) -> bool:
    return bool(share.flat.parameter.quantizer.has_given_scale)


def _is_given(job: _Job) -> bool:
    """Return whether the scale of a plane is given, so that it needs no maxima."""
    return _is_delayed(job.share) and job.plane.spec.format.is_tensor_scaled


def _recorded(share: _Share) -> torch.Tensor:
    """Return max|x| of this rank's values, FP32 `[1]`."""
    values = share.values
    return (values.abs().amax().abs() if values.numel() else values.new_zeros(())).reshape(1)


def _jobs(share: _Share) -> list[_Job]:
    made = []
    stop = share.start + share.values.numel()
    first = 0  # of this rank's values
    for matrix, (low, high) in enumerate(share.flat.ranges(share.start, stop)):
        values = share.values[first : first + high - low]
        first += high - low
        for plane in share.flat.planes:
            maxima = plane.maxima(values, low)
            made.append(_Job(share, plane, matrix, values, low, maxima))
    return made


def _statistics(jobs: Sequence[_Job]) -> list[torch.Tensor | None]:
    """Return the statistic that each plane is scaled by, or None.

    One that a quantizer takes over a group of its own, such as that of tensor parallelism, is
    reduced over that too: by one reduction for each group.
    """
    found: list[torch.Tensor | None] = []
    wider: dict[str, list[int]] = {}
    for number, job in enumerate(jobs):
        quantizer = job.share.flat.parameter.quantizer
        if _is_given(job):
            found.append(given_scale(quantizer.scale.detach().reshape(1)))
            continue
        found.append(job.plane.statistic(job.maxima))
        name = getattr(quantizer, "amax_group", None)
        if name is not None and job.plane.spec.needs_tensor_amax:
            wider.setdefault(name, []).append(number)
    for name, numbers in wider.items():
        amaxes = group_amax(torch.cat([found[one] for one in numbers]), name)  # type: ignore[misc]
        for number, amax in zip(numbers, amaxes.split(1), strict=True):
            found[number] = amax
    return found


def _encode(job: _Job, stat: torch.Tensor | None) -> None:
    share, plane, pending = job.share, job.plane, job.share.flat.pending
    if pending is not None:
        pending.buffers[job.matrix].append(plane.small_buffers(job.maxima, stat))
    codes = plane.codes(job.values, job.start, job.maxima, stat)
    start = job.matrix * plane.rows * plane.cols + job.start
    share.codes.write(share.flat, plane, start, codes)


def _whole(share: _Share, group: Any) -> torch.Tensor:
    """Return the masters of all ranks, FP32 `[numel]`: each value is on one of them."""
    import torch.distributed as dist  # not every build of torch has it

    whole = share.values.new_zeros(share.flat.numel)
    whole[share.start : share.start + share.values.numel()] = share.values
    # As integers: a sum with zeros that keeps every bit, of -0 and of a NaN too.
    dist.all_reduce(whole.view(torch.int32), dist.ReduceOp.SUM, group)
    return whole
