"""A training loop in PyTorch alone: a recipe by name or from a file, a checkpoint, a resumed run.

python examples/plain_loop.py --recipe nvfp4 --steps 60 --checkpoint run.pt
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn

import hybridq


def build() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 16)]
    model = nn.Sequential(*layers)
    return hybridq.convert(model)  # in place: the same parameters under the same names


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(step))
    return x, x[:, :16].sin() + x[:, 16:32]


def main(arguments: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="mxfp8", help="a name, or the path of a TOML file")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--checkpoint", type=Path, help="written at the end; read if it is there")
    options = parser.parse_args(arguments)

    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    start = 0
    if options.checkpoint and options.checkpoint.exists():
        saved = torch.load(options.checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["step"]
    for step in range(start, options.steps):
        x, target = batch(step)
        with hybridq.autocast(recipe=options.recipe):  # the forward; a backward needs no context
            loss = (model(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"{options.recipe}: loss {loss.item():.4f} after {options.steps} steps")
    if options.checkpoint:
        saved = {"optimizer": optimizer.state_dict(), "step": options.steps}
        saved["model"] = hybridq.state_dict_with_history(model)  # of delayed scaling, if any
        torch.save(saved, options.checkpoint)
    return loss.item()


if __name__ == "__main__":
    main()
