"""main_grad in compiled code and in GroupedLinear: FP32 accumulation by autograd, bit for bit."""

from __future__ import annotations

import copy

import pytest
import torch
from torch._dynamo.utils import counters

import hybridq
from compilers import BACKENDS
from hybridq.recipes import ByName, NVFP4BlockScaling, get

QUANTIZED = ("mxfp8", "nvfp4", "fp8_current", "mxfp8_fwd_nvfp4_bwd")
MODULES = {
    "Linear": lambda **o: hybridq.Linear(40, 24, **o),
    "LayerNormLinear": lambda **o: hybridq.LayerNormLinear(40, 24, **o),
    "LayerNormMLP": lambda **o: hybridq.LayerNormMLP(40, 56, activation="swiglu", **o),
}
SPLITS = [[9, 0, 20, 5], [1, 2, 3, 28], [0, 0, 0, 34]]


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def weights(module) -> dict[str, torch.Tensor]:
    """The weights of the GEMMs, by name."""
    if isinstance(module, hybridq.GroupedLinear):
        return {n: p for n, p in module.named_parameters() if n.startswith("weight")}
    return {name: getattr(module, name) for name in module.weight_parts}


def fused_twin(plain, make, **options):
    """A module that accumulates, with the other's values, and a `main_grad` that is not zero."""
    fused = make(fuse_wgrad_accumulation=True, **options)
    fused.load_state_dict(plain.state_dict())
    for weight in weights(fused).values():
        weight.main_grad = torch.ones(weight.shape)
    for weight in weights(plain).values():
        weight.grad = torch.ones(weight.shape)
    return fused


def run(module, recipe, batches, *more, compiled=None) -> list[torch.Tensor]:
    """Forward and backward of each batch; returns outputs and gradients of inputs."""
    torch.manual_seed(1)
    seen = []
    for i, x in enumerate(batches):
        x = x.detach().requires_grad_(x.requires_grad)
        with hybridq.autocast(enabled=recipe is not None, recipe=recipe):
            y = (module if compiled is None else compiled)(x, *(one[i] for one in more))
        (y.float() * ((torch.arange(y.shape[-1]) - 11) / 16)).sum().backward()
        seen += [y.detach(), x.grad]
    return seen


def check(plain, fused, seen, expected, bits: bool = True) -> None:
    same = torch.equal if bits else lambda a, b: torch.allclose(a, b, rtol=1e-5, atol=1e-4)
    for a, b in zip(seen, expected, strict=True):
        assert (a is None) == (b is None) and (a is None or same(a, b))
    theirs = dict(plain.named_parameters())
    for name, parameter in fused.named_parameters():
        if name in weights(fused):
            assert parameter.grad is None
            assert same(parameter.main_grad, theirs[name].grad), name
        else:
            assert same(parameter.grad, theirs[name].grad), name


@pytest.mark.thinned(1, "slow")
@pytest.mark.parametrize("needs_grad", [True, False])
@pytest.mark.parametrize(
    "recipe", [*QUANTIZED[:1], NVFP4BlockScaling(disable_stochastic_rounding=True)]
)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_compiled(make, backend: str, recipe, needs_grad: bool) -> None:
    """The bits of eager autograd in FP32; one graph, whatever is in main_grad or in its place."""
    torch.manual_seed(0)
    plain = make()
    fused = fused_twin(plain, make)
    x = torch.randn(4, 17, 40).requires_grad_(needs_grad)
    expected = run(plain, recipe, x)
    compiled = torch.compile(fused, fullgraph=True, backend=backend)
    seen = run(fused, recipe, x, compiled=compiled)
    check(plain, fused, seen, expected)
    graphs = counters["stats"]["unique_graphs"]
    for weight in weights(fused).values():
        weight.main_grad = weight.main_grad.clone()
    before = {name: one.main_grad.clone() for name, one in weights(fused).items()}
    run(fused, recipe, x, compiled=compiled)
    assert counters["stats"]["unique_graphs"] == graphs and not counters["graph_break"]
    assert all(not torch.equal(one.main_grad, before[name]) for name, one in weights(fused).items())


