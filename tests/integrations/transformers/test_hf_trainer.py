"""transformers' Trainer under a recipe: its bits, its schedule, its histories, its checkpoints."""

from __future__ import annotations

import copy
import inspect
import json
import warnings
from pathlib import Path

import pytest
import torch

import hybridq
from hf_models import load, logits, make, saved, transformers
from hybridq.integrations.transformers import HybridQCallback, HybridQConfig

pytest.importorskip("accelerate")


class Data(torch.utils.data.Dataset):
    """Twelve sequences."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(8) * 7 + index * 13) % 96
        return {"input_ids": ids, "labels": ids}


def trainer(model, folder: Path, callback=None, steps: int = 4, optimizer=None, **options):
    """A Trainer on a CPU that says nothing."""
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **{"save_strategy": "no", "seed": 3, **options},
    )
    callbacks = [] if callback is None else [callback]
    kinds = None if optimizer is None else (optimizer, {"lr": 1e-2})
    made = transformers.Trainer(
        model,
        arguments,
        train_dataset=Data(),
        callbacks=callbacks,
        eval_dataset=Data(),
        optimizer_cls_and_kwargs=kinds,
    )
    made.remove_callback(transformers.PrinterCallback)
    return made


def losses(made) -> list[float]:
    """What was logged."""
    return [one["loss"] for one in made.state.log_history if "loss" in one]


def by_hand(model, recipe_at, steps: int) -> list[float]:
    """The same training in a plain loop, with the batches of a Trainer that does not shuffle."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0, fused=True)
    data, told = Data(), []
    model.train()
    for step in range(steps):
        rows = [data[(2 * step + i) % 12] for i in range(2)]
        batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
        with hybridq.autocast(recipe=recipe_at(step)):
            loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        told.append(loss.item())
    return told


def converted(kind: str = "llama", dtype: torch.dtype = torch.float32):
    """A model that trains under recipes."""
    return hybridq.convert(make(kind, dtype))


IN_ORDER = {"train_sampling_strategy": "sequential"}


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_delayed"])
def test_the_recipe_is_that_of_every_training_step(recipe, tmp_path) -> None:
    model, other = converted(), converted()
    forward = model.forward
    made = trainer(model, tmp_path, HybridQCallback(recipe), **IN_ORDER)
    made.train()
    want = by_hand(other, lambda step: recipe, 4)
    assert losses(made) == pytest.approx(want, rel=1e-6)
    for mine, its in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, its)
    assert model.forward == forward and "forward" not in vars(model)
    plain = trainer(converted(), tmp_path, **IN_ORDER)
    plain.train()
    assert losses(plain) != losses(made)


def test_evaluation_has_the_recipe_where_it_is_asked_for(tmp_path) -> None:
    told = {}
    for evaluation in (False, True):
        model = converted()
        made = trainer(
            model,
            tmp_path,
            HybridQCallback("nvfp4", evaluation=evaluation),
            steps=1,
            eval_strategy="steps",
            eval_steps=1,
        )
        made.train()
        told[evaluation] = next(
            one["eval_loss"] for one in made.state.log_history if "eval_loss" in one
        )
        plain = made.evaluate()["eval_loss"]  # outside of train()
        assert (told[evaluation] == plain) != evaluation
    assert told[False] != told[True]


@pytest.mark.parametrize("how", ["schedule", "phases"])
def test_a_schedule_follows_the_steps(how, tmp_path) -> None:
    phases = [(0, "fp8_current"), (0.5, "mxfp8")]  # neither rounds stochastically
    given = phases if how == "phases" else hybridq.RecipeSchedule(phases, total_steps=4)
    model, other = converted(), converted()
    callback = HybridQCallback(given)
    made = trainer(model, tmp_path, callback, **IN_ORDER)
    made.train()
    want = by_hand(other, lambda step: "fp8_current" if step < 2 else "mxfp8", 4)
    assert losses(made) == pytest.approx(want, rel=1e-6)
    assert callback.recipe == hybridq.recipes.get("mxfp8")


