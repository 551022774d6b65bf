"""A misspelt name says which one may have been meant, at every door that takes one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

import hybridq
from hybridq import formats, recipes, settings
from hybridq.conformance.adapter import load_adapter
from hybridq.errors import must_be_one_of, suggestion
from hybridq.estimate import Sharding, plan
from hybridq.nn import LayerNormMLP, TransformerLayer
from hybridq.nn.modules.plain_norm import PlainNorm
from hybridq.recipes import ByName, ModuleType
from hybridq.report import PrecisionReport
from places import ROOT

X = torch.ones(2, 32)


def _with_backend(name: str) -> None:
    with hybridq.backend(name):
        hybridq.quantize(X, "mxfp8")


#: What is called, and the name that was meant.
DOORS: dict[str, tuple[Callable[[], object], str]] = {
    "recipe": (lambda: recipes.get("mxpf8"), "mxfp8"),
    "autocast": (lambda: hybridq.autocast(recipe="nvfp4_fwd_mxfp8"), "nvfp4_fwd_mxfp8_bwd"),
    "rule": (lambda: ByName([("a", "fp8_bock")], "bf16"), "fp8_block"),
    "phase": (lambda: hybridq.RecipeSchedule([(0, "bf61")]), "bf16"),
    "check": (lambda: recipes.check_recipe_support("mx-fp8"), "mxfp8"),
    "plan": (lambda: plan(torch.nn.Linear(8, 8), "mxfp", Sharding(world=2)), "mxfp8"),
    "selection": (lambda: hybridq.ptq.Selection(recipe="nvpf4"), "nvfp4"),
    "gemm": (lambda: hybridq.recipe(fprop="nvpf4"), "nvfp4"),
    "operand": (lambda: hybridq.recipe(fprop={"imput": "mxfp8"}), "input"),
    "option": (lambda: hybridq.recipe(weight={"format": "mxfp8", "wiht_rht": True}), "with_rht"),
    "format": (lambda: formats.format("mxfp6_e2m33"), "mxfp6_e2m3"),
    "quantize": (lambda: hybridq.quantize(X, "mxfp_8"), "mxfp8"),
    "quantizer": (lambda: hybridq.quantizer("mxfp8", "nvfp4_16_16"), "nvfp4_16x16"),
    "spec": (lambda: hybridq.PlaneSpec.parse("nvpf4;sr"), "nvfp4"),
    "explained": (lambda: hybridq.explain("gemm", "mxfp8", "nvpf4"), "nvfp4"),
    "operation": (lambda: hybridq.explain("gem", "mxfp8", "nvfp4"), "gemm"),
    "element": (lambda: hybridq.MXFP8Quantizer("e4m4"), "e4m3"),
    "scale rule": (lambda: hybridq.quantizer("mxfp8", scale_rule="rciel"), "rceil"),
    "source": (
        lambda: hybridq.quantizer("mxfp8", "nvfp4", columnwise_source="orignal"),
        "original",
    ),
    "request": (lambda: hybridq.DelayedScalingRequest("HYBIRD"), "HYBRID"),
    "algorithm": (
        lambda: hybridq.DelayedScalingRequest(amax_compute_algo="most_recnt"),
        "most_recent",
    ),
    "backend": (lambda: _with_backend("refrence"), "reference"),
    "precision": (lambda: hybridq.autocast(precision="exakt"), "exact"),
    "gemm's precision": (lambda: hybridq.gemm(X, X, precision="fats"), "fast"),
    "GEMM": (lambda: hybridq.autocast(precision={"wgard": "exact"}), "wgrad"),
    "choice": (lambda: recipes.get("mxfp8").with_choices(precison="exact"), "precision"),
    "override": (
        lambda: recipes.MXFP8BlockScaling(backward_override="dequantised"),
        "dequantized",
    ),
    "recipe's source": (
        lambda: recipes.MXFP8BlockScaling(columnwise_source="rowwise-dequantised"),
        "rowwise_dequantized",
    ),
    "fp8_format": (lambda: recipes.MXFP8BlockScaling(fp8_format="hybird"), "HYBRID"),
    "scope": (lambda: recipes.NVFP4BlockScaling(nvfp4_4over6="weigths"), "weights"),
    "slot": (lambda: ModuleType("own", (), (("wieght", "rowwise"),)), "weight"),
    "kind of memory": (
        lambda: hybridq.memory_report(torch.nn.Linear(2, 2)).nbytes("paramaters"),
        "parameters",
    ),
    "norm": (lambda: PlainNorm(8, "RMSnrom", 1e-5), "RMSNorm"),
    "activation": (lambda: LayerNormMLP(8, 8, activation="swigul"), "swiglu"),
    "mask": (lambda: TransformerLayer(8, 8, 2, self_attn_mask_type="casual"), "causal"),
    "policy": (lambda: Sharding(world=2, policy="fsdb"), "fsdp"),
    "optimizer": (
        lambda: plan(torch.nn.Linear(8, 8), None, Sharding(world=2), optimizer="adamv"),
        "adamw",
    ),
    "reason": (lambda: hybridq.convert(torch.nn.Linear(8, 8), also=("haeds",)), "heads"),
    "adapter": (lambda: load_adapter("hybirdq"), "hybridq"),
    "key of a report": (
        lambda: PrecisionReport("", None, None, (), ()).worst(by="sevrity"),
        "severity",
    ),
    "preference": (lambda: hybridq.advise(torch.nn.Linear(2, 2), X, prefer="sped"), "speed"),
    "GPU": (lambda: hybridq.advise(torch.nn.Linear(2, 2), X, device="b20"), "b200"),
}  # fmt: skip


@pytest.mark.parametrize("door", DOORS)
def test_a_door_says_what_may_have_been_meant(door: str) -> None:
    call, meant = DOORS[door]
    with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
        call()
    assert f"did you mean {meant!r}?" in str(caught.value), str(caught.value)
    assert ", got " in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (("train", "--recipes", "bf16,mxpf8"), "mxfp8"),
        (("train", "--model", "mow"), "moe"),
        (("train", "--modules", "fussed"), "fused"),
        (("train-fsdp", "--recipe", "mxpf8"), "mxfp8"),
        (("plan", "--params", "1e9", "--world", "2", "--recipe", "mxpf8"), "mxfp8"),
        (("doctor", "--dtype", "bfloat61"), "bfloat16"),
        (("doctor", "--precision", "exakt"), "exact"),
        (("convert-checkpoint", "a", "b", "--format", "nvpf4"), "nvfp4"),
        (("convert-checkpoint", "a", "b", "--recipe", "nvpf4"), "nvfp4"),
    ],
    ids=str,
)
def test_the_command_line_says_it_too(arguments, meant) -> None:
    from typer.testing import CliRunner

    from hybridq_cli.app import app

    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "400", "NO_COLOR": "1"})
    assert result.exit_code == 2
    assert f"did you mean '{meant}'?" in result.output


def test_names_are_looked_up_by_one_sentence() -> None:
    """Who lists the names that there are also says which one may have been meant."""
    found = [
        f"{file.relative_to(ROOT)}: {line.strip()}"
        for file in sorted((ROOT / "src").rglob("*.py"))
        for line in file.read_text().splitlines()
        if re.search(r"\bone of \{(?!also)", line) and file.name != "errors.py"
    ]
    assert [line for line in found if "tuple(" not in line] == []


def test_suggestions() -> None:
    known = ("fp8_e4m3", "mxfp8", "HYBRID")
    assert suggestion("MX-FP8", known) == "; did you mean 'mxfp8'?"
    assert suggestion("hybird", known) == "; did you mean 'HYBRID'?"
    assert suggestion("quite another", known) == suggestion(3, known) == ""
    assert must_be_one_of(known, 3) == "must be one of fp8_e4m3, mxfp8, HYBRID, got 3"
    assert must_be_one_of(iter(known), "x", "None or ").startswith("must be None or one of fp8_e4m")


def _import_with(code: str = "", **variables: str) -> str:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HYBRIDQ_")}
    done = subprocess.run(
        [sys.executable, "-c", f"import hybridq.settings{code}"],
        capture_output=True,
        text=True,
        env={**clean, "OMP_NUM_THREADS": "1", **variables},
        check=False,
    )
    return done.stderr


@pytest.mark.more
def test_a_misspelt_variable_is_warned_of_once_by_one_rank() -> None:
    wrong = {"HYBRIDQ_BAKEND": "cpu", "HYBRIDQ_LOG": "info"}
    said = _import_with("; import hybridq.recipes", **wrong)
    assert said.count("HYBRIDQ_BAKEND: has no effect") == 1
    assert "did you mean 'BACKEND'?" in said and "HYBRIDQ_LOG:" not in said
    assert "has no effect" not in _import_with(RANK="1", **wrong)
    assert "did you mean 'info'?" in _import_with("; import hybridq._log", HYBRIDQ_LOG="inof")


def test_a_rank_that_is_no_number_is_somebody_elses() -> None:
    said = _import_with("; import hybridq; print(hybridq.settings.launched_rank())", RANK="gold")
    assert said == ""  # an import ended in "invalid literal for int() with base 10: 'gold'"


def test_a_variant_that_the_cpu_lacks_is_named_with_its_variable() -> None:
    core = pytest.importorskip("hybridq._core")
    said = _import_with("; import hybridq", HYBRIDQ_CPU_VARIANT="x86_64_v3")
    assert "HYBRIDQ_CPU_VARIANT: on this CPU must be one of baseline" in said
    assert "got 'x86_64_v3'" in said and "set_variant" not in said
    if "x86-64-v3" in core.build_info()["variants"]:
        assert "did you mean 'x86-64-v3'?" in said


def test_every_variable_of_the_table_is_known() -> None:
    documented = set(re.findall(r"`HYBRIDQ_(\w+)`", settings.__doc__))
    assert documented == set(settings._VARIABLES) - {"EMULATION"}


def test_a_name_of_the_package_is_suggested_by_python() -> None:
    said = _import_with("; import hybridq; hybridq.quantise")
    assert "has no attribute 'quantise'" in said
    assert "Did you mean: 'quantize'?" in said
