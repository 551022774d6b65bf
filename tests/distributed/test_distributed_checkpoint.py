"""torch.distributed.checkpoint of sharded models: see `dcp_program.py` for what each rank runs."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import hybridq
from hybridq import CheckpointError
from hybridq.distributed import ScalingHistory
from rank_runs import needs_gloo, run

PLAIN = """
import sys
import torch
from safetensors.torch import load_file
from torch import nn

layers = (nn.Linear(40, 100), nn.Tanh(), nn.Linear(100, 36), nn.Tanh(), nn.Linear(36, 3))
model = nn.Sequential(*layers).bfloat16()
model.load_state_dict(load_file(sys.argv[1] + "/model.safetensors"))
whole = torch.load(sys.argv[1] + "/nvfp4/expected")[0]
assert all(torch.equal(whole[name], tensor) for name, tensor in model.state_dict().items())
assert "hybridq" not in sys.modules
"""


@pytest.mark.more
@needs_gloo
def test_runs_go_on_with_another_number_of_ranks(tmp_path) -> None:
    def go(world: int, *names: str) -> None:
        run(world, tmp_path / f"store{world}", *names, program="dcp_program.py")

    two, four = tmp_path / "two", tmp_path / "four"
    go(2, f"save={two}", "full")
    go(4, f"resume={two}", f"save={four}", "full")
    go(1, f"resume={four}", f"without_history={four}", f"export={four}")
    subprocess.run([sys.executable, "-c", PLAIN, str(four)], check=True, timeout=120)


@needs_gloo
def test_a_killed_save_leaves_the_previous_checkpoint(tmp_path) -> None:
    run(2, tmp_path / "store", f"killed={tmp_path}", program="dcp_program.py", leaves=1)
    last, before = tmp_path / "step-1", tmp_path / "step-0"
    assert list(last.glob("*.distcp")) and not (last / ".metadata").exists()
    reader = dcp.FileSystemReader(before)
    wanted = {
        f"model.{name}": torch.full_like(tensor, torch.nan)
        for name, tensor in nn.Sequential(nn.Linear(40, 100)).bfloat16().state_dict().items()
    }
    dcp.load(wanted, storage_reader=reader, no_dist=True)
    assert all(tensor.isfinite().all() for tensor in wanted.values())


def test_histories_travel_as_one_value() -> None:
    def model(name: str = "one") -> nn.Module:
        return hybridq.convert(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))

    one, other = model(), model()
    with hybridq.autocast(recipe="fp8_delayed"):
        one(torch.arange(32.0).view(4, 8)).sum().backward()
    hybridq.update_scaling(one)
    saved = ScalingHistory(torch.compile(one)).state_dict()
    ScalingHistory(other).load_state_dict(saved)
    kept, got = (hybridq.state_dict_with_history(m) for m in (one, other))
    scaling = {name for name in kept if ".scaling." in name}
    assert scaling and scaling == {name for name in got if ".scaling." in name}
    assert all(torch.equal(kept[name], got[name]) for name in scaling)
    with pytest.raises(CheckpointError, match="no module '1'"):
        ScalingHistory(other[:1]).load_state_dict(saved)
    with pytest.raises(CheckpointError, match="must be bytes that state_dict"):
        ScalingHistory(other).load_state_dict({})
    with pytest.raises(TypeError, match=r"ScalingHistory: model must be an nn.Module, got int"):
        ScalingHistory(3)


def test_histories_have_the_names_of_a_model_that_is_not_wrapped() -> None:
    """Activation checkpointing and compilation put parts into names; both ways go on."""

    def model(wraps: bool) -> nn.Module:
        inner = hybridq.convert(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
        if wraps:
            inner[0], inner[1] = checkpoint_wrapper(inner[0]), torch.compile(inner[1])
        return nn.Sequential(inner)

    for wraps in (False, True):
        one, other = model(wraps), model(not wraps)
        for either in (one, other):
            names = {name.partition(":")[0] for name in ScalingHistory(either)._states()}
            assert names == {"0.0", "0.1"}
        with hybridq.autocast(recipe="fp8_delayed"):
            plain = one[0][1]._orig_mod if wraps else one[0][1]
            plain(one[0][0](torch.arange(32.0).view(4, 8))).sum().backward()
        hybridq.update_scaling(one)
        saved = ScalingHistory(one)
        ScalingHistory(other).load_state_dict(saved.state_dict())
        mine, got = (
            [t for s in ScalingHistory(m)._states().values() for t in s.exported().values()]
            for m in (one, other)
        )
        assert len(mine) == len(got) > 0
        assert all(torch.equal(a, b) for a, b in zip(mine, got, strict=True))


@needs_gloo
def test_histories_leave_out_data_parallel_wrappers_wherever_they_are() -> None:
    """A compiled DistributedDataParallel, one around a compiled model, and one around a part."""
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        parallel = nn.parallel.DistributedDataParallel
        model = hybridq.convert(nn.Sequential(nn.Sequential(nn.Linear(8, 8)), nn.Linear(8, 8)))
        model.add_module("module", hybridq.Linear(8, 8))  # a name that is the model's own
        with hybridq.autocast(recipe="fp8_delayed"):
            model(torch.arange(32.0).view(4, 8)).sum().backward()
        names = set(ScalingHistory(model)._states())
        assert {name.partition(":")[0] for name in names} == {"0.0", "1", "module"}
        for wrapped in (
            parallel(model),
            torch.compile(parallel(model)),
            parallel(torch.compile(model)),
        ):
            assert set(ScalingHistory(wrapped)._states()) == names
            ScalingHistory(model).load_state_dict(ScalingHistory(wrapped).state_dict())
        model[0] = parallel(model[0])
        assert set(ScalingHistory(model)._states()) == names
    finally:
        torch.distributed.destroy_process_group()


def test_a_state_dict_with_histories_goes_through_checkpointing_wrappers() -> None:
    def model(wraps: bool) -> nn.Module:
        inner = hybridq.convert(nn.Sequential(nn.Linear(8, 8)))
        return nn.Sequential(checkpoint_wrapper(inner[0]) if wraps else inner[0])

    for first, second in ((True, True), (True, False), (False, True)):
        one, other = model(first), model(second)
        with hybridq.autocast(recipe="fp8_delayed"):
            one(torch.arange(32.0).view(4, 8)).sum().backward()
        hybridq.update_scaling(one)
        saved = hybridq.state_dict_with_history(one)
        assert all(name.startswith(("0.weight", "0.bias", "0.scaling.")) for name in saved)
        other.load_state_dict(saved)
        assert saved.keys() == hybridq.state_dict_with_history(other).keys()
        for mine, got in zip(
            saved.values(), hybridq.state_dict_with_history(other).values(), strict=True
        ):
            assert torch.equal(mine, got)
