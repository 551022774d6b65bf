"""Modules that are parts: `python parallel_modules_program.py RANK WORLD STORE NAME...`.

Every rank computes a whole module too, and compares its part with that one's.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rank_program import logged, main
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import hybridq
from hybridq import PlaneSpec
from hybridq.distributed import reduce_sequence_parallel_gradients

HIDDEN, INNER, TOKENS, BATCH = 136, 320, 8, 3
#: Tokens of whole blocks on four ranks.
MANY = 256
RECIPES = ("mxfp8", "nvfp4", "mxfp8_fwd_nvfp4_bwd", "fp8_current", "fp8_block", "fp8_delayed")


class Case(NamedTuple):
    """A module, its input's features, what of its output a rank has, how it is asked for parts."""

    make: Callable[..., nn.Module]
    features: int
    is_column: bool
    options: dict[str, Any]


CASES = {
    "column": Case(
        lambda **o: hybridq.Linear(HIDDEN, INNER, **o), HIDDEN, True, {"parallel_mode": "column"}
    ),
    "row": Case(
        lambda **o: hybridq.Linear(INNER, HIDDEN, **o), INNER, False, {"parallel_mode": "row"}
    ),
    "norm": Case(
        lambda **o: hybridq.LayerNormLinear(HIDDEN, INNER, **o),
        HIDDEN,
        True,
        {"parallel_mode": "column"},
    ),
    "mlp": Case(
        lambda **o: hybridq.LayerNormMLP(HIDDEN, INNER, **o),
        HIDDEN,
        False,
        {"set_parallel_mode": True},
    ),
    "layer": Case(
        lambda **o: hybridq.TransformerLayer(
            128,
            INNER,
            4,
            4,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            qkv_weight_interleaved=True,
            qk_norm_type="RMSNorm",
            normalization="RMSNorm",
            **o,
        ),
        128,
        False,
        {"set_parallel_mode": True},
    ),
}


