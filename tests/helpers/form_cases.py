"""Planes that GPU kernels write in a product's form, held to encode and then fold or swizzle."""

from __future__ import annotations

from dataclasses import replace

import torch

import kernel_cases as cases
from hybridq import reference
from hybridq.formats import PlaneSpec

#: The folded spec of each MX format that has one.
FOLDED = {
    name: replace(spec, format=spec.format.folded)
    for name, spec in cases.plain_specs().items()
    if spec.format.folded is not None
}
#: Specs with scales in tiles, by name.
TILED = {
    name: replace(spec, scale_layout="tiles")
    for name, spec in {**cases.plain_specs(), **cases.option_specs()}.items()
    if name in ("mxfp8", "mxfp8_e5m2", "nvfp4", "nvfp4 sr", "nvfp4 rht", "nvfp4 rht sr")
    or name in ("nvfp4_16x16", "16x16 sr", "mxfp8_32x32", "mxfp8_e5m2_32x32")
}
#: Whole tiles of scales in both directions.
WHOLE = ((128, 128), (256, 128), (128, 384))
#: Whole and partial groups in both directions; all have tile kernels for both planes.
TILES = ((128, 64), (160, 136), (32, 32), (16, 8), (256, 264))
#: Of these some plane has none.
OTHERS = ((7, 33), (1, 1), (130, 136), (48, 12), (0, 64), (5, 0))


def matrix(rows: int, cols: int, dtype: torch.dtype, seed: int, special: str) -> torch.Tensor:
    """Return values whose blocks of 32 differ by any number of binades, in both directions."""
    x = cases.matrix(rows, cols, torch.float32, seed, special)
    generator = torch.Generator().manual_seed(seed + 100)
    down = torch.randint(-18, 19, (-(-rows // 32), 1), generator=generator).float()
    across = torch.randint(-18, 19, (1, -(-cols // 32)), generator=generator).float()
    steps = (down + across).repeat_interleave(32, 0).repeat_interleave(32, 1)
    return (x * torch.exp2(steps[:rows, :cols])).to(dtype)


def wanted(x: torch.Tensor, spec: PlaneSpec) -> list[torch.Tensor]:
    """Return the buffers of the folded plane of x by the core's encode and the reference's fold."""
    own = replace(spec, format=spec.format.unfolded)
    plane = cases.cpu_ops()["encode"](x, own, None, cases.EncodeRequest())
    made = reference.fold_plane(plane, own, *x.shape)
    return [made.codes, made.scale]


def check(
    kernels: cases.Kernels, x: torch.Tensor, row: PlaneSpec | None, col: PlaneSpec | None
) -> None:
    """Hold the planes of x to those that are encoded and folded one after the other."""
    got = kernels.ops["encode"](kernels.to(x), row, col, cases.EncodeRequest())
    want = [
        buffer
        for own, spec in ((x, row), (x.t(), col))
        if spec is not None
        for buffer in wanted(own, spec)
    ]
    what = f"{row} | {col} of {tuple(x.shape)} {x.dtype}"
    for i, (one, other) in enumerate(zip(got, want, strict=True)):
        cases.assert_same(one, other, f"{what}: buffer {i}")
    for scale in got[1::2]:
        assert scale.stride() == (1, max(scale.shape[0], 1)), what


def check_tiled(
    kernels: cases.Kernels, x: torch.Tensor, row: PlaneSpec | None, col: PlaneSpec | None
) -> None:
    """Hold the planes of x to those of encode, their scales put into tiles by the reference."""
    seed, cpu = torch.tensor([12_345]), cases.cpu_ops()
    sides = [(own, spec) for own, spec in ((x, row), (x.t(), col)) if spec is not None]
    got = kernels.ops["encode"](
        kernels.to(x), row, col, cases.EncodeRequest(seed=kernels.to(seed), row_stream=0)
    )
    for own, spec in sides:
        plain = replace(spec, scale_layout="")
        stat = cpu["amax"](own, plain) if plain.needs_amax else None
        is_col = spec is col and own is not x
        request = cases.EncodeRequest(
            row_stat=stat, seed=seed, row_stream=int(is_col), col_stream=int(is_col)
        )
        want = cpu["encode"](own, plain, None, request)
        want[1] = reference.tiled_scales(reference.row_scales(want[1], plain, own.shape[0]))
        for i, (one, other) in enumerate(zip(got[: len(want)], want, strict=True)):
            cases.assert_same(one, other, f"{row} | {col} of {tuple(x.shape)}: buffer {i}")
        got = got[len(want) :]
