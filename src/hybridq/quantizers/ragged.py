"""`hybridq.quantize_grouped`: tokens sorted by group to what products of experts take."""

from __future__ import annotations

import torch

from ..direction import COLUMNWISE, ROWWISE
from ..errors import SpecError
from ..formats import PlaneSpec
from ..kernels.choice import EncodeRequest
from ..kernels.inputs import check_seed
from ..kernels.ragged import pad_tokens
from ..storage import RaggedTensor, build_ragged
from ..tensor import is_quantized
from .api import Choice, quantizer
from .checks import check_source
from .quantizer import Quantizer, draw_seed
from .statistics import one_statistic

__all__ = ["quantize_grouped"]


def quantize_grouped(
    x: torch.Tensor,
    offsets: torch.Tensor,
    rowwise: Quantizer | Choice | None,
    columnwise: Choice | bool | None = True,
    *,
    columnwise_source: str = "original",
    stochastic: bool = False,
    hadamard: bool = False,
    power_of_two: bool | None = None,
    eps: float | None = None,
    four_over_six: str | None = None,
    row_scaled: bool = False,
    scale_rule: str | None = None,
    seed: torch.Tensor | None = None,
) -> RaggedTensor:
    """Return tokens that are sorted by group, quantized for `hybridq.grouped_gemm`.

    The rowwise plane is that of x. The columnwise plane, which is contracted over the tokens of
    each group, is that of x with each group padded to a multiple of 128 tokens by zeros, so that
    no block lies in two groups; a plain one (`"bf16"`, `"identity"`) is x transposed. Stochastic
    rounding draws for each plane what `encode` draws for x, and for the padded x.

    Args:
        x: `[T, C]` float32, bfloat16 or float16, the tokens of group 0 first, then those of 1, ...
        offsets: int32 `[G]` on x's device, where each group ends; held by the result, and never
            read on the host. Groups may be empty, also all of them; tokens behind the last end
            belong to no group. Values out of range count as the nearest sensible ones.
        rowwise: a Quantizer, which says all but the seed; else as `quantizer` takes it.
        columnwise, columnwise_source: as `quantizer` takes them. `"rowwise_dequantized"`: the
            columnwise plane is made of what the rowwise plane decodes to.
        stochastic, hadamard, power_of_two, eps: the same.
        four_over_six, row_scaled, scale_rule: the same.
        seed: int64 `[1]` for stochastic rounding; None draws one.

    Returns:
        The planes with the offsets, all that `hybridq.grouped_gemm` needs to know.

    Raises:
        SpecError: an unknown name, options that do not go with the format, or arguments beside a
            Quantizer.
        TypeError: x cannot be quantized, or `seed` is no tensor.
        ValueError: x is no matrix, or offsets are not int32 `[G]` on its device.
        RuntimeError: x requires grad, outside `torch.no_grad()`: the result passes none on.
        PlaneError: both usages of the Quantizer are off.

    Example:
        >>> import torch, hybridq
        >>> ends = torch.tensor([2, 2, 5], dtype=torch.int32)  # the second expert has no tokens
        >>> x = hybridq.quantize_grouped(torch.ones(6, 64), ends, "mxfp8", "nvfp4")
        >>> x.rowwise.matrix, x.columnwise.matrix
        ((6, 64), (64, 384))
    """
    if not isinstance(rowwise, Quantizer):
        rowwise = quantizer(
            rowwise,
            columnwise,
            columnwise_source=columnwise_source,
            stochastic=stochastic,
            hadamard=hadamard,
            power_of_two=power_of_two,
            eps=eps,
            four_over_six=four_over_six,
            row_scaled=row_scaled,
            scale_rule=scale_rule,
        )
    elif (
        columnwise is not True
        or columnwise_source != "original"
        or _is_any(stochastic, hadamard, power_of_two, eps, four_over_six, row_scaled, scale_rule)
    ):
        raise SpecError(
            "quantize_grouped: a Quantizer says how planes are made; columnwise and the options "
            f"must be left out, got them beside {rowwise!r}"
        )
    check_source(x, "quantize_grouped")
    if not isinstance(offsets, torch.Tensor):
        raise TypeError(f"quantize_grouped: offsets must be a tensor, got {type(offsets).__name__}")
    if x.dim() != 2:
        raise ValueError(f"quantize_grouped: x must be [T, C], got shape {tuple(x.shape)}")
    if x.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            "quantize_grouped: x requires grad, which planes do not pass on; call under "
            "torch.no_grad(), as in the forward of a torch.autograd.Function, or detach x"
        )
    plain = x.dequantize() if is_quantized(x) else x
    if seed is not None:
        check_seed(seed, plain, "quantize_grouped")
    return _encode(rowwise, plain.detach(), offsets, seed)


def _is_any(*options: object) -> bool:
    return any(option is not None and option is not False for option in options)


def _encode(
    quantizer: Quantizer, x: torch.Tensor, offsets: torch.Tensor, seed: torch.Tensor | None
) -> RaggedTensor:
    row, col = quantizer.specs_to_encode("quantize_grouped")
    if seed is None and quantizer.is_stochastic:
        seed = draw_seed(x.device)
    row_stat = col_stat = None
    if quantizer.amax_group:
        row_stat, col_stat = _group_statistics(quantizer, x, offsets, row, col, seed)
    request = EncodeRequest(
        row_stat=row_stat,
        col_stat=col_stat,
        seed=seed,
        col_source=quantizer.columnwise_source,
        keep_row=quantizer.makes_rowwise,
    )
    return build_ragged(x, offsets, row, col, request)


def _group_statistics(
    quantizer: Quantizer,
    x: torch.Tensor,
    offsets: torch.Tensor,
    row: PlaneSpec | None,
    col: PlaneSpec | None,
    seed: torch.Tensor | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the amax of both planes over all ranks: of all tokens, and of those of a group.

    Each rank may have another number of tokens; only the amaxes are compared.
    """
    group = quantizer.amax_group or ""
    strings = [None if spec is None else spec.plain_text(x.dtype) for spec in (row, col)]
    row_stat = one_statistic(x, strings[0], ROWWISE, group)
    if strings[1] is None or not strings[1].needs_amax:
        return row_stat, None
    if quantizer.columnwise_source != "original" and row is not None:
        buffers = torch.ops.hybridq.encode(x, row.text, "", row_stat, None, seed)
        x = torch.ops.hybridq.decode(buffers, row.text, x.shape[0], x.shape[1], x.dtype)
    return row_stat, one_statistic(pad_tokens(x, offsets), strings[1], COLUMNWISE, group)
