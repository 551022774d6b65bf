"""Converted experts as modules: compiled, recomputed, copied, saved; and what is refused."""

from __future__ import annotations

import copy
import io
import pickle
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hybridq
from hybridq.moe import Experts, ExpertsLayout, Routes, convert_experts, permute, unpermute
from own_experts import HIDDEN, OwnExperts, clamped, routing

GPT_OSS = ExpertsLayout(
    gate_up_bias="b1",
    down_bias="b2",
    is_transposed=True,
    is_concatenated=False,
    activation=clamped,
)


def made(layout: ExpertsLayout = GPT_OSS, dtype: torch.dtype = torch.bfloat16) -> OwnExperts:
    torch.manual_seed(1)
    return convert_experts(OwnExperts(layout, dtype), layout)


def arguments(tokens: int = 19) -> list[torch.Tensor]:
    torch.manual_seed(tokens)
    indices, weights = routing(tokens, seed=tokens)
    return [
        torch.randn(tokens, HIDDEN).bfloat16().requires_grad_(),
        indices,
        weights.bfloat16().requires_grad_(),
    ]


def trained(call, module, args, recipe="mxfp8") -> list[torch.Tensor]:
    module.zero_grad()
    for one in args:
        one.grad = None
    torch.manual_seed(5)
    with hybridq.autocast(recipe=recipe):
        y = call(*args)
    y.backward(torch.ones_like(y))
    grads = [one.grad for one in (args[0], args[2], *module.parameters())]
    return [y.detach(), *grads]


def equal(got, want) -> None:
    for number, (one, other) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(one, other), number


@pytest.mark.more
@pytest.mark.parametrize("layout", [GPT_OSS, ExpertsLayout()], ids=["gpt-oss", "plain"])
def test_a_block_compiles_into_one_graph(layout: ExpertsLayout) -> None:
    """Planes and products are those of the eager module; other sizes of groups are no new graph."""
    module = made(layout)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for seed in range(3):
        args = arguments()
        args[1] = args[1].roll(seed, 0)
        equal(trained(compiled, module, args), trained(module, module, args))
    with torch.no_grad(), hybridq.autocast(recipe="mxfp8"):
        assert torch.equal(compiled(*args), module(*args))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_fwd_nvfp4_bwd"])
def test_recomputed_it_has_the_same_bits(reentrant: bool, recipe: str) -> None:
    module, args = made(), arguments()
    again = partial(checkpoint, module, use_reentrant=reentrant)
    equal(trained(again, module, args, recipe), trained(module, module, args, recipe))


def test_it_is_copied_and_saved_as_ever() -> None:
    module, args = made(), arguments()
    want = trained(module, module, args)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    copies = (
        copy.deepcopy(module),
        pickle.loads(pickle.dumps(module)),
        torch.load(file, weights_only=False),
    )
    for other in copies:
        assert type(other) is type(module) and isinstance(other, OwnExperts)
        equal(trained(other, other, args), want)
    fresh = made()
    with torch.no_grad():
        for one in fresh.parameters():
            one.zero_()
    fresh.load_state_dict(module.state_dict())
    equal(trained(fresh, fresh, args), want)
    assert "QuantizedOwnExperts" in repr(module) and isinstance(module, Experts)


def test_microbatches_take_the_planes_that_are_kept() -> None:
    module, args = made(), arguments()
    with hybridq.autocast(recipe="mxfp8", is_first_microbatch=True):
        want = module(*args)
    with torch.no_grad():
        module.gate_up_proj.data += 1  # a write that nobody can see
    with hybridq.autocast(recipe="mxfp8", is_first_microbatch=False):
        assert torch.equal(module(*args), want)
    with hybridq.autocast(recipe="mxfp8", is_first_microbatch=True):
        assert not torch.equal(module(*args), want)


def test_torch_autocast_casts_tokens_and_weights() -> None:
    module = made(dtype=torch.float32)
    x, indices, weights = arguments()
    with torch.autocast("cpu", dtype=torch.bfloat16), hybridq.autocast(recipe="mxfp8"):
        y = module(x.float(), indices, weights)
    low = copy.deepcopy(module).bfloat16()
    with hybridq.autocast(recipe="mxfp8"):
        assert torch.equal(y.bfloat16(), low(x, indices, weights))


