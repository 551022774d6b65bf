"""SmoothQuant and AWQ of experts in stacks: each by the tokens that the router gave it."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

import hybridq
from hybridq.calibration import Fold, awq, places, register_folds, smooth

transformers = pytest.importorskip("transformers")

RECIPE = hybridq.recipe(fprop="nvfp4")
SIZES = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = SIZES | {"num_attention_heads": 4, "num_key_value_heads": 2}
GROUPED = HEADS | {"head_dim": 16}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
SMALL = {"moe_intermediate_size": 48, "shared_expert_intermediate_size": 32}
OWN_ACTIVATION = "its activation is a function of its own"
#: Family: the names of a layer's inputs that fold, and why hidden values of experts do not.
FAMILIES = {
    "mixtral": ({"self_attn.v_proj", "mlp.experts.gate_up_proj"}, ""),
    "olmoe": ({"self_attn.v_proj", "mlp.experts.gate_up_proj"}, ""),  # o is left
    "qwen3_moe": ({"self_attn.v_proj", "mlp.experts.gate_up_proj"}, ""),
    "qwen2_moe": (
        {
            "self_attn.v_proj",
            "mlp.shared_expert.gate_proj",
            "mlp.experts.gate_up_proj",
            "mlp.shared_expert.down_proj",
        },
        "",
    ),
    "gpt_oss": ({"self_attn.v_proj", "mlp.experts.gate_up_proj"}, OWN_ACTIVATION),
}


def made(family: str) -> tuple[nn.Module, list[dict[str, torch.Tensor]]]:
    """A random FP32 model with uneven norms, biases and channels, and batches."""
    torch.manual_seed(1)
    sizes = (HEADS if family == "olmoe" else GROUPED) | EXPERTS | SMALL
    config = transformers.AutoConfig.for_model(family, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    with torch.no_grad():
        for one in model.parameters():
            one.add_(torch.randn_like(one) * (0.5 if one.dim() == 1 else 0.2))
    return model, [{"input_ids": torch.randint(3, 48, (2, 12))} for _ in range(2)]


def in_fp64(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return copy.deepcopy(model).double()(**batch)[0]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", ["smooth", "awq"])
def test_folded_experts_compute_what_they_did(family, method):
    """In FP64, of FP32 parameters that were rounded once: 2^-24 each, through two layers."""
    model, batches = made(family)
    want = in_fp64(model, batches[0])
    before = {name: one.clone() for name, one in model.state_dict().items()}
    report = smooth(model, batches) if method == "smooth" else awq(model, batches, RECIPE)
    names = {name for one in report.inputs for name in one.names}
    folded, why = FAMILIES[family]
    assert {f"model.layers.{n}.{name}" for n in (0, 1) for name in folded} <= names
    downs = [f"model.layers.{n}.mlp.experts.down_proj" for n in (0, 1)]
    if why:
        assert all(why in report.left[one] for one in downs)
    else:
        assert {f"{one}.{e}" for one in downs for e in range(4)} <= names
        assert {one.rpartition(".")[2] for one in report.left} <= {"o_proj"}
        assert not report.left or family == "olmoe"
    changed = [
        name for name, one in model.state_dict().items() if not torch.equal(one, before[name])
    ]
    assert "model.layers.1.mlp.experts.gate_up_proj" in changed
    assert f"model.layers.1.mlp.{'router' if why else 'gate'}.weight" in changed
    assert len(changed) > len(before) // 3
    bound = 3e-6 * float(want.abs().max())
    torch.testing.assert_close(in_fp64(model, batches[0]), want, rtol=0.0, atol=bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_router_keeps_the_bits_of_its_choice(dtype):
    """Only the first products of experts are quantized: all that changes are powers of two."""
    model, batches = made("qwen2_moe")
    model = model.to(dtype)
    only = hybridq.recipes.ByName([("*.gate_up_proj", RECIPE)], "bf16")
    with torch.no_grad():
        want = model(**batches[0], output_router_logits=True)
    before = model.model.layers[0].post_attention_layernorm.weight.detach().clone()
    report = awq(model, batches, only)
    assert [one.names[-1] for one in report.inputs] == [
        f"model.layers.{n}.mlp.experts.gate_up_proj" for n in (0, 1)
    ]
    assert all(one.alpha > 0 and one.error < one.plain_error for one in report.inputs)
    ratios = before.double() / model.model.layers[0].post_attention_layernorm.weight.double()
    assert len(ratios.unique()) > 1 and torch.equal(ratios.log2(), ratios.log2().round())
    with torch.no_grad():
        got = model(**batches[0], output_router_logits=True)
    assert all(map(torch.equal, got.router_logits, want.router_logits))
    assert torch.equal(got.logits, want.logits)


def of_experts(model: nn.Module, batches: list) -> tuple[np.ndarray, list, list]:
    """What reaches the mixture of a one-layer Mixtral, and each expert, computed with NumPy."""
    rows: list[torch.Tensor] = []
    layer = model.model.layers[0]
    handle = layer.mlp.experts.register_forward_pre_hook(lambda _, args: rows.append(args))
    with torch.no_grad():
        for batch in batches:
            model(**batch)
    handle.remove()
    x = torch.cat([one[0] for one in rows]).double().numpy()
    top = torch.cat([one[1] for one in rows]).numpy()
    gate_up = layer.mlp.experts.gate_up_proj.detach().double().numpy()
    inner = gate_up.shape[1] // 2
    own, hidden = [], []
    for e in range(gate_up.shape[0]):
        own.append(x[(top == e).any(1)])
        h = own[-1] @ gate_up[e].T
        gate, up = h[:, :inner], h[:, inner:]
        hidden.append(gate / (1.0 + np.exp(-gate)) * up)
    return x, own, hidden


@pytest.fixture
def mixtral():
    model, batches = made("mixtral")
    model.model.layers = model.model.layers[:1]
    return model, batches


def test_smoothing_of_experts_is_the_formula_of_each_ones_tokens(mixtral):
    model, batches = mixtral
    layer = model.model.layers[0]
    x, _, hidden = of_experts(model, batches)
    gate_up = layer.mlp.experts.gate_up_proj.detach().double().numpy()
    down = layer.mlp.experts.down_proj.detach().double().numpy()
    norm = layer.post_attention_layernorm.weight.detach().double().numpy()
    # Keep attention out of it: its scales would change no value, but round.
    report = smooth(model, batches, lambda _, name: name.endswith("experts"))
    assert len(report.inputs) == 1 + 4
    wanted = np.sqrt(np.abs(x).max(0) / np.abs(gate_up).max((0, 1)))
    got = norm / layer.post_attention_layernorm.weight.detach().double().numpy()
    np.testing.assert_array_equal(got, np.exp2(np.round(np.log2(wanted))))
    for e in range(4):
        ratios = layer.mlp.experts.down_proj.detach().double().numpy()[e] / down[e]
        wanted = np.sqrt(np.abs(hidden[e]).max(0) / np.abs(down[e]).max(0))
        np.testing.assert_allclose(ratios, np.broadcast_to(wanted, down[e].shape), rtol=1e-5)


def test_awq_of_experts_takes_the_best_of_its_grid_by_each_ones_tokens(mixtral):
    """All 21 products of the formula for each place, computed with the tokens themselves."""
    model, batches = mixtral
    experts = model.model.layers[0].mlp.experts
    x, own, hidden = of_experts(model, batches)
    gate_up, down = (one.detach().double() for one in (experts.gate_up_proj, experts.down_proj))
    report = awq(model, batches, RECIPE, lambda _, name: name.endswith("experts"))

    def errors(mean, inputs, matrices, powers):
        for step in range(21):
            scales = mean ** (step / 20)
            scales = np.exp2(np.round(np.log2(scales))) if powers else scales
            total = 0.0
            for rows, matrix in zip(inputs, matrices, strict=True):
                scaled = (matrix.numpy() * scales).astype(np.float32)
                rounded = hybridq.quantize(torch.from_numpy(scaled), "nvfp4").dequantize()
                gap = (rows / scales) @ rounded.double().numpy().T - rows @ matrix.numpy().T
                total += float((gap**2).sum())
            yield total

    first, *downs = report.inputs
    wanted = [list(errors(np.abs(x).mean(0), own, gate_up, True))]
    wanted += [
        list(errors(np.abs(hidden[e]).mean(0), [hidden[e]], [down[e]], False)) for e in range(4)
    ]
    for one, found in zip((first, *downs), wanted, strict=True):
        assert one.alpha == int(np.argmin(found)) / 20
        assert one.error == pytest.approx(min(found), rel=1e-3)
        assert one.plain_error == pytest.approx(found[0], rel=1e-3)
    assert [one.names[0].rpartition(".")[2] for one in downs] == ["0", "1", "2", "3"]


def test_steps_see_the_same_where_layers_and_experts_multiply_one_input():
    """`"input"` observes both in two runs; of down products there are none, whose scales go up."""
    first = [(f"*.{name}", RECIPE) for name in ("gate_up_proj", "gate_proj", "up_proj")]
    recipe = hybridq.recipes.ByName(first, "bf16")
    reports = []
    for step in ("block", "input", "model"):
        model, batches = made("qwen2_moe")
        model.model.layers = model.model.layers[:1]
        (one,) = awq(model, batches, recipe, step=step).inputs
        assert len(one.names) == 3 and one.alpha > 0
        reports.append(one)
    assert reports == [reports[0]] * 3


def test_an_expert_without_tokens_is_named_and_the_others_are_scaled(mixtral):
    model, batches = mixtral
    router = model.model.layers[0].mlp.gate
    router.top_k = 1
    with torch.no_grad():  # the first or the second has the only logit above 0
        router.weight[1:] = torch.stack([-router.weight[0], *torch.zeros(2, 32)])
    _, own, _ = of_experts(model, batches)
    assert [bool(len(rows)) for rows in own] == [True, True, False, False]
    report = smooth(model, batches)
    names = [f"model.layers.0.mlp.experts.down_proj.{e}" for e in range(4)]
    assert report.left == dict.fromkeys(names[2:], "no token reached it")
    found = {name for one in report.inputs for name in one.names}
    assert found.issuperset(names[:2]) and found.isdisjoint(names[2:])


class Stacks(nn.Module):
    """Three experts by a layout, written out."""

    def __init__(self, layout: hybridq.moe.ExpertsLayout):
        super().__init__()
        torch.manual_seed(2)
        self.layout = layout
        width = 32 if layout.has_gate and len(layout.first) == 1 else 16
        self.shapes = dict.fromkeys(layout.first, (width, 32)) | {layout.down: (32, 16)}
        for name, (rows, cols) in self.shapes.items():
            shape = (3, cols, rows) if layout.is_transposed else (3, rows, cols)
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))
        for name in (*layout.first_biases, layout.down_bias):
            if name is not None:
                rows = 32 if name == layout.down_bias else width
                self.register_parameter(name, nn.Parameter(torch.randn(3, rows)))

    def product(self, x, name, bias, e):
        matrix = getattr(self, name)[e]
        y = x @ (matrix if self.layout.is_transposed else matrix.t())
        return y if bias is None else y + getattr(self, bias)[e]

    def forward(self, x, top, weights):
        layout, y = self.layout, torch.zeros_like(x)
        act = {"silu": nn.functional.silu, "relu": torch.relu, "gelu": torch.tanh}
        for e in range(3):
            tokens, place = (top == e).nonzero(as_tuple=True)
            made = [
                self.product(x[tokens], name, bias, e)
                for name, bias in zip(layout.first, layout.first_biases, strict=True)
            ]
            if not layout.has_gate:
                hidden = act[layout.activation](made[0])
            else:
                if len(made) == 1 and layout.is_concatenated:
                    made = made[0].chunk(2, -1)
                elif len(made) == 1:
                    made = [made[0][:, ::2], made[0][:, 1::2]]
                hidden = act[layout.activation](made[0]) * made[1]
            out = self.product(hidden, layout.down, layout.down_bias, e)
            y = y.index_add(0, tokens, weights[tokens, place, None] * out)
        return y


LAYOUTS = {
    "two names": hybridq.moe.ExpertsLayout(gate_up=("w1", "w3"), down="w2"),
    "alternating": hybridq.moe.ExpertsLayout(
        is_concatenated=False, is_transposed=True, gate_up_bias="b1", down_bias="b2"
    ),
    "no gate": hybridq.moe.ExpertsLayout(
        gate_up="up", gate_up_bias="b1", has_gate=False, activation="relu"
    ),
    "no way": hybridq.moe.ExpertsLayout(gate_up="up", has_gate=False, activation="gelu"),
}
KINDS = {name: type(f"Stacks{n}", (Stacks,), {}) for n, name in enumerate(LAYOUTS)}
for name, layout in LAYOUTS.items():
    hybridq.converters.register_experts(KINDS[name], layout)


class Mixture(nn.Module):
    """A norm, a router, experts, and perhaps a layer beside them that no table knows."""

    def __init__(self, kind: str, is_beside: bool = False):
        super().__init__()
        self.norm, self.router = nn.LayerNorm(32), nn.Linear(32, 3)
        self.experts = KINDS[kind](LAYOUTS[kind])
        self.beside = nn.Linear(32, 32) if is_beside else None

    def forward(self, x):
        y = self.norm(x)
        weights, top = self.router(y).softmax(-1).topk(2)
        made = self.experts(y, top, weights)
        return made if self.beside is None else made + self.beside(y)


class Wrong(Mixture):
    """Of which a table says too little."""

    def forward(self, x):
        y = self.norm(x)
        weights, top = self.router(y).softmax(-1).topk(2)
        return self.experts(y, top, weights) + self.beside(y) + self.other(y)


register_folds(Mixture, (Fold("norm", (), experts="experts", routers=("router",)),))


@pytest.mark.parametrize("kind", LAYOUTS)
def test_every_way_to_hold_experts_computes_what_it_did(kind):
    model, x = nn.Sequential(Mixture(kind)), torch.randn(40, 32) * torch.randn(32).exp()
    with torch.no_grad():
        model[0].norm.bias.normal_()
    want = copy.deepcopy(model).double()(x.double()).detach()
    report = smooth(model, [x], lambda _, name: name.endswith("experts"))
    hidden = [one for one in report.inputs if "experts" in one.names[0] and len(one.names) == 1]
    if kind == "no way":
        assert "no scale passes through its activation gelu" in report.left["0.experts.down_proj"]
    assert not report.left or kind == "no way"
    down = LAYOUTS[kind].down
    names = {one.names[0] for one in hidden}
    assert (f"0.experts.{down}.2" in names) == (kind != "no way")
    assert any(
        one.names == tuple(f"0.experts.{n}" for n in LAYOUTS[kind].first) for one in report.inputs
    )
    got = copy.deepcopy(model).double()(x.double()).detach()
    torch.testing.assert_close(got, want, rtol=0.0, atol=1e-6 * float(want.abs().max()))


def test_a_layer_beside_the_experts_that_the_table_does_not_name_keeps_the_norm_as_it_is():
    """The table names the layer, but not that another one multiplies the very same input."""
    register_folds(Wrong, (Fold("norm", ("beside",), experts="experts", routers=("router",)),))
    model, x = nn.Sequential(Wrong("two names", True)), torch.randn(40, 32)
    model[0].other = nn.Linear(32, 32)
    before = {name: one.clone() for name, one in model.state_dict().items()}
    report = smooth(model, [x], lambda _, name: name.endswith(("beside", "other", "experts")))
    for name in ("0.beside", "0.experts.w1", "0.experts.w3"):
        assert "they alone" in report.left[name]
    changed = [
        name for name, one in model.state_dict().items() if not torch.equal(one, before[name])
    ]
    assert sorted(changed) == ["0.experts.w2", "0.experts.w3"]  # the hidden values' own


def test_experts_that_are_quantized_are_named(mixtral):
    model, batches = mixtral
    only = hybridq.recipes.ByName([("*.gate_up_proj", RECIPE)], "bf16")
    hybridq.calibration.gptq(model, batches, only)
    report = smooth(model, batches)
    for name in ("gate_up_proj", "down_proj"):
        why = report.left[f"model.layers.0.mlp.experts.{name}"]
        assert why == "its gate_up_proj is quantized already"


def test_wrong_folds_are_refused():
    with pytest.raises(ValueError, match="experts and routers stand behind a 'norm'"):
        Fold("norm", (), "zero_centered_norm", experts="experts")
    with pytest.raises(ValueError, match="consumers must be a tuple"):
        Fold("norm", ())


def test_experts_over_ranks_and_shared_ones_are_named(monkeypatch):
    model = nn.Sequential(Mixture("two names"), Mixture("two names"))
    x, only = torch.randn(40, 32), lambda _, name: name.endswith("experts")
    with torch.no_grad():
        model[1].experts.w1 = model[0].experts.w1
    before = {name: one.clone() for name, one in model.state_dict().items()}
    report = smooth(model, [x], only)
    names = [f"{n}.experts.{name}" for n in (0, 1) for name in ("w1", "w3", "w2")]
    assert report.left == dict.fromkeys(names, "its w1 is another module's, too")
    model[1].experts.w1 = nn.Parameter(torch.randn(3, 16, 32))
    before["1.experts.w1"] = model[1].experts.w1.detach().clone()
    hybridq.convert(model, only)
    for block in model:  # as `parallelize_experts` leaves them
        monkeypatch.setitem(block.experts.__dict__, "exchange", object())
    found = [place for place in scaled_places(model) if place.consumers[0].expert is not None]
    assert not found
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())


def scaled_places(model: nn.Module) -> list[places.Place]:
    """The places of a model's products; those that are left say why."""
    made, left = places.places(model, hybridq.calibration.products(model))
    assert set(left.values()) == {
        "its experts are on several ranks; scale before they are dealt out"
    }
    return made


