"""Gradients of norms and activations: what follows the GEMM of a fused module's backward.

Operators of their own, since a compiler that generates the sums itself adds in another order, and
the gradients would not be the eager ones bit for bit. Everything inside is FP32; a gradient is
rounded once, to the dtype of what it belongs to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ...errors import must_be_one_of
from ...reference import ACTIVATIONS, NORMS
from ..inputs import can_bypass_dispatcher
from .library import operator

__all__ = ["activation_backward", "norm_backward"]

_aten = torch.ops.aten
#: Slope of quick GELU's sigmoid.
_QUICK = 1.702
#: FP32 values between the steps of an activation's gradient that stay in a CPU's cache.
_CACHED = 1 << 17

#: Gradients of x, gamma and beta; None where not needed.
_Grads = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


def _layer_norm(
    dy: torch.Tensor,
    x: torch.Tensor,
    gamma: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    needs: tuple[bool, bool, bool],
) -> _Grads:
    cols = [x.shape[1]]
    # The last weight is there for its shape alone.
    grads: _Grads = _aten.native_layer_norm_backward(
        dy, x, cols, mean[:, None], rstd[:, None], gamma, gamma, list(needs)
    )
    return grads


def _rms_norm(
    dy: torch.Tensor,
    x: torch.Tensor,
    gamma: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    needs: tuple[bool, bool, bool],
) -> _Grads:
    # y = h * gamma, h = x * r, r = (mean(x^2) + eps)^(-1/2): dx = r * (dh - h * mean(dh * h)).
    h = x * rstd[:, None]
    dx = dgamma = None
    if needs[1]:
        dgamma = (dy * h).sum(0)
    if needs[0]:
        dh = dy * gamma
        dx = (dh - h * (dh * h).mean(1, keepdim=True)) * rstd[:, None]
    return dx, dgamma, dy.sum(0) if needs[2] else None


_NORMS: dict[str, Callable[..., _Grads]] = dict(zip(NORMS, (_layer_norm, _rms_norm), strict=True))


def _norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    gamma: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    kind: str,
    zero_centered: bool,
    *needs: bool,
) -> list[torch.Tensor]:
    _check(dy, x, x.shape[1], kind, _NORMS, "norm_backward")
    scale = gamma.to(torch.float32)
    if zero_centered:
        scale = scale + 1.0
    grads = _NORMS[kind](dy.to(torch.float32), x.to(torch.float32), scale, mean, rstd, needs)
    dtypes = (x.dtype, gamma.dtype, gamma.dtype)
    found = zip(grads, needs, dtypes, strict=True)
    # Not every torch leaves out what was not asked for.
    return [one.to(dtype) for one, needed, dtype in found if needed and one is not None]


def _norm_backward_fake(
    dy: torch.Tensor,
    x: torch.Tensor,
    gamma: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    kind: str,
    zero_centered: bool,
    *needs: bool,
) -> list[torch.Tensor]:
    dx = [x.new_empty(x.shape)] if needs[0] else []
    return dx + [gamma.new_empty(gamma.shape) for needed in needs[1:] if needed]


def _relu(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return _aten.threshold_backward(dy, x, 0.0)


def _srelu(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return dy * (2.0 * torch.relu(x))


def _gelu(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return _aten.gelu_backward(dy, x, approximate="tanh")


def _silu(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return _aten.silu_backward(dy, x)


def _qgelu(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    s = torch.sigmoid(_QUICK * x)
    return dy * (s + (_QUICK * x) * (s * (1.0 - s)))


class _Function(NamedTuple):
    """A function of one value, FP32 to FP32: itself, and the gradient of its argument."""

    value: Callable[[torch.Tensor], torch.Tensor]
    backward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


#: By name. torch's own: a gradient need not have the bits of the forward's exponential.
_FUNCTIONS = {
    "relu": _Function(torch.relu, _relu),
    "srelu": _Function(lambda x: torch.relu(x).square_(), _srelu),
    "gelu": _Function(lambda x: _aten.gelu(x, approximate="tanh"), _gelu),
    "silu": _Function(_aten.silu, _silu),
    "qgelu": _Function(lambda x: x * torch.sigmoid(_QUICK * x), _qgelu),
}


def _activation_backward(dy: torch.Tensor, x: torch.Tensor, kind: str) -> torch.Tensor:
    where = "activation_backward"
    record = ACTIVATIONS.get(kind)
    halves = 2 if record is not None and record.is_gated else 1
    _check(dy, x, x.shape[1] // halves, kind, ACTIVATIONS, where)
    function = _FUNCTIONS[ACTIVATIONS[kind].core]
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    # A GPU has no cache that the rows of a block would stay in.
    at_once = max(1, _CACHED // max(x.shape[1], 1)) if x.is_cpu else max(x.shape[0], 1)
    for row in range(0, x.shape[0], at_once):
        rows = slice(row, row + at_once)
        wide = dy[rows].to(torch.float32)
        if halves == 1:
            dx[rows] = function.backward(wide, x[rows].to(torch.float32))
            continue
        first, second = (half.to(torch.float32) for half in x[rows].tensor_split(2, dim=1))
        d_first, d_second = dx[rows].tensor_split(2, dim=1)
        d_first.copy_(function.backward(wide * second, first))
        d_second.copy_(wide * function.value(first))
    return dx


def _activation_backward_fake(dy: torch.Tensor, x: torch.Tensor, kind: str) -> torch.Tensor:
    return x.new_empty(x.shape)


def _check(dy: torch.Tensor, x: torch.Tensor, cols: int, kind: str, kinds: Any, where: str) -> None:
    if kind not in kinds:
        raise ValueError(f"{where}: kind {must_be_one_of(kinds, kind)}")
    if tuple(dy.shape) != (x.shape[0], cols) or dy.device != x.device:
        raise ValueError(
            f"{where}: dy must be [{x.shape[0]}, {cols}] on {x.device}, got {tuple(dy.shape)} on "
            f"{dy.device}"
        )


operator(
    "norm_backward(Tensor dy, Tensor x, Tensor gamma, Tensor mean, Tensor rstd, str kind, "
    "bool zero_centered, bool needs_x, bool needs_gamma, bool needs_beta) -> Tensor[]",
    _norm_backward,
    _norm_backward_fake,
)
operator(
    "activation_backward(Tensor dy, Tensor x, str kind) -> Tensor",
    _activation_backward,
    _activation_backward_fake,
)


def norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    gamma: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    kind: str,
    zero_centered: bool,
    needs: tuple[bool, bool, bool],
) -> _Grads:
    """Return the gradients of x, gamma and beta of `y = norm(x) * gamma + beta`.

    Past torch's dispatcher where it may be bypassed.

    Args:
        dy: `[rows, cols]`, the gradient of y.
        x: `[rows, cols]`, what was normalized.
        gamma: `[cols]`, the weight, as `norm_encode` took it.
        mean, rstd: FP32, as `norm_encode` returned them.
        kind: `"LayerNorm"` or `"RMSNorm"`.
        zero_centered: the weight is `1 + gamma`.
        needs: which of the three gradients are wanted.

    Returns:
        dx in the dtype of x, dgamma and dbeta in that of gamma; None where not wanted. The sums
        over rows are torch's, whose order depends on the number of threads.

    Raises:
        ValueError: shapes or devices do not fit, or `kind` is unknown.

    Source: the formulas of arXiv:1607.06450 and arXiv:1910.07467, differentiated.

    Example:
        >>> import torch
        >>> from hybridq.kernels.operators.norm_activation_backward import norm_backward
        >>> x, ones = torch.tensor([[3.0, 4.0]]), torch.ones(2)
        >>> rstd = x.square().mean(1).rsqrt()
        >>> given = (ones, torch.empty(0), rstd, "RMSNorm", False)
        >>> dx, dgamma, dbeta = norm_backward(x, x, *given, (True, True, False))
        >>> bool(dx.abs().max() < 1e-6), dbeta  # a longer x gives the same y
        (True, None)
    """
    call: Callable[..., list[torch.Tensor]] = torch.ops.hybridq.norm_backward
    if can_bypass_dispatcher(dy, x, gamma, mean, rstd):
        call = _norm_backward
    made = iter(call(dy, x, gamma, mean, rstd, kind, zero_centered, *needs))
    dx, dgamma, dbeta = (next(made) if needed else None for needed in needs)
    return dx, dgamma, dbeta


def activation_backward(dy: torch.Tensor, x: torch.Tensor, kind: str) -> torch.Tensor:
    """Return the gradient of x of `y = activation(x)`, `[rows, ...]` in the dtype of x.

    Past torch's dispatcher where it may be bypassed.

    Args:
        dy: `[rows, cols]`, the gradient of y.
        x: `[rows, cols]`, or `[rows, 2 * cols]` where `kind` is gated.
        kind: a name in `reference.ACTIVATIONS`.

    Raises:
        ValueError: shapes or devices do not fit, or `kind` is unknown.

    Source: torch's derivatives of ReLU, GELU and SiLU; ours of the others.

    Example:
        >>> import torch
        >>> from hybridq.kernels.operators.norm_activation_backward import activation_backward
        >>> x = torch.tensor([[-1.0, 3.0]])
        >>> activation_backward(torch.ones(1, 2), x, "srelu").tolist()
        [[0.0, 6.0]]
    """
    if can_bypass_dispatcher(dy, x):
        return _activation_backward(dy, x, kind)
    made: torch.Tensor = torch.ops.hybridq.activation_backward(dy, x, kind)
    return made
