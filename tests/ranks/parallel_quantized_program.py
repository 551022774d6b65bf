"""Quantized parts of weights: `python parallel_quantized_program.py RANK WORLD STORE NAME...`.

Every rank has the whole module too, quantized as well; planes of parts are parts of its planes.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from parallel_modules_program import Case, from_rows, near, parts, raises, run
from rank_program import logged, main
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

import hybridq
from hybridq import distributed
from hybridq.tensor import is_quantized

HIDDEN, INNER, TOKENS, BATCH = 128, 512, 8, 3
RECIPES = ("mxfp8", "nvfp4", "mxfp8_fwd_nvfp4_bwd", "fp8_current", "fp8_block", "fp8_delayed")

CASES = {
    "column": Case(
        lambda **o: hybridq.Linear(HIDDEN, INNER, **o), HIDDEN, True, {"parallel_mode": "column"}
    ),
    "row": Case(
        lambda **o: hybridq.Linear(INNER, HIDDEN, **o), INNER, False, {"parallel_mode": "row"}
    ),
    "mlp": Case(
        lambda **o: hybridq.LayerNormMLP(HIDDEN, INNER, **o),
        HIDDEN,
        False,
        {"set_parallel_mode": True},
    ),
    "layer": Case(
        lambda **o: hybridq.TransformerLayer(
            INNER,
            INNER,
            4,
            4,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            qkv_weight_interleaved=True,
            normalization="RMSNorm",
            **o,
        ),
        INNER,
        False,
        {"set_parallel_mode": True},
    ),
}


def recipes() -> dict[str, Any]:
    return {**{name: name for name in RECIPES}, "from_rows": hybridq.CustomRecipe(from_rows)}


def same_planes(part: Any, whole: Any, dim: int | None, what: Any) -> None:
    """Compare the planes of a part with what of the whole's planes it should have, byte for byte.

    Args:
        part, whole: QuantizedTensors.
        dim: along which the whole is dealt out; None: the part is the whole.
        what: for the message.
    """
    storage = whole.tensor_storage
    if dim is not None:
        size = part.shape[dim]
        first = size * dist.get_rank()
        storage = storage.part(dim, first, first + size)
    own = dict(part.tensor_storage.named_buffers())
    wanted = dict(storage.named_buffers())
    assert own.keys() == wanted.keys(), what
    for name, buffer in own.items():
        given = (buffer.contiguous().view(torch.uint8), wanted[name].contiguous().view(torch.uint8))
        assert torch.equal(*given), (*what, name)


def compare(part: nn.Module, whole: nn.Module, what: Any) -> int:
    """Compare all quantized weights; return how many there are."""
    found = 0
    for (name, own), (_, one) in zip(
        part.named_parameters(), whole.named_parameters(), strict=True
    ):
        assert is_quantized(own) == is_quantized(one), (*what, name)
        if is_quantized(own):
            is_part = getattr(own, "tensor_model_parallel", False)
            same_planes(own, one, own.partition_dim if is_part else None, (*what, name))
            found += 1
    return found


def fill(part: nn.Module, whole: nn.Module) -> None:
    """Give both the same values, by their quantizers."""
    with torch.no_grad():
        for own, one in zip(part.parameters(), whole.parameters(), strict=True):
            values = torch.randn(one.shape) * 0.1 + (one.dim() == 1)
            one.copy_(values)
            own.copy_(slice_of(own, values))


def slice_of(own: Any, values: torch.Tensor) -> torch.Tensor:
    if not getattr(own, "tensor_model_parallel", False):
        return values
    return values.chunk(dist.get_world_size(), own.partition_dim)[dist.get_rank()].contiguous()


def step(part: nn.Module, whole: nn.Module) -> None:
    """Step both by the whole's gradients."""
    for own, one in zip(part.parameters(), whole.parameters(), strict=True):
        own.grad = slice_of(own, one.grad)
    for module in (part, whole):
        torch.optim.AdamW(module.parameters(), lr=0.01).step()
        hybridq.optim.AdamW(module.parameters(), lr=0.01).step()


def modules(names: str) -> None:
    """Planes in construction, after a step and after a load; outputs and gradients.

    Of gradients now and then another order of sums makes another code.
    """
    group = dist.group.WORLD
    for name in names.split(","):
        case = CASES[name]
        for recipe_name, recipe in recipes().items():
            what = (name, recipe_name)
            torch.manual_seed(0)
            with hybridq.quantized_model_init(recipe):
                whole, part = case.make(), case.make(tp_group=group, **case.options)
            fill(part, whole)
            assert compare(part, whole, what) >= (2 if name in ("mlp", "layer") else 1)
            x = torch.randn(TOKENS, BATCH, case.features)
            dy = torch.randn(TOKENS, BATCH, INNER if case.is_column or name == "layer" else HIDDEN)
            wanted, wanted_dx = run(whole, x, dy, recipe)

            def of_rank(t: torch.Tensor, is_column: bool) -> torch.Tensor:
                world = dist.get_world_size()
                return t.chunk(world, -1)[dist.get_rank()].contiguous() if is_column else t

            y, dx = run(part, of_rank(x, name == "row"), of_rank(dy, case.is_column), recipe)
            near(y, of_rank(wanted, case.is_column), what)
            near(dx, of_rank(wanted_dx, name == "row"), what, 4e-3)
            for which, own, value in parts(whole, part, lambda p: p.grad):
                near(own.grad, value, (*what, which), 4e-3)
            step(part, whole)
            compare(part, whole, (*what, "step"))
            state = {k: torch.randn(v.shape) * 0.1 for k, v in whole.named_parameters()}
            whole.load_state_dict(state, strict=False)
            own_state = {k: slice_of(v, state[k]) for k, v in part.named_parameters()}
            part.load_state_dict(own_state, strict=False)
            compare(part, whole, (*what, "load"))


