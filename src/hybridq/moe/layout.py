"""ExpertsLayout: how a class holds its experts, and what its forward is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

import torch
from torch import nn

from ..errors import must_be_one_of
from ..reference import ACTIVATIONS

__all__ = ["ExpertsLayout", "GateOf"]

#: What makes the hidden values of a product's result: `f(module, h)`.
GateOf = Callable[[Any, torch.Tensor], torch.Tensor]
Takes = Literal["routing", "sizes", "batches"]
RouterWeights = Literal["output", "input", "none"]
_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class ExpertsLayout:
    """How a class holds E experts, each `down(activation(gate(x)) * up(x))`, and how it is called.

    Args:
        gate_up: name of the parameter `[E, 2 I, H]` of gate and up together; or the names of the
            two, `[E, I, H]` each, gate first. Without a gate: that of up, `[E, I, H]`. None: an
            expert is one product, `down(x)`, and nothing else.
        down: name of the parameter `[E, H, I]`.
        gate_up_bias: name, or names, of the biases `[E, 2 I]`; None: there are none.
        down_bias: name of the biases `[E, H]`; None: there are none.
        is_transposed: parameters are `[E, in, out]`: `[E, H, 2 I]` and `[E, I, H]`.
        is_concatenated: of gate and up together, the gate is the first half; else the two
            alternate, gate first.
        has_gate: whether there is one; without it an expert is `down(activation(up(x)))`.
        activation: name of a function of one value: `relu`, `srelu`, `gelu` (by tanh), `silu`,
            `qgelu`; or `f(module, h)`, which makes `[rows, I]` of what the first product gives as
            it is, gating included.
        post_norm: name of a submodule that every expert's output goes through; None: none.
        scale: name of a parameter or buffer `[E]` that experts' outputs are multiplied with; None:
            none.
        passes_others: an index of E or more is of an expert that gives what it is given; such
            experts may have matrices in `gate_up`, which nothing reads.
        router_weights: what the router's weights multiply: the experts' `"output"`, or their
            `"input"`; `"none"`: nothing.
        takes: what `forward` takes. `"routing"`: `(hidden_states [T, H], indices [T, k], weights
            [T, k])`, to give the sum over each token's experts, `[T, H]`; an index of E or more is
            of no expert here. `"sizes"`: `(tokens [N, H], sizes [E])`, tokens sorted by expert.
            `"batches"`: `(tokens [E * C, H])`, as many for each expert. The last two have no
            router's weights.

    Raises:
        TypeError: a name is no string, or `activation` neither a name nor callable.
        ValueError: no activation has that name, an option has no such value, gate and up have two
            names where there is no gate, or weights of a router where there are none.

    Source: the flags that transformers gives its experts (`use_experts_implementation`), and what
        other models hold: ours.

    Example:
        >>> from hybridq.moe import ExpertsLayout
        >>> ExpertsLayout(gate_up=("w1", "w3"), down="w2", takes="sizes").weights
        ('w1', 'w3', 'w2')
    """

    gate_up: str | tuple[str, str] | None = "gate_up_proj"
    down: str = "down_proj"
    gate_up_bias: str | tuple[str, str] | None = None
    down_bias: str | None = None
    is_transposed: bool = False
    is_concatenated: bool = True
    has_gate: bool = True
    activation: str | GateOf = "silu"
    post_norm: str | None = None
    scale: str | None = None
    passes_others: bool = False
    router_weights: RouterWeights = "output"
    takes: Takes = "routing"

    def __post_init__(self) -> None:
        given: object
        for what, given in (("gate_up", self.gate_up), ("gate_up_bias", self.gate_up_bias)):
            names = given if isinstance(given, tuple) else (given,)
            if given is not None and not (
                len(names) < 3 and all(isinstance(n, str) for n in names)
            ):
                raise TypeError(f"ExpertsLayout: {what} must be a name or two, got {given!r}")
        for what, given in (
            *(("down", self.down), ("down_bias", self.down_bias or "")),
            *(("post_norm", self.post_norm or ""), ("scale", self.scale or "")),
        ):
            if not isinstance(given, str):
                raise TypeError(f"ExpertsLayout: {what} must be a name, got {given!r}")
        for what, value, known in (
            ("router_weights", self.router_weights, get_args(RouterWeights)),
            ("takes", self.takes, get_args(Takes)),
        ):
            if value not in known:
                raise ValueError(f"ExpertsLayout: {what} {must_be_one_of(known, value)}")
        if self.gate_up is None and (self.has_gate or self.gate_up_bias is not None):
            raise ValueError(
                "ExpertsLayout: without gate_up an expert is one product, which has_gate=False "
                f"says, got has_gate={self.has_gate}, gate_up_bias={self.gate_up_bias!r}"
            )
        if self.passes_others and self.takes != "routing":
            raise ValueError(
                "ExpertsLayout: passes_others is of experts that take routing, got takes="
                f"{self.takes!r}"
            )
        if len(self.weights) == 3 and not self.has_gate:
            raise ValueError(
                "ExpertsLayout: without a gate there is one name of the up projection, got "
                f"{self.gate_up}"
            )
        if self.gate_up_bias is not None and len(self._biases) != len(self.weights) - (
            self.down_bias is None
        ):
            raise ValueError(
                "ExpertsLayout: gate_up_bias must have as many names as gate_up, got "
                f"{self.gate_up_bias!r} and {self.gate_up!r}"
            )
        self._check_activation()

    def _check_activation(self) -> None:
        names = [name for name, one in ACTIVATIONS.items() if not one.is_gated]
        if isinstance(self.activation, str):
            if self.activation not in names:
                known = must_be_one_of(names, self.activation, "a function f(module, h), or ")
                raise ValueError(f"ExpertsLayout: activation {known}")
        elif not callable(self.activation):
            raise TypeError(
                "ExpertsLayout: activation must be a name or a function f(module, h), got "
                f"{type(self.activation).__name__}"
            )

    @property
    def first(self) -> tuple[str, ...]:
        """Names of the weights that the tokens are multiplied with: one, gate and up, or none."""
        if self.gate_up is None:
            return ()
        return (self.gate_up,) if isinstance(self.gate_up, str) else tuple(self.gate_up)

    @property
    def first_biases(self) -> tuple[str | None, ...]:
        """Names of their biases, None where there is none."""
        if self.gate_up_bias is None:
            return (None,) * len(self.first)
        one = self.gate_up_bias
        return (one,) if isinstance(one, str) else tuple(one)

    @property
    def weights(self) -> tuple[str, ...]:
        """Names of all weights."""
        return (*self.first, self.down)

    @property
    def _biases(self) -> tuple[str, ...]:
        return tuple(one for one in (*self.first_biases, self.down_bias) if one is not None)

    def features(self, module: nn.Module) -> tuple[int, int] | None:
        """Return H and I of a module; None: it does not hold its experts so.

        Args:
            module: any.
        """
        down = module._parameters.get(self.down)
        if down is None or down.dim() != 3:
            return None
        hidden, inner = down.shape[1:]
        return (inner, hidden) if self.is_transposed else (hidden, inner)

    def reason_against(self, module: nn.Module) -> str | None:
        """Return why a module does not hold its experts so; None: it does.

        Args:
            module: any.
        """
        shapes = {}
        for name in (*self.weights, *self._biases):
            one = module._parameters.get(name)
            if one is None:
                return f"it has no parameter {name}"
            if one.dtype not in _DTYPES:
                return f"{name} is {one.dtype}"
            shapes[name] = tuple(one.shape)
        features, experts = self.features(module), shapes[self.down][:1]
        if features is None:
            return f"{self.down} must have three axes, got {list(shapes[self.down])}"
        hidden, inner = features
        width = 2 * inner if self.has_gate and len(self.first) == 1 else inner
        matrix = (hidden, width) if self.is_transposed else (width, hidden)
        wanted: dict[str, tuple[int, ...]] = dict.fromkeys(self.first, (*experts, *matrix))
        wanted |= {name: (*experts, width) for name in self.first_biases if name}
        wanted |= {self.down_bias: (*experts, hidden)} if self.down_bias else {}
        for name, shape in wanted.items():
            own = shapes[name]
            if self.passes_others and name in self.first:  # matrices that nothing reads
                own = (min(own[:1], experts)[0], *own[1:])
            if own != shape:
                return f"{name} must be {list(shape)}, got {list(shapes[name])}"
        for other in (self.post_norm, self.scale):
            if other is not None and not hasattr(module, other):
                return f"it has no {other}"
        return None
