"""amax over a process group: `python amax_program.py RANK WORLD STORE reduced`."""

from __future__ import annotations

import torch
import torch.distributed as dist
from rank_program import main

import hybridq


def reduced() -> None:
    """The codes of a half of the rows, and the amax, are those of the whole."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    whole = torch.randn(2 * 24, 48)
    if rank == 1:
        whole = whole.clone()
    shard = whole[24 * rank : 24 * rank + 24]
    out = {}
    for name, make in (
        ("fp8", hybridq.Float8CurrentScalingQuantizer),
        ("nvfp4", hybridq.NVFP4Quantizer),
    ):
        q = make(with_amax_reduction=True, amax_reduction_group=dist.group.WORLD)
        out[name] = torch.equal(q(shard).rowwise.data, make()(whole).rowwise.data[24 * rank :][:24])
        hybrid = hybridq.HybridQuantizer(
            rowwise_quantizer=hybridq.MXFP8Quantizer(),
            columnwise_quantizer=q,
            columnwise_source="rowwise_dequantized",
        )
        seen = hybridq.MXFP8Quantizer()(whole).dequantize()
        stat = hybrid(shard).columnwise
        want = make()(seen).columnwise
        key = "amax" if stat.amax is not None else "scale"
        out[name + " decoded"] = torch.equal(stat.buffers[key], want.buffers[key])
    # A row-scaled plane beside it keeps its rows' own amax; only the other one is reduced.
    rows = hybridq.NVFP4Quantizer(row_scaled_nvfp4=True)
    q = hybridq.NVFP4Quantizer(with_amax_reduction=True, amax_reduction_group=dist.group.WORLD)
    made = hybridq.HybridQuantizer(rowwise_quantizer=rows, columnwise_quantizer=q)(shard)
    out["rows"] = torch.equal(made.rowwise.amax, rows(whole).rowwise.amax[24 * rank :][:24])
    out["beside rows"] = torch.equal(made.columnwise.amax, whole.abs().max().reshape(1))
    poisoned = shard.clone()
    if rank == 1:
        poisoned[0, 0] = float("nan")
    q = hybridq.Float8CurrentScalingQuantizer(
        with_amax_reduction=True, amax_reduction_group=dist.group.WORLD
    )
    # Many at once: each is reduced, one after the other, beside one that is not.
    many = [q, hybridq.MXFP8Quantizer(), make(with_amax_reduction=True, amax_reduction_group="0")]
    parts = [shard, shard[:8], shard[:, :32]]
    made = hybridq.multi_tensor_quantize(parts, many)
    out["many"] = all(
        torch.equal(one.rowwise.data, quantizer(part).rowwise.data)
        for one, quantizer, part in zip(made, many, parts, strict=True)
    )
    out["many of the whole"] = torch.equal(
        made[2].rowwise.amax, whole[:, :32].abs().max().reshape(1)
    )
    out["nan reaches every rank"] = bool(q(poisoned).dequantize().isnan().all())
    assert all(out.values()), out


if __name__ == "__main__":
    main(globals())
