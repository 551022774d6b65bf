"""Experts over ranks: `python experts_program.py RANK WORLD STORE NAME...`.

Every rank computes the whole block on the tokens of all ranks too: its part of that is what it must
find.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from rank_program import main
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import hybridq
from hybridq.moe import (
    ExpertsLayout,
    combine,
    convert_experts,
    dispatch,
    parallelize_experts,
    permute,
    route_plan,
)

HIDDEN, INNER, TOP, TOKENS = 64, 96, 2, 40
RECIPES = ("mxfp8", "nvfp4", "mxfp8_fwd_nvfp4_bwd", "fp8_current", "fp8_block", "fp8_delayed")


class Block(nn.Module):
    """Experts `down(silu(gate) * up)`, held as a layout says."""

    def __init__(self, layout: ExpertsLayout, experts: int) -> None:
        super().__init__()
        width = 2 * INNER if layout.has_gate and len(layout.first) == 1 else INNER
        shapes = dict.fromkeys(layout.first, (width, HIDDEN)) | {layout.down: (HIDDEN, INNER)}
        for name, (out, into) in shapes.items():
            shape = (into, out) if layout.is_transposed else (out, into)
            value = torch.randn(experts, *shape) / into**0.5
            self.register_parameter(name, nn.Parameter(value))
        for name in layout.first_biases:
            if name is not None:
                self.register_parameter(name, nn.Parameter(torch.randn(experts, width)))
        if layout.down_bias is not None:
            self.register_parameter(layout.down_bias, nn.Parameter(torch.randn(experts, HIDDEN)))
        if layout.scale is not None:
            self.register_buffer(layout.scale, torch.rand(experts) + 0.5)

    def forward(self, hidden: Any, indices: Any, weights: Any) -> Any:
        raise AssertionError("without a recipe this is called on one rank alone")


LAYOUTS = {
    "plain": ExpertsLayout("up", "down"),
    "two": ExpertsLayout(("w1", "w3"), "w2"),
    "biased": ExpertsLayout("up", "down", gate_up_bias="ub", down_bias="db", is_transposed=True),
    "scaled": ExpertsLayout("up", "down", has_gate=False, activation="relu", scale="scale"),
    "input": ExpertsLayout("up", "down", router_weights="input"),
}


class Toy(nn.Module):
    """A router and its experts."""

    def __init__(self, layout: ExpertsLayout, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, experts)
        self.experts = convert_experts(Block(layout, experts), layout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.router(x).softmax(-1)
        best = scores.topk(TOP)
        return self.experts(x, best.indices, best.values / best.values.sum(-1, keepdim=True))


def toys(layout: str, experts: int, **options: Any) -> tuple[nn.Module, nn.Module]:
    """Return a model, and the same one over all ranks."""
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(Toy(LAYOUTS[layout], experts))
    return made[0], parallelize_experts(made[1], **options)


def alone() -> Any:
    """Return a mesh of this rank alone."""
    return init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("dp", "ep"))["ep"]


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def step(model: Any, x: torch.Tensor, recipe: Any, count: int) -> list[torch.Tensor]:
    """Return the output and the input's gradient of a step; the loss is a sum over `count`."""
    own = x.clone().requires_grad_()
    torch.manual_seed(3)
    with nullcontext() if recipe is None else hybridq.autocast(recipe=recipe):
        y = model(own)
    (y.square().sum() / count).backward()
    return [y.detach(), own.grad]


def near(a: torch.Tensor, b: torch.Tensor, what: Any, bound: float) -> None:
    error = float((a - b).norm() / b.norm().clamp(min=1e-12))
    assert error <= bound, (what, error)


def summed(model: nn.Module) -> None:
    """Sum gradients of what every rank has whole."""
    for parameter in model.parameters():
        if not isinstance(parameter, DTensor):
            dist.all_reduce(parameter.grad)


def check(single: Any, shared: Any, x: torch.Tensor, recipe: Any, what: Any, bound: float) -> None:
    """Compare two steps of a model over ranks with one process that has all tokens."""
    world, rank = dist.get_world_size(), dist.get_rank()
    for number in range(2):
        single.zero_grad(), shared.zero_grad()
        y, dx = step(single, x, recipe, x.numel())
        own, own_dx = step(shared, x.chunk(world)[rank], recipe, x.numel())
        near(own, y.chunk(world)[rank], (*what, number, "y"), bound)
        near(own_dx, dx.chunk(world)[rank], (*what, number, "dx"), 10 * bound)
        summed(shared)
        for (name, a), b in zip(shared.named_parameters(), single.parameters(), strict=True):
            assert type(a) is not DTensor or a.shape == b.shape
            near(whole(a.grad), whole(b.grad), (*what, number, name), 10 * bound)