@pytest.mark.parametrize("recipe", ["fp8_delayed", "mxfp8", "schedule"])
def test_a_resumed_run_has_the_same_bits(recipe, tmp_path) -> None:
    phases = [(0, "nvfp4"), (0.75, "fp8_delayed")]
    given = phases if recipe == "schedule" else recipe
    options = {"save_strategy": "steps", "save_steps": 2, "gradient_accumulation_steps": 2}
    whole = converted()
    trainer(whole, tmp_path / "a", HybridQCallback(given), **options).train()
    again = converted()
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.zero_()
    made = trainer(again, tmp_path / "b", HybridQCallback(given), **options)
    made.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    for mine, its in zip(again.parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine, its)


def test_histories_that_are_missing_are_said_to_be(tmp_path) -> None:
    options = {"save_strategy": "steps", "save_steps": 1}
    trainer(converted(), tmp_path, steps=1, **options).train()
    made = trainer(converted(), tmp_path, HybridQCallback("fp8_delayed"), steps=2, **options)
    with pytest.warns(hybridq.HybridQWarning, match="no histories of delayed scaling"):
        made.train(resume_from_checkpoint=True)
    made = trainer(converted(), tmp_path / "2", steps=1, **options)
    made.train()
    with warnings.catch_warnings():
        warnings.simplefilter("error", hybridq.HybridQWarning)
        more = trainer(converted(), tmp_path / "2", HybridQCallback("mxfp8"), steps=2, **options)
        more.train(resume_from_checkpoint=True)


def test_callbacks_may_be_restored_by_trainer_itself(tmp_path) -> None:
    options = {"save_strategy": "steps", "save_steps": 1}
    given = [(0, "nvfp4"), (1, hybridq.recipe("mxfp8", wgrad="bf16"))]
    trainer(converted(), tmp_path, HybridQCallback(given), steps=1, **options).train()
    options["restore_callback_states_from_checkpoint"] = True
    made = trainer(converted(), tmp_path, HybridQCallback("fp8_current"), steps=2, **options)
    made.train(resume_from_checkpoint=True)
    (callback,) = (c for c in made.callback_handler.callbacks if isinstance(c, HybridQCallback))
    assert callback.recipe == hybridq.recipe("mxfp8", wgrad="bf16")


def test_gradient_checkpointing_changes_no_bit(tmp_path) -> None:
    models = []
    for checkpointing in (False, True):
        models.append(converted())
        options = {"gradient_checkpointing": checkpointing, "bf16": True}
        trainer(models[-1], tmp_path, HybridQCallback("mxfp8"), steps=2, **options).train()
    for mine, its in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(mine, its)


def test_quantized_weights_are_trained_saved_and_resumed(tmp_path) -> None:
    folder = saved("llama", tmp_path / "plain")
    options = {"save_strategy": "steps", "save_steps": 2}
    models = []
    for name, resume in (("a", None), ("b", str(tmp_path / "a" / "checkpoint-2"))):
        model = load(folder, quantization_config=HybridQConfig("mxfp8"))
        models.append(model)
        made = trainer(
            model, tmp_path / name, HybridQCallback(), optimizer=hybridq.optim.AdamW, **options
        )
        made.train(resume_from_checkpoint=resume)
    for (name, mine), its in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        planes = [
            getattr(one, "tensor_storage", None) is None
            or [plane.data for plane in one.tensor_storage.planes]
            for one in (mine, its)
        ]
        assert torch.equal(mine.detach().dequantize(), its.detach().dequantize()), name
        if planes[0] is not True:
            assert all(torch.equal(*pair) for pair in zip(*planes, strict=True)), name
    for mine, its in zip(*(model.parameters() for model in models), strict=True):
        if not isinstance(mine, hybridq.QuantizedTensor):
            assert torch.equal(mine, its)
            continue
        for one, other in zip(mine.tensor_storage.planes, its.tensor_storage.planes, strict=True):
            assert torch.equal(one.data, other.data) and torch.equal(one.scale, other.scale)
    again = load(tmp_path / "a" / "checkpoint-4")
    assert torch.equal(logits(again), logits(models[0].eval()))


