"""What holds of every model: checks that take a family, and nothing of what hybridq knows of it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

import hybridq
from hybridq.recipes import QuantizerRole

from .families import Family

__all__ = ["Run", "converted", "gemm_errors", "run", "same", "tensors_of"]


class Run(NamedTuple):
    """One forward and backward: the loss, all tensors of the output, and all gradients."""

    loss: torch.Tensor
    outputs: list[torch.Tensor]
    grads: dict[str, torch.Tensor | None]


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a model's output, in order; None has no place."""
    if isinstance(value, torch.Tensor):
        return [value.detach()]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [one for part in value for one in tensors_of(part)]
    return []


def run(model: nn.Module, batch: dict[str, Any], recipe: Any = None, seed: int = 3) -> Run:
    """Run a forward and a backward, under a recipe if there is one."""
    torch.manual_seed(seed)
    model.zero_grad(set_to_none=True)
    with hybridq.autocast(enabled=recipe is not None, recipe=recipe):
        output = model(**batch)
    loss = output.loss if getattr(output, "loss", None) is not None else output[0].square().mean()
    loss.backward()
    grads = {
        name: None if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters()
    }
    return Run(loss.detach(), tensors_of(dict(output)), grads)


def same(a: Run, b: Run, summed: tuple[str, ...] = ()) -> None:
    """Assert that two runs have the same bits, everywhere.

    Args:
        a, b: the runs.
        summed: parameters whose gradients are sums in an order that is autograd's own.
    """
    assert torch.equal(a.loss, b.loss)
    assert len(a.outputs) == len(b.outputs)
    for one, other in zip(a.outputs, b.outputs, strict=True):
        assert torch.equal(one, other)
    assert a.grads.keys() == b.grads.keys()
    for name, grad in a.grads.items():
        other = b.grads[name]
        assert (grad is None) == (other is None), name
        if grad is not None and other is not None:
            if name in summed:
                torch.testing.assert_close(grad, other, rtol=1e-5, atol=1e-6)
            else:
                assert torch.equal(grad, other), name


def converted(family: Family) -> nn.Module:
    """Return a family's model, converted; nothing of what is said is a mistake here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hybridq.HybridQWarning)
        return hybridq.convert(family.build())


class _Seen:
    """What one linear module was given, and gave, in one call and its backward."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name, self.module, self.calls = name, module, 0
        self.x = self.y = self.dy = self.dx = torch.empty(0)

    def enter(self, _: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        # An alias: its gradient is what this module gives, where x has other readers too.
        self.calls += 1
        x = args[0].view_as(args[0])
        if x.requires_grad:
            x.register_hook(lambda grad: setattr(self, "dx", grad.detach()))
        self.x = x.detach()
        return (x, *args[1:])

    def leave(self, _: Any, __: Any, y: torch.Tensor) -> None:
        self.y = y.detach().clone()  # which others may write to
        y.register_hook(lambda grad: setattr(self, "dy", grad.detach()))


@contextmanager
def _watched(model: nn.Module) -> Iterator[list[_Seen]]:
    found, hooks = [], []
    for name, module in model.named_modules():
        if type(module) is hybridq.Linear:
            seen = _Seen(name, module)
            found.append(seen)
            hooks.append(module.register_forward_pre_hook(seen.enter))
            hooks.append(module.register_forward_hook(seen.leave))
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _both(recipe: Any, slot: str, name: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values of both planes of a matrix, in FP64."""
    quantizer = recipe.for_name(name).quantizer(QuantizerRole("linear", slot, name))
    made = quantizer(x.reshape(-1, x.shape[-1]))
    return made.rowwise.dequantize().double(), made.columnwise.dequantize().double()


def gemm_errors(model: nn.Module, batch: dict[str, Any], recipe: Any) -> dict[str, float]:
    """Return, for each GEMM of each linear module, how far it is from FP64 of the same planes.

    The error is the largest of the matrix, over the largest sum of products of absolute values: the
    unit in which sums of FP32 err.
    """
    errors: dict[str, float] = {}
    with _watched(model) as found:
        run(model, batch, recipe)
    shared = [id(one) for module in model.modules() for one in module.parameters(recurse=False)]
    for seen in found:
        if seen.calls != 1 or not seen.y.numel():
            continue
        weight: torch.Tensor = seen.module.weight  # type: ignore[assignment]
        bias = seen.module.bias
        x = _both(recipe, "input", seen.name, seen.x)
        w = _both(recipe, "weight", seen.name, weight.detach())
        pairs = {"fprop": (x[0], w[0].T, seen.y.flatten(0, -2), bias)}
        if seen.dy.numel():
            g = _both(recipe, "grad_output", seen.name, seen.dy)
            if seen.dx.numel():
                pairs["dgrad"] = (g[0], w[1], seen.dx.flatten(0, -2), None)
            if weight.grad is not None and shared.count(id(weight)) == 1:
                pairs["wgrad"] = (g[1].T, x[1], weight.grad, None)
        for gemm, (a, b, got, plus) in pairs.items():
            expected = a @ b
            size = (a.abs() @ b.abs()).max()
            if plus is not None:
                expected = expected + plus.detach().double()
            error = (got.double() - expected).abs().max() / size.clamp(min=1e-30)
            errors[f"{seen.name} {gemm}"] = float(error)
    return errors
