"""register_experts: a class of experts of the user's own."""

from __future__ import annotations

import pytest
from torch import nn

import hybridq
from hybridq.converters import converters, register_experts
from hybridq.moe import Experts, ExpertsLayout
from own_experts import OwnExperts


class Registered(OwnExperts):
    """Experts that are registered."""


def test_convert_reaches_registered_experts_and_says_so() -> None:
    layout = ExpertsLayout(("w1", "w3"), "w2")
    assert register_experts(Registered, layout) == register_experts(Registered, layout)
    model = nn.ModuleDict({"experts": Registered(layout), "other": OwnExperts(layout)})
    hybridq.convert(model)
    assert isinstance(model["experts"], Experts) and not isinstance(model["other"], Experts)
    assert model["experts"].name == "experts"
    made = hybridq.conversion(model)
    assert made.converted == ("experts",) and made.others == (("other", "OwnExperts"),)
    wrong = nn.ModuleDict({"experts": Registered(ExpertsLayout())})
    left = hybridq.conversion(hybridq.convert(wrong)).left_alone
    assert left == (("experts", "it has no parameter w1"),)
    with pytest.raises(ValueError, match="must be registered once"):
        register_experts(Registered, ExpertsLayout())
    with pytest.raises(TypeError, match=r"kind must be a class derived from nn\.Module, got 3"):
        register_experts(3, layout)
    with pytest.raises(TypeError, match="layout must be an ExpertsLayout, got str"):
        register_experts(Registered, "w1")
    assert sum("Registered" in one.name for one in converters()) == 1
