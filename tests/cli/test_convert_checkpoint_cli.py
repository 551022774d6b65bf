"""`hybridq convert-checkpoint`: what it prints and how it ends."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import hybridq
import hybridq_cli
from checkpoint_tools import assert_planes_of, digests, shard_name, write_sharded
from hybridq_cli.app import app

RUNNER = CliRunner()


@pytest.fixture
def source(tmp_path) -> Path:
    torch.manual_seed(3)
    return write_sharded(
        tmp_path / "in",
        [
            {f"{i}.up.weight": torch.randn(64, 96).bfloat16(), f"{i}.b": torch.ones(3)}
            for i in range(2)
        ],
    )


def run(*args: object):
    return RUNNER.invoke(app, ["convert-checkpoint", *map(str, args)])


def assert_one_line(done, status: int, *words: str) -> None:
    """The command ended with one line on standard error, without a traceback."""
    assert done.exit_code == status, done.output
    lines = [line for line in done.stderr.splitlines() if not line.startswith("converting")]
    assert len(lines) == 1 and lines[0].startswith("hybridq: "), done.stderr
    assert all(word in lines[0] for word in words), lines[0]


def test_it_converts_and_says_what_it_did(source, tmp_path):
    report = tmp_path / "report.json"
    done = run(
        source, tmp_path / "out", "--format", "nvfp4", "--columnwise", "mxfp8", "--report", report
    )
    assert done.exit_code == 0, done.output
    for text in ("2 quantized, 2 copied", "bytes", "worst relative error", "GB/s"):
        assert text in done.stdout
    assert [line for line in done.stderr.splitlines() if line] == [
        *(f"converting {shard_name(i, 2)}" for i in range(2)),
        *("copying config.json", "copying tokenizer.json"),
    ]
    torch.manual_seed(3)
    quantizer = hybridq.quantizer("nvfp4", "mxfp8")
    checkpoint = hybridq.load_checkpoint(tmp_path / "out")
    weight = torch.randn(64, 96).bfloat16()
    assert_planes_of(checkpoint, "0.up.weight", weight, quantizer)
    found = json.loads(report.read_text())
    assert found["num_quantized"] == 2 and found["seconds"] > 0
    one = found["tensors"]["0.up.weight"]
    assert one["quantizer"] == quantizer.text and one["shape"] == [64, 96]
    assert one["amax"] == float(weight.float().abs().max())
    assert 0.05 < one["errors"]["rowwise"]["relative_rms_error"] < 0.2
    assert one["errors"]["columnwise"]["sqnr_db"] > 25


def test_again_there_is_nothing_left_to_do(source, tmp_path):
    assert run(source, tmp_path / "out", "--format", "nvfp4").exit_code == 0
    before = digests(tmp_path / "out")
    done = run(source, tmp_path / "out", "--format", "nvfp4", "--memory", "100MB")
    assert done.exit_code == 0 and "shards of an earlier run  2" in done.stdout
    assert digests(tmp_path / "out") == before


def test_quiet_prints_warnings_only(source, tmp_path):
    done = run(source, tmp_path / "out", "--format", "mxfp8", "--quiet", "--no-errors")
    assert (done.exit_code, done.output) == (0, "")
    save_file({"a.weight": torch.full((32, 32), float("nan"))}, tmp_path / "nan.safetensors")
    done = run(tmp_path / "nan.safetensors", tmp_path / "o.safetensors", "--format", "mxfp8", "-q")
    assert done.exit_code == 0
    assert done.output == "warning: 'a.weight' has 1024 values that are NaN or infinite\n"


def test_a_recipe_and_patterns(source, tmp_path):
    done = run(
        *(source, tmp_path / "out", "--recipe", "mxfp8_fwd_nvfp4_bwd"),
        *("--include", "*.weight", "--include", "*.b", "--exclude", "1.*"),
    )
    assert done.exit_code == 0 and "1 quantized, 3 copied" in done.stdout
    role = hybridq.QuantizerRole("linear", "weight", "0.up")
    want = hybridq.recipes.get("mxfp8_fwd_nvfp4_bwd").quantizer(role)
    assert hybridq.load_checkpoint(tmp_path / "out").record("0.up.weight").quantizer == want


def test_a_spec_with_options(source, tmp_path):
    done = run(source, tmp_path / "out", "--format", "nvfp4_16x16;4o6=mse;bound=256")
    assert done.exit_code == 0, done.output
    record = hybridq.load_checkpoint(tmp_path / "out").record("1.up.weight")
    assert record.quantizer.rowwise.four_over_six == "mse"
    assert record.quantizer.columnwise is None


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ([], "--format or --recipe"),
        (["--format", "nvfp5"], "must be one of fp8_e4m3"),
        (["--columnwise", "nvfp4;what"], "unknown option 'what'"),
        (["--recipe", "mxfp9"], "must be one of bf16"),
        (["--recipe", "mxfp8", "--format", "mxfp8"], "neither of the others"),
        (["--format", "bf16"], "must quantize"),
        (["--format", "nvfp4;sr"], "stochastically"),
        (["--format", "nvfp4", "--memory", "much"], "must be a size as 512MiB or 2GB, got 'much'"),
        (["--format", "nvfp4", "--memory", "1MiB"], "at least 67108864 bytes, got 1048576"),
        (["--format", "nvfp4", "--report", "/none/r.json"], "must be a file in a folder"),
    ],
)
def test_wrong_options_end_with_one_line(options, word, source, tmp_path):
    assert_one_line(run(source, tmp_path / "out", *options), 2, word)
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_done_ends_with_one_line(source, tmp_path):
    format = ("--format", "nvfp4")
    assert_one_line(run(tmp_path / "none", tmp_path / "out", *format), 1, "there is no")
    assert_one_line(run(source, source, *format), 1, "must differ")
    assert_one_line(run(source, source / "out", *format), 1, "must not lie in the source")
    report = ("--report", source / "r.json")
    assert_one_line(
        run(source, tmp_path / "out", *format, *report), 2, "must not lie in the source"
    )
    before = digests(source)
    shard = source / shard_name(1, 2)
    whole = shard.read_bytes()
    shard.write_bytes(whole[:100])
    assert_one_line(run(source, tmp_path / "out", *format), 1, shard.name, "no whole safetensors")
    shard.write_bytes(whole)
    assert digests(source) == before
    assert run(source, tmp_path / "out", *format).exit_code == 0
    done = run(source, tmp_path / "out", "--format", "mxfp8")
    assert_one_line(done, 1, "other arguments", "quantizer was")
    assert run(source, tmp_path / "out", "--format", "mxfp8", "--overwrite").exit_code == 0


@pytest.mark.more
def test_a_file_that_cannot_grow(tmp_path):
    # The system itself refuses to write on, as a full disk does.
    save_file({"a.weight": torch.ones(256, 1024)}, tmp_path / "in.safetensors")
    target = tmp_path / "out.safetensors"
    code = (
        "import resource, runpy; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)); "
        "runpy.run_module('hybridq', run_name='__main__')"
    )
    arguments = ["convert-checkpoint", tmp_path / "in.safetensors", target, "--format", "mxfp8"]
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stderr.splitlines()
    assert done.returncode == 1 and len(lines) == 2, done.stderr
    assert lines[1].startswith("hybridq: checkpoint: no space left for ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.safetensors"]


def test_the_console_script():
    (script,) = metadata.entry_points(group="console_scripts", name="hybridq")
    assert script.load() is hybridq_cli.main


def test_the_layout_of_the_source_may_be_said(tmp_path):
    """FP8 whose scale has a name of five layouts, and no configuration: the error names --from."""
    codes = torch.randn(64, 96).to(torch.float8_e4m3fn)
    tensors = {"a.weight": codes, "a.weight_scale": torch.tensor(0.5)}
    save_file(tensors, tmp_path / "in.safetensors")
    given = (tmp_path / "in.safetensors", tmp_path / "out.safetensors", "--format", "fp8_e4m3")
    assert_one_line(run(*given), 1, "could mean auto-fp8 or", "--from")
    assert_one_line(run(*given, "--from", "auto-fp9"), 2, "did you mean 'auto-fp8'")
    assert_one_line(run(*given, "--from", "mlx"), 1, "mlx")
    done = run(*given, "--from", "auto-fp8")
    assert done.exit_code == 0, done.output
    weight = hybridq.load_checkpoint(tmp_path / "out.safetensors")["a.weight"]
    assert torch.equal(weight.rowwise.data, codes.view(torch.uint8))  # which it has already
    assert torch.equal(weight.rowwise.scale, torch.tensor([0.5]))
    summary = RUNNER.invoke(app, ["summary", str(given[0])])
    assert summary.exit_code == 2 and "--from" in summary.stderr
    summary = RUNNER.invoke(app, ["summary", str(given[0]), "--from", "auto-fp9"])
    assert summary.exit_code == 2 and "did you mean 'auto-fp8'" in summary.stderr
    summary = RUNNER.invoke(app, ["summary", str(given[0]), "--from", "auto-fp8", "--json"])
    assert summary.exit_code == 0 and "auto-fp8" in summary.stdout