def test_arguments_go_by_name_and_keep_their_shape() -> None:
    module, (x, indices, weights) = made(), arguments(18)
    with hybridq.autocast(recipe="mxfp8"):
        want = module(x, indices, weights)
        assert torch.equal(module(x, second=indices, shares=weights), want)
        tokens = x.view(3, 6, -1)
        folded = module(tokens, indices.view(3, 6, 2), weights.view(3, 6, 2))
        assert torch.equal(folded, want.view(3, 6, -1))
        with pytest.raises(TypeError, match=r"forward takes 3 tensors \(routing\), got 2"):
            module(x, indices)


def test_moving_tokens_and_back() -> None:
    """Each row is its token; sums are those of FP64; derivatives are those of the definition."""
    torch.manual_seed(0)
    indices, weights = routing(11, experts=4, top=3)
    routes = Routes.of(indices, 4)
    x = torch.randn(11, 6, requires_grad=True)
    rows = permute(x, routes)
    begin = 0
    for expert, end in enumerate(routes.offsets.tolist()):
        tokens = (indices == expert).any(1).nonzero().flatten()
        assert torch.equal(rows[begin:end], x[tokens]), expert
        begin = end
    assert begin == 33
    w = weights.detach().clone().requires_grad_()
    want = (x.double()[:, None] * w.double()[..., None]).sum(1)
    close = {"rtol": 1e-6, "atol": 1e-6, "check_dtype": False}
    torch.testing.assert_close(unpermute(rows, w, routes, x.dtype), want, **close)
    torch.testing.assert_close(unpermute(rows, None, routes, x.dtype), 3 * x.double(), **close)
    dy = torch.randn(11, 6)
    got = torch.autograd.grad(unpermute(rows, w, routes, x.dtype), (x, w), dy)
    expected = torch.autograd.grad(want, (x, w), dy.double())
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, **close)


