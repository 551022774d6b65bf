"""Scripts as users of Transformer Engine write them, with one word of their imports changed."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest
import torch

import hybridq
import hybridq.te

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

QUICKSTART = """
import torch
import transformer_engine.pytorch as te
from transformer_engine.common import recipe

torch.manual_seed(0)
model = te.Linear(96, 64, bias=True, params_dtype=torch.float32, device=DEVICE)
inp = torch.randn(24, 96, device=DEVICE, requires_grad=True)
fp8_recipe = recipe.DelayedScaling(margin=0, fp8_format=recipe.Format.E4M3)
with te.fp8_autocast(enabled=ENABLED, fp8_recipe=fp8_recipe):
    out = model(inp)
loss = out.square().sum()
loss.backward()
results = [out, inp.grad, model.weight.grad]
"""

EVERY_RECIPE = """
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)

results = []
for make, available in (
    (lambda: DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=16), te.is_fp8_available),
    (lambda: Float8CurrentScaling(fp8_format=Format.HYBRID), te.is_fp8_available),
    (lambda: Float8BlockScaling(), te.is_fp8_block_scaling_available),
    (lambda: MXFP8BlockScaling(fp8_format=Format.E4M3), te.is_mxfp8_available),
    (lambda: NVFP4BlockScaling(), te.is_nvfp4_available),
):
    ready, reason = available(return_reason=True)
    assert ready, reason
    torch.manual_seed(0)
    mlp = te.LayerNormMLP(64, 128, activation="swiglu", normalization="RMSNorm", device=DEVICE)
    x = torch.randn(16, 64, device=DEVICE, requires_grad=True)
    with te.autocast(enabled=ENABLED, recipe=make()):
        y = mlp(x, is_first_microbatch=True)
    y.square().sum().backward()
    results += [y, x.grad, mlp.fc1_weight.grad, mlp.fc2_weight.grad]
"""

HYBRID = """
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import CustomRecipe
from transformer_engine.pytorch.custom_recipes.quantizer_factory_zoo import (
    mxfp8_fwd_nvfp4_bwd_factory,
)
from transformer_engine.pytorch.quantization import QuantizerRole

def factory(role):
    if role is None or role.module_type != "linear":
        return te.IdentityQuantizer()
    if role.name.endswith("fc2"):
        return mxfp8_fwd_nvfp4_bwd_factory(role)
    if role.tensor_type == "grad_output":
        return te.Float8CurrentScalingQuantizer(te.DType.kFloat8E5M2, device=DEVICE)
    return te.HybridQuantizer(
        rowwise_quantizer=te.MXFP8Quantizer(te.DType.kFloat8E4M3),
        columnwise_quantizer=te.IdentityQuantizer(),
        columnwise_source="rowwise_dequantized",
    )

torch.manual_seed(0)
fc1 = te.Linear(64, 96, name="block.fc1", device=DEVICE)
fc2 = te.Linear(96, 64, name="block.fc2", device=DEVICE)
x = torch.randn(16, 64, device=DEVICE, requires_grad=True)
with te.autocast(enabled=ENABLED, recipe=CustomRecipe(qfactory=factory)):
    y = fc2(torch.nn.functional.gelu(fc1(x)))
y.square().mean().backward()
results = [y, x.grad, fc1.weight.grad, fc2.weight.grad]
"""

RECOMPUTED = """
import torch
import transformer_engine.pytorch as te
from transformer_engine.common import recipe

torch.manual_seed(0)
layers = [
    te.TransformerLayer(
        64, 128, 4, hidden_dropout=0.1, attention_dropout=0.0, layer_number=i + 1, device=DEVICE
    )
    for i in range(2)
]
x = torch.randn(12, 2, 64, device=DEVICE, requires_grad=True)
torch.manual_seed(1)
h = x
with te.autocast(enabled=True, recipe=recipe.NVFP4BlockScaling()):
    for layer in layers:
        if ENABLED:
            h = te.checkpoint(
                layer, h, distribute_saved_activations=False, tp_group=None, use_reentrant=REENTRANT
            )
        else:
            h = layer(h)
