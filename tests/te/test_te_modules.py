"""Modules of the door: what is inside of them, states of recipes, names that libraries import."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import hybridq
import hybridq.te as te
from hybridq.te.common import recipe
from hybridq.te.custom_recipes import quantizer_factories, reference


def test_modules_inside_of_modules_are_the_doors() -> None:
    torch.manual_seed(0)
    options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "name": "tl0"}
    layer = te.TransformerLayer(64, 128, 4, layer_type="decoder", **options)
    kinds = {type(one).__name__: type(one) for one in layer.modules()}
    for name in ("Linear", "LayerNormLinear", "LayerNormMLP", "MultiheadAttention"):
        assert kinds[name] is getattr(te, name)
    assert kinds["DotProductAttention"] is te.DotProductAttention

    def factory(role):
        if role is not None and role.name.endswith("fc2"):
            return te.NVFP4Quantizer()
        return te.MXFP8Quantizer(te.DType.kFloat8E4M3)

    plain = hybridq.TransformerLayer(64, 128, 4, layer_type="decoder", **options)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(5, 2, 64)
    own = recipe.CustomRecipe(factory)
    with te.autocast(recipe=own):
        assert torch.equal(layer(x, encoder_output=x), plain(x, encoder_output=x))
    qkv, fwd = layer.self_attention.layernorm_qkv, "scaling_fwd"
    assert isinstance(qkv.quantizers[fwd][0], te.MXFP8Quantizer)
    index = te.constants.FP8FwdTensorIdx
    assert isinstance(layer.layernorm_mlp.quantizers[fwd][index.GEMM2_INPUT], te.NVFP4Quantizer)
    assert qkv.fp8_meta_tensors_initialized
    assert not te.Linear(8, 8).fp8_meta_tensors_initialized


def test_a_projection_whose_bias_is_apart_has_the_read_outs() -> None:
    attention = te.MultiheadAttention(64, 4, attention_dropout=0.0, return_bias=True)
    with te.autocast(recipe=recipe.MXFP8BlockScaling()):
        _, bias = attention(torch.randn(5, 2, 64))
    assert bias is attention.proj.bias
    assert isinstance(attention.proj.quantizers["scaling_fwd"][0], te.MXFP8Quantizer)


def test_attention_has_a_name_for_its_roles() -> None:
    asked = []

    def factory(role):
        asked.append(role and role.name)
        return te.MXFP8Quantizer(te.DType.kFloat8E4M3)

    attention = te.DotProductAttention(2, 32, qkv_format="bshd", name="tl3.core_attention")
    x = torch.randn(1, 4, 2, 32)
    with te.autocast(recipe=recipe.CustomRecipe(factory, fp8_dpa=True)):
        attention(x, x, x)
    assert set(asked) == {"tl3.core_attention"}


def test_attention_is_told_of_a_group_of_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        group, x = torch.distributed.group.WORLD, torch.randn(4, 1, 2, 32)
        told = {"cp_group": group, "cp_global_ranks": [0], "cp_stream": object()}
        attention = te.DotProductAttention(2, 32, cp_comm_type="all_gather", **told)
        plain = te.DotProductAttention(2, 32)
        layer = te.TransformerLayer(32, 64, 2)
        assert torch.equal(attention(x, x, x), plain(x, x, x))
        for one in (attention, layer, layer.self_attention):
            one.set_context_parallel_group(group, [0], None, "p2p")
            one.set_context_parallel_group(None, None, object())
        monkeypatch.setattr("hybridq.te.whole_sequences.ranks_of", lambda group: 2)
        for call in (
            lambda: te.DotProductAttention(2, 32, **told),
            lambda: layer.set_context_parallel_group(**told),
            lambda: attention.set_context_parallel_group([group, group], [0], None, "a2a+p2p"),
        ):
            with pytest.raises(NotImplementedError, match="cp_group must be None or of one rank"):
                call()
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("number", [None, 1, 4])
def test_attention_takes_any_number_of_splits(number: int | None) -> None:
    attention = te.DotProductAttention(2, 32, qkv_format="bshd")
    x = torch.randn(1, 4, 2, 32)
    assert torch.equal(attention(x, x, x, num_splits=number), attention(x, x, x))


def test_a_layer_takes_packed_sequences_with_gaps() -> None:
    torch.manual_seed(0)
    given = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "self_attn_mask_type": "causal"}
    layer = te.TransformerLayer(32, 64, 2, attn_input_format="thd", **given)
    alone = te.TransformerLayer(32, 64, 2, attn_input_format="bshd", **given)
    alone.load_state_dict(layer.state_dict())
    ends = torch.tensor([0, 3, 8], dtype=torch.int32)
    places = torch.tensor([0, 4, 12], dtype=torch.int32)
    x = torch.randn(12, 32)
    got = layer(
        x, self_attn_mask_type="padding_causal", cu_seqlens_q=ends, cu_seqlens_kv=ends,
        cu_seqlens_q_padded=places, cu_seqlens_kv_padded=places, max_seqlen_q=8,
        max_seqlen_kv=8, pad_between_seqs=True,
    )  # fmt: skip
    for own in (slice(0, 3), slice(4, 9)):
        torch.testing.assert_close(got[own], alone(x[None, own])[0])


def test_states_of_delayed_slots_share_memory() -> None:
    def factory(role):
        if role is not None and role.tensor_type == "weight":
            return te.MXFP8Quantizer(te.DType.kFloat8E4M3)
        return te.DelayedScalingRequest(amax_history_len=16)

    roles = [te.QuantizerRole("linear", kind) for kind in ("input", "weight", "grad_output")]
    state = te.RecipeState.create(
        recipe.CustomRecipe(factory), mode="forward", num_quantizers=3, roles=roles
    )
    assert isinstance(state, te.CustomRecipeState)
    first, weight, last = state.make_quantizers()
    assert isinstance(weight, te.MXFP8Quantizer)
    assert state.scale.tolist() == [1.0, 1.0] and state.amax_history.shape == (16, 2)
    assert (first.dtype, last.dtype) == (te.DType.kFloat8E4M3, te.DType.kFloat8E5M2)
    state.scale.fill_(2.0)
    assert first.scale.item() == last.scale.item() == 2.0
    last(torch.full((4, 32), 3.0))
    assert state.amax_history[0].tolist() == [0.0, 3.0]
    none = te.RecipeState.create(recipe.MXFP8BlockScaling(), mode="backward", num_quantizers=2)
    assert len(none.make_quantizers()) == 2 and none.scale is None


def test_factories_of_references_are_those_of_the_quantizers() -> None:
    torch.manual_seed(0)
    layer, found = te.Linear(64, 32), []
    x = torch.randn(8, 64)
    for factory in (
        reference.current_scaling_ref_factory,
        quantizer_factories.current_scaling_factory,
        reference.nvfp4_ref_rht_2d_factory,
        quantizer_factories.nvfp4_factory,
    ):
        with te.autocast(recipe=recipe.CustomRecipe(factory)):
            found.append(layer(x))
        assert factory.qfactory_key[1] == 1
    assert torch.equal(found[0], found[1]) and torch.equal(found[2], found[3])


def test_a_report_has_the_statistics_of_the_doors_modules() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(te.LayerNormLinear(64, 64), te.Linear(64, 32))
    x = torch.randn(16, 64)
    shown = [
        hybridq.report(model, x, recipe=own, loss=lambda y: y.square().mean()).worst(50)
        for own in (recipe.NVFP4BlockScaling(disable_stochastic_rounding=True), "nvfp4")
    ]
    rows = {(row.layer, row.tensor, row.direction): row for row in shown[0]}
    slots = {(layer, tensor) for layer, tensor, _ in rows}
    kinds = ("input", "weight", "grad_output")
    assert slots == {(layer, kind) for layer in "01" for kind in kinds}
    for row in shown[1]:
        if row.tensor != "grad_output":  # these are rounded stochastically
            own = rows[row.layer, row.tensor, row.direction]
            assert own.statistics == row.statistics
    weight = model[1].weight.detach()
    kept = hybridq.quantize(weight, "nvfp4_16x16").dequantize()
    want = float((kept - weight).double().norm() / weight.double().norm())
    assert rows["1", "weight", "rowwise"].statistics.relative_error == pytest.approx(want, rel=1e-6)


IMPORTS = """
import hybridq.te
hybridq.te.stand_in()
import transformer_engine_torch as tex
import transformer_engine.pytorch as te
from transformer_engine.pytorch.tensor.storage.identity_tensor_storage import IdentityTensorStorage
from transformer_engine.pytorch.tensor.storage.float8_blockwise_tensor_storage import (
    Float8BlockwiseQTensorStorage,
)
from transformer_engine.pytorch.custom_recipes.reference_nvfp4 import nvfp4_ref_rht_2d_factory
from transformer_engine.pytorch.utils import is_non_tn_fp8_gemm_supported
import transformer_engine.pytorch.ops as te_ops
assert tex.DType is te.DType and tex.FP8FwdTensors.GEMM1_WEIGHT == 1
assert IdentityTensorStorage is te.IdentityTensorStorage and te_ops is te.ops
assert not is_non_tn_fp8_gemm_supported()
"""


@pytest.mark.slow
def test_what_libraries_import_is_there() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("shape", [(), (1,), (3, 4)])
def test_transposed_codes_have_the_shape_of_the_transpose(shape) -> None:
    t = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3)(torch.ones(shape))
    assert t._data.shape == shape and t._transpose.shape == shape[::-1]
