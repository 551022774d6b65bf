"""The demo on several ranks: torchrun, the same losses as one process, and what travels."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import hybridq
from hybridq.demo.data import load_corpus
from hybridq.demo.model import ModelConfig, Transformer
from hybridq.demo.train import TrainConfig
from hybridq.demo.variants import VARIANTS
from hybridq.distributed import Sharding, plan
from hybridq_cli.app import app

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
    reason="this torch has no gloo",
)
RECIPE = "mxfp8_fwd_nvfp4_bwd"
TAIL = re.compile(
    r"validation loss (\S+) on (\d) ranks, (\S+) in one process; (\d+) wire bytes per step "
    r"\(.*\), (\S+) of BF16's; all-gathers (\S+)"
)


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("".join(f"the {i}th line says what the others say\n" for i in range(400)))
    return file


def torchrun(world: int, *args: str) -> subprocess.CompletedProcess[str]:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world))
    return subprocess.run(
        [sys.executable, *launcher, "-m", "hybridq", "train-fsdp", *args],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.parametrize(
    ("world", "recipe", "modules", "hidden"),
    [(2, RECIPE, "plain", 32), (3, "nvfp4", "fused", 40)],  # 40 rows on three ranks: uneven
)
@pytest.mark.slow
def test_ranks_and_one_process_come_to_the_same_loss(text, world, recipe, modules, hidden) -> None:
    sizes = {"layers": 2, "hidden": hidden, "heads": 2, "ffn": 48, "sequence": 32}
    numbers = sizes | {"batch": 6, "steps": 5, "eval-batches": 4, "eval-points": 2}
    options = [word for name, value in numbers.items() for word in (f"--{name}", str(value))]
    done = torchrun(world, *options, "--data", str(text), "--recipe", recipe, "--modules", modules)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.strip().splitlines()
    found = TAIL.fullmatch(lines[-1])
    assert found is not None, lines
    assert found[1] == found[3] and int(found[2]) == world
    # Every evaluation and every training loss that was printed is the same, too.
    shown = [line.partition(": ")[2] for line in lines[:-1]]
    assert len(shown) == 4 and shown[:2] == shown[2:]
    # What was counted is what a plan says, and the two numbers of clipping, from each rank.
    model = VARIANTS[modules](Transformer(ModelConfig(**sizes), hybridq.Linear))
    nbytes = [
        plan(hybridq.convert(model), name, Sharding(world)).moved_nbytes + 2 * 8 * world
        for name in (recipe, None)
    ]
    assert int(found[4]) == nbytes[0]
    assert found[5] == f"{nbytes[0] / nbytes[1]:.3f}"
    assert float(found[6]) < 0.6


@pytest.mark.slow
@pytest.mark.parametrize("axis", [{"tp": 2}, {"sp": 4}])
def test_ranks_that_share_samples_come_near_the_loss_of_one_process(text, axis) -> None:
    sizes = {"layers": 2, "hidden": 64, "heads": 4, "ffn": 64, "sequence": 32}
    numbers = sizes | {"batch": 4, "steps": 5, "eval-batches": 2, "eval-points": 5} | axis
    options = [word for name, value in numbers.items() for word in (f"--{name}", str(value))]
    done = torchrun(4, *options, "--data", str(text))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.strip().splitlines()
    found = TAIL.fullmatch(lines[-1])
    assert found is not None and int(found[2]) == 4, lines
    shown = [re.search(r"loss (\S+), validation (\S+) nats", line) for line in lines[:-1]]
    assert len(shown) == 10
    for mine, one in zip(shown[:5], shown[5:], strict=True):
        for number in (1, 2):
            assert float(mine[number]) == pytest.approx(float(one[number]), rel=5e-3)
    # Activations, which tensor parallelism gathers too, are in BF16.
    assert float(found[6]) < (0.9 if "tp" in axis else 0.6)


def test_one_process_in_turn_quantizes_and_is_a_plain_loop_for_one_rank(text) -> None:
    from hybridq.demo.fsdp import InTurnTrainer

    config = TrainConfig(
        model=ModelConfig(layers=1, hidden=32, heads=2, ffn=48, sequence=32),
        batch=4,
        steps=3,
        eval_batches=2,
        eval_points=1,
    )
    corpus = load_corpus(text, 32)
    curves = {}
    for recipe in ("bf16", RECIPE):
        trainer = InTurnTrainer(config, recipe, corpus, 2)
        curves[recipe] = [one.loss for one in trainer.steps()]
        assert trainer.validation_loss is not None and trainer.traffic.nbytes == 0
    assert curves["bf16"] != curves[RECIPE]
    assert curves["bf16"] == pytest.approx(curves[RECIPE], rel=0.05)


def test_gradients_are_added_in_the_order_of_the_ranks() -> None:
    from hybridq.demo.fsdp import mean_in_order

    parts = [torch.tensor([value]) for value in (1.0, 2.0**24, 1.0, -(2.0**24))]
    assert mean_in_order(parts).item() == 0.0  # ((1 + 2^24) + 1) - 2^24, each one rounded to even
    assert mean_in_order([parts[1], parts[3], parts[0], parts[2]]).item() == 0.5


def test_a_loss_that_is_not_finite_ends_the_training(text) -> None:
    from hybridq.demo.fsdp import InTurnTrainer

    config = TrainConfig(model=ModelConfig(1, 32, 2, 48, 32), batch=2, steps=3, eval_points=3)
    trainer = InTurnTrainer(config, "bf16", load_corpus(text, 32), 2)
    with torch.no_grad():
        trainer.model.lm_head.weight[0, 0] = torch.nan
    assert len(list(trainer.steps())) == 1
    assert trainer.validation_loss is None


# ---- errors


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "must run under torchrun, got a plain process"),
        (("--recipe", "nope"), "nope"),
        (("--hidden", "30"), "hidden=30"),
        (("--data", "/does/not/exist"), "existing file or folder"),
        (("--sp", "3"), "sp must divide the sequence and the heads"),
    ],
)
def test_what_cannot_run_is_one_clear_message(args, message) -> None:
    environment = {"COLUMNS": "300", "NO_COLOR": "1"}
    result = CliRunner().invoke(app, ["train-fsdp", *args], env=environment)
    assert result.exit_code == 2
    assert message in result.output and "Traceback" not in result.output


@pytest.mark.slow
def test_ranks_that_do_not_divide_the_batch_are_refused(text) -> None:
    done = torchrun(2, "--data", str(text), "--batch", "3", "--sequence", "32")
    assert done.returncode != 0
    told = re.sub(r"[\s│]+", " ", done.stderr)
    assert "ranks must be two or more and divide the batch, got 2 with a batch of 3" in told
