"""Steps of hybridq.optim in compiled code: eager steps are the oracle, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hybridq
from hybridq.optim import SGD, AdamW, Muon
from tensor_tools import same_planes

KINDS = {
    "sgd": (SGD, {"lr": 0.05, "momentum": 0.9}),
    "adamw": (AdamW, {"lr": 0.02}),
    "adamw bf16": (AdamW, {"lr": 0.02, "moments": "bf16", "master_dtype": torch.bfloat16}),
    "muon": (Muon, {"lr": 0.02}),
}


def trained(name: str, dtype: torch.dtype, is_compiled: bool) -> tuple[list, dict]:
    """Return the matrices of a quantized model after three steps, and the optimizer's state."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    kind, options = KINDS[name]
    with hybridq.quantized_model_init("mxfp8"):
        sizes = ((64, 96), (96, 96), (96, 96))  # two of one shape
        model = nn.Sequential(*(hybridq.Linear(*size, bias=False, dtype=dtype) for size in sizes))
    optimizer = kind(model.parameters(), **options)

    def loop(x: torch.Tensor) -> None:
        with hybridq.autocast(recipe="mxfp8"):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    loop = torch.compile(loop, backend="aot_eager") if is_compiled else loop
    for step in range(3):
        torch.manual_seed(step)
        loop(torch.randn(16, 64, dtype=dtype))
    return list(model.parameters()), optimizer.state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", sorted(KINDS))
def test_masters_are_kept_in_a_compiled_loop(name, dtype) -> None:
    wanted, state = trained(name, dtype, False)
    found, own = trained(name, dtype, True)
    for a, b in zip(wanted, found, strict=True):
        same_planes(a, b)
        assert torch.equal(state[a]["master_param"], own[b]["master_param"])
        decoded = own[b]["master_param"].float() - b.detach().dequantize(dtype=torch.float32)
        assert decoded.any()  # the master has what the planes have not


def test_one_graph_with_such_a_step_is_refused() -> None:
    with hybridq.quantized_model_init("mxfp8"):
        layer = hybridq.Linear(64, 32, bias=False)
    optimizer = SGD(layer.parameters(), lr=0.1)
    layer.weight.grad = torch.ones(32, 64)
    step = torch.compile(lambda: optimizer.step(), backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"quantized parameters runs eagerly"):
        step()
