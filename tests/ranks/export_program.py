"""Sharded models that are exported: `python export_program.py RANK WORLD STORE NAME=FOLDER...`.

The files must be those of the same model in one process, byte for byte.
"""

from __future__ import annotations

import copy
import os
import warnings
import weakref
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_program import main
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import hybridq
from hybridq.distributed import prepare_fsdp2
from hybridq.ptq import in_memory


class Block(nn.Module):
    """Siblings that share a scale, rows that no number of ranks divides, a norm and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(64, 70)
        self.up_proj = nn.Linear(64, 70)
        self.down_proj = nn.Linear(128, 33)
        self.norm = nn.LayerNorm(64)
        self.register_buffer("scale", torch.tensor([2]))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))


def plain(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    return Model().to(dtype)


def sharded(model: nn.Module, mesh: Any = None) -> nn.Module:
    for block in model.layers:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def files(folder: Path) -> dict[str, bytes]:
    """The files of a folder but for its journal, which says when they were made."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def check(model: nn.Module, whole: nn.Module, folder: str, what: str, **options: Any) -> None:
    """The same files, and on every rank the same word of them."""
    targets = [Path(folder) / f"{what}-{kind}" for kind in ("ranks", "one")]
    done = hybridq.export(model, targets[0], **options)
    assert done.target == targets[0], done
    if dist.get_rank() == 0:
        hybridq.export(whole, targets[1], **options)
        mine, want = map(files, targets)
        assert mine.keys() == want.keys() and any("safetensors" in name for name in mine)
        for name, data in want.items():
            assert mine[name] == data, f"{what}: {name} differs"
    dist.barrier()


#: Of scales of tensors, of blocks, and both planes.
LAYOUTS = (
    {"layout": "modelopt", "format": "nvfp4"},
    {"layout": "compressed-tensors", "format": "mxfp8", "exclude": ["layers.0.*"]},
    {"layout": "hybridq", "format": hybridq.quantizer("mxfp8", "nvfp4")},
)


def fsdp2(folder: str) -> None:
    for number, options in enumerate(LAYOUTS):
        prepares = number != 1
        whole = hybridq.convert(plain()) if prepares else plain()
        model = copy.deepcopy(whole)
        sharded(prepare_fsdp2(model) if prepares else model)
        check(model, whole, folder, f"fsdp2-{number}", **options)
        assert all(isinstance(one, DTensor) for one in model.parameters())


def quantized(folder: str) -> None:
    """Shards in low precision keep their codes: of an amax that nothing else gives."""
    for recipe, layout in (("mxfp8", "modelopt"), ("nvfp4", "modelopt")):
        with hybridq.quantized_model_init(recipe):
            whole = hybridq.convert(plain())
        for module in whole.modules():
            weight = getattr(module, "weight", None)
            if isinstance(weight, hybridq.QuantizedTensor) and recipe == "nvfp4":
                plane = weight.tensor_storage.rowwise
                assert plane.amax is not None
                plane.amax.mul_(1.25)
        model = sharded(prepare_fsdp2(copy.deepcopy(whole)))
        check(model, whole, folder, f"quantized-{recipe}", layout=layout)
        check(model, whole, folder, f"decoded-{recipe}", layout="bf16")


