"""quantize_model: forwards that are quantized without a context, from one plane of each weight."""

from __future__ import annotations

import copy
import pickle
import weakref

import pytest
import torch
from torch import nn

import hybridq
from hybridq.calibration import Calibration, gptq
from hybridq.errors import HybridQWarning
from hybridq.formats import PlaneSpec
from hybridq.moe import ExpertsLayout, convert_experts
from hybridq.nn.weights import quantized_init
from hybridq.recipes import ByName, CustomRecipe, names
from hybridq.tensor import is_quantized
from module_matrix import CASES
from oracle.bridge import expected, oracle_spec
from oracle.planes import decode
from own_experts import OwnExperts, routing

X = torch.linspace(-3, 3, 5 * 64).reshape(5, 64)
QUANTIZED = [name for name in names() if name not in ("bf16", "high_precision")]


def seen(**amaxes: float) -> Calibration:
    """What a calibration may have found of the inputs of these modules."""
    found = {name: {"input": torch.tensor(value)} for name, value in amaxes.items()}
    return Calibration(found, dict.fromkeys(amaxes, torch.tensor(1)), {"input": "max"})


def make(dtype: torch.dtype = torch.bfloat16) -> nn.ModuleDict:
    torch.manual_seed(0)
    named = {"up": nn.Linear(64, 96), "down": nn.Linear(96, 64), "lm_head": nn.Linear(64, 8)}
    return nn.ModuleDict(named).to(dtype)


def run(model: nn.ModuleDict, x: torch.Tensor = X) -> torch.Tensor:
    x = x.to(model["up"].bias.dtype)
    return model["lm_head"](model["down"](torch.relu(model["up"](x))))


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_a_plain_call_has_the_bits_of_the_recipe(recipe: str) -> None:
    plain, reference = make(), hybridq.convert(make())
    model = hybridq.quantize_model(make(), recipe)
    y = run(model)
    same = "fp8_current" if recipe == "fp8_delayed" else recipe  # no history is taken
    with torch.no_grad(), hybridq.autocast(recipe=same):
        want = run(reference)
    assert torch.equal(y, want)
    is_changed = recipe != "high_precision_fwd_mxfp8_bwd"
    assert torch.equal(y, run(plain)) is not is_changed
    for name in ("up", "down"):
        weight = model[name].weight
        assert is_quantized(weight) is is_changed and not weight.requires_grad
        if is_changed:
            assert weight.get_usages() == {"rowwise": True, "columnwise": False}
    assert type(model["lm_head"]) is nn.Linear and not model.training


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("recipe", ["nvfp4_1d_weight", "fp8_current"])
def test_every_module_runs_under_its_own_recipe(name: str, recipe: str) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    module = case.make().eval()
    x, _ = case.data()
    with torch.no_grad(), hybridq.autocast(recipe=recipe):
        want = module(x)
    with torch.no_grad():
        plain = module(x)
    hybridq.quantize_model(module, recipe)
    y = module(x)
    assert torch.equal(y, want) and not torch.equal(y, plain)


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4_1d_weight", "fp8_current"])
def test_experts_are_held_as_one_plane(is_transposed: bool, recipe: str) -> None:
    layout = ExpertsLayout(is_transposed=is_transposed)
    torch.manual_seed(0)
    experts = convert_experts(OwnExperts(layout, torch.bfloat16, (5, 64, 96)), layout)
    indices, weights = routing(31)
    given = (torch.randn(31, 64).bfloat16(), indices, weights.bfloat16())
    with torch.no_grad(), hybridq.quantized_model_init(recipe, frozen=True):
        twin = copy.deepcopy(experts)
        twin.quantize_initial_weights()
        with hybridq.autocast(recipe=recipe):
            want = twin(*given)
        plain = experts(*given)
    hybridq.quantize_model(experts, recipe)
    y = experts(*given)
    assert torch.equal(y, want) and not torch.equal(y, plain)
    assert is_quantized(experts.gate_up_proj) and is_quantized(experts.down_proj)


FP8, NVFP4 = PlaneSpec.parse("fp8"), PlaneSpec.parse("nvfp4")


