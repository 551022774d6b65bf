"""Kernels that are bound by memory: amax, encode, decode, transpose, rounding and fold.

The bytes of a case are those that the task cannot do without: each input read once, each output
written once, and one more read of the input where a statistic of all of it comes first. What an
implementation reads twice counts against it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from hybridq.formats import DEFAULT_SIGNS, PlaneSpec, names
from hybridq.kernels.choice import EncodeRequest
from hybridq.kernels.choice import registry as registry

from .case import SCALES_OF_CHECKPOINTS, Bench, Case, encode_goal, plane_nbytes

__all__ = ["OPTIONS", "cast_cases", "encode_nbytes", "matrix_cases", "pairs"]

#: The formats that most people use come first: a budget may end the list early.
_FIRST = ("mxfp8", "nvfp4", "fp8_1x128", "fp8_128x128", "fp8_e4m3", "mxfp4")


def _plain() -> dict[str, PlaneSpec]:
    known = [*_FIRST, *(name for name in names() if name not in _FIRST)]
    specs = {name: PlaneSpec.parse(name) for name in known}
    return {name: spec for name, spec in specs.items() if not spec.format.is_identity}


def _options() -> dict[str, PlaneSpec]:
    nvfp4, mxfp8 = PlaneSpec.parse("nvfp4"), PlaneSpec.parse("mxfp8")
    transformed = replace(nvfp4, signs=DEFAULT_SIGNS)
    return {
        "nvfp4 sr": replace(nvfp4, stochastic=True),
        "nvfp4 rht": transformed,
        "nvfp4 rht sr": replace(transformed, stochastic=True),
        "nvfp4 rows": replace(nvfp4, row_scaled=True),
        "nvfp4 4o6": replace(nvfp4, four_over_six="mae", tensor_bound=256.0),
        "mxfp8 sr": replace(mxfp8, stochastic=True),
    }


OPTIONS = _options()

#: What the short table shows: formats in each direction, hybrid pairs, and what comes with them.
_SHOWN = ("mxfp8", "nvfp4", "fp8_1x128", "fp8_128x128", "fp8_e4m3")
_HEADLINES = {
    *(f"encode {name} {which}" for name in _SHOWN for which in ("row", "col", "both")),
    *("encode fp8_e4m3 row, amax given", "encode fp8_e4m3 both, amax given"),
    *("amax", "operand mxfp8", "operand nvfp4", "fold mxfp8", "transpose 8 bits"),
}


def _is_headline(name: str) -> bool:
    return name in _HEADLINES or (" | " in name and "given" not in name)


def pairs() -> dict[str, tuple[PlaneSpec | None, PlaneSpec | None]]:
    """Return what is encoded: name to rowwise and columnwise spec."""
    plain = _plain()
    found: dict[str, tuple[PlaneSpec | None, PlaneSpec | None]] = {}
    for name, spec in plain.items():
        found[f"{name} row"] = (spec, None)
        found[f"{name} col"] = (None, spec)
        found[f"{name} both"] = (spec, spec)
    found["nvfp4 | nvfp4 rht"] = (plain["nvfp4"], OPTIONS["nvfp4 rht"])
    found["nvfp4 sr | nvfp4 rht sr"] = (OPTIONS["nvfp4 sr"], OPTIONS["nvfp4 rht sr"])
    found["mxfp8 | nvfp4 rht"] = (plain["mxfp8"], OPTIONS["nvfp4 rht"])
    found["mxfp8 | nvfp4 rht sr"] = (plain["mxfp8"], OPTIONS["nvfp4 rht sr"])
    for name in ("nvfp4", "mxfp8_e5m2", "fp8_1x128"):
        found[f"mxfp8 | {name}"] = (plain["mxfp8"], plain[name])
    for name in ("nvfp4", "fp8_1x128"):
        found[f"{name} | mxfp8"] = (plain[name], plain["mxfp8"])
    for name, spec in OPTIONS.items():
        found[f"{name} row"] = (spec, None)
    by_row = SCALES_OF_CHECKPOINTS["fp8 by row"]
    found["fp8 by row row"], found["fp8 by row both"] = (by_row, None), (by_row, by_row)
    return found


def _needs_stat(*specs: PlaneSpec | None) -> bool:
    return any(spec is not None and spec.needs_amax for spec in specs)


def _reads_twice(row: PlaneSpec | None, col: PlaneSpec | None) -> bool:
    """Whether an amax has to be known before the first code: not that of a row of x."""
    return _needs_stat(row if row is not None and not row.row_scaled else None, col)


def _is_eight_bits(*specs: PlaneSpec | None) -> bool:
    elements = [spec.format.element for spec in specs if spec is not None]
    return all(element is not None and element.bits == 8 for element in elements)


def encode_nbytes(
    row: PlaneSpec | None,
    col: PlaneSpec | None,
    rows: int,
    cols: int,
    dtype: torch.dtype,
    with_amax: bool,
) -> int:
    """Return the bytes that encoding `[rows, cols]` needs, `with_amax` if no statistic is given."""
    item = torch.empty(0, dtype=dtype).element_size()
    reads = 2 if with_amax and _reads_twice(row, col) else 1
    total = reads * rows * cols * item
    if row is not None:
        total += plane_nbytes(row, rows, cols)
    if col is not None:
        total += plane_nbytes(col, cols, rows)
    return total


def _ops(name: str) -> dict[str, Callable[..., Any]]:
    return next(b.ops for b in registry.backends() if b.name == name)


def _seed(bench: Bench) -> torch.Tensor:
    return torch.tensor([20_251], device=bench.device)


def _encode_cases(bench: Bench, rows: int, cols: int, dtype: torch.dtype) -> Iterator[Case]:
    seed = _seed(bench)
    for name, (row, col) in pairs().items():
        text = [str(spec) if spec is not None else "" for spec in (row, col)]

        def whole(i: int, text: list[str] = text) -> Callable[[], Any]:
            x = bench.randn(rows, cols, dtype, i)
            return lambda: torch.ops.hybridq.encode(x, *text, None, None, seed)

        yield Case(
            "cast",
            f"encode {name}",
            (rows, cols),
            whole,
            baseline="copy",
            nbytes=encode_nbytes(row, col, rows, cols, dtype, True),
            goal=encode_goal(row, col),
            note="amax included" if _reads_twice(row, col) else "",
        )
        if not _needs_stat(row, col):
            continue
        backend = bench.runs("encode", row or col)

        def given(
            i: int,
            row: PlaneSpec | None = row,
            col: PlaneSpec | None = col,
            backend: str = backend,
        ) -> Callable[[], Any]:
            x, ops = bench.randn(rows, cols, dtype, i), _ops(backend)
            stats = [
                ops["amax"](own, spec) if spec is not None and spec.needs_amax else None
                for own, spec in ((x, row), (x.t(), col))
            ]
            args = EncodeRequest("", "", *stats, seed)
            return lambda: ops["encode"](x, row, col, args)

        yield Case(
            "cast",
            f"encode {name}, amax given",
            (rows, cols),
            given,
            baseline="copy",
            nbytes=encode_nbytes(row, col, rows, cols, dtype, False),
            # One scale per tensor whose amax is known is the plain FP8 cast of the goals; NVFP4's
            # goals count the read for its amax.
            goal=encode_goal(row, col) if _is_eight_bits(row, col) else None,
        )


def _amax_cases(bench: Bench, rows: int, cols: int, dtype: torch.dtype) -> Iterator[Case]:
    plain, transformed = PlaneSpec.parse("nvfp4"), OPTIONS["nvfp4 rht"]
    item = torch.empty(0, dtype=dtype).element_size()
    for name, spec, is_transposed in (
        ("amax", plain, False),
        ("amax rht row", transformed, False),
        ("amax rht col", transformed, True),
        ("amax of rows", OPTIONS["nvfp4 rows"], False),
        ("amax of columns", OPTIONS["nvfp4 rows"], True),
    ):
        direction = "columnwise" if is_transposed else "rowwise"

        def make(i: int, spec: PlaneSpec = spec, direction: str = direction) -> Callable[[], Any]:
            x = bench.randn(rows, cols, dtype, i)
            return lambda: torch.ops.hybridq.amax(x, str(spec), direction)

        count = spec.stat_shape(cols if is_transposed else rows)[0]
        yield Case("cast", name, (rows, cols), make, "copy", item * rows * cols + 4 * count)


def _decode_cases(bench: Bench, rows: int, cols: int) -> Iterator[Case]:
    specs = {**_plain(), "nvfp4 rht": OPTIONS["nvfp4 rht"]}
    for name, spec in specs.items():
        backend = bench.runs("decode", spec)
        for op in ("operand", "decode"):
            if op not in _ops(backend):
                continue

            def make(
                i: int, spec: PlaneSpec = spec, op: str = op, backend: str = backend
            ) -> Callable[[], Any]:
                x, run = bench.randn(rows, cols, torch.bfloat16, i), _ops(backend)[op]
                plane = torch.ops.hybridq.encode(x, str(spec), "")
                return lambda: run(plane, spec, rows, cols, torch.bfloat16)

            width = spec.padded(cols) if op == "operand" else cols
            nbytes = plane_nbytes(spec, rows, cols) + 2 * rows * width
            yield Case("cast", f"{op} {name}", (rows, cols), make, "copy", nbytes)


def _repack_cases(bench: Bench, rows: int, cols: int) -> Iterator[Case]:
    for bits in (4, 8, 16, 32):

        def turn(i: int, bits: int = bits) -> Callable[[], Any]:
            dtype = {4: torch.uint8, 8: torch.uint8, 16: torch.int16, 32: torch.int32}[bits]
            shape = (rows, cols // 2 if bits == 4 else cols)
            data = torch.randint(0, 128, shape, dtype=dtype, device=bench.device)
            return lambda: torch.ops.hybridq.transpose(data, rows, cols, bits)

        yield Case(
            "cast", f"transpose {bits} bits", (rows, cols), turn, "copy", rows * cols * bits // 4
        )

    def draw(i: int) -> Callable[[], Any]:
        x, seed = bench.randn(rows, cols, torch.float32, i), _seed(bench)
        return lambda: torch.ops.hybridq.round_stochastic(x, seed, torch.bfloat16)

    yield Case("cast", "round to bfloat16, stochastic", (rows, cols), draw, "copy", 6 * rows * cols)
    spec = PlaneSpec.parse("mxfp8")
    folding = next((b for b in registry.backends() if b.name == bench.runs("fold", spec)), None)
    if folding is None:
        return

    def fold(i: int) -> Callable[[], Any]:
        x, run = bench.randn(rows, cols, torch.bfloat16, i), folding.ops["fold"]
        plane = torch.ops.hybridq.encode(x, "mxfp8", "")
        return lambda: run(plane, spec, rows, cols, 1)

    nbytes = plane_nbytes(spec, rows, cols) + rows * cols + 4 * rows * -(-cols // 128)
    yield Case("cast", "fold mxfp8", (rows, cols), fold, "copy", nbytes)


def matrix_cases(bench: Bench, rows: int, cols: int, dtype: torch.dtype) -> list[Case]:
    """Return every case of one matrix; FP32 only where the input's dtype matters."""
    found = [*_encode_cases(bench, rows, cols, dtype), *_amax_cases(bench, rows, cols, dtype)]
    if dtype == torch.bfloat16:
        found += [*_decode_cases(bench, rows, cols), *_repack_cases(bench, rows, cols)]
    name = str(dtype).removeprefix("torch.")
    is_largest = (rows, cols) == max((one[:2] for one in bench.casts), default=(rows, cols))
    return [
        replace(
            case,
            dtype=name,
            is_headline=is_largest and dtype == torch.bfloat16 and _is_headline(case.name),
        )
        for case in found
    ]


def cast_cases(bench: Bench) -> Iterator[list[Case]]:
    """Yield the cases of each matrix in turn."""
    for rows, cols, dtype in bench.casts:
        yield matrix_cases(bench, rows, cols, dtype)
