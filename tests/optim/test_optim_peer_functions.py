"""What scripts ask of the optimizers of Transformer Engine: torch's own in FP32 are the oracle."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import hybridq
from hybridq.optim import SGD, AdamW, Muon
from tensor_tools import PAIRS

MODES = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def _steps(optimizer, oracle, params, wide, count=4, where="grad"):
    for step in range(count):
        torch.manual_seed(step)
        for one, other in zip(params, wide, strict=True):
            grad = torch.randn(one.shape)
            setattr(one, where, grad.to(one.dtype) if where == "grad" else grad)
            other.grad = getattr(one, where).float()
        optimizer.step(), oracle.step()


@pytest.mark.parametrize("fused", [False, True])
def test_remainders_and_parameters_are_the_fp32_masters(fused):
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(7, 33).bfloat16()), nn.Parameter(torch.randn(5).bfloat16())]
    wide = [nn.Parameter(p.detach().float()) for p in params]
    options = {"lr": 3e-3, "weight_decay": 0.1, "fused": fused}
    optimizer = AdamW(params, store_param_remainders=True, **options)
    _steps(optimizer, torch.optim.AdamW(wide, **options), params, wide)
    for one, other in zip(params, wide, strict=True):
        rest = optimizer.state[one]["master_param"]
        assert rest.dtype == torch.int16 and rest.any()
        assert torch.equal(optimizer.get_unscaled_state(one, "master_param"), other)
        # Nearest to the master: no other BF16 value is nearer.
        gap = (one.double() - other.double()).abs()
        for way in (torch.inf, -torch.inf):
            beside = torch.nextafter(one.detach(), torch.tensor(way).bfloat16())
            assert (gap <= (beside.double() - other.double()).abs()).all()


def test_remainders_of_corner_cases():
    from hybridq.optim.masters import joined, separated

    values = torch.tensor(
        [0.0, -0.0, 1.0, -3.1415927, 1e-45, -1e-40, 3.4e38, torch.inf, -torch.inf]
    )
    every = torch.cat([values, torch.randn(1000) * 2.0 ** torch.randint(-140, 120, (1000,))])
    upper, rest = separated(every)
    assert torch.equal(joined(upper, rest).view(torch.int32), every.view(torch.int32))
    upper, rest = separated(torch.tensor([torch.nan, -torch.nan]))
    assert upper.isnan().all() and joined(upper, rest).isnan().all()


@pytest.mark.parametrize("kind", [AdamW, SGD, Muon])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_others_write_goes_into_the_master(kind, dtype):
    """Weights that are clamped after each step: torch's own optimizer on FP32, clamped there."""
    torch.manual_seed(0)
    values, own = torch.randn(40, 8).to(dtype), getattr(torch.optim, kind.__name__)
    mine, wide = nn.Parameter(values.clone()), nn.Parameter(values.float())
    both = [(mine, kind([mine], lr=0.3)), (wide, own([wide], lr=0.3))]
    for _ in range(6):
        grad = torch.randn(40, 8).to(dtype)
        for parameter, optimizer in both:
            parameter.grad = grad.to(parameter.dtype)
            optimizer.step()
        with torch.no_grad():
            mine.clamp_(-0.5, 0.5)
            wide.clamp_(-0.5, 0.5)
        # A master beyond 0.5 that rounds to it stays.
        torch.testing.assert_close(mine.float(), wide, rtol=0, atol=torch.finfo(dtype).eps)
    master = both[0][1].state[mine]["master_param"]
    torch.testing.assert_close(master.clamp(-0.5, 0.5), wide.detach(), rtol=0, atol=2.0**-8)
    assert not torch.equal(master, mine.float())


@pytest.mark.parametrize("kind", [AdamW, SGD])
def test_writes_of_the_same_values_leave_the_master(kind):
    parameter = nn.Parameter(torch.randn(40, 8).bfloat16())
    optimizer = kind([parameter], lr=0.1)
    parameter.grad = torch.randn(40, 8).bfloat16()
    optimizer.step()
    master = optimizer.state[parameter]["master_param"].clone()
    with torch.no_grad():  # as an average of weights is put in, and taken out again
        saved = parameter.clone()
        parameter.zero_()
        parameter.copy_(saved)
    parameter.grad = torch.zeros(40, 8).bfloat16()
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert torch.equal(optimizer.state[parameter]["master_param"], master)


