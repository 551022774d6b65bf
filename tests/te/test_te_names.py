"""The table of Transformer Engine's public names says what is so."""

from __future__ import annotations

import importlib.util
import re

import pytest

import hybridq.te as te
from hybridq.te.refused import REFUSED
from places import ROOT

#: What `transformer_engine.pytorch` imports for its users (its main branch, 2026).
NAMES = tuple(
    re.findall(
        r"\w+",
        """
CPLoadBalancingStrategy CudaRNGStatesTracker CusolverMpCtx DType DelayedScalingRequest
DotProductAttention Float8BlockQuantizer Float8BlockwiseQTensor Float8BlockwiseQTensorStorage
Float8CurrentScalingQuantizer Float8Quantizer Float8Tensor Float8TensorStorage Fp8Padding
Fp8Unpadding FusedMLAQUpProjFunction FusedMLAQUpProjRopeQuant GatedDeltaNetAttention
GroupedLinear HybridQuantizedTensor HybridQuantizedTensorStorage HybridQuantizer
IdentityQuantizer IdentityTensor IdentityTensorStorage InferenceParams LayerNorm LayerNormLinear
LayerNormMLP Linear MXFP8Quantizer MXFP8Tensor MXFP8TensorStorage ManualOffloadSynchronizer
MultiheadAttention NVFP4Quantizer NVFP4Tensor NVFP4TensorStorage QuantizedTensor
QuantizedTensorStorage Quantizer QuantizerRequest QuantizerRole RMSNorm RotaryPositionEmbedding
TransformerLayer UserBufferQuantizationMode apply_recipe autocast checkpoint constants
deinterleave_glu_tensor destroy_ub fp8_autocast fp8_model_init get_cpu_offload_context
get_cudnn_version get_default_recipe get_device_compute_capability initialize_ub
interleave_glu_tensor is_bf16_available is_fp8_available is_fp8_block_scaling_available
is_mxfp8_available is_nvfp4_available make_graphed_callables mark_not_offload moe_permute
moe_permute_and_pad_with_probs moe_permute_with_probs moe_sort_chunks_by_index
moe_sort_chunks_by_index_with_probs moe_unpermute newton_schulz newton_schulz_tp onnx_export ops
optimizers parallel_cross_entropy prepare_for_saving quantized_model_init quantizer_factory
restore_from_func_ctx restore_from_saved
""",
    )
)


PAGE = ROOT / "docs" / "guides" / "from-transformer-engine.md"


def rows() -> dict[str, tuple[str, str]]:
    """The table of the guide: by name, how it is here, and the note."""
    table = PAGE.read_text().split("## Every public name")[1]
    found = re.findall(r"^\| `(\w+)` \| (\w+) \| (.*?) ?\|$", table, re.M)
    return {name: (kind, note) for name, kind, note in found}


def test_the_table_has_every_name() -> None:
    assert sorted(rows(), key=str.lower) == sorted(NAMES, key=str.lower) == list(rows())
    assert {kind for kind, _ in rows().values()} == {"same", "adapter", "refused"}
    kinds = [kind for kind, _ in rows().values()]
    same, adapted, refused = (kinds.count(kind) for kind in ("same", "adapter", "refused"))
    told = (
        f"of {len(kinds)} names {same} are the same; {adapted} are adapters, with what differs; "
        f"{refused} are refused,"
    )
    assert told in " ".join(PAGE.read_text().split())
    known = importlib.util.find_spec("transformer_engine")
    if known is not None:  # where it is installed, it says itself what there is
        pytorch = pytest.importorskip("transformer_engine.pytorch")
        public = {
            name
            for name, value in vars(pytorch).items()
            if getattr(value, "__module__", "").startswith("transformer_engine") and name[0] != "_"
        }
        assert public <= set(rows())


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_as_the_table_says(name: str) -> None:
    kind, note = rows()[name]
    if kind == "refused":
        assert note == REFUSED[name]
        with pytest.raises(AttributeError, match=f"te.{name} is not here: "):
            getattr(te, name)
        return
    assert name not in REFUSED and (note or kind == "same")
    value = getattr(te, name)
    assert name in te.__all__ or name in ("constants",)
    assert value.__doc__, name


def test_a_name_that_there_is_not_at_all() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Linaer'"):
        _ = te.Linaer
    assert not hasattr(te, "newton_schulz")
