"""hybridq.moe: experts of every layout against FP64 experts one by one, of the same planes."""

from __future__ import annotations

import copy

import pytest
import torch

import hybridq
from experts_oracle import HYBRID, MXFP8, relative
from hybridq.moe import ExpertsLayout, convert_experts
from own_experts import EXPERTS, HIDDEN, OwnExperts, clamped, routing

LAYOUTS = {
    "concatenated": ExpertsLayout(),
    "alternating": ExpertsLayout(is_concatenated=False),
    "transposed": ExpertsLayout(is_transposed=True),
    "gpt-oss": ExpertsLayout(
        gate_up_bias="gate_up_proj_bias",
        down_bias="down_proj_bias",
        is_transposed=True,
        is_concatenated=False,
        activation=clamped,
    ),
    "biases": ExpertsLayout(gate_up_bias="b1", down_bias="b2", activation="gelu"),
    "no gate": ExpertsLayout("up_proj", has_gate=False, activation="srelu"),
    "no gate, transposed": ExpertsLayout(
        "up", "dn", "b", "c", is_transposed=True, has_gate=False, activation="relu"
    ),
    "two names": ExpertsLayout(("w1", "w3"), "w2", ("b1", "b3"), activation="qgelu"),
    "norm and scale": ExpertsLayout(post_norm="norm", scale="scale"),
    "weights before": ExpertsLayout(router_weights="input"),
    "no weights": ExpertsLayout(router_weights="none"),
    "sizes": ExpertsLayout(("w1", "w3"), "w2", takes="sizes"),
    "batches": ExpertsLayout(is_transposed=True, takes="batches"),
}


def arguments(layout: ExpertsLayout, dtype: torch.dtype, rows: int = 35) -> list[torch.Tensor]:
    """What a forward takes, leaves that need gradients."""
    torch.manual_seed(3)
    x = torch.randn(rows, HIDDEN).to(dtype).requires_grad_()
    if layout.takes == "batches":
        return [x]
    if layout.takes == "sizes":
        return [x, torch.tensor([4, 0, 17, 1, 10])]  # the last 3 rows are of no expert
    indices, weights = routing(rows)
    return [x, indices, weights.to(dtype).requires_grad_()]


def gradients(module, args, dy) -> dict[str, torch.Tensor]:
    """Results and gradients by name."""
    module.zero_grad()
    leaves = [
        one.detach().clone().requires_grad_() if one.is_floating_point() else one for one in args
    ]
    y = module(*leaves)
    y.backward(dy.to(y.dtype))
    found = {"output": y.detach(), "input": leaves[0].grad}
    if len(args) == 3 and module.own.router_weights != "none":
        found["router"] = leaves[2].grad
    return found | {name: one.grad for name, one in module.named_parameters()}


def made(layout: ExpertsLayout, dtype: torch.dtype = torch.float32) -> OwnExperts:
    torch.manual_seed(1)
    return convert_experts(OwnExperts(layout, dtype), layout)


@pytest.mark.parametrize("name", list(LAYOUTS))
@pytest.mark.parametrize("formats", [MXFP8, HYBRID], ids=["mxfp8", "hybrid"])
def test_result_and_gradients_are_those_of_each_expert_alone(name: str, formats) -> None:
    """FP32 against FP64: what remains are codes that fall to the other side of a tie."""
    layout = LAYOUTS[name]
    module, args = made(layout), arguments(layout, torch.float32)
    dy = torch.randn(args[0].shape)
    with hybridq.autocast(recipe=formats.recipe()):
        got = gradients(module, args, dy)
    oracle = module.in_double(formats)
    wide = [one.detach().double() if one.is_floating_point() else one for one in args]
    want = gradients(oracle, wide, dy.double())
    exact = gradients(module.in_double(None), wide, dy.double())
    assert set(got) == set(want)
    for what in want:
        assert relative(got[what], want[what]) < 3e-3, what
    for what in ("output", "input", *layout.weights):
        assert relative(exact[what], want[what]) > 1e-2, f"{what} was not quantized"


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_without_a_recipe_the_bits_are_the_own_ones(name: str) -> None:
    layout = LAYOUTS[name]
    torch.manual_seed(1)
    plain = OwnExperts(layout, torch.bfloat16)
    module = convert_experts(copy.deepcopy(plain), layout)
    args = arguments(layout, torch.bfloat16)
    dy = torch.randn(args[0].shape)
    want = gradients(plain, args, dy)
    for recipe in (None, "bf16"):
        with hybridq.autocast(enabled=recipe is not None, recipe=recipe or "bf16"):
            got = gradients(module, args, dy)
        for what, one in want.items():
            assert torch.equal(got[what], one), what
    assert module.state_dict().keys() == plain.state_dict().keys()


@pytest.mark.parametrize("tokens", [0, 1, 2])
def test_few_tokens(tokens: int) -> None:
    module = made(LAYOUTS["biases"])
    args = arguments(module.own, torch.float32, tokens)
    with hybridq.autocast(recipe="mxfp8"):
        got = gradients(module, args, torch.ones(tokens, HIDDEN))
    assert got["output"].shape == (tokens, HIDDEN)
    assert not got["gate_up_proj"][-1].any() and not got["b2"][-1].any()


def test_an_index_of_no_expert_here_adds_nothing() -> None:
    """As expert parallelism has it: indices of E and more belong to other ranks."""
    module = made(LAYOUTS["biases"])
    x, indices, weights = arguments(module.own, torch.float32)
    elsewhere = torch.rand(indices.shape) < 0.4
    with hybridq.autocast(recipe="mxfp8"):
        got = gradients(module, [x, indices.masked_fill(elsewhere, EXPERTS), weights], x.detach())
        masked = gradients(module, [x, indices, weights * ~elsewhere], x.detach())
    assert torch.equal(got["output"], masked["output"])
    assert not got["router"][elsewhere].any()


