"""Optimizers and `main_grad`: hybridq's take it, others say that they do not."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import hybridq
from hybridq import errors
from hybridq.optim import SGD, AdamW, Muon

X = torch.randn(2, 16, 24, generator=torch.Generator().manual_seed(0))


def layer(fused: bool, recipe=None, dtype=torch.float32) -> hybridq.Linear:
    torch.manual_seed(3)
    with hybridq.quantized_model_init(recipe, enabled=recipe is not None):
        made = hybridq.Linear(24, 40, dtype=dtype, fuse_wgrad_accumulation=fused)
    if fused:
        made.weight.main_grad = torch.zeros(40, 24)
    return made


def backward(module) -> None:
    for x in X:
        with hybridq.autocast(recipe="mxfp8"):
            module(x.to(module.bias.dtype)).float().square().sum().backward()


@pytest.mark.parametrize("recipe", [None, "mxfp8"])
def test_adamw_takes_main_grad(recipe) -> None:
    """A step is that of the same gradient in `grad`, bit for bit; every group, every step."""
    fused, plain = layer(True, recipe), layer(False, recipe)
    ours, other = AdamW(fused.parameters(), lr=0.1), AdamW(plain.parameters(), lr=0.1)
    before = fused.weight.detach().clone()
    for _ in range(3):
        backward(fused)
        plain.weight.grad = fused.weight.main_grad.clone()
        plain.bias.grad = fused.bias.grad.clone()
        ours.step()
        other.step()
        for name, state in (("weight", plain.weight), ("bias", plain.bias)):
            mine = ours.state[getattr(fused, name)]
            assert all(torch.equal(mine[key], other.state[state][key]) for key in mine)
        assert torch.equal(fused.weight.detach() + 0, plain.weight.detach() + 0)
        ours.zero_grad()
        other.zero_grad()
        assert not fused.weight.main_grad.any() and fused.bias.grad is None
    assert not torch.equal(before + 0, fused.weight.detach() + 0)


def test_a_short_weight_gets_its_main_grad_unrounded() -> None:
    module = layer(True, dtype=torch.bfloat16)
    optimizer = AdamW(module.parameters(), lr=0.1, betas=(0.0, 0.0))
    module.weight.main_grad.fill_(1 + 2**-12)  # BF16 would make it 1
    optimizer.step()
    assert (optimizer.state[module.weight]["exp_avg"] == 1 + 2**-12).all()


def test_zeros_for_hooks_are_added_and_two_gradients_are_an_error() -> None:
    module = layer(True)
    module.weight.grad_added_to_main_grad = False
    optimizer = AdamW(module.parameters(), lr=0.1, betas=(0.0, 0.0))
    backward(module)
    assert not module.weight.grad.any()
    optimizer.step()
    assert torch.equal(optimizer.state[module.weight]["exp_avg"], module.weight.main_grad)
    optimizer.zero_grad()
    assert module.weight.grad_added_to_main_grad is False
    module.weight.grad = torch.ones_like(module.weight)
    with pytest.raises(RuntimeError, match="AdamW: a parameter has a gradient in main_grad and"):
        optimizer.step()
    module.weight.grad, module.weight.main_grad = None, torch.zeros(3)
    with pytest.raises(RuntimeError, match=r"AdamW: main_grad must have .* \(40, 24\), got \(3,\)"):
        optimizer.step()


@pytest.mark.parametrize("marked", [False, True])
def test_one_gradient_of_two_names_is_taken_once(marked) -> None:
    """Megatron's optimizers set `grad` to `main_grad` before they step another's."""
    module = layer(True)
    if marked:
        module.weight.grad_added_to_main_grad = False
    optimizer = AdamW(module.parameters(), lr=0.1, betas=(0.0, 0.0))
    backward(module)
    module.weight.grad = module.weight.main_grad
    optimizer.step()
    assert torch.equal(optimizer.state[module.weight]["exp_avg"], module.weight.main_grad)


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_an_optimizer_of_torch_says_that_it_does_not_take_it(kind, marked) -> None:
    module = layer(True)
    if marked:
        module.weight.grad_added_to_main_grad = False
    optimizer = kind(module.parameters(), lr=0.1)
    backward(module)
    with pytest.raises(RuntimeError, match=rf"{kind.__name__}: .* main_grad.*hybridq.optim"):
        optimizer.step()
    module.weight.grad = module.weight.main_grad.clone()  # the way that the error names
    optimizer.step()


def test_other_optimizers_warn_once_unless_they_say_that_they_take_it() -> None:
    class Own(torch.optim.SGD):
        pass

    class Taking(torch.optim.SGD):
        takes_main_grad = True

    module = layer(True)
    backward(module)
    Taking(module.parameters(), lr=0.1).step()
    own = Own(module.parameters(), lr=0.1)
    with pytest.warns(errors.HybridQWarning, match=r"Own: .*takes_main_grad"):
        own.step()
    own.step()


def test_weights_without_a_gradient_anywhere_are_left_alone() -> None:
    """Nothing was added: a frozen weight, or one that no backward has reached."""
    module = layer(True).requires_grad_(False)
    module.bias.requires_grad_()
    module.bias.grad = torch.ones(40)
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    assert AdamW(module.parameters()).step() is None


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("kind", "options", "place"),
    [
        (AdamW, {}, "main_grad"),
        (AdamW, {"use_decoupled_grad": True}, "decoupled_grad"),
        (SGD, {"momentum": 0.9}, "main_grad"),
        (Muon, {"recipe": "mxfp8"}, "main_grad"),
    ],
)
def test_a_run_goes_on_from_a_distributed_checkpoint(kind, options, place, tmp_path) -> None:
    """torch makes the states of a new optimizer by a step of its own, with zeros in `grad`."""

    def run(seed):
        torch.manual_seed(seed)
        module = hybridq.Linear(24, 40, bias=False, dtype=torch.bfloat16)
        setattr(module.weight, place, torch.zeros(40, 24))
        return module, kind(module.parameters(), lr=0.1, **options)

    def step(module, optimizer, number) -> None:
        gradient = torch.randn(40, 24, generator=torch.Generator().manual_seed(number))
        setattr(module.weight, place, gradient)
        optimizer.step()
        optimizer.zero_grad()

    module, optimizer = run(0)
    for number in range(2):
        step(module, optimizer, number)
    dcp.save(
        dict(zip("mo", get_state_dict(module, optimizer), strict=True)), checkpoint_id=tmp_path
    )
    step(module, optimizer, 2)
    other, its = run(1)
    loaded = dict(zip("mo", get_state_dict(other, its), strict=True))
    dcp.load(loaded, checkpoint_id=tmp_path)
    set_state_dict(other, its, model_state_dict=loaded["m"], optim_state_dict=loaded["o"])
    step(other, its, 2)
    assert torch.equal(other.weight, module.weight)
    mine, want = its.state[other.weight], optimizer.state[module.weight]
    assert mine.keys() == want.keys() and all(torch.equal(mine[k], want[k]) for k in want)


def test_a_rate_of_zero_hides_no_gradient() -> None:
    """A first step of a warm-up takes `main_grad`, and two gradients stay an error."""
    module = layer(True)
    optimizer = AdamW(module.parameters(), lr=0.0, betas=(0.5, 0.5))
    module.weight.main_grad.fill_(1.0)
    module.weight.grad = torch.ones(40, 24)
    with pytest.raises(RuntimeError, match="a gradient in main_grad and another in grad"):
        optimizer.step()
    module.weight.grad = None
    optimizer.step()
    assert (optimizer.state[module.weight]["exp_avg"] == 0.5).all()