h.square().mean().backward()
results = [h, x.grad] + [p.grad for layer in layers for p in layer.parameters()]
"""

OFFLOADED = """
import torch
import transformer_engine.pytorch as te
from transformer_engine.common import recipe

torch.manual_seed(0)
layers = [te.LayerNormLinear(64, 64, device=DEVICE) for _ in range(4)]
x = torch.randn(32, 64, device=DEVICE, requires_grad=True)
context, sync = te.get_cpu_offload_context(enabled=ENABLED, num_layers=2, model_layers=4)
h = x
for layer in layers:
    with context, te.autocast(enabled=True, recipe=recipe.MXFP8BlockScaling()):
        h = layer(h)
    h = sync(h)
h.square().mean().backward()
results = [h, x.grad] + [layer.weight.grad for layer in layers]
"""

QUANTIZED_INIT = """
import torch
import transformer_engine.pytorch as te
from transformer_engine.common import recipe

torch.manual_seed(0)
with te.quantized_model_init(
    enabled=True,
    recipe=recipe.MXFP8BlockScaling(),
    preserve_high_precision_init_val=True,
):
    model = te.Linear(64, 64, bias=False, device=DEVICE)
assert isinstance(model.weight, te.QuantizedTensor)
before = model.weight.get_high_precision_init_val().clone()
first = model.weight.dequantize()
optimizer = te.optimizers.FusedAdam(model.parameters(), lr=0.01, master_weights=True)
x = torch.randn(16, 64, device=DEVICE)
with te.autocast(enabled=True, recipe=recipe.MXFP8BlockScaling()):
    y = model(x)
y.square().mean().backward()
grad = model.weight.grad
optimizer.step()
model.weight.clear_high_precision_init_val()
"""

#: What a user trains with, in 35 lines.
TRAINING = """
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Format

