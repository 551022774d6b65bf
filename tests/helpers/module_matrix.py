"""Every module and every recipe: what the tests of the whole matrix have in common.

A case makes a module that is called with one tensor, knows the shapes that its input may have, and
a twin of torch's own modules with the same parameters in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

import hybridq
from fused_model import ACTIVATIONS, TorchNorm
from hybridq.quantizers import DelayedScalingRequest
from hybridq.recipes import CustomRecipe, autocast, names

SIZES = (5, 0, 13)
LENGTH, BATCH, HIDDEN, FFN, HEADS = 6, 3, 40, 24, 4

_HYBRID_DELAYED = hybridq.HybridQuantizer(
    rowwise_quantizer=DelayedScalingRequest(),
    columnwise_quantizer=hybridq.MXFP8Quantizer(),
    columnwise_source="rowwise_dequantized",
)


def _hybrid_delayed(role):
    return _HYBRID_DELAYED if role.tensor_type != "grad_output" else DelayedScalingRequest()


_hybrid_delayed.reads_names = False

#: Every recipe with a name, uniform and hybrid, and delayed scaling in one direction of a hybrid.
RECIPES: dict[str, object] = {
    **{name: name for name in names()},
    "fp8_delayed_fwd_mxfp8_bwd": CustomRecipe(_hybrid_delayed),
}


class _Splits(nn.Module):
    """A GroupedLinear that knows the sizes of its groups."""

    def __init__(self, on_device: bool, **options) -> None:
        super().__init__()
        self.grouped = hybridq.GroupedLinear(len(SIZES), HIDDEN, HIDDEN, **options)
        self.sizes = list(SIZES)
        if on_device:
            self.sizes = torch.tensor(SIZES)

    def forward(self, x):
        return self.grouped(x, self.sizes)


class _TorchSplits(nn.Module):
    """A loop of linear functions over the groups."""

    def __init__(self, grouped: hybridq.GroupedLinear) -> None:
        super().__init__()
        for name, parameter in grouped.named_parameters():
            self.register_parameter(name, nn.Parameter(parameter.detach().clone()))

    def forward(self, x):
        if hasattr(self, "weight"):
            pairs = zip(self.weight, self.bias, strict=True)
        else:
            pairs = [(getattr(self, f"weight{g}"), getattr(self, f"bias{g}")) for g in range(3)]
        return torch.cat([F.linear(p, *wb) for p, wb in zip(x.split(SIZES), pairs, strict=True)])


class _Rotated(nn.Module):
    """A layer that is called with rotary angles."""

    def __init__(self, layer: nn.Module, features: int) -> None:
        super().__init__()
        self.layer = layer
        self.angles = hybridq.RotaryPositionEmbedding(features)(LENGTH)

    def forward(self, x):
        return self.layer(x, rotary_pos_emb=self.angles)


class _Decoder(nn.Module):
    """A decoder's layer whose encoder is its own input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = layer(layer_type="decoder", qk_norm_type="RMSNorm")

    def forward(self, x):
        return self.layer(x, encoder_output=x)


class _TorchAttention(nn.Module):
    """Causal attention of torch's functions, batch first."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.groups, self.features = groups, HIDDEN // HEADS
        self.qkv = nn.Linear(HIDDEN, (HEADS + 2 * groups) * self.features)
        self.proj = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        made = self.qkv(x)
        lead, d = made.shape[:2], self.features
        q, k, v = made.split([HEADS * d, self.groups * d, self.groups * d], -1)
        q, k, v = (t.reshape(*lead, -1, d).transpose(1, 2) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.proj(mixed.transpose(1, 2).flatten(2))


class _TorchMLP(nn.Module):
    """Norm, linear, SwiGLU or GELU, linear."""

    def __init__(self, normalization: str, gated: bool) -> None:
        super().__init__()
        self.norm = TorchNorm(HIDDEN, normalization, 1e-5, False)
        self.fc1 = nn.Linear(HIDDEN, FFN * (1 + gated))
        self.fc2 = nn.Linear(FFN, HIDDEN)
        self.gated = gated

    def forward(self, x):
        y = self.fc1(self.norm(x))
        if self.gated:
            first, second = y.chunk(2, -1)
            return self.fc2(F.silu(first) * second)
        return self.fc2(ACTIVATIONS["gelu"](y))


class _TorchLayer(nn.Module):
    """Pre-norm transformer layer, batch first."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = TorchNorm(HIDDEN, "RMSNorm", 1e-5, False)
        self.attention = _TorchAttention(2)
        self.mlp = _TorchMLP("RMSNorm", True)

    def forward(self, x):
        hidden = x + self.attention(self.norm(x))
        return hidden + self.mlp(hidden)


def layer(**options):
    options = {"normalization": "RMSNorm", "activation": "swiglu", **options}
    options = {"attn_input_format": "bshd", **options}
    return hybridq.TransformerLayer(HIDDEN, FFN, HEADS, 2, 1e-5, 0.0, 0.0, **options)


