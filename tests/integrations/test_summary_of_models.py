"""Small models of transformers: what is reached of them, and what the summary says."""

from __future__ import annotations

import pytest

import hybridq
from models.families import FAMILIES

pytest.importorskip("transformers")

#: Of each model, why what is not converted is not: every module that has a share of the operations.
LEFT = {
    "BERT": {"heads, get_output_embeddings()", "heads, the name cls.predictions.transform.dense"},
    "ViT": {"heads, its 2 features are the labels of the configuration"},
    "T5": {"heads, get_output_embeddings()", "kept_in_fp32, _keep_in_fp32_modules"},
    "SigLIP": set(),
    "wav2vec 2.0": set(),
}


@pytest.mark.parametrize("name", LEFT)
def test_the_summary_has_every_reason(name) -> None:
    family = next(one for one in FAMILIES if one.name == name)
    model = family.build()
    inputs = family.batch(model)
    before = hybridq.summary(model, input=inputs)
    hybridq.convert(model)
    after = hybridq.summary(model, "mxfp8", inputs)
    assert after.share == before.share > 0.6 and after.other_flops == before.other_flops
    reached = {one.name for one in after.modules if one.is_quantized}
    assert reached == {one.name for one in before.modules if one.state == "converted"}
    assert {one.reason for one in after.modules if one.flops and not one.is_quantized} == LEFT[name]
    convs = [m for m in model.modules() if isinstance(m, hybridq.nn.PatchConv)]
    assert len(convs) == {"ViT": 1, "SigLIP": 1, "wav2vec 2.0": 1}.get(name, 0)


@pytest.mark.parametrize("name", ["Falcon", "Mixtral", "GPT-OSS", "SigLIP"])
def test_the_share_is_that_of_another_count(name) -> None:
    """The other one sees operations alone, under the recipe, and knows nothing of modules."""
    from models.linear_flops import linear_flops

    (family,) = (one for one in FAMILIES if one.name == name)
    model = family.build()
    batch = family.batch(model)
    hybridq.convert(model.eval())
    counted = linear_flops(model, batch, "mxfp8")
    found = hybridq.summary(model, "mxfp8", batch)
    assert found.share_of_linear_flops == counted.share_of_all
