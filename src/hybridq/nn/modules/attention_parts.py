"""What attention modules are made of beside themselves: projections, and checks of sizes."""

from __future__ import annotations

from typing import Any, Final

import torch

from ...recipes.roles import GRAD_INPUT
from ..autograd import with_quantized_gradient
from .attention_call import AttentionCall
from .dot_product_attention import DotProductAttention
from .kv_cache import InferenceParams
from .linear import Linear
from .linear_part import run_part
from .packed_sequences import Packed
from .written_options import Check, settled

__all__ = ["INPUTS", "OPTIONS", "BiasApart", "check_angles", "check_shared", "check_sizes"]

#: What an attention module takes, by its layout.
INPUTS: Final = {
    "sbhd": "[length, batch, hidden_size]",
    "bshd": "[batch, length, hidden_size]",
    "thd": "[tokens, hidden_size]",
}


class BiasApart(Linear):
    """A `Linear` that leaves its bias to whoever calls it: `proj` under `return_bias=True`."""

    def forward(
        self,
        input: torch.Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> Any:
        """Return `input @ weight.T`; with `return_bias` a tuple of it and the bias.

        Args:
            input, is_first_microbatch, fp8_output, fp8_grad: as `Linear.forward` takes them.
        """
        if self.return_bias:
            return super().forward(input, is_first_microbatch, fp8_output, fp8_grad)
        self._check_first(is_first_microbatch)
        recipe, first = self._recipe(), is_first_microbatch
        if recipe is not None and fp8_grad:
            input = with_quantized_gradient(input, self._boundary_quantizer(recipe, GRAD_INPUT))
        y = run_part(self, "", recipe, input, self.local_parameter("weight"), None, first)
        return y if recipe is None or not fp8_output else self._quantized_output(y, recipe)


def _to_core(module: Any, name: str, value: Any) -> Any:
    """Return an option of a MultiheadAttention as its `core_attention`, which has it, takes it."""
    core = module._modules.get("core_attention")
    if core is None:  # which is made behind it
        return value
    setattr(core, name, value)
    return getattr(core, name)


#: What is written to a MultiheadAttention (see `WrittenOptions`).
OPTIONS: Final[dict[str, Check]] = {
    "attention_dropout": _to_core,
    "attention_type": settled,
    "input_layernorm": settled,
    "return_bias": settled,
    "return_layernorm_output": settled,
}


def check_sizes(hidden: int, heads: int, groups: int, features: int | None) -> None:
    """Raise unless heads divide the hidden size, and groups the heads."""
    if features is not None and features < 1:
        raise ValueError(f"attention: kv_channels must be at least 1, got {features}")
    if heads < 1 or (features is None and hidden % heads):
        raise ValueError(
            "attention: hidden_size must be a multiple of num_attention_heads, or kv_channels "
            f"given, got {hidden} and {heads}"
        )
    if groups < 1 or heads % groups:
        raise ValueError(
            "attention: num_attention_heads must be a multiple of num_gqa_groups, got "
            f"{heads} and {groups}"
        )


def check_shared(
    call: AttentionCall, packed: Packed, core: DotProductAttention, cache: InferenceParams | None
) -> None:
    """Raise where sequences on several ranks are given what only whole ones take."""
    given = [
        what
        for what, is_given in (
            ("core_attention_bias_type", call.bias_type != "no_bias"),
            ("a pair of masks", call.counts is not None),
            ("cu_seqlens", packed != Packed()),
            ("inference_params", cache is not None),
            ("softmax_type", core.softmax_type != "vanilla"),
            ("a recipe with fp8_dpa", core.quantizers() is not None),
        )
        if is_given
    ]
    if given:
        raise NotImplementedError(
            "attention: where ranks share sequences, attention takes masks and windows only, got "
            + " and ".join(given)
        )


def check_angles(queries: torch.Tensor, keys: torch.Tensor, longest: tuple[int, int]) -> None:
    """Raise unless there is an angle for each position."""
    for angles, needed in zip((queries, keys), longest, strict=True):
        if angles.dim() != 4 or angles.shape[0] < needed:
            raise ValueError(
                f"rotary_pos_emb: must be [at least {needed}, 1, 1, features], got "
                f"{tuple(angles.shape)}"
            )