def _norm_linear(kind: str):
    return nn.Sequential(TorchNorm(HIDDEN, kind, 1e-5, False), nn.Linear(HIDDEN, HIDDEN))


def _sequential(is_ours: bool):
    parts = [nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, FFN), nn.SiLU(), nn.Linear(FFN, HIDDEN)]
    model = nn.Sequential(*parts, nn.ReLU())
    return hybridq.convert(model, fuse=True) if is_ours else model


def attention(**options):
    options = {"qkv_format": "bshd", **options}
    return hybridq.MultiheadAttention(HIDDEN, HEADS, None, 0.0, num_gqa_groups=2, **options)


@dataclass(frozen=True)
class Case:
    """One module.

    Args:
        make: the module.
        twin: torch's own of the same parameters; None: it has none.
        lead: leading dimensions of its input.
        any_lead: whether others will do.
    """

    make: Callable[[], nn.Module]
    twin: Callable[[nn.Module], nn.Module] | None = None
    lead: tuple[int, ...] = (3, 6)
    any_lead: bool = True

    def data(self, dtype=torch.float32, lead=None) -> tuple[torch.Tensor, torch.Tensor]:
        """An input with an outlier, and an output gradient."""
        lead = self.lead if lead is None else lead
        x, dy = torch.randn(*lead, HIDDEN), torch.randn(*lead, HIDDEN)
        if x.numel():
            x.view(-1)[0] = 30.0
        return x.to(dtype), dy.to(dtype)


_GROUPED = {"twin": lambda m: _TorchSplits(m.grouped), "lead": (sum(SIZES),), "any_lead": False}
_BATCHED = {"lead": (BATCH, LENGTH), "any_lead": False}
CASES = {
    "Linear": Case(lambda: hybridq.Linear(HIDDEN, HIDDEN), lambda m: nn.Linear(HIDDEN, HIDDEN)),
    "GroupedLinear": Case(lambda: _Splits(False), **_GROUPED),
    "GroupedLinear, device": Case(lambda: _Splits(True, single_grouped_weight=True), None, (18,)),
    "LayerNormLinear": Case(
        lambda: hybridq.LayerNormLinear(HIDDEN, HIDDEN), lambda m: _norm_linear("LayerNorm")
    ),
    "RMSNormLinear": Case(
        lambda: hybridq.RMSNormLinear(HIDDEN, HIDDEN), lambda m: _norm_linear("RMSNorm")
    ),
    "LayerNormMLP": Case(
        lambda: hybridq.LayerNormMLP(HIDDEN, FFN), lambda m: _TorchMLP("LayerNorm", False)
    ),
    "LayerNormMLP, swiglu": Case(
        lambda: hybridq.LayerNormMLP(HIDDEN, FFN, normalization="RMSNorm", activation="swiglu"),
        lambda m: _TorchMLP("RMSNorm", True),
    ),
    "FusedSequential": Case(lambda: _sequential(True), lambda m: _sequential(False)),
    "MultiheadAttention": Case(attention, lambda m: _TorchAttention(2), **_BATCHED),
    "TransformerLayer": Case(layer, lambda m: _TorchLayer(), **_BATCHED),
    "TransformerLayer, decoder": Case(_Decoder, **_BATCHED),
    "TransformerLayer, rotary": Case(lambda: _Rotated(layer(), HIDDEN // HEADS), **_BATCHED),
}

#: Parameters FP32 or BF16, and FP32 ones under torch.autocast.
MODES = ("fp32", "bf16", "amp")


def contexts(recipe, mode: str = "fp32") -> ExitStack:
    """The forward's contexts: of the recipe (None: none) and of torch's autocast."""
    stack = ExitStack()
    if recipe is not None:
        stack.enter_context(autocast(recipe=recipe))
    if mode == "amp":
        stack.enter_context(torch.autocast("cpu", torch.bfloat16))
    return stack


def step(module, call, x, dy, recipe, mode="fp32", seed=5, backward=None) -> list[torch.Tensor]:
    """Return [y, dx, *parameters' gradients] of one forward and backward of `call`."""
    module.zero_grad()
    leaf = x.detach().clone().requires_grad_()
    torch.manual_seed(seed)
    with contexts(recipe, mode):
        y = call(leaf)
    (backward or (lambda run: run()))(lambda: y.backward(dy.to(y.dtype)))
    return [y.detach(), leaf.grad, *(p.grad.clone() for p in module.parameters())]


def train(module, call, batches, recipe, mode="fp32", seen=None) -> list[torch.Tensor]:
    """Return all results of one AdamW step for each batch; `seen` is called after each."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    made = []
    for number, (x, dy) in enumerate(batches):
        made += step(module, call, x, dy, recipe, mode, seed=number)
        optimizer.step()
        if seen is not None:
            seen()
    return made + [p.detach().clone() for p in module.parameters()]
