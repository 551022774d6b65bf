"""What Transformer Engine's modules, recipes, recomputation and compilation cannot do works here.

One test for each such row of the list of its weak spots, by its number; the rows of tensors are in
`test_tensor_weak_spots.py`.
"""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import hybridq
from hybridq.formats import PlaneSpec
from hybridq.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)
from hybridq.recipes import CustomRecipe, autocast
from linear_model import equal, quantized_linear, run
from module_matrix import CASES, step

MAKERS = {
    "fp8": lambda: Float8CurrentScalingQuantizer("e4m3"),
    "block": lambda: Float8BlockQuantizer("e4m3", rowwise=True, columnwise=True),
    "block 2d": lambda: Float8BlockQuantizer(
        "e4m3", rowwise=True, columnwise=True, block_scaling_dim=2
    ),
    "block fp32": lambda: Float8BlockQuantizer(
        "e4m3", rowwise=True, columnwise=True, force_pow_2_scales=False
    ),
    "mxfp8": lambda: MXFP8Quantizer(),
    "nvfp4": lambda: NVFP4Quantizer(),
    "row-scaled": lambda: NVFP4Quantizer(row_scaled_nvfp4=True),
    "identity": lambda: IdentityQuantizer(),
    "hybrid": lambda: HybridQuantizer(
        rowwise_quantizer=NVFP4Quantizer(row_scaled_nvfp4=True),
        columnwise_quantizer=IdentityQuantizer(),
        columnwise_source="rowwise_dequantized",
    ),
}
HYBRID = "mxfp8_fwd_nvfp4_bwd"


def slots(**makers):
    """A recipe with a quantizer for each slot."""

    def factory(role):
        return MAKERS[makers[role.tensor_type]]()

    factory.reads_names = False
    return CustomRecipe(factory)


def _seed(recipe, seed=3):
    torch.manual_seed(seed)
    return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64)


@pytest.mark.parametrize("a", MAKERS)
@pytest.mark.parametrize("b", MAKERS)
def test_row_01_02_26_any_two_operands_meet(a, b) -> None:
    """Of any scaling mode, square with square blocks, one quantized and the other not."""
    layer, x, dy = hybridq.Linear(40, 24), torch.randn(19, 40), torch.randn(19, 24)
    recipe = slots(input=a, weight=b, grad_output=a)
    model = quantized_linear(x, layer.weight.detach(), layer.bias.detach(), dy, recipe, None)
    got = run(layer, x, dy, recipe=recipe)
    for tensor, name in zip(got, ("y", "dx", "dw"), strict=False):
        assert ((tensor.double() - model[name].value).abs() <= model[name].bound).all(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["fp8", "nvfp4", "row-scaled", "hybrid"])
def test_row_02_13_16_gelu_and_norm_with_any_format_and_dtype(kind, dtype) -> None:
    """An MLP of any format is its parts, one after the other, by operators of their own."""
    from fused_model import apart

    torch.manual_seed(0)
    mlp = hybridq.LayerNormMLP(40, 24, dtype=dtype)
    parts = apart(mlp, is_ours=True)
    x, dy = torch.randn(13, 40, dtype=dtype), torch.randn(13, 40, dtype=dtype)
    recipe = slots(input=kind, weight=kind, grad_output=kind)
    assert equal(run(mlp, x, dy, recipe=recipe), run(parts, x, dy, recipe=recipe))


@pytest.mark.parametrize("kind", MAKERS)
def test_row_03_gradients_of_any_format_accumulate(kind) -> None:
    """Two microbatches into an FP32 main_grad: the sum of what autograd makes of each."""
    layer = hybridq.Linear(40, 24, fuse_wgrad_accumulation=True)
    plain = hybridq.Linear(40, 24)
    plain.load_state_dict(layer.state_dict())
    layer.weight.main_grad = torch.zeros(24, 40)
    recipe, want = slots(input=kind, weight=kind, grad_output=kind), torch.zeros(24, 40)
    for _ in range(2):
        x, dy = torch.randn(7, 40), torch.randn(7, 24)
        with autocast(recipe=recipe):
            layer(x).backward(dy)
        want += run(plain, x, dy, recipe=recipe)[2]
    assert (layer.weight.main_grad - want).abs().max() <= 2**-20 * want.abs().max()
    assert layer.weight.grad is None


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("kind", MAKERS)
def test_row_04_15_groups_of_any_quantizer(kind, single) -> None:
    """One grouped product, whatever the quantizer and however weights are held; differing ones."""
    torch.manual_seed(0)
    grouped = hybridq.GroupedLinear(3, 40, 24, single_grouped_weight=single, name="experts")
    x, dy, sizes = torch.randn(19, 40), torch.randn(19, 24), [4, 0, 15]

    def differing(role):
        return MAKERS[kind]() if role.name.endswith("0") else MXFP8Quantizer()

    for recipe in (slots(input=kind, weight=kind, grad_output=kind), CustomRecipe(differing)):
        want = []
        for g, (part, grad) in enumerate(zip(x.split(sizes), dy.split(sizes), strict=True)):
            layer = hybridq.Linear(40, 24, name=f"experts.{g}")
            with torch.no_grad():
                layer.weight.copy_(grouped.weight[g] if single else getattr(grouped, f"weight{g}"))
                layer.bias.copy_(getattr(grouped, f"bias{g}"))
            want.append(run(layer, part, grad, recipe=recipe))
        for splits in (sizes, torch.tensor(sizes)):
            own = copy.deepcopy(grouped)
            leaf = x.clone().requires_grad_()
            with autocast(recipe=recipe):
                y = own(leaf, splits)
            y.backward(dy)
            assert torch.equal(y, torch.cat([one[0] for one in want]))
            assert torch.equal(leaf.grad, torch.cat([one[1] for one in want]))
            grads = (
                own.weight.grad if single else [getattr(own, f"weight{g}").grad for g in (0, 1, 2)]
            )
            assert all(torch.equal(g, one[2]) for g, one in zip(grads, want, strict=True))


