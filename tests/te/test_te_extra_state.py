"""Histories of delayed scaling in checkpoints, as Transformer Engine's `_extra_state`."""

from __future__ import annotations

import copy
import io
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import hybridq
from hybridq import errors, te
from hybridq.te import ops
from hybridq.te.common.recipe import DelayedScaling, Format, MXFP8BlockScaling

MODULES: dict[str, tuple[Callable[[], Any], tuple[Any, ...]]] = {
    "Linear": (lambda: te.Linear(64, 32), ()),
    "LayerNormLinear": (lambda: te.LayerNormLinear(64, 32), ()),
    "LayerNormMLP": (lambda: te.LayerNormMLP(64, 96), ()),
    "GroupedLinear": (lambda: te.GroupedLinear(2, 64, 32), ([6, 10],)),
    "ops": (lambda: ops.Sequential(ops.LayerNorm(64), ops.Linear(64, 32)), ()),
    "ops.GroupedLinear": (lambda: ops.GroupedLinear(2, 64, 32), ([6, 10],)),
    "layer": (
        lambda: te.TransformerLayer(64, 96, 4, hidden_dropout=0.0, attention_dropout=0.0),
        (),
    ),
}
RECIPE = DelayedScaling(amax_history_len=4)


def trained(model: Any, seed: int, *args: Any, recipe: Any = RECIPE) -> list[float]:
    """Train three steps; return the losses."""
    generator, losses = torch.Generator().manual_seed(seed), []
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(3):
        x = torch.randn(16, 1, 64, generator=generator).mul(3)
        with te.autocast(recipe=recipe):
            y = model(x if isinstance(model, te.TransformerLayer) else x[:, 0], *args)
        loss = y.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def saved(model: Any) -> dict[str, Any]:
    """Return a state_dict as a file gives it back."""
    held = io.BytesIO()
    torch.save(model.state_dict(), held)
    held.seek(0)
    found: dict[str, Any] = torch.load(held, weights_only=True)
    return found


def histories(model: Any) -> dict[str, torch.Tensor]:
    return {
        k: v for k, v in hybridq.state_dict_with_history(model).items() if ".scaling." in f".{k}"
    }


@pytest.mark.parametrize("kind", MODULES)
def test_a_run_goes_on_where_it_was_saved(kind: str) -> None:
    make, args = MODULES[kind]
    model = make()
    trained(model, 0, *args)
    state = saved(model)
    assert any(key.endswith("_extra_state") for key in state)
    other, without = make(), make()
    assert other.load_state_dict(state) == ([], [])
    again = other.state_dict()  # before any forward
    assert list(again) == list(state)
    assert all(torch.equal(again[key], one) for key, one in state.items())
    without.load_state_dict({k: v for k, v in state.items() if "_extra_state" not in k})
    losses = trained(model, 1, *args)
    assert trained(other, 1, *args) == losses
    assert trained(without, 1, *args) != losses
    assert saved(model).keys() == state.keys()


def test_states_without_histories_are_those_of_nn_linear() -> None:
    for recipe in (None, MXFP8BlockScaling()):
        layer = te.Linear(64, 32)
        if recipe is not None:
            trained(layer, 0, recipe=recipe)
        assert list(layer.state_dict()) == ["weight", "bias"]
        assert layer.get_extra_state().numel() == 0
        layer.set_extra_state(layer.get_extra_state())
        layer.set_extra_state(None)
        torch.nn.Linear(64, 32).load_state_dict(layer.state_dict())


def test_hybridqs_own_modules_take_weights_and_say_that_histories_are_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(errors, "_seen", set())
    layer, own = te.Linear(64, 32), hybridq.Linear(64, 32)
    trained(layer, 0)
    assert own.load_state_dict(layer.state_dict()) == ([], [])
    with pytest.warns(hybridq.HybridQWarning, match="were loaded without histories"):
        trained(own, 1)


