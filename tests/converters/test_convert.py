"""convert: nn.Linear to hybridq.Linear in place, and what it leaves alone."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

import hybridq
from hybridq.errors import HybridQWarning
from hybridq.nn import Linear, conversion, convert, default_filter
from hybridq.quantizers import MXFP8Quantizer
from hybridq.recipes import CustomRecipe, autocast
from linear_model import Recorder, equal, run


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 32)
        self.gate_proj = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)
        self.router = nn.Linear(16, 4)
        self.gate = nn.Linear(16, 4)

    def forward(self, x):
        return x + self.down(self.up(x) * self.gate_proj(x).sigmoid())


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.lm_head = nn.Linear(16, 10, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(x)


def _converted(model):
    return {name for name, module in model.named_modules() if type(module) is Linear}


def test_everything_stays_but_the_class():
    model = Model()
    before = dict(model.named_modules())
    parameters = dict(model.named_parameters())
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert convert(model) is model
    assert _converted(model) == {
        f"blocks.{i}.{name}" for i in (0, 1) for name in ("up", "gate_proj", "down")
    }
    after = dict(model.named_modules())
    assert list(before) == list(after) and all(before[k] is after[k] for k in before)
    for name, parameter in model.named_parameters():
        assert parameter is parameters[name]
    assert model.lm_head.weight is model.embed.weight
    assert list(model.state_dict()) == list(state)
    tokens = torch.arange(10).reshape(2, 5)
    plain = copy.deepcopy(model)(tokens)
    with autocast(recipe="mxfp8"):
        y = model(tokens)
    assert not torch.equal(plain, y)
    y.sum().backward()
    optimizer.step()
    assert not equal(list(model.state_dict().values()), list(state.values()))


def test_converted_equals_constructed():
    torch.manual_seed(1)
    built = nn.Sequential(Linear(24, 32), nn.ReLU(), Linear(32, 8))
    torch.manual_seed(1)
    converted = convert(nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 8)))
    x, dy = torch.randn(5, 24), torch.randn(5, 8)
    for recipe in ("mxfp8", "fp8_block"):
        assert equal(run(built, x, dy, recipe=recipe), run(converted, x, dy, recipe=recipe))


def test_hooks_stay():
    model = nn.Sequential(nn.Linear(8, 8))
    calls = []
    model[0].register_forward_hook(lambda *_: calls.append("forward"))
    model[0].register_full_backward_hook(lambda *_: calls.append("backward"))
    model[0].weight.register_hook(lambda grad: calls.append("weight"))
    model[0].weight.mark = "kept"
    convert(model)
    with autocast(recipe="mxfp8"):
        model(torch.randn(2, 8, requires_grad=True)).sum().backward()
    assert sorted(calls) == ["backward", "forward", "weight"]
    assert model[0].weight.mark == "kept"


def test_the_root_may_be_a_linear():
    layer = nn.Linear(8, 4)
    assert convert(layer) is layer and type(layer) is Linear and layer.name == ""


def test_a_shared_module_is_converted_once():
    layer = nn.Linear(8, 8)
    model = convert(nn.Sequential(layer, nn.ReLU(), layer))
    assert model[0] is model[2] is layer and type(layer) is Linear and layer.name == "0"


def test_tied_linears():
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[1].weight = model[0].weight
    convert(model)
    assert model[0].weight is model[1].weight and len(list(model.parameters())) == 1


class Subclass(nn.Linear):
    def forward(self, input):
        return super().forward(input)


def test_linears_of_another_kind_are_left_alone():
    model = nn.Sequential(
        Subclass(8, 8),
        NonDynamicallyQuantizableLinear(8, 8),
        nn.Bilinear(8, 8, 8),
        nn.LazyLinear(8),
        type("Own", (nn.MultiheadAttention,), {})(8, 2),
        nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
        nn.Linear(8, 8),
    )
    types = [type(module) for module in model.modules()]
    reasons = dict(conversion(model).left_alone)
    assert reasons["0"] == "Subclass has a forward of its own"
    assert reasons["3"].startswith("LazyLinear has no weight before its first forward")
    assert reasons["5"] == "ParametrizedLinear makes its weight when it is read"
    assert reasons["4.out_proj"] == "its nn.MultiheadAttention multiplies by the weight itself"
    with pytest.warns(HybridQWarning, match="not known: 2 "):
        convert(model)
    assert _converted(model) == {"6"}
    assert [type(module) for module in model.modules()][:-1] == types[:-1]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("", True),
        ("lm_head", False),
        ("model.lm_head", False),
        ("layers.0.mlp.router", False),
        ("layers.0.mlp.router.classifier", False),
        ("layers.0.moe_router", False),
        ("layers.0.router_logits", False),
        ("layers.0.block_sparse_moe.gate", False),
        ("layers.0.moe.gate.wg", False),
        ("layers.0.mlp.shared_expert_gate", False),
        ("layers.0.mlp.gate_proj", True),
        ("layers.0.mlp.gate_up_proj", True),
        ("layers.0.mlp.w_gate", True),
        ("routers_are_fun.proj", True),
        ("head", True),
        ("lm_head_norm.proj", True),
    ],
)
def test_default_filter(name, expected):
    assert default_filter(nn.Linear(2, 2), name) is expected


def test_filter_fn_replaces_the_default():
    seen = []

    def only_heads(module, name):
        seen.append((module, name))
        return "head" in name

    model = Model()
    convert(model, filter_fn=only_heads)
    assert _converted(model) == {"lm_head"}
    assert len(seen) == 11 and all(type(module) is not nn.Embedding for module, _ in seen)
    everything = convert(Model(), lambda module, name: True)
    assert len(_converted(everything)) == 11


def test_qualified_names_reach_the_roles():
    names = []

    def factory(role):
        names.append((role.name, role.tensor_type))
        return MXFP8Quantizer()

    model = convert(Model())
    with autocast(recipe=CustomRecipe(factory)):
        model(torch.arange(4))
    expected = [f"blocks.{i}.{part}" for i in (0, 1) for part in ("up", "gate_proj", "down")]
    assert [name for name, slot in names if slot == "input"] == expected


def test_names_of_modules_that_were_there_already():
    model = nn.ModuleDict({"a": Linear(8, 8), "b": Linear(8, 8, name="mine"), "c": nn.Linear(8, 8)})
    convert(model)
    assert [m.name for m in model.values()] == ["a", "mine", "c"]
    outer = convert(nn.ModuleDict({"deep": model}))
    assert [m.name for m in model.values()] == ["deep.a", "mine", "deep.c"]
    assert convert(convert(outer)) is outer


def test_convert_and_use_after_deepcopy():
    model = convert(nn.Sequential(nn.Linear(8, 8)))
    twin = copy.deepcopy(model)
    with autocast(recipe="mxfp8"), Recorder() as seen:
        twin(torch.randn(2, 8))
    assert len(seen.encodes) == 2 and twin[0].name == "0"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("model",), "model must be an nn.Module, got str"),
        ((None,), "got NoneType"),
        ((nn.Linear,), "pass an instance"),
        (([nn.Linear(2, 2)],), "got list"),
        ((nn.Linear(2, 2), "lm_head"), "filter_fn must be callable"),
        ((nn.Linear(2, 2), ["a"]), "filter_fn must be callable"),
    ],
)
def test_bad_arguments(args, words):
    with pytest.raises(TypeError, match=words):
        convert(*args)


def test_a_filter_that_raises_leaves_the_model_as_it_was():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    def fails_late(module, name):
        return name == "0" or 1 / 0

    with pytest.raises(ZeroDivisionError):
        convert(model, fails_late)
    assert _converted(model) == set()


def test_experts_in_a_module_list_are_converted_one_by_one() -> None:
    """As remote code and older models hold them, by either set of names."""

    class Mlp(nn.Module):
        def __init__(self, names) -> None:
            super().__init__()
            for name in names:
                setattr(self, name, nn.Linear(16, 16))

    for names in (("gate_proj", "up_proj", "down_proj"), ("w1", "w2", "w3")):
        model = nn.ModuleDict({"experts": nn.ModuleList(Mlp(names) for _ in range(2))})
        made = conversion(convert(model))
        assert made.converted == tuple(f"experts.{e}.{name}" for e in (0, 1) for name in names)
        assert not made.left_alone and not made.others


def test_lazy_modules_that_are_not_made_yet_are_named():
    """After their first forward they were plain layers in a converted model, silently."""
    model = nn.Sequential(nn.LazyLinear(32), nn.Linear(32, 16))
    with pytest.warns(HybridQWarning, match=r"lazy modules stay torch's own.* 0\.weight and"):
        convert(model)
    assert type(model[1]) is Linear
    with pytest.raises(ValueError, match="quantize_model: parameters must have been made"):
        hybridq.quantize_model(model, "mxfp8")
    assert type(model[1].weight) is nn.Parameter
    model(torch.randn(2, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        convert(model)
    assert type(model[0]) is Linear
