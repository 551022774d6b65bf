"""A loop with accelerate under a recipe: on one process, resumed, offloaded, and under FSDP2."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import hybridq
from rank_runs import needs_gloo, run

accelerate = pytest.importorskip("accelerate", minversion="1.15")

from accelerate.hooks import (  # noqa: E402
    AlignDevicesHook,
    add_hook_to_module,
    remove_hook_from_module,
)

from hybridq.integrations.accelerate import prepare  # noqa: E402 (needs accelerate)
from hybridq.tensor import is_quantized  # noqa: E402


def model() -> nn.Module:
    torch.manual_seed(0)
    return hybridq.convert(nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)))


def accelerator(**options):
    """One that knows nothing of those before it: they share their state."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    return accelerate.Accelerator(cpu=True, **options)


def trained(one, optimizer, backward, steps: int, first: int = 0) -> list[torch.Tensor]:
    losses = []
    for step in range(first, first + steps):
        torch.manual_seed(step)
        loss = one(torch.randn(8, 32)).square().mean()
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_delayed"])
def test_the_forward_has_the_recipe(recipe) -> None:
    mine, other = model(), model()
    made = accelerator()
    ready, optimizer = prepare(
        made, mine, torch.optim.AdamW(mine.parameters(), lr=1e-2), recipe=recipe
    )
    losses = trained(ready, optimizer, made.backward, 3)
    plain = torch.optim.AdamW(other.parameters(), lr=1e-2)
    with hybridq.autocast(recipe=recipe):
        want = trained(other, plain, lambda loss: loss.backward(), 3)
    assert all(torch.equal(*pair) for pair in zip(losses, want, strict=True))
    x = torch.ones(4, 32)
    assert torch.equal(ready.eval()(x), other.eval()(x))  # without it in evaluation


def test_mixed_precision_is_beside_it() -> None:
    mine = model()
    made = accelerator(mixed_precision="bf16")
    ready, optimizer = prepare(made, mine, torch.optim.AdamW(mine.parameters()), recipe="mxfp8")
    y = ready(torch.ones(4, 32))
    with torch.autocast("cpu", torch.bfloat16), hybridq.autocast(recipe="mxfp8"):
        want = model()(torch.ones(4, 32))
    assert y.dtype == torch.float32 and torch.equal(y, want.float())
    assert made.unwrap_model(ready, keep_fp32_wrapper=False) is mine
    made.backward(y.sum())
    optimizer.step()


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_the_last_recipe_rules(precision) -> None:
    """A second call, of another accelerator: not inside of the first one's recipe."""
    mine = model()
    for recipe in ("nvfp4", "fp8_current", "mxfp8"):
        made = accelerator(mixed_precision=precision)
        ready = prepare(made, mine, recipe=recipe)
        y = ready(torch.ones(4, 32))
        amp = torch.autocast("cpu", torch.bfloat16, precision == "bf16")
        with amp, hybridq.autocast(recipe=recipe):
            want = model()(torch.ones(4, 32))
        assert torch.equal(y, want.float()), recipe
    again = pickle.loads(pickle.dumps(mine)).train()
    assert torch.equal(again(torch.ones(4, 32)), model()(torch.ones(4, 32)))


@pytest.mark.parametrize("recipe", ["fp8_delayed", "schedule"])
def test_a_saved_state_goes_on_with_the_same_bits(recipe, tmp_path) -> None:
    def ready():
        phases = [(0, "fp8_current"), (2, "fp8_delayed"), (4, "mxfp8")]
        chosen = hybridq.RecipeSchedule(phases) if recipe == "schedule" else recipe
        one, made = model(), accelerator()
        optimizer = torch.optim.AdamW(one.parameters(), lr=1e-2)
        return made, *prepare(made, one, optimizer, recipe=chosen)

    made, one, optimizer = ready()
    trained(one, optimizer, made.backward, 3)
    made.save_state(str(tmp_path))
    want = trained(one, optimizer, made.backward, 3, first=3)
    again, other, stepped = ready()
    again.load_state(str(tmp_path))
    losses = trained(other, stepped, again.backward, 3, first=3)
    assert all(torch.equal(*pair) for pair in zip(losses, want, strict=True))


