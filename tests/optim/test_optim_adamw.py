"""hybridq.optim.AdamW: torch's own AdamW on FP32 copies of the parameters is the oracle."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

import hybridq
from hybridq import QuantizedTensor, reference
from hybridq.optim import AdamW
from tensor_tools import PAIRS, same_planes

MODES = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
OPTIONS = {
    "defaults": {},
    "decay": {"lr": 0.03, "weight_decay": 0.3, "betas": (0.8, 0.9), "eps": 1e-5},
    "amsgrad": {"lr": 0.03, "amsgrad": True},
    "maximize": {"lr": 0.03, "maximize": True},
    "capturable": {"lr": 0.03},
}
SHAPE = (48, 64)


def parameters() -> dict[str, nn.Parameter]:
    """A parameter of each kind: every pair of planes, and plain ones of all dtypes."""
    made = {name: hybridq.quantize(torch.randn(SHAPE), **pair) for name, pair in PAIRS.items()}
    made["bf16 pair"] = hybridq.quantize(torch.randn(SHAPE).bfloat16(), "mxfp8")
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        made[str(dtype)] = torch.randn(SHAPE).to(dtype)
    return {name: nn.Parameter(value) for name, value in made.items()}


def long(parameter: torch.Tensor) -> nn.Parameter:
    """Its values as the oracle's parameter: FP32, or FP64."""
    if isinstance(parameter, QuantizedTensor):
        return nn.Parameter(parameter.detach().dequantize(dtype=torch.float32))
    dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
    return nn.Parameter(parameter.detach().to(dtype, copy=True))


def set_grads(params, oracles, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for i, (one, oracle) in enumerate(zip(params, oracles, strict=True)):
        grad = torch.randn(one.shape, generator=generator).to(one.dtype)
        one.grad, oracle.grad = (None, None) if i == seed % 7 else (grad, grad.to(oracle.dtype))


def assert_follows(parameter: torch.Tensor, oracle: torch.Tensor, state: dict) -> None:
    """The master, or else the parameter, has the oracle's bits, and the parameter the master's."""
    master = state.get("master_param")
    if isinstance(parameter, QuantizedTensor):
        assert master.dtype == torch.float32 and torch.equal(master, oracle)
        want = parameter.clone()
        want.quantizer.update_quantized(oracle.detach(), want)
        same_planes(parameter, want)
        assert type(parameter) is type(want)
    elif parameter.dtype in (torch.float32, torch.float64):
        assert master is None and torch.equal(parameter, oracle)
    else:
        assert torch.equal(master, oracle) and torch.equal(parameter, oracle.to(parameter.dtype))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("options", OPTIONS)
def test_ten_steps_are_those_of_torch_on_fp32(mode, options) -> None:
    named = parameters()
    params, oracles = list(named.values()), [long(p) for p in named.values()]
    extra = {"capturable": False} if options != "capturable" or mode == "fused" else {}
    chosen = {**OPTIONS[options], **MODES[mode], **extra}
    ours, oracle = AdamW(params, **chosen), torch.optim.AdamW(oracles, **chosen)
    for step in range(10):
        set_grads(params, oracles, step)
        ours.step()
        oracle.step()
    for one, other in zip(params, oracles, strict=True):
        assert_follows(one, other, ours.state[one])
        for name in ("exp_avg", "exp_avg_sq", "step"):
            mine, theirs = ours.state[one][name], oracle.state[other][name]
            assert type(mine) is torch.Tensor and torch.equal(mine, theirs)
            assert mine.dtype == theirs.dtype


def test_each_quantized_parameter_is_written_once_per_step(monkeypatch) -> None:
    seen = []
    original = hybridq.Quantizer.update_quantized
    monkeypatch.setattr(
        hybridq.Quantizer,
        "update_quantized",
        lambda self, source, target, **o: seen.append(id(target)) or original(self, source, target),
    )
    params = [p for p in parameters().values() if isinstance(p, QuantizedTensor)]
    optimizer = AdamW(params)
    for p in params:
        p.grad = torch.ones(SHAPE, dtype=p.dtype)
    versions = [p._version for p in params]
    optimizer.step()
    assert seen == [id(p) for p in params]
    assert all(p._version > v for p, v in zip(params, versions, strict=True))


def test_groups_schedulers_clipping_and_closures() -> None:
    named = parameters()
    params, oracles = list(named.values()), [long(p) for p in named.values()]
    both = []
    for kind, these in ((AdamW, params), (torch.optim.AdamW, oracles)):
        groups = [{"params": these[:5], "lr": 0.1}, {"params": these[5:], "weight_decay": 0.5}]
        optimizer = kind(groups, lr=0.02)
        both.append((optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)))
    for step in range(4):
        set_grads(params, oracles, step + 100)
        for one, other in zip(params, oracles, strict=True):
            if one.dtype == torch.float32:  # in a shorter dtype the clipping itself rounds
                nn.utils.clip_grad_norm_([one], 1.0)
                nn.utils.clip_grad_norm_([other], 1.0)
        for optimizer, schedule in both:
            assert optimizer.step(lambda: 3.5) == 3.5
            schedule.step()
    for one, other in zip(params, oracles, strict=True):
        assert_follows(one, other, both[0][0].state[one])


