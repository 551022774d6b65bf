"""Delayed scaling of groups: bits and states of a loop of Linear, sizes on the device too."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import hybridq
from hybridq import (
    GroupedLinear,
    HybridQuantizer,
    IdentityQuantizer,
    Linear,
    MXFP8Quantizer,
    NVFP4Quantizer,
    autocast,
)
from hybridq.formats import PlaneSpec
from hybridq.kernels.choice import EncodeRequest
from hybridq.kernels.ragged.group_loop import encode_loop
from hybridq.kernels.ragged.sync_free_groups import encode_by_group, largest_by_group
from hybridq.quantizers import DelayedScalingRequest
from hybridq.recipes import CustomRecipe, DelayedScaling

SLOW = pytest.mark.slow
FEATURES, SIZES, EXTRA = (40, 24), (5, 0, 17, 130), 3


def _of(quantizer):
    def factory(role):
        return quantizer

    factory.reads_names = False
    return CustomRecipe(factory)


def _by_name(role):
    """The second group is not delayed, the last has a margin."""
    if role.name.endswith("1"):
        return MXFP8Quantizer()
    return DelayedScalingRequest(margin=int(role.name.endswith("3")))


RECIPES = {
    "plain": DelayedScaling(),
    "most recent": DelayedScaling(margin=1, amax_history_len=2, amax_compute_algo="most_recent"),
    "two histories": _of(
        HybridQuantizer(
            rowwise_quantizer=DelayedScalingRequest(margin=1, amax_history_len=4),
            columnwise_quantizer=DelayedScalingRequest("E4M3"),
        )
    ),
    "decoded": _of(
        HybridQuantizer(
            rowwise_quantizer=DelayedScalingRequest(),
            columnwise_quantizer=DelayedScalingRequest(),
            columnwise_source="rowwise_dequantized",
        )
    ),
    "decoded mxfp8": _of(
        HybridQuantizer(
            rowwise_quantizer=MXFP8Quantizer(),
            columnwise_quantizer=DelayedScalingRequest(),
            columnwise_source="rowwise_dequantized",
        )
    ),
    "columns": _of(
        HybridQuantizer(
            rowwise_quantizer=NVFP4Quantizer(stochastic_rounding=True),
            columnwise_quantizer=DelayedScalingRequest(),
        )
    ),
    "high precision backward": _of(
        HybridQuantizer(
            rowwise_quantizer=DelayedScalingRequest(),
            columnwise_quantizer=IdentityQuantizer(),
            columnwise_source="rowwise_dequantized",
        )
    ),
    "by name": CustomRecipe(_by_name),
}


def make(single=False, dtype=torch.float32) -> GroupedLinear:
    torch.manual_seed(0)
    return GroupedLinear(len(SIZES), *FEATURES, single_grouped_weight=single, dtype=dtype)


def batches(dtype=torch.float32, steps=3):
    """Groups of other magnitudes, and steps of others, so that every scale moves by itself."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for step in range(steps):
        parts = [torch.randn(n, FEATURES[0], generator=generator) for n in SIZES]
        x = torch.cat([part * 3.0 ** (g - 2 * step) for g, part in enumerate(parts)])
        made.append((x.to(dtype), torch.randn(x.shape[0], FEATURES[1], generator=generator)))
    return made


class Loop(torch.nn.Module):
    """A Linear for each group, with its parameters."""

    def __init__(self, grouped: GroupedLinear) -> None:
        super().__init__()
        weights, biases = grouped._parts([*grouped._own_weights(), *grouped._biases()])
        self.layers = torch.nn.ModuleList()
        for g, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
            layer = Linear(*FEATURES, dtype=weight.dtype, name=str(g))
            layer.module_type = "grouped_linear"
            with torch.no_grad():
                layer.weight.copy_(weight)
                layer.bias.copy_(bias)
            self.layers.append(layer)

    def forward(self, x):
        pairs = zip(self.layers, x.split(SIZES), strict=True)
        return torch.cat([layer(part) for layer, part in pairs])


