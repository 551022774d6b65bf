"""calibrate with experts: what each multiplies, by the router's choice and by all of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hybridq
from hybridq.calibration import products, run, watch
from hybridq.converters import register_experts
from hybridq.converters import table as known
from hybridq.moe import ExpertsLayout
from own_experts import EXPERTS, HIDDEN, OwnExperts, clamped, routing

LAYOUTS = {
    "concatenated": ExpertsLayout(),
    "gpt-oss": ExpertsLayout(
        gate_up_bias="gate_up_proj_bias",
        down_bias="down_proj_bias",
        is_transposed=True,
        is_concatenated=False,
        activation=clamped,
    ),
    "alternating": ExpertsLayout(is_concatenated=False, activation="gelu"),
    "no gate": ExpertsLayout("up_proj", has_gate=False, activation="srelu"),
    "two names": ExpertsLayout(("w1", "w3"), "w2", ("b1", "b3"), activation="qgelu"),
    "weights before": ExpertsLayout(router_weights="input"),
    "sizes": ExpertsLayout(("w1", "w3"), "w2", takes="sizes"),
    "batches": ExpertsLayout(is_transposed=True, takes="batches"),
}


class Watched(OwnExperts):
    """Experts that note what their own forward multiplies."""

    def _product(self, x, name, bias, e):
        if x.shape[0]:
            self.__dict__.setdefault("noted", {}).setdefault(f"experts.{name}.{e}", []).append(x)
        return super()._product(x, name, bias, e)


@pytest.fixture(params=LAYOUTS)
def layout(request, monkeypatch) -> ExpertsLayout:
    monkeypatch.setattr(known, "_registered", {})
    register_experts(Watched, LAYOUTS[request.param])
    return LAYOUTS[request.param]


class Block(nn.Module):
    """Experts in a model."""

    def __init__(self, layout: ExpertsLayout, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.experts = Watched(layout, dtype)

    def forward(self, *args):
        return self.experts(*args)


def arguments(layout: ExpertsLayout, rows: int = 35) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(3)
    x = torch.randn(rows, HIDDEN)
    if layout.takes == "batches":
        x[3] = 0  # a token that went elsewhere
        return (x,)
    if layout.takes == "sizes":
        return x, torch.tensor([4, 0, 17, 1, 10])  # the last 3 rows are of no expert
    indices, weights = routing(rows)
    return x, indices, weights


def shown(net: nn.Module, data, **options) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """What each product was shown, and the model's result."""
    found: dict[str, list[torch.Tensor]] = {}
    with watch(products(net), lambda one: found.setdefault(one.name, []).append, **options):
        run(net, data)
        with torch.no_grad():
            y = net(*data[0])
    half = {name: rows[: len(rows) // 2] for name, rows in found.items() if rows}
    return {name: torch.cat(rows) for name, rows in half.items()}, y


@pytest.mark.parametrize("converted", [False, True])
def test_each_expert_shows_what_it_multiplies(layout: ExpertsLayout, converted: bool) -> None:
    net, data = Block(layout), [arguments(layout)]
    with torch.no_grad():
        want = net(*data[0])
    noted = {name: torch.cat(rows) for name, rows in net.experts.noted.items()}
    if converted:
        hybridq.convert(net)
    got, y = shown(net, data)
    assert torch.equal(y, want)
    assert set(got) == set(noted) and len(got) > 2
    for name, rows in noted.items():
        rows = rows[rows.any(1)] if layout.takes == "batches" and layout.down not in name else rows
        if layout.down in name and layout.takes == "batches":
            rows = rows[rows.any(1)]
        assert torch.allclose(got[name], rows, rtol=1e-5, atol=1e-6), name
        if layout.down not in name:
            assert torch.equal(got[name], rows), name


def test_all_experts_see_every_token_and_results_stay(layout: ExpertsLayout) -> None:
    net, data = Block(layout), [arguments(layout)]
    with torch.no_grad():
        want = net(*data[0])
    got, y = shown(net, data, all_experts=True)
    assert torch.equal(y, want)
    assert len(got) == EXPERTS * len(layout.weights)
    for name, rows in got.items():
        assert len(rows) == len(data[0][0]), name
        if layout.down not in name:
            assert torch.equal(rows, data[0][0]), name


def test_amaxes_of_a_layer_are_the_largest_of_its_experts(layout: ExpertsLayout) -> None:
    net, data = Block(layout), [arguments(layout)]
    found = hybridq.calibrate(net, data, per_expert=True, slots=("input", "weight", "output"))
    noted = {name: torch.cat(rows) for name, rows in net.experts.noted.items()}
    for stack in (f"experts.{name}" for name in layout.weights):
        own = getattr(net.experts, stack.rpartition(".")[2])
        assert torch.equal(found.amax(stack, "weight"), own.detach().abs().amax((1, 2)))
        each = [
            noted[f"{stack}.{e}"].abs().max()
            if f"{stack}.{e}" in noted
            else torch.tensor(-torch.inf)
            for e in range(EXPERTS)
        ]
        assert torch.allclose(found.amax(stack, "expert_input"), torch.stack(each), rtol=1e-5)
        assert found.amax(stack, "input") == found.amax(stack, "expert_input").max()
        assert found.amax(stack, "output").shape == ()
        for e in range(EXPERTS):
            seen = noted.get(f"{stack}.{e}", torch.empty(0, 1))
            assert int(found.tokens[stack][e]) == int(seen.any(1).sum())
            if not len(seen):
                assert found.amax(f"{stack}.{e}", "input") == found.amax(stack, "input")
    if layout.takes != "batches":
        assert not found.tokens[stack].all(), "some expert must be starved"


def test_experts_that_are_modules_share_their_layers_amax() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            make = lambda: nn.ModuleDict({"w1": nn.Linear(16, 16)})  # noqa: E731
            self.experts = nn.ModuleList([make() for _ in range(3)])

        def forward(self, x):
            return self.experts[0]["w1"](x) + self.experts[2]["w1"](2 * x)

    torch.manual_seed(0)
    net, x = Layer(), torch.randn(4, 16)
    found = hybridq.calibrate(net, [x])
    names = [f"experts.{e}.w1" for e in range(3)]
    assert {float(found.amax(name, "input")) for name in names} == {float(2 * x.abs().max())}
    assert [int(found.tokens[name]) for name in names] == [4, 0, 4]
    for e, name in enumerate(names):
        assert found.amax(name, "weight") == net.experts[e]["w1"].weight.abs().max()
    own = hybridq.calibrate(net, [x], per_expert=True)
    assert own.amax(names[0], "input") == x.abs().max()
    assert own.amax(names[1], "input") == 2 * x.abs().max()


def test_quantized_stacks_count_as_they_decode(monkeypatch) -> None:
    monkeypatch.setattr(known, "_registered", {})
    layout = ExpertsLayout()
    register_experts(Watched, layout)
    torch.manual_seed(0)
    net = nn.ModuleDict({"experts": OwnExperts(layout, sizes=(3, 64, 64))})
    net["experts"].__class__ = Watched
    with hybridq.quantized_model_init(recipe="nvfp4"):
        hybridq.convert(net)
    weight = net["experts"].down_proj
    assert isinstance(weight, hybridq.QuantizedTensor)
    indices, shares = routing(8, 3)
    x = torch.randn(8, 64)
    found = hybridq.calibrate(net, lambda one: one["experts"](x, indices, shares))
    want = weight.dequantize().abs().amax((1, 2))
    assert torch.equal(found.amax("experts.down_proj", "weight"), want)


def test_matrices_that_no_expert_reads_have_no_amax(monkeypatch) -> None:
    """Experts that pass tokens on may have matrices of gate and up."""
    monkeypatch.setattr(known, "_registered", {})
    layout = ExpertsLayout(passes_others=True)
    register_experts(Watched, layout)
    net = Block(layout)
    own = net.experts.gate_up_proj
    net.experts.gate_up_proj = nn.Parameter(torch.cat([own, torch.full_like(own[:2], 99.0)]))
    x, weights = torch.randn(6, HIDDEN), torch.ones(6, 1)
    found = hybridq.calibrate(net.experts, lambda one: one(x, torch.zeros(6, 1).long(), weights))
    assert found.tokens["gate_up_proj"].tolist() == [6] + [0] * (EXPERTS - 1)
    assert found.amax("gate_up_proj", "weight").shape == (EXPERTS,)
    assert found.amax("gate_up_proj", "weight").max() < 99
