"""TRL's trainers as they are, on a converted model with HybridQCallback."""

from __future__ import annotations

import pytest

import hf_models
import hybridq
from hf_models import transformers

pytest.importorskip("accelerate")
tokenizers = pytest.importorskip("tokenizers")

from hybridq.integrations.transformers import HybridQCallback  # noqa: E402 (needs transformers)


def tokenizer():
    """Ninety words."""
    words = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(90))]
    vocabulary = {word: number for number, word in enumerate(words)}
    model = tokenizers.models.WordLevel(vocabulary, unk_token="<unk>")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(model),
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
    )


@pytest.mark.more
def test_supervised_fine_tuning_has_the_recipe(tmp_path) -> None:
    datasets = pytest.importorskip("datasets")
    trl = pytest.importorskip("trl")
    rows = [[3 + (7 * i + j) % 90 for j in range(10)] for i in range(8)]
    table = datasets.table.InMemoryTable.from_pydict({"input_ids": rows})
    losses = {}
    for recipe in ("bf16", "mxfp8", "nvfp4"):
        arguments = trl.SFTConfig(
            output_dir=str(tmp_path),
            max_steps=2,
            per_device_train_batch_size=2,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            logging_steps=1,
            bf16=False,
            save_strategy="no",
            gradient_checkpointing=True,
            dataset_kwargs={"skip_prepare_dataset": True},
        )
        trainer = trl.SFTTrainer(
            hybridq.convert(hf_models.make("llama").float()),
            args=arguments,
            train_dataset=datasets.Dataset(table, fingerprint="rows"),
            processing_class=tokenizer(),
            callbacks=[HybridQCallback(recipe)],
        )
        trainer.train()
        losses[recipe] = [one["loss"] for one in trainer.state.log_history if "loss" in one]
    assert len({tuple(one) for one in losses.values()}) == 3
    for one in losses.values():
        assert one == pytest.approx(losses["bf16"], rel=0.1)