def test_compiled_marks_and_hooks() -> None:
    """The mark is set, also where it was taken away again; hooks see zeros."""
    module = hybridq.Linear(8, 4, fuse_wgrad_accumulation=True, dtype=torch.bfloat16)
    weight = module.weight
    weight.main_grad = torch.zeros(4, 8)
    seen = []
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad_added_to_main_grad))
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for i in range(1, 4):
        weight.grad_added_to_main_grad = False
        with hybridq.autocast(recipe="mxfp8"):
            compiled(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
        assert seen == [True] * i and not weight.grad.any()
        assert torch.equal(weight.main_grad, torch.full((4, 8), 2.0 * i))
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    del weight.main_grad
    with pytest.raises(Exception, match=r"weight\.main_grad, which must be a tensor \(4, 8\)"):
        compiled(torch.ones(2, 8, dtype=torch.bfloat16))


def grouped(single: bool = False, **options):
    return hybridq.GroupedLinear(4, 40, 24, single_grouped_weight=single, **options)


MIXED = ByName([("*.1", "nvfp4"), ("*.3", "fp8_current")], default="mxfp8")


@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("recipe", [*QUANTIZED, "fp8_delayed", "mixed", None, "bf16"])
def test_groups(recipe, single: bool) -> None:
    """By list and by device tensor of splits; groups without a token among them."""
    torch.manual_seed(0)
    recipe = MIXED if recipe == "mixed" else recipe
    ways = [SPLITS] if recipe == "fp8_delayed" else [SPLITS, [torch.tensor(s) for s in SPLITS]]
    for splits in ways:
        plain = grouped(single, name="experts")
        fused = fused_twin(plain, grouped, single=single, name="experts")
        x = torch.randn(3, 34, 40, requires_grad=True)
        expected = run(plain, recipe, x, splits)
        # A product of plain tensors is torch's own where it stands alone.
        bits = recipe not in (None, "bf16")
        check(plain, fused, run(fused, recipe, x, splits), expected, bits)


@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_groups(backend: str, single: bool) -> None:
    torch.manual_seed(0)
    plain = grouped(single)
    fused = fused_twin(plain, grouped, single=single)
    x = torch.randn(3, 34, 40, requires_grad=True)
    splits = [torch.tensor(s) for s in SPLITS]
    expected = run(plain, "mxfp8", x, splits)
    compiled = torch.compile(fused, fullgraph=True, backend=backend)
    check(plain, fused, run(fused, "mxfp8", x, splits, compiled=compiled), expected)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


@pytest.mark.parametrize("single", [True, False])
def test_microbatches_without_a_gradient_to_see_are_no_steps(single: bool) -> None:
    """Delayed scaling takes a gradient that went away for a step; here there never is one."""
    one, both = hybridq.Linear(40, 24), grouped(single)
    modules = [one, both, copy.deepcopy(one), copy.deepcopy(both)]
    x = torch.randn(3, 34, 40)
    outputs = []
    for i, module in enumerate(modules):
        if i >= 2:
            module.fuse_wgrad_accumulation = True
            for weight in weights(module).values():
                weight.main_grad = torch.zeros(weight.shape)
        more = () if isinstance(module, hybridq.Linear) else (SPLITS,)
        outputs.append(run(module, "fp8_delayed", x, *more)[::2])
    for plain, fused in zip(outputs[:2], outputs[2:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(plain, fused, strict=True))


def test_groups_in_bf16_lose_nothing_between_microbatches() -> None:
    module = grouped(dtype=torch.bfloat16, fuse_wgrad_accumulation=True)
    for weight in weights(module).values():
        weight.main_grad = torch.zeros(weight.shape)
    exact = copy.deepcopy(module).float()
    exact.fuse_wgrad_accumulation = False
    x = torch.randn(3, 34, 40, dtype=torch.bfloat16)
    run(module, "mxfp8", x, SPLITS)
    run(exact, "mxfp8", x.float(), SPLITS)
    for name, weight in weights(module).items():
        assert torch.equal(weight.main_grad, getattr(exact, name).grad)
        assert not torch.equal(weight.main_grad, weight.main_grad.bfloat16().float())


@pytest.mark.parametrize("single", [True, False])
def test_groups_marks_errors_and_frozen_weights(single: bool) -> None:
    module = grouped(single, fuse_wgrad_accumulation=True)
    x = torch.randn(34, 40)
    with pytest.raises(RuntimeError, match=r"GroupedLinear: fuse_wgrad_accumulation .* got None"):
        module(x, SPLITS[0])
    hooked = []
    for weight in weights(module).values():
        weight.main_grad = torch.zeros(weight.shape)
        weight.grad_added_to_main_grad = False
        weight.register_post_accumulate_grad_hook(hooked.append)
    first = next(iter(weights(module).values()))
    if not single:
        first.requires_grad_(False)
    with hybridq.autocast(recipe=get("mxfp8")):
        module(x, SPLITS[1]).sum().backward()
    for weight in weights(module).values():
        if weight.requires_grad:
            assert weight.grad_added_to_main_grad and not weight.grad.any()
            assert weight.main_grad.any()
        else:
            assert not weight.main_grad.any() and weight.grad is None
    assert len(hooked) == (1 if single else 3)
    with torch.no_grad():
        del first.main_grad
        module(x, SPLITS[1])  # nothing is to be accumulated


@pytest.mark.slow  # compiles
def test_compiled_code_writes_over_what_is_there() -> None:
    module = hybridq.Linear(40, 24, fuse_wgrad_accumulation=True)
    x = torch.randn(17, 40)
    module.weight.main_grad = torch.zeros(24, 40)
    run(module, "mxfp8", [x])
    wanted = module.weight.main_grad
    module.weight.main_grad = torch.full((24, 40), torch.nan)
    module.weight.overwrite_main_grad = True
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    run(module, "mxfp8", [x, x], compiled=compiled)
    torch.testing.assert_close(module.weight.main_grad, wanted)
