"""torch's private names that hybridq stands on are where they were, and stand in two files."""

from __future__ import annotations

import ast
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from hybridq import _torch_private, _torch_ranks
from places import ROOT
from rank_runs import needs_gloo

PACKAGE = ROOT / "src" / "hybridq"


def test_a_name_that_torch_has_moved_is_named() -> None:
    text = r"must have torch._C._nowhere, which is needed to see whether .* and has moved it"
    for path in ("torch._C._nowhere", "torch._nowhere._nowhere"):
        with pytest.raises(ImportError, match=text.replace("_C._nowhere", path[6:])):
            _torch_private.taken(path, "see whether this is told")


def test_they_do_what_they_are_for() -> None:
    assert _torch_private.graph_task_id() == -1
    assert _torch_private.fp32_matmul_precision() == torch.get_float32_matmul_precision()
    assert _torch_private.tracing_context.try_get() is None
    narrow = torch.ops.aten.narrow.default
    assert _torch_private.has_kernel(narrow.name(), "CompositeImplicitAutograd")
    x, y = torch.zeros(3), torch.ones(3)
    with _torch_private.preserve_versions((x,)):
        _torch_private.copy_each([x], [y])
    assert x._version == 0 and torch.equal(x, y)
    part = _torch_private.part_of(y, (2, 1), (1, 1), 1)
    assert part.shape == (2, 1) and part.data_ptr() == y.data_ptr() + 4
    assert part.untyped_storage()._cdata == y.untyped_storage()._cdata
    with torch.utils._python_dispatch.TorchDispatchMode(), _torch_private.without_modes():
        assert _torch_private.num_dispatch_modes() == 0


def test_what_was_compiled_is_seen(monkeypatch) -> None:
    import torch._dynamo.eval_frame as frame

    assert isinstance(frame.cached_backends, dict)
    torch._dynamo.disable(len)
    torch.compile(len, backend="eager")
    assert _torch_private.has_compiled()
    for backends, is_compiled in (({}, False), ({1: None}, False), ({1: len}, True)):
        monkeypatch.setattr(frame, "cached_backends", backends)
        assert _torch_private.has_compiled() == is_compiled
    monkeypatch.delattr(frame, "cached_backends")
    assert _torch_private.has_compiled()  # not known
    monkeypatch.delitem(sys.modules, frame.__name__)
    assert not _torch_private.has_compiled()


@needs_gloo
def test_units_have_groups_of_parameters() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        unit = fully_shard(nn.Linear(8, 8))
        (group,) = _torch_ranks.param_groups(unit)
        names = [one.sharded_param.shape for one in group.fsdp_params]
        assert names == [(8, 8), (8,)] and group.mesh_info is not None
        assert hasattr(group, "post_forward_mesh_info")
        sharded = unit.weight
        assert _torch_ranks.sharded_of(sharded) is None
        assert _torch_ranks.is_fsdp2_shard(sharded)
        assert not _torch_ranks.is_fsdp2_shard(sharded.detach())
        for _ in range(2):
            unit.unshard()
            found = _torch_ranks.sharded_of(unit.weight)
            assert found is group.fsdp_params[0] and found.sharded_param is sharded
            unit.reshard()
        assert _torch_ranks.sharded_of(torch.zeros(2)) is None
    finally:
        dist.destroy_process_group()


def test_they_are_taken_in_two_files() -> None:
    for file in PACKAGE.rglob("*.py"):
        if file.name in ("_torch_private.py", "_torch_ranks.py"):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
                private = [part for part in node.module.split(".") if part[0] == "_"]
                private += [one.name for one in node.names if one.name.startswith("_")]
                assert not private, f"{file}: {private} stands in _torch_private.py"
            elif isinstance(node, ast.Attribute) and node.attr.startswith("_"):
                base = ast.unparse(node.value)
                is_torchs = base == "torch" or base.startswith("torch.")
                # Tensors' own protocol, `torch.Tensor._make_wrapper_subclass`, stands anywhere.
                is_private = is_torchs and base != "torch.Tensor" and node.attr[:2] != "__"
                assert not is_private, f"{file}: {base}.{node.attr} stands in _torch_private.py"
