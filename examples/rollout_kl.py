"""A small GRPO: the KL estimate of rollouts with the trainer's bits, and with others, plotted."""

import copy
import sys

import matplotlib.pyplot as plt
import torch
from torch import nn

import hybridq

TOKENS, SEEN, LENGTH = 32, 4, 16  # of a text, that the next token follows from, that are sampled
DTYPES = {"aligned": torch.bfloat16, "of FP32 values": torch.float32}  # what planes are made of


def logs(policy: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with hybridq.autocast(recipe="mxfp8"), torch.autocast("cpu", torch.bfloat16):
        return policy(ids).float().log_softmax(-1)


def serve(policy: nn.Module, dtype: torch.dtype) -> nn.Module:
    pushed = dict(hybridq.rollout.weights(policy, "modelopt", recipe="mxfp8", dtype=dtype))
    found = hybridq.layouts.MODELOPT.find({n: (t.dtype, (*t.shape,)) for n, t in pushed.items()})
    server = copy.deepcopy(policy).requires_grad_(False)
    for name, weight in found.items():  # has the weights that were pushed, and no others
        planes = hybridq.TensorStorage(weight.decode(pushed)[0], None)
        made = hybridq.QuantizedTensor.make(planes, weight.shape, torch.bfloat16)
        server.get_submodule(name.removesuffix(".weight")).weight = nn.Parameter(made, False)
    return server


def main(path: str | None = None, steps: int = 40, prompts: int = 8) -> dict[str, list[float]]:
    torch.manual_seed(0)
    sizes = (nn.Linear(64 * SEEN, 256), nn.SiLU(), nn.Linear(256, 256), nn.Linear(256, TOKENS))
    policy = hybridq.convert(nn.Sequential(nn.Embedding(TOKENS, 64), nn.Flatten(), *sizes))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)  # of FP32 masters
    kl: dict[str, list[float]] = {name: [] for name in DTYPES}
    for _ in range(steps):
        servers = {name: serve(policy, dtype) for name, dtype in DTYPES.items()}
        ids = torch.randint(TOKENS, (prompts, SEEN)).repeat_interleave(16, 0)
        for _ in range(LENGTH):  # the aligned server samples
            ids = torch.cat((ids, logs(servers["aligned"], ids[:, -SEEN:]).exp().multinomial(1)), 1)
        reward = (ids[:, SEEN:] == (ids[:, SEEN - 1 : -1] + 1) % TOKENS).float().mean(1)
        gain = reward.view(prompts, 16) - reward.view(prompts, 16).mean(1, True)
        gain = (gain / (gain.std(1, keepdim=True) + 1e-4)).view(-1, 1).repeat_interleave(LENGTH, 0)
        inputs, taken = ids.unfold(1, SEEN, 1)[:, :-1].flatten(0, 1), ids[:, SEEN:].reshape(-1, 1)
        now = logs(policy, inputs).gather(1, taken)
        for name, server in servers.items():
            ratio = now.detach() - logs(server, inputs).gather(1, taken)
            kl[name].append((ratio.expm1() - ratio).mean().item())
        optimizer.zero_grad()
        (-gain * (now - now.detach()).exp()).mean().backward(), optimizer.step()
    print(f"reward {reward.mean():.2f}; KL " + ", ".join(f"{n} {v[-1]:.1e}" for n, v in kl.items()))
    plt.legend(plt.plot(torch.tensor(list(kl.values())).T), kl) and plt.ylabel("KL estimate, nats")
    plt.xlabel("step") and path and plt.savefig(path)
    return kl


if __name__ == "__main__":
    main(*sys.argv[1:])
