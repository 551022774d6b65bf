"""hybridq.optim.Muon: torch's own Muon on FP32 copies is the oracle, and products written out."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import hybridq
from hybridq.optim import AdamW, Muon
from hybridq.optim.muon import COEFFICIENTS, margin_of, orthogonalized
from hybridq.recipes import bind, get
from tensor_tools import same_planes

OPTIONS = {
    "defaults": {},
    "plain momentum": {"lr": 0.02, "nesterov": False, "momentum": 0.8, "weight_decay": 0.0},
    "rms": {"lr": 0.02, "adjust_lr_fn": "match_rms_adamw", "ns_steps": 3},
    "coefficients": {"lr": 0.02, "ns_coefficients": (2.0, -1.5, 0.5), "eps": 1e-3},
}
KINDS = (Muon, torch.optim.Muon)
SHAPES = ((48, 64), (64, 32), (32, 32), (1, 40))
PLANS = {name: bind(get(name)) for name in ("mxfp8", "nvfp4", "fp8_current")}


def steps(pairs, count: int = 3) -> None:
    """Give the same gradients to optimizers of ours and of torch's."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        for parameter, oracle in zip(
            *(one.param_groups[0]["params"] for one in pairs), strict=True
        ):
            grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            parameter.grad, oracle.grad = grad, grad.float()
        for one in pairs:
            one.step()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_fp32_parameters_have_torchs_bits(options) -> None:
    values = [torch.randn(shape) for shape in SHAPES]
    mine, own = ([nn.Parameter(one.clone()) for one in values] for _ in range(2))
    steps((Muon(mine, **options), torch.optim.Muon(own, **options)))
    assert all(map(torch.equal, mine, own))


def test_a_rate_that_is_a_tensor_has_torchs_bits() -> None:
    values = [torch.randn(shape) for shape in SHAPES]
    mine, own = ([nn.Parameter(one.clone()) for one in values] for _ in range(2))
    pair = [kind(of, lr=torch.tensor(0.1)) for kind, of in zip(KINDS, (mine, own), strict=True)]
    for rate in torch.rand(9).tolist():
        for one in pair:
            one.param_groups[0]["lr"].fill_(rate)  # as a scheduler does
        steps(pair, 1)
    assert all(map(torch.equal, mine, own))


@pytest.mark.parametrize("made", ["bfloat16", "mxfp8", "nvfp4"])
def test_masters_have_torchs_bits_and_parameters_are_written_from_them(made) -> None:
    values = torch.randn(48, 64).bfloat16()
    quantized = None if made == "bfloat16" else hybridq.quantize(values, made)
    mine = nn.Parameter(values.clone() if quantized is None else quantized)
    start = values.float() if quantized is None else quantized.dequantize(dtype=torch.float32)
    own = nn.Parameter(start.clone())
    ours = Muon([mine], lr=0.02)
    steps((ours, torch.optim.Muon([own], lr=0.02)))
    master = ours.state[mine]["master_param"]
    assert torch.equal(master, own)
    if quantized is None:
        assert torch.equal(mine, own.bfloat16())
    else:
        same_planes(mine.detach(), mine.quantizer.quantize(own.detach(), dtype=torch.bfloat16))


def written_out(x: torch.Tensor, plan: object, count: int) -> torch.Tensor:
    """Products of decoded planes, in FP64; values are BF16 where they are stored."""
    a, b, c = (k / margin_of(plan) ** n for k, n in zip(COEFFICIENTS, (1, 3, 5), strict=True))

    def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        sides = (left, plan.input.row.spec), (right, plan.weight.row.spec)
        decoded = []
        for side, spec in sides:
            rows, cols = side.shape
            planes = torch.ops.hybridq.encode(side.contiguous(), spec, "")
            decoded.append(torch.ops.hybridq.decode(planes, spec, rows, cols, torch.float32))
        return (decoded[0].double() @ decoded[1].double().T).float()

    made = x.bfloat16()
    made = made / made.norm()
    for _ in range(count):
        gram = product(made, made).bfloat16()
        update = (b * gram + c * product(gram, gram.T)).bfloat16()
        made = (a * made + product(update, made.T)).bfloat16()
    return made


@pytest.mark.parametrize("name", PLANS)
def test_products_are_those_of_decoded_planes(name) -> None:
    torch.manual_seed(0)
    x = torch.randn(48, 80)
    got = orthogonalized(x, steps=1, plan=PLANS[name])
    want = written_out(x, PLANS[name], 1)
    # Sums in FP32 may round a BF16 value the other way: a step of one value in some.
    assert (got != want).float().mean() < 0.02
    torch.testing.assert_close(got.float(), want.float(), rtol=2**-6, atol=2**-8)
    assert (got != orthogonalized(x, steps=1)).float().mean() > 0.3
    tall = orthogonalized(x.T, steps=1, plan=PLANS[name])
    assert torch.equal(tall, got.T)


