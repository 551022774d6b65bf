"""Norms and activations before encode, for tests: planes, inputs, and what both are compared by."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

import hybridq
import kernel_cases as cases
from hybridq import _core, reference
from hybridq.formats import DEFAULT_SIGNS, PlaneSpec
from hybridq.kernels.choice import EncodeRequest, Prologue
from hybridq.kernels.operators.encode_plan import mapped_run
from oracle.bridge import NAMES, values_of
from oracle.prologue import activation as oracle_activation
from oracle.prologue import norm as oracle_norm
from ragged_cases import PAIRS, same, text

__all__ = [
    "ACTIVATIONS",
    "FUSED",
    "FUSED_OF_OTHERS",
    "KINDS",
    "MAKERS",
    "NORMS",
    "PAIRS",
    "QUANTIZED",
    "SHAPES",
    "TURNED",
    "WAYS",
    "check_map",
    "check_map_encode",
    "fused_cases",
    "is_fused",
    "oracle_y",
    "prologue",
    "same",
    "source",
    "specs_of",
    "text",
    "turn",
    "using",
    "weights",
]

#: The reference backend, and every variant of the compiled core.
WAYS = ("reference", *_core.build_info()["tables"])
#: Inside one tile, over the edges of tiles in both directions, odd, and nothing.
SHAPES = ((130, 600), (33, 77), (1, 1), (3, 4100), (0, 5), (5, 0))


@contextmanager
def using(way: str) -> Iterator[None]:
    """Force a backend, and of the core a variant."""
    if way == "reference":
        with hybridq.backend("reference"):
            yield
        return
    before = _core.variant()
    _core.set_variant(way)
    try:
        with hybridq.backend("cpu"):
            yield
    finally:
        _core.set_variant(before)


def is_fused(row: PlaneSpec | None, col: PlaneSpec | None, dtype: torch.dtype) -> bool:
    """Whether the matrix between norm and encode is not made, under the backend in force."""
    return mapped_run(text(row), text(col), dtype, "cpu") is not None


def weights(cols: int, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A gamma and a beta."""
    generator = torch.Generator().manual_seed(seed)
    gamma = 1 + torch.randn(cols, generator=generator) / 4
    return gamma.to(dtype), torch.randn(cols, generator=generator).to(dtype)


def oracle_y(x: torch.Tensor, kind: str, *norm: object) -> tuple[np.ndarray, ...]:
    """The oracle's y, and of a norm its mean and rstd; `norm`: gamma, beta, eps, zero_centered."""
    if not norm:
        return (oracle_activation(values_of(x), kind, NAMES[x.dtype]),)
    gamma, beta, eps, zero_centered = norm
    beta = None if beta is None else values_of(beta)
    args = (values_of(x), values_of(gamma), beta, eps, kind, NAMES[x.dtype], zero_centered)
    return oracle_norm(*args)


def turn(i: int) -> tuple[torch.dtype, str]:
    """A dtype and a kind of special values, by turns: shapes and pairs meet all of them."""
    return cases.DTYPES[i % 3], cases.SPECIALS[i % 5]


# ---- kernels of GPUs, beside the CPU core

ACTIVATIONS = tuple(reference.ACTIVATIONS)
NORMS = (("LayerNorm", True), ("LayerNorm", False), ("RMSNorm", False))
KINDS = (*NORMS, *((kind, False) for kind in ACTIVATIONS))
QUANTIZED = {
    name: pair
    for name, pair in PAIRS.items()
    if not any(spec is not None and spec.format.is_identity for spec in pair)
}
TURNED = f"nvfp4;rht={DEFAULT_SIGNS:04x}"
#: Pairs that one tile kernel makes of aligned BF16, and in how many launches with their amaxes.
FUSED = {
    ("mxfp8", "mxfp8"): 1,
    ("mxfp8", ""): 1,
    ("fp8_1x128", "fp8_1x128"): 1,
    ("fp8_1x128", ""): 1,
    ("fp8_1x128", "mxfp8"): 1,
    ("fp8_e4m3", "fp8_e4m3"): 2,
    ("fp8_e4m3", ""): 2,
    ("nvfp4", "nvfp4"): 2,
    ("nvfp4", TURNED): 2,
    ("mxfp8", TURNED): 2,
    ("nvfp4", ""): 2,
    ("mxfp8", "nvfp4"): 2,
    ("nvfp4", "mxfp8"): 2,
}
#: Those that one makes of aligned FP16 and FP32 too.
FUSED_OF_OTHERS = {
    pair: FUSED[pair]
    for pair in (
        ("mxfp8", "mxfp8"),
        ("mxfp8", ""),
        ("fp8_e4m3", "fp8_e4m3"),
        ("fp8_e4m3", ""),
        ("nvfp4", TURNED),
        ("nvfp4", ""),
    )
}
#: The kernels that may make planes of a map: none of them writes a matrix.
MAKERS = {"EncodeMapped", "EncodeGeneralMapped", "AmaxGeneralMapped"}


def fused_cases() -> list[tuple[tuple[str, str], torch.dtype]]:
    """Pairs and dtypes that one tile kernel makes."""
    bf16 = [(pair, torch.bfloat16) for pair in FUSED]
    others = (torch.float16, torch.float32)
    return bf16 + [(pair, dtype) for pair in FUSED_OF_OTHERS for dtype in others]


def prologue(kind: str, has_beta: bool, cols: int) -> Prologue:
    if kind in ACTIVATIONS:
        record = reference.ACTIVATIONS[kind]
        return Prologue(kind, record.core, record.is_gated)
    gamma, beta = weights(cols, torch.float32, cols)
    return Prologue(kind, kind, False, gamma, beta if has_beta else None, 1e-5)


def source(kind: str, rows: int, cols: int, dtype: torch.dtype, seed: int, special: str):
    """A matrix whose result has `cols` columns."""
    is_gated = kind in ACTIVATIONS and reference.ACTIVATIONS[kind].is_gated
    return cases.matrix(rows, 2 * cols if is_gated else cols, dtype, seed, special)


def specs_of(pair: tuple[str, str]) -> list[PlaneSpec | None]:
    return [PlaneSpec.parse(text) if text else None for text in pair]


def check_map(kernels: cases.Kernels, x: torch.Tensor, made: Prologue, what: str) -> None:
    """Values and statistics here and on the CPU."""
    got = kernels.ops["map"](kernels.to(x), on(kernels, made))
    same([one.cpu() for one in got], list(cases.cpu_ops()["map"](x, made)), what)


def check_map_encode(
    kernels: cases.Kernels,
    x: torch.Tensor,
    made: Prologue,
    row: PlaneSpec | None,
    col: PlaneSpec | None,
    what: str,
    **stats: torch.Tensor,
) -> None:
    """Planes and statistics here and on the CPU."""
    seed = torch.tensor([77])
    want, *want_stats = cases.cpu_ops()["map_encode"](
        x, made, EncodeRequest(seed=seed, **stats), row=row, col=col
    )
    there = {name: kernels.to(stat) for name, stat in stats.items()}
    args = EncodeRequest(seed=kernels.to(seed), **there)
    got, *got_stats = kernels.ops["map_encode"](
        kernels.to(x), on(kernels, made), args, row=row, col=col
    )
    same([one.cpu() for one in (*got, *got_stats)], [*want, *want_stats], what)


def on(kernels: cases.Kernels, made: Prologue) -> Prologue:
    """The same where the kernels' tensors live."""
    return made._replace(gamma=kernels.to(made.gamma), beta=kernels.to(made.beta))
