"""How the matrices of a linear function lie over ranks."""

from __future__ import annotations

from typing import Final, NamedTuple

from ...shards import Cut, TokenGather

__all__ = ["NO_CUTS", "Cuts"]


class Cuts(NamedTuple):
    """How the matrices of the three slots lie over ranks; None: what a rank has is all it takes.

    Args:
        input, weight, grad_output: what the slots' encoders take of other ranks.
        gathered: how the tokens of the input are dealt out, whose planes are gathered; then the
            gradient of the input is that of a rank's own tokens, too.
        scattered: the same of the output, which is a sum over ranks, and of its gradient.
    """

    input: Cut | None = None
    weight: Cut | None = None
    grad_output: Cut | None = None
    gathered: TokenGather | None = None
    scattered: TokenGather | None = None


#: No other rank takes part.
NO_CUTS: Final = Cuts()
