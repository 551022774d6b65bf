"""`hybridq.recipe`: formats by GEMM, which are those of the factories that say the same."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import hybridq
from hybridq import recipes
from hybridq.formats import PlaneSpec, format
from hybridq.quantizers import DelayedScalingRequest, IdentityQuantizer, MXFP8Quantizer, quantizer
from hybridq.recipes import ByGemm, ByName, QuantizerRole, autocast, bind
from hybridq.recipes.recipe import recipe_by_key

SLOTS = ("input", "weight", "grad_output")
DECODED = "columnwise_source='rowwise_dequantized'"


def slots(recipe):
    return [recipes.get(recipe).quantizer(QuantizerRole("linear", slot)) for slot in SLOTS]


#: What is said of GEMMs, and the recipe whose factory says it slot by slot.
SAME = {
    "bf16": {"fprop": "bf16", "dgrad": "high_precision", "wgrad": "identity"},
    "mxfp8": {"fprop": "mxfp8", "dgrad": "MXFP8", "wgrad": format("mxfp8")},
    "fp8_current": {
        "fprop": "fp8",
        "weight": "fp8_e4m3",
        "input": "fp8",
        "grad_output": "fp8_e5m2",
    },
    "fp8_block": {
        "fprop": ("fp8_1x128", "fp8_128x128"),
        "dgrad": {"grad_output": "fp8_block", "weight": "fp8_128x128"},
        "wgrad": "fp8_1x128",
    },
    "nvfp4": {
        **dict.fromkeys(("fprop", "dgrad", "wgrad"), "nvfp4"),
        "stochastic_rounding": True,
        "with_rht": True,
        "with_2d_quantization": True,
    },
    "mxfp8_fwd_high_precision_bwd": {"fprop": "mxfp8"},
    "high_precision_fwd_mxfp8_bwd": {"dgrad": "mxfp8", "wgrad": "mxfp8"},
    "nvfp4_fwd_mxfp8_bwd": {"fprop": "nvfp4", "dgrad": "mxfp8", "wgrad": "mxfp8"},
    "mxfp8_fwd_nvfp4_bwd": {
        "fprop": "mxfp8",
        "dgrad": ({"format": "nvfp4", "stochastic_rounding": True}, "nvfp4"),
        "wgrad": ("nvfp4;sr;rht", PlaneSpec.parse("nvfp4;rht")),
    },
    "nvfp4_1d_weight": {
        "base": "nvfp4",
        "weight": {
            "rowwise": "nvfp4",
            "columnwise": "nvfp4",
            "columnwise_source": "rowwise_dequantized",
        },
    },
    "fp8_block_fwd_mxfp8_bwd": {
        "fprop": ("fp8_1x128", "fp8_128x128"),
        "dgrad": "mxfp8",
        "wgrad": "mxfp8",
    },
    "nvfp4_row_scaled_fwd_high_precision_bwd": {
        "fprop": ({"format": "nvfp4", "row_scaled_nvfp4": True}, "nvfp4")
    },
}


@pytest.mark.parametrize("name", SAME)
def test_formats_by_gemm_are_the_factories_quantizers(name):
    made = hybridq.recipe(**SAME[name])
    assert slots(made) == slots(name)
    assert hybridq.recipe(**made.arguments()) == made


@pytest.mark.parametrize("name", sorted({*recipes.names(), *SAME}))
def test_it_prints_as_the_call_that_makes_it(name):
    if name in ("fp8_delayed", "nvfp4_row_scaled_fwd_mxfp8_bwd"):
        return  # a quantizer is no text; another one for other modules
    made = ByGemm(*slots(name), precision="exact")
    assert eval(repr(made), {"recipe": hybridq.recipe}) == made
    assert len(repr(made)) < 220


@pytest.mark.parametrize(
    ("given", "slot", "expected"),
    [
        ({"input": ("mxfp8", "nvfp4")}, "input", f"mxfp8 | nvfp4, {DECODED}"),
        ({"weight": "mxfp6_e2m3"}, "weight", "mxfp6_e2m3"),
        ({"fprop": "mxfp8", "weight": {"columnwise": "nvfp4;rht"}}, "weight", "mxfp8 | nvfp4;rht"),
        ({"fprop": "mxfp8", "weight": {"columnwise_source": "original"}},
         "weight", "mxfp8 | identity"),
        ({"dgrad": "nvfp4", "grad_output": MXFP8Quantizer("e5m2")}, "grad_output", "mxfp8_e5m2"),
        ({"base": "nvfp4", "wgrad": {"input": "mxfp8"}}, "grad_output", "nvfp4;sr | nvfp4;sr;rht"),
        ({"wgrad": ("nvfp4", "bf16"), "with_rht": True}, "grad_output", "identity | nvfp4;rht"),
        ({"fprop": "mxfp8", "with_2d_quantization": True}, "weight",
         f"mxfp8_32x32 | identity, {DECODED}"),
        ({"fprop": {"input": {"format": "nvfp4", "nvfp4_use_4over6": True, "nvfp4_e4m3_max": 256}}},
         "input", f"nvfp4;bound=256;4o6=mae | identity, {DECODED}"),
        ({"weight": {"format": "fp8_e4m3", "force_pow_2_scales": True, "amax_epsilon": 1e-6}},
         "weight", "e4m3/tensor/fp32/amax/float8/pow2/eps=1e-06"),
        ({"input": ("bf16", {"format": "nvfp4", "with_rht": True, "with_random_sign_mask": False})},
         "input", "identity | nvfp4;rht=0000"),
    ],
)  # fmt: skip
def test_what_may_be_given(given, slot, expected):
    made = hybridq.recipe(**given)
    assert repr(made.quantizer(QuantizerRole("linear", slot))) == f"Quantizer({expected})"
    assert hybridq.recipe(**made.arguments()) == made


def test_an_option_is_for_what_is_named_and_says_nothing_of_it():
    made = hybridq.recipe(
        dgrad=({"format": "nvfp4", "stochastic_rounding": False}, "mxfp8"),
        wgrad="nvfp4",
        stochastic_rounding=True,
    )
    assert repr(made.grad_output) == "Quantizer(nvfp4 | nvfp4;sr)"
    assert not made.input.is_stochastic


def test_a_request_for_delayed_scaling_is_resolved_for_its_slot():
    request = DelayedScalingRequest(amax_history_len=4)
    made = hybridq.recipe(input=request, weight=request, grad_output=request)
    delayed = recipes.DelayedScaling(amax_history_len=4)
    assert slots(made) == slots(delayed) and bind(made).is_delayed
    half = hybridq.recipe(made, wgrad="bf16")
    assert half.grad_output.rowwise_delay == request and half.grad_output.columnwise_delay is None


def test_a_base_keeps_what_is_not_named_and_its_choices():
    base = recipes.get("nvfp4").with_choices(precision="exact")
    made = hybridq.recipe(base, wgrad="bf16", columnwise_source="original")
    assert (made.precision, made.columnwise_source) == ("exact", "original")
    assert made.weight == slots("nvfp4")[1]
    assert hybridq.recipe("nvfp4", precision="exact") == base
    assert hybridq.recipe(base, precision="auto") == recipes.get("nvfp4")


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({}, ValueError, "needs a format of some operand, or a base"),
        ({"fprop": 3}, TypeError, "fprop, input must be a format's name"),
        ({"fprop": "mxpf8"}, ValueError, "fprop, input: .*did you mean 'mxfp8'"),
        ({"fprop": ("mxfp8",)}, ValueError, r"a pair \(input, weight\), got \('mxfp8',\)"),
        (
            {"wgrad": {"weight": "mxfp8"}},
            ValueError,
            "a part of wgrad must be one of grad_output, in",
        ),
        ({"input": {"rowwize": "mxfp8"}}, ValueError, "did you mean 'rowwise'"),
        ({"input": {"format": "mxfp8", "with_rth": True}}, ValueError, "did you mean 'with_rht'"),
        (
            {"input": {"format": "mxfp8", "with_rht": 1}},
            ValueError,
            "with_rht must be a bool, got 1",
        ),
        (
            {"input": {"format": "nvfp4;sr", "with_rht": True}},
            ValueError,
            "must be a name where opt",
        ),
        (
            {"input": {"format": "mxfp8", "nvfp4_use_4over6": True}},
            ValueError,
            "input: .*four_over_si",
        ),
        (
            {"input": {"format": "nvfp4", "nvfp4_e4m3_max": 256}},
            ValueError,
            "belong to nvfp4_use_4over",
        ),
        ({"input": {"format": 3}}, ValueError, "'format' must be a format's name"),
        ({"fprop": "nvfp4", "stochastic_rounding": True}, ValueError, "needs a quantized operand"),
        ({"wgrad": "bf16", "with_rht": True}, ValueError, "got grad_output.columnwise, input.colu"),
        ({"fprop": "nvfp4", "with_rht": 1}, TypeError, "with_rht must be a bool, got 1"),
        ({"base": "mxfp4"}, ValueError, r"a format; hybridq.recipe\(fprop='mxfp4', "),
        ({"fprop": "mxfp8", "precision": "exakt"}, ValueError, "precision must be one of"),
        (
            {"base": ByName([("a", "bf16")], "mxfp8"), "wgrad": "bf16"},
            ValueError,
            "may depend on their names",
        ),
        (
            {"base": "nvfp4_row_scaled_fwd_mxfp8_bwd", "wgrad": "bf16"},
            ValueError,
            "may depend on their types",
        ),
    ],
)
def test_what_may_not(given, error, message):
    with pytest.raises(error, match=message):
        hybridq.recipe(**given)


def test_slots_are_quantizers():
    with pytest.raises(TypeError, match="weight must be a Quantizer, got str"):
        ByGemm(MXFP8Quantizer(), "mxfp8", MXFP8Quantizer())


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda r: pickle.loads(pickle.dumps(r))])
def test_it_is_a_value(copier):
    one = hybridq.recipe(fprop="mxfp8", dgrad="nvfp4", wgrad="bf16")
    two = hybridq.recipe(wgrad="bf16", dgrad="nvfp4", fprop=("mxfp8", "mxfp8"))
    other = hybridq.recipe(fprop="mxfp8", dgrad="nvfp4;sr", wgrad="bf16")
    assert one == two and one.key == two.key and hash(one) == hash(two)
    assert other != one and other.key != one.key
    assert copier(one) == one and recipe_by_key(one.key) == one
    assert one.with_precision("exact").precision == "exact"
    assert not one.reads_names


def _step(layer, x, recipe):
    layer.zero_grad()
    x = x.clone().requires_grad_()
    with autocast(recipe=recipe):
        y = layer(x)
    y.backward(torch.linspace(-1, 1, y.numel()).view_as(y))
    return y.detach(), x.grad, layer.weight.grad.clone()


def _by_hand(role):
    if role.tensor_type == "grad_output":
        return quantizer("nvfp4", "identity")
    if role.tensor_type == "weight":
        return quantizer("mxfp8", "nvfp4", columnwise_source="rowwise_dequantized")
    return quantizer("mxfp8", "identity", columnwise_source="rowwise_dequantized")


def test_each_gemm_multiplies_the_formats_that_it_was_given():
    torch.manual_seed(0)
    layer, x = hybridq.Linear(64, 48), torch.randn(40, 64)
    recipe = hybridq.recipe(fprop="mxfp8", dgrad="nvfp4", wgrad="bf16")
    found = _step(layer, x, recipe)
    expected = _step(layer, x, hybridq.CustomRecipe(_by_hand))
    assert all(map(torch.equal, found, expected))
    plain = _step(layer, x, "bf16")
    assert not any(map(torch.equal, found, plain))  # the input of wgrad is the decoded one
    schedule = hybridq.RecipeSchedule([(0, recipe), (5, "mxfp8")])
    named = ByName([("*", recipe)], default="bf16")
    for source in (schedule, named):
        assert all(map(torch.equal, _step(layer, x, source), found))


def test_it_is_compiled_and_takes_a_precision():
    layer, x = hybridq.Linear(64, 32), torch.randn(32, 64)
    recipe = hybridq.recipe("mxfp8", wgrad="bf16")

    def forward(x):
        with autocast(recipe=recipe, precision="exact"):
            return layer(x)

    compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), forward(x))


def test_a_name_of_either_kind_is_taken_at_both_doors():
    for recipe, fmt in (("fp8_current", "fp8"), ("fp8_block", "fp8_1x128")):
        assert recipes.get(fmt) == recipes.get(recipe)
        assert format(recipe) == format(fmt)
    assert recipes.get("identity") == recipes.get("bf16") == recipes.get("High_Precision")
    assert format("high_precision").is_identity
    assert hybridq.recipe(weight="high_precision").weight == IdentityQuantizer()
    assert set(recipes.names()).isdisjoint({"fp8", "fp8_1x128", "identity"})
