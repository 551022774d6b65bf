"""Histories of a mixture's experts in Trainer's checkpoints."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from torch import nn

import hybridq
from hybridq.errors import HybridQWarning

pytest.importorskip("transformers", minversion="5.0")

from hybridq.integrations.transformers import HybridQCallback
from models.families import FAMILIES

FAMILY = next(one for one in FAMILIES if one.name == "Qwen3-MoE")


def made() -> nn.Module:
    return hybridq.convert(FAMILY.build().train())


def histories(model: nn.Module) -> dict[str, torch.Tensor]:
    found = hybridq.state_dict_with_history(model)
    return {key: one for key, one in found.items() if ".scaling." in key}


def test_a_checkpoint_has_the_histories_of_every_expert() -> None:
    one, other, third = made(), made(), made()
    with hybridq.autocast(recipe="fp8_delayed"):
        one(**FAMILY.batch(one)).loss.backward()
    hybridq.update_scaling(one)
    callback = HybridQCallback("fp8_delayed")
    callback._model = one
    state = json.loads(json.dumps(callback.state()))
    with warnings.catch_warnings():
        warnings.simplefilter("error", HybridQWarning)
        callback._resume(other, state)
    want, got = histories(one), histories(other)
    assert want.keys() == got.keys() and any(".experts." in key for key in want)
    assert all(torch.equal(got[key], tensor) for key, tensor in want.items())
    # As a rank saves it that has other experts.
    del state["attributes"]["histories_of_experts"]
    with pytest.warns(HybridQWarning, match="lacks histories of 16 experts, which begin anew"):
        callback._resume(third, state)
    assert not any(".experts." in key for key in histories(third))
