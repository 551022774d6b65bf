"""`--modules`: the demo's model of fused modules trains as the one of separate modules."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from hybridq import LayerNormLinear, LayerNormMLP, Linear
from hybridq.demo import report
from hybridq.demo.compare import Comparison
from hybridq.demo.data import load_corpus
from hybridq.demo.measure import weight_nbytes
from hybridq.demo.model import ModelConfig, Transformer
from hybridq.demo.train import Run, TrainConfig
from hybridq.demo.variants import VARIANTS
from hybridq.nn import convert
from hybridq_cli.app import app

TINY = TrainConfig(
    model=ModelConfig(layers=2, hidden=32, heads=2, ffn=48, sequence=32),
    batch=2,
    steps=4,
    eval_batches=2,
    eval_points=2,
    lr=1e-2,
)
FUSED = dataclasses.replace(TINY, modules="fused")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("text")
    for i in range(12):
        (root / f"{i}.txt").write_text(f"the {i}th file says what the others say\n" * 30)
    return root


@pytest.fixture(scope="module")
def corpus(folder):
    return load_corpus(folder, 32)


def curve(config, recipe, corpus):
    run = Run(config, recipe, corpus)
    for _ in run.steps():
        pass
    return run.result.train_curve, run.result.validation_curve


def test_without_a_recipe_it_trains_bit_for_bit_as_the_plain_model(corpus):
    assert curve(FUSED, "bf16", corpus) == curve(TINY, "bf16", corpus)


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "mxfp8_fwd_nvfp4_bwd"])
def test_under_a_recipe_it_is_close_to_it(corpus, recipe):
    fused, plain = curve(FUSED, recipe, corpus), curve(TINY, recipe, corpus)
    baseline = curve(TINY, "bf16", corpus)
    assert fused != baseline
    # The norms differ in last bits, the function that is quantized does not.
    assert fused[0][0][1] == pytest.approx(plain[0][0][1], rel=2e-2)


@pytest.mark.parametrize("modules", VARIANTS)
def test_the_variants_have_the_same_initial_values(modules):
    models = []
    for name in ("plain", modules):
        torch.manual_seed(3)
        models.append(VARIANTS[name](Transformer(TINY.model, Linear)))
    plain, variant = ([p.detach() for p in model.parameters()] for model in models)
    assert sum(p.numel() for p in plain) == sum(p.numel() for p in variant)
    sums = [
        sorted((tuple(p.shape), p.double().sum().item()) for p in ps) for ps in (plain, variant)
    ]
    assert sums[0] == sums[1]
    tokens = torch.randint(256, (2, 24))
    assert torch.equal(models[0](tokens), models[1](tokens))


def test_what_the_fused_model_is_made_of():
    model = convert(VARIANTS["fused"](Transformer(TINY.model, Linear)))
    kinds = [type(m) for m in model.blocks.modules() if isinstance(m, (nn.Linear, nn.RMSNorm))]
    assert kinds == [Linear] * TINY.model.layers  # attention's output projection
    for index, block in enumerate(model.blocks):
        assert isinstance(block.attention.qkv, LayerNormLinear)
        assert isinstance(block.mlp, LayerNormMLP) and block.mlp.name == f"blocks.{index}.mlp"
    with torch.no_grad():
        plain = convert(Transformer(TINY.model, Linear))
    for recipe in ("bf16", "mxfp8"):
        assert weight_nbytes(model, recipe) == weight_nbytes(plain, recipe) > 0


def test_the_report_says_so(corpus):
    comparison = Comparison(dataclasses.replace(FUSED, steps=1), ["bf16"], corpus)
    comparison.run()
    made = report.build_report(comparison)
    assert made["settings"]["modules"] == "fused"
    assert report.build_table(made).title.endswith(", fused modules")


def test_an_unknown_name():
    with pytest.raises(ValueError, match=r"modules must be one of plain, fused.*'welded'"):
        TrainConfig(modules="welded")


def test_the_command(folder, tmp_path):
    sizes = [*("--layers", "1", "--hidden", "32", "--heads", "2", "--ffn", "48")]
    sizes += ["--sequence", "32", "--batch", "2", "--steps", "2"]
    out = ["--data", str(folder), "--out", str(tmp_path), "--recipes", "bf16,mxfp8"]
    result = CliRunner().invoke(app, ["train", *sizes, *out, "--modules", "fused"])
    assert result.exit_code == 0, result.output
    assert "fused modules" in re.sub(r"\s+", " ", result.output)
    assert json.loads((tmp_path / "report.json").read_text())["settings"]["modules"] == "fused"
    result = CliRunner().invoke(app, ["train", *sizes, *out, "--modules", "welded"])
    assert result.exit_code == 2 and "modules must be one of" in result.output