@pytest.mark.parametrize("spec", [FP8, NVFP4], ids=str)
@pytest.mark.parametrize("amax", [3.0, 0.7, 1000.0])
def test_a_static_scale_is_that_of_the_calibrations_amax(spec: PlaneSpec, amax: float) -> None:
    """The weight is the identity in high precision, so the result is the decoded input itself."""
    quantizer = hybridq.Quantizer(spec, None)

    def inputs_only(role):
        return quantizer if role.tensor_type == "input" else hybridq.IdentityQuantizer()

    recipe = CustomRecipe(inputs_only, backward_override="high_precision")
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(64))
    hybridq.quantize_model(model, recipe, seen(**{"0": amax}))
    x = X.clone()
    x[0, 0], x[1] = 50.0, 0.0  # beyond every amax but the last, and a row of zeros
    buffers = expected(x, spec, stat=amax)
    want = torch.from_numpy(decode(buffers, oracle_spec(spec), *x.shape))
    assert torch.equal(model(x), want)
    hybridq.quantize_model(model, recipe)  # dynamic again
    own = torch.from_numpy(decode(expected(x, spec), oracle_spec(spec), *x.shape))
    assert torch.equal(model(x), own) and not torch.equal(own, want)


@pytest.mark.parametrize("recipe", ["fp8_current", "nvfp4", "fp8_delayed"])
def test_static_and_dynamic_agree_where_the_amax_is_the_tensors(recipe: str) -> None:
    """Static scales of the very input's amaxes have the bits of dynamic ones."""
    dynamic = hybridq.quantize_model(make(), recipe)
    y = run(dynamic)
    inner = torch.relu(dynamic["up"](X.bfloat16()))
    found = seen(up=float(X.bfloat16().abs().max()), down=float(inner.abs().max()))
    static = hybridq.quantize_model(make(), recipe, found)
    assert torch.equal(run(static), y)
    assert not torch.equal(run(static, 2 * X), run(dynamic, 2 * X)), "what is larger saturates"
    assert list(static.state_dict()) == list(make().state_dict()), "no keys beside the weights'"


def test_a_recipe_by_name_leaves_some_modules_alone() -> None:
    recipe = ByName([("down", "bf16")], default="nvfp4_1d_weight")
    model = hybridq.quantize_model(make(), recipe, seen(up=3.0))  # no amax of "down" is missed
    assert is_quantized(model["up"].weight) and not is_quantized(model["down"].weight)
    assert model["up"].static_amax("") is not None and model["down"].static_amax("") is None
    hidden = torch.relu(model["up"](X.bfloat16()))
    assert torch.equal(model["down"](hidden), nn.Linear.forward(model["down"], hidden))
    torch._dynamo.reset()
    compiled = torch.compile(model["up"], fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(X.bfloat16()), model["up"](X.bfloat16()))


def test_static_scales_go_along_and_stay_in_fp32() -> None:
    model = hybridq.quantize_model(make(), "fp8_current", seen(up=2.7182817, down=3.0))
    want = run(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model.half().bfloat16()):
        amax = other["up"].static_amax("")
        assert amax.dtype == torch.float32 and amax.item() == torch.tensor(2.7182817).item()
        assert torch.equal(run(other), want)


@pytest.mark.parametrize("recipe", ["fp8_current", "nvfp4_1d_weight"])
def test_experts_take_one_static_scale_for_a_projection(recipe: str) -> None:
    layout = ExpertsLayout()
    torch.manual_seed(0)
    model = nn.ModuleDict({"experts": convert_experts(OwnExperts(layout, torch.bfloat16), layout)})
    given = (torch.randn(31, 48).bfloat16(), *routing(31))
    hybridq.quantize_model(model, recipe)
    dynamic = model["experts"](*given)
    hybridq.quantize_model(
        model, recipe, seen(**{"experts.gate_up_proj": 5.0, "experts.down_proj": 9.0})
    )
    static = model["experts"](*given)
    assert not torch.equal(static, dynamic)
    first = model["experts"](given[0][:1], given[1][:1], given[2][:1])
    assert torch.equal(first, static[:1]), "no token's scale depends on the others"


def test_activations_may_stay_in_high_precision() -> None:
    model = hybridq.quantize_model(make(), "nvfp4", activations="high_precision")
    with hybridq.quantized_model_init("nvfp4", frozen=True):
        frozen = hybridq.convert(make())
    assert torch.equal(run(model), run(frozen)), "the product of the planes, as without a recipe"
    exact = hybridq.quantize_model(make(torch.float32), "nvfp4", activations="high_precision")
    decoded = make(torch.float32)
    decoded.load_state_dict(hybridq.dequantized_state_dict(exact))
    torch.testing.assert_close(run(exact), run(decoded))
    assert not torch.equal(run(exact), run(make(torch.float32)))


