"""Cases that GPU kernels are held to, bit for bit: emulated on every machine, and on a GPU.

The other side is the `cpu` backend, which the rest of the suite holds to the oracle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hybridq.formats import DEFAULT_SIGNS, PlaneSpec, names
from hybridq.kernels.choice import EncodeRequest
from hybridq.kernels.choice import registry as registry

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

#: Aligned, where the tile kernels run (whole tiles, edges in both directions), and not.
ALIGNED = ((128, 64), (160, 136), (32, 32))
ODD = ((1, 1), (7, 33), (0, 5), (5, 0), (130, 131), (17, 200), (0, 72))


def plain_specs() -> dict[str, PlaneSpec]:
    """Every registered format that needs a kernel, without options."""
    specs = {name: PlaneSpec.parse(name) for name in names()}
    return {name: spec for name, spec in specs.items() if not spec.format.is_identity}


def option_specs() -> dict[str, PlaneSpec]:
    """Options, each with a format that it goes with."""
    nvfp4, square = PlaneSpec.parse("nvfp4"), PlaneSpec.parse("nvfp4_16x16")
    mxfp8, tensor = PlaneSpec.parse("mxfp8"), PlaneSpec.parse("fp8_e4m3")
    transformed = {"signs": DEFAULT_SIGNS}
    return {
        "nvfp4 sr": replace(nvfp4, stochastic=True),
        "nvfp4 rht": replace(nvfp4, **transformed),
        "nvfp4 rht sr": replace(nvfp4, **transformed, stochastic=True),
        "nvfp4 rows": replace(nvfp4, row_scaled=True),
        "nvfp4 rows rht": replace(nvfp4, row_scaled=True, **transformed),
        "nvfp4 mae": replace(nvfp4, four_over_six="mae", tensor_bound=256.0),
        "nvfp4 mse": replace(nvfp4, four_over_six="mse"),
        "nvfp4 rows mae": replace(nvfp4, row_scaled=True, four_over_six="mae"),
        "16x16 sr": replace(square, stochastic=True),
        "16x16 mae": replace(square, four_over_six="mae"),
        "16x16 mse": replace(square, four_over_six="mse", tensor_bound=256.0),
        "mxfp8 sr": replace(mxfp8, stochastic=True),
        "mxfp8 rht": replace(mxfp8, signs=5),
        "fp8 sr": replace(tensor, stochastic=True),
        "fp8 rht": replace(tensor, **transformed),
    }


def pairs() -> dict[str, tuple[PlaneSpec, PlaneSpec]]:
    """Hybrid pairs: those of the zoo, which one kernel makes, and some that two make."""
    plain, options = plain_specs(), option_specs()
    return {
        "mxfp8 | nvfp4 rht": (plain["mxfp8"], options["nvfp4 rht"]),
        "mxfp8 | nvfp4 rht sr": (plain["mxfp8"], options["nvfp4 rht sr"]),
        "mxfp8 | nvfp4": (plain["mxfp8"], plain["nvfp4"]),
        "nvfp4 | mxfp8": (plain["nvfp4"], plain["mxfp8"]),
        "nvfp4 | nvfp4 rht": (plain["nvfp4"], options["nvfp4 rht"]),
        "nvfp4 sr | nvfp4 rht sr": (options["nvfp4 sr"], options["nvfp4 rht sr"]),
        "mxfp8 | mxfp8_e5m2": (plain["mxfp8"], plain["mxfp8_e5m2"]),
        "mxfp8 | fp8_1x128": (plain["mxfp8"], plain["fp8_1x128"]),
        "fp8_1x128 | mxfp8": (plain["fp8_1x128"], plain["mxfp8"]),
        "nvfp4 rows | mxfp8": (options["nvfp4 rows"], plain["mxfp8"]),
        "fp8_128x128 | nvfp4 rows": (plain["fp8_128x128"], options["nvfp4 rows"]),
        "mxfp6_e3m2 | fp8_e5m2": (plain["mxfp6_e3m2"], plain["fp8_e5m2"]),
    }


def matrix(rows: int, cols: int, dtype: torch.dtype, seed: int, special: str) -> torch.Tensor:
    """Return values over many binades, one matrix for each kind of special value."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=generator)
    x = x * torch.exp(3 * torch.randn(rows, 1, generator=generator))
    if x.numel() > 20:
        flat = x.view(-1)
        at = torch.randperm(x.numel(), generator=generator)[:12]
        if special == "nan":
            flat[at[0]] = float("nan")
        if special == "inf":
            flat[at[0]], flat[at[1]] = float("inf"), -float("inf")
        if special == "tiny":
            x *= 2.0**-130
            flat[at[0]] = 3e38
        if special == "zeros":
            x[: max(1, rows // 4)] = 0
            x[:, : max(1, cols // 4)] = -0.0
    return x.to(dtype)


SPECIALS = ("normal", "nan", "inf", "tiny", "zeros")


@dataclass(frozen=True)
class Kernels:
    """The operations under test and where their tensors live."""

    ops: dict[str, Callable[..., Any]]
    device: str

    def to(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None or self.device == "cpu":
            return tensor
        # Strides survive: views are part of the test.
        base = tensor.as_strided(
            (tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0
        ).to(self.device)
        return base.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def cpu_ops() -> dict[str, Callable[..., Any]]:
    return registry._backends["cpu"].ops


def assert_same(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    got = got.cpu()
    assert got.shape == want.shape and got.dtype == want.dtype, what
    plain = torch.contiguous_format
    left, right = (t.clone(memory_format=plain).flatten().view(torch.uint8) for t in (got, want))
    wrong = (left != right).nonzero().flatten()
    assert not len(wrong), (
        f"{what}: {len(wrong)} of {len(left)} bytes differ, the first at {int(wrong[0])}: "
        f"{int(left[wrong[0]])}, not {int(right[wrong[0]])}"
    )


def same_values(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    """As assert_same, but one NaN is as good as another."""
    got = got.cpu()
    assert got.shape == want.shape and got.dtype == want.dtype, what
    both = torch.isnan(got) & torch.isnan(want)
    assert_same(torch.where(both, torch.zeros_like(got), got), want.masked_fill(both, 0), what)


def check_encode(
    kernels: Kernels, x: torch.Tensor, row: PlaneSpec | None, col: PlaneSpec | None, **where: int
) -> list[torch.Tensor]:
    """Encode x here and on the CPU, and compare every buffer; returns the CPU's."""
    cpu = cpu_ops()

    def stat(own: torch.Tensor, spec: PlaneSpec | None) -> torch.Tensor | None:
        return cpu["amax"](own, spec) if spec is not None and spec.needs_amax else None

    first, second = stat(x, row), stat(x.t(), col)
    seed = torch.tensor([123_456_789_012_345])
    want = cpu["encode"](x, row, col, EncodeRequest("", "", first, second, seed, **where))
    here = EncodeRequest("", "", kernels.to(first), kernels.to(second), kernels.to(seed), **where)
    got = kernels.ops["encode"](kernels.to(x), row, col, here)
    assert len(got) == len(want)
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        assert_same(g, w, f"{row} | {col} of {tuple(x.shape)} {x.dtype} {x.stride()}: buffer {i}")
    return want


#: Pairs of specs that many tensors share launches for, with how many launches that is.
MANY: dict[str, tuple[str | None, str | None, int]] = {
    **{f"{name} row": (name, None, 1) for name in ("mxfp8", "mxfp8_32x32", "fp8_128x128")},
    **{f"{name} row": (name, None, 2) for name in ("fp8_e4m3", "nvfp4", "nvfp4_16x16")},
    **{f"{name} both": (name, name, 1) for name in ("mxfp8", "mxfp8_32x32", "fp8_128x128")},
    **{f"{name} both": (name, name, 2) for name in ("fp8_e4m3", "nvfp4", "nvfp4_16x16")},
    "mxfp8 col": (None, "mxfp8", 1),
    "nvfp4 col": (None, "nvfp4", 2),
    "mxfp8 | nvfp4": ("mxfp8", "nvfp4", 2),  # MXFP8 in the pass that finds NVFP4's amax
    "nvfp4 | mxfp8": ("nvfp4", "mxfp8", 3),  # no kernel has both
}


def many_specs(name: str) -> tuple[PlaneSpec | None, PlaneSpec | None]:
    row, col, _ = MANY[name]
    return tuple(None if text is None else PlaneSpec.parse(text) for text in (row, col))


def check_many(
    kernels: Kernels,
    xs: Sequence[torch.Tensor],
    row: PlaneSpec | None,
    col: PlaneSpec | None,
    gives: tuple[bool, bool] = (False, False),
    **streams: int,
) -> None:
    """Encode all xs at once here and each by itself on the CPU, and compare every buffer.

    `gives`: whether the amaxes for each plane are given, three times as large as the tensors'.
    """
    cpu = cpu_ops()
    seeds = torch.arange(len(xs)) * 7_654_321_987 + 5

    def stats_of(spec: PlaneSpec | None, is_col: int) -> list[torch.Tensor | None]:
        if spec is None or not spec.needs_amax:
            return [None] * len(xs)
        factor = 3 if gives[is_col] else 1
        return [cpu["amax"](x.t() if is_col else x, spec) * factor for x in xs]

    stats = [stats_of(row, 0), stats_of(col, 1)]
    given = [
        kernels.to(torch.cat(some)) if gives[i] and some[0] is not None else None
        for i, some in enumerate(stats)
    ]
    args = EncodeRequest("", "", *given, kernels.to(seeds), **streams)
    got = kernels.ops["encode_many"]([kernels.to(x) for x in xs], row, col, args)
    count = len(got) // len(xs)
    assert len(got) == count * len(xs)
    for i, x in enumerate(xs):
        one = EncodeRequest("", "", stats[0][i], stats[1][i], seeds[i : i + 1], **streams)
        mine, want = got[i * count : (i + 1) * count], cpu["encode"](x, row, col, one)
        what = f"{row} | {col}, tensor {i} of {tuple(x.shape)} {x.dtype} {x.stride()}"
        for j, (g, w) in enumerate(zip(mine, want, strict=True)):
            assert_same(g, w, f"{what}: buffer {j}")


#: For tile kernels and not, empty ones, and one where a column plane's rows end in half a chunk.
_MIXED = ((128, 64), (7, 33), (160, 136), (0, 5), (32, 8), (256, 72), (5, 0), (1, 64), (48, 200))


def mixed_list(dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """Matrices of many shapes, and views of one."""
    xs = [matrix(*shape, dtype, seed + i, SPECIALS[i % 5]) for i, shape in enumerate(_MIXED)]
    wide = matrix(96, 160, dtype, seed, "nan")
    return [*xs, wide[:, :72], wide.t(), wide[1:, 1:65], wide[::2], wide[:1].expand(32, 160)]


def check_decode(kernels: Kernels, x: torch.Tensor, spec: PlaneSpec) -> None:
    """Decode a plane of x, fully and as an operand, to every dtype; of FP8 with NaN among codes."""
    stat = cpu_ops()["amax"](x, spec) if spec.needs_amax else None
    request = EncodeRequest("", "", stat, None, torch.tensor([7]))
    plane = list(cpu_ops()["encode"](x, spec, None, request))
    _check_decoded(kernels, plane, spec, x.shape)
    if spec.format.element.bits == 8:
        codes = plane[0].view(torch.uint8).clone()
        for step, code in ((37, 0x7F), (41, 0xFC), (43, 0xFF)):  # of E5M2 an infinity, too
            codes.view(-1)[step // 2 :: step] = code
        _check_decoded(kernels, [codes.view(plane[0].dtype), *plane[1:]], spec, x.shape)


def _check_decoded(
    kernels: Kernels, plane: list[torch.Tensor], spec: PlaneSpec, shape: torch.Size
) -> None:
    cpu, here = cpu_ops(), [kernels.to(buffer) for buffer in plane]
    for dtype in DTYPES:
        what = f"{spec} of {tuple(shape)} to {dtype}"
        want = cpu["decode"](plane, spec, *shape, dtype)
        got = kernels.ops["decode"](here, spec, *shape, dtype)
        # A NaN of 16 bits is the same everywhere, one of FP32 the quiet one of the kernels' own.
        (same_values if dtype == torch.float32 else assert_same)(got, want, f"decode of {what}")
        want, _ = cpu["operand"](plane, spec, *shape, dtype)
        got, _ = kernels.ops["operand"](here, spec, *shape, dtype)
        same_values(got, want, f"operand of {what}")


def views(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Views that no 16-byte load can read, or only in the other direction."""
    x = matrix(96, 160, dtype, 3, "normal")
    return {
        "transposed": x.t(),
        "every other row": x[::2],
        "every other column": x[:, ::2],
        "offset by one": x.flatten()[1:].as_strided((64, 128), (160, 1)),
        "expanded row": x[:1].expand(40, 160),
        "padded rows": x[:, :136],
    }
