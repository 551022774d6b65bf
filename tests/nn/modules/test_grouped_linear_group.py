"""GroupedLinear with an amax group: each group's amax is that of all ranks, as a loop's is."""

from __future__ import annotations

from rank_runs import needs_gloo, run_ranks

pytestmark = needs_gloo

PROGRAM = """
import sys
import torch
import torch.distributed as dist
from hybridq import CustomRecipe
from hybridq.formats import DEFAULT_SIGNS, PlaneSpec, format
from hybridq.quantizers import Float8CurrentScalingQuantizer as FP8
from hybridq.quantizers import HybridQuantizer, NVFP4Quantizer, Quantizer
from grouped_model import FEATURES, grouped, run_grouped, run_loop, same, singles

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
group = dist.group.WORLD
reduce = {"with_amax_reduction": True, "amax_reduction_group": group}
transformed = PlaneSpec(format("nvfp4"), True, DEFAULT_SIGNS)


def factory(role):
    if kind == "transformed":
        return Quantizer(transformed, transformed, amax_group=group.group_name)
    if kind == "hybrid" and role.tensor_type != "grad_output":
        return HybridQuantizer(
            rowwise_quantizer=NVFP4Quantizer(**reduce),
            columnwise_quantizer=FP8("e4m3", **reduce),
            columnwise_source="rowwise_dequantized",
        )
    return FP8("e4m3", **reduce)


factory.reads_names = False
sizes = [(5, 0, 40), (7, 12, 2)][rank]  # of each rank its own, an empty group on one of them
torch.manual_seed(rank)
x, dy = torch.randn(sum(sizes), FEATURES[0]) * (1 + 4 * rank), torch.randn(sum(sizes), FEATURES[1])
module = grouped(3, torch.float32)
for kind in ("fp8", "hybrid", "transformed"):
    recipe = CustomRecipe(factory)
    want = run_loop(singles(module), x, sizes, dy, recipe)
    same(run_grouped(module, x, torch.tensor(sizes), dy, recipe), want)
    alone = run_grouped(module, x, torch.tensor(sizes), dy, "fp8_current")
    assert rank or not torch.equal(alone[0], want[0])  # the larger tokens are those of rank 1
dist.destroy_process_group()
"""


def test_two_ranks_share_the_amax_of_each_group(tmp_path):
    run_ranks(PROGRAM, [[str(rank), str(tmp_path / "store")] for rank in range(2)], tmp_path)
