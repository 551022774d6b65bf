"""A second implementation of `docs/reference/numerics.md` in NumPy, for tests only.

It is written from the rules and shares no code with `hybridq`: element casts search a table of all
code values, scale rules are spelled out one by one, FP32 arithmetic is `np.float32` in the stated
order. Slow and plain on purpose; where a backend and this disagree, the text of the rules decides.
"""

from .elements import ELEMENTS, OracleElement, cast_nearest, cast_stochastic, decode_codes
from .hadamard import forward_hadamard, inverse_hadamard
from .philox import philox4x32_7, random_bytes, random_halves
from .planes import OracleSpec, decode, encode, operand, tensor_amax
from .rounding import round_stochastic, round_to

__all__ = [
    "ELEMENTS",
    "OracleElement",
    "OracleSpec",
    "cast_nearest",
    "cast_stochastic",
    "decode",
    "decode_codes",
    "encode",
    "forward_hadamard",
    "inverse_hadamard",
    "operand",
    "philox4x32_7",
    "random_bytes",
    "random_halves",
    "round_stochastic",
    "round_to",
    "tensor_amax",
]
