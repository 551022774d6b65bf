"""The oracle: every operation in plain PyTorch, generic over Format, written from the rules.

Runs on any device that PyTorch runs on. `docs/reference/numerics.md` states the rules with their
sources.
"""

from __future__ import annotations

from .activation import ACTIVATIONS, Activation, activation, exp, sigmoid
from .decode import decode_plane, factor_bound, factor_of, plane_operand, tensor_factor
from .elements import cast, decode_codes, pack, unpack
from .encode import encode_plane, matrix_scales, tensor_amax
from .fold import FOLD_WIDTH, Folded, fold_element, fold_lift, fold_plane
from .gemm import finish_product, gemm
from .hadamard import hadamard, inverse_hadamard
from .norm import NORMS, norm, row_sums
from .philox import philox, random_bits, random_bytes
from .rounding import one_nan, round_stochastic
from .scales import BlockScales, block_scales
from .tiles import row_scales, tiled_scales, untiled_scales
from .token_rows import spread_rows, sum_rows

__all__ = [
    "ACTIVATIONS",
    "FOLD_WIDTH",
    "NORMS",
    "Activation",
    "BlockScales",
    "Folded",
    "activation",
    "block_scales",
    "cast",
    "decode_codes",
    "decode_plane",
    "encode_plane",
    "exp",
    "factor_bound",
    "factor_of",
    "finish_product",
    "fold_element",
    "fold_lift",
    "fold_plane",
    "gemm",
    "hadamard",
    "inverse_hadamard",
    "matrix_scales",
    "norm",
    "one_nan",
    "pack",
    "philox",
    "plane_operand",
    "random_bits",
    "random_bytes",
    "round_stochastic",
    "row_scales",
    "row_sums",
    "sigmoid",
    "spread_rows",
    "sum_rows",
    "tensor_amax",
    "tensor_factor",
    "tiled_scales",
    "unpack",
    "untiled_scales",
]
