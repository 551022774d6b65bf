"""Experts of transformers' models: `python experts_hf_program.py RANK WORLD STORE NAME...`.

The oracle is the model as it is, whole on every rank, on the tokens of that rank: all that a token
meets must be the same, router logits and auxiliary loss included. Gradients of experts are the mean
of what the ranks' own models find.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from rank_program import main
from safetensors import safe_open
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor

sys.path.append(str(Path(__file__).resolve().parent.parent))
import hybridq
from hybridq.moe import Experts, overlap_shared_experts, parallelize_experts
from models.families import FAMILIES

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def near(a: torch.Tensor, b: torch.Tensor, what: Any, bound: float) -> None:
    assert a.shape == b.shape, (what, a.shape, b.shape)
    error = float((a - b).norm() / b.norm().clamp(min=1e-9))
    assert error <= bound, (what, error)


def tensors(value: Any) -> list[torch.Tensor]:
    """Return what a field of an output has, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [one for part in value for one in tensors(part)]
    return []


def families(names: str) -> None:
    """Outputs, router logits, auxiliary losses and gradients."""
    wanted = names.split(",") if names != "all" else None
    for family in FAMILIES:
        if wanted is not None and family.name not in wanted:
            continue
        single: Any = family.build()
        shared: Any = parallelize_experts(family.build())
        with suppress(ValueError):  # it has none
            overlapped = overlap_shared_experts(shared)
            if family.name == "DeepSeek-V3":
                assert overlapped and all("shared_experts" in one for one in overlapped)
        count = sum(isinstance(one, Experts) for one in shared.modules())
        batch = family.batch(single, seed=10 + dist.get_rank())
        a, b = single(**batch), shared(**batch)
        assert a.keys() == b.keys(), family.name
        for name in a.keys() & {"loss", "logits", "router_logits", "aux_loss", "z_loss"}:
            one, two = tensors(a[name]), tensors(b[name])
            assert len(one) == len(two), (family.name, name)
            for x, y in zip(one, two, strict=True):
                near(y.detach(), x.detach(), (family.name, name), 2e-6)
        a.loss.backward(), b.loss.backward()
        dealt = 0
        for (name, p), q in zip(single.named_parameters(), shared.parameters(), strict=True):
            if not isinstance(q, DTensor):
                assert (p.grad is None) == (q.grad is None), name
                if p.grad is not None:
                    near(q.grad, p.grad, (family.name, name), 2e-5)
                continue
            dealt += 1
            grad = torch.zeros_like(p) if p.grad is None else p.grad.clone()
            dist.all_reduce(grad)
            near(q.grad.full_tensor(), grad / dist.get_world_size(), (family.name, name), 2e-5)
        assert count and dealt >= count, family.name


def recipe() -> None:
    """A quantized mixture, dispatched in MXFP8, learns as one that is not does."""
    made = [next(one for one in FAMILIES if one.name == "Qwen3-MoE").build() for _ in range(2)]
    shared: Any = parallelize_experts(hybridq.convert(made[1]), dispatch="mxfp8", combine="mxfp8")
    batch = {"input_ids": torch.randint(3, 96, (2, 32))}
    batch["labels"] = batch["input_ids"].clone()
    plain: Any = made[0]
    with hybridq.autocast(recipe="mxfp8_fwd_nvfp4_bwd"):
        loss = shared(**batch).loss
    loss.backward()
    near(loss.detach(), plain(**batch).loss.detach(), "loss", 0.05)
    assert all(one.grad is not None for one in shared.parameters())


def saved(folder: str) -> None:
    """A folder with the hub's names for each expert, which one process reads bit for bit."""
    family = next(one for one in FAMILIES if one.name == "Qwen3-MoE")
    single, shared = family.build(), parallelize_experts(family.build())
    whole = get_model_state_dict(shared, options=WHOLE)
    shared.save_pretrained(folder)  # one set of files, of the first rank
    dist.barrier()
    if dist.get_rank() == 0:
        shared.save_pretrained(f"{folder}-given", state_dict=whole)
        assert (
            Path(f"{folder}-given/model.safetensors").read_bytes()
            == Path(f"{folder}/model.safetensors").read_bytes()
        )
        single.save_pretrained(f"{folder}-single")  # a model of the same class, on one rank
        with safe_open(f"{folder}/model.safetensors", "pt") as file:
            assert "model.layers.0.mlp.experts.0.gate_proj.weight" in set(file.keys())
        read = transformers.AutoModelForCausalLM.from_pretrained(folder)
        for (name, a), b in zip(single.named_parameters(), read.parameters(), strict=True):
            assert torch.equal(a, b), name


if __name__ == "__main__":
    main(globals())