def initial() -> None:
    """What is drawn is quantized with the amax of all ranks; what cannot be stays as it is."""
    group, rank, world = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    with hybridq.quantized_model_init("nvfp4", preserve_high_precision_init_val=True):
        part = hybridq.Linear(HIDDEN, INNER, tp_group=group, parallel_mode="column")
    own = part.weight.get_high_precision_init_val()
    all_of_it = [torch.empty_like(own) for _ in range(world)]
    dist.all_gather(all_of_it, own)
    with hybridq.quantized_model_init("nvfp4"):
        whole = hybridq.Linear(HIDDEN, INNER)
    with torch.no_grad():
        whole.weight.copy_(torch.cat(all_of_it))
    same_planes(part.weight, whole.weight, 0, ("initial",))
    part.reset_parameters()
    with hybridq.quantized_model_init("nvfp4"):
        meta = hybridq.Linear(HIDDEN, INNER, tp_group=group, parallel_mode="column", device="meta")
    meta.to_empty(device="cpu")
    meta.reset_parameters()
    y = meta(torch.randn(4, HIDDEN))
    assert y.isfinite().all()
    stays = [
        ("blocks", "fp8_block", {"tp_group": group}, 160 * world),
        ("group, tp_group=", "nvfp4", {"tp_size": world}, INNER),
    ]
    for text, recipe, options, size in stays:
        with logged() as lines, hybridq.quantized_model_init(recipe):
            made = hybridq.Linear(
                HIDDEN, size, parallel_mode="column", name=f"{text} {recipe}", **options
            )
        assert not is_quantized(made.weight), text
        if rank == 0:
            assert any(text in line and "stays in high precision" in line for line in lines), lines
    with hybridq.quantized_model_init("mxfp8"):  # takes nothing of other ranks
        late = hybridq.Linear(HIDDEN, INNER, parallel_mode="column", tp_size=world)
    assert is_quantized(late.weight)
    late.set_tensor_parallel_group(group)
    with hybridq.autocast(recipe="mxfp8"):
        assert late(torch.randn(4, HIDDEN)).shape == (4, INNER // world)


def other_recipes() -> None:
    """Under another recipe, none, frozen: the numbers of the whole module."""
    group = dist.group.WORLD
    x, dy = torch.randn(32, BATCH, HIDDEN), torch.randn(32, BATCH, HIDDEN)
    dist.broadcast(x, 0)
    dist.broadcast(dy, 0)
    for held, used, frozen in (
        ("nvfp4", "mxfp8", False),
        ("mxfp8", "nvfp4", False),
        ("nvfp4", None, False),
        ("nvfp4", "nvfp4", True),
        ("mxfp8_fwd_nvfp4_bwd", "mxfp8_fwd_nvfp4_bwd", True),
    ):
        torch.manual_seed(0)
        with hybridq.quantized_model_init(held, frozen=frozen):
            whole, part = (
                hybridq.LayerNormMLP(HIDDEN, INNER, **options)
                for options in ({}, {"tp_group": group, "set_parallel_mode": True})
            )
        fill(part, whole)
        wanted, found = (run(module, x, dy, used) for module in (whole, part))
        near(found[0], wanted[0], (held, used, frozen))
        near(found[1], wanted[1], (held, used, frozen), 1e-3)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = hybridq.Linear(HIDDEN, INNER), hybridq.Linear(INNER, HIDDEN)

    def forward(self, x: Any) -> Any:
        return self.down(torch.tanh(self.up(x)))


def made(recipe: Any) -> Mlp:
    torch.manual_seed(0)
    with hybridq.quantized_model_init(recipe):
        return Mlp()


@contextmanager
def never_sends() -> Any:
    """Raise if anything is sent in the block."""

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            assert "c10d" not in str(func), func
            return func(*args, **(kwargs or {}))

    with Watch():
        yield


def styles() -> None:
    """`parallelize_module` of quantized weights cuts their planes."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"up": distributed.ColwiseParallel(), "down": distributed.RowwiseParallel()}
    for recipe_name, recipe in recipes().items():
        whole, part = made(recipe), made(recipe)
        if dist.get_rank():  # rank 0's planes are what counts, as torch has it
            with torch.no_grad():
                part.up.weight.zero_()
        parallelize_module(part, mesh, plan)
        x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))
        for number in range(2):
            what = (recipe_name, number)
            for name, dim in (("up", 0), ("down", 1)):
                own = getattr(part, name).weight
                assert isinstance(own, DTensor) and is_quantized(own.to_local())
                same_planes(own.to_local(), getattr(whole, name).weight, dim, (*what, name))
            ys = []
            for model in (whole, part):
                model.zero_grad()
                torch.manual_seed(5)
                with hybridq.autocast(recipe=recipe):
                    ys.append(model(x))
                ys[-1].square().mean().backward()
            near(ys[1].detach(), ys[0].detach(), what)
            for own, one in zip(part.parameters(), whole.parameters(), strict=True):
                near(own.grad.full_tensor(), one.grad, what, 2e-3)
                own.grad = distribute_tensor(one.grad, own.device_mesh, own.placements)
            for model in (whole, part):
                torch.optim.AdamW(model.parameters(), lr=0.01).step()
                hybridq.optim.AdamW(model.parameters(), lr=0.01).step()
        states = [hybridq.dequantized_state_dict(model) for model in (whole, part)]
        for name, value in states[0].items():
            own = states[1][name]
            if name.endswith("weight"):
                assert not is_quantized(own.to_local()), what
                assert torch.equal(own.full_tensor(), value), (*what, name)
        part.load_state_dict(states[1])
        whole.load_state_dict(states[0])
        same_planes(part.up.weight.to_local(), whole.up.weight, 0, (*what, "load"))


def refused() -> None:
    """Torch's own styles, and blocks that ranks would share: an error before anything is sent."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for style, source in (
        (ColwiseParallel(), 0),
        (RowwiseParallel(), 0),
        (ColwiseParallel(), None),
    ):
        with raises(NotImplementedError, "hybridq.distributed.ColwiseParallel"), never_sends():
            parallelize_module(made("nvfp4"), mesh, {"up": style}, src_data_rank=source)
    fused = nn.ModuleDict({"up": hybridq.LayerNormMLP(HIDDEN, INNER)})
    with raises(NotImplementedError, "take hybridq.distributed.FusedParallel"):
        parallelize_module(fused, mesh, {"up": distributed.ColwiseParallel()})
    with hybridq.quantized_model_init("fp8_block"):
        model = nn.ModuleDict({"up": hybridq.Linear(HIDDEN, 160 * dist.get_world_size())})
    with raises(ValueError, "must give each rank whole blocks"), never_sends():
        parallelize_module(model, mesh, {"up": distributed.ColwiseParallel()})
    lonely = hybridq.Linear(HIDDEN, INNER, tp_group=dist.group.WORLD, parallel_mode="column")
    with hybridq.quantized_model_init("nvfp4"):
        lonely.weight = hybridq.Linear(HIDDEN, INNER // dist.get_world_size()).weight
    with raises(NotImplementedError, "reduces it over no group"), hybridq.autocast(recipe="nvfp4"):
        lonely(torch.randn(4, HIDDEN))


def sharded() -> None:
    """FSDP2 of parts: right numbers where scales are of blocks, else an error that helps."""
    tp = dist.get_world_size()
    mesh = init_device_mesh("cpu", (1, tp), mesh_dim_names=("dp", "tp"))
    options = {"tp_group": mesh["tp"].get_group(), "set_parallel_mode": True}
    x, dy = torch.randn(32, HIDDEN), torch.randn(32, HIDDEN)
    for recipe in ("mxfp8", "fp8_block", "nvfp4", "mxfp8_fwd_nvfp4_bwd", "fp8_current"):
        with hybridq.quantized_model_init(recipe):
            whole, part = (hybridq.LayerNormMLP(HIDDEN, INNER, **o) for o in ({}, options))
        fill(part, whole)
        if recipe not in ("mxfp8", "fp8_block"):
            with raises(NotImplementedError, "fc1_weight is one rank's quantized part"):
                distributed.prepare_fsdp2(part)
            continue
        fully_shard(distributed.prepare_fsdp2(part), mesh=mesh["dp"])
        optimizers = [hybridq.optim.AdamW(m.parameters(), lr=0.01) for m in (whole, part)]
        for number in range(3):
            ys = [run(m, x, dy, recipe)[0] for m in (whole, part)]
            near(ys[1], ys[0], (recipe, number), 1e-4)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    dealt = parallelize_module(made("mxfp8"), mesh["tp"], {"up": distributed.ColwiseParallel()})
    with raises(NotImplementedError, "up.weight is quantized and split by parallelize_module"):
        distributed.prepare_fsdp2(dealt)


def compiled() -> None:
    """One graph, with the planes as they are."""
    with hybridq.quantized_model_init("nvfp4"):
        part = hybridq.LayerNormMLP(
            HIDDEN, INNER, tp_group=dist.group.WORLD, set_parallel_mode=True
        )
    x, dy = torch.randn(32, HIDDEN), torch.randn(32, HIDDEN)
    dist.broadcast(x, 0)
    wanted, found = (run(m, x, dy, "nvfp4") for m in (part, torch.compile(part, fullgraph=True)))
    near(found[0], wanted[0], "compiled", 1e-5)


if __name__ == "__main__":
    main(globals())
