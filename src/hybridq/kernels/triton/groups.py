"""Device functions of kernels over ragged groups: where groups end, and which tile comes next.

Group ends are read on the device, so that neither a grid nor anything on the host depends on how
many tokens a group has. Wrong ends cannot lead out of the tokens.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["group_end", "in_bands", "ragged_tiles"]


@triton.jit
def group_end(offsets, group, groups, tokens):
    """Return where a group ends: at 0 before the first, at `tokens` after the last."""
    end = tl.load(offsets + group, mask=(group >= 0) & (group < groups), other=0)
    end = tl.where(group < groups, end, tokens)
    return tl.minimum(tl.maximum(end, 0), tokens)


@triton.jit
def ragged_tiles(offsets, groups, tokens, BLOCK, GROUPS: tl.constexpr, STEP: tl.constexpr = 1):
    """Return the number of row tiles of each group `[GROUPS]`.

    The first tile of a group begins at the last multiple of STEP that is not behind its begin.
    Entry `groups` is the rows past the last end, to which no product is added.
    """
    index = tl.arange(0, GROUPS)
    end = tl.load(offsets + index, mask=index < groups, other=tokens)
    begin = tl.load(offsets + index - 1, mask=(index > 0) & (index <= groups), other=0)
    end = tl.minimum(tl.maximum(end, 0), tokens)
    begin = tl.minimum(tl.maximum(begin, 0), tokens)
    tiles = tl.where(end > begin, tl.cdiv(end - begin // STEP * STEP, BLOCK), 0)
    return tl.where(index <= groups, tiles, 0)


@triton.jit
def in_bands(tile, tiles_down, tiles_right, BAND: tl.constexpr):
    """Return row and column of a tile, in bands of BAND rows: neighbours in time share operands."""
    band = tile // (BAND * tiles_right)
    down = tl.minimum(tiles_down - band * BAND, BAND)
    inside = tile % (BAND * tiles_right)
    return band * BAND + inside % down, inside // down