def tensor_parallel(folder: str) -> None:
    """Rows and columns of weights on ranks; with four ranks, rows of these on others."""
    world = dist.get_world_size()
    shape = (world // 2, 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    styles = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel()}
    for converts in (False, True):
        whole = hybridq.convert(plain()) if converts else plain()
        model = copy.deepcopy(whole)
        for block in model.layers:
            parallelize_module(block, mesh["tp"], {**styles, "down_proj": RowwiseParallel()})
        if world > 2:
            sharded(model, mesh["dp"])
        check(model, whole, folder, f"tp-{converts}", **LAYOUTS[0])


def one_at_a_time(folder: str) -> None:
    """No rank has two whole tensors, in any pass."""
    alive: list[Any] = []
    gather = DTensor.full_tensor

    def counted(self: DTensor, **options: Any) -> torch.Tensor:
        found = gather(self, **options)
        assert not any(one() is not None for one in alive), "two whole tensors"
        alive[:] = [weakref.ref(found)]
        counts.append(found.numel())
        return found

    counts: list[int] = []
    DTensor.full_tensor = counted
    try:
        model = sharded(plain())
        hybridq.export(model, Path(folder) / "counted", **LAYOUTS[0])
    finally:
        DTensor.full_tensor = gather
    assert len(counts) >= len(list(model.parameters()))
    assert not any(one() is not None for one in alive)


def mixture(folder: str) -> None:
    """Stacks of experts get the names that transformers saves, and are never all gathered."""
    import hf_models

    torch.manual_seed(0)
    whole = hf_models.make("mixtral")
    model = copy.deepcopy(whole)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    check(model, whole, folder, "mixture", layout="compressed-tensors", format="nvfp4")


def quantized_stacks(folder: str) -> None:
    """Experts that are quantized in their shards keep their codes, in either orientation."""
    import hf_models

    for name in ("mixtral", "gpt_oss"):
        torch.manual_seed(0)
        with hybridq.quantized_model_init("nvfp4"):
            whole = hybridq.convert(hf_models.make(name), least_width=0)
        model = prepare_fsdp2(copy.deepcopy(whole))
        low = [one for one in model.parameters() if hasattr(one, "held") and one.dim() == 3]
        assert len(low) == 2 * len(model.model.layers), len(low)
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        check(model, whole, folder, f"stacks-{name}", layout="compressed-tensors", format="nvfp4")


class Stops(hybridq.ptq.Observer):
    """Is interrupted in the second file."""

    count = 0

    def shard(self, name: str, what: str) -> None:
        self.count += 1
        if self.count > 1:
            raise KeyboardInterrupt


def resumed(folder: str) -> None:
    in_memory._SHARD_NBYTES = 20_000
    whole = plain()
    model = sharded(copy.deepcopy(whole))
    target = Path(folder) / "stopped-ranks"
    try:
        hybridq.export(model, target, observer=Stops(), **LAYOUTS[0])
    except KeyboardInterrupt:
        assert dist.get_rank() == 0
    except hybridq.CheckpointError as found:
        assert "KeyboardInterrupt" in str(found), found
    else:
        raise AssertionError("not stopped")
    done = hybridq.export(model, target, **LAYOUTS[0])
    assert done.num_kept == 1, done.num_kept
    check(model, whole, folder, "stopped", **LAYOUTS[0])


def dies(folder: str) -> None:
    """The other rank is gone in the midst: an error, and what is finished stays."""
    in_memory._SHARD_NBYTES = 20_000
    model, whole = sharded(plain()), plain()
    gather, count = DTensor.full_tensor, []

    def ends(self: DTensor, **options: Any) -> torch.Tensor:
        count.append(1)
        if dist.get_rank() == 1 and len(count) > 5:
            os._exit(1)
        return gather(self, **options)

    DTensor.full_tensor = ends
    target = Path(folder) / "died"
    try:
        hybridq.export(model, target, **LAYOUTS[0])
    except RuntimeError:
        assert not (target / "model.safetensors.index.json").exists()
    else:
        raise AssertionError("nobody noticed")
    done = hybridq.export(whole, target, **LAYOUTS[0])
    assert done.num_kept, "the first file is finished"
    hybridq.export(whole, Path(folder) / "want", **LAYOUTS[0])
    assert files(target) == files(Path(folder) / "want")
    os._exit(0)  # there is no group to leave


def refused(folder: str) -> None:
    rank = dist.get_rank()
    model = sharded(plain())
    taken = Path(folder) / "taken"
    taken.mkdir(exist_ok=True)
    (taken / "other.txt").touch()
    text = "is not empty"
    for options, error in (
        ({"layout": "modelopt", "format": "nvfp4"}, text),
        ({"layout": "none"}, "layout must be"),
    ):
        try:
            hybridq.export(model, taken, **options)
        except (hybridq.CheckpointError, hybridq.errors.SpecError) as found:
            assert error in str(found), found
            assert ("the first rank could not write it" in str(found)) == (rank > 0), found
        else:
            raise AssertionError("not refused")
    try:
        hybridq.export(model, Path(folder) / f"of-{rank}", **LAYOUTS[0])
    except RuntimeError as found:
        assert "export: every rank must hold its part of one model" in str(found), found
        assert "of-1 on rank 1" in str(found), found
    else:
        raise AssertionError("not refused")
    assert not (Path(folder) / f"of-{rank}").exists()
    check(model, plain(), folder, "after", **LAYOUTS[0])


if __name__ == "__main__":
    warnings.simplefilter("ignore", hybridq.HybridQWarning)
    first = (fsdp2, quantized, tensor_parallel, one_at_a_time, mixture, quantized_stacks)
    main({one.__name__: one for one in (*first, resumed, refused, dies)})
