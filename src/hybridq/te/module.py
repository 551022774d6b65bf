"""Modules of hybridq with Transformer Engine's order of arguments, and all of them.

Source: names, order and defaults of arguments: Transformer Engine's modules; but that `device` is
torch's current default device.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from .. import nn, settings
from .._log import log_once
from ..errors import warn
from ..recipes import QuantizerRole
from .attention import (
    DotProductAttention,
    InferenceParams,
    MultiheadAttention,
    RotaryPositionEmbedding,
)
from .children import join, own_children
from .extra_state import WithoutExtraState
from .given_buffers import gradient_into, result_into
from .grouped import Regroups, as_grouped
from .norms import LayerNorm, RMSNorm
from .over_ranks import OverRanks
from .quantization import AlignedByRecipe
from .reading import Readings
from .refused import REFUSED, refusing
from .signatures import constructor, forward, prepare, with_arguments
from .whole_sequences import WholeSequences, ranks_of

__all__ = [
    "DotProductAttention",
    "Fp8Padding",
    "Fp8Unpadding",
    "GroupedLinear",
    "InferenceParams",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MultiheadAttention",
    "RMSNorm",
    "RotaryPositionEmbedding",
    "TransformerLayer",
]

__getattr__ = refusing(__name__, "te", REFUSED)
TransformerEngineBaseModule = nn.QuantizedModule  # for isinstance


def _prepare_groups(given: dict[str, Any]) -> None:
    group, mode = given["tp_group"], given["parallel_mode"]
    if group is not None and mode in (None, "column", "row") and ranks_of(group) == 1:
        given.update(tp_group=None, tp_size=1)  # experts of whole matrices, as Megatron says it
    if given["tp_group"] is None and given["tp_size"] == 1 and mode in ("column", "row"):
        given["parallel_mode"] = None
    prepare(given)
    if given["save_original_input"]:
        log_once(
            "te.GroupedLinear.save_original_input",
            "te.GroupedLinear: save_original_input saves nothing here: the planes of tokens are "
            "kept for the backward, whose numbers are the same",
        )
    tracker, place, fill = (
        given[name] for name in ("get_rng_state_tracker", "rng_tracker_name", "init_method")
    )
    if tracker is None or place is None:
        return

    def drawn(weight: torch.Tensor) -> None:
        with tracker().fork(place):
            fill(weight)

    given["init_method"] = drawn


def _finish_groups(module: Any) -> None:
    """Let parameters be in the order `weight0, bias0, weight1, ...`, or grouped ones."""
    as_grouped(module)
    for g in range(module.num_gemms):
        for name in (f"weight{g}", f"bias{g}"):
            if name in module._parameters:
                module._parameters[name] = module._parameters.pop(name)


def _tell_original(module: Any) -> None:
    """Warn, once for each recipe, where a recipe does not let a backward have the original input.

    Args:
        module: a linear one.
    """
    recipe: Any = settings.current().recipe if module.asks_original else None
    if recipe is None or torch.compiler.is_compiling() or recipe.key in module.told_of_original:
        return
    name = module.part_name(module.parts_of(recipe)[0])
    asked = recipe.for_name(name).ask(QuantizerRole(module.module_type, "input", name))
    if asked.columnwise_source != "original":
        module.told_of_original = {*module.told_of_original, recipe.key}
        text = "the recipe makes the backward's plane of what the forward's decodes to"
        warn(f"Ignoring save_original_input=True: {text}", UserWarning)


#: What `_tell_original` reads of a module.
_ASKS: Final = {"save_original_input": "asks_original"}


class _Linear(OverRanks, Readings):
    """Base of the modules that may be asked to save their input as it came."""

    #: Whether the caller asked; recipes that were told of.
    asks_original = False
    told_of_original: frozenset[str] | set[str] = frozenset()


def _in_autocast(module: Any, given: dict[str, Any]) -> None:
    """Let a layer's residuals have the dtype of torch.autocast, where that is on.

    Args:
        module: a TransformerLayer.
        given: the arguments of its forward.
    """
    x = given["hidden_states"]
    kind = x.device.type
    if kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind):
        given["hidden_states"] = x.to(torch.get_autocast_dtype(kind))


@with_arguments
class Linear(_Linear, nn.Linear):
    """`hybridq.Linear`; what it has no like of raises, by the argument's name.

    Example:
        >>> import torch, hybridq.te as te
        >>> layer = te.Linear(64, 32, bias=False, params_dtype=torch.bfloat16)
        >>> with te.autocast(recipe=te.common.recipe.Float8CurrentScaling()):
        ...     y = layer(torch.ones(4, 64, dtype=torch.bfloat16), is_first_microbatch=True)
        >>> y.shape, layer.quantizers["scaling_bwd"][0].dtype
        (torch.Size([4, 32]), <DType.kFloat8E5M2: 8>)
    """

    __init__ = constructor(
        nn.Linear,
        "in_features, out_features, sequence_parallel=False, fuse_wgrad_accumulation=False, "
        "tp_group=None, tp_size=1, get_rng_state_tracker=None, rng_tracker_name=None, "
        "init_method=None, bias=True, return_bias=False, params_dtype=None, parallel_mode=None, "
        "parameters_split=None, device=None, ub_overlap_ag=False, ub_overlap_rs=False, "
        "ub_overlap_rs_dgrad=False, ub_bulk_dgrad=False, ub_bulk_wgrad=False, ub_name=None, "
        "delay_wgrad_compute=False, symmetric_ar_type=None, save_original_input=False, name=None",
        prepare,
        kept=_ASKS,
    )

    def forward(
        self,
        inp: torch.Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> Any:
        """Return `inp @ weight.T + bias`, as `hybridq.Linear.forward`.

        Args:
            inp, is_first_microbatch, fp8_output, fp8_grad: as there.
        """
        _tell_original(self)
        return super().forward(inp, is_first_microbatch, fp8_output, fp8_grad)


@with_arguments
class LayerNormLinear(OverRanks, Readings, nn.LayerNormLinear):
    """`hybridq.LayerNormLinear`; what it has no like of raises, by the argument's name."""

    __init__ = constructor(
        nn.LayerNormLinear,
        "in_features, out_features, eps=1e-5, sequence_parallel=False, "
        "fuse_wgrad_accumulation=False, tp_group=None, tp_size=1, get_rng_state_tracker=None, "
        "init_method=None, bias=True, normalization='LayerNorm', return_bias=False, "
        "params_dtype=None, parallel_mode=None, return_layernorm_output=False, "
        "return_layernorm_output_gathered=False, parameters_split=None, "
        "zero_centered_gamma=False, device=None, ub_overlap_ag=False, ub_overlap_rs=False, "
        "ub_overlap_rs_dgrad=False, ub_bulk_wgrad=False, ub_bulk_dgrad=False, ub_name=None, "
        "delay_wgrad_compute=False, symmetric_ar_type=None, name=None",
        prepare,
    )


