"""Linear layers of transformers that are no nn.Linear: GPT-2's, Falcon's and others."""

from __future__ import annotations

import copy
import io
import sys

import pytest
import torch

import hybridq
from hybridq.nn import ForeignLinear, Linear
from linear_model import equal

transformers = pytest.importorskip("transformers")


def _gpt2():
    config = transformers.GPT2Config(
        n_layer=2,
        n_embd=64,
        n_head=2,
        vocab_size=96,
        n_positions=32,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config)


def _falcon():
    config = transformers.FalconConfig(
        num_hidden_layers=2, hidden_size=64, num_attention_heads=2, vocab_size=96, bias=True
    )
    return transformers.FalconForCausalLM(config)


MODELS = {"gpt2": (_gpt2, "Conv1D", 8), "falcon": (_falcon, "FalconLinear", 8)}


def made(kind: str, dtype=torch.float32):
    """A model with weights large enough that a rounding is seen."""
    torch.manual_seed(0)
    model = MODELS[kind][0]().eval().to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.mul_(8)
            elif name.endswith("bias"):
                parameter.normal_()
    return model


def results(model, ids, **context) -> list[torch.Tensor]:
    """Loss, logits and all gradients."""
    model.zero_grad()
    with hybridq.autocast(**context):
        found = model(ids, labels=ids)
    found.loss.backward()
    grads = [one.grad.clone() for one in model.parameters()]
    return [found.loss.detach(), found.logits.detach(), *grads]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_models_bits_stay_and_its_layers_are_all_reached(kind, dtype) -> None:
    model, ids = made(kind, dtype), torch.randint(0, 96, (2, 16))
    want, names = results(model, ids, enabled=False), list(model.state_dict())
    shapes = [tuple(one.shape) for one in model.parameters()]
    hybridq.convert(model)
    report = hybridq.conversion(model)
    _, name, count = MODELS[kind]
    assert (name, count, count) in report.kinds and report.others == ()
    assert [one for one, _ in report.left_alone] == ["lm_head"]
    assert f"hybridq.{name}(in_features=64, out_features=" in str(model)
    assert equal(results(model, ids, enabled=False), want)
    assert list(model.state_dict()) == names
    assert [tuple(one.shape) for one in model.parameters()] == shapes
    quantized = results(model, ids, recipe="mxfp8")
    assert not torch.equal(quantized[1], want[1])
    assert (quantized[0] - want[0]).abs() < 0.1 * want[0].abs()


def test_gpt2_is_the_linear_of_the_transposed_weight_bit_for_bit() -> None:
    model = made("gpt2")
    hybridq.convert(model)
    layer, x = model.transformer.h[0].mlp.c_fc, torch.randn(3, 5, 64)
    twin = Linear(64, 256)
    with torch.no_grad():
        twin.weight.copy_(layer.weight.T)
        twin.bias.copy_(layer.bias)
    for recipe in ("mxfp8_fwd_nvfp4_bwd", "fp8_block"):
        found = []
        for one in (layer, twin):
            torch.manual_seed(1)
            given = x.clone().requires_grad_()
            with hybridq.autocast(recipe=recipe):
                y = one(given)
            y.square().sum().backward()
            found.append([y.detach(), given.grad, one.weight.grad, one.bias.grad])
            one.zero_grad()
        found[0][2] = found[0][2].T
        assert equal(*found)


@pytest.mark.parametrize("kind", MODELS)
def test_copies_files_and_checkpointing(kind) -> None:
    model, ids = made(kind), torch.randint(0, 96, (2, 8))
    hybridq.convert(model)
    want = results(model, ids, recipe="mxfp8")
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert hybridq.conversion(other).kinds == hybridq.conversion(model).kinds
        assert equal(results(other, ids, recipe="mxfp8"), want)
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for one in model.modules():
        if isinstance(one, torch.nn.Dropout):
            one.p = 0.0
    assert equal(results(model, ids, recipe="mxfp8"), want)


def test_isinstance_holds_and_other_libraries_know_the_layer() -> None:
    from transformers.pytorch_utils import Conv1D

    layer = hybridq.convert(Conv1D(64, 32))
    assert isinstance(layer, Conv1D) and isinstance(layer, ForeignLinear) and layer.nf == 64
    assert type(layer).__name__ == "Conv1D" and type(layer).__doc__.startswith(
        "transformers' `Conv"
    )
    narrow = hybridq.conversion(torch.nn.ModuleList([Conv1D(64, 4)]))
    assert narrow.left_alone == (("0", "narrow, 4 to 64 features"),)


def test_a_layer_with_more_rows_stays_and_says_why() -> None:
    from transformers.models.idefics.modeling_idefics import IdeficsDecoupledLinear

    model = torch.nn.ModuleDict(
        {
            "more": IdeficsDecoupledLinear(64, 32, out_additional_features=8),
            "same": IdeficsDecoupledLinear(64, 32, partially_freeze=False),
        }
    )
    report = hybridq.conversion(model)
    assert report.left_alone == (("more", "a product of its own makes 8 more features"),)
    x = torch.randn(3, 64)
    want = model["same"](x)
    hybridq.convert(model)
    assert torch.equal(model["same"](x), want) and isinstance(model["same"], ForeignLinear)


def test_no_model_code_is_imported_for_the_table() -> None:
    falcon = "transformers.models.falcon.modeling_falcon"
    had = sys.modules.pop(falcon, None)
    try:
        hybridq.convert(torch.nn.Linear(16, 16))
        assert falcon not in sys.modules
    finally:
        if had is not None:
            sys.modules[falcon] = had
