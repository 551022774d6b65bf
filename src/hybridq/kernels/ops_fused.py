"""Norm + encode and activation + encode, one operator each; and the norm or activation alone.

`norm_encode` gives the bits of `encode` of what `norm` returns, `activation_encode` those of
`encode` of what `activation` returns. Where a backend has a kernel for it, tiles of the matrix
between the two are made as they are encoded, in cache or in registers. Elsewhere, and for a plane
that is that matrix itself, it is made first. Derivatives belong to the modules that call these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..reference import ACTIVATIONS, NORMS
from .checks import HIGH_PRECISION, check_encode, check_matrix, check_place, spec_of
from .fused import Rest, activation_prologue, map_matrix, norm_prologue, run_fused
from .ops import LIBRARY
from .watch import nothing_watches

__all__ = ["activation_encode", "norm_encode"]

_PLANES = (
    "str row, str col, Tensor? row_stat=None, Tensor? col_stat=None, Tensor? seed=None, *, "
    "str col_source='original', bool keep_row=True, int row_stream=0, int col_stream=1"
)
_NORM = "Tensor x, Tensor gamma, Tensor? beta, float eps, str kind, bool zero_centered"
for _schema in (
    f"norm({_NORM}=False) -> (Tensor, Tensor, Tensor)",
    "activation(Tensor x, str kind) -> Tensor",
    f"norm_encode({_NORM}, {_PLANES}) -> Tensor[]",
    f"activation_encode(Tensor x, str kind, {_PLANES}) -> Tensor[]",
):
    LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


def _check_norm(
    x: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor | None,
    eps: float,
    kind: str,
    where: str,
) -> None:
    check_matrix(x, where)
    if kind not in NORMS:
        raise ValueError(f"{where}: kind must be {' or '.join(NORMS)}, got {kind!r}")
    if not 0.0 <= eps < float("inf"):
        raise ValueError(f"{where}: eps must be finite and at least 0, got {eps}")
    if beta is not None and kind == "RMSNorm":
        raise ValueError(f"{where}: RMSNorm takes no beta, got one of {tuple(beta.shape)}")
    for name, weight in (("gamma", gamma), ("beta", beta)):
        if weight is None:
            continue
        if weight.dtype not in HIGH_PRECISION or tuple(weight.shape) != (x.shape[1],):
            raise ValueError(
                f"{where}: {name} must be float32, bfloat16 or float16 [{x.shape[1]}], got "
                f"{weight.dtype} {tuple(weight.shape)}"
            )
        if weight.device != x.device:
            raise ValueError(
                f"{where}: x and {name} must be on one device, got {x.device} and {weight.device}"
            )


def _check_activation(x: torch.Tensor, kind: str, where: str) -> int:
    """Return how many columns the result has."""
    check_matrix(x, where)
    if kind not in ACTIVATIONS:
        raise ValueError(f"{where}: kind must be one of {', '.join(ACTIVATIONS)}, got {kind!r}")
    cols = x.shape[1]
    if not ACTIVATIONS[kind].is_gated:
        return cols
    if cols % 2 != 0:
        raise ValueError(f"{where}: {kind} takes an even number of columns, got {cols}")
    return cols // 2


def _rest(
    x: torch.Tensor,
    row: str,
    col: str,
    row_stat: torch.Tensor | None,
    col_stat: torch.Tensor | None,
    seed: torch.Tensor | None,
    col_source: str,
    keep_row: bool,
    streams: tuple[int, int],
    where: str,
) -> Rest:
    """Return what an operator was given beside its matrix and texts; raise unless it is right."""
    specs = spec_of(row, x.dtype), spec_of(col, x.dtype)
    check_encode(x, specs, (row_stat, col_stat), seed, col_source, where)
    check_place(where, 0, 0, *streams)
    return row_stat, col_stat, seed, col_source == "rowwise_dequantized", keep_row, streams


def _norm(
    x: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor | None,
    eps: float,
    kind: str,
    zero_centered: bool = False,
) -> tuple[torch.Tensor, ...]:
    _check_norm(x, gamma, beta, eps, kind, "norm")
    return map_matrix(x, norm_prologue(gamma, beta, eps, kind, zero_centered))


def _activation(x: torch.Tensor, kind: str) -> torch.Tensor:
    _check_activation(x, kind, "activation")
    return map_matrix(x, activation_prologue(kind))[0]


def _norm_encode(
    x: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor | None,
    eps: float,
    kind: str,
    zero_centered: bool,
    row: str,
    col: str,
    row_stat: torch.Tensor | None = None,
    col_stat: torch.Tensor | None = None,
    seed: torch.Tensor | None = None,
    *,
    col_source: str = "original",
    keep_row: bool = True,
    row_stream: int = 0,
    col_stream: int = 1,
) -> list[torch.Tensor]:
    where, streams = "norm_encode", (row_stream, col_stream)
    _check_norm(x, gamma, beta, eps, kind, where)
    rest = _rest(x, row, col, row_stat, col_stat, seed, col_source, keep_row, streams, where)
    prologue = norm_prologue(gamma, beta, eps, kind, zero_centered)
    return run_fused(x, prologue, x.shape[1], row, col, rest, where)


def _activation_encode(
    x: torch.Tensor,
    kind: str,
    row: str,
    col: str,
    row_stat: torch.Tensor | None = None,
    col_stat: torch.Tensor | None = None,
    seed: torch.Tensor | None = None,
    *,
    col_source: str = "original",
    keep_row: bool = True,
    row_stream: int = 0,
    col_stream: int = 1,
) -> list[torch.Tensor]:
    where, streams = "activation_encode", (row_stream, col_stream)
    cols = _check_activation(x, kind, where)
    rest = _rest(x, row, col, row_stat, col_stat, seed, col_source, keep_row, streams, where)
    return run_fused(x, activation_prologue(kind), cols, row, col, rest, where)


def _fake_stats(x: torch.Tensor, kind: str) -> list[torch.Tensor]:
    rows = x.shape[0]
    mean = x.new_empty(rows if kind == "LayerNorm" else 0, dtype=torch.float32)
    return [mean, x.new_empty(rows, dtype=torch.float32)]


def _fake_planes(
    x: torch.Tensor, cols: int, row: str, col: str, keep_row: bool
) -> list[torch.Tensor]:
    row_spec, col_spec = spec_of(row, x.dtype), spec_of(col, x.dtype)
    specs = list(row_spec.buffers(x.shape[0], cols)) if row_spec is not None and keep_row else []
    if col_spec is not None:
        specs += col_spec.buffers(cols, x.shape[0])
    return [x.new_empty(spec.shape, dtype=spec.dtype or x.dtype) for spec in specs]


def _norm_fake(
    x: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor | None,
    eps: float,
    kind: str,
    zero_centered: bool = False,
) -> tuple[torch.Tensor, ...]:
    _check_norm(x, gamma, beta, eps, kind, "norm")
    return (x.new_empty(x.shape), *_fake_stats(x, kind))


def _activation_fake(x: torch.Tensor, kind: str) -> torch.Tensor:
    return x.new_empty((x.shape[0], _check_activation(x, kind, "activation")))


def _norm_encode_fake(
    x: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor | None,
    eps: float,
    kind: str,
    zero_centered: bool,
    row: str,
    col: str,
    row_stat: torch.Tensor | None = None,
    col_stat: torch.Tensor | None = None,
    seed: torch.Tensor | None = None,
    *,
    col_source: str = "original",
    keep_row: bool = True,
    row_stream: int = 0,
    col_stream: int = 1,
) -> list[torch.Tensor]:
    _check_norm(x, gamma, beta, eps, kind, "norm_encode")
    streams = (row_stream, col_stream)
    _rest(x, row, col, row_stat, col_stat, seed, col_source, keep_row, streams, "norm_encode")
    return [*_fake_planes(x, x.shape[1], row, col, keep_row), *_fake_stats(x, kind)]


def _activation_encode_fake(
    x: torch.Tensor,
    kind: str,
    row: str,
    col: str,
    row_stat: torch.Tensor | None = None,
    col_stat: torch.Tensor | None = None,
    seed: torch.Tensor | None = None,
    *,
    col_source: str = "original",
    keep_row: bool = True,
    row_stream: int = 0,
    col_stream: int = 1,
) -> list[torch.Tensor]:
    where, streams = "activation_encode", (row_stream, col_stream)
    cols = _check_activation(x, kind, where)
    _rest(x, row, col, row_stat, col_stat, seed, col_source, keep_row, streams, where)
    return _fake_planes(x, cols, row, col, keep_row)


def _refuse(name: str) -> Callable[..., Any]:
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            f"{name}: has no derivative, which belongs to the module's own backward; detach the "
            "input, or use torch's norm or activation and a Quantizer"
        )

    return backward


for _name, _implementation, _fake in (
    ("norm", _norm, _norm_fake),
    ("activation", _activation, _activation_fake),
    ("norm_encode", _norm_encode, _norm_encode_fake),
    ("activation_encode", _activation_encode, _activation_encode_fake),
):
    LIBRARY.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"hybridq::{_name}", _fake, lib=LIBRARY)
    torch.library.register_autograd(f"hybridq::{_name}", _refuse(f"hybridq::{_name}"), lib=LIBRARY)


def norm_encode(
    x: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor | None,
    eps: float,
    kind: str,
    zero_centered: bool,
    row_text: str,
    col_text: str,
    row_stat: torch.Tensor | None,
    col_stat: torch.Tensor | None,
    seed: torch.Tensor | None,
    from_row: bool = False,
    keeps_row: bool = True,
    row_stream: int = 0,
    col_stream: int = 1,
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Return the planes' buffers of the normalized x, and each row's mean and rstd.

    The bits are those of `torch.ops.hybridq.norm` followed by `encode`. Past torch's dispatcher
    where nothing watches.

    Args:
        x: `[rows, cols]` float32, bfloat16 or float16, any strides.
        gamma: `[cols]` float32, bfloat16 or float16: the weight.
        beta: the same, added at last, or None; None for RMSNorm.
        eps: added to the variance, or to the mean of squares.
        kind: `"LayerNorm"` or `"RMSNorm"`.
        zero_centered: the weight is `1 + gamma`.
        row_text, col_text: canonical texts of the planes; empty for no plane.
        row_stat, col_stat: FP32 amax from outside, or None: that of the normalized x.
        seed: int64 `[1]` where a plane is rounded stochastically.
        from_row: the columnwise plane is made of what the rowwise one decodes to.
        keeps_row: whether the rowwise plane is returned.
        row_stream, col_stream: random streams of the planes.

    Returns:
        The rowwise plane's buffers and then the columnwise plane's; mean, FP32 `[rows]`, or `[0]`
        for RMSNorm; rstd, FP32 `[rows]`.

    Raises:
        ValueError, TypeError: an argument is wrong.
        BackendError: no backend can run it.

    Source: docs/numerics.md, "Norms".

    Example:
        >>> import torch
        >>> from hybridq.kernels.ops_fused import norm_encode
        >>> x, ones = torch.tensor([[3.0, 4.0]]), torch.ones(2)
        >>> row = ("mxfp8", "", None, None, None)
        >>> (codes, scale), mean, rstd = norm_encode(x, ones, None, 0.0, "RMSNorm", False, *row)
        >>> codes.tolist(), scale.tolist(), tuple(mean.shape), rstd.tolist()
        ([[118, 121]], [[119]], (0,), [0.2828427255153656])
    """
    source = "rowwise_dequantized" if from_row else "original"
    call: Callable[..., list[torch.Tensor]] = torch.ops.hybridq.norm_encode
    if nothing_watches(x, gamma, beta, row_stat, col_stat, seed):
        call = _norm_encode
    *buffers, mean, rstd = call(
        x,
        gamma,
        beta,
        eps,
        kind,
        zero_centered,
        row_text,
        col_text,
        row_stat,
        col_stat,
        seed,
        col_source=source,
        keep_row=keeps_row,
        row_stream=row_stream,
        col_stream=col_stream,
    )
    return buffers, mean, rstd


