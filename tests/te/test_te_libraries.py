"""Libraries that import Transformer Engine themselves, with the door in its place."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest
import torch

import hybridq
import hybridq.te as te

ACCELERATE = """
import torch
import hybridq, hybridq.te
hybridq.te.stand_in()
from accelerate import Accelerator
from accelerate.utils import transformer_engine as theirs
from accelerate.utils import dataclasses
dataclasses.is_transformer_engine_available = lambda: True
theirs.is_transformer_engine_available = lambda: True
import transformer_engine.pytorch as te

Accelerator(cpu=True)
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(64, 96), torch.nn.LayerNorm(96), torch.nn.GELU(), torch.nn.Linear(96, 32)
)
x = torch.randn(16, 64)
want = model(x)
with torch.no_grad():
    theirs.convert_model(model)
assert [type(one) for one in model] == [te.Linear, te.LayerNorm, torch.nn.GELU, te.Linear]
assert theirs.has_transformer_engine_layers(model)
assert torch.allclose(model(x), want, atol=1e-5)

torch.manual_seed(0)
own = torch.nn.Sequential(hybridq.Linear(64, 96), torch.nn.LayerNorm(96), torch.nn.GELU(),
                          hybridq.Linear(96, 32))
own.load_state_dict({
    key.replace("layer_norm_", ""): value for key, value in model.state_dict().items()
})
handler = dataclasses.TERecipeKwargs(fp8_format="HYBRID", amax_history_len=16, margin=1)
theirs.apply_fp8_autowrap(model, handler)
model.train()
recipe = hybridq.recipes.DelayedScaling(margin=1, amax_history_len=16)
got = model(x)
with hybridq.autocast(recipe=recipe):
    right = own(x)
assert torch.equal(got, right) and not torch.equal(got, want)
got.sum().backward()
assert model[0].weight.grad is not None
model.eval()
assert torch.allclose(model(x), want, atol=1e-5)  # not during evaluation
"""


@pytest.mark.more
def test_accelerate_converts_and_wraps_a_model() -> None:
    pytest.importorskip("accelerate")
    done = subprocess.run(
        [sys.executable, "-c", ACCELERATE], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_layers_replaced_as_lightnings_plugin_does() -> None:
    """Its way, in own words: layers of a model are made anew, forwards run under `fp8_autocast`."""
    model = torch.nn.Sequential(torch.nn.Linear(32, 48), torch.nn.LayerNorm(48))
    with te.fp8_model_init(enabled=False):
        for name, child in list(model.named_children()):
            if isinstance(child, torch.nn.Linear):
                made = te.Linear(child.in_features, child.out_features, bias=child.bias is not None)
            else:
                made = te.LayerNorm(child.normalized_shape[0], eps=child.eps)
            made.weight.data.copy_(child.weight.data)
            made.bias.data.copy_(child.bias.data)
            setattr(model, name, made)
    recipe = te.common.recipe.DelayedScaling(amax_history_len=4, amax_compute_algo="max")
    x = torch.randn(4, 32)
    with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
        y = model(x)
    with hybridq.autocast(recipe=hybridq.recipes.DelayedScaling(amax_history_len=4)):
        plain = hybridq.Linear(32, 48)
        plain.load_state_dict(model[0].state_dict())
        want = torch.nn.functional.layer_norm(plain(x), (48,), model[1].weight, model[1].bias)
    assert torch.allclose(y, want, atol=1e-5)


LIGHTNING = """
import torch
import hybridq, hybridq.te
hybridq.te.stand_in()
import lightning_fabric.plugins.precision.transformer_engine as theirs
theirs._TRANSFORMER_ENGINE_AVAILABLE = True  # it asks for an installed package by its version
from lightning_fabric import Fabric
import transformer_engine.pytorch as te

own = {"fp8_format": "HYBRID", "amax_history_len": 4, "margin": 1}
plugin = theirs.TransformerEnginePrecision(
    weights_dtype=torch.float32, recipe=own, replace_layers=True
)
fabric = Fabric(accelerator="cpu", devices=1, plugins=plugin)
fabric.launch()
torch.manual_seed(0)
layers = (torch.nn.Linear(32, 48), torch.nn.LayerNorm(48), torch.nn.GELU(), torch.nn.Linear(48, 16))
plain = torch.nn.Sequential(hybridq.Linear(32, 48), torch.nn.LayerNorm(48), torch.nn.GELU(),
                            hybridq.Linear(48, 16))
plain.load_state_dict(torch.nn.Sequential(*layers).state_dict())
model = torch.nn.Sequential(*layers)
model = fabric.setup_module(model)  # new layers, so the optimizer comes after
optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
assert [type(one) for one in model.module] == [te.Linear, te.LayerNorm, torch.nn.GELU, te.Linear]
other = torch.optim.SGD(plain.parameters(), lr=0.1)
recipe = hybridq.recipes.DelayedScaling(margin=1, amax_history_len=4)
for step in range(4):
    x = torch.randn(16, 32)
    got = model(x)
    fabric.backward(got.square().mean())
    with hybridq.autocast(recipe=recipe):
        want = plain(x)
    want.square().mean().backward()
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    if step == 0:
        assert not torch.allclose(got, torch.nn.Sequential(*layers)(x), rtol=1e-4, atol=1e-4)
    for one in (optimizer, other):
        one.step()
        one.zero_grad()
with fabric.init_module():
    assert type(torch.nn.Linear(32, 16)) is te.Linear