def test_writes_to_a_quantized_parameter_are_warned_of():
    own = hybridq.quantize(torch.randn(40, 64), "mxfp8")
    parameter = nn.Parameter(own)
    optimizer = AdamW([parameter], lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            parameter.grad = torch.randn(40, 64)
            optimizer.step()
    with torch.no_grad():
        parameter.clamp_(-0.5, 0.5)
    with pytest.warns(hybridq.HybridQWarning, match=r"AdamW: a quantized parameter \[40, 64\] was"):
        optimizer.step()


def test_a_quantized_parameter_that_was_loaded_with_its_master_is_not_warned_of():
    """Both were, and the run that goes on has the bits of the one that was saved."""
    torch.manual_seed(0)
    parameter = nn.Parameter(hybridq.quantize(torch.randn(40, 64), "mxfp8"))
    optimizer = AdamW([parameter], lr=0.1)

    def step(count):
        for seed in range(count):
            torch.manual_seed(seed)
            parameter.grad = torch.randn(40, 64)
            optimizer.step()
        return parameter.dequantize()

    step(2)
    weight, state = parameter.detach().clone(), copy.deepcopy(optimizer.state_dict())
    want = step(2)
    with torch.no_grad():
        parameter.copy_(weight)
    optimizer.load_state_dict(state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(step(2), want)
    with torch.no_grad():
        parameter.clamp_(-0.5, 0.5)
    with pytest.warns(hybridq.HybridQWarning, match="was written since the last step"):
        step(1)


def test_remainders_of_what_others_wrote_are_less_than_a_step():
    """Zeros that a caller wrote are no NaN, which a negative remainder of before would make."""
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(40, 8).bfloat16())
    optimizer = AdamW([parameter], lr=0.01, store_param_remainders=True)
    parameter.grad = torch.randn(40, 8).bfloat16()
    optimizer.step()
    assert (optimizer.state[parameter]["master_param"] < 0).any()
    written = torch.randn(40, 8).bfloat16()
    written[:10], written[10:20] = 0.0, -0.0
    parameter.detach().copy_(written)
    master = optimizer.get_unscaled_state(parameter, "master_param")
    torch.testing.assert_close(master, written.float(), rtol=2**-7, atol=1e-38)
    optimizer.step()
    assert parameter.isfinite().all()


def test_remainders_are_saved_and_loaded():
    torch.manual_seed(0)
    first = nn.Parameter(torch.randn(4, 8).bfloat16())
    optimizer = AdamW([first], store_param_remainders=True)
    first.grad = torch.randn(4, 8).bfloat16()
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    second = nn.Parameter(first.detach().clone())
    other = AdamW([second], store_param_remainders=True)
    other.load_state_dict(state)
    for parameter, own in ((first, optimizer), (second, other)):
        parameter.grad = torch.ones(4, 8).bfloat16()
        own.step()
    assert torch.equal(first, second)
    for name in ("master_param", "exp_avg", "exp_avg_sq"):
        both = [own.get_unscaled_state(p, name) for p, own in ((first, optimizer), (second, other))]
        assert torch.equal(*both)
    with pytest.raises(ValueError, match="store_param_remainders=True, and masters into one"):
        AdamW([second]).load_state_dict(state)
    with pytest.raises(ValueError, match="holds float32 masters exactly"):
        AdamW([second], store_param_remainders=True, master_dtype=torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoupled_gradients_are_taken_in_their_own_precision(dtype):
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(6, 10).to(dtype))]
    wide = [nn.Parameter(params[0].detach().float())]
    optimizer = AdamW(params, use_decoupled_grad=True)
    _steps(optimizer, torch.optim.AdamW(wide), params, wide, where="decoupled_grad")
    got = optimizer.state[params[0]].get("master_param", params[0])
    assert torch.equal(got, wide[0]) and params[0].grad is None
    params[0].decoupled_grad = torch.ones(3)
    with pytest.raises(RuntimeError, match="decoupled_grad must have the shape"):
        optimizer.step()


