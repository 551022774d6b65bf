"""Tensor parallelism: `python tensor_parallel_program.py RANK WORLD STORE NAME...`.

Every rank computes the whole model too; a parallel one differs by the order of FP32 sums only, and
the planes of its weights are parts of the planes of the whole, byte for byte.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from rank_program import main
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import hybridq
from hybridq import MXFP8Quantizer, NVFP4Quantizer, distributed
from hybridq.distributed import prepare_fsdp2
from hybridq.nn.autograd import slot_encoder
from hybridq.shards import encode_cut

#: Hidden and inner features: whole blocks on each rank, and parts that end inside of them.
SIZES = {"aligned": (128, 256), "cut": (136, 365)}
RECIPES = ("mxfp8", "nvfp4", "mxfp8_fwd_nvfp4_bwd", "fp8_current", "fp8_block", "fp8_delayed")


class Mlp(nn.Module):
    """Two linear layers with a smooth function between them."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, inner), nn.Linear(inner, hidden)

    def forward(self, x: Any) -> Any:
        return self.down(torch.tanh(self.up(x)))


def custom(role: Any) -> Any:
    """Two formats, the columnwise plane made of the decoded rowwise one."""
    if role.tensor_type == "grad_output":
        return MXFP8Quantizer()
    return hybridq.HybridQuantizer(
        rowwise_quantizer=NVFP4Quantizer(),
        columnwise_quantizer=MXFP8Quantizer(),
        columnwise_source="rowwise_dequantized",
    )


def recipes() -> dict[str, Any]:
    return {**{name: name for name in RECIPES}, "custom": hybridq.CustomRecipe(custom)}


def mesh_of() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def models(sizes: tuple[int, int]) -> tuple[nn.Module, nn.Module]:
    """Return a model, and the same one over all ranks."""
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(hybridq.convert(Mlp(*sizes)))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return made[0], parallelize_module(made[1], mesh_of(), plan)


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def run(model: Any, x: torch.Tensor, recipe: Any, steps: int = 2) -> list[torch.Tensor]:
    """Return outputs and gradients of some steps from the same random state."""
    found: list[torch.Tensor] = []
    torch.manual_seed(3)
    for _ in range(steps):
        model.zero_grad()
        own = x.clone().requires_grad_()
        with hybridq.autocast(recipe=recipe):
            y = model(own)
        whole(y).square().mean().backward()
        found += [whole(y).detach(), own.grad]
        found += [whole(parameter.grad) for parameter in model.parameters()]
    return found


def check_near(found: list[torch.Tensor], wanted: list[torch.Tensor], what: str) -> None:
    """Compare within the order of FP32 sums: now and then that makes another code of a gradient."""
    for number, (a, b) in enumerate(zip(found, wanted, strict=True)):
        error = float((a - b).norm() / b.norm())
        assert error < (1e-6 if number == 0 else 2e-3), (what, number, error)


def matrix(names: str) -> None:
    """Outputs and gradients are those of one process."""
    for size in names.split(","):
        hidden, inner = SIZES[size]
        for name, recipe in recipes().items():
            single, parallel = models((hidden, inner))
            torch.manual_seed(1)
            x = torch.randn(3, 40, hidden)
            check_near(run(parallel, x, recipe), run(single, x, recipe), f"{size} {name}")


@contextmanager
def watched() -> Iterator[list[Any]]:
    """Give what is encoded of windows in the block: how it lies, its specs, its buffers."""
    seen: list[Any] = []

    def cut(x: Any, row: Any, col: Any, rest: Any, at: Any, group: str = "") -> Any:
        made = encode_cut(x, row, col, rest, at, group)
        seen.append((at, row, col, made))
        return made

    slot_encoder.encode_cut = cut
    try:
        yield seen
    finally:
        slot_encoder.encode_cut = encode_cut


