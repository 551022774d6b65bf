"""Rules of what ranks share: collectives, messages in parts, cut matrices, flat masters.

Ranks are computed one after the other in this process; the collectives themselves run in a group of
one. What several of them do at once is in `tests/ranks`.
"""

from __future__ import annotations

import itertools
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

import hybridq
from hybridq.distributed import ErrorFeedback, all_gather, all_reduce, all_to_all, reduce_scatter
from hybridq.distributed.collectives.wire import decode_parts, encode_parts, wire_text
from hybridq.distributed.flat.flat_plane import FlatPlane
from hybridq.errors import PlaneError
from hybridq.formats import PlaneSpec
from hybridq.shards import common_unit

from .invariants import equal
from .policy import Wrong, attempt
from .pool import Pool, fuzz
from .quantizers import makers, sound_makers
from .values import HIGH, JUNK, KINDS, Values, junk, plain

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

from cut_ranks import check, parts_of

__all__ = ["RankRules"]

_CALLS = {
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_to_all": all_to_all,
    "all_reduce": all_reduce,
}


@cache
def _group() -> str:
    """The name of a group of one rank, which stays."""
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return str(dist.group.WORLD.group_name)


@st.composite
def _cuts(draw: Any) -> tuple[int, ...]:
    """How many rows or columns each of up to five ranks has."""
    size = st.sampled_from((0, 1, 5, 16, 31, 32, 37, 64, 128))
    return tuple(draw(st.lists(size, min_size=1, max_size=5).filter(any)))


def _spec(made: Any, dtype: torch.dtype) -> PlaneSpec | None:
    """The rowwise spec of a quantizer, or the columnwise one, or None."""
    quantizer, error = attempt(made.build, "quantizer")
    if error is not None:
        return None
    spec = quantizer.rowwise or quantizer.columnwise
    return None if spec is None else PlaneSpec.parse(spec.text).resolve(dtype)