def _layer(recipe: str, **options) -> hybridq.Linear:
    torch.manual_seed(0)
    with hybridq.quantized_model_init(recipe, **options):
        return hybridq.Linear(64, 48, dtype=torch.bfloat16)


def test_masters_start_from_the_value_that_was_kept() -> None:
    for keeps in (True, False):
        layer = _layer("nvfp4", preserve_high_precision_init_val=keeps)
        torch.manual_seed(0)
        plain = hybridq.Linear(64, 48, dtype=torch.bfloat16)
        want = plain.weight.detach().float()
        if not keeps:
            want = layer.weight.detach().dequantize(dtype=torch.float32)
        optimizer = AdamW(layer.parameters(), lr=0.0, weight_decay=0.0)
        layer.weight.grad = torch.ones(48, 64).bfloat16()
        optimizer.step()
        assert torch.equal(optimizer.state[layer.weight]["master_param"], want)
        if keeps:
            assert not hasattr(layer.weight, "get_high_precision_init_val")
    # What was loaded in between counts.
    layer = _layer("nvfp4", preserve_high_precision_init_val=True)
    with torch.no_grad():
        layer.weight.fill_(0.5)
    optimizer = AdamW(layer.parameters(), lr=0.0)
    layer.weight.grad = torch.zeros(48, 64).bfloat16()
    optimizer.step()
    master = optimizer.state[layer.weight]["master_param"]
    assert torch.equal(master, layer.weight.dequantize(dtype=torch.float32))


def test_training_a_quantized_model_follows_masters() -> None:
    """Three steps of a model: its gradients, given to torch's AdamW on FP32 masters."""
    recipe = "mxfp8_fwd_nvfp4_bwd"
    torch.manual_seed(0)
    with hybridq.quantized_model_init(recipe, preserve_high_precision_init_val=True):
        model = hybridq.LayerNormMLP(64, 96, dtype=torch.bfloat16)
    kept = [getattr(p, "get_high_precision_init_val", p.detach)() for p in model.parameters()]
    oracles = [nn.Parameter(value.float()) for value in kept]
    ours, oracle = AdamW(model.parameters(), lr=0.01), torch.optim.AdamW(oracles, lr=0.01)
    losses = []
    x = torch.randn(32, 64).bfloat16()
    for _ in range(3):
        ours.zero_grad()
        with hybridq.autocast(recipe=recipe):
            loss = (model(x) - x).float().square().mean()
        loss.backward()
        for one, other in zip(model.parameters(), oracles, strict=True):
            other.grad = one.grad.float()
        ours.step()
        oracle.step()
        losses.append(loss.item())
    assert losses[2] < losses[0]
    for one, other in zip(model.parameters(), oracles, strict=True):
        assert_follows(one, other, ours.state[one])


# ---- masters in BF16