def test_both_kinds_of_keys_may_stand_side_by_side() -> None:
    layer = te.Linear(64, 32)
    trained(layer, 0)
    whole = {k: v.clone() for k, v in hybridq.state_dict_with_history(layer).items()}
    whole["scaling.input.e4m3.scale"].fill_(2.0)
    other = te.Linear(64, 32)
    assert other.load_state_dict(whole) == ([], [])
    assert histories(other)["scaling.input.e4m3.scale"].item() == 2.0
    assert torch.equal(other.state_dict()["weight"], whole["weight"])
    third = te.Linear(64, 32)
    third.load_state_dict(other.state_dict())
    assert histories(third)["scaling.input.e4m3.scale"].item() == 2.0


def test_other_recipes_take_what_fits_and_say_what_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(errors, "_seen", set())
    layer = te.Linear(64, 32)
    trained(layer, 0)
    state = copy.deepcopy(layer.state_dict())
    longer, e4m3, blocks = te.Linear(64, 32), te.Linear(64, 32), te.Linear(64, 32)
    for one in (longer, e4m3, blocks):
        one.load_state_dict(state)
    wanted = trained(copy.deepcopy(layer), 1)
    assert trained(longer, 1, recipe=DelayedScaling(amax_history_len=8))[0] == wanted[0]
    with pytest.warns(hybridq.HybridQWarning, match=r"that of grad_output must be e4m3"):
        trained(e4m3, 1, recipe=DelayedScaling(amax_history_len=4, fp8_format=Format.E4M3))
    trained(blocks, 1, recipe=MXFP8BlockScaling())
    assert histories(blocks).keys() == histories(layer).keys()  # for whom it may serve


@pytest.mark.parametrize("assigns", [False, True])
def test_a_model_of_the_meta_device_gets_its_histories(assigns: bool) -> None:
    layer = te.Linear(64, 32)
    trained(layer, 0)
    state = copy.deepcopy(layer.state_dict())
    other = te.Linear(64, 32, device="meta")
    if not assigns:
        other.to_empty(device="cpu")
    other.load_state_dict(state, assign=assigns)
    assert trained(other, 1) == trained(layer, 1)


def as_transformer_engine(module: Any, recipe: Any = RECIPE) -> dict[str, Any]:
    """Return what Transformer Engine's module would have in its state, in its own order."""
    made: dict[str, Any] = {"recipe": recipe, "extra_fp8_variables": {"num_gemms": 1}}
    for short in ("fwd", "bwd"):
        meta = module.fp8_meta[f"scaling_{short}"]
        made[f"scale_{short}"], made[f"amax_history_{short}"] = meta.scale, meta.amax_history
    return made


class _FormatHelper(NamedTuple):
    max_fwd: float
    max_bwd: float


class TheirFormat(Enum):
    HYBRID = _FormatHelper(max_fwd=448, max_bwd=57344)


@dataclass
class TheirRecipe:
    """What a pickle of a recipe of another package holds."""

    margin: int = 0
    fp8_format: TheirFormat = TheirFormat.HYBRID
    amax_history_len: int = 4


def as_bytes(state: Any) -> torch.Tensor:
    """Return the bytes of a pickle."""
    return torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)


@pytest.mark.parametrize("kind", ["Linear", "LayerNormMLP"])
def test_states_of_transformer_engine_are_taken_over(kind: str) -> None:
    make, _ = MODULES[kind]
    model = make()
    trained(model, 0)
    state = as_transformer_engine(model, TheirRecipe())
    assert b"TheirRecipe" in as_bytes(state).numpy().tobytes()
    older = io.BytesIO()
    del_recipe = {key: one for key, one in state.items() if key != "recipe"}
    torch.save({k: v.clone() if torch.is_tensor(v) else v for k, v in del_recipe.items()}, older)
    wanted = None
    for extra in (as_bytes(state), as_bytes(del_recipe), older):
        other = make()
        other.load_state_dict({**copy.deepcopy(model.state_dict()), "_extra_state": extra})
        assert all(torch.equal(histories(other)[k], one) for k, one in histories(model).items())
        wanted = wanted or trained(copy.deepcopy(model), 1)
        assert trained(other, 1) == wanted
    # Of a recipe without histories there is nothing to take, and nothing to say.
    make().set_extra_state(as_bytes({"recipe": MXFP8BlockScaling(), "extra_fp8_variables": {}}))


