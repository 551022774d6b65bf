"""LayerNorm and RMSNorm with Transformer Engine's arguments; they stay in high precision."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from ...kernels.inputs import has_autocast
from .constructor_arguments import check_count, checked
from .linear_part import one_dtype
from .marks import mark_again
from .parallel_options import mark_own_tokens
from .written_options import Check, WrittenOptions, finite_eps, settled, switch

__all__ = ["LayerNorm", "RMSNorm"]


def _result_dtype(x: torch.Tensor) -> torch.dtype:
    """Return the dtype of a norm's result: autocast's where it is on, as of the linear modules."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if has_autocast(kind) else x.dtype


class _Norm(WrittenOptions):
    """What both have: the weight, its sizes, and the dtype of the arithmetic."""

    weight: nn.Parameter
    bias: nn.Parameter
    _written_options: ClassVar[Mapping[str, Check]] = {
        "eps": finite_eps,
        "zero_centered_gamma": switch,
        "sequence_parallel": settled,
    }

    @checked
    def __init__(
        self,
        normalized_shape: int | Iterable[int] | None,
        hidden_size: int | Iterable[int] | None,
        eps: float,
        zero_centered_gamma: bool,
        sequence_parallel: bool,
        device: Any,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        owner = type(self).__name__
        if (normalized_shape is None) == (hidden_size is None):
            raise TypeError(
                f"{owner}: one of normalized_shape and hidden_size must be given, got "
                f"{'none' if hidden_size is None else 'both'}"
            )
        shape = hidden_size if normalized_shape is None else normalized_shape
        several = isinstance(shape, Iterable) and not isinstance(shape, str)
        given: tuple[Any, ...] = tuple(shape) if several else (shape,)  # type: ignore[arg-type]
        for size in given:
            check_count(owner, "normalized_shape", size)
        self.normalized_shape = tuple(int(size) for size in given)
        if not self.normalized_shape or min(self.normalized_shape) < 1:
            raise ValueError(
                f"{owner}: normalized_shape must be one or more positive sizes, got {shape}"
            )
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        self.sequence_parallel = bool(sequence_parallel)
        self._add("weight", device, dtype)

    def _add(self, name: str, device: Any, dtype: torch.dtype | None) -> None:
        made = nn.Parameter(torch.empty(self.normalized_shape, device=device, dtype=dtype))
        self.register_parameter(name, made)
        if self.sequence_parallel:
            mark_own_tokens(self, name)

    def reset_parameters(self) -> None:
        """Set the weights to their initial values: those of the identity."""
        mark_again(self)
        nn.init.constant_(self.weight, 0.0 if self.zero_centered_gamma else 1.0)

    def _operands(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x and the factors in the dtype of the arithmetic, which torch's norms share."""
        own = self.normalized_shape
        if x.shape[-len(own) :] != own:
            raise RuntimeError(
                f"{type(self).__name__}: the last dimensions of the input must be {own}, got shape "
                f"{tuple(x.shape)}"
            )
        gamma: torch.Tensor = self.weight
        if self.zero_centered_gamma:  # 1 + gamma in a short dtype would lose most of gamma
            gamma = gamma.to(torch.promote_types(gamma.dtype, torch.float32)) + 1
        dtype = torch.promote_types(x.dtype, gamma.dtype)
        return x.to(dtype), gamma.to(dtype)

    def extra_repr(self) -> str:
        """Return the sizes and what differs from the defaults, for `repr`."""
        own = ", zero_centered_gamma=True" if self.zero_centered_gamma else ""
        return f"{self.normalized_shape}, eps={self.eps}{own}"


class LayerNorm(_Norm):
    """`y = (x - mean) / sqrt(var + eps) * weight + bias` of the last dimensions, by torch's norm.

    No recipe quantizes it. In front of a linear module `LayerNormLinear` makes both in one step.

    Args:
        normalized_shape: the last dimensions of the input, or their number of features.
        eps: added to the variance.
        sequence_parallel: each rank has a part of the tokens: parameters are marked with
            `sequence_parallel = True`, and their gradients are the trainer's to sum over ranks.
        params_dtype: another name of `dtype`.
        zero_centered_gamma: the factor is `1 + weight`, in FP32, and the weight begins as zeros.
        hidden_size: another name of `normalized_shape`, which Megatron-Core's norms use.
        device, dtype: of the parameters; None: torch's defaults.

    Raises:
        TypeError: a size is no int, or none or two are given; a switch no bool, `eps` no number.
        ValueError: a size is not positive, `eps` is negative or not finite, or `dtype` and
            `params_dtype` differ.

    Source: names and meanings of the arguments: Transformer Engine's LayerNorm.

    Example:
        >>> import torch, hybridq
        >>> norm = hybridq.nn.LayerNorm(64, zero_centered_gamma=True)
        >>> x = torch.randn(3, 64)
        >>> torch.allclose(norm(x), torch.nn.functional.layer_norm(x, (64,)))
        True
    """

    @checked
    def __init__(
        self,
        normalized_shape: int | Iterable[int] | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | Iterable[int] | None = None,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        own = one_dtype(type(self).__name__, dtype, params_dtype)
        options = (zero_centered_gamma, sequence_parallel, device, own)
        super().__init__(normalized_shape, hidden_size, eps, *options)
        self._add("bias", device, own)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weights to their initial values: those of the identity."""
        super().reset_parameters()
        nn.init.zeros_(self.bias)

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        """Return the norm of `inp` `[..., *normalized_shape]`, rounded once.

        It has its dtype, or that of torch.autocast, where that is on.

        Args:
            inp: any floating dtype; parameters of a longer one make the arithmetic as long.

        Raises:
            RuntimeError: its last dimensions are others.
        """
        x, gamma = self._operands(inp)
        beta = self.bias.to(gamma.dtype)
        return F.layer_norm(x, self.normalized_shape, gamma, beta, self.eps).to(_result_dtype(inp))


class RMSNorm(_Norm):
    """`y = x / sqrt(mean(x^2) + eps) * weight` of the last dimensions, by torch's norm.

    No recipe quantizes it. In front of a linear module `RMSNormLinear` makes both in one step.

    Args:
        normalized_shape, sequence_parallel, params_dtype, hidden_size, device, dtype: as for
            `LayerNorm`.
        eps: added to the mean of squares.
        zero_centered_gamma: the factor is `1 + weight`, in FP32, and the weight begins as zeros.

    Raises:
        ValueError: as of `LayerNorm`.

    Source: names and meanings of the arguments: Transformer Engine's RMSNorm.

    Example:
        >>> import torch, hybridq
        >>> norm = hybridq.nn.RMSNorm(64, dtype=torch.bfloat16)
        >>> norm(torch.randn(3, 64, dtype=torch.bfloat16)).dtype
        torch.bfloat16
    """

    @checked
    def __init__(
        self,
        normalized_shape: int | Iterable[int] | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | Iterable[int] | None = None,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        own = one_dtype(type(self).__name__, dtype, params_dtype)
        options = (zero_centered_gamma, sequence_parallel, device, own)
        super().__init__(normalized_shape, hidden_size, eps, *options)
        self.reset_parameters()

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        """Return the norm of `inp` `[..., *normalized_shape]`, rounded once.

        It has its dtype, or that of torch.autocast, where that is on.

        Args:
            inp: any floating dtype; parameters of a longer one make the arithmetic as long.

        Raises:
            RuntimeError: its last dimensions are others.
        """
        x, gamma = self._operands(inp)
        return F.rms_norm(x, self.normalized_shape, gamma, self.eps).to(_result_dtype(inp))
