"""Parts of modules (`tp_group=`) under FSDP2: `python parallel_fsdp2_program.py RANK WORLD STORE`.

Two tensor-parallel ranks, each part sharded over the other ranks. All data-parallel ranks see the
same batch, so that sharded parts have the bits of parts that are not sharded.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from rank_program import main
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hybridq
from hybridq.distributed import prepare_fsdp2, reduce_sequence_parallel_gradients
from hybridq.nn.modules.parallel_options import parameters_of_own_tokens

MARK = "sequence_parallel"

#: The format of a weight's rowwise plane, by recipe.
RECIPES = {
    "nvfp4": "nvfp4_16x16",
    "fp8_current": "fp8_e4m3",
    "fp8_block": "fp8_128x128",
    "mxfp8": "mxfp8",
    "mxfp8_fwd_nvfp4_bwd": "mxfp8",
    "nvfp4_1d_weight": "nvfp4",
}
HIDDEN, TOKENS = 64, 32


def mesh_of() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))


def part_of(mesh: Any, inner: int = 256, **options: Any) -> Any:
    """Return a rank's part: another one on each tensor-parallel rank, one larger than the other."""
    rank = mesh.get_local_rank("tp")
    torch.manual_seed(3 + rank)
    group = {"tp_group": mesh.get_group("tp"), "set_parallel_mode": True}
    layer = hybridq.LayerNormMLP(HIDDEN, inner, **group, **options)
    with torch.no_grad():
        for weight in (layer.fc1_weight, layer.fc2_weight):
            weight.mul_(1 + rank)
    return layer


def sharded(layer: Any, mesh: Any, is_prepared: bool = True) -> Any:
    return fully_shard(prepare_fsdp2(layer) if is_prepared else layer, mesh=mesh["dp"])


def full(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach()


def step(layer: Any, x: torch.Tensor, recipe: str) -> torch.Tensor:
    torch.manual_seed(5)
    with hybridq.autocast(recipe=recipe):
        y = layer(x)
    torch.manual_seed(6)
    y.square().mean().backward()
    return y.detach()


def amaxes() -> None:
    """Planes of a part are scaled by the amax of the whole weight, sharded or not."""
    mesh = mesh_of()
    torch.manual_seed(10)
    x = torch.randn(TOKENS, HIDDEN)
    for recipe in RECIPES:
        for inner in (256, 144):  # parts of whole blocks, and others
            plain, prepared = part_of(mesh, inner), sharded(part_of(mesh, inner), mesh)
            layers = (plain, prepared)
            optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in layers]
            for number in range(2):
                what = (recipe, inner, number)
                wanted, found = (step(layer, x, recipe) for layer in layers)
                assert torch.equal(found, wanted), (what, (found - wanted).abs().max())
                pairs = zip(plain.named_parameters(), prepared.parameters(), strict=True)
                for (name, one), own in pairs:
                    assert torch.equal(full(own.grad), one.grad), (what, name)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            if inner == 256:
                planes_of_whole(prepared, plain, mesh, recipe)


def planes_of_whole(prepared: Any, plain: Any, mesh: Any, recipe: str) -> None:
    """What was gathered are the rows of the planes of the whole weight, byte for byte."""
    group, rank = mesh.get_group("tp"), mesh.get_local_rank("tp")
    with torch.no_grad(), hybridq.autocast(recipe=recipe):
        prepared(torch.ones(TOKENS, HIDDEN))  # the unit stays gathered, as the last one of a model
    own = plain.fc1_weight.detach()
    parts = [torch.empty_like(own) for _ in range(2)]
    dist.all_gather(parts, own, group=group)
    gathered = prepared.fc1_weight
    whole = hybridq.quantize(torch.cat(parts), RECIPES[recipe], None)
    rows = whole.rowwise.data.chunk(2)[rank]
    assert torch.equal(gathered.rowwise.data, rows), recipe


def own_tokens() -> None:
    """Gradients of norms and biases, of which a rank sees its own tokens, are summed in shards."""
    mesh = mesh_of()
    group = mesh.get_group("tp")
    torch.manual_seed(10 + mesh.get_local_rank("tp"))
    x = torch.randn(TOKENS, HIDDEN)
    own = part_of(mesh, sequence_parallel=True)
    step(own, x, "mxfp8")
    wanted = {}
    for name in ("layer_norm_weight", "layer_norm_bias", "fc2_bias"):
        wanted[name] = getattr(own, name).grad.clone()
        dist.all_reduce(wanted[name], group=group)
    for is_prepared in (False, True):
        layer = sharded(part_of(mesh, sequence_parallel=True), mesh, is_prepared)
        step(layer, x, "mxfp8")
        reduce_sequence_parallel_gradients(layer, group)
        for name, value in wanted.items():
            assert torch.equal(full(getattr(layer, name).grad), value), (is_prepared, name)
    norms = torch.nn.Sequential(hybridq.nn.LayerNorm(7, sequence_parallel=True))
    fully_shard(norms, mesh=mesh["dp"])  # 4 values and 3
    (norms(x[:, :7]) ** 2).sum().backward()
    grads = [full(one.grad) for one in norms.parameters()]
    for grad in grads:
        dist.all_reduce(grad, group=group)
    reduce_sequence_parallel_gradients(norms, group)
    for one, value in zip(norms.parameters(), grads, strict=True):
        assert torch.equal(full(one.grad), value)


def remade() -> None:
    """Marks outlive what makes parameters anew: memory of the meta device, states assigned."""
    options = {"sequence_parallel": True}
    for make in (
        lambda: hybridq.nn.RMSNorm(8, **options, device="meta"),
        lambda: hybridq.LayerNormMLP(
            16, 64, tp_size=2, set_parallel_mode=True, device="meta", **options
        ),
    ):
        made = make().to_empty(device="cpu")
        state = {name: torch.zeros_like(one) for name, one in made.state_dict().items()}
        made.load_state_dict(state, assign=True)
        names = {name for name, one in make().named_parameters() if hasattr(one, MARK)}
        assert names
        found = {id(one) for one in parameters_of_own_tokens(made)}
        assert {name for name, one in made.named_parameters() if id(one) in found} == names


if __name__ == "__main__":
    main(globals())
