"""Delayed scaling over ranks: one reduction per step, whoever recorded something."""

from __future__ import annotations

from rank_runs import needs_gloo, run_ranks

pytestmark = needs_gloo

PROGRAM = """
import copy
import pickle
import sys
import torch
import torch.distributed as dist
from torch import nn
import hybridq
from delayed_model import scales_of
from hybridq.recipes import DelayedScaling

rank, world = int(sys.argv[1]), 2
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=world)
alone = [dist.new_group([r]) for r in range(world)]
calls = []
from hybridq.nn.delayed_scaling import groups
statistics = sys.modules["hybridq.quantizers.statistics"]
real = statistics.functional_all_reduce
for reducing in (statistics, groups):
    reducing.functional_all_reduce = lambda *a: (calls.append(a[0].numel()), real(*a))[1]


def model():
    torch.manual_seed(0)
    return hybridq.convert(nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(3)))


def train(experts, recipe, mine, steps=3):
    # Expert 0 sees all tokens; of the others each rank uses its own. All tokens are drawn alike.
    optimizer = torch.optim.SGD(experts.parameters(), lr=0.0)
    generator = torch.Generator().manual_seed(3)
    for step in range(steps):
        batches = torch.randn(world, 4, 16, generator=generator) * (1 + step)
        for r in mine:
            with hybridq.autocast(recipe=recipe):
                y, z = experts[0](batches[r]), experts[1 + r](batches[r])
                (y.sum() + z.square().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [scales_of(expert) for expert in experts]


# All ranks together are as one process that sees all of it.
own = DelayedScaling(amax_reduction_group=alone[rank])
want = train(model(), own, range(world))
calls.clear()
got = train(model(), DelayedScaling(), [rank])
assert got == want, (rank, got, want)
# One reduction for each update and group, the first model's unused places included.
assert calls == [2, *calls[1:2] * 3], calls  # ranks agree once, then one reduction a step
calls.clear()
local = train(model(), DelayedScaling(reduce_amax=False), [rank])
assert local != want, local
assert not calls and local[2 - rank] == {}, local
hybridq.update_scaling()  # nothing was recorded
assert train(model(), DelayedScaling(amax_reduction_group=dist.group.WORLD), [rank]) == want
# Models that never ran under a recipe with histories reduce nothing, however many steps they make.
calls.clear()
hybridq.recipes.bind(DelayedScaling())  # asked, and not in force
for recipe in ("mxfp8", "bf16"):
    for fresh in (model(), copy.deepcopy(model()), pickle.loads(pickle.dumps(model()))):
        train(fresh, recipe, [rank], steps=2 + rank)
assert not calls, calls
assert train(model(), DelayedScaling(), [rank]) == want and len(calls) == 4, calls
dist.destroy_process_group()
"""


def test_two_ranks_have_the_scales_of_one_process(tmp_path) -> None:
    run_ranks(PROGRAM, [[str(rank), str(tmp_path / "store")] for rank in range(2)], tmp_path)
