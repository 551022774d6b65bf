"""Pushed weights are the planes of the trainer's forward, and give its logits, bit for bit."""

from __future__ import annotations

import copy
import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import hybridq
from hybridq import layouts
from hybridq.errors import RecipeError, SpecError
from hybridq.rollout import quantization_config, weights
from hybridq.storage import TensorStorage

#: Recipe, and a layout that gives its factors back exactly.
RECIPES = [
    ("mxfp8", "modelopt"),
    ("mxfp8", "compressed-tensors"),
    ("mxfp8", "fine-grained-fp8"),
    ("nvfp4", "modelopt"),
    ("nvfp4_1d_weight", "modelopt"),
    ("fp8_current", "modelopt"),
    ("fp8_current", "compressed-tensors"),
    ("fp8_block", "fine-grained-fp8"),
    ("mxfp8_fwd_nvfp4_bwd", "hybridq"),
]
#: dtype of the masters, and what torch.autocast makes of them.
MASTERS = [(torch.bfloat16, None), (torch.float32, torch.bfloat16), (torch.float32, None)]


@pytest.fixture(autouse=True)
def quiet():
    """That siblings have scales of their own is said once, and tested below."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hybridq.HybridQWarning)
        yield


class Model(nn.Module):
    """A model with a table, norms, linears and a head that stays as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 128)
        self.norm = nn.LayerNorm(128)
        self.up_proj = nn.Linear(128, 256)
        self.down_proj = nn.Linear(256, 128, bias=False)
        self.lm_head = nn.Linear(128, 40, bias=False)
        self.register_buffer("scale", torch.tensor([3.0]))
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        x = x + self.down_proj(torch.relu(self.up_proj(self.norm(x))))
        return self.lm_head(x) * self.scale


def trainer(dtype: torch.dtype) -> nn.Module:
    return hybridq.convert(Model()).to(dtype)


def stepped(model: nn.Module, recipe: str, cast: torch.dtype | None, ids: torch.Tensor) -> None:
    """One step of training, after which weights are no longer what anything was made of."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with inside(recipe, cast):
        loss = model(ids).float().square().mean()
    loss.backward()
    optimizer.step()


def inside(recipe, cast, **options):
    """What is in force around the trainer's forward."""
    from contextlib import ExitStack

    stack = ExitStack()
    stack.enter_context(hybridq.autocast(recipe=recipe, **options))
    casting = nullcontext() if cast is None else torch.autocast("cpu", cast)
    stack.enter_context(casting)
    return stack


def planes_of(pushed, layout):
    """The planes that a reader finds, by the names of weights."""
    one = layouts.get(layout)
    found = one.find({name: (t.dtype, tuple(t.shape)) for name, t in pushed.items()})
    return {name: weight.decode(pushed) for name, weight in found.items()}