class Model(torch.nn.Module):
    def __init__(self, vocab, hidden, heads, layers):
        super().__init__()
        self.embedding = torch.nn.Embedding(vocab, hidden, device=DEVICE)
        self.rotary = te.RotaryPositionEmbedding(hidden // heads)
        self.layers = torch.nn.ModuleList(
            te.TransformerLayer(
                hidden, 2 * hidden, heads, num_gqa_groups=2, layer_number=i + 1, bias=False,
                hidden_dropout=0.0, attention_dropout=0.0, normalization="RMSNorm",
                activation="swiglu", attn_input_format="bshd", fuse_qkv_params=True, device=DEVICE,
            )
            for i in range(layers)
        )
        self.norm = te.RMSNorm(hidden, eps=1e-5, device=DEVICE)
        self.head = te.Linear(hidden, vocab, bias=False, device=DEVICE)

    def forward(self, tokens):
        angles = self.rotary(tokens.shape[1]).to(tokens.device)
        x = self.embedding(tokens)
        for layer in self.layers:
            x = te.checkpoint(layer, x, rotary_pos_emb=angles, use_reentrant=False)
        return self.head(self.norm(x))

torch.manual_seed(0)
with te.fp8_model_init(enabled=ENABLED, preserve_high_precision_init_val=True):
    model = Model(vocab=61, hidden=32, heads=4, layers=2)
optimizer = te.optimizers.FusedAdam(model.parameters(), lr=3e-3, master_weights=True)
recipe, losses = DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=16), []
tokens = (torch.arange(4)[:, None] * 7 + torch.arange(17) * 3).to(DEVICE) % 61
for step in range(STEPS):
    with te.autocast(enabled=ENABLED, recipe=recipe):
        logits = model(tokens[:, :-1])
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(float(loss))
"""


def run(script: str, **given: Any) -> dict[str, Any]:
    """Run a script whose imports name the door, and return what it left."""
    assert "hybridq" not in script
    names = {"DEVICE": DEVICE, "__name__": "script", **given}
    changed = script.replace("transformer_engine", "hybridq.te")
    exec(compile(textwrap.dedent(changed), "script", "exec"), names)
    return names


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).detach().norm() / b.detach().norm())


@pytest.mark.parametrize(
    ("script", "most"), [(QUICKSTART, 0.1), (EVERY_RECIPE, 0.4), (HYBRID, 0.2)]
)
def test_results_are_quantized_ones_near_those_without(script: str, most: float) -> None:
    """Bounds: an operand errs by 2^-4 of a value (FP8), 1/6 of a block (NVFP4) at most."""
    got, want = (run(script, ENABLED=flag)["results"] for flag in (True, False))
    errors = [distance(a, b) for a, b in zip(got, want, strict=True)]
    assert min(errors) > 0.001 and max(errors) < most


def test_the_quickstart_has_hybridqs_bits() -> None:
    made = run(QUICKSTART, ENABLED=True)
    plain = hybridq.Linear(96, 64).to(DEVICE)
    with torch.no_grad():
        plain.weight.copy_(made["model"].weight)
        plain.bias.copy_(made["model"].bias)
    assert float(made["model"].weight.detach().std()) == pytest.approx(0.023, rel=0.05)
    assert not made["model"].bias.any()
    own = hybridq.recipes.DelayedScaling(fp8_format="E4M3")
    with hybridq.autocast(recipe=own):
        y = plain(made["inp"].detach())
    assert torch.equal(y, made["out"])


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_changes_no_bit(reentrant: bool) -> None:
    got, want = (
        run(RECOMPUTED, ENABLED=flag, REENTRANT=reentrant)["results"] for flag in (True, False)
    )
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_offload_changes_no_bit() -> None:
    made = run(OFFLOADED, ENABLED=True)
    want = run(OFFLOADED, ENABLED=False)["results"]
    assert made["context"].nbytes_out > 0
    assert all(torch.equal(a, b) for a, b in zip(made["results"], want, strict=True))


def test_quantized_init_and_a_step() -> None:
    made = run(QUANTIZED_INIT)
    quantizer = hybridq.MXFP8Quantizer("e4m3")
    assert torch.equal(made["first"], quantizer(made["before"].to(DEVICE)).dequantize())
    master = made["before"].to(DEVICE).requires_grad_()
    reference = torch.optim.AdamW([master], lr=0.01, weight_decay=0.0)
    master.grad = made["grad"].clone()
    reference.step()
    weight = made["model"].weight
    assert torch.equal(weight.dequantize(), quantizer(master.detach()).dequantize())
    assert weight.get_high_precision_init_val() is None


@pytest.mark.more
def test_the_training_script() -> None:
    """It learns as fast as without quantization: the losses stay together all the way down."""
    lines = [line for line in TRAINING.strip().splitlines() if line]
    assert len(lines) <= 45
    got, want = (run(TRAINING, ENABLED=flag, STEPS=25)["losses"] for flag in (True, False))
    assert got != want and want[-1] < 0.5 * want[0]
    assert max(abs(a - b) for a, b in zip(got, want, strict=True)) < 0.15


def test_every_path_leads_to_the_same_objects() -> None:
    te = hybridq.te
    for path, name in (
        ("pytorch", "Linear"),
        ("pytorch.module.linear", "Linear"),
        ("pytorch.transformer", "TransformerLayer"),
        ("pytorch.attention", "MultiheadAttention"),
        ("pytorch.fp8", "fp8_autocast"),
        ("quantization", "autocast"),
        ("pytorch.tensor.float8_tensor", "Float8Tensor"),
        ("pytorch.quantized_tensor", "QuantizedTensor"),
        ("pytorch.tensor", "NVFP4Quantizer"),
        ("pytorch.cpu_offload", "get_cpu_offload_context"),
        ("pytorch.distributed", "checkpoint"),
        ("pytorch.constants", "TE_DType"),
    ):
        names: dict[str, Any] = {}
        exec(f"from hybridq.te.{path} import {name} as found", names)
        assert names["found"] is getattr(te, name), path
    names = {}
    exec("import hybridq.te.pytorch as found", names)
    assert names["found"] is te


def test_states_of_generators_by_name() -> None:
    tracker = hybridq.te.CudaRNGStatesTracker()
    tracker.add("parts", 7)
    torch.manual_seed(3)
    with tracker.fork("parts"):
        first = torch.rand(2, device=DEVICE)
    plain = torch.rand(2, device=DEVICE)
    with tracker.fork("parts"):
        second = torch.rand(2, device=DEVICE)
    torch.manual_seed(7)
    both = torch.rand(2, device=DEVICE), torch.rand(2, device=DEVICE)
    assert torch.equal(first, both[0]) and torch.equal(second, both[1])
    torch.manual_seed(3)
    assert torch.equal(plain, torch.rand(2, device=DEVICE))
    with pytest.raises(ValueError, match="must be new"):
        tracker.add("parts", 8)
    with pytest.raises(KeyError, match="must have been added"), tracker.fork("other"):
        pass


def test_groups_are_padded_and_trimmed() -> None:
    te = hybridq.te
    splits = [3, 0, 17]
    x = torch.randn(20, 8, device=DEVICE, requires_grad=True)
    pad, trim = te.Fp8Padding(3, 16), te.Fp8Unpadding(3, 16)
    padded, sizes = pad(x, splits)
    assert sizes == [16, 0, 32] and padded.shape == (48, 8)
    assert torch.equal(padded[:3], x[:3]) and not padded[3:16].any()
    assert torch.equal(padded[16:33], x[3:])
    back = trim(padded, splits)
    assert torch.equal(back, x)
    back.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))
    pad, trim = te.Fp8Padding(3), te.Fp8Unpadding(3)
    with te.autocast(recipe=te.common.recipe.MXFP8BlockScaling()):
        padded, sizes = pad(x, splits)
        assert sizes == [32, 0, 32] and torch.equal(trim(padded, splits), x)
    assert pad.align_size == trim.align_size == 32


def test_losses_of_tokens() -> None:
    logits = torch.randn(2, 5, 11, device=DEVICE, requires_grad=True)
    target = torch.randint(0, 11, (2, 5), device=DEVICE)
    target[0, 0] = -100
    each = hybridq.te.parallel_cross_entropy(logits, target, 0.1)
    mean = hybridq.te.parallel_cross_entropy(logits, target, 0.1, True)
    log_p = torch.log_softmax(logits.detach().double(), -1)
    hit = log_p.gather(-1, target.clamp(min=0)[..., None])[..., 0]
    want = -(0.9 * hit + 0.1 * log_p.mean(-1)) * (target >= 0)
    assert torch.allclose(each.double(), want, atol=1e-5)
    assert float(mean) == pytest.approx(float(want.sum() / 9), abs=1e-5)


def test_tensors_that_a_backward_saves() -> None:
    te = hybridq.te
    made = te.MXFP8Quantizer(7)(torch.randn(4, 32, device=DEVICE))
    flat, entries = te.prepare_for_saving(made, None, torch.ones(2, device=DEVICE))
    again, rest = te.restore_from_saved(entries, [*flat, torch.zeros(1)], True)
    assert torch.equal(again[0].dequantize(), made.dequantize()) and again[1] is None
    assert len(rest) == 1 and float(again[2].sum()) == 2.0

    class Context:
        saved_tensors, tensor_objects = flat, entries

    assert torch.equal(te.restore_from_func_ctx(Context)[0].dequantize(), made.dequantize())
    with pytest.raises(AttributeError, match="must have tensor_objects"):
        te.restore_from_func_ctx(Context)


def test_optimizers_refuse_what_they_would_not_do() -> None:
    optimizers = hybridq.te.optimizers
    plain = [torch.nn.Parameter(torch.ones(4))]
    for make, text in (
        (lambda: optimizers.FusedAdam(plain, amsgrad=True), "FusedAdam: amsgrad"),
        (lambda: optimizers.FusedAdam(plain, exp_avg_dtype=torch.float64), "exp_avg_dtype"),
        (lambda: optimizers.FusedAdam(plain, store_param_remainders=True), "master_weights=True"),
        (lambda: optimizers.FusedSGD(plain, 0.1, set_grad_none=False), "FusedSGD: set_grad_none"),
    ):
        with pytest.raises(NotImplementedError, match=text):
            make()


def test_adam_steps_as_torchs_and_holds_halves() -> None:
    own, reference = ([torch.nn.Parameter(torch.randn(8, 64).clamp(-1, 1))] for _ in "ab")
    own[0].data.copy_(reference[0])
    half = {"exp_avg_dtype": torch.float16, "exp_avg_sq_dtype": torch.float16}
    steps = hybridq.te.optimizers.FusedAdam(own, 0.1, weight_decay=0.5, adam_w_mode=False, **half)
    torchs = torch.optim.Adam(reference, 0.1, weight_decay=0.5)
    for step in range(3):
        for parameter in (*own, *reference):
            parameter.grad = torch.full_like(parameter, 2.0 - step)
        steps.step()
        torchs.step()
        torch.testing.assert_close(own[0], reference[0], rtol=1e-2, atol=1e-3)
    held, scale = steps.get_scaled_state(own[0], "exp_avg")
    assert held.dtype == torch.float16 and scale.shape == (8, 1)
    assert torch.equal(held.float() * scale, steps.get_unscaled_state(own[0], "exp_avg"))
    values = torch.randn(8, 64)
    steps.set_scaled_state(own[0], "exp_avg", values)
    got = steps.get_unscaled_state(own[0], "exp_avg")
    torch.testing.assert_close(got, values, rtol=2**-10, atol=1e-3)


def test_sgd_steps_as_torchs() -> None:
    own, reference = ([torch.nn.Parameter(torch.linspace(-1, 1, 64))] for _ in "ab")
    steps = hybridq.te.optimizers.FusedSGD(own, 0.1, 0.9, weight_decay=0.5)
    torchs = torch.optim.SGD(reference, 0.1, 0.9, weight_decay=0.5)
    for step in range(3):
        for parameter in (*own, *reference):
            parameter.grad = torch.full_like(parameter, 2.0 - step)
        steps.step()
        torchs.step()
    assert torch.equal(own[0], reference[0])


@pytest.mark.more
@pytest.mark.parametrize("given", [{}, {"store_param_remainders": True}])
def test_adam_keeps_masters_where_it_is_told(given: dict[str, Any]) -> None:
    """Against torch's AdamW of FP32 values: with masters each is the one that is written."""
    start = torch.randn(64, generator=torch.Generator().manual_seed(0)).bfloat16()
    own = torch.nn.Parameter(start.clone())
    reference = torch.nn.Parameter(start.float())
    adam = hybridq.te.optimizers.FusedAdam([own], lr=1e-3, master_weights=True, **given)
    torchs = torch.optim.AdamW([reference], lr=1e-3, weight_decay=0.0)
    for step in range(4):
        grad = torch.randn(64, generator=torch.Generator().manual_seed(step)).bfloat16()
        own.grad, reference.grad = grad, grad.float()
        adam.step()
        torchs.step()
    assert torch.equal(adam.get_unscaled_state(own, "master_param"), reference.detach())
    assert torch.allclose(own.float(), reference, rtol=2.0**-8)
    alone = torch.nn.Parameter(start.clone())
    plain = hybridq.te.optimizers.FusedAdam([alone], lr=1e-3)
    alone.grad = torch.ones_like(alone)
    plain.step()
    assert "master_param" not in plain.state[alone] and not torch.equal(alone, start)


def test_what_is_captured_on_a_gpu_runs_on_a_cpu() -> None:
    """torch's AdamW refuses `capturable=True` in the first step there."""
    steps = []
    for make in (hybridq.te.optimizers.FusedAdam, torch.optim.AdamW):
        torch.manual_seed(0)
        layer = torch.nn.Linear(8, 8)
        groups = [{"params": layer.weight, "lr": 0.1}, {"params": (p for p in [layer.bias])}]
        own = {"capturable": True} if make is not torch.optim.AdamW else {}
        optimizer = make(groups, lr=1e-2, weight_decay=0.1, **own)
        for _ in range(3):
            layer(torch.randn(4, 8)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        steps.append(layer)
    assert torch.equal(steps[0].weight, steps[1].weight)
    assert torch.equal(steps[0].bias, steps[1].bias)
