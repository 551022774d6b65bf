"""Recipes as TOML files: what is written is read back, and what is wrong has a line."""

from __future__ import annotations

import os
import sys

import pytest
import torch

import hybridq
from hybridq import recipes
from hybridq.recipes import (
    ByGemm,
    ByName,
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
    autocast,
    load,
    loads,
)
from places import ROOT

if sys.version_info < (3, 11):
    pytest.importorskip("tomli")

GEMMS = hybridq.recipe(
    fprop=("mxfp8", "mxfp8_32x32"),
    dgrad={"grad_output": {"format": "fp8_e5m2", "amax_epsilon": 1e-6}},
    wgrad="nvfp4",
    with_rht=True,
    precision={"wgrad": "exact"},
)
RULES = ByName(
    [
        ("blocks.0.*", "bf16"),
        ('odd "name"\\', NVFP4BlockScaling(backward_override="dequantized")),
        ("*.down", GEMMS),
        ("blocks.*", ByName([("*.up", "mxfp8")], default="fp8_block")),
    ],
    default=Float8BlockScaling(w_block_scaling_dim=1),
)
SAID = {name: recipes.get(name) for name in recipes.names()} | {
    "options": NVFP4BlockScaling(disable_rht=True, nvfp4_4over6="all", precision="exact"),
    "format": Float8CurrentScaling(fp8_format="E4M3"),
    "delayed": DelayedScaling(margin=-1, amax_history_len=16, reduce_amax=False),
    "square": MXFP8BlockScaling(enable_2d_quantization=True, columnwise_source="original"),
    "choices of a zoo recipe": recipes.get("nvfp4_1d_weight").with_precision("fast"),
    "gemms": GEMMS,
    "base": hybridq.recipe("nvfp4", wgrad="bf16"),
    "source": hybridq.recipe("nvfp4_1d_weight", wgrad="bf16"),
    "rules": RULES,
    "rules of rules": ByName([("a", "mxfp8")], default=RULES),
    "schedule": hybridq.RecipeSchedule([(0, "nvfp4"), (0.5, RULES), (900, GEMMS)], 1000),
}


@pytest.mark.parametrize("name", SAID)
def test_what_is_written_is_read_back(name):
    given = SAID[name]
    text = given.to_toml()
    found = loads(text)
    if isinstance(given, Recipe):
        assert found == given and found.key == given.key
    else:
        assert found.phases == given.phases
    assert found.to_toml() == text


HAND_WRITTEN = """
# BF16 at the ends, NVFP4 between.
recipe = "nvfp4"
precision = { wgrad = "exact" }

[options]
disable_rht = true

[[rules]]
name = "*.0.*"
recipe = "bf16"

[[rules]]
name = "*.head"
fprop = "mxfp8"
dgrad = ["mxfp8_e5m2", "mxfp8"]
wgrad = { grad_output = { format = "nvfp4", stochastic_rounding = true } }
"""


def test_a_file_that_a_person_wrote(tmp_path):
    found = loads(HAND_WRITTEN)
    default = NVFP4BlockScaling(disable_rht=True, precision={"wgrad": "exact"})
    head = hybridq.recipe(
        fprop="mxfp8",
        dgrad=("mxfp8_e5m2", "mxfp8"),
        wgrad={"grad_output": "nvfp4;sr"},
    )
    assert found == ByName([("*.0.*", "bf16"), ("*.head", head)], default)
    schedule = loads(
        'total_steps = 10\nphases = [{start = 0, recipe = "nvfp4"}, {start = 0.9, fprop = "mxfp8"}]'
    )
    assert schedule.phases == (
        (0, recipes.get("nvfp4")),
        (9, hybridq.recipe(fprop="mxfp8")),
    )


def test_the_file_of_the_guide_is_one():
    guide = (ROOT / "docs" / "guides" / "recipes.md").read_text()
    text = guide.split("## In a file\n\n```\n")[1].split("```")[0]
    found = loads(text)
    assert found.default == NVFP4BlockScaling(disable_rht=True)
    assert [name for name, _ in found.rules] == ["blocks.0.*", "*.down"]
    assert found.for_name("a.down").precision.wgrad == "exact"


@pytest.mark.parametrize("kind", [str, lambda path: path])
def test_a_path_is_taken_wherever_a_name_is(tmp_path, kind):
    file = tmp_path / "recipe.toml"
    file.write_text('recipe = "mxfp8"\n')
    layer, x = hybridq.Linear(32, 32), torch.randn(4, 32)
    with autocast(recipe=kind(file)):
        y = layer(x)
    with autocast(recipe="mxfp8"):
        assert torch.equal(layer(x), y)
    assert recipes.get(kind(file)) is recipes.get(kind(file))  # read once
    assert ByName([("a", kind(file))], default="bf16").rules[0][1] == recipes.get("mxfp8")
    file.write_text(RULES.to_toml())
    os.utime(file, ns=(1, 1))
    assert recipes.get(kind(file)) == RULES == load(kind(file))