def test_what_the_calibration_misses_is_said() -> None:
    with pytest.warns(HybridQWarning, match="no input amax of 1 modules.*dynamic: down"):
        hybridq.quantize_model(make(), "nvfp4", seen(up=1.0))
    with pytest.warns(HybridQWarning, match="takes a static scale"):
        hybridq.quantize_model(make(), "mxfp8_fwd_high_precision_bwd", seen(up=1.0))
    with pytest.warns(HybridQWarning, match="dynamic: down"):
        hybridq.quantize_model(make(), "fp8_block_fwd_mxfp8_bwd", None)  # wants none
        hybridq.quantize_model(make(), "fp8_current", seen(up=1.0, down=float("-inf")))
    with pytest.raises(ValueError, match=r"finite and not negative, got inf for the input of up"):
        hybridq.quantize_model(make(), "nvfp4", seen(up=float("inf"), down=1.0))


def test_a_backward_is_an_error() -> None:
    model = hybridq.quantize_model(make(), "mxfp8")
    assert not run(model).requires_grad, "nothing is kept for a backward"
    x = X.bfloat16().requires_grad_()
    with pytest.raises(RuntimeError, match=r"quantize_model has no backward.*frozen=True"):
        run(model, x).sum().backward()
    model.train()
    with pytest.raises(RuntimeError, match=r"in training mode with gradients; call model.eval"):
        run(model)
    with torch.no_grad():
        run(model)


def test_another_context_does_not_change_the_recipe() -> None:
    model = hybridq.quantize_model(make(), "mxfp8")
    want = run(model)
    with (
        pytest.warns(HybridQWarning, match="keep it"),
        hybridq.autocast(recipe="nvfp4"),
        torch.no_grad(),
    ):
        assert torch.equal(run(model), want)


def test_planes_that_fit_are_kept_and_others_are_made_again() -> None:
    model = hybridq.quantize_model(make(), "nvfp4_1d_weight")
    chosen = model["up"].weight  # as if another rule had chosen its codes
    chosen.rowwise.data.bitwise_xor_(1)
    codes = chosen.rowwise.data.clone()
    hybridq.quantize_model(model, "nvfp4_1d_weight")
    assert model["up"].weight is chosen and torch.equal(chosen.rowwise.data, codes)
    values = chosen.dequantize()
    with pytest.warns(HybridQWarning, match=r"decoded and quantized again: up.weight, down.weight"):
        hybridq.quantize_model(model, "mxfp8")
    want = hybridq.quantize(values, "mxfp8")
    assert torch.equal(model["up"].weight.rowwise.data, want.rowwise.data)


def test_planes_that_gptq_chose_are_served() -> None:
    recipe, batches = hybridq.recipe(fprop="nvfp4"), [torch.randn(32, 64) for _ in range(3)]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64))
    gptq(model, batches, recipe)
    weights = [model[0].weight, model[2].weight]
    codes = [one.rowwise.data.clone() for one in weights]
    hybridq.quantize_model(model, recipe, hybridq.calibrate(model, batches))
    assert model[0].weight is weights[0] and model[2].weight is weights[1]
    assert all(map(torch.equal, (one.rowwise.data for one in weights), codes))
    assert all(one.static_amax("") is not None for one in (model[0], model[2]))


def test_trained_weights_keep_their_rowwise_plane_alone() -> None:
    with hybridq.quantized_model_init("mxfp8"):
        model = hybridq.convert(make())
    rows = model["up"].weight.rowwise.data
    assert model["up"].weight.columnwise is not None
    hybridq.quantize_model(model, "mxfp8")
    assert model["up"].weight.columnwise is None
    assert model["up"].weight.rowwise.data is rows


def test_a_model_that_was_converted_before_is_quantized_without_a_warning(recwarn) -> None:
    model = hybridq.quantize_model(hybridq.convert(make()), "mxfp8")
    assert all(is_quantized(model[name].weight) for name in ("up", "down"))
    assert not [one for one in recwarn if issubclass(one.category, HybridQWarning)]
    converted = hybridq.convert(make())
    with hybridq.quantized_model_init("mxfp8"), pytest.warns(HybridQWarning, match="before"):
        hybridq.convert(converted)  # the warning is given once, and was not used up


