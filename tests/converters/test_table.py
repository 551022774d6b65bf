"""The table of converters: which kind of module is converted by which, and in what order."""

from __future__ import annotations

import sys
import types
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

import hybridq
from hybridq.converters import Converter, converters, table
from hybridq.nn import QuantizedModule
from linear_model import equal


class Dense(nn.Linear):
    """A linear layer of a library: torch's forward under another name."""


class Scaled(nn.Module):
    """A product that no class of torch's is: `[in, out]`, and a factor."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.rand(in_features, out_features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * (x @ self.factor)


class QuantizedScaled(hybridq.nn.QuantizedModule, Scaled):
    weight_parts = types.MappingProxyType({"factor": ""})


@pytest.fixture
def own(monkeypatch):
    """Registrations that end with the test."""
    monkeypatch.setattr(table, "_registered", {})
    return hybridq.register_converter


DENSE = Converter("Dense", Dense, hybridq.Linear)
SCALED = Converter("Scaled", Scaled, QuantizedScaled, weights=("factor",), is_in_out=True)


def test_a_registered_kind_is_converted_and_reported(own) -> None:
    model = nn.ModuleDict({"a": Dense(16, 32), "b": nn.Linear(32, 16), "lm_head": Dense(16, 64)})
    before = hybridq.conversion(model)
    assert before.converted == ("a", "b")
    assert before.kinds == (("nn.Linear", 2, 3),)
    assert own(DENSE) is DENSE and converters()[0] is DENSE
    made = hybridq.conversion(model)
    assert made.converted == ("a", "b")
    assert made.left_alone == (("lm_head", "heads, the name lm_head"),)
    assert made.kinds == (("Dense", 1, 2), ("nn.Linear", 1, 1))
    assert made.summary.startswith("1 of 2 Dense and 1 of 1 nn.Linear, 50.0% of the weights; left")
    hybridq.convert(model)
    assert [type(m) for m in model.values()] == [hybridq.Linear, hybridq.Linear, Dense]
    after = hybridq.conversion(model)
    assert (after.converted, after.left_alone) == (made.converted, made.left_alone)
    x = torch.randn(3, 16)
    with hybridq.autocast(recipe="mxfp8"):
        assert not torch.equal(model["a"](x), nn.functional.linear(x, *model["a"].parameters()))


def test_another_layout_has_its_features_and_its_name(own) -> None:
    own(SCALED)
    model = nn.ModuleDict({"wide": Scaled(16, 32), "thin": Scaled(4, 32)})
    x, weight = torch.randn(3, 16), model["wide"].factor
    want = model["wide"](x)
    assert hybridq.conversion(model).left_alone == (("thin", "narrow, 4 to 32 features"),)
    hybridq.convert(model)
    assert type(model["wide"]) is QuantizedScaled and model["wide"].factor is weight
    assert model["wide"].name == "wide" and equal([model["wide"](x)], [want])


def test_what_a_model_says_holds_of_every_kind(own) -> None:
    own(SCALED)
    model = nn.ModuleDict({"kept": Scaled(16, 32), "out": Scaled(16, 32), "up": Scaled(16, 32)})
    model._keep_in_fp32_modules = ["kept.factor"]
    model["embed"] = nn.Embedding(16, 32)
    model["embed"].weight = model["out"].factor
    hybridq.convert(model)
    assert dict(hybridq.conversion(model).left_alone) == {
        "kept": "kept_in_fp32, _keep_in_fp32_modules",
        "out": "heads, its weight is that of the embedding embed",
    }
    assert [type(m) is QuantizedScaled for m in model.values()] == [False, False, True, False]


def test_a_function_may_convert_a_module(own) -> None:
    class Made(QuantizedScaled):
        """Of one class of modules."""

    def change(module: nn.Module) -> None:
        module.__class__ = Made

    kind = Converter("Scaled", lambda one: isinstance(one, Scaled), QuantizedScaled, apply=change)
    own(replace(kind, keeps=lambda one: "too small" if one.factor.numel() < 100 else None))
    model = nn.ModuleList([Scaled(16, 16), Scaled(8, 8)])
    with pytest.warns(hybridq.HybridQWarning):  # until converted, all of it is unknown
        hybridq.convert(nn.ModuleList([Scaled(8, 8)]))
    hybridq.convert(model)
    assert [type(m) for m in model] == [Made, Scaled]
    report = hybridq.conversion(model)
    assert report.converted == ("0",) and report.left_alone == (("1", "too small"),)
    assert hybridq.convert(model)[0] is model[0], "what is converted is not converted twice"


def test_a_module_that_stays_for_its_own_reason_is_asked_nothing_else(own) -> None:
    def features(one: Scaled) -> tuple[int, int]:
        raise AssertionError("it does not fit its kind")

    kind = replace(SCALED, features=features, keeps=lambda one: "another layout")
    own(kind)
    model = nn.ModuleList([Scaled(16, 16), nn.Linear(16, 16)])
    assert hybridq.conversion(model).left_alone == (("0", "another layout"),)
    assert type(hybridq.convert(model)[0]) is Scaled


def test_a_function_that_makes_something_else_is_told(own) -> None:
    own(Converter("Scaled", Scaled, QuantizedScaled, apply=lambda module: None))
    with pytest.raises(TypeError, match="'Scaled' must make a QuantizedScaled of the module in pl"):
        hybridq.convert(Scaled(16, 16))


def test_the_latest_registered_is_asked_first(own) -> None:
    class Own(hybridq.Linear):
        pass

    own(DENSE)
    own(Converter("Own Dense", Dense, Own))
    assert type(hybridq.convert(Dense(16, 16))) is Own
    own(DENSE)  # again: as it was
    own(Converter("Own Linear", nn.Linear, Own))
    assert type(hybridq.convert(nn.Linear(16, 16))) is Own


def test_names_are_taken_once(own) -> None:
    own(DENSE)
    for other in (replace(DENSE, takes=Scaled), Converter("nn.Linear", Dense, hybridq.Linear)):
        with pytest.raises(ValueError, match=f"'{other.name}' must be registered once"):
            own(other)
    with pytest.raises(TypeError, match=r"must be a hybridq\.converters\.Converter, got ty"):
        own(Dense)
    with pytest.raises(TypeError, match="makes must be a class derived"):
        Converter("Dense", Dense, nn.Linear)
    with pytest.raises(ValueError, match="name must be a string of some letters, got ''"):
        Converter("", Dense, hybridq.Linear)


def test_a_librarys_kinds_are_known_once_it_is_imported(own, monkeypatch) -> None:
    kinds = types.ModuleType("kinds_of_a_library")
    kinds.CONVERTERS = (DENSE,)
    monkeypatch.setitem(sys.modules, kinds.__name__, kinds)
    monkeypatch.setattr(table, "_LIBRARIES", [("a_library", kinds.__name__)])
    assert DENSE not in converters()
    monkeypatch.setitem(sys.modules, "a_library", types.ModuleType("a_library"))
    assert converters()[0] is DENSE and type(hybridq.convert(Dense(16, 16))) is hybridq.Linear
    with pytest.raises(ValueError, match="'Dense' must be registered once"):
        own(replace(DENSE, takes=Scaled))


def test_a_library_of_another_version_is_named_once(own, monkeypatch) -> None:
    monkeypatch.setattr(table, "_LIBRARIES", [("a_library", "no_such_module_of_hybridq")])
    monkeypatch.setitem(sys.modules, "a_library", types.ModuleType("a_library"))
    with pytest.warns(hybridq.HybridQWarning, match="the modules of a_library are not known: No m"):
        assert type(hybridq.convert(nn.Linear(16, 16))) is hybridq.Linear
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hybridq.convert(nn.Linear(16, 16))


def test_print_shows_what_is_hybridqs() -> None:
    class Mine(hybridq.Linear):
        pass

    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(16, 4), Mine(8, 8))
    assert str(hybridq.convert(model)).splitlines()[1:-1] == [
        "  (0): hybridq.Linear(in_features=16, out_features=8, bias=True)",
        "  (1): Linear(in_features=16, out_features=4, bias=True)",
        "  (2): Mine(in_features=8, out_features=8, bias=True)",
    ]
    assert issubclass(hybridq.Linear, QuantizedModule)
    assert str(hybridq.RMSNormLinear(8, 8)).startswith("hybridq.RMSNormLinear(")


def test_an_error_of_a_converter_leaves_the_model_as_it_was(own) -> None:
    def apply(module: nn.Module) -> None:
        module.__class__ = hybridq.Linear
        module.extra, module._buffers["more"] = 3, torch.ones(2)
        raise OSError("no file")

    own(Converter("Dense", Dense, hybridq.Linear, apply=apply))
    model = nn.Sequential(nn.Linear(16, 32), nn.MultiheadAttention(32, 4), Dense(32, 16))
    kinds, keys = [type(one) for one in model.modules()], list(model.state_dict())
    held = [vars(one).keys() for one in model.modules()]
    for fuse in (False, True):
        with pytest.raises(OSError, match="no file"):
            hybridq.convert(model, fuse=fuse)
        assert [type(one) for one in model.modules()] == kinds
        assert list(model.state_dict()) == keys
        assert [vars(one).keys() for one in model.modules()] == held
    hybridq.convert(model[:2])
    assert type(model[0]) is hybridq.Linear and model[0].name == "0"
