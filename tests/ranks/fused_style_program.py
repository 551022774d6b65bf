"""Fused modules by `FusedParallel`: `python fused_style_program.py RANK WORLD STORE NAME...`.

Every rank computes the whole module too; what ranks make is a part of that, but for the order of
FP32 sums.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from rank_program import main
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    SequenceParallel,
    parallelize_module,
)

import hybridq
from hybridq import distributed
from hybridq.distributed import FusedParallel
from hybridq.nn.weights import separate_names

HIDDEN, INNER, BATCH = 128, 320, 2
#: Tokens whose planes travel on up to four ranks, and tokens whose values do.
MANY, FEW = 256, 8
RECIPES = ("mxfp8", "nvfp4", "mxfp8_fwd_nvfp4_bwd", "fp8_current", "fp8_block", "fp8_delayed")
#: Their rows lie in another order than one process has them, and so do random bits of gradients.
REORDERED = ("mlp", "attention", "layer")
_LAYER: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0}

CASES: dict[str, Callable[[], nn.Module]] = {
    "norm": lambda: hybridq.LayerNormLinear(HIDDEN, INNER),
    "mlp": lambda: hybridq.LayerNormMLP(HIDDEN, INNER, activation="swiglu"),
    "attention": lambda: hybridq.MultiheadAttention(
        HIDDEN, 8, num_gqa_groups=4, attention_dropout=0.0, softmax_type="learnable"
    ),
    "layer": lambda: hybridq.TransformerLayer(
        HIDDEN,
        INNER,
        8,
        num_gqa_groups=4,
        normalization="RMSNorm",
        qk_norm_type="RMSNorm",
        output_layernorm=True,
        activation="geglu",
        **_LAYER,
    ),
    "interleaved": lambda: hybridq.TransformerLayer(
        HIDDEN, INNER, 8, num_gqa_groups=4, qkv_weight_interleaved=True, **_LAYER
    ),
}


def hybrid(role: Any) -> Any:
    """MXFP8 forward and NVFP4 backward, rounded to nearest."""
    quantizers = {
        "rowwise_quantizer": hybridq.MXFP8Quantizer(),
        "columnwise_quantizer": hybridq.NVFP4Quantizer(),
    }
    if role.tensor_type == "grad_output":
        return hybridq.NVFP4Quantizer()
    return hybridq.HybridQuantizer(**quantizers, columnwise_source="rowwise_dequantized")


def recipe_of(case: str, name: str | None) -> Any:
    """Return a recipe that rounds to nearest where random bits would be others."""
    if case in REORDERED and name == "nvfp4":
        return hybridq.recipes.NVFP4BlockScaling(disable_stochastic_rounding=True)
    if case in REORDERED and name == "mxfp8_fwd_nvfp4_bwd":
        return hybridq.CustomRecipe(hybrid)
    return name


def mesh_of() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def matrices(whole: nn.Module) -> dict[str, tuple[str, slice]]:
    """Return by the name of each parameter of a part that of the whole's, and its rows there."""
    found = {}
    for name, parameter in whole.named_parameters():
        path, _, leaf = name.rpartition(".")
        apart = separate_names(whole.get_submodule(path)).get(leaf, {})
        start = 0
        for one, rows in apart.items() if len(apart) > 1 else [(leaf, parameter.shape[0])]:
            found[f"{path}.{one}".lstrip(".")] = (name, slice(start, start + rows))
            start += rows
    return found