def test_frozen_experts_save_no_plane_that_no_gradient_needs() -> None:
    """Saved for the backward of frozen weights: their columnwise planes, and nothing of tokens."""
    module = made(LAYOUTS["no gate"], torch.bfloat16)
    x, indices, weights = arguments(module.own, torch.bfloat16)

    def saved(x: torch.Tensor) -> int:
        sizes = []
        pack = torch.autograd.graph.saved_tensors_hooks(
            lambda one: sizes.append(one.nbytes) or one, lambda one: one
        )
        with pack, hybridq.autocast(recipe="mxfp8"):
            module(x, indices, weights.detach())
        return sum(size for size in sizes)

    trained = saved(x)
    module.requires_grad_(False)
    planes = sum(one.numel() for one in module.parameters())
    frozen = saved(x)
    assert planes <= frozen < trained
    assert frozen - planes < planes / 4 + 40 * x.numel()
    assert saved(x.detach()) == 0


def test_gradients_go_to_main_grad() -> None:
    """Of a transposed weight as well; without a recipe too."""
    for name in ("concatenated", "gpt-oss"):
        module = made(LAYOUTS[name])
        args = arguments(module.own, torch.float32)
        dy = torch.randn(args[0].shape)
        with hybridq.autocast(recipe="mxfp8"):
            want = gradients(module, args, dy)
        module.fuse_wgrad_accumulation = True
        for weight in (module.gate_up_proj, module.down_proj):
            weight.main_grad = torch.ones_like(weight)
        with hybridq.autocast(recipe="mxfp8"):
            got = gradients(module, args, dy)
        for own in ("gate_up_proj", "down_proj"):
            assert got[own] is None
            added = getattr(module, own).main_grad
            torch.testing.assert_close(added, want[own] + 1, rtol=1e-5, atol=1e-5)


def test_a_recipe_that_reads_names_is_asked_for_each_expert() -> None:
    asked = set()

    def factory(role):
        asked.add(role.name)
        keeps = role.name.endswith(("gate_up_proj.1", "down_proj.2"))
        return hybridq.quantizers.IdentityQuantizer() if keeps else hybridq.MXFP8Quantizer()

    for name in ("concatenated", "transposed"):
        module = made(LAYOUTS[name])
        module.set_name("mlp.experts")
        args = arguments(module.own, torch.float32)
        dy = torch.randn(args[0].shape)
        with hybridq.autocast(recipe=hybridq.CustomRecipe(factory)):
            got = gradients(module, args, dy)
        with hybridq.autocast(recipe="mxfp8"):
            all_of_them = gradients(module, args, dy)
        plain = gradients(module, args, dy)
        gate_up = got["gate_up_proj"]
        assert torch.equal(got["down_proj"][3], all_of_them["down_proj"][3])
        assert not torch.equal(gate_up[1], all_of_them["gate_up_proj"][1])
        torch.testing.assert_close(got["down_proj"][2] * 0, plain["down_proj"][2] * 0)
    assert "mlp.experts.gate_up_proj.4" in asked


def test_delayed_scaling_has_a_history_for_each_expert() -> None:
    module = made(LAYOUTS["gpt-oss"])
    args = arguments(module.own, torch.float32)
    with hybridq.autocast(recipe="fp8_delayed"):
        for _ in range(2):
            gradients(module, args, torch.ones(args[0].shape))
            hybridq.update_scaling(module)
    keys = hybridq.state_dict_with_history(module)
    assert "scaling.gate_up_proj.0.input.e4m3.history" in keys
    other = made(LAYOUTS["gpt-oss"])
    other.load_state_dict(keys)
    with hybridq.autocast(recipe="fp8_delayed"):
        assert torch.equal(other(*args), module(*args))


def test_layouts_of_one_product_and_of_experts_that_pass_tokens_are_checked() -> None:
    with pytest.raises(ValueError, match="without gate_up an expert is one product"):
        ExpertsLayout(None, "weight")
    with pytest.raises(ValueError, match="passes_others is of experts that take routing"):
        ExpertsLayout(takes="sizes", passes_others=True)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8])
@pytest.mark.parametrize("name", ["biases", "two names", "weights before"])
def test_a_negative_index_is_of_no_expert(name: str, dtype: torch.dtype) -> None:
    """As routers mark tokens that they drop: the own forward finds no expert of that number."""
    module = made(LAYOUTS[name])
    x, indices, weights = arguments(module.own, torch.float32)
    dropped = torch.rand(indices.shape) < 0.4
    marked = indices.masked_fill(dropped, -1).to(dtype)
    with hybridq.autocast(recipe=MXFP8.recipe()):
        got = gradients(module, [x, marked, weights], x.detach())
    assert not got["router"][dropped].any()
    wide = [x.detach().double(), indices.masked_fill(dropped, -1), weights.detach().double()]
    want = gradients(module.in_double(MXFP8), wide, x.detach().double())
    for what in want:
        assert relative(got[what], want[what]) < 3e-3, what


def test_a_negative_index_is_passed_on_by_no_expert() -> None:
    layout = ExpertsLayout(passes_others=True)
    torch.manual_seed(1)
    module = convert_experts(OwnExperts(layout), layout)
    x = torch.randn(3, HIDDEN)
    with torch.no_grad(), hybridq.autocast(recipe="mxfp8"):
        y = module(x, torch.tensor([[-1], [EXPERTS], [0]]), torch.ones(3, 1))
    assert not y[0].any() and torch.equal(y[1], x[1]) and y[2].any()
