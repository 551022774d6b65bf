"""is_first_microbatch: quantized weights that outlive a forward, and all that ends them."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hybridq
from hybridq.kernels.cpu import backend as backend_cpu
from hybridq.nn.weights import weight_cache
from hybridq.recipes import CustomRecipe, MXFP8BlockScaling

ROWS, INNER, OUTER = 8, 64, 48


@pytest.fixture
def encodes(monkeypatch) -> list[int]:
    """The number of rows of everything that is encoded; a weight has OUTER."""
    seen: list[int] = []
    core = backend_cpu.core

    class Spy:
        def __getattr__(self, name: str):
            return getattr(core, name)

        def encode_from_scratch(self, x, dtype, rows, *rest):
            seen.append(rows)
            return core.encode_from_scratch(x, dtype, rows, *rest)

    monkeypatch.setattr(backend_cpu, "core", Spy())
    return seen


def layer(**options) -> hybridq.Linear:
    """A layer of its own values."""
    return hybridq.Linear(INNER, OUTER, dtype=torch.bfloat16, **options)


def data(count: int = 1) -> list[torch.Tensor]:
    """Inputs that need gradients."""
    return [torch.randn(ROWS, INNER, dtype=torch.bfloat16).requires_grad_() for _ in range(count)]


def forward(module: nn.Module, x: torch.Tensor, first: bool | None = None, recipe="mxfp8"):
    """One forward under a recipe."""
    with hybridq.autocast(recipe=recipe):
        return module(x, is_first_microbatch=first)


def weights(encodes: list[int]) -> int:
    """How many weights were encoded since the last question."""
    count = encodes.count(OUTER)
    encodes.clear()
    return count


RECIPES = ["mxfp8", "nvfp4", "mxfp8_fwd_nvfp4_bwd", "fp8_block", "fp8_current"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_accumulation_is_the_same_bit_for_bit(recipe: str, encodes: list[int]) -> None:
    ours, plain = layer(), layer()
    plain.load_state_dict(ours.state_dict())
    seed = torch.get_rng_state()
    results = []
    for module, flags in ((plain, [None] * 3), (ours, [True, False, False])):
        torch.set_rng_state(seed)
        out = []
        for _ in range(2):  # two steps
            inputs = data(3)
            for x, first in zip(inputs, flags, strict=True):
                y = forward(module, x, first, recipe)
                y.backward(torch.randn_like(y))
                out += [y.detach(), x.grad]
            out += [module.weight.grad.clone(), module.bias.grad.clone()]
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.sub_(parameter.grad, alpha=0.1)
            module.zero_grad()
        results.append((out, weights(encodes)))
    (want, every), (got, kept) = results
    assert all(map(torch.equal, want, got))
    assert every == 3 * kept > 0
    assert not torch.equal(forward(ours, data()[0]), nn.Linear.forward(ours, data()[0]))


def test_another_stream_quantizes_for_itself(encodes: list[int], monkeypatch) -> None:
    """What one stream has queued, another may read before it is written."""
    module, (x,) = layer(), data()
    forward(module, x, True)
    assert weights(encodes) == 1
    monkeypatch.setattr(weight_cache, "stream_of", lambda device: 7)
    forward(module, x, False)
    assert weights(encodes) == 1
    forward(module, x, False)
    assert weights(encodes) == 0


def test_none_always_quantizes(encodes: list[int]) -> None:
    module, (x,) = layer(), data()
    before = forward(module, x)
    forward(module, x)
    assert weights(encodes) == 2 and module._cached_weights.get("") is None
    module.weight.data.mul_(2.0)  # raises no version
    assert not torch.equal(forward(module, x), before)


def test_true_quantizes_again_and_false_takes_it(encodes: list[int]) -> None:
    module, (x,) = layer(), data()
    forward(module, x, False)  # nothing is kept yet
    assert weights(encodes) == 1
    forward(module, x, False)
    assert weights(encodes) == 0
    before = forward(module, x, True)
    assert weights(encodes) == 1
    module.weight.data.mul_(2.0)
    after = forward(module, x, True)
    assert weights(encodes) == 1 and not torch.equal(before, after)
    assert torch.equal(after, forward(module, x))


class Old(torch.optim.Optimizer):
    """An optimizer that writes through `.data`, as older ones do."""

    def __init__(self, parameters, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(parameter.grad, alpha=-group["lr"])


def _step(optimizer, **options):
    def write(module: nn.Module) -> None:
        module.weight.grad = torch.randn_like(module.weight)
        optimizer([module.weight], lr=0.5, **options).step()

    return write


def _compiled(module: nn.Module) -> None:
    module.weight.grad = torch.randn_like(module.weight)
    optimizer = torch.optim.SGD([module.weight], lr=0.5)
    torch.compile(optimizer.step, backend="aot_eager")()


def _assign(module: nn.Module) -> None:
    module.weight.data = torch.randn_like(module.weight)


def _assign_often(module: nn.Module) -> None:
    """Give the weight new memory until its old address comes back, if it does."""
    address = module.weight.data_ptr()
    for _ in range(200):
        module.weight.data = torch.randn_like(module.weight)
        if module.weight.data_ptr() == address:
            break


def _exchange(module: nn.Module) -> None:
    module.weight = nn.Parameter(torch.randn_like(module.weight))


def _load(module: nn.Module) -> None:
    module.load_state_dict({"weight": torch.randn(OUTER, INNER), "bias": module.bias.detach()})


def _resize(module: nn.Module) -> None:
    """What a sharded model does between uses: memory is freed, taken again and filled."""
    storage = module.weight.untyped_storage()
    nbytes = storage.nbytes()
    storage.resize_(0)
    hold = torch.empty(nbytes, dtype=torch.uint8)
    storage.resize_(nbytes)
    with torch.no_grad():
        module.weight.copy_(torch.randn(OUTER, INNER))
    del hold


def _foreach(module: nn.Module) -> None:
    torch._foreach_mul_([module.weight.detach()], 3.0)


def _no_grad(module: nn.Module) -> None:
    with torch.no_grad():
        module.weight[3].mul_(2.0)


def _detached(module: nn.Module) -> None:
    module.weight.detach().mul_(2.0)


def _initialize(module: nn.Module) -> None:
    nn.init.normal_(module.weight)


def _distribute(module: nn.Module) -> None:
    values = torch.randn(OUTER * INNER + OUTER)
    nn.utils.vector_to_parameters(values, module.parameters())


WRITES = {
    "SGD, foreach": _step(torch.optim.SGD, foreach=True),
    "SGD, fused": _step(torch.optim.SGD, fused=True),
    "SGD, loop": _step(torch.optim.SGD, foreach=False),
    "Adam, foreach": _step(torch.optim.Adam, foreach=True),
    "AdamW, fused": _step(torch.optim.AdamW, fused=True),
    "writes through data": _step(Old),
    "SGD, compiled": _compiled,
    "in place under no_grad": _no_grad,
    "foreach": _foreach,
    "detach().mul_": _detached,
    "data =": _assign,
    "data =, the same address": _assign_often,
    "another parameter": _exchange,
    "load_state_dict": _load,
    "storage resized": _resize,
    "nn.init": _initialize,
    "vector_to_parameters": _distribute,
    "half and back": lambda module: module.half().float(),
}


@pytest.mark.parametrize("write", WRITES)
def test_what_can_be_seen_ends_it(write: str, encodes: list[int]) -> None:
    # FP32, since torch 2.13's fused SGD on a CPU leaves BF16 parameters as they are.
    module, x = hybridq.Linear(INNER, OUTER), torch.randn(ROWS, INNER)
    before = forward(module, x, True)
    forward(module, x, False)
    assert weights(encodes) == 1
    WRITES[write](module)
    after = forward(module, x, False)
    assert weights(encodes) == 1
    assert torch.equal(after, forward(module, x))
    if write != "half and back":
        assert not torch.equal(before, after)


def test_writes_through_data_are_the_callers_promise() -> None:
    """They raise no version: False says that there are none, and True takes a new one."""
    module, (x,) = layer(), data()
    before = forward(module, x, True)
    module.weight.data.mul_(2.0)
    assert torch.equal(forward(module, x, False), before)
    hybridq.forget(module)
    assert not torch.equal(forward(module, x, False), before)


def test_another_recipe_or_dtype_quantizes_again(encodes: list[int]) -> None:
    module, (x,) = layer(), data()
    forward(module, x, True)
    weights(encodes)
    forward(module, x, False, "nvfp4")
    assert weights(encodes) == 1
    forward(module, x, False, MXFP8BlockScaling())
    forward(module, x, False, MXFP8BlockScaling())  # an equal one
    assert weights(encodes) == 1
    with torch.autocast("cpu", dtype=torch.float16):
        assert forward(module, x, False).dtype == torch.float16
    assert weights(encodes) == 1


def test_torch_autocast_keeps_the_cast_weight(encodes: list[int]) -> None:
    module = hybridq.Linear(INNER, OUTER)
    x = torch.randn(ROWS, INNER)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        want = forward(module, x)
        weights(encodes)
        for first in (True, False, False):
            y = forward(module, x, first)
            assert torch.equal(y, want)
            y.float().sum().backward()
    assert weights(encodes) == 1 and module.weight.grad.dtype == torch.float32


def test_a_plane_that_is_missing_is_made(encodes: list[int]) -> None:
    module, (x,) = layer(), data()
    with torch.no_grad():
        forward(module, x, True)
    forward(module, x, False).sum().backward()  # needs the columnwise plane too
    assert weights(encodes) == 2
    forward(module, x, False).sum().backward()
    with torch.no_grad():
        forward(module, x, False)
    assert weights(encodes) == 0


def test_inference_mode_and_training_share_it(encodes: list[int]) -> None:
    module, (x,) = layer(), data()
    plain = x.detach()
    want = forward(module, x)
    weights(encodes)
    with torch.inference_mode():
        for first in (True, False, False):
            assert torch.equal(forward(module, plain, first), want)
    assert weights(encodes) == 1
    assert not module._cached_weights.get("").row[0].is_inference()
    y = forward(module, x, False)
    y.sum().backward()
    assert torch.equal(y, want) and x.grad is not None
    frozen = copy.deepcopy(module)
    with torch.inference_mode():
        frozen.weight = nn.Parameter(torch.randn(OUTER, INNER, dtype=torch.bfloat16))
        forward(frozen, plain, True)
        assert frozen._cached_weights.get("") is None  # such a weight counts no versions


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_takes_it_too(reentrant: bool, encodes: list[int]) -> None:
    ours, plain = layer(), layer()
    plain.load_state_dict(ours.state_dict())
    inputs = [x.detach() for x in data(2)]
    gradients = []
    for module, flags in ((plain, (None, None)), (ours, (True, False))):
        encodes.clear()
        leaves = [x.clone().requires_grad_() for x in inputs]
        ys = [
            checkpoint(forward, module, x, first, use_reentrant=reentrant)
            for x, first in zip(leaves, flags, strict=True)
        ]
        for y in ys:
            y.backward(torch.ones_like(y))
        gradients.append([module.weight.grad, *(x.grad for x in leaves)])
        if module is ours:
            # A reentrant forward needs no gradient, so its plane for the backward comes later.
            assert weights(encodes) == (2 if reentrant else 1)
    assert all(map(torch.equal, *gradients))


def test_autocast_says_it_for_modules_that_are_not_told(encodes: list[int]) -> None:
    model = nn.Sequential(layer(), nn.GELU(), hybridq.Linear(OUTER, OUTER, dtype=torch.bfloat16))
    (x,) = data()
    for first, count in ((None, 2), (True, 2), (False, 0), (False, 0), (None, 2)):
        with hybridq.autocast(recipe="mxfp8", is_first_microbatch=first):
            y = model(x)
        assert weights(encodes) == count
        if first is None:
            want = y
        assert torch.equal(y, want)

    @hybridq.autocast(recipe="mxfp8", is_first_microbatch=True)
    def run(module: nn.Module) -> torch.Tensor:
        return module(x, is_first_microbatch=False)  # an argument wins

    run(model[0])
    assert weights(encodes) == 0
    with hybridq.autocast(recipe="mxfp8", is_first_microbatch=True), hybridq.autocast():
        model(x)  # the innermost counts
    assert weights(encodes) == 2


@pytest.mark.thinned(1, few=1)
@pytest.mark.parametrize("first", [None, True, False])
def test_compiled_code_takes_the_argument_and_keeps_nothing(first) -> None:
    module, (x,) = layer(), data()
    want = forward(module, x)
    want.sum().backward()
    gradient = module.weight.grad.clone()
    module.zero_grad()
    compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        y = compiled(module, x, first)
        assert torch.equal(y, want)
    y.sum().backward()
    assert torch.equal(module.weight.grad, gradient) and module._cached_weights.get("") is None
    with hybridq.autocast(recipe="mxfp8", is_first_microbatch=first):
        assert torch.equal(torch.compile(module, fullgraph=True, backend="aot_eager")(x), want)
    with torch.no_grad():
        module.weight.mul_(2.0)
        assert not torch.equal(compiled(module, x, first), want)


def test_what_may_not_be_kept_is_not(encodes: list[int]) -> None:
    module, (x,) = layer(), data()

    def stochastic(role: hybridq.QuantizerRole) -> hybridq.Quantizer:
        name = "mxfp8"
        return hybridq.quantizers.quantizer(name, stochastic=role.tensor_type == "weight")

    recipe = CustomRecipe(qfactory=stochastic)
    forward(module, x, True, recipe)
    forward(module, x, False, recipe)
    assert weights(encodes) == 2 and module._cached_weights.get("") is None
    with torch.profiler.profile():
        forward(module, x, True)
    assert module._cached_weights.get("") is None
    assert torch.equal(module(x, is_first_microbatch=False), nn.Linear.forward(module, x))
    assert module._cached_weights.get("") is None  # no recipe


def test_it_is_no_part_of_copies_and_dies_with_the_module() -> None:
    module, (x,) = layer(), data()
    forward(module, x, True)
    forward(module, x, False)
    kept = module._cached_weights.get("")
    assert kept.nbytes > OUTER * INNER
    assert list(module.state_dict()) == ["weight", "bias"]
    assert copy.deepcopy(module)._cached_weights.get("") is None
    assert pickle.loads(pickle.dumps(module))._cached_weights.get("") is None
    alive = weakref.ref(kept.row[0])
    del kept
    hybridq.forget(nn.ModuleList([module]))
    gc.collect()
    assert module._cached_weights.get("") is None and alive() is None
    forward(module, x, True)
    module.to(torch.float32)
    assert module._cached_weights.get("") is None


def test_other_answers_are_refused() -> None:
    module, (x,) = layer(), data()
    with pytest.raises(TypeError, match="is_first_microbatch must be a bool or None, got int"):
        module(x, is_first_microbatch=1)
    with pytest.raises(TypeError, match="is_first_microbatch must be a bool or None, got str"):
        hybridq.autocast(is_first_microbatch="yes")
