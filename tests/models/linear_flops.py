"""Counts the floating point operations of a forward, and which of them ran on quantized operands.

Independent of `hybridq.summary`: it sees operations, and knows a linear one by an operand that lies
in the memory of a parameter. Products of activations, as attention scores and scans are, count
apart; so do convolutions whose windows overlap or are groups.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import hybridq

__all__ = ["LinearFlops", "linear_flops"]

_aten = torch.ops.aten
#: Where the two operands of a product lie among its arguments.
_PRODUCTS = {
    _aten.mm.default: (0, 1),
    _aten.bmm.default: (0, 1),
    _aten.addmm.default: (1, 2),
    _aten.baddbmm.default: (1, 2),
    _aten._grouped_mm.default: (0, 1),
    _aten.addmv.default: (1, 2),
    _aten.mv.default: (0, 1),
}
#: Components of the names, and names of the classes, of what keeps its precision.
_HEADS = re.compile(
    r"lm_head|embed_out|proj_out|score|classifier|pooler|qa_outputs|vocab_\w+|predictions"
)
_ROUTERS = re.compile(r"gate|router|\w+_gate|\w+_router")
_ROUTER_CLASS = re.compile(r".*(Router|Gate|TopKGating)")


class LinearFlops(TorchDispatchMode):
    """Sums by sort: `quantized`, `plain`, `head`, `router`, `convolution`, `activations`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.plain_in: Counter[str] = Counter()
        self._names = {id(module): name for name, module in model.named_modules()}
        self._stack: list[nn.Module] = []
        self._parameters = {
            parameter.untyped_storage().data_ptr()
            for parameter in model.parameters()
            if type(parameter) is nn.Parameter
        }
        output = getattr(model, "get_output_embeddings", lambda: None)()
        self._head = output

    @contextmanager
    def watching(self) -> Iterator[LinearFlops]:
        """Count what runs inside."""
        hooks = nn.modules.module
        enter = hooks.register_module_forward_pre_hook(lambda m, _: self._stack.append(m))
        leave = hooks.register_module_forward_hook(
            lambda m, *_: self._stack.pop() and None, always_call=True
        )
        try:
            with self:
                yield self
        finally:
            enter.remove()
            leave.remove()

    @property
    def share(self) -> float:
        """Quantized over all linear operations but those of heads and routers."""
        linear = self.counts["quantized"] + self.counts["plain"]
        return self.counts["quantized"] / linear if linear else 1.0

    @property
    def share_of_all(self) -> float:
        """Quantized over all linear operations."""
        linear = sum(self.counts[name] for name in ("quantized", "plain", "head", "router"))
        return self.counts["quantized"] / linear if linear else 1.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in _PRODUCTS:
            a, b = (args[at] for at in _PRODUCTS[func])
            inner = a.shape[-1]
            self._add(2 * made.numel() * inner, self._is_linear(a, b))
        elif func is _aten.convolution.default:
            self._convolution(args, made)
        elif func.namespace == "hybridq" and "gemm" in func.__name__:
            self._quantized(func, args, made)
        return made

    def _is_linear(self, *operands: torch.Tensor) -> bool:
        return any(one.untyped_storage().data_ptr() in self._parameters for one in operands)

    def _convolution(self, args: tuple[Any, ...], made: torch.Tensor) -> None:
        weight, stride, padding, dilation, groups = args[1], args[3], args[4], args[5], args[8]
        flops = 2 * made.numel() * weight[0].numel()
        is_product = (
            tuple(stride) == tuple(weight.shape[2:])
            and not any(padding)
            and set(dilation) == {1}
            and groups == 1
        )
        if is_product:
            self._add(flops, True)
        else:
            self.counts["convolution"] += flops

    def _quantized(self, func: Any, args: tuple[Any, ...], made: torch.Tensor) -> None:
        bound = {a.name: v for a, v in zip(func._schema.arguments, args, strict=False)}
        k = bound["k"] if "k" in bound else bound["a_shape"][-1]
        specs = [str(bound.get(name, "")) for name in ("a_spec", "b_spec")]
        flops = 2 * made.numel() * int(k)
        if any("identity" in spec for spec in specs):
            self._add(flops, True)
        else:
            self.counts["quantized"] += flops

    def _add(self, flops: int, is_linear: bool) -> None:
        if not is_linear:
            self.counts["activations"] += flops
            return
        inside = self._stack[-1] if self._stack else None
        name = self._names.get(id(inside), "")
        if _ROUTER_CLASS.fullmatch(type(inside).__name__) or self._has(_ROUTERS, name):
            self.counts["router"] += flops
        elif (inside is self._head and inside is not None) or self._has(_HEADS, name):
            self.counts["head"] += flops
        else:
            self.counts["plain"] += flops
            self.plain_in[f"{name} ({type(inside).__name__})"] += flops

    @staticmethod
    def _has(pattern: re.Pattern[str], name: str) -> bool:
        return any(pattern.fullmatch(part) for part in name.split("."))


def linear_flops(model: nn.Module, batch: dict[str, Any], recipe: Any) -> LinearFlops:
    """Return the counts of one forward under a recipe, without gradients."""
    counted = LinearFlops(model)
    with torch.no_grad(), hybridq.autocast(recipe=recipe), counted.watching():
        model(**batch)
    return counted