def blocks(names: str) -> None:
    """Without a transport's format, outputs and gradients are those of one process."""
    world = dist.get_world_size()
    for name in names.split(","):
        for recipe in (None, *RECIPES):
            single, shared = toys(name, 8, average_gradients=False)
            torch.manual_seed(1)
            x = torch.randn(world * TOKENS, HIDDEN)
            if recipe is None:  # in high precision, as ranks multiply; not by the class's forward
                single.experts.leaves_all_plain = lambda recipe: False
            check(single, shared, x, recipe, (name, recipe), 2e-6)


TRANSPORTS = (
    {"dispatch": "mxfp8", "combine": "mxfp8"},
    {"dispatch": ("nvfp4", "mxfp8"), "combine": (None, "nvfp4")},
    {"dispatch": "fp8_1x128", "combine": ("bf16", "fp8_1x128_e5m2")},
    {"dispatch": "recipe", "combine": "recipe"},
)


def by_role(role: Any) -> Any:
    """Formats of messages by their roles, and of products."""
    formats = {"dispatch": "mxfp8", "combine": "bf16", "grad_combine": "fp8_1x128"}
    if role.tensor_type in ("dispatch", "combine", "grad_dispatch", "grad_combine"):
        assert role.module_type == "grouped_linear" and role.name == "experts"
        return hybridq.quantizer(formats.get(role.tensor_type, "nvfp4"))
    return hybridq.MXFP8Quantizer()


def transports() -> None:
    """What travels in a format is what one process quantizes, for any number of ranks."""
    world = dist.get_world_size()
    for options in TRANSPORTS:
        recipe = hybridq.CustomRecipe(by_role)
        single, shared = toys("plain", 8, average_gradients=False, **options)
        single = parallelize_experts(single, alone(), average_gradients=False, **options)
        torch.manual_seed(1)
        x = torch.randn(world * TOKENS, HIDDEN)
        check(single, shared, x, recipe, ("transport", str(options)), 2e-6)