@pytest.mark.parametrize("shared", ["b1", "experts"])
def test_experts_with_a_part_that_another_block_has_too_are_left(shared):
    """A bias of up's would be divided by the scales of two; a module has two norms before it."""
    model, x = nn.Sequential(Mixture("alternating"), Mixture("alternating")), torch.randn(40, 32)
    with torch.no_grad():
        for block, ends in zip(model, ((-1, 1), (1, -1)), strict=True):
            block.norm.weight.copy_(torch.logspace(*ends, 32))
    if shared == "b1":
        model[1].experts.b1 = model[0].experts.b1
    else:
        model[1].experts = model[0].experts
    want = copy.deepcopy(model).double()(x.double()).detach()
    report = smooth(model, [x], lambda _, name: name.endswith("experts"))
    got = copy.deepcopy(model).double()(x.double()).detach()
    torch.testing.assert_close(got, want, rtol=0.0, atol=1e-6 * float(want.abs().max()))
    if shared == "b1":
        names = [f"{n}.experts.{name}" for n in (0, 1) for name in ("gate_up_proj", "down_proj")]
        assert report.left == dict.fromkeys(names, "its b1 is another module's, too")
    else:
        assert report.left == {"0.experts.gate_up_proj": "experts is in two places of the model"}
        assert {one.names[0] for one in report.inputs} == {
            f"0.experts.down_proj.{e}" for e in range(3)
        }
