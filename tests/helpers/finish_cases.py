"""Cases of what follows a product: emulated on every machine, and on a GPU, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import torch

import kernel_cases as cases
from hybridq import reference
from hybridq.kernels.choice import GemmArgs


class Case(NamedTuple):
    """A product, what follows it, and what this is called."""

    product: torch.Tensor
    row_factor: torch.Tensor | None
    col_factor: torch.Tensor | None
    args: GemmArgs
    bounds: tuple[float, float]
    label: str

    @property
    def wanted(self) -> torch.Tensor:
        """What the definition says."""
        args = self.args
        return reference.finish_product(
            *self[:3],
            bounds=self.bounds,
            bias=args.bias,
            out=args.accumulate_into,
            out_dtype=args.out_dtype,
        )

    def on(self, kernels: cases.Kernels) -> Case:
        """Return the case with its tensors where the kernels want them."""
        args = self.args
        there = [kernels.to(one) for one in (*self[:3], args.bias, args.accumulate_into)]
        args = args._replace(bias=there[3], accumulate_into=there[4])
        return self._replace(product=there[0], row_factor=there[1], col_factor=there[2], args=args)


#: Whole vectors, edges of them, one row and column, and nothing.
SHAPES = ((64, 96), (5, 40), (33, 17), (1, 8), (3, 1), (0, 8), (7, 0))


def _values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return values of all binades, so that factors overflow and sums cancel; and special ones."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    x = x * torch.exp2(torch.randint(-148, 127, shape, generator=generator).double())
    flat = x.view(-1)
    special = (float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 3.3e38, 1e-45)
    for at, value in zip(torch.randperm(len(flat), generator=generator), special, strict=False):
        flat[at] = value
    return x.to(dtype)


def _of_16_bits() -> Iterator[Case]:
    """Every value of BF16 and FP16 as FP32; and back, each, its middles, and what is beside."""
    for dtype in (torch.bfloat16, torch.float16):
        every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
        every = every.view(256, 256)
        zeros = torch.full(every.shape, -0.0)  # -0 + v is v, for v = -0 too
        args = GemmArgs(None, every, torch.float32)
        yield Case(zeros, None, None, args, (0.0, 0.0), f"every {dtype}")
        value = every.float()
        middle = value.view(torch.int32) + (1 << 15 if dtype == torch.bfloat16 else 1 << 12)
        small = (value.double() + 2.0**-25).float()  # FP16's middles below 2^-14
        for what, at in (("value", value), ("middle", middle.view(torch.float32)), ("low", small)):
            for step in (-1, 0, 1):
                near = (at.view(torch.int32) + step).view(torch.float32)
                args = GemmArgs(None, None, dtype)
                yield Case(near, None, None, args, (0.0, 0.0), f"{what} of {dtype}, {step:+}")


def every_case() -> Iterator[Case]:
    """Every shape with every kind of factor, bias and sum, each dtype and view among them.

    And every value of the 16-bit types.
    """
    yield from _of_16_bits()
    steps = product((None, 1, "own"), (None, 1, "own"), cases.DTYPES)
    for i, ((rows, cols), (of_rows, of_cols, dtype)) in enumerate(product(SHAPES, steps)):
        matrix = _values((rows, cols), torch.float32, i)
        if i % 3 == 1:  # rows and columns that were added are cut off
            matrix = _values((rows + 2, cols + 8), torch.float32, i)[:rows, :cols]
        if i % 7 == 2:
            matrix = _values((cols, rows), torch.float32, i).t()
        factors = [
            None if of is None else _values((size if of == "own" else 1,), torch.float32, i + size)
            for of, size in ((of_rows, rows), (of_cols, cols))
        ]
        bias = None if i % 2 else _values((cols,), cases.DTYPES[i // 2 % 3], i + 1)
        if bias is not None and i % 5 == 4:  # one value at several places, and gaps
            bias = _values((2 * cols,), bias.dtype, i)[::2]
        into = None if i // 2 % 2 else _values((rows, cols), cases.DTYPES[i // 4 % 3], i + 2)
        if into is not None and i % 5 == 1:
            into = _values((rows + 1, cols + 1), into.dtype, i)[1:, 1:]
        args = GemmArgs(bias, into, dtype)
        label = f"{rows}x{cols} by {of_rows}, {of_cols} to {dtype}, case {i}"
        ones = [i % 4 < 2 and of == 1 for of in (of_rows, of_cols)]  # an amax of NVFP4
        bounds = (2688.0 if ones[0] else 0.0, 1536.0 if ones[1] else 0.0)
        yield Case(matrix, *factors, args, bounds, label)