def test_there_is_one_weight_in_both_precisions_at_a_time(monkeypatch) -> None:
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(6)))
    originals = [weakref.ref(one.weight) for one in model]
    alive = []
    own = quantized_init._quantized

    def counted(weight, *rest):
        made = own(weight, *rest)
        alive.append(sum(one() is not None for one in originals))
        return made

    monkeypatch.setattr(quantized_init, "_quantized", counted)
    hybridq.quantize_model(model, "mxfp8")
    assert alive == [6, 5, 4, 3, 2, 1]


def test_what_stays_is_left_and_said() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(8, 64), "head": nn.Linear(64, 8, bias=False)})
    model["head"].weight = model["embed"].weight
    model["up"] = nn.Linear(64, 64)
    model["conv"] = nn.Conv2d(8, 16, 4, stride=4)
    hybridq.quantize_model(model, "mxfp8")
    assert not is_quantized(model["head"].weight) and is_quantized(model["up"].weight)
    x = torch.randn(2, 8, 8, 8)
    assert not torch.equal(model["conv"](x), nn.Conv2d.forward(model["conv"], x)), "in each forward"
    found = hybridq.summary(model)
    states = {one.name: (one.state, one.formats) for one in found.modules}
    assert states["up"] == ("converted", (("input", "mxfp8"), ("weight", "mxfp8")))
    assert states["head"][0] == "left alone"


def test_the_summary_names_recipe_and_static_scales() -> None:
    model = hybridq.quantize_model(make(), "nvfp4", seen(up=1.0, down=1.0))
    found = hybridq.summary(model)
    assert "NVFP4BlockScaling" in found.recipe
    assert dict(found.modules[0].formats)["input"] == "nvfp4 static"


def test_state_dicts_go_from_one_model_to_another() -> None:
    model = hybridq.quantize_model(make(), "nvfp4")
    other = make()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(3)
    hybridq.quantize_model(other, "nvfp4")
    other.load_state_dict(model.state_dict())
    assert torch.equal(run(other), run(model))
    make().load_state_dict(hybridq.dequantized_state_dict(model))


@pytest.mark.parametrize("recipe", ["fp8_current", "nvfp4"])
def test_static_scales_are_saved_and_loaded(recipe: str, tmp_path) -> None:
    """Into a model that has no calibration, through a file; its bits are those of the first."""
    model = hybridq.quantize_model(make(), recipe, seen(up=2.7182817, down=3.0))
    torch.save(hybridq.state_dict_with_history(model), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    keys = {f"{name}.static_scaling.input_amax" for name in ("up", "down")}
    assert keys == state.keys() - make().state_dict().keys()
    other = make()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(3)
    hybridq.quantize_model(other, recipe)
    run(other)  # its dynamic plan is known
    assert not other.load_state_dict(state).unexpected_keys
    assert other["up"].static_amax("").item() == torch.tensor(2.7182817).item()
    assert torch.equal(run(other), run(model)) and torch.equal(run(other, 9 * X), run(model, 9 * X))
    assert hybridq.state_dict_with_history(other).keys() == state.keys()
    # What says nothing of them leaves them; who cannot take them says so.
    other.load_state_dict(model.state_dict())
    assert other["down"].static_amax("").item() == 3.0
    with pytest.raises(RuntimeError, match=r"Unexpected key.*up\.static_scaling\.input_amax"):
        hybridq.convert(make()).load_state_dict(
            hybridq.dequantized_state_dict(model) | {key: state[key] for key in keys}
        )
    mx = hybridq.quantize_model(make(), "mxfp8")
    with pytest.raises(RuntimeError, match="takes no static scale there"):
        mx.load_state_dict({key: state[key] for key in keys}, strict=False)
    for wrong in (torch.tensor([-1.0]), torch.ones(2), torch.tensor([torch.nan])):
        with pytest.raises(RuntimeError, match=r"must be FP32 \[1\], finite and not negative"):
            other.load_state_dict({**state, "up.static_scaling.input_amax": wrong})


def test_static_scales_of_parts_are_saved(tmp_path) -> None:
    made = lambda: nn.ModuleDict({"mlp": hybridq.LayerNormMLP(64, 96).bfloat16()})  # noqa: E731
    torch.manual_seed(0)
    model = made()
    found = hybridq.calibrate(model["mlp"], [X.bfloat16()])
    hybridq.quantize_model(model["mlp"], "nvfp4", found)
    state = hybridq.state_dict_with_history(model)
    other = made()
    hybridq.quantize_model(other, "nvfp4")
    other.load_state_dict(state)
    for part in ("fc1", "fc2"):
        assert other["mlp"].static_amax(part) == model["mlp"].static_amax(part) > 0
    assert torch.equal(other["mlp"](X.bfloat16()), model["mlp"](X.bfloat16()))


@torch.no_grad()
def test_torchs_encoder_calls_its_children() -> None:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    model = nn.TransformerEncoder(layer, 1).eval()
    x = torch.randn(2, 7, 64)
    plain = model(x)
    twin = hybridq.convert(copy.deepcopy(model))
    hybridq.quantize_model(model, "mxfp8")
    with hybridq.autocast(recipe="mxfp8"):
        want = twin(x)
    y = model(x)
    assert torch.equal(y, want) and not torch.equal(y, plain)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((nn.Linear, "mxfp8"), TypeError, "model must be an nn.Module"),
        ((make(), "mxfp9"), ValueError, "mxfp8"),
        ((make(), 3), TypeError, "recipe"),
        ((make(), "fp8", {"up": 1.0}), TypeError, "Calibration or the path of its file, got dict"),
    ],
)
def test_wrong_arguments(arguments, error, text) -> None:
    with pytest.raises(error, match=text):
        hybridq.quantize_model(*arguments)