def test_states_have_quantized_parameters(tmp_path) -> None:
    """Two models of three have them; the states of one folder replace each other."""

    def ready(quantizes: bool = True):
        made, models = accelerator(), []
        for number in range(3):
            with hybridq.quantized_model_init("mxfp8", enabled=quantizes and number != 1):
                models.append(model())
        models = [*prepare(made, *models[:2], recipe="mxfp8"), models[2]]
        optimizer = hybridq.optim.AdamW(models[2].parameters())
        models[2], optimizer = prepare(made, models[2], optimizer, recipe="mxfp8")
        assert [is_quantized(one[0].weight) for one in models] == [quantizes, False, quantizes]
        return made, models, optimizer

    def codes(models):
        tensors = [tensor for one in models for tensor in one.state_dict().values()]
        return [one.tensor_storage.flatten()[0] if is_quantized(one) else [one] for one in tensors]

    made, models, optimizer = ready()
    with torch.no_grad():
        for factor, one in enumerate(models, 2):
            for parameter in one.parameters():
                parameter.mul_(factor)
    trained(models[2], optimizer, made.backward, 2)
    made.save_state(str(tmp_path))
    again, others, stepped = ready()
    again.load_state(str(tmp_path))
    for pair in zip(codes(models), codes(others), strict=True):
        assert all(torch.equal(*buffers) for buffers in zip(*pair, strict=True))
    want = trained(models[2], optimizer, made.backward, 2, first=2)
    losses = trained(others[2], stepped, again.backward, 2, first=2)
    assert all(torch.equal(*pair) for pair in zip(losses, want, strict=True))
    made, models, _ = ready(quantizes=False)
    made.save_state(str(tmp_path))
    again, others, _ = ready(quantizes=False)
    with torch.no_grad():
        others[0][0].weight.zero_()
    again.load_state(str(tmp_path))
    assert torch.equal(others[0][0].weight, models[0][0].weight)


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="prepare: needs a model"):
        prepare(accelerator(), recipe="mxfp8")
    with pytest.raises(ValueError, match="prepare: the model must have modules of hybridq"):
        prepare(accelerator(), nn.Linear(32, 32), recipe="mxfp8")
    with pytest.raises(ValueError, match="mxfp9"):
        prepare(accelerator(), model(), recipe="mxfp9")


def test_a_prepared_weight_has_the_address_of_what_it_holds() -> None:
    """By it accelerate finds the parameters of an optimizer again: no two may have the same."""
    for quantizes in (False, True):
        with hybridq.quantized_model_init("mxfp8", enabled=quantizes):
            one = model()
        before = [parameter.data_ptr() for parameter in one.parameters()]
        hybridq.distributed.prepare_fsdp2(one)
        after = [parameter.data_ptr() for parameter in one.parameters()]
        assert after == before and len({*after}) == len(after) and 0 not in after


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("quantizes", [True, False])
def test_offloaded_weights_come_back(recipe, quantizes) -> None:
    """accelerate makes each parameter anew, by its class, when it moves."""
    with hybridq.quantized_model_init(recipe, enabled=quantizes):
        one = model()
    x = torch.randn(4, 32)
    with torch.no_grad(), hybridq.autocast(recipe=recipe):
        want = one(x)
        accelerate.cpu_offload(one, execution_device=torch.device("cpu"))
        assert one[0].weight.is_meta
        assert torch.equal(one(x), want)
        assert one[0].weight.is_meta


def test_weights_on_the_disk_are_refused(tmp_path) -> None:
    """Its files hold values, of which no planes are made without a quantizer."""
    with hybridq.quantized_model_init("mxfp8"):
        one = model()
    accelerate.disk_offload(one, str(tmp_path), execution_device=torch.device("cpu"))
    with pytest.raises(TypeError, match=r"MXFP8Tensor: .* of a quantized tensor .* to the disk"):
        one(torch.randn(4, 32))


@needs_gloo
@pytest.mark.more
def test_sharded_weights_travel_as_planes(tmp_path) -> None:
    names = ("mixed_precision", "same_bits", "by_itself")
    run(2, tmp_path / "store", *names, program="accelerate_program.py")


@needs_gloo
@pytest.mark.more
def test_trainer_shards_with_planes(tmp_path) -> None:
    pytest.importorskip("transformers")
    run(2, tmp_path / "store", "trainer", program="accelerate_program.py")


@pytest.mark.parametrize("is_moved", [False, True])
def test_a_model_with_hooks_of_a_device_map_is_converted(is_moved) -> None:
    """As from_pretrained(device_map=...) leaves it: forwards that load weights, then call."""
    plain = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    want, x = hybridq.convert(copy.deepcopy(plain)), torch.randn(5, 32)
    if is_moved:
        accelerate.cpu_offload(plain, execution_device=torch.device("cpu"))
        assert plain[0].weight.is_meta
    else:
        for module in plain:
            add_hook_to_module(module, AlignDevicesHook("cpu"))
    hybridq.convert(plain)
    assert hybridq.conversion(plain).converted == ("0", "2")
    with torch.no_grad(), hybridq.autocast(recipe="nvfp4"):
        assert torch.equal(plain(x), want(x))
    with torch.no_grad():
        assert torch.equal(plain(x), want(x))
    remove_hook_from_module(plain, recurse=True)
    assert "_old_forward" not in vars(plain[0])
    with torch.no_grad(), hybridq.autocast(recipe="nvfp4"):
        assert is_moved or torch.equal(plain(x), want(x))
