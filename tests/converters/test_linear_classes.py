"""Classes derived from nn.Linear, of users and libraries, that multiply as it does."""

from __future__ import annotations

import abc
import copy
import inspect
import io
import pickle
import types

import pytest
import torch
from torch import nn

import hybridq
from hybridq.errors import HybridQWarning
from hybridq.tensor import is_quantized
from linear_model import equal


class Protocol(nn.Module):
    """What the modules of a library have: initial values by a rule, settings, hooks of its own."""

    rule = None
    applied = 0

    def init_states(self) -> None:
        for child in self.children():
            if isinstance(child, Protocol):
                child.init_states()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        pass

    def _apply(self, fn, recurse=True):
        self.applied += 1
        return super()._apply(fn, recurse)


class Dense(nn.Linear, Protocol):
    """As torchtitan's: nn.Linear and a protocol, with initial values of its own."""

    def __init__(self, inp: int, out: int, std: float = 0.02) -> None:
        self.std = std
        super().__init__(inp, out, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}std"] = torch.tensor(self.std)

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        self.std = float(state_dict.pop(f"{prefix}std"))
        super()._load_from_state_dict(state_dict, prefix, *rest)


class Abstract(nn.Linear, abc.ABC):
    """Of another metaclass."""


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Dense(32, 64), nn.GELU(), Abstract(64, 32), nn.Linear(32, 16))


def step(of: nn.Module, recipe: str | None) -> list[torch.Tensor]:
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(1), requires_grad=True)
    of.zero_grad()
    with hybridq.autocast(enabled=recipe is not None, recipe=recipe):
        y = of(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad.clone() for p in of.parameters())]


@pytest.mark.parametrize("recipe", [None, "mxfp8", "mxfp8_fwd_nvfp4_bwd", "fp8_delayed"])
def test_they_compute_as_linears_of_torch_do(recipe) -> None:
    own, plain = model(), nn.Sequential(
        nn.Linear(32, 64, bias=False), nn.GELU(), nn.Linear(64, 32), nn.Linear(32, 16)
    )  # fmt: skip
    for a, b in zip(plain.parameters(), own.parameters(), strict=True):
        a.data.copy_(b)
    hybridq.convert(own), hybridq.convert(plain)
    assert hybridq.conversion(own).kinds == (("nn.Linear", 3, 3),)
    torch.manual_seed(5)
    want = step(plain, recipe)
    torch.manual_seed(5)
    assert all(map(torch.equal, step(own, recipe), want))


def test_they_stay_what_they_are() -> None:
    made = model()
    weight, layer = made[0].weight, made[0]
    hybridq.convert(made)
    assert made[0] is layer and layer.weight is weight and layer.name == "0"
    for kind in (Dense, Protocol, hybridq.Linear):
        assert isinstance(layer, kind)
    assert type(layer).__name__ == "QuantizedDense" and "QuantizedDense(in_features=32" in str(made)
    assert type(layer) is type(hybridq.convert(Dense(8, 8)))
    by_place = [
        name
        for name, one in inspect.signature(type(layer).forward).parameters.items()
        if one.kind is one.POSITIONAL_OR_KEYWORD
    ]
    assert by_place == ["self", "input"]  # torchtitan wraps forwards by their names
    with hybridq.autocast(recipe="mxfp8"):
        x = torch.randn(3, 32)
        assert torch.equal(layer(input=x, is_first_microbatch=True), layer(x))
    layer.std = 3.0
    torch.manual_seed(2)
    layer.init_states()
    torch.manual_seed(2)
    assert torch.equal(layer.weight, torch.empty(64, 32).normal_(std=3.0))
    layer.bfloat16()
    assert layer.applied == 1 and layer.weight.dtype == torch.bfloat16
    state = made.state_dict()
    assert float(state["0.std"]) == 3.0
    fresh = hybridq.convert(model()).bfloat16()
    fresh.load_state_dict(state)
    assert fresh[0].std == 3.0 and torch.equal(fresh[0].weight, layer.weight)


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "save"])
def test_copies_and_files(way) -> None:
    made = hybridq.convert(model())
    if way == "deepcopy":
        read = copy.deepcopy(made)
    elif way == "pickle":
        read = pickle.loads(pickle.dumps(made))
    else:
        file = io.BytesIO()
        torch.save(made, file)
        file.seek(0)
        read = torch.load(file, weights_only=False)
    assert [type(one) for one in read] == [type(one) for one in made]
    assert read[0].std == 0.02 and read[0].name == "0"
    assert equal(step(read, "mxfp8"), step(made, "mxfp8"))


def test_quantized_weights_and_their_values() -> None:
    with hybridq.quantized_model_init(recipe="mxfp8"):
        held = hybridq.convert(model())
    assert all(is_quantized(one.weight) for one in (held[0], held[2], held[3]))
    plain = hybridq.convert(model())
    assert equal(step(held, "mxfp8")[0], step(plain, "mxfp8")[0])


@pytest.mark.more
def test_compiled_they_have_the_same_bits() -> None:
    made = hybridq.convert(model())
    run = torch.compile(made, fullgraph=True, backend="aot_eager")
    want = step(made, "mxfp8")
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(1))
    with hybridq.autocast(recipe="mxfp8"):
        assert torch.equal(run(x), want[0])


class Called(nn.Linear):
    def __call__(self, *args):
        return 2 * super().__call__(*args)


class Named(nn.Linear):
    """With an attribute of its own by a name of hybridq's."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.name = "mine"


def test_what_stays_says_why() -> None:
    given = nn.ModuleDict(
        {
            "called": Called(16, 16),
            "named": Named(16, 16),
            "lazy": nn.LazyLinear(16),
            "hooked": nn.Linear(16, 16),
        }
    )
    own = given["hooked"].forward
    given["hooked"].forward = lambda x: own(x) * 2
    x = torch.randn(3, 16)
    want = [given[name](x) for name in ("called", "named", "hooked")]
    reasons = dict(hybridq.conversion(given).left_alone)
    assert reasons == {
        "called": "Called has a __call__ of its own",
        "named": "its class Named cannot be kept: it has its own name",
        "lazy": "LazyLinear has no weight before its first forward; convert after it",
        "hooked": "its forward was replaced by another one, which would be called; convert before",
    }
    with pytest.warns(HybridQWarning, match="0 of 4 nn.Linear"):
        hybridq.convert(given)
    with hybridq.autocast(recipe="nvfp4"):
        assert equal([given[name](x) for name in ("called", "named", "hooked")], want)
    given["lazy"](x)
    hybridq.convert(given)
    assert isinstance(given["lazy"], hybridq.Linear)


def test_what_helps_for_a_class_that_cannot_be_kept(monkeypatch) -> None:
    monkeypatch.setattr(hybridq.converters.table, "_registered", {})
    layer = Named(16, 16)
    (kept,) = hybridq.conversion(layer).kept
    assert kept.helps.startswith('hybridq.register_converter(Converter("Named", Named, ')
    kind = hybridq.converters.Converter("Named", Named, hybridq.Linear)
    hybridq.register_converter(kind)
    assert type(hybridq.convert(layer)) is hybridq.Linear


def test_a_forward_that_a_library_replaces_later_is_called() -> None:
    layer = hybridq.convert(Dense(16, 16))
    own = layer.forward
    layer.forward = types.MethodType(lambda self, x: own(x) * 2, layer)
    plain, x = hybridq.Linear(16, 16, bias=False), torch.randn(3, 16)
    plain.weight = layer.weight
    with hybridq.autocast(recipe="mxfp8"):
        assert torch.equal(layer(x), plain(x) * 2)
