"""Moments in BF16 and FP8 blocks: FP32 moments of torch's AdamW are the oracle.

What a step computes is torch's arithmetic on the moments as they are held; what it holds is a
neighbour of that in the short format, and the same in the mean.
"""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state

import hybridq
from hybridq.optim import AdamW
from hybridq.optim.moments import MOMENTS, read

SHORT = ("bf16", "fp16", "fp8_block")


def run(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, steps: int, seed: int = 0
) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        grad = torch.randn(parameter.shape, generator=generator)
        parameter.grad = grad.to(parameter.dtype)
        optimizer.step()


def held(optimizer: AdamW, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    state = optimizer.state[parameter]
    return {name: read(state, name, parameter).clone() for name in MOMENTS}


@pytest.mark.parametrize("kind", SHORT)
def test_first_step_is_torchs_and_moments_are_neighbours_of_its(kind) -> None:
    values = torch.randn(48, 300)
    values[:, 200:] *= 1e-3
    mine, own = nn.Parameter(values.clone()), nn.Parameter(values.clone())
    ours = AdamW([mine], lr=0.1, moments=kind)
    theirs = torch.optim.AdamW([own], lr=0.1)
    run(ours, mine, 1)
    run(theirs, own, 1)
    assert torch.equal(mine, own)
    got, want = held(ours, mine), theirs.state[own]
    for name in MOMENTS:
        assert not torch.equal(got[name], want[name])
        # One step of the format: 2**-7 in BF16; in E4M3 2**-3, twice that of a square.
        root = 2.2 if name == "exp_avg_sq" else 1
        step = {"bf16": 2**-7, "fp16": 2**-10 * root, "fp8_block": 2**-3 * root}[kind]
        floor = 0.0 if kind == "bf16" else float(want[name].abs().max()) * 2**-15
        assert ((got[name] - want[name]).abs() <= step * want[name].abs() + floor).all()


@pytest.mark.parametrize("kind", SHORT)
@pytest.mark.parametrize("made", ["float32", "bfloat16", "nvfp4"])
def test_moments_are_those_of_fp32_in_the_mean(kind, made) -> None:
    """Of one matrix many times in a parameter: each value's roundings are drawn for themselves."""
    values = torch.randn(16, 128)  # whole blocks of every kind
    own = nn.Parameter(values.clone())
    theirs = torch.optim.AdamW([own], lr=0.0)
    run(theirs, own, 6)
    draws = 80
    mine = values.repeat(draws, 1)
    if made == "nvfp4":
        mine = hybridq.quantize(mine, "nvfp4")
    elif made == "bfloat16":
        mine = mine.bfloat16()
    mine = nn.Parameter(mine)
    ours = AdamW([mine], lr=0.0, moments=kind)
    generator = torch.Generator().manual_seed(0)
    for _ in range(6):
        mine.main_grad = torch.randn(values.shape, generator=generator).repeat(draws, 1)
        ours.step()
    for name, value in held(ours, mine).items():
        value = value if name == "exp_avg" else value.sqrt()
        mean = value.reshape(draws, *values.shape).mean(0)
        want = theirs.state[own][name]
        want = want if name == "exp_avg" else want.sqrt()
        # Six roundings of at most a step each, with weights of the decay: 3 steps, 5 sigma.
        step = (2**-7 if kind == "bf16" else 2**-3) * want.abs().max()
        assert (mean - want).abs().max() < 5 * 3 * step / (2 * draws**0.5)


def test_small_updates_are_not_lost() -> None:
    """With beta2 = 0.999 a moment moves by a thousandth: to nearest it would stand still."""
    parameter = nn.Parameter(torch.zeros(64, 128))
    for kind in SHORT:
        optimizer = AdamW([parameter], lr=0.0, moments=kind)
        parameter.grad = torch.ones(64, 128)
        optimizer.step()
        parameter.grad = torch.zeros(64, 128)
        for _ in range(100):
            optimizer.step()
        mean = held(optimizer, parameter)["exp_avg_sq"].mean()
        assert mean == pytest.approx(1e-3 * 0.999**100, rel=0.02)


def test_what_is_not_zero_stays_so() -> None:
    """A second moment far below its block's largest becomes the least value, and not zero."""
    parameter = nn.Parameter(torch.zeros(4, 128))
    optimizer = AdamW([parameter], lr=1e-3, moments="fp8_block")
    parameter.grad = torch.full((4, 128), 1e-12)
    parameter.grad[:, 0] = 1.0
    parameter.grad[3] = 0
    for _ in range(3):
        optimizer.step()
    second = held(optimizer, parameter)["exp_avg_sq"]
    assert (second[:3] > 0).all() and not second[3].any()
    assert parameter.abs().max() < 5e-3  # no update without bound


@pytest.mark.parametrize(
    ("kind", "nbytes"),
    [("fp32", 8), ("bf16", 4), ("fp16", 2 * (2 + 4 / 256)), ("fp8_block", 2 * 132 / 128)],
)
def test_bytes_of_a_value(kind, nbytes) -> None:
    with hybridq.quantized_model_init("nvfp4"):
        layer = hybridq.Linear(256, 128)
    optimizer = AdamW(layer.parameters(), moments=kind)
    with hybridq.autocast(recipe="nvfp4"):
        layer(torch.randn(8, 256)).sum().backward()
    optimizer.step()
    state = optimizer.state[layer.weight]
    own = sum(v.nbytes for k, v in state.items() if k not in ("step", "master_param"))
    assert own == nbytes * layer.weight.numel()
    bias = optimizer.state[layer.bias]["exp_avg"]
    assert bias.dtype == (torch.bfloat16 if kind == "bf16" else torch.float32)


@pytest.mark.parametrize("kind", SHORT)
@pytest.mark.parametrize("made", ["float32", "bfloat16", "mxfp8", "float64"])
def test_a_saved_state_continues_with_the_same_bits(kind, made) -> None:
    values = torch.randn(48, 160)
    quantized = hybridq.quantize(values, "mxfp8")
    start = quantized if made == "mxfp8" else values.to(getattr(torch, made))
    mine = nn.Parameter(start)
    ours = AdamW([mine], lr=0.05, moments=kind)
    run(ours, mine, 3)
    file = io.BytesIO()
    torch.save([ours.state_dict(), mine.detach()], file)
    file.seek(0)
    state, saved = torch.load(file, weights_only=True)
    other = nn.Parameter(saved)
    again = AdamW([other], moments="fp32")
    again.load_state_dict(state)
    assert again.param_groups[0]["moments"] == kind
    for optimizer, parameter in ((ours, mine), (again, other)):
        torch.manual_seed(5)
        run(optimizer, parameter, 2, seed=9)
    left, right = (
        hybridq.dequantized_state_dict(nn.ParameterDict({"p": p})) for p in (mine, other)
    )
    assert torch.equal(left["p"], right["p"])
    for key, value in ours.state[mine].items():
        assert (
            torch.equal(value, again.state[other][key])
            and value.dtype == again.state[other][key].dtype
        )


@pytest.mark.parametrize("new", ["fp32", *SHORT])
@pytest.mark.parametrize("old", ["torch", "fp32", *SHORT])
def test_a_state_of_another_kind_is_taken_by_its_values(old, new) -> None:
    values = torch.randn(32, 128)
    own = nn.Parameter(values.clone())
    theirs = torch.optim.AdamW([own]) if old == "torch" else AdamW([own], moments=old)
    run(theirs, own, 2)
    mine = nn.Parameter(values.clone())
    ours = AdamW([mine], moments=new)
    state = copy.deepcopy(theirs.state_dict())
    for group in state["param_groups"]:
        group["moments"] = new  # what is changed on purpose
    ours.load_state_dict(state)
    got = held(ours, mine)
    for name in MOMENTS:
        want = read(theirs.state[own], name, own)
        # E4M3 is 2**-3 of a value apart, its square (1 + 2**-3)**2 - 1.
        step = {"fp32": 0, old: 0, "bf16": 2**-7, "fp16": 2**-9}.get(new, 0.28)
        floor = float(want.abs().max()) * 2**-14 if new in ("fp16", "fp8_block") else 0.0
        assert ((got[name] - want).abs() <= step * want.abs() + floor).all()
    keys = set(ours.state[mine])
    assert keys == {
        "step",
        *(f"{m}_{p}" for m in MOMENTS for p in ("codes", "scale") if new in SHORT[1:]),
        *(m for m in MOMENTS if new not in SHORT[1:]),
    }


@pytest.mark.parametrize("kind", SHORT)
def test_states_by_name(kind) -> None:
    """As torch's distributed checkpoints have them."""

    def built() -> tuple[nn.Module, AdamW]:
        torch.manual_seed(0)
        model = hybridq.convert(nn.Sequential(nn.Linear(128, 64), nn.Linear(64, 32)))
        return model, AdamW(model.parameters(), moments=kind)

    model, optimizer = built()
    model(torch.randn(4, 128)).sum().backward()
    optimizer.step()
    state = copy.deepcopy(dcp_state.get_optimizer_state_dict(model, optimizer))
    twin, again = built()
    dcp_state.set_optimizer_state_dict(twin, again, state)
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        for key, value in optimizer.state[mine].items():
            assert torch.equal(value, again.state[other][key]), key


def test_arguments() -> None:
    parameter = nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(ValueError, match=r"AdamW: moments must be one of .*, got 'fp8'"):
        AdamW([parameter], moments="fp8")
    with pytest.raises(ValueError, match="amsgrad goes with moments in FP32, got moments='bf16'"):
        AdamW([parameter], moments="bf16", amsgrad=True)
    groups = [{"params": [parameter], "moments": "bf16"}]
    assert AdamW(groups).param_groups[0]["moments"] == "bf16"
