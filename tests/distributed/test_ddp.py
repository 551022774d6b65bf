"""DDP, and FSDP of flat parameters, against one process, bit for bit: see `ddp_program.py`."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

import hybridq
from rank_runs import needs_gloo, run

pytestmark = needs_gloo


def test_two_ranks_are_one_process(tmp_path) -> None:
    names = ("recipes", "policies", "quantized", "main_grad", "uneven", "differ")
    run(2, tmp_path / "store", *names, program="ddp_program.py")


@pytest.mark.parametrize("is_own", [True, False])
@pytest.mark.parametrize("made", ["quantized", "prepared", "both"])
def test_what_no_flat_parameter_can_hold_is_refused(made, is_own, tmp_path) -> None:
    """Before anything is changed; modules that are left out are none of its business."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/s", rank=0, world_size=1)
    try:
        with hybridq.quantized_model_init("mxfp8", enabled=made != "prepared"):
            layer = hybridq.Linear(40, 48)
        if made != "quantized":
            hybridq.distributed.prepare_fsdp2(layer)
        model, x = nn.Sequential(layer, nn.Linear(48, 8)), torch.randn(3, 40)
        want = model(x)
        options = {"device_id": torch.device("cpu"), "use_orig_params": is_own}
        with pytest.raises(
            RuntimeError, match=r"made of plain ones, got one that is .* \[48, 40\]"
        ):
            FullyShardedDataParallel(model, **options)
        assert torch.equal(model(x), want)
        sharded = FullyShardedDataParallel(model, ignored_modules=[layer], **options)
        assert torch.equal(sharded(x), want)
    finally:
        dist.destroy_process_group()


@pytest.mark.more
def test_flat_parameters_of_two_ranks_are_one_process(tmp_path) -> None:
    run(2, tmp_path / "store", "flat_parameters", program="ddp_program.py")


@pytest.mark.slow
def test_four_ranks_are_one_process(tmp_path) -> None:
    run(4, tmp_path / "store", "recipes", program="ddp_program.py")