def test_short_masters_are_rounded_stochastically_from_fp32_arithmetic() -> None:
    named = parameters()
    params = list(named.values())
    ours = AdamW(params, lr=0.01, master_dtype=torch.bfloat16)
    generator = torch.get_rng_state()
    want = {}
    for step in range(3):
        set_grads(params, [long(p) for p in params], step)
        before = torch.get_rng_state()
        expected = {}
        for name, p in named.items():
            if p.grad is None:
                continue
            state = {k: v.clone() for k, v in ours.state[p].items()}
            start = state.get("master_param")
            oracle = long(p) if start is None else nn.Parameter(start.float())
            if start is None and isinstance(p, QuantizedTensor):
                oracle = nn.Parameter(oracle.detach().bfloat16().float())
            if start is None and p.dtype == torch.float16:
                oracle = nn.Parameter(oracle.detach().bfloat16().float())
            oracle.grad = p.grad.to(oracle.dtype)
            optimizer = torch.optim.AdamW([oracle], lr=0.01)
            if state:
                state.pop("master_param", None)
                optimizer.state[oracle] = state
            optimizer.step()
            expected[name] = oracle.detach()
        ours.step()
        after = torch.get_rng_state()
        torch.set_rng_state(before)
        for name, p in named.items():
            if name not in expected:
                continue
            want[name] = expected[name]
            if p.dtype in (torch.float32, torch.float64) and not isinstance(p, QuantizedTensor):
                assert torch.equal(p, want[name])
                continue
            seed = torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64)
            rounded = reference.round_stochastic(want[name], seed, torch.bfloat16)
            master = ours.state[p].get("master_param", p.detach())
            assert master.dtype == torch.bfloat16 and torch.equal(master, rounded)
            if isinstance(p, QuantizedTensor):
                again = p.clone()
                again.quantizer.update_quantized(rounded, again)
                same_planes(p, again)
        assert torch.equal(torch.get_rng_state(), after)
    assert not torch.equal(generator, torch.get_rng_state())
    assert "master_param" not in ours.state[named["torch.bfloat16"]]


def test_small_updates_of_short_masters_are_not_lost() -> None:
    """250 steps of 2^-12 from 1, whose BF16 neighbours are 2^-7 apart, must not stay at 1."""
    p = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    p.grad = -torch.ones_like(p)
    optimizer = AdamW([p], lr=2**-12, weight_decay=0.0, master_dtype=torch.bfloat16)
    for _ in range(250):
        optimizer.step()
    # The mean of 4096 sums; each step's rounding has a variance below (2^-7)^2 / 4.
    deviation = (250 / 4) ** 0.5 * 2**-7 / 64
    assert abs(p.float().mean().item() - (1 + 250 * 2**-12)) < 5 * deviation


# ---- state


