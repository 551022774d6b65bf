"""Runs whose bytes a plan must have: `python plan_program.py RANK WORLD STORE NAME...`."""

from __future__ import annotations

import gc
import itertools
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from rank_program import main
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

import hybridq
from hybridq.distributed import (
    FusedParallel,
    QuantizedWeight,
    Sharding,
    count_traffic,
    plan,
    prepare_fsdp2,
    wire_nbytes,
)

RECIPES = (
    *("mxfp8", "nvfp4", "fp8_current", "fp8_block", "mxfp8_fwd_nvfp4_bwd", "nvfp4_1d_weight"),
    *("mxfp8_fwd_high_precision_bwd", "high_precision_fwd_mxfp8_bwd", None),
)

#: Hidden sizes: shards are even; shards cut blocks; shards are uneven.
HIDDEN = {"even": 64, "cut": 40, "uneven": 33}
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden)
        self.up = nn.Linear(hidden, hidden + 24)
        self.down = nn.Linear(hidden + 24, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Experts(nn.Module):
    """Two layers of experts with weights of their own, and with one weight for all."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        count = 4 if hidden == HIDDEN["even"] else 3
        self.norm = nn.RMSNorm(hidden)
        self.up = hybridq.GroupedLinear(count, hidden, hidden + 24)
        self.down = hybridq.GroupedLinear(
            count, hidden + 24, hidden, bias=False, single_grouped_weight=True
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sizes = [x.shape[0] * x.shape[1] - 5, 0, 5, 0][: self.up.num_gemms]
        return x + self.down(torch.tanh(self.up(self.norm(x), sizes)), sizes)


class Model(nn.Module):
    def __init__(self, hidden: int, root_linear: bool = False, kind: type = Block) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, hidden)
        self.blocks = nn.ModuleList(kind(hidden) for _ in range(3))
        self.mix = nn.Linear(hidden, hidden) if root_linear else nn.Identity()
        self.lm_head = nn.Linear(hidden, 50, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.mix(x))


def made(hidden: int, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return hybridq.convert(Model(hidden, **options))


def step(model: nn.Module, optimizer: Any, recipe: Any, amp: bool = False) -> None:
    x = torch.randint(50, (2, 8))
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=amp),
        hybridq.autocast(enabled=recipe is not None, recipe=recipe),
    ):
        y = model(x)
    y.float().square().mean().backward()
    optimizer.step()


def check(
    model: nn.Module,
    planned: Any,
    recipe: Any,
    what: str,
    amp: bool = False,
    kind: Any = torch.optim.AdamW,
) -> None:
    """Train three steps; the third moves what is planned, and the memory is as planned."""
    optimizer = kind(model.parameters(), lr=1e-3)
    for _ in range(2):
        step(model, optimizer, recipe, amp)
        optimizer.zero_grad()
    gathered = wire_nbytes(model)
    with count_traffic() as counted, largest_reduction() as largest:
        step(model, optimizer, recipe, amp)
    want = planned.nbytes_by_kind()
    assert counted.nbytes_by_kind == want, f"{what}: {counted}, planned {want}"
    if what.startswith("even"):  # without padding the count of payloads says the same
        of_weights = sum(m.nbytes for m in planned.traffic if m.what.startswith("weights"))
        units = {name.split(".")[1] for name, _ in model.named_parameters() if is_weight(name)}
        trailers = len(units) * 2 * 16 * dist.get_world_size()  # of each, forward and backward
        assert wire_nbytes(model) - gathered + trailers == of_weights, what
    maxima = next((m.nbytes for m in planned.memory if m.what == "amaxes"), 0)
    if not any(m.what == "amaxes of delayed scaling" for m in planned.traffic):
        found = kept_maxima(model) + sum(largest)
        assert found <= maxima, f"{what}: maxima {found}, planned {maxima}"
        if dist.get_world_size() == 2:  # of more ranks, each boundary is one of two of them
            assert found == maxima, f"{what}: maxima {found}, planned {maxima}"
    if dist.get_rank():
        return  # a plan is that of the largest shards, which are the first rank's
    held = {one.what: one.nbytes for one in planned.memory}
    assert held["parameters"] == sum(nbytes(p) for p in model.parameters()), what
    assert held["gradients"] == sum(nbytes(p.grad) for p in model.parameters()), what
    state = [t for one in optimizer.state.values() for t in one.values()]
    assert held["optimizer"] == sum(nbytes(t) for t in state), what


def baselines() -> None:
    """What stands beside a plan is what two runs without a recipe move and hold."""
    shape = Sharding(dist.get_world_size())
    kinds = {"bf16_nbytes": torch.optim.AdamW, "bf16_masters_nbytes": hybridq.optim.AdamW}
    for column, kind in kinds.items():
        hidden = HIDDEN["even" if column == "bf16_nbytes" else "uneven"]
        planned = plan(made(hidden).bfloat16(), "nvfp4", shape, quantized_params=True)
        beside = replace(
            planned,
            memory=tuple(replace(m, nbytes=getattr(m, column)) for m in planned.memory),
            traffic=tuple(replace(m, nbytes=getattr(m, column)) for m in planned.traffic),
        )
        model = made(hidden).bfloat16()
        for part in (*model.blocks, model):
            fully_shard(part, mp_policy=POLICY)
        check(model, beside, None, f"beside a plan: {column}", kind=kind)
        assert beside.held_nbytes == getattr(planned, f"held_{column}")
    # The same runs, asked for: masters beside planes of a recipe, and beside FP32 parameters.
    planned = plan(made(40).bfloat16(), "mxfp8", shape, masters=True)
    check(sharded(made(40).bfloat16()), planned, "mxfp8", "masters", kind=hybridq.optim.AdamW)
    columns = [
        {m.what: m.bf16_masters_nbytes for m in plan(made(40).to(dtype), "mxfp8", shape).memory}
        for dtype in (torch.float32, torch.bfloat16)
    ]
    assert columns[0] == columns[1]  # those of BF16 parameters, whatever the model's own are


@contextmanager
def largest_reduction() -> Any:
    """Give, in a list, the bytes of the largest reduction of maxima so far."""
    found: list[int] = []
    whole = dist.all_reduce

    def seen(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        if not options:  # FSDP2's own, of gradients, has its arguments by name
            found[:] = [max([*found, nbytes(tensor)])]
        return whole(tensor, *args, **options)

    dist.all_reduce = seen
    try:
        yield found
    finally:
        dist.all_reduce = whole


def kept_maxima(model: nn.Module) -> int:
    """Bytes of the maxima that this rank keeps, with the memory that they lie in."""
    abouts = {id(one): one for p in model.parameters() for one in [about_of(p)] if one is not None}
    kept = [one.known._maxima for one in abouts.values()]
    parts = [part for maxima in kept for parts in maxima.values() for part in parts]
    assert all(part.untyped_storage().nbytes() == nbytes(part) for part in parts)
    return sum(map(nbytes, parts))


def about_of(parameter: torch.Tensor) -> Any:
    """What a prepared parameter knows; None of others."""
    return getattr(getattr(parameter, "_local_tensor", None), "_about", None)


def is_weight(name: str) -> bool:
    """Whether a parameter travels as planes."""
    return ".up.weight" in name or ".down.weight" in name


def nbytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor, or of this rank's shard."""
    local: Any = getattr(tensor, "_local_tensor", tensor)
    if isinstance(local, QuantizedWeight):
        buffers = [buffer for plane in local.held.planes for buffer in plane.tensors]
        return sum(buffer.numel() * buffer.element_size() for buffer in buffers)
    return local.numel() * local.element_size()


def sharded(model: nn.Module, **options: Any) -> nn.Module:
    prepare_fsdp2(model)
    for block in model.blocks:
        fully_shard(block, mp_policy=POLICY, **options)
    return fully_shard(model, mp_policy=POLICY, **options)


def traffic(which: str = "by turns") -> None:
    for place, recipe in enumerate(RECIPES):
        for number, (name, hidden) in enumerate(HIDDEN.items()):
            if which != "all" and number != place % 3:
                continue
            model = made(hidden)
            planned = plan(model, recipe, Sharding(dist.get_world_size()))
            check(sharded(model), planned, recipe, f"{name} {recipe}")


def experts(which: str = "by turns") -> None:
    recipes = ("mxfp8", "nvfp4", "mxfp8_fwd_nvfp4_bwd", "mxfp8_fwd_high_precision_bwd", None)
    for place, recipe in enumerate(recipes):
        for number, (name, hidden) in enumerate(HIDDEN.items()):
            if which != "all" and number != place % 3:
                continue
            model = made(hidden, kind=Experts)
            planned = plan(model, recipe, Sharding(dist.get_world_size()))
            check(sharded(model), planned, recipe, f"{name} {recipe}, experts")
    for flag in (False, True):
        model = made(64, kind=Experts)
        shape = Sharding(dist.get_world_size(), reshard_after_forward=flag)
        planned = plan(model, "mxfp8_fwd_nvfp4_bwd", shape)
        what = f"experts, reshard {flag}"
        check(sharded(model, reshard_after_forward=flag), planned, "mxfp8_fwd_nvfp4_bwd", what)


def quantized(which: str = "by turns") -> None:
    """Parameters that are held as planes, in BF16 models, and in FP32 ones by turns."""
    for place, recipe in enumerate(RECIPES[:-1]):
        for number, (name, hidden) in enumerate(HIDDEN.items()):
            if which != "all" and number != (place + 1) % 3:
                continue
            # A plane that is not quantized must have the dtype that is computed in.
            is_short = number == place % 3 or "high_precision_fwd" in recipe
            dtype = torch.bfloat16 if is_short else torch.float32
            planned = plan(
                made(hidden).to(dtype),
                recipe,
                Sharding(dist.get_world_size()),
                quantized_params=True,
            )
            torch.manual_seed(0)
            source = Model(hidden).to(dtype)
            with hybridq.quantized_model_init(recipe, preserve_high_precision_init_val=True):
                model = sharded(hybridq.convert(source))
            held = [p for p in model.parameters() if isinstance(p._local_tensor, QuantizedWeight)]
            assert len(held) == 6
            what = f"{name} {recipe}, quantized"
            check(model, planned, recipe, what, kind=hybridq.optim.AdamW)


class Request:
    """A factory: inputs and gradients delayed, weights in the backward only; not all is reduced."""

    reads_names = False

    def __call__(self, role: Any) -> Any:
        if role.tensor_type != "weight":
            return hybridq.DelayedScalingRequest(reduce_amax=role.tensor_type == "input")
        return hybridq.HybridQuantizer(
            rowwise_quantizer=hybridq.NVFP4Quantizer(),
            columnwise_quantizer=hybridq.DelayedScalingRequest(),
        )


def delayed() -> None:
    """The reduction of an update is that of all modules: no other model may be left."""
    for recipe in ("fp8_delayed", hybridq.CustomRecipe(Request())):
        for name, hidden in HIDDEN.items():
            gc.collect()
            model = made(hidden)
            planned = plan(model, recipe, Sharding(dist.get_world_size()))
            named = {one.what: one for one in planned.traffic}
            updates = named["amaxes of delayed scaling"]
            assert updates.nbytes == 6 * 4 * (3 if recipe == "fp8_delayed" else 2)
            assert updates.kind == "all_reduce"
            assert updates.num_values == 3 * 2 * hidden * (hidden + 24)
            check(sharded(model), planned, recipe, f"{name} {recipe}, delayed")
    gc.collect()
    model = made(40)
    planned = plan(model, "fp8_delayed", Sharding(dist.get_world_size(), "ddp"))
    ddp_model = DistributedDataParallel(model)
    check(ddp_model, planned, "fp8_delayed", "ddp, delayed", amp=True)


def reshard() -> None:
    for recipe in ("nvfp4", "mxfp8_fwd_nvfp4_bwd", "mxfp8_fwd_high_precision_bwd"):
        for flag in (False, True, None):
            model = made(64, root_linear=True)
            shape = Sharding(dist.get_world_size(), reshard_after_forward=flag)
            planned = plan(model, recipe, shape)
            what = f"{recipe} reshard {flag}"
            check(sharded(model, reshard_after_forward=flag), planned, recipe, what)


def ddp() -> None:
    model = made(40)
    shape = Sharding(dist.get_world_size(), "ddp")
    planned = plan(model, "mxfp8", shape)
    check(DistributedDataParallel(model), planned, "mxfp8", "ddp", amp=True)


def hsdp() -> None:
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("r", "s"))
    recipe = "mxfp8_fwd_nvfp4_bwd"
    for kind, (name, hidden) in itertools.product((Block, Experts), HIDDEN.items()):
        model = made(hidden, kind=kind)
        planned = plan(model, recipe, Sharding(world, "hsdp", world // 2))
        check(sharded(model, mesh=mesh), planned, recipe, f"hsdp {name}")


def gathered() -> None:
    """What units take while they are gathered, in the forward and in the backward."""
    recipes = ("fp8_current", "nvfp4", "mxfp8_fwd_nvfp4_bwd")
    for kind, recipe in itertools.product((Block, Experts), recipes):
        for hidden in HIDDEN.values():
            model = made(hidden, kind=kind)
            planned = plan(model, recipe, Sharding(dist.get_world_size()))
            sharded(model)
            found: dict[str, dict[nn.Module, int]] = {"forward": {}, "backward": {}}

            def note(module: nn.Module, when: str, found: Any = found) -> None:
                parameters = module._get_fsdp_state()._fsdp_param_group.fsdp_params
                held = [
                    {
                        buffer.untyped_storage().data_ptr(): buffer.untyped_storage().nbytes()
                        for buffer in (*one.all_gather_outputs, *one._unsharded_inner_tensors)
                    }
                    for one in parameters
                ]
                found[when][module] = sum(sum(one.values()) for one in held)

            for block in model.blocks:
                # The last ones of the forward and of the backward: all planes are there.
                block.down.register_forward_hook(lambda *_, at=block: note(at, "forward"))
                block.norm.register_full_backward_hook(lambda *_, at=block: note(at, "backward"))
            model.lm_head.register_forward_hook(lambda *_, at=model: note(at, "forward"))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(2):
                step(model, optimizer, recipe)
                optimizer.zero_grad()
            root = found["forward"].pop(model)
            largest = max(sum(sorted(units.values())[-2:]) for units in found.values())
            held = {one.what: one.nbytes for one in planned.memory}
            got, want = root + largest, held["gathered parameters"]
            # Planes of a unit lie in one memory, where each begins at a multiple of 64 bytes.
            padding = 64 * 2 * sum(1 for _ in model.parameters())
            assert want <= got < want + padding, f"{recipe} {hidden}: {got}, planned {want}"


def discarded() -> None:
    """A model that one rank has forgotten, and another one not yet, takes no part in reductions."""
    kept = []
    for _ in range(2):
        model = sharded(made(40))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        gc.collect()
        for _ in range(2):
            step(model, optimizer, "nvfp4")
            optimizer.zero_grad()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)  # its maxima are not known any more
        if dist.get_rank() == 0:
            kept.append(model)


def dealt() -> None:
    """A model that is dealt out already is no model to plan."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    part = parallelize_module(hybridq.LayerNormMLP(64, 128), mesh, FusedParallel())
    for model in (part, nn.ModuleDict({"head": fully_shard(nn.Linear(8, 8), mesh=mesh)})):
        try:
            plan(model, "mxfp8", Sharding(2))
        except ValueError as error:
            assert "plan the model before fully_shard and parallelize_module" in str(error), error
        else:
            raise AssertionError("a DTensor was planned")


if __name__ == "__main__":
    main(globals())
