"""Every module that multiplies and is not converted says why, and what would convert it."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import hybridq
from hybridq.converters import NotConverted, table
from hybridq.moe import Experts, ExpertsLayout


class Own(nn.Linear):
    """Torch's forward, and a method by a name of hybridq's."""

    def set_name(self) -> None:
        raise NotImplementedError


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T


class TopKRouter(Product):
    pass


class Blocks(nn.Module):
    """A block-diagonal map, or experts: who can know?"""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 32, 16))
        self.down = nn.Parameter(torch.randn(4, 16, 32))


class Model(nn.Module):
    _keep_in_fp32_modules = ("precise", "exact")

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 16)
        self.precise = nn.Linear(16, 16)
        self.router = nn.Linear(16, 16)
        self.thin = nn.Linear(16, 4)
        self.own = Own(16, 16)
        self.scaled = Scaled(16, 16)
        self.product = Product()
        self.exact = Product()
        self.choice = TopKRouter()
        self.gate = Product()
        self.blocks = Blocks()
        self.grouped = nn.Conv1d(16, 16, 1, groups=4)
        self.embed = nn.Embedding(32, 16)
        self.lm_head = nn.Linear(16, 32)
        self.norm = nn.LayerNorm(16)


FOREIGN = "hybridq.register_converter, of a hybridq.nn.ForeignLinear"
WANT = {
    "precise": (
        *("left alone", "kept_in_fp32", "kept_in_fp32, _keep_in_fp32_modules"),
        'also=["kept_in_fp32"]',
    ),
    "router": ("left alone", "routers", "routers, the name router", 'also=["routers"]'),
    "thin": ("left alone", "narrow", "narrow, 16 to 4 features", "least_width=4"),
    "own": (
        *("left alone", "as it is", "its class Own cannot be kept: it has its own set_name"),
        'hybridq.register_converter(Converter("Own", Own, hybridq.Linear)), which makes it a '
        "hybridq.Linear and no Own",
    ),
    "scaled": ("left alone", "own forward", "Scaled has a forward of its own", FOREIGN),
    "product": ("not known", "unknown class", "no converter takes the class", FOREIGN),
    "exact": (
        *("left alone", "kept_in_fp32", "kept_in_fp32, _keep_in_fp32_modules"),
        f'{FOREIGN}, also=["kept_in_fp32"]',
    ),
    "choice": (
        *("left alone", "routers", "routers, the class TopKRouter"),
        f'{FOREIGN}, also=["routers"]',
    ),
    "gate": ("left alone", "routers", "routers, the name gate", f'{FOREIGN}, also=["routers"]'),
    "blocks": (
        *("not known", "unknown class", "no converter takes the class"),
        "hybridq.converters.register_experts(Blocks, ExpertsLayout(...)), if it holds experts",
    ),
    "grouped": (
        *("no product", "convolution"),
        "a convolution that is no product: groups must be 1, got 4",
        "",
    ),
    "lm_head": ("left alone", "heads", "heads, the name lm_head", 'also=["heads"]'),
}


def said(one: NotConverted) -> tuple[str, str, str, str]:
    return one.state, one.reason, one.text, one.helps


@pytest.fixture(autouse=True)
def _no_other_converters(monkeypatch) -> None:
    monkeypatch.setattr(table, "_registered", {})


def test_every_module_has_its_reason_and_what_helps() -> None:
    found = hybridq.conversion(Model())
    assert {one.name: said(one) for one in found.kept} == WANT
    assert found.converted == ("up",)
    assert dict(found.left_alone).keys() | dict(found.others).keys() == WANT.keys() - {"grouped"}
    lines = str(found).splitlines()
    assert 'left alone  lm_head: heads, the name lm_head; converted with also=["heads"]' in lines
    assert (
        f"not known   product: Product, no converter takes the class; converted with {FOREIGN}"
        in lines
    )
    read = json.loads(found.to_json())
    assert [one["helps"] for one in read["kept"]] == [one.helps for one in found.kept]
    assert read["converted"] == ["up"] and sum(read["elements"]) == sum(found.elements)


@pytest.mark.parametrize("is_converted", [False, True])
def test_the_summary_says_the_same(is_converted: bool) -> None:
    model = Model()
    if is_converted:
        hybridq.convert(model)
    found = {one.name: one for one in hybridq.summary(model).modules}
    told = hybridq.conversion(model).kept
    assert len(told) == len(WANT)
    for one in told:
        own = found[one.name]
        assert (own.state, own.reason, own.helps) == (one.state, one.text, one.helps)
    assert found["up"].helps == "" == found["embed"].helps
    classes = hybridq.summary(model).tables()[0]
    assert classes.columns[-1] == "converted with"
    assert {row[-1] for row in classes.rows} == {one.helps for one in told}
    read = json.loads(hybridq.summary(model).to_json())
    assert {one["name"]: one["helps"] for one in read["modules"] if one["helps"]} == {
        one.name: one.helps for one in told if one.helps
    }


def test_what_is_said_to_help_does() -> None:
    also = [f'also=["{one}"]' for one in ("heads", "routers", "kept_in_fp32")]
    for options in (*also, "least_width=4"):
        before = {one.name for one in hybridq.conversion(Model()).kept if one.helps == options}
        given = eval(f"dict({options})")
        stayed = {one.name for one in hybridq.conversion(Model(), **given).kept}
        assert before and not before & stayed
    converter = hybridq.converters.Converter
    own = {one.name: one.helps for one in hybridq.conversion(Model()).kept}["own"]
    own = own.partition(", which")[0]
    eval(own, {"hybridq": hybridq, "Converter": converter, "Own": Own})
    layout = ExpertsLayout("up", "down", has_gate=False)
    hybridq.converters.register_experts(Blocks, layout)
    model = hybridq.convert(Model())
    assert type(model.own) is hybridq.Linear and isinstance(model.blocks, Experts)
    assert {"own", "blocks"}.isdisjoint(one.name for one in hybridq.conversion(model).kept)


def test_a_filter_and_a_refusal_say_what_helps() -> None:
    (kept,) = hybridq.conversion(nn.Sequential(nn.Linear(16, 16)), lambda *_: False).kept
    assert said(kept) == (
        *("left alone", "filter_fn", "filter_fn"),
        "a filter_fn that returns True for it",
    )
    layout = ExpertsLayout("up", "w2", has_gate=False)
    hybridq.converters.register_experts(Blocks, layout)
    (kept,) = hybridq.conversion(nn.Sequential(Blocks())).kept
    assert said(kept) == (
        *("left alone", "as it is", "it has no parameter w2"),
        "hybridq.converters.register_experts(Blocks, ExpertsLayout(...)), if it holds experts",
    )


def test_a_parametrized_module_has_what_its_weight_is_made_of() -> None:
    """It is said once, of the module; a convolution's are no weights of products."""
    torch.manual_seed(0)
    parametrized = weight_norm(nn.Linear(64, 48))
    conv = weight_norm(nn.Conv1d(16, 32, 3, padding=1))
    model = nn.ModuleDict({"normed": parametrized, "conv": conv, "plain": nn.Linear(48, 32)})
    found = hybridq.conversion(model)
    assert found.converted == ("plain",)
    assert {one.name: one.state for one in found.kept} == {
        "normed": "left alone",
        "conv": "no product",
    }
    assert found.elements == (48 * 32, 64 * 48 + 48, 0)
    (left,) = (one for one in found.kept if one.name == "normed")
    assert left.helps == "hybridq.convert before it is parametrized"
    sizes = {one.name: one.parameters for one in hybridq.summary(model).modules}
    assert sizes == {
        "normed": 64 * 48 + 48,
        "conv": 16 * 32 * 3 + 32,
        "plain": 48 * 32,
    }
    layer = weight_norm(hybridq.convert(nn.Linear(64, 48)))  # what the report advises
    x, quantizer = torch.randn(8, 64), hybridq.quantizer("mxfp8")
    with hybridq.autocast(recipe="mxfp8"):
        y = layer(x)
    values = quantizer(x).dequantize() @ quantizer(layer.weight.detach()).dequantize().T
    assert torch.allclose(y, values + layer.bias, rtol=1e-5, atol=1e-5)


class Scored(nn.Module):
    """Attention of graphs in its second form: factors of heads, and no experts."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.register_parameter(name, nn.Parameter(torch.ones(1, 4, 16)))


@pytest.mark.parametrize(
    ("module", "helps"),
    [
        (Scored("att"), ""),
        (Scored("pos_embed"), ""),
        (nn.Bilinear(8, 8, 8), "hybridq.register_converter, of a hybridq.nn.QuantizedModule"),
    ],
)
@pytest.mark.parametrize("name", ["layer", "gate"])
def test_only_what_may_be_experts_is_advised_to_be_registered_as_such(module, helps, name) -> None:
    (one,) = hybridq.conversion(nn.ModuleDict({name: module})).kept
    assert one.helps == (helps and helps + (', also=["routers"]' if name == "gate" else ""))