@pytest.mark.parametrize("shape", [(64, 160), (128, 128), (48, 400), (256, 200)])
@pytest.mark.parametrize(
    ("name", "high"), [(None, 1.25), ("mxfp8", 1.35), ("fp8_current", 1.35), ("nvfp4", 1.6)]
)
def test_singular_values_come_near_one(name, high, shape) -> None:
    """Errors of products must not grow: without a margin they do, to 20 and beyond."""
    torch.manual_seed(0)
    x = torch.randn(shape)
    made = orthogonalized(x, plan=None if name is None else PLANS[name])
    assert torch.linalg.svdvals(made.float()).max() < high
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    wanted = u @ v
    cosine = (made.float() * wanted).sum() / made.float().norm() / wanted.norm()
    assert cosine > (0.9 if name == "nvfp4" else 0.95)


def test_margins_follow_from_the_elements() -> None:
    assert margin_of(bind(get("bf16"))) == 1.0
    assert margin_of(PLANS["mxfp8"]) == 1.25 and margin_of(PLANS["nvfp4"]) == 1.5


def test_a_recipe_trains_and_is_quantized() -> None:
    torch.manual_seed(0)
    layer = hybridq.Linear(64, 32, dtype=torch.bfloat16)
    twin = hybridq.Linear(64, 32, dtype=torch.bfloat16)
    twin.load_state_dict(layer.state_dict())
    for one, recipe in ((layer, "mxfp8"), (twin, None)):
        optimizer = Muon([one.weight], lr=0.02, recipe=recipe)
        rest = AdamW([one.bias])
        torch.manual_seed(1)
        for _ in range(2):
            with hybridq.autocast(recipe="mxfp8"):
                loss = one(torch.randn(16, 64).bfloat16()).float().square().mean()
            loss.backward()
            optimizer.step()
            rest.step()
            optimizer.zero_grad()
            assert one.weight.grad is None
    difference = (layer.weight - twin.weight).float().norm() / twin.weight.float().norm()
    assert 0 < difference < 0.02


def test_main_grad_is_taken() -> None:
    parameter = nn.Parameter(torch.randn(32, 48).bfloat16())
    own = nn.Parameter(parameter.detach().float())
    ours, theirs = Muon([parameter], lr=0.02), torch.optim.Muon([own], lr=0.02)
    own.grad = torch.randn(32, 48)
    parameter.main_grad = own.grad.clone()
    ours.step()
    theirs.step()
    assert torch.equal(ours.state[parameter]["master_param"], own)
    ours.zero_grad()
    assert not parameter.main_grad.any()


def test_a_saved_state_continues_with_the_same_bits() -> None:
    mine = nn.Parameter(torch.randn(32, 48).bfloat16())
    ours = Muon([mine], lr=0.02)
    steps((ours, Muon([nn.Parameter(torch.zeros(32, 48))])), 2)
    file = io.BytesIO()
    torch.save([ours.state_dict(), mine.detach()], file)
    file.seek(0)
    state, values = torch.load(file, weights_only=True)
    other = nn.Parameter(values)
    again = Muon([other], lr=1.0)
    again.load_state_dict(state)
    for key, value in ours.state[mine].items():
        assert value.dtype == torch.float32 and torch.equal(value, again.state[other][key])
    for parameter, optimizer in ((mine, ours), (other, again)):
        steps((optimizer, Muon([nn.Parameter(torch.zeros(32, 48))])), 1)
        assert parameter.grad is not None
    assert torch.equal(mine, other)


@pytest.mark.parametrize("recipe", [None, "nvfp4"])
def test_copies_and_pickles_go_on_with_the_same_bits(recipe) -> None:
    mine = nn.Parameter(torch.randn(32, 48).bfloat16())
    ours = Muon([mine], lr=0.02, recipe=recipe)
    beside = (Muon([nn.Parameter(torch.zeros(32, 48))]),)
    steps((ours, *beside), 1)
    others = [copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))]
    for one in (ours, *others):
        steps((one, *beside), 1)
    for one in others:
        assert torch.equal(one.param_groups[0]["params"][0], mine)


def test_arguments() -> None:
    matrix, vector = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match=r"Muon: parameters must be matrices, got shape \(2,\)"):
        Muon([matrix, vector])
    with pytest.raises(ValueError, match="Muon: lr must not be negative, got -1"):
        Muon([matrix], lr=-1.0)
    with pytest.raises(ValueError, match="Muon: adjust_lr_fn must be None or one of"):
        Muon([matrix], adjust_lr_fn="rms")
    with pytest.raises(ValueError, match="ns_steps 0 to 99"):
        Muon([matrix], ns_steps=100)
    with pytest.raises(ValueError, match="master_dtype must be float32 or bfloat16"):
        Muon([matrix], master_dtype=torch.float16)
    with pytest.raises(ValueError, match="which keeps a history"):
        Muon([matrix], recipe="fp8_delayed")
    matrix.grad = torch.zeros(2, 2).to_sparse()
    with pytest.raises(RuntimeError, match="gradients must be dense"):
        Muon([matrix]).step()