def part_of(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    return tensor.chunk(dist.get_world_size(), dim)[dist.get_rank()].contiguous()


def parts(whole: nn.Module, part: nn.Module, of: Callable[[Any], torch.Tensor]) -> Any:
    """Yield each parameter of a part, and what of the whole module's it should be."""
    pairs = zip(whole.named_parameters(), part.named_parameters(), strict=True)
    for (name, one), (same, own) in pairs:
        assert name == same
        is_part = getattr(own, "tensor_model_parallel", False)
        assert is_part == (own.shape != one.shape), name
        yield name, own, part_of(of(one), own.partition_dim) if is_part else of(one)


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


def near(a: torch.Tensor, b: torch.Tensor, what: Any, bound: float = 3e-6) -> None:
    error = float((a - b).norm() / b.norm())
    assert error < bound, (what, error)


def from_rows(role: Any) -> Any:
    """Columnwise planes of the decoded rowwise ones; of the gradient in high precision."""
    is_grad = role.tensor_type == "grad_output"
    return hybridq.HybridQuantizer(
        rowwise_quantizer=hybridq.MXFP8Quantizer() if is_grad else hybridq.NVFP4Quantizer(),
        columnwise_quantizer=hybridq.IdentityQuantizer() if is_grad else hybridq.MXFP8Quantizer(),
        columnwise_source="rowwise_dequantized",
    )


def recipe_of(name: str | None) -> Any:
    return hybridq.CustomRecipe(from_rows) if name == "from_rows" else name


def modules(names: str) -> None:
    """Outputs and gradients are parts of the whole module's."""
    group = dist.group.WORLD
    for name in names.split(","):
        case = CASES[name]
        for recipe_name in (None, *RECIPES, "from_rows"):
            recipe = recipe_of(recipe_name)
            for sequence_parallel, tokens in ((False, TOKENS), (True, TOKENS), (True, MANY)):
                torch.manual_seed(0)
                options = {**case.options, "sequence_parallel": sequence_parallel}
                whole, part = case.make(), case.make(tp_group=group, **options)
                with torch.no_grad():
                    for _, own, value in parts(whole, part, lambda p: p):
                        own.copy_(value)
                x = torch.randn(tokens, BATCH, case.features)
                out = INNER if case.is_column else HIDDEN if name != "layer" else 128
                dy = torch.randn(tokens, BATCH, out)
                wanted, wanted_dx = run(whole, x, dy, recipe)

                def of_rank(t: torch.Tensor, is_column: bool, is_sequence: bool) -> torch.Tensor:
                    return part_of(t, -1) if is_column else part_of(t, 0) if is_sequence else t

                given = (name == "row", sequence_parallel)
                made = (case.is_column, sequence_parallel)
                y, dx = run(part, of_rank(x, *given), of_rank(dy, *made), recipe)
                what = (name, recipe_name, sequence_parallel, tokens)
                near(y, of_rank(wanted, *made), what)
                near(dx, of_rank(wanted_dx, *given), what, 1e-4)
                reduce_sequence_parallel_gradients(part, group)
                for which, own, value in parts(whole, part, lambda p: p.grad):
                    near(own.grad, value, (*what, which), 1e-4)


def compiled() -> None:
    """A sequence-parallel network as one graph."""
    case, group = CASES["mlp"], dist.group.WORLD
    torch.manual_seed(0)
    part = case.make(tp_group=group, set_parallel_mode=True, sequence_parallel=True)
    for tokens in (4, 64):  # values travel, and planes
        x, dy = torch.randn(tokens, BATCH, HIDDEN), torch.randn(tokens, BATCH, HIDDEN)
        wanted = run(part, x, dy, "mxfp8")
        grads = [p.grad.clone() for p in part.parameters()]
        found = run(torch.compile(part, fullgraph=True), x, dy, "mxfp8")
        made = (*found, *(p.grad for p in part.parameters()))
        for a, b in zip(made, (*wanted, *grads), strict=True):
            near(a, b, "compiled", 1e-3)


@contextmanager
def gathers() -> Any:
    """Give the dtype and bytes of each all-gather in the block, of what one rank sends."""
    seen: list[tuple[torch.dtype, int]] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            if func is torch.ops._c10d_functional.all_gather_into_tensor.default:
                seen.append((args[0].dtype, args[0].nbytes))
            return func(*args, **(kwargs or {}))

    with Watch():
        yield seen


def traffic() -> None:
    """Planes travel, each once, and nothing else does; what cannot be cut so is told."""
    group, world = dist.group.WORLD, dist.get_world_size()
    rows = MANY * 2 // world
    nbytes = {
        # What a rank sends of its input: its rowwise plane, and in the backward the other.
        "mxfp8": [("mxfp8", rows, 128), ("mxfp8", 128, rows)],
        "mxfp8_fwd_nvfp4_bwd": [("mxfp8", rows, 128), ("nvfp4", 128, rows)],
        "fp8_current": [("fp8_e4m3", rows, 128), ("fp8_e4m3", 128, rows)],
    }
    for name, wanted in nbytes.items():
        part = hybridq.LayerNormMLP(
            128, INNER, tp_group=group, set_parallel_mode=True, sequence_parallel=True
        ).bfloat16()
        x = torch.randn(MANY // world, 2, 128, dtype=torch.bfloat16).requires_grad_()
        with gathers() as seen:
            with hybridq.autocast(recipe=name):
                y = part(x)
            y.sum().backward()
        # The second is of the gradient: both of its planes, of one scale per tensor one.
        assert [dtype for dtype, _ in seen] == [torch.uint8] * 3, (name, seen)
        found = [nbytes for _, nbytes in seen]
        for number, (spec, *shape) in zip((0, 2), wanted, strict=True):
            shared = sum(
                b.numel * 4 for b in PlaneSpec.parse(spec).buffers(1, 1) if b.shape == (1,)
            )
            assert found[number] == PlaneSpec.parse(spec).nbytes(*shape) - shared, (name, number)
        assert found[1] / (2 * rows * 128) < (0.6 if name != "mxfp8" else 1.04), (name, found)
    part = hybridq.Linear(128, 128, tp_group=group, parallel_mode="column", sequence_parallel=True)
    with logged() as lines, gathers() as seen, hybridq.autocast(recipe="mxfp8"):
        part(torch.randn(5, 3, 128))
    assert [dtype for dtype, _ in seen] == [torch.float32]
    if dist.get_rank() == 0:
        assert any("each rank has 15 tokens, and blocks are of 32; pad" in one for one in lines), (
            lines
        )


def arguments() -> None:
    """Groups that come later, initial values, and what is refused."""
    rank, world, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    late = hybridq.Linear(64, 64, tp_size=world, parallel_mode="column")
    assert late.weight.shape == (64 // world, 64) and late.out_features == 64 // world
    with raises(RuntimeError, "call set_tensor_parallel_group"):
        late(torch.randn(2, 64))
    late.set_tensor_parallel_group(group)
    assert late(torch.randn(2, 64)).shape == (2, 64 // world)
    drawn = []

    class Tracker:
        @contextmanager
        def fork(self, name: str = "none") -> Any:
            drawn.append(name)
            with torch.random.fork_rng():
                torch.manual_seed(100 + rank)
                yield

    options = {"get_rng_state_tracker": Tracker, "rng_tracker_name": "model"}
    torch.manual_seed(0)
    row = hybridq.Linear(64, 32, tp_group=group, parallel_mode="row", **options)
    state = torch.get_rng_state()
    torch.manual_seed(0)
    assert torch.equal(state, torch.get_rng_state()) and drawn == ["model"]
    assert float(row.weight.abs().max()) <= 64**-0.5 and not row.bias.any()
    both = [torch.empty_like(row.weight) for _ in range(world)]
    dist.all_gather(both, row.weight.detach())
    assert not torch.equal(both[0], both[1])
    layer = hybridq.TransformerLayer(64, 128, 4, tp_size=world, set_parallel_mode=True)
    layer.set_tensor_parallel_group(group)
    assert layer(torch.randn(3, 2, 64)).shape == (3, 2, 64)
    with raises(ValueError, "tp_size must divide out_features, got"):
        hybridq.Linear(64, 63, tp_group=group, parallel_mode="column")
    with raises(ValueError, "did you mean 'column'"):
        hybridq.Linear(64, 64, tp_group=group, parallel_mode="colum")
    with raises(ValueError, "tp_size must divide num_gqa_groups"):
        hybridq.MultiheadAttention(64, 4, num_gqa_groups=1, tp_group=group, set_parallel_mode=True)
    with raises(ValueError, f"must have tp_size=3 ranks, got {world}"):
        hybridq.Linear(63, 63, tp_size=3, parallel_mode="row").set_tensor_parallel_group(group)
    with raises(ValueError, "must be 'column' or None"):
        hybridq.LayerNormLinear(64, 64, tp_group=group, parallel_mode="row")
    split = hybridq.Linear(64, 64, tp_group=group, parallel_mode="row", sequence_parallel=True)
    with raises(ValueError, "must divide the first dimension of the input, got 3"):
        split(torch.randn(3, 64 // world))
    with raises(NotImplementedError, "a tensor-parallel one"), hybridq.autocast(recipe="mxfp8"):
        split(torch.randn(4, 64 // world), fp8_output=True)


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