def as_trained(plane, spec):
    """A reader's plane in the trainer's blocks: what `as_stored` has repeated, once."""
    own, new = plane.spec.format.block, spec.format.block
    buffers = dict(plane.buffers)
    if own is not None and new is not None:
        buffers["scale"] = plane.scale[:: new[0] // own[0], :: new[1] // own[1]].contiguous()
    return hybridq.Plane(spec, plane.direction, plane.rows, plane.cols, buffers)


@pytest.mark.thinned(1, few=3)
@pytest.mark.parametrize(("dtype", "cast"), MASTERS, ids=str)
@pytest.mark.parametrize(("recipe", "layout"), RECIPES, ids=str)
def test_planes_and_logits_are_the_trainers(recipe, layout, dtype, cast) -> None:
    model = trainer(dtype)
    ids = torch.arange(12).reshape(2, 6)
    stepped(model, recipe, cast, ids)
    # The planes that this forward multiplies with are kept by its modules.
    with inside(recipe, cast, is_first_microbatch=True):
        logits = model(ids)
        pushed = dict(weights(model, layout))
    assert {"embed.weight", "norm.weight", "up_proj.bias", "scale"} <= set(pushed)
    assert "cache" not in pushed and torch.equal(pushed["lm_head.weight"], model.lm_head.weight)
    server = copy.deepcopy(model)
    for name in ("up_proj", "down_proj"):
        module = model.get_submodule(name)
        kept = module._cached_weights[""].row
        spec = module.plan_of(hybridq.recipes.get(recipe)).weight.row.spec
        spec = hybridq.PlaneSpec.parse(spec)
        if layout == "hybridq":
            prefix = f"{name}.weight.rowwise."
            own = {key.removeprefix(prefix): t for key, t in pushed.items() if prefix in key}
            mine = hybridq.Plane(spec, "rowwise", *module.weight.shape, own)
        else:
            [found] = planes_of(pushed, layout)[f"{name}.weight"]
            mine = as_trained(found, spec)
        for buffer, one in zip(mine.buffers.values(), kept, strict=True):
            if buffer is not mine.buffers.get("amax"):
                assert torch.equal(buffer, one)
        theirs = hybridq.Plane(
            spec, "rowwise", mine.rows, mine.cols, zip(mine.buffers, kept, strict=True)
        )
        assert torch.equal(mine.dequantize(), theirs.dequantize())
        made = hybridq.QuantizedTensor.make(
            TensorStorage(mine, None), tuple(module.weight.shape), cast or dtype
        )
        server.get_submodule(name).weight = nn.Parameter(made, requires_grad=False)
    for name, value in server.state_dict(keep_vars=True).items():
        if not isinstance(value, hybridq.QuantizedTensor):
            value.data.copy_(pushed[name])
    with torch.no_grad(), inside(recipe, cast):
        assert torch.equal(server(ids), logits)
        plain = trainer(dtype)
        plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert not torch.equal(plain(ids), logits)


def test_values_of_fp32_masters_are_rounded_as_the_forward_rounds_them() -> None:
    """The FP32 value quantized by itself is another plane: what makes rollouts drift."""
    model = trainer(torch.float32)
    with inside("mxfp8", torch.bfloat16):
        aligned = dict(weights(model, "modelopt"))
    said = dict(weights(model, "modelopt", recipe="mxfp8", dtype=torch.bfloat16))
    other = dict(weights(model, "modelopt", recipe="mxfp8"))
    codes = "up_proj.weight"
    assert torch.equal(aligned[codes].view(torch.uint8), said[codes].view(torch.uint8))
    assert not torch.equal(aligned[codes].view(torch.uint8), other[codes].view(torch.uint8))


def test_quantized_parameters_are_pushed_without_a_copy() -> None:
    with hybridq.quantized_model_init("mxfp8"):
        model = hybridq.convert(nn.Sequential(nn.Linear(64, 32, dtype=torch.bfloat16)))
    pushed = dict(weights(model, "modelopt", recipe="mxfp8"))
    assert pushed["0.weight"].data_ptr() == model[0].weight.rowwise.data.data_ptr()
    # A recipe with other planes decodes them and encodes again, as its forward does.
    other = dict(weights(model, "modelopt", recipe="nvfp4"))
    [plane] = planes_of(other, "modelopt")["0.weight"]
    with torch.no_grad(), hybridq.autocast(recipe="nvfp4"):
        expected = model(torch.eye(64, dtype=torch.bfloat16))
    decoded = hybridq.quantize(model[0].weight.dequantize(), "nvfp4_16x16").rowwise
    assert torch.equal(plane.data, decoded.data) and expected.isfinite().all()


def test_delayed_scales_are_those_of_a_forward_now() -> None:
    model = trainer(torch.bfloat16)
    ids = torch.arange(8)[None]
    for _ in range(2):
        stepped(model, "fp8_delayed", None, ids)
    model.eval()
    with torch.no_grad(), hybridq.autocast(recipe="fp8_delayed", is_first_microbatch=True):
        model(ids)
        pushed = dict(weights(model, "modelopt"))
    [plane] = planes_of(pushed, "modelopt")["up_proj.weight"]
    codes, scale = model.up_proj._cached_weights[""].row
    assert torch.equal(plane.data, codes) and torch.equal(plane.scale, scale)


def test_the_recipe_must_be_known() -> None:
    model = trainer(torch.bfloat16)
    with pytest.raises(RecipeError, match="got 0 of earlier forwards"):
        weights(model, "modelopt")
    with hybridq.autocast(recipe="mxfp8"):
        model(torch.zeros(1, 2, dtype=torch.long))
    assert "up_proj.weight_scale" in dict(weights(model, "modelopt"))  # of the last forward
    with pytest.raises(TypeError, match=r"rollout.weights: model must be an nn.Module"):
        weights("model", "modelopt")


def test_what_no_reader_decodes_is_refused() -> None:
    model = trainer(torch.bfloat16)
    with pytest.raises(SpecError, match="quark cannot hold fp8_128x128"):
        weights(model, "quark", recipe="fp8_block")
    recipe = hybridq.CustomRecipe(lambda role: hybridq.NVFP4Quantizer(stochastic_rounding=True))
    with pytest.raises(SpecError, match="rounded stochastically, anew in every forward"):
        weights(model, "modelopt", recipe=recipe)


def test_siblings_with_scales_of_their_own_are_said() -> None:
    model = nn.ModuleDict({name: nn.Linear(64, 64) for name in ("q_proj", "k_proj", "v_proj")})
    model = hybridq.convert(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", hybridq.HybridQWarning)
        weights(model, "modelopt", recipe="mxfp8")
        with pytest.raises(hybridq.HybridQWarning, match=r"q_proj\.weight and k_proj\.weight"):
            weights(model, "modelopt", recipe="nvfp4")


def test_names_and_tied_weights() -> None:
    model = nn.Module()
    model.a = hybridq.Linear(32, 32, bias=False)
    model.b = hybridq.Linear(32, 32, bias=False)
    model.b.weight = model.a.weight
    pushed = dict(weights(model, "modelopt", recipe="mxfp8", rename=lambda name: f"model.{name}"))
    assert list(pushed) == ["model.a.weight", "model.a.weight_scale"]


def test_wrappers_adapters_and_inputs_that_are_scaled(caplog) -> None:
    model = trainer(torch.bfloat16)
    models = (model, torch.compile(model))
    pushed = [dict(weights(one, "modelopt", recipe="mxfp8")) for one in models]
    assert list(pushed[0]) == list(pushed[1]) and not caplog.text
    assert all(map(torch.equal, pushed[0].values(), pushed[1].values()))
    said = [quantization_config(one, "modelopt", recipe="mxfp8") for one in models]
    assert said[0] == said[1]
    model.down_proj.adapter_layer_names = ("lora_A",)
    model.down_proj.add_module("base_layer", hybridq.Linear(32, 32))
    dict(weights(model, "modelopt", recipe="mxfp8"))
    assert "down_proj and 0 more have adapters" in caplog.text
    model.up_proj.register_buffer("pre_quant_scale", torch.ones(128))
    with pytest.raises(hybridq.CheckpointError, match=r"up_proj\.pre_quant_scale"):
        weights(model, "modelopt", recipe="mxfp8")


def test_the_configuration_is_that_of_what_is_pushed() -> None:
    model = trainer(torch.bfloat16)
    made = quantization_config(model, "compressed-tensors", recipe="mxfp8", inputs="dynamic")
    assert made["ignore"] == ["lm_head"]
    assert made["config_groups"]["group_0"]["weights"]["group_size"] == 32
    assert layouts.detect({"quantization_config": made}, ()) is layouts.COMPRESSED_TENSORS


def test_modules_of_several_parts() -> None:
    """Weights of fused modules have the names of their parts."""
    model = nn.Module()
    model.mlp = hybridq.LayerNormMLP(64, 128)
    pushed = dict(weights(model, "modelopt", recipe="mxfp8"))
    assert {"mlp.fc1.weight", "mlp.fc1.weight_scale", "mlp.fc2.weight"} <= set(pushed)
    for name in ("fc1", "fc2"):
        [plane] = planes_of(pushed, "modelopt")[f"mlp.{name}.weight"]
        own = getattr(model.mlp, f"{name}_weight").detach()
        assert torch.equal(plane.data, hybridq.quantize(own, "mxfp8").rowwise.data)


def test_weights_that_a_model_keeps_as_in_by_out() -> None:
    """GPT-2's Conv1D: what is pushed is `[out, in]`, the plane that the forward multiplies with."""
    hf = pytest.importorskip("hf_models")
    model = hf.transformers.AutoModelForCausalLM.from_config(hf.config("gpt2")).bfloat16()
    model = hybridq.convert(model)
    with torch.no_grad(), hybridq.autocast(recipe="nvfp4", is_first_microbatch=True):
        model(hf.IDS)
        pushed = dict(weights(model, "modelopt"))
    module = model.get_submodule("transformer.h.0.attn.c_attn")
    assert module.holds_transposed and module.weight.shape == (64, 192)
    assert pushed["transformer.h.0.attn.c_attn.weight"].shape == (192, 32)
    with torch.no_grad():
        own = hybridq.quantize(module.weight.t().contiguous(), "nvfp4_16x16").rowwise
    assert torch.equal(pushed["transformer.h.0.attn.c_attn.weight"], own.data)
    for part, kept in module._cached_weights.items():
        assert part == "" and torch.equal(own.data, kept.row[0])


def test_a_part_made_for_one_rank_is_refused() -> None:
    model = nn.Sequential(hybridq.Linear(64, 128, tp_size=2, parallel_mode="column"))
    with pytest.raises(NotImplementedError, match=r"rollout\.weights: 0 is made for one rank of"):
        weights(model, "modelopt", recipe="mxfp8")