def planes() -> None:
    """What is encoded of weights are parts of the planes of the whole, as they decode."""
    hidden, inner = SIZES["cut"]
    for name, recipe in recipes().items():
        if name == "fp8_delayed":
            continue
        single, parallel = models((hidden, inner))
        torch.manual_seed(1)
        with watched() as seen, hybridq.autocast(recipe=recipe), torch.no_grad():
            parallel(torch.randn(33, hidden))
        num_weights = 0
        for at, row, _, (rows, _) in seen:
            is_weight = rows[0].shape[0] != 33
            weight = single.up.weight if at.dim == 0 else single.down.weight
            if not is_weight:
                continue
            num_weights += 1
            codes = torch.ops.hybridq.encode(weight.detach(), row.spec, "")
            low = at.range()[0] - at.lacks()[0]
            size = rows[0].shape[at.dim] * (row.codes_per_byte if at.dim == 1 else 1)
            shape = list(weight.shape)
            shape[at.dim] = size
            own = torch.ops.hybridq.decode(rows, row.spec, *shape, torch.float32)
            full = torch.ops.hybridq.decode(codes, row.spec, *weight.shape, torch.float32)
            first, last = at.range()
            theirs = full.narrow(at.dim, first, last - first)
            assert torch.equal(own.narrow(at.dim, first - low, last - first), theirs), name
        assert num_weights == 2, name


def styles() -> None:
    """Sequence parallel norms, prepared inputs, a loss over sharded logits, a replicated weight."""
    mesh, hidden, words = mesh_of(), 64, 96
    made = []
    for is_parallel in (False, True):
        torch.manual_seed(0)
        layers = {
            "norm": nn.LayerNorm(hidden),
            "mlp": Mlp(hidden, 128),
            "head": nn.Linear(hidden, words),
        }
        model = hybridq.convert(nn.ModuleDict(layers), also=["heads"])
        if is_parallel:
            plan = {
                "norm": SequenceParallel(),
                "mlp": PrepareModuleInput(
                    input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
                ),
                "mlp.up": ColwiseParallel(),
                "mlp.down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
                "head": ColwiseParallel(
                    input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
                ),
            }
            parallelize_module(model, mesh, plan)
        torch.manual_seed(1)
        x, target = torch.randn(2, 32, hidden), torch.randint(0, words, (64,))
        rank, world = dist.get_rank(), dist.get_world_size()
        given = x.chunk(world, 1)[rank] if is_parallel else x
        with hybridq.autocast(recipe="mxfp8"):
            h = model["mlp"](model["norm"](given))
            logits = model["head"](h)
        if is_parallel:
            assert isinstance(logits, DTensor) and logits.placements == (Shard(2),)
            with loss_parallel():
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), target)
                loss.backward()
        else:
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), target)
            loss.backward()
        made.append([whole(loss.detach()), *(whole(p.grad) for p in model.parameters())])
    check_near(made[1], made[0], "styles")


def tokens(which: str = "by turns") -> None:
    """Tokens that are dealt out travel as planes, and come back summed."""
    mesh, world, rank = mesh_of(), dist.get_world_size(), dist.get_rank()
    plan = {
        "up": distributed.ColwiseParallel(input_layouts=Shard(1)),
        "down": distributed.RowwiseParallel(output_layouts=Shard(1)),
    }
    for size in ("aligned", "cut"):
        plain = {"none": None} if size == "aligned" else {}  # torch's own takes equal parts
        for place, (name, recipe) in enumerate({**recipes(), **plain}.items()):
            for number, (batch, length) in enumerate(((1, 128), (3, 128), (2, 20))):
                if which != "all" and number != place % 3:
                    continue
                made = []
                for _ in range(2):
                    torch.manual_seed(0)
                    made.append(hybridq.convert(Mlp(*SIZES[size])))
                parallelize_module(made[1], mesh, plan)
                torch.manual_seed(1)
                x = torch.randn(batch, length * world, SIZES[size][0])
                what = f"{size} {name} {batch}"
                check_near(*(token_steps(model, x, recipe, world, rank) for model in made), what)