def test_wrong_options() -> None:
    with pytest.raises(ValueError, match="activations must be one of quantized, high_precision"):
        hybridq.quantize_model(make(), "mxfp8", activations="quantised")
    with pytest.raises(ValueError, match="a calibration is of inputs that are quantized"):
        hybridq.quantize_model(make(), "fp8", seen(), activations="high_precision")


def test_what_cannot_be_quantized_is_named_before_any_weight_is() -> None:
    """The weights before it were planes when the error came, and nobody had their values."""

    def factory(role):
        if role.name == "2":
            raise KeyError("no such layer")
        return hybridq.quantizer("mxfp8")

    inf = hybridq.calibrate(nn.ModuleList([nn.Linear(64, 64)])[0], [X])
    inf.amaxes[""]["input"].fill_(torch.inf)
    recipe = hybridq.CustomRecipe(factory)
    for last, arguments, error, text in (
        (torch.float64, ("mxfp8",), TypeError, r"got torch.float64 of 2.weight; cast it, or leave"),
        (torch.float32, (recipe,), hybridq.RecipeError, "slot 'input' of 2"),
        (torch.float32, ("fp8", inf), ValueError, "finite and not negative, got inf"),
    ):
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(2)), nn.Linear(64, 64, dtype=last))
        before = {name: value.clone() for name, value in model.state_dict().items()}
        for converted in (False, True):
            model = hybridq.convert(model) if converted else model
            with pytest.raises(error, match=text):
                hybridq.quantize_model(model, *arguments)
            for name, value in model.state_dict().items():
                assert type(value) is torch.Tensor and torch.equal(value, before[name]), name
            assert model.training and all(one.requires_grad for one in model.parameters())
    wide = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64, dtype=torch.float64))
    hybridq.quantize_model(wide, "mxfp8", filter_fn=lambda _, name: name == "0")
    assert type(wide[0].weight).__name__ == "MXFP8Tensor" and wide[1].weight.dtype == torch.float64


def test_a_calibration_of_the_model_covers_all_of_it(tmp_path) -> None:
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64))
    twin = copy.deepcopy(model)
    found = hybridq.calibrate(model, [X])
    found.save(tmp_path / "amaxes.safetensors")
    hybridq.quantize_model(model, "nvfp4", found)
    hybridq.quantize_model(twin, "nvfp4", tmp_path / "amaxes.safetensors")
    assert all(one.static_amax("") is not None for one in (model[0], model[2]))
    assert torch.equal(model(X), twin(X))


def test_a_weight_of_several_groups_is_quantized_by_group() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        hybridq.GroupedLinear(3, 64, 48, single_grouped_weight=True, dtype=torch.bfloat16)
    )
    plain, x = copy.deepcopy(model), torch.randn(10, 64).bfloat16()
    hybridq.quantize_model(model, "nvfp4")
    assert model[0].weight.tensor_storage.count == 3
    with hybridq.autocast(recipe="nvfp4"), torch.no_grad():
        assert torch.equal(model[0](x, [4, 0, 6]), plain[0](x, [4, 0, 6]))
