"""Ranks of a cut matrix, one after the other in one process, and a comparison with the whole."""

from __future__ import annotations

import pytest
import torch

from hybridq.kernels.choice import EncodeRequest
from hybridq.shards import Cut, cut, encode_cut

__all__ = ["check", "parts_of"]


def parts_of(x, sizes, dim, unit, row, col, source="original"):
    """Return what each rank makes, its window, and how many reductions there were."""
    cuts = [Cut("group", rank, tuple(sizes), dim, unit) for rank in range(len(sizes))]
    windows = [
        one.padded(part.contiguous(), dim)
        for one, part in zip(cuts, x.split(list(sizes), dim), strict=True)
    ]
    rest = EncodeRequest(col_source=source)
    seed = torch.tensor([7])
    rest = rest._replace(seed=seed)
    told: list[list[torch.Tensor]] = []  # by reduction, what each rank gave

    def run(rank, known):
        own: list[torch.Tensor] = []

        def reduce(bits, op, group):
            assert (op, group, bits.dtype) == ("max", "group", torch.int32)
            own.append(bits.clone())
            return known[len(own) - 1] if len(own) <= len(known) else bits

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cut, "functional_all_reduce", reduce)
            made = encode_cut(windows[rank], row, col, rest, cuts[rank])
        return made, own

    known: list[torch.Tensor] = []
    while True:  # what is reduced second depends on what was reduced first
        runs = [run(rank, known) for rank in range(len(sizes))]
        told = [own for _, own in runs]
        counts = {len(own) for own in told}
        assert len(counts) == 1, "every rank reduces, or none"
        if counts == {len(known)}:
            return [made for made, _ in runs], cuts, len(known)
        place = len(known)
        known.append(torch.stack([own[place] for own in told]).amax(0))


def check(whole, part, spec, axis, one, matrix):
    """Compare the buffers of a window with those of the whole plane, entry by entry."""
    first, last = one.range()
    if first == last:
        return
    if spec.signs is not None and axis == 1 and last == sum(one.sizes):
        # The last 16 values are transformed together with the zeros that fill them.
        last = -(-last // 16) * 16
    low = first - one.lacks()[0]
    empty, full = spec.buffers(*matrix(0)), spec.buffers(*matrix(13440))
    for index, (a, b) in enumerate(zip(empty, full, strict=True)):
        dim = min(axis, len(b.shape) - 1)
        count = b.shape[dim] - a.shape[dim]
        if not count:
            assert torch.equal(whole[index].view(torch.uint8), part[index].view(torch.uint8))
            continue
        step = 13440 // count
        start, stop = first // step, -(-last // step)
        ours = part[index].narrow(dim, start - low // step, stop - start).clone()
        theirs = whole[index].narrow(dim, start, stop - start).clone()
        if index == 0 and step == 2:  # of a byte on two ranks, the own half
            for codes in (ours, theirs):
                if first % 2:
                    codes.select(dim, 0).bitwise_and_(0xF0)
                if last % 2:
                    codes.select(dim, -1).bitwise_and_(0x0F)
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)), b.name
        if index == 0:
            behind = part[0].shape[dim] - (stop - low // step)
            assert not part[0].narrow(dim, 0, start - low // step).view(torch.uint8).any()
            rest = part[0].narrow(dim, stop - low // step, behind)
            assert not rest.view(torch.uint8).any(), "codes of other ranks' entries are zero"
