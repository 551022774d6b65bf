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

from ...errors import must_be_one_of
from ...reference import ACTIVATIONS, NORMS
from ..choice import EncodeRequest
from ..inputs import HIGH_PRECISION, can_bypass_dispatcher, check_matrix
from .encode_matrix import check_request, encoded_fake
from .library import encode_operator, operator
from .norm_activation_steps import activation_prologue, map_matrix, norm_prologue, run_fused

__all__ = ["activation_encode", "norm_encode"]

_NORM = "Tensor x, Tensor gamma, Tensor? beta, float eps, str kind, bool zero_centered"


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
        raise ValueError(f"{where}: kind {must_be_one_of(ACTIVATIONS, kind)}")
    cols = x.shape[1]
    if not ACTIVATIONS[kind].is_gated:
        return cols
    if cols % 2 != 0:
        raise ValueError(f"{where}: {kind} takes an even number of columns, got {cols}")
    return cols // 2


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
    request: EncodeRequest,
) -> list[torch.Tensor]:
    _check_norm(x, gamma, beta, eps, kind, "norm_encode")
    check_request("norm_encode", x, request)
    prologue = norm_prologue(gamma, beta, eps, kind, zero_centered)
    return run_fused(x, prologue, x.shape[1], request, "norm_encode")


def _activation_encode(x: torch.Tensor, kind: str, request: EncodeRequest) -> list[torch.Tensor]:
    cols = _check_activation(x, kind, "activation_encode")
    check_request("activation_encode", x, request)
    return run_fused(x, activation_prologue(kind), cols, request, "activation_encode")


def _fake_stats(x: torch.Tensor, kind: str) -> list[torch.Tensor]:
    rows = x.shape[0]
    mean = x.new_empty(rows if kind == "LayerNorm" else 0, dtype=torch.float32)
    return [mean, x.new_empty(rows, dtype=torch.float32)]


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
    request: EncodeRequest,
) -> list[torch.Tensor]:
    _check_norm(x, gamma, beta, eps, kind, "norm_encode")
    specs = check_request("norm_encode", x, request)
    return [*encoded_fake(x, specs, request), *_fake_stats(x, kind)]


def _activation_encode_fake(
    x: torch.Tensor, kind: str, request: EncodeRequest
) -> list[torch.Tensor]:
    cols = _check_activation(x, kind, "activation_encode")
    specs = check_request("activation_encode", x, request)
    return encoded_fake(x, specs, request, cols)


def _refuse(name: str) -> Callable[..., Any]:
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            f"{name}: has no derivative, which belongs to the module's own backward; detach the "
            "input, or use torch's norm or activation and a Quantizer"
        )

    return backward


operator(
    f"norm({_NORM}=False) -> (Tensor, Tensor, Tensor)", _norm, _norm_fake, _refuse("hybridq::norm")
)
operator(
    "activation(Tensor x, str kind) -> Tensor",
    _activation,
    _activation_fake,
    _refuse("hybridq::activation"),
)
for _name, _leading, _run, _fake in (
    ("norm_encode", _NORM, _norm_encode, _norm_encode_fake),
    ("activation_encode", "Tensor x, str kind", _activation_encode, _activation_encode_fake),
):
    encode_operator(_name, _leading, _run, _fake, backward=_refuse(f"hybridq::{_name}"))


def norm_encode(
    x: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor | None,
    eps: float,
    kind: str,
    zero_centered: bool,
    request: EncodeRequest,
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Return the planes' buffers of the normalized x, and each row's mean and rstd.

    The bits are those of `torch.ops.hybridq.norm` followed by `encode`. Past torch's dispatcher
    where it may be bypassed.

    Args:
        x: `[rows, cols]` float32, bfloat16 or float16, any strides.
        gamma: `[cols]` float32, bfloat16 or float16: the weight.
        beta: the same, added at last, or None; None for RMSNorm.
        eps: added to the variance, or to the mean of squares.
        kind: `"LayerNorm"` or `"RMSNorm"`.
        zero_centered: the weight is `1 + gamma`.
        request: what is made of the normalized x.

    Returns:
        The rowwise plane's buffers and then the columnwise plane's; mean, FP32 `[rows]`, or `[0]`
        for RMSNorm; rstd, FP32 `[rows]`.

    Raises:
        ValueError, TypeError: an argument is wrong.
        BackendError: no backend can run it.

    Source: docs/reference/numerics.md, "Norms".

    Example:
        >>> import torch
        >>> from hybridq.kernels.choice import EncodeRequest
        >>> from hybridq.kernels.operators import norm_encode
        >>> x, ones, row = torch.tensor([[3.0, 4.0]]), torch.ones(2), EncodeRequest("mxfp8")
        >>> (codes, scale), mean, rstd = norm_encode(x, ones, None, 0.0, "RMSNorm", False, row)
        >>> codes.tolist(), scale.tolist(), tuple(mean.shape), rstd.tolist()
        ([[118, 121]], [[119]], (0,), [0.2828427255153656])
    """
    own = (x, gamma, beta, eps, kind, zero_centered)
    if can_bypass_dispatcher(x, gamma, beta, *request.tensors()):
        *buffers, mean, rstd = _norm_encode(*own, request)
    else:
        call = torch.ops.hybridq.norm_encode
        *buffers, mean, rstd = call(*own, *request.planes(), **request.options())
    return buffers, mean, rstd


def activation_encode(x: torch.Tensor, kind: str, request: EncodeRequest) -> list[torch.Tensor]:
    """Return the planes' buffers of an activation of x.

    The bits are those of `torch.ops.hybridq.activation` followed by `encode`. Past torch's
    dispatcher where it may be bypassed.

    Args:
        x: `[rows, cols]` float32, bfloat16 or float16, any strides; of a gated activation
            `[rows, 2 * cols]`: the function of the first half times the second half.
        kind: relu, srelu, gelu, silu, qgelu, or gated reglu, sreglu, geglu, swiglu, qgeglu.
        request: what is made of the result.

    Returns:
        The rowwise plane's buffers and then the columnwise plane's.

    Raises:
        ValueError, TypeError: an argument is wrong.
        BackendError: no backend can run it.

    Source: docs/reference/numerics.md, "Activations".

    Example:
        >>> import torch
        >>> from hybridq.kernels.choice import EncodeRequest
        >>> from hybridq.kernels.operators import activation_encode
        >>> x = torch.tensor([[-1.0, 2.0, 3.0, 3.0]])
        >>> codes, scale = activation_encode(x, "reglu", EncodeRequest("mxfp8"))
        >>> codes.tolist(), scale.tolist()
        ([[0, 124]], [[121]])
    """
    if can_bypass_dispatcher(x, *request.tensors()):
        return _activation_encode(x, kind, request)
    return torch.ops.hybridq.activation_encode(x, kind, *request.planes(), **request.options())
