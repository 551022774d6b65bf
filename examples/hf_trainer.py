"""transformers' Trainer under a schedule of recipes: a small random Llama.

python examples/hf_trainer.py run      (the folder of its checkpoints)
"""

from __future__ import annotations

import sys
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import hybridq
from hybridq.integrations.transformers import HybridQCallback


def build() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 160}
    config = LlamaConfig(num_hidden_layers=2, num_attention_heads=4, **sizes)
    return hybridq.convert(LlamaForCausalLM(config))  # yours: from_pretrained("...")


def rows(count: int = 64) -> list[dict[str, torch.Tensor]]:
    ids = [(3 * torch.arange(32) + start) % 96 for start in range(count)]
    return [{"input_ids": one, "labels": one} for one in ids]


def main(folder: str | None = None, steps: int = 20) -> list[float]:
    arguments = TrainingArguments(
        folder or tempfile.mkdtemp(),
        max_steps=steps,
        learning_rate=3e-3,
        logging_steps=5,
        save_steps=10,
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
        disable_tqdm=True,
    )
    recipe = HybridQCallback([(0, "nvfp4"), (0.8, "mxfp8")])  # the forward is put under it
    trainer = Trainer(build(), arguments, train_dataset=rows(), callbacks=[recipe])
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    print(f"quantized: {logs[-1]['quantized_share']:.0%} of the elements of matrices")
    return [log["loss"] for log in logs]


if __name__ == "__main__":
    main(*sys.argv[1:])