def train(module, call, recipe, data, microbatches=1):
    """y, dx, weights' gradients and weights of all steps."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    made = []
    for number, (x, dy) in enumerate(data):
        leaf = x.clone().requires_grad_()
        torch.manual_seed(number)
        with autocast(recipe=recipe):
            y = call(leaf)
        y.backward(dy.to(y.dtype))
        made += [y.detach(), leaf.grad]
        if number % microbatches == microbatches - 1:
            made += weights(module, "grad") + weights(module, "data")
            optimizer.step()
            optimizer.zero_grad()
    return made


def weights(module, what):
    """Weight and bias of each group."""
    own = dict(module.named_parameters())
    found = []
    for kind in ("weight", "bias"):
        if kind in own:
            found += list(getattr(own[kind], what))
        else:
            keys = sorted(key for key in own if kind in key)
            found += [getattr(own[key], what) for key in keys]
    return [one.clone() for one in found]


def states(module):
    """The histories of all groups, by group and place."""
    found = hybridq.state_dict_with_history(module)
    kept = {}
    for key, value in found.items():
        if "scaling" in key:
            parts = key.replace("layers.", "").split(".")
            kept[".".join(part for part in parts if part != "scaling")] = value
    return kept


def same(got, want) -> None:
    assert len(got) == len(want)
    for i, (one, two) in enumerate(zip(got, want, strict=True)):
        assert one.dtype == two.dtype and torch.equal(one, two), i


@pytest.mark.thinned(1)
@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("splits", [list(SIZES), torch.tensor(SIZES), torch.tensor(SIZES).int()])
@pytest.mark.parametrize("recipe", RECIPES)
def test_it_is_a_loop_of_linear(recipe, splits, single) -> None:
    """Three steps: results, gradients, weights, scales and histories."""
    module = make(single)
    loop = Loop(module)
    data = batches()
    want = train(loop, loop, RECIPES[recipe], data)
    same(train(module, lambda x: module(x, splits), RECIPES[recipe], data), want)
    mine, theirs = states(module), states(loop)
    assert sorted(mine) == sorted(theirs) and mine
    for key, value in theirs.items():
        assert torch.equal(mine[key], value), key


@pytest.mark.parametrize("recipe", ["plain", "two histories", "by name"])
def test_tokens_of_no_group_have_no_say(recipe) -> None:
    """Neither in a scale nor in a gradient, however large they are."""
    one, two = make(), make()
    splits = torch.tensor(SIZES)
    want = train(one, lambda x: one(x, splits), RECIPES[recipe], batches())
    more = [torch.full((EXTRA, features), 1e6) for features in FEATURES]
    data = [(torch.cat([x, more[0]]), torch.cat([dy, more[1]])) for x, dy in batches()]
    got = train(two, lambda x: two(x, splits), RECIPES[recipe], data)
    assert not any(t[-EXTRA:].any() for t in got if t.shape[0] == sum(SIZES) + EXTRA)
    same([t[: sum(SIZES)] if t.shape[0] == sum(SIZES) + EXTRA else t for t in got], want)
    mine, theirs = states(two), states(one)
    assert all(torch.equal(mine[key], theirs[key]) for key in theirs)


@pytest.mark.parametrize("on_device", [False, True])
def test_what_has_no_rows_keeps_its_histories(on_device) -> None:
    """Groups, and a layer: their inputs and gradients record nothing, their weights do."""
    grouped, layer = hybridq.GroupedLinear(2, 32, 32), hybridq.Linear(32, 32)

    def step(sizes: list[int]) -> dict[str, torch.Tensor]:
        splits = torch.tensor(sizes) if on_device else sizes
        with autocast(recipe="fp8_delayed"):
            y = grouped(torch.full((sum(sizes), 32), 2.0, requires_grad=True), splits)
            z = layer(torch.full((sizes[1], 32), 2.0, requires_grad=True))
        (y.sum() + z.sum()).backward()
        hybridq.update_scaling(grouped), hybridq.update_scaling(layer)
        found = states(grouped) | {f"layer.{key}": one for key, one in states(layer).items()}
        return {key: one.clone() for key, one in found.items()}

    first, second = step([3, 5]), step([4, 0])
    assert first.keys() == second.keys()
    for key, one in second.items():
        is_idle = "weight" not in key and (key.startswith(("1.", "layer.")))
        if is_idle or key.endswith("scale"):
            assert torch.equal(one, first[key]), key
        else:
            assert not torch.equal(one, first[key]), key


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.filterwarnings("ignore:delayed scaling")
def test_a_bad_amax_stays_in_its_group(value) -> None:
    module = make()
    loop = Loop(module)
    data = batches()
    data[1][0][7, 3] = value
    splits = torch.tensor(SIZES)
    train(loop, loop, "fp8_delayed", data[:2])
    train(module, lambda x: module(x, splits), "fp8_delayed", data[:2])
    mine, theirs = states(module), states(loop)
    assert sorted(mine) == sorted(theirs)
    for key, tensor in theirs.items():
        assert torch.allclose(mine[key], tensor, rtol=0, atol=0, equal_nan=True), key
        assert key.startswith("2.") or tensor.isfinite().all(), key


@pytest.mark.parametrize("recipe", ["plain", "decoded", "by name"])
def test_microbatches_evaluation_and_cached_weights(recipe) -> None:
    results = []
    for splits in (list(SIZES), torch.tensor(SIZES)):
        for first in (False, True):
            module = make()
            data = batches(steps=4)

            def call(x, module=module, splits=splits, first=first):
                module.eval()
                with torch.no_grad():
                    module(x * 100, splits)  # records nothing
                module.train()
                return module(x, splits, True if first else None)

            results.append(train(module, call, RECIPES[recipe], data, microbatches=2))
    for one in results[1:]:
        same(one, results[0])


@pytest.mark.parametrize("mode", ["bf16", "amp"])
def test_bf16_and_torch_autocast(mode) -> None:
    dtype = torch.bfloat16 if mode == "bf16" else torch.float32
    module = make(dtype=dtype)
    loop, data, splits = Loop(module), batches(dtype), torch.tensor(SIZES)
    with torch.autocast("cpu", torch.bfloat16, enabled=mode == "amp"):
        want = train(loop, loop, "fp8_delayed", data)
        same(train(module, lambda x: module(x, splits), "fp8_delayed", data), want)


@pytest.mark.more
@pytest.mark.parametrize("recipe", ["plain", pytest.param("decoded", marks=SLOW), "by name"])
def test_compiled(recipe) -> None:
    """One graph for all sizes; eager's bits and states."""
    torch._dynamo.reset()
    counters.clear()
    one, two = make(), make()
    data = batches(steps=2)
    compiled = torch.compile(lambda x, s: two(x, s), fullgraph=True, backend="aot_eager")
    for sizes in (SIZES, (130, 17, 5, 0)):
        splits = torch.tensor(sizes)
        want = train(one, lambda x, s=splits: one(x, s), RECIPES[recipe], data)
        got = train(two, lambda x, s=splits: compiled(x, s), RECIPES[recipe], data)
        same(got, want)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    mine, theirs = states(two), states(one)
    assert all(torch.equal(mine[key], theirs[key]) for key in theirs)
    torch._dynamo.reset()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputation_after_an_update_has_the_scales_of_its_forward(reentrant) -> None:
    results = []
    for recomputes in (False, True):
        module, splits = make(), torch.tensor(SIZES)
        (x, dy), other = batches(steps=2)[0], batches(steps=2)[1][0]
        leaf = x.clone().requires_grad_()
        with autocast(recipe="fp8_delayed"):
            y = (
                checkpoint(module, leaf, splits, use_reentrant=reentrant)
                if recomputes
                else (module(leaf, splits))
            )
            module(other, splits)
        hybridq.update_scaling(module)
        y.backward(dy)
        recorded = states(module)
        results.append([y.detach(), leaf.grad, *weights(module, "grad"), *recorded.values()])
    same(*results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [float("nan"), -float("nan"), float("inf"), 0.0, -50.0])
