"""Rules of names that no module follows: said by every door that has the model and the recipe."""

from __future__ import annotations

import warnings

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import hybridq
from checkpoint_tools import Notes
from hybridq.converters import warn_of_unfollowed
from hybridq.ptq import Selection
from hybridq.recipes import ByName

NAMES = ["blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down", "head"]
TYPO = ByName([("blocks.0.*", "bf16"), ("*.donw", "bf16")], default="mxfp8")


@pytest.mark.parametrize(
    ("patterns", "unfollowed"),
    [
        (["*.up", "blocks.1.*"], ()),
        (["*.UP", "head*"], ("*.UP",)),
        (["*", "head"], ("head",)),  # behind a wider one
        (["blocks.0.*", "blocks.0.up"], ("blocks.0.up",)),
        (["head", "head"], ()),  # the same, twice
        (["head", "head.*"], ()),  # a block may be a module, or hold some
        (["blocks.0", "blocks.0.*"], ()),
        (["blocks.0"], ("blocks.0",)),  # without its children
    ],
)
def test_which_rules_nobody_follows(patterns, unfollowed) -> None:
    recipe = ByName([(pattern, "bf16") for pattern in patterns], default="mxfp8")
    assert recipe.unfollowed(NAMES) == unfollowed
    followed = {one: recipe.for_name(one) for one in NAMES}
    left = ByName([(one, "bf16") for one in patterns if one not in unfollowed], default="mxfp8")
    assert {one: left.for_name(one) for one in NAMES} == followed  # they change nothing


def test_rules_inside_of_rules_and_schedules() -> None:
    inner = ByName([("*.up", "bf16"), ("head", "bf16")], default="nvfp4")
    outer = ByName([("blocks.*", inner), ("hed", "bf16")], default="mxfp8")
    assert outer.unfollowed(NAMES) == ("hed", "head")
    assert ByName([], default=inner).unfollowed(NAMES) == ()
    schedule = hybridq.RecipeSchedule([(0, outer), (3, "mxfp8"), (5, inner)])
    assert schedule.unfollowed(NAMES) == ("hed", "head")
    assert hybridq.recipes.get("mxfp8").unfollowed(NAMES) == ()


def built() -> nn.Module:
    blocks = [nn.ModuleDict({"up": nn.Linear(64, 64), "down": nn.Linear(64, 64)}) for _ in "01"]
    return nn.ModuleDict({"blocks": nn.ModuleList(blocks), "head": nn.Linear(64, 64)})


def test_a_model_that_is_served() -> None:
    with pytest.warns(hybridq.HybridQWarning, match=r"no module follows: '\*\.donw'; the first"):
        hybridq.quantize_model(built(), TYPO)


def test_checkpoints(tmp_path) -> None:
    save_file(
        {f"{name}.weight": torch.randn(64, 64) for name in NAMES}, tmp_path / "in.safetensors"
    )
    said = []
    for number, asked in enumerate((hybridq.convert_checkpoint, hybridq.export)):
        notes = Notes()
        ends = (tmp_path / "in.safetensors", tmp_path / f"{number}.safetensors")
        if asked is hybridq.export:
            asked(*ends, layout="compressed-tensors", recipe=TYPO, observer=notes)
        else:
            asked(*ends, Selection(recipe=TYPO), observer=notes)
        said.append([one for one in notes.warnings if "follows the recipe's rule" in one])
    assert said == [["no weight of the source follows the recipe's rule '*.donw'"]] * 2


def test_loops_of_other_libraries() -> None:
    pytest.importorskip("transformers")
    integrations = pytest.importorskip("hybridq.integrations.transformers")
    callback = integrations.HybridQCallback(TYPO)
    state = type("State", (), {"max_steps": 3, "global_step": 0, "stateful_callbacks": {}})()
    model = hybridq.convert(built())
    with pytest.warns(hybridq.HybridQWarning, match=r"HybridQCallback: .*'\*\.donw'"):
        callback.on_train_begin(None, state, None, model=model)
    callback.detach()


def test_what_is_followed_is_not_said() -> None:
    """Blocks with children and without, parts of fused modules, experts, modules left alone."""
    flat = nn.ModuleDict({"blocks": nn.Sequential(*(nn.Linear(64, 64) for _ in "012"))})
    deep, fused = built(), nn.Module()
    fused.mlp = hybridq.LayerNormMLP(64, 128)
    fused.experts = hybridq.GroupedLinear(2, 64, 64)
    last = ByName.first_last(flat, default="nvfp4", blocks="blocks")
    rules = [("mlp.fc1", "bf16"), ("experts.1", "bf16"), ("experts.*", "nvfp4")]
    cases = (
        (flat, last),
        (deep, ByName.first_last(deep, default="nvfp4")),
        (deep, ByName([("head", "bf16")], default="nvfp4")),
        (fused, ByName(rules, default="mxfp8")),
    )
    for model, recipe in cases:
        hybridq.convert(model)
        with warnings.catch_warnings():
            warnings.simplefilter("error", hybridq.HybridQWarning)
            warn_of_unfollowed("here", recipe, model)