@with_arguments
class LayerNormMLP(OverRanks, Readings, nn.LayerNormMLP):
    """`hybridq.LayerNormMLP`; what it has no like of raises, by the argument's name.

    `checkpoint=True` runs the forward again in the backward, by `hybridq.checkpoint`.
    """

    #: Whether the caller asked for it; children of other modules are not asked.
    runs_again = False

    __init__ = constructor(
        nn.LayerNormMLP,
        "hidden_size, ffn_hidden_size, eps=1e-5, sequence_parallel=False, return_bias=False, "
        "get_rng_state_tracker=None, tp_group=None, tp_size=1, init_method=None, bias=True, "
        "normalization='LayerNorm', activation='gelu', activation_params=None, "
        "output_layer_init_method=None, fuse_wgrad_accumulation=False, params_dtype=None, "
        "return_layernorm_output=False, return_layernorm_output_gathered=False, seq_length=None, "
        "micro_batch_size=None, set_parallel_mode=False, zero_centered_gamma=False, device=None, "
        "ub_overlap_ag=False, name=None, ub_overlap_rs=False, ub_overlap_rs_dgrad=False, "
        "ub_bulk_dgrad=False, ub_bulk_wgrad=False, delay_wgrad_compute=False, "
        "symmetric_ar_type=None, checkpoint=False",
        prepare,
        kept={"checkpoint": "runs_again"},
    )

    def forward(
        self,
        inp: torch.Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> Any:
        """Return `fc2(activation(fc1(norm(inp))))`, as `hybridq.LayerNormMLP.forward`.

        Args:
            inp, is_first_microbatch, fp8_output, fp8_grad: as there.
        """
        given = (inp, is_first_microbatch, fp8_output, fp8_grad)
        if self.runs_again and torch.is_grad_enabled():
            return nn.checkpoint(super().forward, *given)
        return super().forward(*given)


@with_arguments
class GroupedLinear(Regroups, _Linear, nn.GroupedLinear):
    """`hybridq.GroupedLinear`, whose parameters are in the order `weight0, bias0, weight1, ...`.

    What it has no like of raises, by the argument's name; a `tp_group` of one rank, and a
    `parallel_mode` beside it, say nothing.
    """

    _reads_state = False
    __init__ = constructor(
        nn.GroupedLinear,
        "num_gemms, in_features, out_features, sequence_parallel=False, "
        "fuse_wgrad_accumulation=False, tp_group=None, tp_size=1, get_rng_state_tracker=None, "
        "rng_tracker_name=None, init_method=None, bias=True, return_bias=False, "
        "params_dtype=None, parallel_mode=None, device=None, ub_overlap_rs=False, "
        "ub_overlap_ag=False, ub_name=None, delay_wgrad_compute=False, "
        "save_original_input=False, single_grouped_weight=False, single_grouped_bias=False, "
        "name=None, use_grouped_tensor=None",
        _prepare_groups,
        _finish_groups,
        _ASKS,
    )

    def forward(  # type: ignore[override]
        self,
        inp: torch.Tensor,
        m_splits: Any,
        is_first_microbatch: bool | None = None,
        out: torch.Tensor | None = None,
        dgrad_out: torch.Tensor | None = None,
    ) -> Any:
        """Return each group's tokens times its weight, as `hybridq.GroupedLinear.forward`.

        Args:
            inp, m_splits, is_first_microbatch: as there.
            out, dgrad_out: memory for the result and for the input's gradient, of their shapes and
                dtypes; each costs a copy. Rows behind the splits' sum keep what it holds.

        Raises:
            ValueError: `out` does not fit, or in the backward `dgrad_out`; or as there.
        """
        _tell_original(self)
        inp = gradient_into("dgrad_out", dgrad_out, inp, m_splits)
        made = super().forward(inp, m_splits, is_first_microbatch)
        y, *bias = made if self.return_bias else (made,)
        y = result_into("out", out, y, m_splits)
        if bias and self.use_bias and self.single_grouped_bias:
            bias = [self.bias]  # the parameter itself
        return (y, *bias) if self.return_bias else y

    def groups_of_scales(self) -> tuple[str, ...]:
        """Return the numbers of the groups, each of which has scales of its own."""
        return tuple(map(str, range(self.num_gemms)))


@with_arguments
class TransformerLayer(WholeSequences, WithoutExtraState, nn.TransformerLayer):
    """`hybridq.TransformerLayer`; what it has no like of raises, by the argument's name.

    Example:
        >>> import torch, hybridq.te as te
        >>> layer = te.TransformerLayer(64, 128, 4, layer_number=1, seq_length=10, device="cpu")
        >>> layer(torch.randn(10, 2, 64), None, "causal").shape
        torch.Size([10, 2, 64])
    """

    __init__ = constructor(
        nn.TransformerLayer,
        "hidden_size, ffn_hidden_size, num_attention_heads, num_gqa_groups=None, "
        "layernorm_epsilon=1e-5, hidden_dropout=0.1, attention_dropout=0.1, init_method=None, "
        "output_layer_init_method=None, layer_number=None, kv_channels=None, "
        "self_attn_mask_type='causal', window_size=None, bottom_right_diagonal=None, "
        "enc_dec_attn_mask_type='no_mask', enc_dec_bottom_right_diagonal=None, "
        "enc_dec_window_size=None, tp_group=None, tp_size=1, params_dtype=None, "
        "get_rng_state_tracker=None, fuse_wgrad_accumulation=False, seq_length=None, "
        "micro_batch_size=None, sequence_parallel=False, "
        "apply_residual_connection_post_layernorm=False, output_layernorm=False, "
        "parallel_attention_mlp=False, layer_type='encoder', drop_path_rate=0.0, "
        "set_parallel_mode=False, fuse_qkv_params=False, rotary_pos_interleaved=False, "
        "zero_centered_gamma=False, qkv_weight_interleaved=True, ub_tp_comm_overlap=False, "
        "ub_overlap_ag=True, ub_overlap_rs=True, ub_overlap_rs_dgrad=False, ub_bulk_dgrad=True, "
        "ub_bulk_wgrad=True, bias=True, activation='gelu', activation_params=None, "
        "normalization='LayerNorm', device=None, attn_input_format='sbhd', name=None, "
        "qk_norm_type=None, qk_norm_eps=1e-6, qk_norm_before_rope=False, softmax_type='vanilla'",
        prepare,
        own_children,
    )

    forward = forward(
        nn.TransformerLayer,
        "hidden_states, attention_mask=None, self_attn_mask_type=None, window_size=None, "
        "encoder_output=None, enc_dec_attn_mask=None, enc_dec_attn_mask_type=None, "
        "enc_dec_window_size=None, is_first_microbatch=None, checkpoint_core_attention=False, "
        "inference_params=None, rotary_pos_emb=None, core_attention_bias_type='no_bias', "
        "core_attention_bias=None, alibi_slopes=None, cu_seqlens_q=None, cu_seqlens_kv=None, "
        "cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None, max_seqlen_q=None, "
        "max_seqlen_kv=None, fast_zero_fill=True, pad_between_seqs=None",
        prepare=_in_autocast,
    )


class Fp8Padding(AlignedByRecipe, nn.Fp8Padding):
    """`hybridq.nn.Fp8Padding`; without a size it is what the recipe says that is met first."""


class Fp8Unpadding(AlignedByRecipe, nn.Fp8Unpadding):
    """`hybridq.nn.Fp8Unpadding`; without a size it is what the recipe says that is met first."""


for _class in (Linear, LayerNormLinear, LayerNormMLP, GroupedLinear, TransformerLayer):
    join(_class, f"{__package__}.pytorch.module")
for _class in (LayerNorm, RMSNorm):
    join(_class, f"{__package__}.pytorch.module")
