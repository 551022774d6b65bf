"""Moments of an optimizer between steps: in FP32, BF16, FP16 with scales, or FP8 blocks.

A step computes in FP32. What is kept is rounded stochastically, since a moment moves by less than
half a step of a short format from one optimizer step to the next, and would stand still otherwise.

FP8 blocks are E4M3 codes, each 128 of a row with a scale of their own. The second moment is kept as
its square root, which halves its range in exponents, and what is not zero never becomes zero: a
second moment of zero beside a first one that is not would be an update without bound. FP16 has one
power of two for each row, which brings its largest value below 2^15; the rest is the same.

Source: ours. T. Dettmers et al., 8-bit Optimizers via Block-wise Quantization (2022): blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final

import torch

from ..formats import PlaneSpec
from ..quantizers import draw_seed
from ..tensor import matrix_shape
from .masters import is_updated_itself, local, place, sharded_like, store

__all__ = ["KINDS", "MOMENTS", "held_as", "kinds_of", "moment_nbytes", "read", "take", "write"]

KINDS: Final = ("fp32", "bf16", "fp16", "fp8_block")
#: Those with scales, which lie in rows.
_SCALED: Final = ("fp16", "fp8_block")
#: Keys of a state; with scales `_codes` (uint8, or FP16) and `_scale` (FP32) stand behind them.
MOMENTS: Final = ("exp_avg", "exp_avg_sq")
_ROOTS: Final = ("exp_avg_sq",)


@lru_cache(maxsize=1)
def _spec() -> str:
    return replace(PlaneSpec.parse("fp8_1x128"), stochastic=True).text


def kinds_of(given: Any) -> tuple[str, ...]:
    """Return how each of both moments is held.

    Args:
        given: one word of `KINDS` for both, or a pair.
    """
    return (given, given) if isinstance(given, str) else tuple(given)


def held_as(parameter: Any, kind: str) -> str:
    """Return how the moments of a parameter are held, if the optimizer is asked for `kind`.

    Scales lie in rows: a parameter with one dimension, or whose rows are cut by its placement, has
    FP32 moments, and one in FP64 its own dtype.

    Args:
        parameter: plain or quantized, sharded or not.
        kind: of `KINDS`.
    """
    own = local(parameter)
    if kind == "fp32" or (is_updated_itself(own) and own.dtype != torch.float32):
        return "fp32"
    if kind in _SCALED:
        cuts = [getattr(one, "dim", None) for one in getattr(parameter, "placements", ())]
        last = parameter.dim() - 1
        if last < 1 or any(cut is not None and cut % (last + 1) == last for cut in cuts):
            return "fp32"
    return kind


def moment_nbytes(kind: str, shape: Sequence[int], numel: int) -> int:
    """Return the bytes of one moment of whole rows of a parameter.

    Args:
        kind: of `KINDS`.
        shape: of the parameter.
        numel: values of those rows.
    """
    if kind == "bf16":
        return 2 * numel
    if kind == "fp32" or len(shape) < 2:
        return 4 * numel
    cols = shape[-1]
    if kind == "fp16":
        return 2 * numel + 4 * (numel // max(cols, 1))
    return numel + 4 * (numel // max(cols, 1)) * -(-cols // 128)


def read(state: dict[str, Any], name: str, parameter: Any) -> torch.Tensor:
    """Return a moment, this rank's part, in FP32: the state's own tensor if it has that dtype.

    Args:
        state: of the parameter.
        name: of `MOMENTS`.
        parameter: that it belongs to.
    """
    if name in state:
        held: torch.Tensor = local(state[name])
        return held.float() if held.dtype in (torch.bfloat16, torch.float16) else held
    codes, scale = (local(state[f"{name}_{part}"]) for part in ("codes", "scale"))
    if codes.dtype == torch.float16:
        values = codes.float() * scale
        return values.square_() if name in _ROOTS else values
    rows, cols = matrix_shape(codes.shape)
    planes = [codes.reshape(rows, cols), scale.reshape(rows, scale.shape[-1])]
    values = torch.ops.hybridq.decode(planes, _spec(), rows, cols, torch.float32)
    values = values.reshape(codes.shape)
    return values.square_() if name in _ROOTS else values


def write(
    state: dict[str, Any], name: str, values: torch.Tensor, parameter: Any, kind: str
) -> None:
    """Hold FP32 `values` as a moment.

    Args:
        state: of the parameter.
        name: of `MOMENTS`.
        values: this rank's part.
        parameter: that it belongs to.
        kind: what `held_as` returned.
    """
    if kind == "fp32":
        if name not in state:
            state[name] = sharded_like(values, parameter)
        elif local(state[name]) is not values:
            local(state[name]).copy_(values)
    elif kind == "bf16":
        if name not in state:
            made = torch.empty_like(values, dtype=torch.bfloat16)
            state[name] = sharded_like(made, parameter)
        store(values, local(state[name]), parameter)
    else:
        encode = _halves if kind == "fp16" else _encoded
        codes, scale = encode(values, name, parameter)
        for part, made in (("codes", codes), ("scale", scale)):
            key = f"{name}_{part}"
            if key in state:
                local(state[key]).copy_(made)
            else:
                state[key] = sharded_like(made, parameter, scale.shape[-1] if made is scale else 0)


def _encoded(values: torch.Tensor, name: str, parameter: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes, of the shape of `values`, and scales, a last dimension of blocks."""
    rows, cols = matrix_shape(values.shape)
    matrix = values.reshape(rows, cols)
    if name in _ROOTS:
        matrix = matrix.sqrt()
    row0, col0 = place(parameter)
    seed = draw_seed(values.device)
    made = torch.ops.hybridq.encode(matrix, _spec(), "", seed=seed, row0=row0, col0=col0)
    codes, scale = made
    if name in _ROOTS:
        codes.masked_fill_((codes == 0) & (matrix > 0), 1)  # the least value above zero
    blocks = scale.shape[-1]  # a rank may have no rows at all
    return codes.reshape(values.shape), scale.reshape(*values.shape[:-1], blocks)