def test_a_schedule_is_loaded_once_by_its_user(tmp_path):
    file = tmp_path / "schedule.toml"
    file.write_text(SAID["schedule"].to_toml())
    with pytest.raises(ValueError, match=r"holds a schedule.* hybridq.recipes.load\(path\)"):
        autocast(recipe=file)
    with autocast(recipe=load(file)) as region:
        assert region.recipe == recipes.get("nvfp4")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('recipe = "mxfp8"\nfprob = "mxfp8"', r"r.toml, line 2: fprob: .* did you mean 'fprop'\?"),
        ('recipe = "mxfp8"\nfprop = "mxpf8"', "line 2: fprop: .* did you mean 'mxfp8'"),
        ("fprop = 3", "line 1: fprop: .* must be a format's name"),
        ('recipe = "nvpf4"', "line 1: recipe: .* did you mean 'nvfp4'"),
        ("recipe = 3", "line 1: recipe: .* got int"),
        ('recipe = "other.toml"', "a file names no other file"),
        ('recipe = "nvfp4"\n[options]\n\ndisable_rth = true', "line 4: options.disable_rth: .*did"),
        ('recipe = "nvfp4"\n[options]\nnvfp4_4over6 = "al"', "line 2: options: .* did you mean"),
        ('recipe = "nvfp4"\noptions = 3', "line 2: options: must be a table"),
        ('recipe = "bf16"\n[options]\na = 3', "line 2: options: are those of a built-in class"),
        ('fprop = "mxfp8"\n[options]\na = 3', "line 2: options: .* got no recipe"),
        ('recipe = "mxfp8"\nprecision = "exakt"', "line 2: precision: .* did you mean 'exact'"),
        ('recipe = "mxfp8"\nbackward_override = "x"', "line 2: backward_override: .* must be"),
        ('fprop = { grad_output = "mxfp8" }', "line 1: fprop: .* must be one of input, weight"),
        ('recipe = "nvfp4"\n[options]\ndisable_rht = "false"', "disable_rht must be a bool"),
        ('precision = "exact"', "needs a recipe, or the formats of a GEMM"),
        ("", "needs a recipe, or the formats of a GEMM"),
        (
            'recipe = "mxfp8"\n[[rules]]\nname = "a"\nrecipe = "bf16"\n[[rules]]\nname = "b"\n'
            'recipe = "bf61"',
            r"line 7: rules\[1\].recipe: .* did you mean 'bf16'",
        ),
        ('recipe = "mxfp8"\n[[rules]]\nrecipe = "bf16"', r"line 2: rules\[0\]: needs a name"),
        ('recipe = "mxfp8"\nrules = 3', "line 2: rules: must be an array of tables"),
        ('recipe = "mxfp8"\ntotal_steps = 3', "belongs to phases"),
        ('recipe = "a"\n[[phases]]\nstart = 0', "line 1: recipe: stands in a phase"),
        ('[[phases]]\nrecipe = "bf16"', r"line 1: phases\[0\]: needs a start"),
        ('[[phases]]\nstart = 3\nrecipe = "bf16"', "line 1: phases: .* must start at 0, got 3"),
        ('total_step = 3\n[[phases]]\nstart = 0\nrecipe = "bf16"', "did you mean 'total_steps'"),
        ("recipe = mxfp8", r"r.toml: must be TOML, got: .*line 1"),
    ],
)
def test_what_is_wrong_says_where(tmp_path, text, message):
    file = tmp_path / "r.toml"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        load(file)
    with pytest.raises(ValueError, match=message):
        recipes.get(file)


def test_marks_of_editors(tmp_path):
    """UTF-8 with a mark in front is read; UTF-16 is refused by the file's name."""
    file = tmp_path / "r.toml"
    file.write_text('recipe = "mxfp8"', encoding="utf-8-sig")
    assert load(file) == recipes.get("mxfp8")
    file.write_text('recipe = "mxfp8"', encoding="utf-16")
    with pytest.raises(ValueError, match=r"r\.toml: must be text in UTF-8"):
        load(file)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match=r"must be a file that can be read, .*No such file"):
        recipes.get(str(tmp_path / "no.toml"))
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "no.toml")


class Own(MXFP8BlockScaling):
    pass


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (CustomRecipe(lambda role: None), "by name, by formats and by rules, got CustomRecipe"),
        (Own(), "by rules, got Own"),
        (ByName([("a", Own())], "bf16"), "by rules, got Own"),
        (DelayedScaling(amax_reduction_group="g"), "a process group is no part of a file"),
        (
            hybridq.recipe(input=hybridq.DelayedScalingRequest()),
            "got for 'input' a quantizer with more",
        ),
        (
            ByGemm(*[hybridq.MXFP8Quantizer(columnwise=False)] * 3),
            "got for 'input' a quantizer with more",
        ),
    ],
)
def test_what_a_file_cannot_say_says_so(recipe, message):
    with pytest.raises(ValueError, match=f"to_toml: .*{message}"):
        recipe.to_toml()


def test_the_command_line_takes_a_file(tmp_path):
    from typer.testing import CliRunner

    from hybridq_cli.app import app

    file = tmp_path / "recipe.toml"
    file.write_text(hybridq.recipe("nvfp4", wgrad="bf16").to_toml())
    run = ["plan", "--params", "1e9", "--world", "2", "--json"]
    said = [
        CliRunner().invoke(app, [*run, "--recipe", name], env={"COLUMNS": "400"})
        for name in (str(file), "mxfp8", str(tmp_path / "no.toml"))
    ]
    assert [one.exit_code for one in said] == [0, 0, 2], said[0].output
    assert said[0].output != said[1].output
    assert "must be a file that can be read" in said[2].output
