"""An FP64 model of a quantized linear layer, and recorders of what really ran.

The model asks a recipe for its quantizers, encodes each plane by itself, and multiplies the
decoded planes in FP64. It shares with the module under test only the encode operation, which has
oracles of its own; the choice of planes, the bookkeeping and the three products are written here
a second time.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hybridq.formats import PlaneSpec
from hybridq.recipes import QuantizerRole, get

STREAMS = {"grad_output": (0, 1), "input": (2, 3), "weight": (4, 5)}
#: Unit roundoff of each output dtype.
ROUNDOFF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def draw_like_a_module(device: str = "cpu") -> torch.Tensor:
    """Return the seed that a module draws next, and draw it."""
    return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device)


def _encode(x: torch.Tensor, spec: PlaneSpec, seed: torch.Tensor, stream: int) -> torch.Tensor:
    """Return the FP64 values of the rowwise plane of x, in the transformed domain if it has one."""
    buffers = torch.ops.hybridq.encode(x, str(spec), "", seed=seed, row_stream=stream)
    # Without its signs the same buffers decode to what the transform made: the product of two
    # planes with the same signs is that of these, with no rounding of an inverse transform.
    plain = spec if spec.format.is_identity else replace(spec, signs=None)
    values = torch.ops.hybridq.decode(
        buffers, str(plain), x.shape[0], spec.padded(x.shape[1]), torch.float32
    )
    return values.double()


def planes(x, quantizer, slot: str, seed) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the FP64 values of both planes of x, the columnwise one as that of x transposed."""
    row_stream, col_stream = STREAMS[slot]
    row = _encode(x, quantizer.rowwise, seed, row_stream)
    seen = x
    if quantizer.columnwise_source == "rowwise_dequantized":
        if quantizer.rowwise.signs is not None:
            raise NotImplementedError("planes: a transformed source")
        buffers = torch.ops.hybridq.encode(
            x, str(quantizer.rowwise), "", seed=seed, row_stream=row_stream
        )
        seen = torch.ops.hybridq.decode(buffers, str(quantizer.rowwise), *x.shape, x.dtype)
    col = _encode(seen.t().contiguous(), quantizer.columnwise, seed, col_stream)
    return row, col


@dataclass
class Product:
    """`value = a @ b.T` in FP64 and `bound`, what a rounded GEMM may differ from it by."""

    value: torch.Tensor
    bound: torch.Tensor


def product(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, bias=None) -> Product:
    """Return the product of FP64 operands and its bound for an output of `dtype`.

    Accumulation: K * 2^-24 * sum |a||b| (docs/reference/numerics.md). To it come the roundings in
    FP32 of each operand's second-level factor (two), of their use on the result (two), and of the
    bias (one): five more units of 2^-24. Then one rounding to `dtype`.
    """
    value, size = a @ b.t(), a.abs() @ b.abs().t()
    if bias is not None:
        value, size = value + bias.double(), size + bias.double().abs()
    bound = (a.shape[1] + 5) * 2.0**-24 * size
    return Product(value, bound + ROUNDOFF[dtype] * (value.abs() + bound) + 1e-30)


def quantized_linear(x, w, bias, dy, recipe, seed) -> dict[str, Product]:
    """Return y, dx, dw of `y = x @ w.T + bias` under `recipe`, in FP64 with bounds."""
    made = {
        slot: planes(tensor, get(recipe).quantizer(QuantizerRole("linear", slot)), slot, seed)
        for slot, tensor in (("input", x), ("weight", w), ("grad_output", dy))
    }
    (x_row, x_col), (w_row, w_col) = made["input"], made["weight"]
    dy_row, dy_col = made["grad_output"]
    return {
        "y": product(x_row, w_row, x.dtype, bias),
        "dx": product(dy_row, w_col, x.dtype),
        "dw": product(dy_col, x_col, x.dtype),
    }


class Recorder(TorchDispatchMode):
    """Records the (row spec, col spec) of every encode, in order, and the names of all ops."""

    def __init__(self) -> None:
        super().__init__()
        self.encodes: list[tuple[str, str]] = []
        self.ops: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(func.name())
        if func.name() == "hybridq::encode":
            self.encodes.append((args[1], args[2]))
        return func(*args, **(kwargs or {}))


@contextmanager
def saved_tensors():
    """Collect the tensors that autograd saves inside the block."""
    found: list[torch.Tensor] = []

    def pack(tensor):
        found.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found


def run(module, x, dy, **context):
    """Return [y, dx, *parameter gradients] of one forward and backward; `context`: autocast's."""
    from hybridq.recipes import autocast

    module.zero_grad()
    x = x.detach().clone().requires_grad_()
    with autocast(**context):
        y = module(x)
    y.backward(dy)
    return [y.detach(), x.grad, *(p.grad.clone() for p in module.parameters())]


def equal(a, b) -> bool:
    """Whether two lists of tensors are equal bit for bit."""
    return len(a) == len(b) and all(torch.equal(p, q) for p, q in zip(a, b, strict=True))
