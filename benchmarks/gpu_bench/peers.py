"""Other libraries at the same task, those that are installed; none is a dependency.

A peer that raises is left out with its words: its versions differ more than ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import torch

from hybridq.formats import PlaneSpec

from .case import Bench, Case
from .casts import encode_nbytes

__all__ = ["PEERS", "peer_cases"]

PEERS = ("torchao", "transformer_engine", "deep_gemm")


def _torchao(bench: Bench) -> Iterator[Case]:
    """Quantize to MXFP8 along each axis, and to FP8 1x128."""
    rows, cols, dtype = bench.casts[0]
    mxfp8, block = PlaneSpec.parse("mxfp8"), PlaneSpec.parse("fp8_1x128")
    cases = (
        ("mxfp8 row", "torchao.prototype.mx_formats.kernels", "triton_to_mxfp8_dim0", mxfp8, None),
        ("mxfp8 col", "torchao.prototype.mx_formats.kernels", "triton_to_mxfp8_dim1", None, mxfp8),
        (
            "fp8_1x128 row",
            "torchao.prototype.blockwise_fp8_training.kernels",
            "triton_fp8_blockwise_act_quant_lhs",
            block,
            None,
        ),
    )
    for name, module, function, row, col in cases:

        def make(i: int, module: str = module, function: str = function) -> Callable[[], Any]:
            run = getattr(__import__(module, fromlist=[function]), function)
            x = bench.randn(rows, cols, dtype, i)
            return lambda: run(x)

        nbytes = encode_nbytes(row, col, rows, cols, dtype, False)
        yield Case("peer", f"torchao {name}", (rows, cols), make, "copy", nbytes, is_headline=True)


def _transformer_engine(bench: Bench) -> Iterator[Case]:
    """A training step of its Linear; the ratio is to nn.Linear in BF16."""
    import transformer_engine.pytorch as te
    from torch import nn
    from transformer_engine.common import recipe

    tokens, inner, outer = bench.linear

    def step(layer: nn.Module, chosen: Any, i: int) -> Callable[[], Any]:
        x = bench.randn(tokens, inner, torch.bfloat16, i).clone().requires_grad_()
        dy = bench.randn(tokens, outer, torch.bfloat16, i)

        def run() -> torch.Tensor:
            layer.zero_grad(set_to_none=True)
            x.grad = None
            if chosen is None:
                y = layer(x)
            else:
                with te.fp8_autocast(enabled=True, fp8_recipe=chosen):
                    y = layer(x)
            y.backward(dy)
            return y

        return run

    def plain(i: int) -> Callable[[], Any]:
        layer = nn.Linear(inner, outer, False, device=bench.device, dtype=torch.bfloat16)
        return step(layer, None, i)

    touched = 2 * (tokens * inner + inner * outer + 2 * tokens * outer)
    flops = 6 * tokens * inner * outer
    yield Case(
        "peer", "nn.Linear", bench.linear, plain, flops=flops, footprint=touched, is_headline=True
    )
    for name in (
        *("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling"),
        *("MXFP8BlockScaling", "NVFP4BlockScaling"),
    ):
        if not hasattr(recipe, name):
            continue

        def make(i: int, name: str = name) -> Callable[[], Any]:
            layer = te.Linear(inner, outer, bias=False, params_dtype=torch.bfloat16)
            return step(layer, getattr(recipe, name)(), i)

        yield Case(
            "peer",
            f"transformer_engine {name}",
            bench.linear,
            make,
            "nn.Linear",
            flops=flops,
            footprint=touched,
            is_headline=True,
        )


def _deep_gemm(bench: Bench) -> Iterator[Case]:
    """FP8 1x128 by 128x128; the ratio is to BF16 cuBLAS."""
    import deep_gemm

    _, m, n, k = bench.products[-1]
    shape, touched = (m, n, k), 2 * (m * k + n * k + m * n)

    def plain(i: int) -> Callable[[], Any]:
        a, b = (bench.randn(rows, k, torch.bfloat16, i) for rows in (m, n))
        return lambda: torch.mm(a, b.t())

    yield Case(
        "peer", "bf16 randn", shape, plain, flops=2 * m * n * k, footprint=touched, is_headline=True
    )

    def make(i: int) -> Callable[[], Any]:
        from deep_gemm.utils import per_block_cast_to_fp8, per_token_cast_to_fp8

        a = per_token_cast_to_fp8(bench.randn(m, k, torch.bfloat16, i), use_ue8m0=False)
        b = per_block_cast_to_fp8(bench.randn(n, k, torch.bfloat16, i), use_ue8m0=False)
        out = torch.empty(m, n, dtype=torch.bfloat16, device=bench.device)
        return lambda: deep_gemm.fp8_gemm_nt(a, b, out)

    yield Case(
        "peer",
        "deep_gemm fp8 1x128 x 128x128",
        shape,
        make,
        "bf16 randn",
        flops=2 * m * n * k,
        footprint=touched,
        is_headline=True,
    )


_CASES: dict[str, Callable[[Bench], Iterator[Case]]] = {
    "torchao": _torchao,
    "transformer_engine": _transformer_engine,
    "deep_gemm": _deep_gemm,
}


def peer_cases(bench: Bench) -> Iterator[tuple[str, list[Case], str]]:
    """Yield each peer with its cases, or with none and the reason."""
    for name in PEERS:
        if find_spec(name) is None:
            yield name, [], "not installed"
            continue
        try:
            yield name, list(_CASES[name](bench)), ""
        # Its import alone may fail: of its library, its driver or its torch.
        except Exception as error:
            yield name, [], f"does not run here: {type(error).__name__}: {error}"[:300]
