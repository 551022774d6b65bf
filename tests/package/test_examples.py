"""Each script of examples/ runs, learns, and is short enough to copy from."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch.distributed as dist

from places import ROOT
from rank_runs import needs_gloo

FOLDER = ROOT / "examples"
SCRIPTS = sorted(FOLDER.glob("*.py"))
#: Most lines of a script.
MOST_LINES = 60


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_is_short_and_says_what_it_is(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MOST_LINES
    assert text.startswith('"""')
    index = (ROOT / "docs" / "tutorials" / "index.md").read_text()
    assert path.name in index
    assert f"def test_{path.stem}" in Path(__file__).read_text()


def test_plain_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main = script("plain_loop").main
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('recipe = "fp8_delayed"\n[[rules]]\nname = "0"\nrecipe = "mxfp8"\n')
    first, last = (main(["--recipe", str(recipe), "--steps", steps]) for steps in ("1", "8"))
    assert last < first
    saved = ["--recipe", str(recipe), "--checkpoint", str(tmp_path / "run.pt")]
    main([*saved, "--steps", "4"])
    assert main([*saved, "--steps", "8"]) == last  # resumed, bit for bit


@pytest.mark.more
def test_hf_trainer(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs hybridq[transformers]")
    losses = script("hf_trainer").main(str(tmp_path), 10)
    assert losses[-1] < losses[0]
    assert (tmp_path / "checkpoint-10" / "model.safetensors").exists()


def test_accelerate_loop() -> None:
    pytest.importorskip("accelerate", reason="needs hybridq[accelerate]")
    losses = script("accelerate_loop").main(8)
    assert losses[-1] < losses[0]


def test_peft_lora() -> None:
    pytest.importorskip("peft", reason="needs hybridq[peft]")
    losses = script("peft_lora").main(4)
    assert losses[-1] < losses[0]


def test_rollout_kl(tmp_path: Path) -> None:
    """With the same bits both models are one: the estimate is 0, and it is not with others."""
    kl = script("rollout_kl").main(str(tmp_path / "kl.png"), 2, 2)
    assert kl["aligned"] == [0.0, 0.0]
    assert all(0.0 < one < 1.0 for one in kl["of FP32 values"])
    assert (tmp_path / "kl.png").stat().st_size > 1000


@needs_gloo
def test_torchtitan_like() -> None:
    main = script("torchtitan_like").main
    first, last = main(1), main(8)
    assert last < first and not dist.is_initialized()


@needs_gloo
def test_flat_optimizer() -> None:
    main = script("flat_optimizer").main
    first, last = main(1), main(12)
    assert last < first and not dist.is_initialized()


@pytest.mark.slow
@needs_gloo
@pytest.mark.parametrize("name", ["torchtitan_like", "flat_optimizer", "two_batch_overlap"])
def test_scripts_on_two_ranks(name: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(FOLDER / f"{name}.py"), "3"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert all(f"rank {rank}: loss" in done.stdout for rank in range(2))


@needs_gloo
def test_two_batch_overlap() -> None:
    main = script("two_batch_overlap").main
    first, last = main(1), main(8)
    assert last < first and not dist.is_initialized()


@needs_gloo
def test_zero_plus_plus() -> None:
    main = script("zero_plus_plus").main
    first, last = main(1), main(8)
    assert last < first and not dist.is_initialized()


@pytest.mark.slow
@needs_gloo
def test_zero_plus_plus_on_four_ranks() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    done = subprocess.run(
        [*command, str(FOLDER / "zero_plus_plus.py"), "3"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert all(f"rank {rank}: loss" in done.stdout for rank in range(4))
