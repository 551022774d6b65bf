"""Adapters of PEFT that multiply in the place of their base say so.

The oracle is the result itself: where it has the same bits under a recipe and without one, nothing
was quantized. So each of PEFT's methods is asked whether it is among those that are named.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import hybridq

peft = pytest.importorskip("peft")

from hybridq.integrations.peft_products import tell_of_own_products  # noqa: E402

TARGETS = ["0", "2"]
SMALL = {"target_modules": TARGETS, "r": 4}
#: By the name of PEFT's configuration: its arguments.
METHODS = {
    "LoraConfig": SMALL | {"init_lora_weights": False},
    "AdaLoraConfig": {"target_modules": TARGETS, "init_r": 4, "total_step": 10},
    "LoHaConfig": SMALL | {"init_weights": False},
    "LoKrConfig": SMALL | {"init_weights": False},
    "IA3Config": {"target_modules": TARGETS, "feedforward_modules": []},
    "OFTConfig": {"target_modules": TARGETS, "r": 0, "oft_block_size": 8},
    "BOFTConfig": {"target_modules": TARGETS, "boft_block_size": 8},
    "VeraConfig": SMALL,
    "RandLoraConfig": SMALL,
    "HRAConfig": SMALL,
    "FourierFTConfig": {"target_modules": TARGETS, "n_frequency": 20},
    "MissConfig": SMALL,
    "ShiraConfig": SMALL | {"init_weights": False},
    "C3AConfig": {"target_modules": TARGETS, "block_size": 16},
    "RoadConfig": {"target_modules": TARGETS, "group_size": 16},
    "GraloraConfig": SMALL | {"gralora_k": 2},
    "WaveFTConfig": {"target_modules": TARGETS, "n_frequency": 20},
    "DeloraConfig": SMALL,
    "HiraConfig": SMALL,
    "FrodConfig": {"target_modules": TARGETS},
    "SupertuningConfig": SMALL,
    "PsoftConfig": SMALL,
    "TinyLoraConfig": {"target_modules": TARGETS, "r": 2},
}


def base() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))


def adapted(name: str, options: dict[str, object], *, first: str) -> tuple[nn.Module, list[str]]:
    """The model, and what was said: `convert` comes first, or PEFT does."""
    given = getattr(peft, name)(**options)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        if first == "convert":
            model = peft.get_peft_model(hybridq.convert(base()), given)
        else:
            model = hybridq.convert(peft.get_peft_model(base(), given))
    said = [str(one.message) for one in found if "in high precision" in str(one.message)]
    return model.eval(), said


@pytest.mark.parametrize("first", ["convert", "peft"])
@pytest.mark.parametrize("name", [one for one in METHODS if hasattr(peft, one)])
def test_what_is_said_is_what_happens(name, first) -> None:
    model, said = adapted(name, METHODS[name], first=first)
    x = torch.randn(4, 64)
    plain = model(x)
    with hybridq.autocast(recipe="mxfp8"):
        is_quantized = not torch.equal(model(x), plain)
    assert len(said) == (0 if is_quantized else 1)


@pytest.mark.parametrize("first", ["convert", "peft"])
def test_a_merged_one_is_under_the_recipe(first) -> None:
    model, _ = adapted("HRAConfig", SMALL, first=first)
    model.merge_adapter()
    x = torch.randn(4, 64)
    plain = model(x)
    with hybridq.autocast(recipe="mxfp8"):
        assert not torch.equal(model(x), plain)


@pytest.mark.parametrize("first", ["convert", "peft"])
def test_the_one_way_of_miss_that_needs_the_weight_is_named(first) -> None:
    _, said = adapted("MissConfig", SMALL | {"init_weights": "bat"}, first=first)
    name = "base_model.model.0" if first == "peft" else "0"
    assert said == [
        "peft: adapters of miss multiply by a weight that they make in each forward, in high "
        f"precision under any recipe, got those of {name} and 1 more; a recipe holds once they are "
        "merged, and beside other adapters, such as LoRA's"
    ]


def test_glora_which_takes_plain_modules_only_is_named_when_these_are_converted() -> None:
    model, said = adapted("GloraConfig", SMALL, first="peft")
    assert len(said) == 1
    x = torch.randn(4, 64)
    plain = model(x)
    with hybridq.autocast(recipe="mxfp8"):
        # It adds the base's result and takes it away again: what is left of it is FP32's rounding.
        torch.testing.assert_close(model(x), plain, rtol=0, atol=1e-6)


def test_adapters_of_plain_modules_are_none_of_ours() -> None:
    given = peft.HRAConfig(**SMALL)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tell_of_own_products(peft.get_peft_model(base(), given))
