"""A dense GEMM in one size with all prepared that no tensor changes: addresses are all it looks up.

The first product of a size is planned and launched as any other; what it launched is kept with the
strides that it was planned for. Where a later one has the same strides and aligned addresses, the
same kernels are launched with its addresses.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final, NamedTuple

import torch

from ..choice import GemmArgs, Operand, OpQuery
from ..decoded import row_factors
from ..inputs import is_current, made, stream_of
from .direct import ALIGNED, Direct
from .form import form_of
from .plan import plan_gemm
from .plan_parts import Launch

__all__ = ["PreparedGemm", "planner"]

#: Layouts of one size: more than planes of one model have.
_MOST: Final = 64


class _Again(NamedTuple):
    """One launch of a product.

    Args:
        launch: of the kernel.
        arguments: of the kernel, in its order.
        places: which of them are addresses, and of what: a place in the list of `_addresses`.
    """

    launch: Direct
    arguments: list[Any]
    places: tuple[tuple[int, int], ...]


class _Kept(NamedTuple):
    """What a product of one size and layout launches.

    Args:
        launches: one after the other.
        parts: shape of the FP32 shares of K between two launches, or None.
        watch: says whether somebody has to be told of launches.
    """

    launches: tuple[_Again, ...]
    parts: tuple[int, ...] | None
    watch: Any


class PreparedGemm:
    """Multiplies planes of two specs in one size, with the bits of the backend's `gemm`.

    Args:
        query: of the GEMM, on an NVIDIA GPU.
    """

    __slots__ = ("_dtype", "_kept", "_sizes", "_sources")

    def __init__(self, query: OpQuery) -> None:
        if query.row is None or query.col is None or query.sizes is None:
            raise ValueError("PreparedGemm: the query must have two planes and sizes")
        self._sizes, self._dtype = query.sizes[:2], query.dtype
        #: Of each operand, the buffers that are codes, scales and factors to the kernels.
        depth = query.sizes[2]
        self._sources = [_sources(row_factors(spec, depth)) for spec in (query.row, query.col)]
        self._kept: dict[Any, _Kept] = {}

    def __call__(self, a: Operand, b: Operand, args: GemmArgs) -> torch.Tensor:
        """Return `a @ b.T`, with what `args` says of the rest.

        Args:
            a, b: of the query's specs and, as a rule, sizes.
            args: the rest.
        """
        (m, n), dtype, device, bias = self._sizes, self._dtype, a.buffers[0].device, args.bias
        buffers = [*a.buffers, *b.buffers]
        is_usual = (
            a.rows == m
            and b.rows == n
            and args.accumulate_into is None
            and args.out_dtype is dtype
            and (bias is None or (bias.dtype is dtype and bias.stride() == (1,)))
            and (args.work is not None or is_current(device))  # where there is work, it is
        )
        key = None
        if is_usual:
            strides = [buffer.stride() for buffer in buffers]
            key = (device.index, bias is None, a.cols, *strides)
            kept = self._kept.get(key)
            if kept is not None and not kept.watch():
                addresses = [made(buffer) for buffer in buffers]
                out = torch.empty(m, n, dtype=dtype, device=device)
                parts = out
                if kept.parts is not None:
                    parts = torch.empty(kept.parts, dtype=torch.float32, device=device)
                end = made(out)
                addresses += (end if bias is None else made(bias), end, made(parts))
                if _are_aligned(addresses):
                    stream = stream_of(device) if args.work is None else args.work.stream
                    for launch, arguments, places in kept.launches:
                        own = arguments.copy()
                        for at, source in places:
                            own[at] = addresses[source]
                        launch(own, stream)
                    return out
        launcher = import_module(".launch", __package__)  # Triton is imported with the first
        result, launches = plan_gemm(a, b, args)
        kernels = launcher.run(launches, device)
        if key is not None and launches and kernels and len(self._kept) < _MOST:
            self._keep(key, launcher, launches, kernels, (a, b, bias, result))
        return result

    def _keep(
        self,
        key: Any,
        launcher: Any,
        launches: tuple[Launch, ...],
        kernels: tuple[Any, ...],
        tensors: tuple[Operand, Operand, torch.Tensor | None, torch.Tensor],
    ) -> None:
        """Keep what was launched, if it can be launched again with other addresses."""
        a, b, bias, result = tensors
        directs = launcher.direct(launches, kernels, result.device)
        if not directs:
            return
        shares = launches[-1].arguments["parts"] if len(launches) == 2 else None
        last = result if bias is None else bias
        given = [*a.buffers, *b.buffers, last, result, result if shares is None else shares]
        addresses = [made(tensor) for tensor in given]
        if not _are_aligned(addresses):
            return
        count = len(given)
        again = []
        for launch, direct in zip(launches, directs, strict=True):
            sides = ((0, self._sources[0]), (len(a.buffers), self._sources[1]))
            if launch.arguments["IS_SWAPPED"]:
                sides = (sides[1], sides[0])
            of = {"bias": count - 3, "into": count - 2, "out": count - 2, "parts": count - 1}
            if launch.kernel == "dense":
                of["out"] = count - 1
            for name, (begin, sources) in zip(("left", "right"), sides, strict=True):
                for what, source in zip(("data", "scale", "factor"), sources, strict=True):
                    of[f"{name}_{what}"] = begin + source
            order, _ = launcher.names(launch.kernel)
            arguments: list[Any] = [launch.arguments[name] for name in order]
            places = []
            for at, name in enumerate(order):
                if isinstance(arguments[at], torch.Tensor):
                    if made(arguments[at]) != addresses[of[name]]:
                        return  # of a copy, which another product has not
                    arguments[at] = 0
                    places.append((at, of[name]))
            again.append(_Again(direct, arguments, tuple(places)))
        shape = None if shares is None else tuple(shares.shape)
        self._kept[key] = _Kept(tuple(again), shape, launcher.is_watched)


def _sources(spec: Any) -> tuple[int, int, int]:
    """Return which buffers of a plane a kernel takes as codes, scales and factors.

    Where a plane has none of one, the kernel takes the codes and does not read them.
    """
    form = form_of(spec)
    if form.code.bits >= 16:
        return 0, 0, 0
    last = len(spec.buffers(1, 1)) - 1
    return 0, 1 if form.scale.bits else 0, last if form.bound else 0


def _are_aligned(addresses: list[int]) -> bool:
    """Return whether all addresses are such as the kernels were compiled for."""
    found = 0
    for address in addresses:
        found |= address
    return found % ALIGNED == 0


def planner(query: OpQuery) -> PreparedGemm | None:
    """Return what multiplies planes of a query's specs in its sizes, or None: nothing is prepared.

    Args:
        query: a GEMM on a GPU.
    """
    if query.row is None or query.col is None or query.sizes is None or 0 in query.sizes:
        return None
    if query.chip is None or query.chip.kind != "cuda" or query.chip.is_rocm:
        return None
    return PreparedGemm(query)
