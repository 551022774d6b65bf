"""The rules that are broken, each quoted from its page of docs/ (a test checks the quotes)."""

from __future__ import annotations

from .record import Rule

_ELEMENTS = "Elements"
NEAREST_EVEN = Rule(_ELEMENTS, "nearest even; ±inf and beyond saturate")
E5M2_INF = Rule(_ELEMENTS, "torch's own cast to E5M2 gives inf where this saturates")
NAN_CODE = Rule(_ELEMENTS, "any NaN → 0x7F")
MINUS_ZERO = Rule(_ELEMENTS, "-0 keeps its sign (code 8)")
NIBBLES = Rule(_ELEMENTS, "Two E2M1 codes share a byte, the lower index in the low nibble")
ODD_TAIL = Rule(_ELEMENTS, "the last high nibble is 0 where K is odd")

_TENSOR = "FP8, one scale per tensor"
TENSOR_AMAX = Rule(_TENSOR, "inf becomes the FP32 maximum")
EPS = Rule(_TENSOR, "`max(amax, eps)`")
POWER_OF_TWO = Rule(_TENSOR, "the mantissa is cleared (rounded down)")
STORED_SCALE = Rule(_TENSOR, "stored is `scale = 1 / scale_enc`")

_BLOCK = "FP8, one scale per 1x128 or 128x128 block"
ZERO_BLOCK = Rule(_BLOCK, "A zero block has scale 1")
OVERFLOW = Rule(_BLOCK, "inf becomes the largest value of the *input's* dtype")
OVERFLOW_TURNED = Rule(_BLOCK, "after a transform that is BF16's")

_MX = "MXFP8 (1x32; 32x32 for weights), MXFP6 and MXFP4 (1x32)"
RCEIL = Rule(_MX, "exponent + (mantissa > 0)")
RCEIL_LOW = Rule(_MX, "`r <= 2^-127` gives 0")
RCEIL_HIGH = Rule(_MX, "at most 0xFE")
EVEN_TIE = Rule(_MX, "amax rounded to the element's mantissa bits, to nearest even")
CEIL_EXACT = Rule(_MX, "plus one unless amax is a power of two")
EXPONENT_INF = Rule(_MX, "In all four amax 0 gives byte 0, inf 0xFE, NaN 0xFF")
MULTIPLIER_254 = Rule(_MX, "byte 254 needs the subnormal 2^-127")

_NVFP4 = "NVFP4 (1x16; 16x16 for weights)"
BLOCK_SCALE = Rule(_NVFP4, "amax_block * (s_enc * fp32(1/6))")
MULTIPLIER = Rule(_NVFP4, "multiplier = min(1 / (fp32(scale) * (1 / s_enc)), fp32max)")
VANISHING = Rule(
    _NVFP4, "A block scale that underflows to 0 has the FP32 maximum as its multiplier"
)
SECOND_LEVEL = Rule(_NVFP4, "(e2m1 * scale) * (amax_tensor / (448 * 6))")

_FOUR = "Four over six"
FOUR_TIE = Rule(_FOUR, "a tie goes to the six")
FOUR_BASE = Rule(_FOUR, "base = (amax_block / 6) * s_enc")
FOUR_LINES = Rule(_FOUR, "added from its first element to its last")
FOUR_TREE = Rule(_FOUR, "then as a tree (i and i+8, i and i+4, +2, +1)")
FOUR_TURNED = Rule(_FOUR, "A square decides once for both directions, in the order of the rowwise")
FOUR_BOUND = Rule(_FOUR, "stands in s_enc, in the error and in the decode factor")
ROW_SCALED = Rule("Row-scaled", "one FP32 amax per row of the plane in place of the tensor's")

_RANDOM = "Stochastic rounding"
FARTHER = Rule(_RANDOM, "taken if and only if `q + r >= 256`")
QUANTILE = Rule(_RANDOM, "`q = RN_even(256 * frac)`")
ROUNDS = Rule(_RANDOM, "Random bytes are Philox4x32-7")
KEY = Rule(_RANDOM, "key = (low, high half of the seed)")
COUNTER = Rule(_RANDOM, "counter = `(k / 16, row, stream, 0)`")
BYTES = Rule(_RANDOM, "`(word[i/4] >> 8*(i%4)) & 255`")
OFFSETS = Rule(_RANDOM, "k and row counted in the whole tensor's plane")
STREAMS = Rule(_RANDOM, "the streams are 0 (rowwise) and 1 (columnwise)")
SIXTEEN_BITS = Rule(_RANDOM, "takes 16 random bits")
INF_STAYS = Rule(_RANDOM, "an infinity is representable and stays")

