"""Cross-entropy of classes on several ranks, against torch's of all classes in FP64."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rank_program import main

from hybridq.distributed import parallel_cross_entropy

TOKENS, OWN = (3, 4), 7


def whole(world: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    logits = 8 * torch.randn(*TOKENS, OWN * world)
    target = torch.randint(OWN * world, TOKENS)
    target[1, 2] = target[2, 0] = -7
    return logits, target, torch.randn(TOKENS)


def losses() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    logits, target, dy = whole(world)
    for smoothing in (0.0, 0.3):
        for reduced in (False, True):
            own = logits[..., rank * OWN : (rank + 1) * OWN].clone().requires_grad_()
            loss = parallel_cross_entropy(
                own, target, smoothing, reduced, dist.group.WORLD, ignore_index=-7
            )
            wide = logits.double().requires_grad_()
            want = F.cross_entropy(
                wide.flatten(0, 1),
                target.flatten(),
                reduction="mean" if reduced else "none",
                label_smoothing=smoothing,
                ignore_index=-7,
            )
            want = want if reduced else want.view(TOKENS)
            (loss if reduced else loss * dy).sum().backward()
            (want if reduced else want * dy).sum().backward()
            torch.testing.assert_close(loss.double(), want, rtol=1e-6, atol=1e-5)
            part = wide.grad[..., rank * OWN : (rank + 1) * OWN]
            torch.testing.assert_close(own.grad.double(), part, rtol=1e-5, atol=1e-7)


def refused() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    logits, target, _ = whole(world)
    try:
        parallel_cross_entropy(logits[..., : OWN - rank], target, group=dist.group.WORLD)
    except RuntimeError as error:
        assert "shape" in str(error), error
    else:
        raise AssertionError("parts of different sizes were taken")
    try:
        parallel_cross_entropy(logits, target if rank else target.float(), group=dist.group.WORLD)
    except TypeError as error:
        assert rank == 0, error
    except RuntimeError as error:
        assert rank and "refused" in str(error), error
    else:
        raise AssertionError("a floating target was taken")


if __name__ == "__main__":
    main(globals(), timeout=20.0)