class RankRules(Pool):
    """hybridq.distributed's collectives; hybridq.shards; quantize_master_weights' planes."""

    @fuzz(
        name=st.sampled_from(sorted(_CALLS)),
        made=makers(),
        given=st.one_of(plain(), plain(), plain(), junk()),
        dim=st.sampled_from((0, 0, 0, -1, 1, 2, 7, -3)),
        has_feedback=st.booleans(),
    )
    def exchange(self, name: str, made: Any, given: Any, dim: int, has_feedback: bool) -> None:
        """A collective of one rank gives back what its messages decode to, in any shape."""
        x = given.build() if isinstance(given, Values) else JUNK[given]()
        quantizer, error = attempt(made.build, "quantizer")
        if error is not None:
            return
        options: dict[str, Any] = {"dim": dim} if name in ("all_gather", "reduce_scatter") else {}
        if has_feedback and name in ("reduce_scatter", "all_reduce"):
            options["error_feedback"] = ErrorFeedback()["x"]
        y, error = attempt(lambda: _CALLS[name](x, quantizer, _group(), **options), name)
        if error is not None:
            return
        if y.shape != x.shape or y.dtype != x.dtype:
            raise Wrong(f"{name}: {tuple(x.shape)} of {x.dtype} gave {y.shape} of {y.dtype}")
        is_matrix = x.dim() == 2 and dim in (0, -1, 1) and x.numel()
        if not is_matrix or quantizer.is_stochastic or name == "all_reduce":
            return
        row = hybridq.Quantizer(quantizer.rowwise, None)
        want = row(x.detach().contiguous()).dequantize()
        if not equal(y, want.to(y.dtype)):
            raise Wrong(f"{name}: {made} of {given} is not what its planes decode to")

    @fuzz(
        made=sound_makers(),
        sizes=_cuts(),
        other=st.sampled_from((1, 5, 16, 33, 64)),
        axis=st.sampled_from((0, 1)),
        dtype=st.sampled_from(HIGH),
        kind=st.sampled_from(KINDS),
    )
    def messages(
        self, made: Any, sizes: tuple[int, ...], other: int, axis: int, dtype: Any, kind: str
    ) -> None:
        """Parts for several ranks, put together again, are the parts quantized one by one."""
        quantizer, error = attempt(made.build, "quantizer")
        if error is not None or quantizer.rowwise is None or quantizer.is_stochastic:
            return
        text, error = attempt(lambda: wire_text("messages", quantizer.text, dtype), "wire_text")
        if error is not None:
            return
        total = sum(sizes)
        shape = (total, other) if axis == 0 else (other, total)
        x = Values(shape, dtype, kind).build()
        payload = encode_parts(x, text, axis, sizes)
        shapes = [(n, other) if axis == 0 else (other, n) for n in sizes]
        found = decode_parts(payload, text, shapes, axis, dtype)
        row = hybridq.Quantizer(quantizer.rowwise, None)
        parts = [row(part.contiguous()).dequantize() for part in x.split(sizes, axis)]
        if not equal(found, torch.cat(parts, axis)):
            raise Wrong(f"messages: {text} in parts {sizes} along {axis} are other values")

    @fuzz(
        made=st.tuples(sound_makers(), sound_makers()),
        sizes=_cuts(),
        other=st.sampled_from((1, 16, 33, 51)),
        dim=st.sampled_from((0, 1)),
        dtype=st.sampled_from(HIGH),
        kind=st.sampled_from(KINDS),
    )
    def cut(
        self, made: Any, sizes: tuple[int, ...], other: int, dim: int, dtype: Any, kind: str
    ) -> None:
        """What each rank encodes of its window are the bytes of the planes of the whole."""
        specs = [_spec(one, dtype) for one in made]
        if None in specs or any(spec.format.is_identity for spec in specs):  # type: ignore[union-attr]
            return
        row, col = (spec.plain_text(dtype) for spec in specs)  # type: ignore[union-attr]
        shape = (sum(sizes), other) if dim == 0 else (other, sum(sizes))
        x = Values(shape, dtype, kind).build().contiguous()
        unit = common_unit([(row, dim), (col, 1 - dim)])
        try:
            found, cuts, _ = parts_of(x, sizes, dim, unit, row, col)
        except PlaneError:
            return  # a byte, or a transform, of two ranks
        seed = torch.tensor([7])
        whole = torch.ops.hybridq.encode(x, row.spec, "", seed=seed)
        columns = torch.ops.hybridq.encode(x, "", col.spec, seed=seed)
        for (rows, cols), one in zip(found, cuts, strict=True):
            along = lambda n: (n, other)  # noqa: E731
            across = lambda n: (other, n)  # noqa: E731
            check(whole, rows, specs[0], dim, one, across if dim else along)
            check(columns, cols, specs[1], 1 - dim, one, along if dim else across)

    @fuzz(
        made=sound_makers(),
        shape=st.tuples(*(st.sampled_from((1, 5, 16, 33, 64, 130)) for _ in range(2))),
        ends=st.lists(st.integers(0, 130 * 130), max_size=4),
        is_row=st.booleans(),
        kind=st.sampled_from(KINDS),
    )
    def masters(
        self, made: Any, shape: tuple[int, int], ends: list[int], is_row: bool, kind: str
    ) -> None:
        """A plane of ranges of a flat master, cut anywhere, is the plane of the whole."""
        spec = _spec(made, torch.float32)
        if spec is None or spec.stochastic:
            return
        direction = "rowwise" if is_row else "columnwise"
        plane = FlatPlane(spec, direction, *shape)
        if plane.problem is not None or spec.format.is_identity:
            return
        x = Values(shape, torch.float32, kind).build().contiguous()
        bounds = sorted({0, x.numel(), *(min(end, x.numel()) for end in ends)})
        ranges = [(x.view(-1)[a:b], a) for a, b in itertools.pairwise(bounds)]
        bits = [plane.maxima(*one).view(torch.int32) for one in ranges]
        maxima = torch.stack(bits).amax(0).view(torch.float32)  # as ranks reduce them
        stat = plane.statistic(maxima)
        codes = torch.cat([plane.codes(*one, maxima, stat) for one in ranges])
        found = {"data": plane.data(codes), **plane.small_buffers(maxima, stat)}
        pair = (spec.text, "") if is_row else ("", spec.text)
        rows, cols = shape if is_row else shape[::-1]
        names = [buffer.name for buffer in spec.buffers(rows, cols)]
        whole = torch.ops.hybridq.encode(x, *pair)
        for name, want in zip(names, whole, strict=True):
            own = found[name].contiguous().reshape(want.shape).view(torch.uint8)
            if not torch.equal(own, want.contiguous().view(torch.uint8)):
                raise Wrong(f"masters: {name} of {spec.text}, {direction}, cut at {bounds}")