def token_steps(
    model: Any, x: torch.Tensor, recipe: Any, world: int, rank: int
) -> list[torch.Tensor]:
    """Return outputs and gradients of two steps, of all ranks together."""
    is_parallel = isinstance(model.up.weight, DTensor)
    found: list[torch.Tensor] = []
    torch.manual_seed(3)
    for _ in range(2):
        model.zero_grad()
        own = (x.chunk(world, 1)[rank] if is_parallel else x).clone().requires_grad_()
        with nullcontext() if recipe is None else hybridq.autocast(recipe=recipe):
            y = model(own)
        (y.square().sum() / x.numel()).backward()
        both = [y.detach(), own.grad]
        if is_parallel:
            both = [whole(DTensor.from_local(t, mesh_of(), [Shard(1)])) for t in both]
        found += both + [whole(parameter.grad) for parameter in model.parameters()]
    return found


def compiled() -> None:
    """One graph, with its reductions in it."""
    from torch._inductor import config as inductor

    single, parallel = models(SIZES["cut"])
    x, name = torch.randn(40, SIZES["cut"][0]), "mxfp8_fwd_nvfp4_bwd"
    wanted = run(torch.compile(single, fullgraph=True), x, name, 1)
    check_near(run(torch.compile(parallel, fullgraph=True), x, name, 1), wanted, name)
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(hybridq.convert(Mlp(*SIZES["aligned"])))
    styles = {
        "up": distributed.ColwiseParallel(input_layouts=Shard(1)),
        "down": distributed.RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(made[1], mesh_of(), styles)
    world, rank = dist.get_world_size(), dist.get_rank()
    x = torch.randn(2, 64 * world, SIZES["aligned"][0])
    with inductor.patch(_micro_pipeline_tp=True):  # the pass that splits products under gathers
        found = [
            token_steps(torch.compile(model, fullgraph=True), x, name, world, rank)
            for model in made
        ]
    check_near(found[1], found[0], name)


def graphs() -> None:
    """Compiled, gathers are functional collectives of planes, beside the products that use them.

    Between the start of a gather and its end, weights are encoded or another product runs: what a
    compiler needs to overlap them.
    """
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    made: list[list[str]] = []

    def keep(graph: Any, _: Any) -> Any:
        nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
        names = []
        for node in nodes:
            name = str(node.target).split(".")[1] if "." in str(node.target) else ""
            value = node.meta.get("val")
            is_bytes = isinstance(value, torch.Tensor) and value.dtype == torch.uint8
            if name in ("all_gather_into_tensor", "wait_tensor"):
                name += " of planes" if is_bytes else ""
            names.append(name)
        kept = ("all_gather", "reduce_scatter", "wait", "encode", "gemm")
        made.append([name for name in names if name.startswith(kept)])
        return make_boxed_func(graph.forward)

    model = hybridq.convert(Mlp(*SIZES["aligned"]))
    styles = {
        "up": distributed.ColwiseParallel(input_layouts=Shard(1)),
        "down": distributed.RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(model, mesh_of(), styles)
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    x = torch.randn(2, 64, SIZES["aligned"][0], requires_grad=True)
    with hybridq.autocast(recipe="mxfp8"):
        y = torch.compile(model, fullgraph=True, backend=backend)(x)
    y.sum().backward()
    gather, wait = "all_gather_into_tensor of planes", "wait_tensor of planes"
    scatter = ["reduce_scatter_tensor", "wait_tensor"]
    forward, backward = made
    up = ["encode", gather, "encode", wait, "gemm"]
    assert forward == [*up, "encode", "encode", "gemm", *scatter], forward
    of_grad = ["encode", gather, wait, "gemm", "gemm"]
    # The input's columnwise plane is on its way during one product, the sum during the other.
    assert backward == [
        *of_grad,
        *(gather, "encode", "gemm", scatter[0], wait, "gemm", scatter[1]),
    ], backward


class Words(nn.Module):
    """An embedding, a norm and an Mlp: parameters whose gradients torch leaves as it likes."""

    def __init__(self, words: int, hidden: int, inner: int) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(words, hidden), nn.LayerNorm(hidden)
        self.mlp = Mlp(hidden, inner)

    def forward(self, ids: torch.Tensor) -> Any:
        x = self.table(ids)
        return x + self.mlp(self.norm(x))


def optimizers() -> None:
    """Gradients that are terms of a sum, or whole, are dealt out before a step takes them."""
    world, rank, length = dist.get_world_size(), dist.get_rank(), 64
    plan = {
        "table": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(use_local_output=True),
        "mlp.up": distributed.ColwiseParallel(input_layouts=Shard(1)),
        "mlp.down": distributed.RowwiseParallel(output_layouts=Shard(1)),
    }
    kinds = {"SGD": {"lr": 0.5, "momentum": 0.9}, "AdamW": {"lr": 0.01}}
    for name, options in kinds.items():
        made = []
        for is_parallel in (False, True):
            torch.manual_seed(0)
            model: Any = hybridq.convert(Words(64, 64, 128))
            if is_parallel:
                parallelize_module(model, mesh_of(), plan)
            optimizer = getattr(hybridq.optim, name)(model.parameters(), **options)
            for step in range(3):
                torch.manual_seed(step)
                ids, wanted = torch.randint(0, 64, (2, length * world)), torch.randn(64)
                with hybridq.autocast(recipe="mxfp8"):
                    y = model(ids)
                ((y - wanted).square().sum() / (length * world)).backward()
                placements = {getattr(p.grad, "placements", None) for p in model.parameters()}
                assert not is_parallel or (Partial(),) in placements
                optimizer.step()
                optimizer.zero_grad()
            made.append([whole(p.detach()) for p in model.parameters()])
        for a, b in zip(*made, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5, msg=f"{name} on rank {rank}")


def written() -> None:
    """A write to a DTensor is seen, which raises no version of a rank's part."""
    mesh, x = mesh_of(), torch.randn(8, 64)
    plan = {"0": ColwiseParallel()}
    layer = hybridq.convert(nn.Sequential(nn.Linear(64, 64)))
    parallelize_module(layer, mesh, plan)

    def forward(is_first: bool | None) -> torch.Tensor:
        with hybridq.autocast(recipe="mxfp8", is_first_microbatch=is_first), torch.no_grad():
            return layer(x)

    forward(True)
    layer.load_state_dict({name: 2 * value for name, value in layer.state_dict().items()})
    assert torch.equal(forward(False), forward(None))
    for kind in (hybridq.optim.AdamW, hybridq.optim.SGD):
        for is_split in (True, False):  # tensor parallelism, FSDP2
            torch.manual_seed(0)
            one = hybridq.convert(nn.Sequential(nn.Linear(64, 64, bias=False))).bfloat16()
            part = copy.deepcopy(one)
            if is_split:
                parallelize_module(part, mesh, plan)
            else:
                fully_shard(prepare_fsdp2(part))
            pairs = [(model, kind(model.parameters(), lr=1e-3)) for model in (one, part)]
            for _ in range(2):
                for model, optimizer in pairs:
                    model(x.bfloat16()).float().square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    with torch.no_grad():
                        model[0].weight.mul_(0.5)  # an average, clamp_, a checkpoint
            difference = one[0].weight - whole(part[0].weight)
            assert difference.abs().max() < 1e-3, (kind, is_split, difference.abs().max())


def refused() -> None:
    """Errors say what to do."""
    for style in (distributed.ColwiseParallel(), distributed.RowwiseParallel()):
        try:
            parallelize_module(nn.Sequential(nn.Linear(4, 4)), mesh_of(), {"0": style})
        except NotImplementedError as error:
            assert "takes a hybridq.Linear, got Linear; call hybridq.convert" in str(error), error
        else:
            raise AssertionError("a plain layer was taken")
    _, parallel = models(SIZES["aligned"])
    inner = parallel.up
    with hybridq.autocast(recipe="mxfp8"):
        try:
            inner._forward(torch.randn(4, 128), None, None, False, False)
        except RuntimeError as error:
            assert "the weight is a DTensor, and so must be the input" in str(error)
        else:
            raise AssertionError("a plain input was taken")
        inner.fuse_wgrad_accumulation = True
        try:
            inner(torch.randn(4, 128))
        except NotImplementedError as error:
            assert "leave them off for tensor parallelism" in str(error)
        else:
            raise AssertionError("fuse_wgrad_accumulation was taken")


if __name__ == "__main__":
    main(globals())