@pytest.mark.more
def test_shards_that_part_a_weight_are_resumed(tmp_path) -> None:
    folder = saved("llama", tmp_path / "plain")
    model = load(folder, quantization_config=HybridQConfig("mxfp8"))
    model.save_pretrained(tmp_path / "q", max_shard_size="5KB")
    other = load(folder, quantization_config=HybridQConfig("mxfp8"))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    from transformers.trainer_utils import load_sharded_checkpoint

    load_sharded_checkpoint(other, tmp_path / "q", strict=False)
    assert torch.equal(logits(model), logits(other))


def test_logs_have_what_is_quantized(tmp_path) -> None:
    made = trainer(converted(), tmp_path, HybridQCallback("mxfp8"), steps=1)
    made.train()
    logged = next(one for one in made.state.log_history if "loss" in one)
    assert 0.8 < logged["quantized_share"] < 1 and logged["fallbacks"] >= 0


def test_a_copy_has_a_forward_of_its_own(tmp_path) -> None:
    """While a model trains: a reference model that is copied from it must not be it."""
    copies = []

    class Copies(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs) -> None:
            copies.append(copy.deepcopy(model).train())
            names = list(inspect.signature(model.forward).parameters)
            assert "input_ids" in names and "self" not in names

    made = trainer(converted(), tmp_path, HybridQCallback("nvfp4"), steps=1)
    made.add_callback(Copies())
    made.train()
    (one,) = copies
    with torch.no_grad():
        for parameter in one.parameters():
            parameter.zero_()
    assert not logits(one).any()


def test_a_training_after_one_that_was_interrupted_has_its_own_recipe(tmp_path) -> None:
    model, other = converted(), converted()

    class Stops(transformers.TrainerCallback):
        def on_step_begin(self, *given, **kwargs) -> None:
            raise KeyboardInterrupt

    first = HybridQCallback("nvfp4")
    stopped = trainer(model, tmp_path, first)
    stopped.add_callback(Stops())
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    again = trainer(model, tmp_path, HybridQCallback("mxfp8"), **IN_ORDER)
    again.train()
    assert losses(again) == pytest.approx(by_hand(other, lambda step: "mxfp8", 4), rel=1e-6)
    assert "forward" not in vars(model)
    first.detach()  # of a training that is long over
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    assert "forward" in vars(model)
    first.detach()
    assert "forward" not in vars(model)


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ("mxfp9", ValueError, "mxfp9"),
        ([(1, "mxfp8")], ValueError, "the first phase must start at 0"),
        ([("mxfp8", 0)], TypeError, "start"),
        (3, TypeError, "int"),
    ],
)
def test_wrong_recipes(given, kind, text) -> None:
    with pytest.raises(kind, match=text):
        HybridQCallback(given)


def test_a_model_that_nothing_would_quantize_is_refused(tmp_path) -> None:
    made = trainer(make("llama"), tmp_path, HybridQCallback("mxfp8"))
    with pytest.raises(ValueError, match=r"must have modules of hybridq, .*call hybridq.convert"):
        made.train()
    made = trainer(converted(), tmp_path, HybridQCallback())
    with pytest.raises(ValueError, match="needs a recipe, which neither it nor the model"):
        made.train()


def test_what_is_saved_can_be_read(tmp_path) -> None:
    options = {"save_strategy": "steps", "save_steps": 1}
    trainer(converted(), tmp_path, HybridQCallback("fp8_delayed"), steps=1, **options).train()
    state = json.loads((tmp_path / "checkpoint-1" / "trainer_state.json").read_text())
    kept = state["stateful_callbacks"]["HybridQCallback"]
    assert kept["args"] == {"recipe": "fp8_delayed", "evaluation": False}
    assert len(kept["attributes"]["histories"]) > 1000