def test_the_largest_value_of_each_group(dtype, value) -> None:
    x = batches(dtype)[1][0]
    x[7, 3] = value
    x = torch.cat([x, x[:2] * 1000])  # of no group
    offsets = torch.tensor(SIZES).cumsum(0).int()
    want = [part.float().abs().max().item() if len(part) else 0.0 for part in x[:-2].split(SIZES)]
    for run in (largest_by_group, torch.ops.hybridq.largest_ragged):
        got = run(x, offsets)
        assert got.dtype == torch.float32
        assert torch.equal(got.nan_to_num(-1.0), torch.tensor(want)[:, None].nan_to_num(-1.0))
    if torch.tensor(value).isfinite():
        torch.library.opcheck(torch.ops.hybridq.largest_ragged.default, (x, offsets))


@pytest.mark.parametrize("direction", ["rowwise", "columnwise"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_a_device_given_scales_give_the_loops_planes(direction, dtype) -> None:
    """What a GPU composes of operations on all tokens, on a CPU, against one encode per group."""
    x = batches(dtype)[1][0]
    offsets = torch.tensor(SIZES).cumsum(0).int()
    scales = -torch.tensor([[448.0], [3.7], [0.31], [2.0**-9]])
    for name in ("fp8_e4m3", "fp8_e5m2"):
        spec = PlaneSpec.parse(name)
        own, request = (spec, None), EncodeRequest(name, row_stat=scales)
        if direction == "columnwise":
            own, request = (None, spec), EncodeRequest("", name, col_stat=scales)
        got = encode_by_group(x, offsets, *own, request)
        want = encode_loop(x, offsets, *own, request)
        # An empty group has no plane, and so no scale.
        taken = torch.tensor([size > 0 for size in SIZES])
        same([got[0].view(torch.uint8), got[1][taken]], [want[0].view(torch.uint8), want[1][taken]])
