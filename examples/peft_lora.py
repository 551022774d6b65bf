"""LoRA with PEFT on a base that is frozen in NVFP4: one plane of four bits for each weight.

python examples/peft_lora.py
"""

from __future__ import annotations

import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import hybridq


def main(steps: int = 20) -> list[float]:
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 160}
    config = LlamaConfig(num_hidden_layers=2, num_attention_heads=4, **sizes)
    base = LlamaForCausalLM(config).bfloat16()
    with hybridq.quantized_model_init("nvfp4", frozen=True):
        hybridq.convert(base)  # weights are planes from here on
    weight = base.model.layers[0].mlp.up_proj.weight
    print(f"{8 * weight.nbytes / weight.numel():.1f} bits for each value of the base")

    model = get_peft_model(base, LoraConfig(target_modules="all-linear", r=8))
    model.print_trainable_parameters()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    losses = []
    for step in range(steps):
        ids = (torch.arange(8)[:, None] * step + 3 * torch.arange(32)) % 96
        with hybridq.autocast(recipe="nvfp4"):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
