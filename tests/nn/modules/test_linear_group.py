"""amax groups: shards of one batch are quantized with the amax of the whole batch."""

from __future__ import annotations

from rank_runs import needs_gloo, run_ranks

pytestmark = needs_gloo

PROGRAM = """
import sys
import torch
import torch.distributed as dist
from linear_model import run
from hybridq.nn import Linear
from hybridq.quantizers import Float8CurrentScalingQuantizer as FP8
from hybridq.quantizers import HybridQuantizer, NVFP4Quantizer
from hybridq.recipes import CustomRecipe

rank, world = int(sys.argv[1]), 2
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=world)


def recipe(group):
    reduce = {"with_amax_reduction": group is not None, "amax_reduction_group": group}

    def factory(role):
        if role.tensor_type == "input" and hybrid:
            return HybridQuantizer(
                rowwise_quantizer=NVFP4Quantizer(**reduce),
                columnwise_quantizer=FP8("e4m3", **reduce),
                columnwise_source="rowwise_dequantized",
            )
        return FP8("e4m3", **reduce)

    return CustomRecipe(factory)


torch.manual_seed(0)
layer = Linear(32, 24, bias=False)
x, dy = torch.randn(64, 32), torch.randn(64, 24)
x[3] *= 7  # the amax of the batch is in the first shard
dy[60] *= 9  # that of the gradient in the second
mine = slice(32 * rank, 32 * rank + 32)
for hybrid in (False, True):
    y, dx, dw = run(layer, x, dy, recipe=recipe(None))
    got = run(layer, x[mine], dy[mine], recipe=recipe(dist.group.WORLD))
    alone = run(layer, x[mine], dy[mine], recipe=recipe(None))
    assert torch.equal(got[0], y[mine]) and torch.equal(got[1], dx[mine])
    assert not torch.equal(alone[0], y[mine]) or not torch.equal(alone[1], dx[mine])
    total = got[2].clone()
    dist.all_reduce(total)
    # The same planes: only the order of the sum over tokens differs.
    assert ((total - dw).abs() <= 64 * 2.0**-24 * (dy.abs().t() @ x.abs()) * 1.1).all()
dist.destroy_process_group()
"""


def test_two_ranks_quantize_as_one(tmp_path):
    run_ranks(PROGRAM, [[str(rank), str(tmp_path / "store")] for rank in range(2)], tmp_path)
