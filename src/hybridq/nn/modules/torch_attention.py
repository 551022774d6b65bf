"""torch's `nn.MultiheadAttention`, whose products run under the recipe.

torch's own forward multiplies by the weights itself, and calls no module. Here the projections are
products of the module's parts, and the output's is a call of its child; what lies between is
written out for them, by torch's own functions.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ... import settings
from ...recipes import Recipe
from .gathered_keys import check_module_in_ring
from .linear import Linear
from .linear_part import run_part
from .quantized_module import QuantizedModule

__all__ = ["TorchMultiheadAttention", "convert_attention"]

#: Names of weights that are apart where keys or values have features of their own.
_APART = ("q_proj", "k_proj", "v_proj")


class TorchMultiheadAttention(QuantizedModule, nn.MultiheadAttention):
    """`nn.MultiheadAttention` whose projections run under the recipe of `hybridq.autocast`.

    `hybridq.convert` makes it of torch's, exactly; keys and shapes of parameters stay. Its slots
    are those of linear modules: `"<name>.in_proj"`, or `"<name>.q_proj"`, `"k_proj"` and
    `"v_proj"` where these are weights of their own, and those of its child `"<name>.out_proj"`,
    which becomes a `hybridq.Linear`. Queries, keys and values that are one tensor are projected by
    one product. Scores, softmax and dropout are computed as torch does. Without a recipe, or under
    one that leaves all of it alone, the forward is torch's.

    `in_proj_weight` stays in high precision inside `quantized_model_init`, and FSDP2 gathers its
    values: rows of it are multiplied apart in cross-attention.

    Example:
        >>> import torch, hybridq
        >>> module = hybridq.convert(torch.nn.MultiheadAttention(64, 4, batch_first=True))
        >>> x = torch.randn(2, 10, 64)
        >>> with hybridq.autocast(recipe="mxfp8"):
        ...     y, weights = module(x, x, x)
        >>> type(module).__name__, y.shape, weights.shape
        ('TorchMultiheadAttention', torch.Size([2, 10, 64]), torch.Size([2, 10, 10]))
    """

    #: None: rows of the weight are multiplied apart, and so it is gathered as values.
    weight_parts: Mapping[str, str] = {}

    def initial_weights(self) -> Iterable[tuple[str, str]]:
        return ()

    def quantize_initial_weights(self, but: Container[int] = ()) -> None:
        """Quantize the weight of the output's projection inside `quantized_model_init`.

        Args:
            but: ids of parameters that stay as they are.
        """
        if isinstance(self.out_proj, Linear):
            self.out_proj.quantize_initial_weights(but)

    def check_initial_weights(self, but: Container[int] = ()) -> None:
        """Raise where `quantize_initial_weights` would, and change nothing.

        Args:
            but: ids of parameters that stay as they are.
        """
        if isinstance(self.out_proj, Linear):
            self.out_proj.check_initial_weights(but)

    def parts_of(self, recipe: Recipe | None) -> tuple[str, ...]:
        del recipe
        return ("in_proj",) if self._qkv_same_embed_dim else _APART

    def scaled_weights(self) -> list[tuple[str, torch.Tensor]]:
        """Return the weight of each part."""
        return [(part, self._parameter_behind(f"{part}_weight")) for part in self.parts_of(None)]

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the attention's output, and its weights or None.

        Args:
            query: `[L, E]`, `[L, N, E]`, or `[N, L, E]` with `batch_first`.
            key, value: the same with S in the place of L, and `kdim` or `vdim` features.
            key_padding_mask: `[N, S]` or `[S]`: True, or what is added to scores.
            need_weights: whether weights are returned.
            attn_mask: `[L, S]` or `[N * heads, L, S]`: True where none attends, or what is added.
            average_attn_weights: over the heads.
            is_causal: says that `attn_mask` is the causal one.

        Raises:
            RuntimeError: shapes do not fit, or `is_causal` without an `attn_mask`.
            TypeError: nested tensors under a recipe, or a dtype that cannot be quantized.
        """
        recipe = self._recipe()
        if recipe is None or self._is_plain(recipe):
            options = (key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
            return super().forward(query, key, value, *options)
        if settings.current().in_ring:
            check_module_in_ring(need_weights, self.bias_k is not None, self.add_zero_attn)
        if any(one.is_nested for one in (query, key, value)):
            raise self._error(TypeError, "under a recipe inputs must be plain, got nested tensors")
        if is_causal and attn_mask is None:
            raise self._error(RuntimeError, "is_causal needs the attn_mask that it is said of")
        is_batched, swaps = query.dim() == 3, self.batch_first and query.dim() == 3
        q, k, v = self._projected(recipe, query, key, value)
        q, k, v = (self._heads(one if is_batched else one.unsqueeze(1), swaps) for one in (q, k, v))
        is_hint = is_causal and key_padding_mask is None and not need_weights  # as torch takes it
        mask = None if is_hint else _mask(q, k, attn_mask, key_padding_mask)
        k, v, mask = self._more_keys(k, v, mask)
        rate = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = (q * q.shape[-1] ** -0.5) @ k.mT
            shares = torch.softmax(scores if mask is None else scores + mask, -1)
            shares = F.dropout(shares, rate) if rate else shares
            y = shares @ v
            weights = shares.mean(1) if average_attn_weights else shares
            weights = weights if is_batched else weights.squeeze(0)
        else:
            y = F.scaled_dot_product_attention(q, k, v, mask, rate, is_hint)
        y = y.transpose(1, 2).flatten(2)  # [N, L, E]
        y = y if swaps else y.transpose(0, 1)
        return self.out_proj(y if is_batched else y.squeeze(1)), weights

    def _is_plain(self, recipe: Recipe) -> bool:
        """Return whether a recipe leaves all products alone."""
        child: Any = self.out_proj
        own = all(self.plan_of(recipe, part).is_plain for part in self.parts_of(recipe))
        return own and (not isinstance(child, Linear) or child.plan_of(recipe).is_plain)

    def _projected(
        self, recipe: Recipe, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return queries, keys and values, of E features each."""
        bias: Any = self.in_proj_bias
        if self._qkv_same_embed_dim and query is key and key is value:
            made = run_part(self, "in_proj", recipe, query, self.in_proj_weight, bias)
            return made.chunk(3, -1)
        biases = (None,) * 3 if bias is None else bias.chunk(3)
        given = zip((query, key, value), biases, strict=True)
        if self._qkv_same_embed_dim:
            rows = self.in_proj_weight.chunk(3)
            return tuple(
                run_part(self, "in_proj", recipe, x, weight, own)
                for (x, own), weight in zip(given, rows, strict=True)
            )
        return tuple(
            run_part(self, part, recipe, x, getattr(self, f"{part}_weight"), own)
            for (x, own), part in zip(given, _APART, strict=True)
        )

    def _heads(self, x: torch.Tensor, is_first: bool) -> torch.Tensor:
        """Return `[N, heads, length, E / heads]`."""
        x = x if is_first else x.transpose(0, 1)
        return x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)

    def _more_keys(
        self, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return keys, values and mask with what the module adds to every sequence."""
        count = 0
        if self.bias_k is not None and self.bias_v is not None:
            own = [one.view(1, self.num_heads, 1, -1) for one in (self.bias_k, self.bias_v)]
            k, v = (
                torch.cat([x, one.to(x.dtype).expand(x.shape[0], -1, -1, -1)], 2)
                for x, one in zip((k, v), own, strict=True)
            )
            count += 1
        if self.add_zero_attn:
            k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
            count += 1
        return k, v, mask if mask is None or not count else F.pad(mask, (0, count))


def _mask(
    q: torch.Tensor,
    k: torch.Tensor,
    attention: torch.Tensor | None,
    padding: torch.Tensor | None,
) -> torch.Tensor | None:
    """Return what is added to the scores, `[1 or N, 1 or heads, 1 or L, S]`; None: nothing."""
    found = None
    (batch, heads, length, _), keys = q.shape, k.shape[2]
    if attention is not None:
        if attention.shape not in ((length, keys), (batch * heads, length, keys)):
            raise RuntimeError(
                f"MultiheadAttention: attn_mask must be [{length}, {keys}] or "
                f"[{batch * heads}, {length}, {keys}], got {list(attention.shape)}"
            )
        found = _added(attention, q.dtype)
        found = found.unflatten(0, (batch, heads)) if attention.dim() == 3 else found[None, None]
    if padding is not None:
        padding = padding if padding.dim() == 2 else padding[None]
        if padding.shape != (batch, keys):
            raise RuntimeError(
                f"MultiheadAttention: key_padding_mask must be [{batch}, {keys}], got "
                f"{list(padding.shape)}"
            )
        own = _added(padding, q.dtype)[:, None, None]
        found = own if found is None else found + own
    return found


def _added(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a mask as what is added to scores."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -torch.inf)


def convert_attention(module: nn.MultiheadAttention) -> None:
    """Convert torch's module, and its child, in place.

    Args:
        module: an `nn.MultiheadAttention`, exactly.
    """
    module.__class__ = TorchMultiheadAttention
    if type(module.out_proj) is nn.modules.linear.NonDynamicallyQuantizableLinear:
        child: Any = module.out_proj
        child.__class__ = Linear