def _halves(values: torch.Tensor, name: str, parameter: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return FP16 values of the shape of `values`, and the power of two of each row."""
    own = values.sqrt() if name in _ROOTS else values
    amax = own.abs().amax(-1, keepdim=True) if own.shape[-1] else own.new_zeros(*own.shape[:-1], 1)
    _, exponent = torch.frexp(amax)
    scale = torch.exp2((exponent.clamp(min=-100) - 15).float())
    own = own / scale
    codes = torch.empty_like(own, dtype=torch.float16)
    store(own, codes, parameter)
    if name in _ROOTS:
        codes.masked_fill_((codes == 0) & (own > 0), 2.0**-24)
    return codes, scale


def take(
    state: dict[str, Any], saved: dict[str, Any], parameter: Any, kinds: Sequence[str]
) -> None:
    """Put the moments of a saved state into `state`: the bytes of the same kind, else the values.

    Args:
        state: of the parameter; whatever torch made of these moments is replaced.
        saved: of the parameter, of any kind.
        parameter: that it belongs to.
        kinds: what `held_as` returned for each.
    """
    device = parameter.device
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    for name, kind in zip(MOMENTS, kinds, strict=True):
        keys = (name, f"{name}_codes", f"{name}_scale")
        given = {key: saved[key].to(device) for key in keys if key in saved}
        for key in keys:
            state.pop(key, None)
        if not given:
            continue
        is_same = name not in given if kind in _SCALED else name in given
        if is_same and kind in _SCALED:
            is_same = (given[f"{name}_codes"].dtype == torch.float16) is (kind == "fp16")
        if kind == "bf16":
            is_same = is_same and given[name].dtype == torch.bfloat16
        if is_same and kind in _SCALED:
            state.update(given)
        elif is_same:
            dtype = local(parameter).dtype
            wide = is_updated_itself(parameter) and dtype != torch.float32
            state[name] = given[name].to(dtype if wide else dtypes[kind])
        else:
            write(state, name, read(given, name, parameter), parameter, kind)
