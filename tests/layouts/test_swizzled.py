"""Scales in tiles of 128x4, as tensor cores read them: read whole, and tile by tile."""

from __future__ import annotations

import itertools
import os

import pytest
import torch
from safetensors.torch import save_file

from hybridq.direction import ROWWISE
from hybridq.formats import PlaneSpec
from hybridq.layouts.order import TILES
from hybridq.layouts.part import SWIZZLED, Part
from hybridq.ptq.source import open_source
from hybridq.ptq.tiles import Tile
from hybridq.ptq.views import PlaneView, Stored
from layout_cases import plane_of, swizzled, values

E8M0, E4M3 = torch.float8_e8m0fnu, torch.float8_e4m3fn
#: Format, dtypes of codes and scales in a file.
FORMATS = {"mxfp8": (E4M3, E8M0), "mxfp4": (torch.uint8, E8M0), "nvfp4": (torch.uint8, E4M3)}


@pytest.mark.parametrize("shape", [(1, 1), (31, 3), (128, 4), (129, 5), (300, 9)])
@pytest.mark.parametrize("dtype", [E8M0, E4M3])
def test_scales_are_put_in_order(dtype, shape) -> None:
    """Each scale is at the offset that cuBLAS documents, the rest is padding."""
    own = torch.randint(0, 255, shape, dtype=torch.uint8)
    part = Part("{module}.scale", "scale", dtype, SWIZZLED, order=TILES)
    file = swizzled(own.view(dtype))
    assert SWIZZLED.of(shape) == tuple(file.shape)
    read, bound, is_exact = part.read(file, shape, PlaneSpec.parse("mxfp8"))
    assert torch.equal(read, own) and bound is None and is_exact


@pytest.mark.parametrize("name", FORMATS)
def test_tiles_are_parts_of_the_whole(name, tmp_path) -> None:
    plane = plane_of(name, values((300, 448)))
    codes, scales = FORMATS[name]
    tensors = {"data": plane.data.view(codes), "scale": swizzled(plane.scale.view(scales))}
    scale = Part("b", "scale", scales, SWIZZLED, order=TILES)
    parts = {"data": Part("a", "data", codes), "scale": scale}
    save_file(tensors, tmp_path / "a.safetensors")
    [shard] = open_source(os.fspath(tmp_path / "a.safetensors")).shards
    entries = {one.name: one for one in shard.header.entries}
    stored = {key: Stored(shard, entries[key], tensors[key].dtype, parts[key]) for key in parts}
    view = PlaneView(
        *(plane.spec, ROWWISE, (300, 448), stored, torch.float32),
        base_rows=300,
        constants={key: one for key, one in plane.buffers.items() if key not in tensors},
    )
    block = plane.spec.unit(1)
    assert view.units == (128, 4 * block)
    high, wide = view.units
    for row, col in itertools.product(range(0, 300, high), range(0, 448, wide)):
        tile = Tile(row, col, min(high, 300 - row), min(wide, 448 - col), False)
        pieces = [
            torch.cat(
                [shard.read(one.offset + n * one.pitch, one.row_nbytes) for n in range(one.rows)]
            )
            for one in view.ranges(0, tile)
        ]
        made = view.values(tile, pieces)
        whole = plane.dequantize(torch.float32)[row : row + tile.rows, col : col + tile.cols]
        assert torch.equal(made, whole), (row, col)


def test_names_of_parent_and_leaf() -> None:
    part = Part("{parent}._{leaf}_qdata", "data", E4M3)
    for weight, file in (
        ("model.up_proj.weight", "model.up_proj._weight_qdata"),
        ("experts.gate_up_proj", "experts._gate_up_proj_qdata"),
        ("a._b._w", "a._b.__w_qdata"),
        ("weight", "_weight_qdata"),
    ):
        assert part.file_name(weight) == file and part.weight_of(file) == weight
    for other in ("a._b.weight_qdata", "a.weight_qdata", "a._qdata", "_qdata", "qdata", "a._w_q"):
        assert part.weight_of(other) is None
