"""Plain tensors to quantize, described by values so that a failing example can be read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from hypothesis import strategies as st

__all__ = ["HIGH", "JUNK", "SIZES", "Values", "junk", "plain", "shapes"]

HIGH: Final = (torch.float32, torch.bfloat16, torch.float16)
#: Around every block, byte, group and tile size there is.
SIZES: Final = (1, 2, 3, 4, 8, 15, 16, 17, 20, 31, 32, 33, 48, 63, 64, 65, 96, 127, 128, 129, 160)
KINDS: Final = ("normal", "wide", "zeros", "specials", "subnormals", "huge", "outlier", "integers")
LAYOUTS: Final = (
    "dense",
    "transposed",
    "strided",
    "offset",
    "expanded",
    "scalar",
    "negated",
    "view",
)
_MAX_NUMEL: Final = 20_000


@dataclass(frozen=True)
class Values:
    """A plain tensor: `build()` gives the same one every time.

    Args:
        shape: of the tensor.
        dtype: FP32, BF16 or FP16.
        kind: what the values are, one of `KINDS`.
        layout: how they lie in memory, one of `LAYOUTS`.
        seed: of the values.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    kind: str = "normal"
    layout: str = "dense"
    seed: int = 0

    @property
    def is_finite(self) -> bool:
        """Whether no value is, or may become, infinite or NaN."""
        return self.kind not in ("specials", "huge")

    def build(self) -> torch.Tensor:
        """Return the tensor."""
        generator = torch.Generator().manual_seed(self.seed)
        x = _KIND[self.kind](torch.randn(self.shape, generator=generator), generator)
        return self._laid_out(x.to(self.dtype))

    def _laid_out(self, x: torch.Tensor) -> torch.Tensor:
        layout = self.layout
        if layout == "transposed" and x.dim() > 1:
            return x.transpose(-1, -2).contiguous().transpose(-1, -2)
        if layout == "strided" and x.dim() > 0:
            room = x.new_full((*x.shape[:-1], 2 * x.shape[-1] + 1), torch.nan)
            room[..., 1::2] = x
            return room[..., 1::2]
        if layout == "offset":
            room = x.new_full((x.numel() + 3,), torch.nan)
            room[3:] = x.reshape(-1)
            return room[3:].view(x.shape)
        if layout == "expanded" and x.dim() > 0 and x.shape[0]:
            return x[:1].expand(x.shape)
        if layout == "scalar" and x.numel():
            return x.reshape(-1)[0].expand(x.shape)
        if layout == "negated" and x.dtype == torch.float32:
            return torch.complex(x, -x).conj().imag  # the negation is only a bit of the tensor
        if layout == "view" and x.dim() > 1:
            room = x.new_full((x.shape[0] + 2, *x.shape[1:]), torch.nan)
            room[1:-1] = x
            return room[1:-1]
        return x


def _wide(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return x * torch.exp2(torch.randint(-30, 30, x.shape, generator=generator).float())


def _specials(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    where = torch.randint(0, 40, x.shape, generator=generator)
    for mark, value in enumerate((torch.nan, -torch.nan, torch.inf, -torch.inf, -0.0, 1e-42)):
        x = torch.where(where == mark, value, x)
    return x


def _outlier(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    x = x * 1e-3
    if x.numel():
        at = int(torch.randint(0, x.numel(), (1,), generator=generator))
        x.view(-1)[at] = 3e4
    return x


_KIND = {
    "normal": lambda x, _: x,
    "wide": _wide,
    "zeros": lambda x, _: torch.where(x > 0, 0.0, -0.0),
    "specials": _specials,
    "subnormals": lambda x, _: x * 1e-39,
    "huge": lambda x, _: x * 1e38,
    "outlier": _outlier,
    "integers": lambda x, _: (x * 4).round(),
}


@st.composite
def shapes(draw: Any, max_dims: int = 4) -> tuple[int, ...]:
    """Shapes of 0 to `max_dims` dimensions, mostly matrices, sometimes empty."""
    dims = draw(st.sampled_from((2, 2, 2, 2, 1, 3, 4, 0)).filter(lambda n: n <= max_dims))
    sizes = [draw(st.sampled_from(SIZES if at > dims - 3 else (1, 1, 2, 3))) for at in range(dims)]
    if dims and draw(st.integers(0, 11)) == 7:
        sizes[draw(st.integers(0, dims - 1))] = 0
    while np.prod(sizes, dtype=int) > _MAX_NUMEL:
        sizes[int(np.argmax(sizes))] //= 2
    return tuple(sizes)


def plain(matrices: bool = False) -> st.SearchStrategy[Values]:
    """Plain tensors of any shape, or matrices only."""
    sides = st.sampled_from((0, *SIZES))
    return st.builds(
        Values,
        st.tuples(sides, sides) if matrices else shapes(),
        st.sampled_from((torch.float32, *HIGH)),
        st.sampled_from(KINDS),
        st.sampled_from(LAYOUTS),
        st.integers(0, 7),
    )


#: What is no tensor of values, by name.
JUNK: Final = {
    "none": lambda: None,
    "text": lambda: "mxfp8",
    "number": lambda: 3,
    "list": lambda: [[1.0, 2.0]],
    "numpy": lambda: np.ones((2, 32), np.float32),
    "int64": lambda: torch.arange(64).view(2, 32),
    "bool": lambda: torch.ones(2, 32, dtype=torch.bool),
    "float64": lambda: torch.ones(2, 32, dtype=torch.float64),
    "complex": lambda: torch.ones(2, 32, dtype=torch.complex64),
    "float8": lambda: torch.ones(2, 32).to(torch.float8_e4m3fn),
    "uint8": lambda: torch.ones(2, 32, dtype=torch.uint8),
    "sparse": lambda: torch.eye(32).to_sparse(),
    "csr": lambda: torch.eye(32).to_sparse_csr(),
    "meta": lambda: torch.ones(2, 32, device="meta"),
    "zero": lambda: torch._efficientzerotensor(2, 32),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(3), torch.ones(2)]),
    "class": lambda: torch.Tensor,
    "module": lambda: torch.nn.Linear(2, 2),
}


def junk() -> st.SearchStrategy[str]:
    """Names of `JUNK`."""
    return st.sampled_from(sorted(JUNK))
