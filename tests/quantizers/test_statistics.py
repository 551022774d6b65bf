"""The amax over a process group is that of the very planes that are encoded."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import hybridq
from hybridq.formats import PlaneSpec
from hybridq.nn import GroupedLinear
from hybridq.quantizers import Float8CurrentScalingQuantizer as FP8
from hybridq.quantizers import HybridQuantizer
from hybridq.recipes import CustomRecipe
from linear_model import equal

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="this torch has no gloo"
)


@pytest.fixture
def alone():
    """A process group of this process: what it reduces does not change."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def drawn(group=None) -> HybridQuantizer:
    """Stochastic rows, and columns of one scale made of what the rows decode to."""
    reduce = {"with_amax_reduction": group is not None, "amax_reduction_group": group}
    return HybridQuantizer(
        rowwise_quantizer=replace(FP8("e4m3", **reduce), rowwise=PlaneSpec.parse("mxfp8;sr")),
        columnwise_quantizer=FP8("e4m3", **reduce),
        columnwise_source="rowwise_dequantized",
    )


def matrix(seed: int = 0) -> torch.Tensor:
    """A matrix whose largest value is rounded up or down by chance."""
    x = 0.1 * torch.randn(48, 64, generator=torch.Generator().manual_seed(seed))
    x[5, 7] = 17.0 * 15.5  # halfway between two codes
    return x


def test_statistics_draw_what_encode_draws(monkeypatch) -> None:
    # The function of the same name hides the module.
    module = importlib.import_module("hybridq.quantizers.statistics")
    monkeypatch.setattr(module, "group_amax", lambda amax, group: amax)
    row = PlaneSpec.parse("mxfp8;sr")
    col = PlaneSpec.parse("fp8_e4m3")
    seed = torch.tensor([11], dtype=torch.int64)
    seen = set()
    for stream in range(8):
        x = matrix()
        row_stat, col_stat = module.statistics(
            x,
            row.plain_text(),
            col.plain_text(),
            group="one",
            col_source="rowwise_dequantized",
            seed=seed,
            row_stream=stream,
        )
        buffers = torch.ops.hybridq.encode(x, row.text, "", row_stat, None, seed, row_stream=stream)
        decoded = torch.ops.hybridq.decode(buffers, row.text, *x.shape, x.dtype)
        assert torch.equal(col_stat, decoded.abs().max().reshape(1))
        seen.add(col_stat.item())
    assert len(seen) > 1, "the streams draw alike: nothing was tested"


@pytest.mark.parametrize("seed", range(3))
def test_a_group_of_one_changes_no_plane(alone, seed) -> None:
    made = []
    for group in (None, alone):
        torch.manual_seed(seed)
        tensor = drawn(group)(matrix(seed))
        made.append([*tensor.rowwise.buffers.values(), *tensor.columnwise.buffers.values()])
    assert equal(*made)


@pytest.mark.parametrize("seed", range(6))  # streams draw alike in half of the cases
@pytest.mark.parametrize("kind", ["Linear", "GroupedLinear"])
def test_a_group_of_one_changes_no_step(alone, kind, seed) -> None:
    made = []
    for group in (None, alone):
        torch.manual_seed(seed)
        layer = hybridq.Linear(64, 32) if kind == "Linear" else GroupedLinear(2, 64, 32)
        rest = () if kind == "Linear" else ([20, 28],)
        x = matrix().requires_grad_()
        recipe = CustomRecipe(lambda role, group=group: drawn(group))
        with hybridq.autocast(recipe=recipe):
            y = layer(x, *rest)
        y.square().sum().backward()
        made.append([y.detach(), x.grad, *(p.grad for p in layer.parameters())])
    assert equal(*made)
