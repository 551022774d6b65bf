"""The demo's model under TP2 x PP2: `python pipeline_demo_program.py RANK WORLD STORE NAME...`."""

from __future__ import annotations

from typing import Any

import mesh_program
import torch
import torch.nn.functional as F
from pipeline_program import HYBRID
from rank_program import main
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import hybridq
from hybridq.demo.model import ModelConfig, Transformer
from hybridq.distributed import pipeline_stage
from hybridq.nn.autograd import slot_encoder
from hybridq.shards import encode_cut

CONFIG, MICROBATCHES, STEPS = ModelConfig(2, 64, 2, 128, 32), 4, 3
PLAN = {
    **dict.fromkeys(("attention.qkv", "ffn.gate_up"), "column"),
    **dict.fromkeys(("attention.out", "ffn.down"), "row"),
}


def stages() -> list[nn.Sequential]:
    """Return the demo's model in two halves, the same on all ranks."""
    torch.manual_seed(0)
    model: Any = hybridq.convert(Transformer(CONFIG, hybridq.Linear))
    first, second = model.blocks
    return [nn.Sequential(model.embedding, first), nn.Sequential(second, model.norm, model.lm_head)]


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 97, (2 * MICROBATCHES, 33), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), y.flatten())


def one_process() -> tuple[list[list[float]], list[nn.Sequential]]:
    """Return the losses of all microbatches of each step, and the stages behind them."""
    modules, losses = stages(), []
    whole = nn.Sequential(*modules)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=3e-3)
    for number in range(STEPS):
        losses.append([])
        for chunk in zip(*(each.chunk(MICROBATCHES) for each in batch(number)), strict=True):
            with hybridq.autocast(recipe=HYBRID):
                loss = loss_of(whole(chunk[0]), chunk[1])
            (loss / MICROBATCHES).backward()
            losses[-1].append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, modules


def demo() -> None:
    """Losses are those of one process within the order of sums; planes those of the weights."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    place = mesh.get_local_rank("pp")
    own = stages()[place]
    styles = {
        "column": lambda: ColwiseParallel(output_layouts=Replicate()),
        "row": lambda: RowwiseParallel(input_layouts=Replicate()),
    }
    block = 1 - place  # of the first stage the second module, of the other the first
    plan = {f"{block}.{name}": styles[mode]() for name, mode in PLAN.items()}
    parallelize_module(own, mesh["tp"], plan)
    stage = pipeline_stage(own, place, 2, "cpu", group=mesh.get_group("pp"), replicas=mesh["tp"])
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_of)
    optimizers = [
        torch.optim.AdamW([p for p in own.parameters() if isinstance(p, DTensor) == is_part], 3e-3)
        for is_part in (False, True)
    ]
    wanted, modules = one_process()
    for number in range(STEPS):
        x, y = batch(number)
        losses: list[torch.Tensor] = []
        with hybridq.autocast(recipe=HYBRID):
            if place == 0:
                schedule.step(x)
            else:
                schedule.step(target=y, losses=losses)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if place == 1:
            found, want = torch.stack(losses).detach(), torch.tensor(wanted[number])
            assert torch.allclose(found, want, rtol=1e-2 if number else 1e-4), (found, want)
    for (name, p), q in zip(own.named_parameters(), modules[place].parameters(), strict=True):
        error = (mesh_program.whole(p) - q).norm() / q.norm()
        assert error < 5e-2, (name, error)
    check_planes(own, modules[place], HYBRID)


def check_planes(own: nn.Sequential, single: nn.Sequential, recipe: Any) -> None:
    """What is encoded of each part are, by bytes, parts of the planes of the whole weight."""
    values = dict(single.named_parameters())
    weights = {}
    with torch.no_grad():
        for name, parameter in own.named_parameters():
            values[name].copy_(mesh_program.whole(parameter))
            if isinstance(parameter, DTensor):
                weights[parameter.to_local().data_ptr()] = values[name].detach()
    found = 0

    def encode(x: Any, row: Any, col: Any, rest: Any, at: Any, group: str = "") -> Any:
        nonlocal found
        made = encode_cut(x, row, col, rest, at, group)
        weight = weights.get(x.data_ptr())
        if weight is None:
            return made
        assert row is not None and col is not None and not any(at.lacks())
        wanted = torch.ops.hybridq.encode(weight, row.spec, col.spec, col_source=rest.col_source)
        for place, (mine, whole) in enumerate(zip([*made[0], *made[1]], wanted, strict=True)):
            dim = at.dim if place < len(made[0]) else 1 - at.dim
            part = whole.chunk(len(at.sizes), dim)[at.rank] if mine.shape != whole.shape else whole
            assert torch.equal(mine.view(torch.uint8), part.contiguous().view(torch.uint8))
        found += 1
        return made

    slot_encoder.encode_cut = encode
    try:
        with hybridq.autocast(recipe=recipe):
            is_first = isinstance(single[0], nn.Embedding)
            own(torch.randint(0, 97, (2, 32)) if is_first else torch.ones(2, 32, CONFIG.hidden))
    finally:
        slot_encoder.encode_cut = encode_cut
    assert found == len(PLAN), found


if __name__ == "__main__":
    main(globals(), timeout=60.0)
