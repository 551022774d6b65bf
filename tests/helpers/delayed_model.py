"""A linear layer under delayed scaling, written a second time: NumPy scales, torch's FP8 cast.

And what the tests of such layers share: a layer of known values, data, and steps of training.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import hybridq
from hybridq.nn.delayed_scaling.state import states_of
from linear_model import Product, product
from oracle.delayed import DelayedPlace

FMAX = {"e4m3": 448.0, "e5m2": 57344.0}
_FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
SLOTS = ("input", "weight", "grad_output")


def encode_values(x: torch.Tensor, scale: np.float32, element: str) -> torch.Tensor:
    """FP64 values of x quantized under a scale; finite x."""
    fmax, multiplier = FMAX[element], torch.tensor(scale)
    codes = (x.float() * multiplier).clamp(-fmax, fmax).to(_FLOAT8[element])
    return codes.double() * (1.0 / multiplier).double()


class DelayedModel:
    """The three places of a layer whose slots share one state for both directions.

    Args:
        options: of the DelayedPlaces.
        elements: of input, weight and grad_output.
    """

    def __init__(self, elements=("e4m3", "e4m3", "e5m2"), **options: Any) -> None:
        self.elements = dict(zip(SLOTS, elements, strict=True))
        self.places = {
            slot: DelayedPlace(FMAX[element], **options) for slot, element in self.elements.items()
        }

    def values(self, x: torch.Tensor, slot: str) -> torch.Tensor:
        """FP64 values of x in that slot; its amax is recorded."""
        place = self.places[slot]
        place.see(x.float().numpy())
        return encode_values(x, place.scale, self.elements[slot])

    def step(self, x, w, bias, dy) -> dict[str, Product]:
        """y, dx and dw of one microbatch."""
        x_values, w_values = self.values(x, "input"), self.values(w, "weight")
        dy_values = self.values(dy, "grad_output")
        return {
            "y": product(x_values, w_values, x.dtype, bias),
            "dx": product(dy_values, w_values.t(), x.dtype),
            "dw": product(dy_values.t(), x_values.t(), x.dtype),
        }

    def update(self) -> None:
        """The end of a step."""
        for place in self.places.values():
            place.update()

    @property
    def scales(self) -> dict[str, float]:
        """Scale of each slot."""
        return {slot: float(place.scale) for slot, place in self.places.items()}


def scales_of(module: torch.nn.Module) -> dict[str, float]:
    """Scale of each place of a layer that has recorded."""
    found = hybridq.state_dict_with_history(module)
    return {
        key.split(".")[-3]: tensor.item() for key, tensor in found.items() if key.endswith(".scale")
    }


def is_told(module: torch.nn.Module) -> bool:
    """Whether a step or a call has told of an update of a module."""
    return any(state.owner.is_told for state in states_of(module).values())


def within(tensor: torch.Tensor, expected: Product) -> bool:
    """Whether a result is within its bound."""
    return bool(((tensor.double() - expected.value).abs() <= expected.bound).all())


# --- a layer, its data and its training

INNER, OUTER, ROWS = 40, 24, 12


def forward(module, x, recipe="fp8_delayed", **options):
    """One forward under a recipe."""
    with hybridq.autocast(recipe=recipe, **options):
        return module(x)


def batch(step: int, dtype=torch.float32):
    """An input and an output gradient; their amaxes differ from step to step."""
    generator = torch.Generator().manual_seed(step)
    factor = (1.0, 3.0, 0.2, 9.0, 0.5)[step % 5]
    x = torch.randn(ROWS, INNER, generator=generator) * factor
    dy = torch.randn(ROWS, OUTER, generator=generator) / factor
    return x.to(dtype), dy.to(dtype)


def scale_for(x: torch.Tensor, fmax: float = 448.0) -> float:
    """`fmax / max|x|` by one FP32 division (torch's `number / tensor` takes two roundings)."""
    return (torch.tensor(fmax) / x.float().abs().max()).item()


def layer(dtype=torch.float32, seed=0) -> hybridq.Linear:
    """A layer of known values."""
    torch.manual_seed(seed)
    return hybridq.Linear(INNER, OUTER, dtype=dtype)


def microbatch(module, step, recipe="fp8_delayed", dtype=torch.float32, call=forward):
    """[y, dx, dw, db] of one forward and backward; parameters' gradients accumulate."""
    x, dy = batch(step, dtype)
    x.requires_grad_()
    y = call(module, x, recipe)
    y.backward(dy)
    return [y.detach(), x.grad, *(p.grad.clone() for p in module.parameters())]


def train(module, steps=range(5), recipe="fp8_delayed", call=forward, microbatches=1):
    """All results of some steps of SGD."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    made = []
    for step in steps:
        for number in range(microbatches):
            made += microbatch(module, step * microbatches + number, recipe, call=call)
        optimizer.step()
        optimizer.zero_grad()
    return made