def test_row_06_delayed_scaling_in_either_direction_of_a_hybrid() -> None:
    from hybridq.quantizers import DelayedScalingRequest

    made = HybridQuantizer(
        rowwise_quantizer=DelayedScalingRequest(amax_history_len=2),
        columnwise_quantizer=MXFP8Quantizer(),
    )
    layer = hybridq.Linear(40, 24)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with autocast(recipe=CustomRecipe(lambda role: made)):
        layer(torch.full((4, 40), 2.0)).sum().backward()
    optimizer.step()
    assert hybridq.state_dict_with_history(layer)["scaling.input.e4m3.scale"].item() == 224.0


@pytest.mark.parametrize(
    "options", [{"nvfp4_use_4over6": True, "nvfp4_e4m3_max": 256}, {"with_rht": True}], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_row_14_four_over_six_and_transform_of_any_dtype_shape_and_module(options, dtype) -> None:
    """In grouped modules and after a norm too, any number of rows: other bits than without."""
    for case in ("Linear", "LayerNormLinear", "GroupedLinear, device"):
        module, (x, dy) = CASES[case].make().to(dtype), CASES[case].data(dtype)
        recipes = [CustomRecipe(lambda role, o=o: NVFP4Quantizer(**o)) for o in (options, {})]
        results = [step(module, module, x, dy, recipe) for recipe in recipes]
        assert all(r.dtype == dtype for r in results[0]) and not equal(*results)
        # The transform undoes itself in every product; within what 4 bits of the operands allow.
        wide, narrow = (r[1].double() for r in results)
        assert (wide - narrow).norm() <= 0.5 * narrow.norm()


@pytest.mark.thinned(1)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_delayed", "mxfp8", HYBRID])
@pytest.mark.parametrize("case", CASES)
def test_row_18_cached_weights_and_recomputation(case, recipe, reentrant) -> None:
    """Microbatches with cached weights, each recomputed: the bits of a run without both."""
    module = CASES[case].make()
    batches = [CASES[case].data() for _ in range(3)]
    results = []
    for keeps in (False, True):
        own = copy.deepcopy(module)
        made = []
        for number, (x, dy) in enumerate(batches):
            torch.manual_seed(number)
            leaf = x.clone().requires_grad_()
            with autocast(recipe=recipe, is_first_microbatch=number == 0 if keeps else None):
                y = checkpoint(own, leaf, use_reentrant=reentrant) if keeps else own(leaf)
            y.backward(dy)
            made += [y.detach(), leaf.grad]
        results.append(made + [p.grad for p in own.parameters()])
    assert equal(*results)


def test_row_19_recipes_are_values() -> None:
    """A fresh recipe each step binds nothing anew; another one, of one class too, takes effect."""
    asked = []

    def factory(role):
        asked.append(role)
        return MXFP8Quantizer()

    layer, x = hybridq.Linear(40, 24), torch.randn(3, 40)
    with torch.no_grad():
        layer.weight.mul_(torch.logspace(-3, 0, 24)[:, None])  # rows of one block that differ
    for _ in range(3):
        with autocast(recipe=CustomRecipe(factory)):
            layer(x)
    assert len(asked) == 3  # input, weight, gradient: once
    recipe = CustomRecipe(factory)
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.qfactory = MXFP8Quantizer
    made = []
    for options in ({}, {"enable_2d_quantization": True}):
        with autocast(recipe=hybridq.recipes.MXFP8BlockScaling(**options)):
            made.append(layer(x))
    assert not torch.equal(*made)


@pytest.mark.parametrize(
    ("case", "recipe"),
    [
        ("LayerNormMLP", "fp8_delayed"),
        pytest.param("GroupedLinear", HYBRID, marks=pytest.mark.slow),
        pytest.param("TransformerLayer", HYBRID, marks=pytest.mark.slow),
    ],
)
def test_row_20_recomputation_inside_one_graph(case, recipe) -> None:
    """Hybrid and delayed recipes, recomputed inside a graph without a break; eager's bits."""
    torch._dynamo.reset()
    module, (x, dy) = CASES[case].make(), CASES[case].data()
    own = copy.deepcopy(module)

    def region(leaf):
        return hybridq.checkpoint(own, leaf)

    compiled = torch.compile(region, fullgraph=True, backend="aot_eager")
    assert equal(step(own, compiled, x, dy, recipe), step(module, module, x, dy, recipe))
    torch._dynamo.reset()


@pytest.mark.parametrize("case", CASES)
def test_row_21_saved_planes_may_leave_for_the_host(case) -> None:
    """torch's own offloading of saved tensors: hybrid, grouped, small and strided ones too."""
    module, (x, dy) = CASES[case].make(), CASES[case].data()
    want = step(module, module, x, dy, HYBRID)

    def offloaded(leaf):
        with torch.autograd.graph.save_on_cpu():
            return module(leaf)

    assert equal(step(module, offloaded, x, dy, HYBRID), want)


def test_row_24_roles_are_named_alike_everywhere() -> None:
    """Grouped modules say so whatever they run in, with host and with device splits."""
    for case, kind in (("GroupedLinear", "grouped_linear"), ("TransformerLayer", "linear")):
        seen = []

        def factory(role, seen=seen):
            seen.append(role.module_type)
            return Quantizer(PlaneSpec.parse("mxfp8"), PlaneSpec.parse("mxfp8"))

        module, (x, _) = CASES[case].make(), CASES[case].data()
        with autocast(recipe=CustomRecipe(factory)):
            module(x)
        assert set(seen) == {kind}