@pytest.mark.parametrize("moments", [("bf16", "fp8_block"), ("fp32", "bf16"), "fp8_block"])
def test_each_moment_is_held_in_its_own_way(moments):
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(4, 256).bfloat16())]
    wide = [nn.Parameter(params[0].detach().float())]
    optimizer, oracle = AdamW(params, moments=moments), torch.optim.AdamW(wide)
    _steps(optimizer, oracle, params, wide, 1)
    kinds = (moments, moments) if isinstance(moments, str) else moments
    held = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8_block": torch.uint8}
    state = optimizer.state[params[0]]
    for name, kind in zip(("exp_avg", "exp_avg_sq"), kinds, strict=True):
        key = f"{name}_codes" if kind == "fp8_block" else name
        assert state[key].dtype == held[kind]
        # One stochastic rounding: a step of the format, twice that where a root is held.
        unit = {"fp32": 0.0, "bf16": 2.0**-7, "fp8_block": 0.27}[kind]
        want = oracle.state[wide[0]][name]
        got = optimizer.get_unscaled_state(params[0], name)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, want, rtol=unit, atol=unit * float(want.abs().max()) / 64)
        optimizer.set_scaled_state(params[0], name, torch.full_like(got, 0.25))
        assert optimizer.get_unscaled_state(params[0], name).eq(0.25).all()
    optimizer.set_scaled_state(params[0], "master_param", torch.full_like(got, 1.5))
    assert optimizer.get_unscaled_state(params[0], "master_param").eq(1.5).all()
    saved = copy.deepcopy(optimizer.state_dict())
    other = AdamW(params, moments=moments)
    other.load_state_dict(saved)
    assert torch.equal(
        *(own.get_unscaled_state(params[0], "exp_avg") for own in (optimizer, other))
    )


def test_states_that_are_not_there_are_told():
    parameter = nn.Parameter(torch.ones(2, 2).bfloat16())
    optimizer = AdamW([parameter])
    with pytest.raises(ValueError, match="exp_avg must be of a parameter that has been updated"):
        optimizer.get_unscaled_state(parameter, "exp_avg")
    with pytest.raises(ValueError, match="AdamW: state must be one of"):
        optimizer.get_unscaled_state(parameter, "step")
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with pytest.raises(ValueError, match="must be set to float32"):
        optimizer.set_scaled_state(parameter, "exp_avg", torch.ones(2, 2).bfloat16())
    for moments in (("fp32",), ("fp32", "fp64")):
        with pytest.raises(ValueError, match="AdamW: moments must be"):
            AdamW([parameter], moments=moments)


OPTIONS = {
    "plain": {},
    "momentum": {"momentum": 0.9, "dampening": 0.1},
    "nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "maximize": {"momentum": 0.5, "maximize": True},
}


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("case", OPTIONS)
def test_sgd_is_torchs_on_masters(case, foreach):
    torch.manual_seed(0)
    params = [
        nn.Parameter(hybridq.quantize(torch.randn(48, 64), **pair)) for pair in PAIRS.values()
    ]
    params += [nn.Parameter(torch.randn(5, 6).to(d)) for d in (torch.bfloat16, torch.float32)]
    wide = []
    for one in params:
        plain = one.detach()
        plain = plain.dequantize(dtype=torch.float32) if hasattr(plain, "quantizer") else plain
        wide.append(nn.Parameter(plain.float().clone()))
    options = {"lr": 0.05, "foreach": foreach, **OPTIONS[case]}
    optimizer = SGD(params, **options)
    _steps(optimizer, torch.optim.SGD(wide, **options), params, wide)
    for one, other in zip(params, wide, strict=True):
        assert torch.equal(optimizer.state[one].get("master_param", one), other)