def messages() -> None:
    """Rows that arrive are what the public quantizer makes of each of them, to the bit."""
    world, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(rank)
    x = torch.randn(TOKENS, HIDDEN).requires_grad_()
    indices = torch.rand(TOKENS, 6).topk(TOP).indices  # of six experts
    routes, plan = route_plan(indices, 6)
    for name in ("mxfp8", "fp8_1x128", "nvfp4", "mxfp6_e3m2", None):
        x.grad = None
        rows = permute(x, routes)
        arrived = dispatch(rows, plan, name, None)
        back = combine(arrived, plan)
        whole = {"nvfp4": "nvfp4", None: "identity"}.get(name, name)
        per_row = {"row_scaled": True} if name == "nvfp4" else {}
        wanted = hybridq.quantize(rows.detach(), whole, columnwise=False, **per_row).dequantize()
        assert torch.equal(back, wanted), name
        back.sum().backward()
        assert torch.equal(x.grad, torch.full_like(x, TOP)), name
    # In the order of the own experts, rows of one expert in the order of ranks and tokens.
    tokens = torch.arange(TOKENS).repeat_interleave(TOP).view(-1, TOP) + 1000 * rank
    told = torch.stack([tokens.flatten(), indices.flatten()], 1).float()
    arrived = dispatch(told[routes.order], plan)[plan.arrived.order].long()
    first = 0
    for number, last in enumerate(plan.arrived.offsets.tolist()):
        own = arrived[first:last]
        assert bool((own[:, 1] == number + rank * (6 // world)).all())
        assert torch.equal(own[:, 0], own[:, 0].sort().values)
        first = last
    assert first == plan.num_received
    for name in ("fp8_e4m3", "mxfp8_32x32", "nvfp4_16x16"):
        try:
            dispatch(permute(x, routes), plan, name)
        except hybridq.errors.SpecError as error:
            assert "scales are of one row each, such as mxfp8" in str(error), error
        else:
            raise AssertionError(name)


def uneven() -> None:
    """Ranks with other numbers of experts, of tokens, and none; experts that nobody asks for."""
    world, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    layout = LAYOUTS["biased"]
    for experts in (7, 5 if world == 2 else 10):
        for counts in ([3] * world, [0, 11, 0, 5][:world], [0] * world):
            torch.manual_seed(2)
            single, shared = (convert_experts(Block(layout, experts), layout) for _ in range(2))
            shared.load_state_dict(single.state_dict())
            options = {"dispatch": "mxfp8", "average_gradients": False}
            parallelize_experts(single, alone(), **options)
            parallelize_experts(shared, **options)
            x = torch.randn(sum(counts), HIDDEN)
            top = torch.randint(0, 3, (sum(counts), TOP))  # the last experts have no token
            top[::4, 1] = experts  # of no expert here
            shares = torch.rand(sum(counts), TOP)
            made = []
            marked = top.masked_fill(top == experts, -1)  # the same, over ranks
            for module, which in ((single, slice(None)), (shared, rank)):
                part = (x, marked if module is shared else top, shares)
                if which == rank and module is shared:
                    part = tuple(t.split(counts)[rank] for t in part)
                own = part[0].clone().requires_grad_()
                with hybridq.autocast(recipe="mxfp8"):
                    y = module(own, *part[1:])
                y.square().sum().backward()
                made.append((y.detach(), own.grad))
            for a, b in zip(made[0], made[1], strict=True):
                near(b, a.split(counts)[rank], ("uneven", experts, counts), 1e-6)
            for a, b in zip(single.parameters(), shared.parameters(), strict=True):
                near(whole(b.grad), whole(a.grad), ("uneven", experts, counts), 1e-5)


def averages() -> None:
    """By default gradients of experts are means over ranks, as others are made."""
    world, rank = dist.get_world_size(), dist.get_rank()
    single, shared = toys("plain", 8)
    torch.manual_seed(1)
    x = torch.randn(world * TOKENS, HIDDEN)
    step(single, x, "mxfp8", x.numel())
    step(shared, x.chunk(world)[rank], "mxfp8", x.numel() // world)
    summed(shared)
    near(shared.router.weight.grad / world, single.router.weight.grad, "router", 1e-5)
    near(whole(shared.experts.up.grad), single.experts.up.grad, "up", 1e-5)


@contextmanager
def counted() -> Any:
    """Give what is encoded in the block (rows, and which planes), and bytes that travel."""
    encodes: list[tuple[str, int, bool, bool]] = []
    nbytes: list[int] = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            name = str(func).split(".")[1]
            if name in ("encode", "encode_ragged", "activation_encode_ragged"):
                planes = [one for one in args if isinstance(one, str)][-2:]
                encodes.append((name, args[0].shape[0], bool(planes[0]), bool(planes[1])))
            if name == "all_to_all_single":
                nbytes.append(args[0].nbytes)
            return func(*args, **(kwargs or {}))

    with Count():
        yield encodes, nbytes


def reused() -> None:
    """Each token is encoded once on its way, and what arrives is what the product takes."""
    world, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    layout = LAYOUTS["plain"]
    x = torch.randn(world * TOKENS, HIDDEN, dtype=torch.bfloat16)
    top = torch.rand(world * TOKENS, 8).topk(TOP).indices
    parts = [one.chunk(world)[rank] for one in (x, top, torch.ones_like(top, dtype=torch.bfloat16))]
    rows = TOP * TOKENS
    arrived = int((top // (8 // world) == rank).sum())
    made = []
    for dispatched in ("mxfp8", None):
        torch.manual_seed(0)
        experts = convert_experts(Block(layout, 8), layout).bfloat16()
        parallelize_experts(experts, dispatch=dispatched, combine=dispatched)
        own = parts[0].clone().requires_grad_()
        with hybridq.autocast(recipe="mxfp8"):
            experts(*parts)  # ranks compare what is new to them
            with counted() as (encodes, nbytes), torch.no_grad():
                experts(*parts)
            of_tokens = [one for one in encodes if one[1] in (rows, arrived)]
            second = ("activation_encode_ragged", arrived, True, False)
            if dispatched is None:
                assert of_tokens == [("encode_ragged", arrived, True, False), second], encodes
            else:
                sent = [("encode", rows, True, False), second, ("encode", arrived, True, False)]
                assert of_tokens == sent, encodes
            with counted() as (encodes, _):
                y = experts(own, *parts[1:])
            if dispatched is not None:  # the columnwise plane, for the gradient of the weight
                assert ("encode_ragged", arrived, False, True) in encodes, encodes
                assert not any(one[:3] == ("encode_ragged", arrived, True) for one in encodes)
            with counted() as (encodes, _):
                y.square().sum().backward()
            # Of the gradient both planes are made of what the activation's backward gives; of what
            # arrives the columnwise one alone, where it has arrived in the format of the product.
            ragged = [one for one in encodes if one[0] == "encode_ragged"]
            both = ("encode_ragged", arrived, True, True)
            assert ragged == [("encode_ragged", arrived, dispatched is None, True), both], encodes
            sent = [one for one in encodes if one[0] == "encode"]
            if dispatched is not None:
                assert sent == [
                    (*one, True, False) for one in (("encode", rows), ("encode", arrived))
                ]
        made.append((nbytes[1:], own.grad))
    for quantized, plain in zip(made[0][0], made[1][0], strict=True):
        assert quantized / plain == (1 + 1 / 32) / 2, (quantized, plain)
    near(made[0][1].float(), made[1][1].float(), "gradients", 0.1)


def expects(kind: Any, text: str, call: Any) -> None:
    """Expect an error, on this rank."""
    try:
        call()
    except kind as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"no error: {text}")


def faults() -> None:
    """What ranks disagree on, or one of them refuses, is an error on every rank."""
    rank = dist.get_rank()
    layout = LAYOUTS["plain"]

    def make(experts: int = 8, **options: Any) -> Any:
        return lambda: parallelize_experts(Toy(layout, experts), **options)

    expects(RuntimeError, "got the experts experts: QuantizedBlock", make(8 if rank else 6))
    expects(
        RuntimeError,
        "got the formats of dispatch: as they are and as they are on rank 0; mxfp8 and mxfp8 on",
        make(dispatch="mxfp8" if rank else None),
    )
    expects(RuntimeError, "got the quantizer", make(recipe="mxfp8" if rank else "nvfp4"))
    text = "plan names modules of the model, got 'other*'"
    kind: Any = RuntimeError if rank else ValueError
    expects(kind, text, make(plan=["experts"] if rank else ["other*"]))
    for options, error, told in (
        ({"experts": 1}, ValueError, "every rank must have one at least, got 1 experts on 2 ranks"),
        ({"plan": {"router": None}}, ValueError, "router must be experts that are known, got Lin"),
        ({"plan": "experts"}, TypeError, "plan must be names or a mapping, got str"),
        ({"plan": {"experts": 3}}, TypeError, "plan maps names of modules to ExpertsLayout"),
        ({"dispatch": "fp8_e4m3"}, ValueError, "dispatch: rows travel in formats whose scales"),
        ({"combine": 8}, TypeError, "combine: communication must be the name of a format"),
        ({"mesh": 2}, TypeError, "mesh must be a DeviceMesh, ExpertRanks or None, got int"),
        ({"recipe": "mx"}, ValueError, "mx"),
    ):
        expects(error, told, make(**options))
    expects(
        ValueError,
        "must have experts that are known, got Linear without any",
        lambda: parallelize_experts(nn.Linear(2, 2)),
    )
    toy = Toy(layout, 8)
    toy.experts.up.requires_grad_(False)
    expects(ValueError, "all weights must be trained or none", lambda: parallelize_experts(toy))
    toy = Toy(layout, 8)
    toy.experts.up.data = toy.experts.up.data.bfloat16()
    expects(TypeError, "must have one dtype", lambda: parallelize_experts(toy))
    # One rank alone refuses: it says why, and so do the others.
    for change, kind, text in (
        (lambda one: one.up.requires_grad_(False), ValueError, "all weights must be trained"),
        (lambda one: one.bfloat16(), RuntimeError, "torch.bfloat16"),
    ):
        toy = Toy(layout, 8)
        if rank:
            change(toy.experts)
        expects(kind if rank else RuntimeError, text, lambda toy=toy: parallelize_experts(toy))
    shared = make()()
    expects(ValueError, "dealt out once, got some", lambda: parallelize_experts(shared))
    x = torch.randn(4, HIDDEN)
    with hybridq.autocast(recipe="mxfp8" if rank else "fp8_block"):
        expects(RuntimeError, "got the quantizers of down", lambda: shared(x))
    expects(
        RuntimeError,
        "got the dtype of tokens",
        lambda: shared.experts(
            x.bfloat16() if rank else x, torch.zeros(4, 2, dtype=torch.int64), torch.ones(4, 2)
        ),
    )
    with torch.no_grad() if rank else nullcontext():
        expects(RuntimeError, "got whether gradients are recorded", lambda: shared(x))
    shared.experts.fuse_wgrad_accumulation = True
    with hybridq.autocast(recipe="mxfp8"):
        expects(NotImplementedError, "that parallelize_experts dealt out", lambda: shared(x))
    shared.experts.fuse_wgrad_accumulation = False
    assert shared(x).shape == x.shape  # and afterwards all is well


if __name__ == "__main__":
    main(globals())
