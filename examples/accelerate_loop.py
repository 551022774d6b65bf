"""A loop with accelerate: the model's forward under a schedule of recipes, its state saved.

accelerate launch examples/accelerate_loop.py     (or with python)
"""

from __future__ import annotations

import sys
import tempfile

import torch
from accelerate import Accelerator
from torch import nn

import hybridq
from hybridq.integrations.accelerate import prepare


def main(steps: int = 30) -> list[float]:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    hybridq.convert(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = torch.randn(64 * steps, 64)
    loader = torch.utils.data.DataLoader(data, batch_size=64)
    schedule = hybridq.RecipeSchedule([(0, "fp8_delayed"), (0.5, "mxfp8")], total_steps=steps)
    # In place of accelerator.prepare. Under FSDP2 the weights travel as planes.
    model, optimizer, loader = prepare(accelerator, model, optimizer, loader, recipe=schedule)
    losses = []
    for x in loader:
        loss = (model(x) - x.sin()).square().mean()
        accelerator.backward(loss)
        optimizer.step()  # counts a step of the schedule too
        optimizer.zero_grad()
        losses.append(loss.item())
    accelerator.save_state(tempfile.mkdtemp())  # with histories of delayed scaling
    accelerator.print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}; {schedule!r}")
    return losses


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