def test_decay_after_the_momentum_is_no_part_of_it():
    torch.manual_seed(0)
    w = torch.randn(9)
    parameter = nn.Parameter(w.bfloat16())
    wide, buffer = parameter.detach().double(), torch.zeros(9).double()
    optimizer = SGD([parameter], 0.1, 0.9, weight_decay=0.2, nesterov=True, wd_after_momentum=True)
    for _ in range(3):
        parameter.grad = torch.randn(9).bfloat16()
        grad = parameter.grad.double()
        buffer = 0.9 * buffer + grad
        wide = wide - 0.1 * (grad + 0.9 * buffer + 0.2 * wide)
        optimizer.step()
    master = optimizer.state[parameter]["master_param"]
    torch.testing.assert_close(master.double(), wide, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (SGD, {"momentum": 0.9}),
        (SGD, {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}),
        (SGD, {"momentum": 0.9, "weight_decay": 0.1, "wd_after_momentum": True}),
        (AdamW, {"bias_correction": False}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fused_step_that_a_scaler_leaves_out_leaves_nothing_behind(kind, options, dtype):
    """What is not finite in the first step is no momentum, as where the scaler asks before."""

    def run(fused: bool) -> tuple[torch.Tensor, dict]:
        parameter = nn.Parameter(torch.ones(24, 40, dtype=dtype))
        optimizer = kind([parameter], lr=0.1, fused=fused, **options)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for number in range(3):
            scaled = scaler.scale(torch.ones(24, 40))
            scaled[0, 0] = torch.inf if number == 0 else 1.0
            parameter.grad = scaled.to(dtype)
            scaler.step(optimizer)
            scaler.update()
        return parameter.detach(), optimizer.state[parameter]

    (mine, state), (own, its) = run(True), run(False)
    torch.testing.assert_close(mine, own)
    assert state.keys() == its.keys()
    for key, value in its.items():
        torch.testing.assert_close(state[key], value)


@pytest.mark.parametrize("kind", [AdamW, Muon, SGD])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_name_dtypes_and_groups_have_them(kind, dtype):
    """torch's checkpoints gather numbers, texts and tensors; a state of before has dtypes."""
    optimizer = kind([nn.Parameter(torch.ones(3, 4).bfloat16())], master_dtype=dtype)
    state = optimizer.state_dict()
    (saved,), (group,) = state["param_groups"], optimizer.param_groups
    assert saved["master_dtype"] == str(dtype).removeprefix("torch.")
    kinds = (int, float, str, list, tuple, type(None))
    assert all(isinstance(value, kinds) for value in saved.values())
    assert group["master_dtype"] is dtype
    for name in (saved["master_dtype"], dtype):
        other = kind([nn.Parameter(torch.ones(3, 4).bfloat16())])
        state["param_groups"][0]["master_dtype"] = name
        other.load_state_dict(state)
        assert other.param_groups[0]["master_dtype"] is dtype


def test_sgd_takes_main_grad_and_keeps_what_is_loaded_in_fp32():
    parameter = nn.Parameter(torch.ones(3, 4).bfloat16())
    optimizer = SGD([parameter], 0.1, 0.9)
    parameter.main_grad = torch.full((3, 4), 2.0**-10)
    optimizer.step()
    assert optimizer.state[parameter]["master_param"].eq(1.0 - 0.1 * 2.0**-10).all()
    other = SGD([nn.Parameter(parameter.detach().clone())], 0.1, 0.9)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    (state,) = other.state.values()
    assert {v.dtype for v in state.values()} == {torch.float32} and len(state) == 2
    with pytest.raises(ValueError, match="SGD: master_dtype must be"):
        SGD([parameter], 0.1, master_dtype=torch.float16)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("decoupled", [False, True])
def test_moments_without_correction(mode, decoupled):
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(4, 6).bfloat16())
    wide = parameter.detach().double()
    first, second = torch.zeros_like(wide), torch.zeros_like(wide)
    optimizer = AdamW(
        [parameter],
        0.01,
        weight_decay=0.1,
        bias_correction=False,
        decoupled_weight_decay=decoupled,
        **MODES[mode],
    )
    for _ in range(3):
        parameter.grad = torch.randn(4, 6).bfloat16()
        grad = parameter.grad.double()
        if decoupled:
            wide = wide * (1 - 0.01 * 0.1)
        else:
            grad = grad + 0.1 * wide
        first, second = 0.9 * first + 0.1 * grad, 0.999 * second + 0.001 * grad.square()
        wide = wide - 0.01 * first / (second.sqrt() + 1e-8)
        optimizer.step()
    state = optimizer.state[parameter]
    assert float(state["step"]) == 3
    torch.testing.assert_close(state["master_param"].double(), wide, rtol=1e-5, atol=1e-6)


def test_decay_in_the_gradient_is_torchs_adam():
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(4, 6).bfloat16())]
    wide = [nn.Parameter(params[0].detach().float())]
    options = {"lr": 0.01, "weight_decay": 0.1}
    optimizer = AdamW(params, decoupled_weight_decay=False, **options)
    _steps(optimizer, torch.optim.Adam(wide, **options), params, wide)
    assert torch.equal(optimizer.state[params[0]]["master_param"], wide[0])