class Clash(nn.Module):
    """A class whose method has a name of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(2, 8, 4))
        self.down_proj = nn.Parameter(torch.randn(2, 4, 4))

    def plan_of(self) -> None:
        """Mean something else."""


def test_what_is_refused_says_why() -> None:
    with pytest.raises(ValueError, match=r"Clash does not fit its layout: it has its own plan_of"):
        convert_experts(Clash(), ExpertsLayout())
    plain = OwnExperts(ExpertsLayout())
    for layout, why in (
        (
            ExpertsLayout(is_transposed=True),
            r"gate_up_proj must be \[5, 40, 96\], got \[5, 80, 48\]",
        ),
        (ExpertsLayout(has_gate=False), r"gate_up_proj must be \[5, 40, 48\], got"),
        (ExpertsLayout(down_bias="b"), "it has no parameter b"),
        (ExpertsLayout(scale="s"), "it has no s"),
    ):
        with pytest.raises(ValueError, match=f"OwnExperts does not fit its layout: {why}"):
            convert_experts(plain, layout)
    hooked = OwnExperts(ExpertsLayout())
    hooked.forward = hooked.forward  # as accelerate does: another class would never be asked
    with pytest.raises(ValueError, match="another library replaced its forward"):
        convert_experts(hooked, ExpertsLayout())
    with pytest.raises(ValueError, match="converted once, got QuantizedOwnExperts"):
        convert_experts(made(), GPT_OSS)
    with pytest.raises(TypeError, match="module must be a module, got str"):
        convert_experts("experts", GPT_OSS)
    with pytest.raises(TypeError, match="layout must be an ExpertsLayout, got dict"):
        convert_experts(plain, {})
    for options, why in (
        (
            {"activation": "swish"},
            "activation must be a function .* or one of relu, srelu, gelu, silu, qgelu",
        ),
        ({"takes": "tokens"}, "takes must be one of routing, sizes, batches"),
        ({"gate_up": ("a", "b"), "has_gate": False}, "without a gate there is one name"),
        ({"gate_up": ("a", "b"), "gate_up_bias": "c"}, "gate_up_bias must have as many names"),
    ):
        with pytest.raises(ValueError, match=why):
            ExpertsLayout(**options)
    with pytest.raises(TypeError, match="gate_up must be a name or two, got 3"):
        ExpertsLayout(3)


def test_sizes_and_batches_that_do_not_fit_are_refused() -> None:
    sized = made(ExpertsLayout(("w1", "w3"), "w2", takes="sizes"), torch.float32)
    x = torch.randn(20, HIDDEN)
    for sizes, text in (
        ([4, 4, 4, 4, 3], "add up to the rows, 20, got .*, 19"),
        ([4, 4, 4, 4, 5], "add up to the rows, 20, got .*, 21"),
        ([-1, 9, 4, 4, 4], "add up to the rows, 20, got .-1"),
        ([10, 10], r"each of 5 experts, got sizes of shape \(2,\)"),
        (torch.tensor([10, 10]), r"each of 5 experts, got sizes of shape \(2,\)"),
        (torch.tensor(20), r"each of 5 experts, got sizes of shape \(\)"),
    ):
        with hybridq.autocast(recipe="mxfp8"), pytest.raises(ValueError, match=text):
            sized(x, sizes)
    with hybridq.autocast(recipe="mxfp8"):
        assert torch.equal(sized(x, [4, 0, 4, 4, 8]), sized(x, torch.tensor([4, 0, 4, 4, 8])))
    batched = made(ExpertsLayout(takes="batches"), torch.float32)
    text = "as many rows for each of 5 experts, got 18 rows"
    with hybridq.autocast(recipe="mxfp8"), pytest.raises(ValueError, match=text):
        batched(x[:18])


class Scaled(OwnExperts):
    """Its forward takes more than tokens and their experts."""

    def forward(self, x, indices, weights, gain=1.0, *, shift=None):
        made = super().forward(x, indices, weights) * gain
        return made if shift is None else made + shift


def test_an_argument_that_the_recipes_forward_has_not_is_refused() -> None:
    layout = ExpertsLayout()
    module = convert_experts(Scaled(layout), layout)
    args = [torch.randn(4, HIDDEN), *routing(4)]
    assert torch.equal(module(*args, 2.0), 2 * module(*args))
    with hybridq.autocast(recipe="mxfp8"):
        y = module(*args)
        assert torch.equal(module(*args, 1.0, shift=None), y)
        for more, options, name in (
            ((2.0,), {}, "gain"),
            ((), {"gain": 2.0}, "gain"),
            ((), {"shift": torch.ones(1)}, "shift"),
        ):
            text = f"forward takes x, indices, weights, got {name} too"
            with pytest.raises(TypeError, match=text):
                module(*args, *more, **options)
        with pytest.raises(TypeError, match="got top too"):
            module(*args[:2], top=args[1], weights=args[2])


class Held(nn.Module):
    """Experts of a class that has no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(3, 20, 12))
        self.down_proj = nn.Parameter(torch.randn(3, 12, 10))


@pytest.mark.parametrize("recipe", [None, "bf16"])
def test_a_class_without_a_forward_computes_without_a_recipe(recipe) -> None:
    torch.manual_seed(0)
    module = convert_experts(Held(), ExpertsLayout())
    x, best = torch.randn(7, 12), torch.rand(7, 3).topk(2)
    with hybridq.autocast(recipe=recipe or "bf16", enabled=recipe is not None):
        y = module(x, best.indices, best.values)
    want = torch.zeros(7, 12, dtype=torch.float64)
    for token in range(7):
        for e, weight in zip(best.indices[token].tolist(), best.values[token], strict=True):
            gate, up = (module.gate_up_proj[e].double() @ x[token].double()).chunk(2)
            want[token] += weight * (module.down_proj[e].double() @ (nn.functional.silu(gate) * up))
    torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-5)
    y.sum().backward()
    assert module.down_proj.grad.any()