"""


@pytest.mark.slow
def test_lightnings_own_plugin_trains_a_model() -> None:
    pytest.importorskip("lightning_fabric")
    done = subprocess.run(
        [sys.executable, "-c", LIGHTNING], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_package_that_is_there_is_not_replaced() -> None:
    with pytest.raises(ImportError, match="stand_in: torch must not be installed"):
        te.stand_in("torch")


@pytest.mark.parametrize("fused", [True, False])
def test_checkpoints_of_transformer_engine_are_loaded(fused: bool) -> None:
    """Their keys: an `_extra_state` in each module, and queries, keys and values by themselves."""
    torch.manual_seed(0)
    make = {"fuse_qkv_params": fused, "hidden_dropout": 0.0, "attention_dropout": 0.0}
    layer = te.TransformerLayer(32, 64, 4, num_gqa_groups=2, **make)
    saved = layer.state_dict()
    if not fused:
        for kind in ("weight", "bias"):
            whole = saved.pop(f"self_attention.layernorm_qkv.{kind}")
            for name, part in zip(
                ("query", "key", "value"), whole.split([32, 16, 16]), strict=True
            ):
                saved[f"self_attention.layernorm_qkv.{name}_{kind}"] = part
    extra = ("layernorm_qkv", "core_attention", "proj")
    saved |= {f"self_attention.{name}._extra_state": torch.empty(0) for name in extra}
    saved["layernorm_mlp._extra_state"] = None
    other = te.TransformerLayer(32, 64, 4, num_gqa_groups=2, **make)
    other.load_state_dict(saved)
    x = torch.randn(5, 2, 32)
    assert torch.equal(other(x), layer(x))
    linear = te.Linear(8, 8)
    linear.load_state_dict({**te.Linear(8, 8).state_dict(), "_extra_state": torch.empty(0)})
    with pytest.raises(RuntimeError, match="Unexpected key"):
        linear.load_state_dict({**linear.state_dict(), "other_state": torch.empty(0)})


def test_compiled_layers_have_the_bits_of_eager_ones() -> None:
    torch.manual_seed(0)
    layer = te.TransformerLayer(32, 64, 4, hidden_dropout=0.0, attention_dropout=0.0)
    experts = te.GroupedLinear(2, 32, 16)
    x = torch.randn(6, 2, 32)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return experts(layer(x, None, "causal").flatten(0, 1), [5, 7])

    compiled = torch.compile(forward, backend="eager", fullgraph=True)
    with te.autocast(recipe=te.common.recipe.MXFP8BlockScaling()):
        assert torch.equal(compiled(x), forward(x))


def test_options_of_ranks_change_nothing_on_one() -> None:
    torch.manual_seed(0)
    ranks = {"tp_group": None, "tp_size": 1, "sequence_parallel": True}
    x = torch.randn(4, 2, 32)
    plain = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    layer = te.TransformerLayer(32, 64, 4, **plain, set_parallel_mode=True, **ranks)
    other = te.TransformerLayer(32, 64, 4, **plain)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(layer(x), other(x))
    for mode in ("column", "row"):
        linear = te.Linear(32, 16, parallel_mode=mode, **ranks)
        want = torch.nn.functional.linear(x, linear.weight, linear.bias)
        assert torch.allclose(linear(x), want, atol=1e-6)
    tracker = te.CudaRNGStatesTracker()
    tracker.add("experts", 5)
    named = {"get_rng_state_tracker": lambda: tracker, "rng_tracker_name": "experts"}
    groups = te.GroupedLinear(2, 32, 16, **named)
    torch.manual_seed(5)
    drawn = [torch.empty(16, 32).normal_(0.0, 0.023) for _ in range(2)]
    assert torch.equal(groups.weight0, drawn[0]) and torch.equal(groups.weight1, drawn[1])


TRANSFORMERS = """
import torch
from transformers import PretrainedConfig, PreTrainedModel
import hybridq.te.pytorch as te


class Config(PretrainedConfig):
    model_type = "of_this_test"
    initializer_range = 0.02


class Model(PreTrainedModel):
    config_class = Config

    def __init__(self, config):
        super().__init__(config)
        self.embed = torch.nn.Embedding(8, 64)
        half = {"init_method": lambda weight: torch.nn.init.constant_(weight, 0.5)}
        self.first = te.Linear(64, 64, **half)
        self.fused = te.LayerNormLinear(64, 64, **half)
        self.layer = te.TransformerLayer(64, 96, 4, output_layer_init_method=half["init_method"],
                                         **half)
        self.post_init()

    def _init_weights(self, module):
        if module.__module__.startswith("hybridq.te.pytorch"):
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
            return
        super()._init_weights(module)


model = Model(Config())
weights = {name: one for name, one in model.named_parameters() if one.dim() == 2}
assert len(weights) == 7
for name, one in weights.items():
    assert "embed" in name or one.eq(0.5).all(), name
"""


def test_models_of_transformers_leave_modules_alone_that_they_know_by_their_path() -> None:
    """BioNeMo's way, in own words: a class with "LayerNorm" in its name would be filled by ones."""
    pytest.importorskip("transformers")
    done = subprocess.run(
        [sys.executable, "-c", TRANSFORMERS], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for one in (te.Linear, te.LayerNormMLP, te.GroupedLinear, te.LayerNorm, te.TransformerLayer):
        assert one.__module__ == "hybridq.te.pytorch.module"
        assert pickle.loads(pickle.dumps(one)) is one
    assert te.DotProductAttention.__module__ == "hybridq.te.pytorch.attention"