@pytest.mark.parametrize("master", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", MODES)
def test_a_saved_state_continues_with_the_same_bits(mode, master) -> None:
    named = parameters()
    params = list(named.values())
    ours = AdamW(params, lr=0.05, amsgrad=True, master_dtype=master, **MODES[mode])
    set_grads(params, [long(p) for p in params], 8)
    ours.step()
    file = io.BytesIO()
    torch.save([ours.state_dict(), [p.detach() for p in params]], file)
    file.seek(0)
    state, values = torch.load(file, weights_only=True)
    others = [nn.Parameter(value) for value in values]
    again = AdamW(others, lr=0.5, amsgrad=True, **MODES[mode])
    hooks = []
    again.register_load_state_dict_post_hook(lambda o: hooks.append(len(o.state)))
    again.load_state_dict(state)
    assert hooks == [len(ours.state)] and again.param_groups[0]["lr"] == 0.05
    for one, other in zip(params, others, strict=True):
        assert ours.state[one].keys() == again.state[other].keys()
        for name, value in ours.state[one].items():
            assert value.dtype == again.state[other][name].dtype
            assert torch.equal(value, again.state[other][name])
    copied = copy.deepcopy(again)
    copies = [p for group in copied.param_groups for p in group["params"]]
    for optimizer, these in ((ours, params), (again, others), (copied, copies)):
        set_grads(these, [long(p) for p in these], 9)
        torch.manual_seed(4)
        optimizer.step()
    for one, other, third in zip(params, others, copies, strict=True):
        if isinstance(one, QuantizedTensor):
            same_planes(one, other)
            same_planes(one, third)
        else:
            assert torch.equal(one, other) and torch.equal(one, third)


def test_it_takes_a_state_of_torch() -> None:
    params = [nn.Parameter(torch.randn(SHAPE).bfloat16()), nn.Parameter(torch.randn(3))]
    theirs = torch.optim.AdamW(params)
    for p in params:
        p.grad = torch.ones_like(p)
    theirs.step()
    ours = AdamW(params)
    ours.load_state_dict(theirs.state_dict())
    ours.step()
    state = ours.state[params[0]]
    assert state["exp_avg"].dtype == state["master_param"].dtype == torch.float32
    assert state["step"] == 2


def test_it_refuses_what_it_cannot_do() -> None:
    made = hybridq.quantize(torch.randn(8, 32), "mxfp8")
    w = nn.Parameter(QuantizedTensor.make(made.tensor_storage, made.shape, made.dtype))
    w.grad = torch.ones(8, 32)
    with pytest.raises(hybridq.PlaneError, match="AdamW: the tensor has no quantizer"):
        AdamW([w]).step()
    with pytest.raises(ValueError, match="master_dtype must be float32 or bfloat16, got"):
        AdamW([w], master_dtype=torch.float16)
    with pytest.raises(ValueError, match="master_dtype must be float32 or bfloat16, got"):
        AdamW([{"params": [w], "master_dtype": torch.int8}])
    p = nn.Parameter(torch.randn(4, 4))
    p.grad = torch.ones(4, 4).to_sparse()
    with pytest.raises(RuntimeError, match="gradients must be dense"):
        AdamW([p]).step()


def make(kind, groups):
    options = {"AdamW": {}, "SGD": {"momentum": 0.9}, "Muon": {}}[kind]
    return getattr(hybridq.optim, kind)(groups, lr=0.1, **options)


def two_groups():
    torch.manual_seed(0)
    plain, low = torch.randn(4, 64), hybridq.quantizer("mxfp8").quantize(torch.randn(8, 64))
    return [nn.Parameter(plain), nn.Parameter(torch.randn(6, 4).bfloat16()), nn.Parameter(low)]


def values(parameters, optimizer):
    own = [one.detach().float().clone() for one in parameters]
    states = copy.deepcopy(optimizer.state_dict()["state"])
    return own, {(i, k): v for i, one in states.items() for k, v in one.items()}


def assert_same(found, want):
    assert all(torch.equal(a, b) for a, b in zip(found[0], want[0], strict=True))
    assert found[1].keys() == want[1].keys()
    assert all(torch.equal(found[1][key], want[1][key]) for key in want[1])


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "Muon"])
def test_a_step_that_raises_updates_nothing(kind):
    """Groups before the one with the error were updated, so that the next step took them twice."""

    def sparse(one):
        one.grad = torch.ones(6, 4).bfloat16().to_sparse()

    def twice(one):
        one.main_grad = torch.ones(6, 4)

    def shape(one):
        one.main_grad = torch.ones(3, 3)

    for spoil, text in (
        (sparse, r"must be dense, got a sparse one of a parameter \[6, 4\]"),
        (twice, "a gradient in main_grad and another in grad"),
        (shape, "main_grad must have the shape"),
    ):
        parameters = two_groups()
        optimizer = make(kind, [{"params": parameters[::2]}, {"params": parameters[1:2]}])
        for step in range(2):
            for one in parameters:
                one.grad = torch.ones(one.shape, dtype=one.dtype)
            if step == 0:
                optimizer.step()
        before = values(parameters, optimizer)
        spoil(parameters[1])
        with pytest.raises(RuntimeError, match=f"{kind}: .*{text}"):
            optimizer.step()
        assert_same(values(parameters, optimizer), before)


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "Muon"])
def test_a_state_of_another_model_is_refused_and_nothing_of_it_is_loaded(kind):
    """It was taken, and the next step ended in torch's words about sizes of two tensors."""
    parameters = two_groups()
    optimizer = make(kind, parameters)
    other = make(kind, [*parameters[1:], parameters[0]])
    for one in (optimizer, other):
        for parameter in parameters:
            parameter.grad = torch.ones(parameter.shape, dtype=parameter.dtype)
        one.step()
    before = values(parameters, optimizer)
    text = rf"{kind}.load_state_dict: .* shape of its parameter, got \(6, 4\) for parameter 0 of"
    with pytest.raises(ValueError, match=text):
        optimizer.load_state_dict(other.state_dict())
    assert_same(values(parameters, optimizer), before)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert_same(values(parameters, optimizer), before)