_HADAMARD = "Random Hadamard transform"
SIGNS = Rule(_HADAMARD, "The default signs are `+ + + - + - - - - - - + - + - -`")
NORMALIZED = Rule(_HADAMARD, "multiply by `sign / 4`")
STRIDES = Rule(_HADAMARD, "FP32 butterflies with strides 1, 2, 4, 8")
TURNED_BF16 = Rule(_HADAMARD, "round to BF16; then quantize")
AMAX_AFTER = Rule(_HADAMARD, "amax taken after it")

_NORMS = "Norms"
FOLDED_SUMS = Rule(_NORMS, "partials i and i + 128, then i and i + 64, ..., i and i + 1")

_ACTIVATIONS = "Activations"
RELU_NAN = Rule(_ACTIVATIONS, "0 for v < 0, else v: -0 and NaN stay")
SMALL_SIGMOID = Rule(_ACTIVATIONS, "sigmoid(v) = (v < 0 ? e : 1) / (e + 1)")
GATE_IN_FP32 = Rule(_ACTIVATIONS, "the function of the first half, as FP32, times the second half")

_OPERANDS = "Operands of a GEMM, and dequantize"
RANGE_LOW = Rule(_OPERANDS, "values outside BF16's normal range")
RANGE_INF = Rule(_OPERANDS, "an inf counts as outside")
FACTORS = Rule(_OPERANDS, "the factors of whole tensors are applied to the product")
FACTORS_IN_TURN = Rule(_OPERANDS, "one after the other, in FP32")
FACTOR_POWER = Rule(_OPERANDS, "factors that are powers of two")
ONE_ROUNDING = Rule(_OPERANDS, "BF16 out, no bias, no accumulation")
BY_FOURS = Rule(_OPERANDS, "`fma(t, scale, sum)` with the block's scale goes to sum `j % 16`")
FOUR_RANGE = Rule(_OPERANDS, "rows of a whose numbers are zeros or from 2^-57 to 2^60")
UNEQUAL_SIGNS = Rule(_HADAMARD, "otherwise each is first transformed back")
DEQUANTIZED = Rule(_OPERANDS, "rounds once to the tensor's dtype, and encodes that")

FOLD_TOP = Rule("Fold", "max of the group's bytes, 0xFF left out")
FOLD_LIFT = Rule("Fold", "lift = floor(log2(max of the target / max of the source))")
FOLD_COUNT = Rule("Fold", "the count of finite codes that so change their value")

_CORNERS = "Corner cases, decided once"
NAN_SCALE = Rule(_CORNERS, "its scale is NaN and all its codes are the element's NaN code")
SUBNORMALS = Rule(_CORNERS, "| subnormal inputs | not flushed |")
LAYOUT = Rule("Numerics", "The columnwise plane of X is the rowwise plane of Xᵀ")
PADDING = Rule(_CORNERS, "| padding | never reaches an amax |")
ONE_NAN = Rule("One NaN", "FP32 `0x7FC00000` in scales, statistics, amaxes of planes")
EMPTY = Rule(_CORNERS, "| empty tensors | legal everywhere |")

_DELAYED = "FP8, one scale per tensor, delayed scaling"
FIXED = Rule(_DELAYED, "a negative number is such a `scale_enc`, negated")
NO_AMAX = Rule(_NVFP4, "1 if amax is 0 or s_enc is 0")
FOUR_RATIO = Rule(_FOUR, "s4 = cast_e4m3(min(base * 1.5, 448))")
FOUR_SQUARE = Rule(_FOUR, "or its square (`mse`), in FP32")
HALVES = Rule(_RANDOM, "`(word[i/2] >> 16*(i%2)) & 65535`")
INSIDE_ROOT = Rule(_NORMS, "rstd = 1 / sqrt(sum(d * d) / H + eps)")
PARTIALS = Rule(_NORMS, "Element j of a row is added to partial sum `j % 256`")
BY_GROUP = Rule(_OPERANDS, "its amax (one for each group, beside the codes)")
ACCUMULATION = Rule(_OPERANDS, "BF16 out, no bias, no accumulation")
GROUP_AMAX = Rule(_TENSOR, "With an amax group, amax is reduced over it first")
RECORDED = Rule(_DELAYED, "updates entry 0 to the larger of itself and `max|x|`, inf and NaN kept")
HISTORY_NAMES = Rule(
    "Training checkpoints of sharded models",
    "without the names that wrappers put between them",
    "docs/guides/checkpoints.md",
)
_FLAT = "docs/guides/flat-optimizers.md"
STAND_INS = Rule(
    "What a range of values gives", "codes; at most two blocks of a rank are cut", _FLAT
)
HALF_BYTES = Rule("Flat buffers", "4-bit codes lie two to a byte", _FLAT)