class Opens:
    """What a pickle makes by a call."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_nothing_in_an_extra_state_is_called(tmp_path: Path, caplog: Any) -> None:
    made = tmp_path / "made"
    layer = te.Linear(64, 32)
    trained(layer, 0)
    state = as_transformer_engine(layer)
    for wrong in (
        {**state, "recipe": Opens(made)},
        {"hybridq": {"scaling.input.e4m3.scale": Opens(made)}},
        {**state, "scale_fwd": Opens(made)},
        Opens(made),
        SimpleNamespace(scale_fwd=1),
    ):
        other = te.Linear(64, 32)
        try:
            other.load_state_dict({**layer.state_dict(), "_extra_state": as_bytes(wrong)})
        except RuntimeError as error:
            assert "set_extra_state: " in str(error)
        assert not histories(other)
        assert not made.exists()


def test_what_does_not_fit_is_refused_or_left(caplog: Any) -> None:
    layer = te.Linear(64, 32)
    trained(layer, 0)
    good = layer.get_extra_state()
    names = pickle.loads(good.numpy().tobytes())
    for key, one in (("scale", torch.tensor([-1.0])), ("history", torch.zeros(2, 2))):
        own = {**names["hybridq"], f"scaling.input.e4m3.{key}": one}
        data = as_bytes({"hybridq": own})
        other = te.Linear(64, 32)
        with pytest.raises(RuntimeError, match="set_extra_state: scaling of the module"):
            other.set_extra_state(data)
        assert not histories(other)
    foreign = (
        good[: len(good) // 2],  # torn
        torch.zeros(7, dtype=torch.uint8),
        torch.zeros(7),
        te.LayerNormMLP(64, 96).get_extra_state(),
        as_bytes({**as_transformer_engine(layer), "scale_fwd": torch.ones(6)}),
        "text",
    )
    for extra in foreign:
        other = te.Linear(64, 32)
        other.load_state_dict({**layer.state_dict(), "_extra_state": extra})
        assert not histories(other)


def test_norms_and_operations_have_none() -> None:
    """In checkpoints of Transformer Engine they have an empty one."""
    for make in (lambda: te.LayerNorm(8), lambda: te.RMSNorm(8), lambda: ops.RMSNorm(8)):
        norm = make()
        empty = {"_extra_state": torch.empty(0, dtype=torch.uint8)}
        assert norm.load_state_dict({**norm.state_dict(), **empty}) == ([], [])
    model = ops.Sequential(ops.Linear(8, 8, bias=False), ops.GELU(), ops.Bias(8))
    state = model.state_dict()
    extra = {f"{i}._extra_state": torch.empty(0, dtype=torch.uint8) for i in range(3)}
    assert model.load_state_dict({**state, **extra}) == ([], [])
    with pytest.raises(RuntimeError, match="Unexpected key"):
        model.load_state_dict({**state, "3.other": torch.empty(0)})


class Experts(te.GroupedLinear):
    """Saves a state for each expert and puts them together, in the order of Megatron-Core's."""

    def __init__(self) -> None:
        super().__init__(3, 64, 32, bias=False)
        self._register_load_state_dict_pre_hook(self._merge)

    def _split_extra_state(self, state: torch.Tensor) -> list[dict[str, Any]]:
        whole = pickle.loads(state.numpy().tobytes())
        parts: list[dict[str, Any]] = [{"recipe": whole["recipe"]} for _ in range(3)]
        for short, slots in (("fwd", 3), ("bwd", 2)):
            scale, history = whole[f"scale_{short}"], whole[f"amax_history_{short}"]
            length = self.fp8_meta["recipe"].amax_history_len
            for i, part in enumerate(parts):
                part[f"scale_{short}"] = scale.view(slots, -1)[:, i]
                part[f"amax_history_{short}"] = history.view(length, slots, -1)[:, :, i]
        return parts

    def parts(self) -> dict[str, Any]:
        state = self.state_dict()
        extra = state.pop("_extra_state")
        return {
            **state,
            **{f"part{i}": one for i, one in enumerate(self._split_extra_state(extra))},
        }

    def _merge(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        self.init_fp8_metadata(num_gemms=3)
        found = [state.pop(f"{prefix}part{i}") for i in range(3)]
        self.fp8_meta["recipe"] = found[0]["recipe"]
        whole: dict[str, Any] = {"recipe": self.fp8_meta["recipe"], "extra_fp8_variables": {}}
        assert isinstance(whole["recipe"], te.common.recipe.DelayedScaling)
        for key in ("scale_fwd", "scale_bwd"):
            whole[key] = torch.stack([one[key] for one in found], 1).view(-1)
        for key in ("amax_history_fwd", "amax_history_bwd"):
            parts = torch.stack([one[key] for one in found], -1)
            whole[key] = parts.view(whole["recipe"].amax_history_len, -1)
        state[f"{prefix}_extra_state"] = as_bytes(whole)


def test_states_of_experts_may_be_divided_and_put_together() -> None:
    """Also where the recipe is gone whose regions they ran in, and of experts by themselves."""
    model, rows = Experts(), [5, 4, 7]
    trained(model, 0, rows, recipe=DelayedScaling(amax_history_len=4))
    state = copy.deepcopy(model.parts())
    other = Experts()
    other.load_state_dict(dict(state))
    assert all(torch.equal(histories(other)[k], one) for k, one in histories(model).items())
    assert torch.equal(other.state_dict()["_extra_state"], other.get_extra_state())
    assert other.parts().keys() == state.keys()  # before any forward
    alone = te.Linear(64, 32, bias=False)
    alone.set_extra_state(as_bytes(state["part1"]))
    for key, one in histories(alone).items():
        assert torch.equal(one, histories(model)[key.replace("scaling.", "scaling.1.")])
    assert trained(other, 1, rows) == trained(model, 1, rows)


def test_states_of_the_meta_device_and_of_fake_tensors_have_none() -> None:
    """As models are made before their files are read."""
    with torch.device("meta"):
        layer = te.TransformerLayer(64, 96, 4)
    assert not any("_extra_state" in key for key in layer.state_dict())
    assert hybridq.state_dict_with_history(layer).keys() == layer.state_dict().keys()
    assert Sharded(64, 32, device="meta").state_dict()["_extra_state"].device.type == "cpu"
    with FakeTensorMode():
        assert list(te.Linear(64, 32).state_dict()) == ["weight", "bias"]


class Sharded(te.Linear):
    """Has what Megatron-Core's modules have: a state that says what to load."""

    def sharded_state_dict(self) -> dict[str, Any]:
        return self.state_dict()


def test_a_state_that_says_what_to_load_has_the_key() -> None:
    layer = Sharded(64, 32)
    assert layer.sharded_state_dict()["_extra_state"].numel() == 0
    assert Sharded(64, 32).load_state_dict(layer.state_dict()) == ([], [])
    assert Sharded(64, 32).load_state_dict(te.Linear(64, 32).state_dict()) == ([], [])
    sizes = set()
    for _ in range(3):  # torch.distributed.checkpoint compares them
        one = Sharded(64, 32)
        trained(one, 0)
        sizes.add(one.state_dict()["_extra_state"].numel())
    assert len(sizes) == 1
