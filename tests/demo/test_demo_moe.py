"""The demo's mixture of experts: its layer against a loop over tokens, and a run of it."""

from __future__ import annotations

import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from typer.testing import CliRunner

from hybridq import autocast
from hybridq.demo import measure, report
from hybridq.demo.compare import Comparison
from hybridq.demo.data import load_corpus
from hybridq.demo.model import ModelConfig, Transformer
from hybridq.demo.moe import MixtureOfExperts
from hybridq.demo.train import TrainConfig
from hybridq.nn import GroupedLinear, convert
from hybridq_cli.app import app

TINY = TrainConfig(
    model=ModelConfig(layers=1, hidden=32, heads=2, ffn=48, sequence=32, experts=8),
    batch=2,
    steps=3,
    eval_batches=1,
    eval_points=1,
    lr=1e-2,
)


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("text")
    for i in range(12):
        (root / f"{i}.txt").write_text(f"the {i}th file says what the others say\n" * 30)
    return root


def layer(top: int = 2) -> MixtureOfExperts:
    torch.manual_seed(2)
    made = MixtureOfExperts(16, 24, 8, top)
    made.reset_parameters()
    return made


@pytest.mark.parametrize("top", [1, 2, 8])
def test_every_token_gets_its_experts(top: int) -> None:
    """Against a loop over the tokens in FP64."""
    moe, x = layer(top), torch.randn(3, 5, 16)
    y = moe(x)
    assert y.shape == x.shape
    for token, got in zip(x.view(-1, 16).double(), y.view(-1, 16), strict=True):
        logits = moe.router.weight.double() @ token
        best = logits.argsort(descending=True)[:top]
        want = torch.zeros(16, dtype=torch.float64)
        for weight, expert in zip(logits[best].softmax(0), best.tolist(), strict=True):
            gate, up = (getattr(moe.gate_up, f"weight{expert}").double() @ token).chunk(2)
            want += weight * (getattr(moe.down, f"weight{expert}").double() @ (F.silu(gate) * up))
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)


def test_the_router_is_fp32_whatever_is_around_it() -> None:
    moe, x = layer(), torch.randn(7, 16)
    weights, chosen = moe.route(x)
    with torch.autocast("cpu", torch.bfloat16), autocast(recipe="nvfp4"):
        again = moe.route(x)
        assert moe(x).dtype == torch.bfloat16
    assert torch.equal(weights, again[0]) and torch.equal(chosen, again[1])
    assert weights.dtype == torch.float32
    assert type(convert(moe).router) is torch.nn.Linear  # `convert` leaves it alone


def test_bad_sizes() -> None:
    with pytest.raises(ValueError, match=r"top must be in 1\.\.4, got 5"):
        MixtureOfExperts(8, 8, 4, 5)
    with pytest.raises(ValueError, match="got experts=1 with top=2"):
        ModelConfig(experts=1)
    with pytest.raises(ValueError, match="got experts=-1"):
        ModelConfig(experts=-1)


@pytest.mark.more
def test_the_model_compiles_in_one_graph_for_every_split() -> None:
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = convert(Transformer(TINY.model))
    assert model.blocks[0].ffn.gate_up.name == "blocks.0.ffn.gate_up"
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for _ in range(3):
        tokens = torch.randint(256, (2, 32))
        with autocast(recipe="mxfp8"):
            y, want = compiled(tokens), model(tokens)
        assert torch.equal(y, want)
    assert not counters["graph_break"] and counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()


def test_weights_of_experts_are_measured() -> None:
    model = convert(Transformer(TINY.model))
    experts = 8 * (32 * 48 + 24 * 32)
    attention = 32 * 96 + 32 * 32
    assert measure.weight_nbytes(model, "bf16") == 2 * (experts + attention)
    planes = measure.weight_nbytes(model, "mxfp8") / (experts + attention)
    assert 2 < planes < 2.2  # two planes of bytes, and their scales
    names = [name for name, one in model.named_modules() if isinstance(one, GroupedLinear)]
    assert names == ["blocks.0.ffn.gate_up", "blocks.0.ffn.down"]


def test_a_comparison_and_its_table(text_folder) -> None:
    made = Comparison(TINY, ("bf16", "mxfp8", "nvfp4"), load_corpus(text_folder, 32))
    made.run()
    assert [one.status for one in made.results] == ["finished"] * 3
    losses = [one.validation_loss for one in made.results]
    assert len(set(losses)) == 3 and all(math.isfinite(loss) for loss in losses)
    table = report.build_table(report.build_report(made))
    assert "Mixture of experts: top 2 of 8" in str(table.title)


def test_command_line(text_folder, tmp_path) -> None:
    sizes = ("--layers", "1", "--hidden", "32", "--heads", "2", "--ffn", "48", "--sequence", "32")
    small = ("--batch", "2", "--steps", "2", "--eval-batches", "1", "--eval-points", "1")
    shared = ("train", "--data", str(text_folder), "--out", str(tmp_path), *sizes, *small)
    result = CliRunner().invoke(app, [*shared, "--model", "moe", "--recipes", "bf16,mxfp8"])
    assert result.exit_code == 0, result.output
    assert "top 2 of 8" in result.output
    written = json.loads((tmp_path / "report.json").read_text())
    assert written["settings"]["model"]["experts"] == 8
    result = CliRunner().invoke(app, [*shared, "--model", "sparse"])
    assert result.exit_code == 2 and "model must be one of" in result.output


def test_the_experts_of_transformers(text_folder, tmp_path) -> None:
    pytest.importorskip("transformers", minversion="5.0")
    sizes = ("--layers", "2", "--hidden", "32", "--heads", "2", "--ffn", "64", "--sequence", "32")
    small = ("--batch", "2", "--steps", "2", "--eval-batches", "1", "--eval-points", "1")
    shared = ("train", "--data", str(text_folder), "--out", str(tmp_path), *sizes, *small)
    result = CliRunner().invoke(app, [*shared, "--model", "hf-moe", "--recipes", "bf16,mxfp8"])
    assert result.exit_code == 0, result.output
    assert "transformers' qwen3_moe" in result.output and "Quantized of the linear" in result.output
    plain, quantized = json.loads((tmp_path / "report.json").read_text())["recipes"]
    # Of each of two layers: 4 x 32^2 of attention, 2 x 3 x 32^2 of the experts of a token; 8 x 32
    # of the router; and 256 x 32 of the head.
    products, others = 2 * 10 * 32 * 32, 2 * 8 * 32 + 256 * 32
    assert quantized["quantized_share"] == pytest.approx(products / (products + others))
    weights = 2 * (4 + 8 * 3) * 32 * 32
    assert plain["weight_nbytes"] == 2 * weights
    assert 2 < quantized["weight_nbytes"] / weights < 2.2
    result = CliRunner().invoke(app, [*shared, "--model", "hf-moe", "--modules", "fused"])
    assert result.exit_code == 2 and "modules must be 'plain'" in result.output