def pairs(whole: nn.Module, part: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """Yield each parameter of a part, and what the whole has of it, with its gradient."""
    parameters, places = dict(whole.named_parameters()), matrices(whole)
    assert list(places) == [name for name, _ in part.named_parameters()]
    for name, own in part.named_parameters():
        which, rows = places[name]
        grad = parameters[which].grad
        made = parameters[which].detach()[rows]
        made.grad = None if grad is None else grad[rows]
        yield name, made, own


def run(module: nn.Module, x: torch.Tensor, dy: torch.Tensor, recipe: Any) -> Any:
    own = x.clone().requires_grad_()
    torch.manual_seed(5)
    for _ in range(2):
        module.zero_grad()
        own.grad = None
        with nullcontext() if recipe is None else hybridq.autocast(recipe=recipe):
            y = module(own)
        (y * dy).sum().backward()
    return y.detach(), own.grad


def near(a: torch.Tensor, b: torch.Tensor, what: Any, bound: float) -> None:
    error = float((a - b).norm() / b.norm())
    assert error < bound, (what, error)


def own_part(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x.chunk(dist.get_world_size(), dim)[dist.get_rank()].contiguous()


def modules(names: str) -> None:
    """Values and all gradients are one process's, norms and biases included."""
    mesh = mesh_of()
    for name in names.split(","):
        for recipe_name in (None, *RECIPES):
            recipe = recipe_of(name, recipe_name)
            for sequence_parallel, tokens in ((False, FEW), (True, FEW), (True, MANY)):
                torch.manual_seed(0)
                whole = CASES[name]()
                torch.manual_seed(dist.get_rank())
                split = CASES[name]()
                if dist.get_rank() == 0:
                    split.load_state_dict(whole.state_dict())
                style = FusedParallel(sequence_parallel=sequence_parallel)
                model = parallelize_module(nn.ModuleDict({"it": split}), mesh, {"i*": style})
                part = model["it"]
                out = INNER if name == "norm" else HIDDEN
                torch.manual_seed(1)
                x, dy = torch.randn(tokens, BATCH, HIDDEN), torch.randn(tokens, BATCH, out)
                wanted, wanted_dx = run(whole, x, dy, recipe)
                cut = (lambda t: own_part(t, 0)) if sequence_parallel else (lambda t: t)
                made = (lambda t: own_part(t, -1)) if name == "norm" else cut
                y, dx = run(part, cut(x), made(dy), recipe)
                what = (name, recipe_name, sequence_parallel, tokens)
                bound = 1e-4 if name in ("layer", "interleaved") and recipe else 3e-6
                near(y, made(wanted), what, bound)
                near(dx, cut(wanted_dx), what, 1e-2 if recipe else 1e-5)
                for which, a, b in pairs(whole, part):
                    assert torch.equal(b.full_tensor(), a), (*what, which)
                    # One code of four bits that rounds the other way is 1% of a small gradient:
                    # this holds the wiring, and `fused_sums_program.py` each product.
                    loose = 3e-2 if name in ("layer", "interleaved") and recipe else 5e-3
                    near(b.grad.full_tensor(), a.grad, (*what, which), loose)


def split(make: Callable[[], nn.Module], **options: Any) -> tuple[nn.Module, nn.Module]:
    """Return a whole module, and this rank's part of it."""
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(make())
    return made[0], parallelize_module(made[1], mesh_of(), FusedParallel(**options))


def decoder() -> None:
    """Attention to another sequence; the residuals are outputs of norms."""
    for interleaved in (False, True):
        whole, part = split(
            lambda interleaved=interleaved: hybridq.TransformerLayer(
                HIDDEN,
                INNER,
                8,
                layer_type="decoder",
                num_gqa_groups=4,
                apply_residual_connection_post_layernorm=True,
                qkv_weight_interleaved=interleaved,
                **_LAYER,
            ),
            sequence_parallel=True,
        )
        torch.manual_seed(2)
        x, other = torch.randn(2, 64, BATCH, HIDDEN)
        with hybridq.autocast(recipe="mxfp8"):
            wanted = whole(x, encoder_output=other)
            found = part(own_part(x, 0), encoder_output=own_part(other, 0))
        near(found, own_part(wanted, 0), interleaved, 1e-4)
        wanted.square().sum().backward()
        found.square().sum().backward()
        for name, a, b in pairs(whole, part):
            near(b.grad.full_tensor(), a.grad, name, 5e-3)


def apart() -> None:
    """Biases that are returned, meta modules, values of each rank, names of parts, DTensors."""
    rank, world, mesh = dist.get_rank(), dist.get_world_size(), mesh_of()
    whole, part = split(
        lambda: hybridq.LayerNormMLP(HIDDEN, INNER, return_bias=True), sequence_parallel=True
    )
    with torch.no_grad():
        part.fc2_bias.add_(1)
        whole.fc2_bias.add_(1)
    torch.manual_seed(2)
    x = torch.randn(8, HIDDEN)
    wanted, found = whole(x), part(own_part(x, 0))
    (wanted[0] * wanted[1]).sum().backward()
    (found[0] * found[1]).sum().backward()
    for name in ("fc2_bias", "layer_norm_bias"):
        near(getattr(part, name).grad.full_tensor(), getattr(whole, name).grad, name, 1e-5)
    assert not any(hasattr(one, "sequence_parallel") for one in part.parameters())
    assert part.fc1_weight.tensor_model_parallel and part.fc2_weight.partition_dim == 1

    shapes = hybridq.TransformerLayer(64, 128, 4, device="meta")
    parallelize_module(shapes, mesh, FusedParallel())
    assert shapes.layernorm_mlp.fc2_weight.to_local().shape == (64, 128 // world)

    torch.manual_seed(rank)
    own = hybridq.LayerNormLinear(64, 64)
    values = own.weight.detach().clone()
    parallelize_module(own, mesh, FusedParallel(), src_data_rank=None)
    assert torch.equal(own.weight.to_local(), values.chunk(world)[rank])
    assert own.out_features == 64 // world
    loads()
    kept_and_copied()

    whole, part = split(lambda: hybridq.LayerNormMLP(HIDDEN, INNER))
    prepared = PrepareModuleInput(
        input_layouts=Shard(0), desired_input_layouts=Shard(0), use_local_output=False
    )
    model = parallelize_module(nn.Sequential(part), mesh, prepared)
    near(model(own_part(x, 0)), whole(x), "DTensor", 1e-6)


def kept_and_copied() -> None:
    """Initial values behind the meta device, planes of a cached weight, copies, an optimizer."""
    mesh = mesh_of()
    layer = hybridq.TransformerLayer(64, 128, 4, activation="swiglu", device="meta", **_LAYER)
    parallelize_module(layer, mesh, FusedParallel())
    layer.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(torch.nan)
    torch.manual_seed(0)
    for one in layer.modules():
        if hasattr(one, "reset_parameters"):
            one.reset_parameters()
    weight = layer.layernorm_mlp.fc1_up_weight.full_tensor()
    assert 0.9 * 64**-0.5 < float(weight.abs().max()) <= 64**-0.5
    down = layer.layernorm_mlp.fc2_weight.full_tensor()
    assert 0.9 * 128**-0.5 < float(down.abs().max()) <= 128**-0.5  # the whole's range

    _, part = split(CASES["mlp"])
    x = torch.randn(32, HIDDEN)
    dist.broadcast(x, 0)
    with hybridq.autocast(recipe="mxfp8"):
        y = part(x, is_first_microbatch=True)
        kept = part._cached_weights["fc1"]
        part(x, is_first_microbatch=False)
        assert part._cached_weights["fc1"] is kept and kept.row
        again = copy.deepcopy(part)(x)
    assert torch.equal(again, y)
    y.sum().backward()
    norm = nn.utils.clip_grad_norm_(part.parameters(), 1e-3)
    assert float(norm.full_tensor()) > 1e-3
    torch.optim.AdamW(part.parameters()).step()
    assert not torch.equal(part(x), y)


def loads() -> None:
    """Plain values of the whole, of its matrices, and of this rank's parts."""
    rank, world, mesh = dist.get_rank(), dist.get_world_size(), mesh_of()
    attention = hybridq.MultiheadAttention(64, 8, num_gqa_groups=4, bias=False)
    parallelize_module(attention, mesh, FusedParallel())
    rows = {"query_weight": 64, "key_weight": 32, "value_weight": 32}
    wanted = torch.arange(128 * 64.0).view(128, 64)
    apart = dict(zip(rows, wanted.split(list(rows.values())), strict=True))
    parts = {name: one.chunk(world)[rank] for name, one in apart.items()}
    for given in (apart, {"weight": wanted}, parts, {"weight": torch.cat([*parts.values()])}):
        with torch.no_grad():
            for parameter in attention.parameters():
                parameter.zero_()
        state = {f"qkv.{name}": one.clone() for name, one in given.items()}
        attention.load_state_dict({**state, "proj.weight": torch.ones(64, 64)})
        for name, one in apart.items():
            assert torch.equal(getattr(attention.qkv, name).full_tensor(), one), (name, list(given))
        own = attention.qkv.local_parameter("weight")
        assert torch.equal(own, torch.cat([*parts.values()]))
        # One behind the other in memory: no copy was made.
        assert own.data_ptr() == attention.qkv.query_weight.to_local().data_ptr()
    with raises(RuntimeError, "qkv.weight: must have 128 rows, of which this rank's part has"):
        attention.load_state_dict({"qkv.weight": torch.ones(7, 64)}, strict=False)


def compiled() -> None:
    """A layer as one graph."""
    _, part = split(lambda: hybridq.LayerNormMLP(HIDDEN, INNER), sequence_parallel=True)
    x, dy = torch.randn(64, BATCH, HIDDEN), torch.randn(64, BATCH, HIDDEN)
    wanted = run(part, x, dy, "mxfp8")
    grads = [p.grad.to_local().clone() for p in part.parameters()]
    found = run(torch.compile(part, fullgraph=True), x, dy, "mxfp8")
    again = [p.grad.to_local() for p in part.parameters()]
    for a, b in zip((*found, *again), (*wanted, *grads), strict=True):
        near(a, b, "compiled", 1e-3)


def pipelined() -> None:
    """What torch's `_micro_pipeline_tp` looks for in graphs of a layer, and where it stops.

    All gathers and scattered sums are of the shape that its finders match. It then wants a product
    of torch's beside them, which there is without a recipe, and none with one: planes of several
    buffers are multiplied by operators of hybridq's.
    """
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.fx_passes import micro_pipeline_tp as torchs

    found: list[tuple[int, int, set[Any]]] = []

    def see(graph: Any, _: Any) -> Any:
        nodes = list(graph.graph.nodes)
        gathers = torchs.find_all_gather_patterns(graph.graph)
        scatters = torchs.find_reduce_scatter_patterns(graph.graph)
        for kind, matched in (("all_gather_into", gathers), ("reduce_scatter", scatters)):
            assert len(matched) == sum(kind in str(node.target) for node in nodes), kind
        products = {product_of(one.input_node) for one in scatters}
        found.append((len(gathers), len(scatters), products))
        return make_boxed_func(graph.forward)

    def product_of(node: Any) -> Any:
        while "view" in str(node.target):
            node = node.args[0]
        return node.target

    torchs_own, own = {torch.ops.aten.mm.default}, {torch.ops.hybridq.gemm.default}
    backend = aot_autograd(fw_compiler=see, bw_compiler=see)
    for recipe in (None, "mxfp8"):
        torch._dynamo.reset()
        make = partial(hybridq.LayerNormMLP, HIDDEN, INNER, bias=False)
        _, part = split(make, sequence_parallel=True)
        x = torch.randn(64, BATCH, HIDDEN, requires_grad=True)
        with nullcontext() if recipe is None else hybridq.autocast(recipe=recipe):
            y = torch.compile(part, fullgraph=True, backend=backend)(x)
        y.sum().backward()
    # Forward and backward; with a recipe the input's columnwise plane is gathered there, too.
    assert found == [(1, 1, torchs_own), (1, 1, torchs_own), (1, 1, own), (2, 1, own)], found


def refused() -> None:
    """Nothing is changed where a module cannot be split; the error says what to do."""
    world, mesh = dist.get_world_size(), mesh_of()
    layer = hybridq.TransformerLayer(64, 128, 4)
    state = {name: one.clone() for name, one in layer.state_dict().items()}

    def check(module: nn.Module, style: Any, kind: type[Exception], text: str) -> None:
        with raises(kind, text):
            parallelize_module(module, mesh, style)

    for module in (layer, layer.self_attention, layer.layernorm_mlp):
        check(module, SequenceParallel(), NotImplementedError, "take hybridq.distributed.FusedPar")
        for style in (distributed.ColwiseParallel(), distributed.RowwiseParallel()):
            check(module, style, NotImplementedError, "take hybridq.distributed.FusedParallel")
        # torch looks at the class before it looks at the module.
        check(module, ColwiseParallel(), NotImplementedError, "only support nn.Linear")
    check(hybridq.Linear(8, 8), FusedParallel(), NotImplementedError, "for a hybridq.Linear")
    one_group = hybridq.TransformerLayer(64, 128, 4, num_gqa_groups=1)
    check(one_group, FusedParallel(), ValueError, f"divide num_gqa_groups, got {world} and 1")
    odd = hybridq.LayerNormMLP(64, 129)
    check(odd, FusedParallel(), ValueError, f"must divide ffn_hidden_size, got {world} and 129")
    batch_first = hybridq.TransformerLayer(64, 128, 4, attn_input_format="bshd")
    check(batch_first, FusedParallel(sequence_parallel=True), ValueError, "got 'bshd'")
    with hybridq.quantized_model_init("mxfp8"):
        quantized = hybridq.LayerNormMLP(64, 128)
    check(quantized, FusedParallel(), ValueError, "parameters must be in high precision")
    for option in ("fuse_wgrad_accumulation", "delay_wgrad_compute"):
        late = hybridq.LayerNormMLP(64, 128, **{option: True})
        check(
            late, FusedParallel(), ValueError, "leave them off, or make the module with tp_group="
        )
    assert all(torch.equal(one, state[name]) for name, one in layer.state_dict().items())
    parallelize_module(layer, mesh, FusedParallel())
    check(layer, FusedParallel(), ValueError, "the module must be whole")
    with raises(TypeError, "sequence_parallel must be a bool, got int"):
        FusedParallel(sequence_parallel=1)
    with raises(ValueError, "the mesh must have one dimension, got 2"):
        two = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "tp"))
        FusedParallel()._apply(hybridq.LayerNormLinear(8, 8), two)


@contextmanager
def raises(kind: type[Exception], text: str) -> Any:
    try:
        yield
    except kind as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"no {kind.__name__}: {text}")


if __name__ == "__main__":
    main(globals())