def activation_encode(
    x: torch.Tensor,
    kind: str,
    row_text: str,
    col_text: str,
    row_stat: torch.Tensor | None,
    col_stat: torch.Tensor | None,
    seed: torch.Tensor | None,
    from_row: bool = False,
    keeps_row: bool = True,
    row_stream: int = 0,
    col_stream: int = 1,
) -> list[torch.Tensor]:
    """Return the planes' buffers of an activation of x.

    The bits are those of `torch.ops.hybridq.activation` followed by `encode`. Past torch's
    dispatcher where nothing watches.

    Args:
        x: `[rows, cols]` float32, bfloat16 or float16, any strides; of a gated activation
            `[rows, 2 * cols]`: the function of the first half times the second half.
        kind: relu, srelu, gelu, silu, qgelu, or gated reglu, sreglu, geglu, swiglu, qgeglu.
        row_text, col_text, row_stat, col_stat, seed, from_row, keeps_row, row_stream, col_stream:
            as `norm_encode` takes them.

    Returns:
        The rowwise plane's buffers and then the columnwise plane's.

    Raises:
        ValueError, TypeError: an argument is wrong.
        BackendError: no backend can run it.

    Source: docs/numerics.md, "Activations".

    Example:
        >>> import torch
        >>> from hybridq.kernels.ops_fused import activation_encode
        >>> x = torch.tensor([[-1.0, 2.0, 3.0, 3.0]])
        >>> codes, scale = activation_encode(x, "reglu", "mxfp8", "", None, None, None)
        >>> codes.tolist(), scale.tolist()
        ([[0, 124]], [[121]])
    """
    source = "rowwise_dequantized" if from_row else "original"
    call: Callable[..., list[torch.Tensor]] = torch.ops.hybridq.activation_encode
    if nothing_watches(x, row_stat, col_stat, seed):
        call = _activation_encode
    return call(
        x,
        kind,
        row_text,
        col_text,
        row_stat,
        col_stat,
        seed,
        col_source=source,
        keep_row=keeps_row,
        row_stream=row_stream,
        col_stream=col_stream,
    )
