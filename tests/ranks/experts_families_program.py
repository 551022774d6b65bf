"""All families of mixtures of transformers: `python experts_families_program.py RANK WORLD ...`.

Small models of every family that transformers marks, against themselves whole on every rank, as
`experts_hf_program.py` does it; and families that are refused.

A gradient that nearly cancels is no nearer to exact on one process than on many: where two differ
by more than the bound, the one over ranks may err from FP64 by twice as much as the other.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import transformers
from experts_hf_program import near, tensors
from rank_program import main
from torch import nn
from torch.distributed.tensor import DTensor

from hybridq.moe import Experts, parallelize_experts
from models.mixtures import batch_of, build

SMALL: dict[str, Any] = {"vocab_size": 96, "hidden_size": 64, "num_attention_heads": 4}


def loss_of(given: Any) -> torch.Tensor:
    """Return the model's loss, or where it has none a weighted sum of what it gives.

    Not the square of it: that of what a norm gives is the same for all weights.
    """
    loss = getattr(given, "loss", None)
    if loss is not None:
        return loss
    weights = torch.randn(given[0].shape, generator=torch.Generator().manual_seed(0))
    return (given[0] * weights).sum() / given[0].shape[0]


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b).norm() / b.norm().clamp(min=1e-9))


def no_worse(family: str, batch: Any, differing: dict[str, list[torch.Tensor]]) -> list[str]:
    """Return what is farther from the gradients in FP64 than rounding explains.

    Args:
        family: of the model.
        batch: that it saw.
        differing: gradients of one process, and of the model over ranks, by name.
    """
    exact: Any = build(family).double()
    exact.set_experts_implementation("eager")  # grouped products take no FP64
    loss_of(exact(**batch)).backward()
    found = dict(exact.named_parameters())
    errors = {
        name: [distance(one, found[name].grad) for one in both] for name, both in differing.items()
    }
    return [
        f"{name}: errors {one} of one process, {many} over ranks"
        for name, (one, many) in errors.items()
        if many > 2 * one + 2e-5
    ]


def marked(names: str) -> None:
    """Outputs, router logits, auxiliary losses and gradients are those of the model as it is."""
    failed = []
    for family in names.split(","):
        single: Any = build(family)
        shared: Any = parallelize_experts(build(family))
        batch = batch_of(single, seed=10 + dist.get_rank())
        a, b = single(**batch), shared(**batch)
        assert a.keys() == b.keys(), family
        problems: list[str] = []
        differing: dict[str, list[torch.Tensor]] = {}

        def check(x: torch.Tensor, y: torch.Tensor, what: str, bound: float) -> None:
            try:
                near(y, x, what, bound)
            except AssertionError as error:
                problems.append(str(error))  # noqa: B023

        for name in a.keys() & {"loss", "logits", "last_hidden_state", "router_logits", "aux_loss"}:
            one, two = tensors(a[name]), tensors(b[name])
            assert len(one) == len(two), (family, name)
            for x, y in zip(one, two, strict=True):
                check(x.detach(), y.detach(), name, 2e-6)
        loss_of(a).backward(), loss_of(b).backward()
        dealt = 0
        for (name, p), q in zip(single.named_parameters(), shared.parameters(), strict=True):
            if ".experts." in name and not isinstance(q, DTensor):
                # A norm of experts' outputs: a rank's gradient is of the rows of its experts.
                sums = torch.stack([p.grad, q.grad])
                dist.all_reduce(sums)
                check(*sums, name, 2e-5)
                continue
            if not isinstance(q, DTensor):
                assert (p.grad is None) == (q.grad is None), (family, name)
                if p.grad is not None and distance(q.grad, p.grad.double()) > 2e-5:
                    differing[name] = [p.grad, q.grad]
                continue
            dealt += 1
            grad = torch.zeros_like(p) if p.grad is None else p.grad.clone()
            dist.all_reduce(grad)
            mine = torch.zeros_like(p) if q.grad is None else q.grad.full_tensor()
            check(grad / dist.get_world_size(), mine, name, 2e-5)
        count = sum(isinstance(one, Experts) for one in shared.modules())
        assert count and dealt >= 2 * count, (family, count, dealt)
        if differing:
            problems += no_worse(family, batch, differing)
        if problems:
            failed.append((family, problems[:4]))
    assert not failed, failed


def refused() -> None:
    """What cannot be dealt out is an error on every rank, and the model stays as it was."""
    longcat = transformers.LongcatFlashConfig(
        **SMALL,
        num_layers=1,
        ffn_hidden_size=64,
        expert_ffn_hidden_size=64,
        n_routed_experts=4,
        zero_expert_num=2,
        moe_topk=2,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
    )
    doge = transformers.DogeConfig(
        **SMALL, num_hidden_layers=1, intermediate_size=64, is_moe=True, num_experts=16
    )
    switch = transformers.SwitchTransformersConfig(
        vocab_size=96, d_model=64, d_ff=64, d_kv=16, num_heads=4, num_layers=2, num_experts=4
    )
    for config, kind, error, text in (
        (longcat, transformers.LongcatFlashModel, ValueError, "must be of as many experts"),
        (doge, transformers.DogeModel, ValueError, "must have experts that are known"),
        (switch, transformers.SwitchTransformersModel, ValueError, "must have experts that are"),
    ):
        model: nn.Module = kind(config)
        before = {name: one.data_ptr() for name, one in model.named_parameters()}
        try:
            parallelize_experts(model)
        except error as raised:
            assert text in str(raised), raised
        else:
            raise AssertionError(kind)
        assert before == {name: one.data_ptr() for name, one in model.named_parameters()}


if __name__ == "__main__":
    main(globals())
