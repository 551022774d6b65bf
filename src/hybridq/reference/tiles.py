"""Scales in tiles of 128 rows by 4 blocks, as Blackwell's block-scaled products read them.

Source: cuBLAS, "1D block scaling factors layout".
"""

from __future__ import annotations

import torch

from ..formats import PlaneSpec

__all__ = ["row_scales", "tiled_scales", "untiled_scales"]


def row_scales(scale: torch.Tensor, spec: PlaneSpec, rows: int) -> torch.Tensor:
    """Return the scales `[rows, blocks]` of each row, as tiles hold them: squares' repeat.

    Args:
        scale: of a plane of `spec`, row of blocks by row of blocks.
        spec: of the plane.
        rows: of the plane.
    """
    down = (spec.format.block or (1, 1))[0]
    return scale if down == 1 else scale.repeat_interleave(down, 0)[:rows]


def tiled_scales(scale: torch.Tensor) -> torch.Tensor:
    """Return one-byte scales `[rows, blocks]` in tiles, padded with zeros, in one dimension.

    The scale of row r and block c stands at
    `((r // 128) * ceil(blocks / 4) + c // 4) * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4`.
    """
    rows, blocks = scale.shape
    padded = torch.nn.functional.pad(scale, (0, -blocks % 4, 0, -rows % 128))
    # [tile row, 32-row part, row in it, tile column, block in it]
    parts = padded.reshape(-(-rows // 128), 4, 32, -(-blocks // 4), 4)
    return parts.permute(0, 3, 2, 1, 4).reshape(-1)


def untiled_scales(tiles: torch.Tensor, rows: int, blocks: int) -> torch.Tensor:
    """Return the scales `[rows, blocks]` that `tiled_scales` has put into tiles.

    Args:
        tiles: in one dimension.
        rows, blocks: of the plane.
    """
    parts = tiles.reshape(-(-rows // 128), -(-blocks // 4), 32, 4, 4)
    padded = parts.permute(0, 3, 2, 1, 4).reshape(-(-rows // 128) * 128, -(-blocks // 4) * 4)
    return padded[:rows, :blocks].contiguous()
