"""The vectors: which cases there are, and their answers by the reference backend.

The registry of formats is iterated, so that a new format has vectors at the next `write_vectors`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from .._version import __version__
from ..errors import SpecError
from ..formats import (
    DEFAULT_SIGNS,
    ELEMENTS,
    ERRORS,
    RULES,
    Element,
    Entry,
    Format,
    PlaneSpec,
    entries,
)
from ..reference.elements import code_values
from .adapters.ours import HybridQAdapter
from .case import Array, Buffers, Case, describe
from .files import write_file
from .inputs import INPUTS, Shape, all_values, make_input, matrix
from .products import true_product

__all__ = ["build_vectors", "write_vectors"]

_REFERENCE = HybridQAdapter("reference")
_SEEDS = (0x0123456789ABCDEF, -1)
#: Signs of a transform other than the default ones.
_OTHER_SIGNS = 0x0001
#: Inputs of a format with options; the plain format takes all.
_SHORT = ("odd", "tall", "ties")
#: Inputs of a format with another scale rule.
_RULED = (*_SHORT, "wide", "edges", "subnormal", "inf", "nan")
#: Inputs whose planes are decoded too; of a format with options the first.
_DECODED = ("odd", "tall", "wide", "outlier", "maximal", "inf", "nan", "no_rows", "no_columns")
#: Planes of GEMM operands and hybrids.
_ROWS, _OTHER_ROWS, _INNER = 5, 7, 77
_HYBRID: Shape = (37, 45)


def _try(make: Any, *args: Any, **options: Any) -> Any:
    """Return what `make` makes, or None where the options contradict each other."""
    try:
        return make(*args, **options)
    except SpecError:
        return None


def _formats_of(fmt: Format) -> Iterator[tuple[str, Format]]:
    """Yield the format with each other scale rule and option that it goes with."""
    for rule in RULES.values():
        other = None if rule.name == fmt.rule else _try(replace, fmt, rule=rule.name)
        if other is not None:
            yield rule.name, other
    for label, options in (
        ("fp32_scales" if fmt.power_of_two else "pow2", {"power_of_two": not fmt.power_of_two}),
        ("eps", {"eps": 0.5}),
    ):
        other = _try(replace, fmt, **options)
        if other is not None:
            yield label, other


#: Options of a plane; one that contradicts a format is left out.
_OPTIONS: dict[str, dict[str, Any]] = {
    "sr": {"stochastic": True},
    "rht": {"signs": DEFAULT_SIGNS},
    "rht_other_signs": {"signs": _OTHER_SIGNS},
    "sr_rht": {"stochastic": True, "signs": DEFAULT_SIGNS},
    "bound256": {"tensor_bound": 256.0},
    **{
        f"4o6_{error}_{bound:g}": {"four_over_six": error, "tensor_bound": bound}
        for error in ERRORS
        for bound in (256.0, 448.0)
    },
    "rows": {"row_scaled": True},
    "rows_4o6": {"row_scaled": True, "four_over_six": ERRORS[0], "tensor_bound": 256.0},
    "rows_rht": {"row_scaled": True, "signs": DEFAULT_SIGNS},
    "rows_sr": {"row_scaled": True, "stochastic": True},
}


def _variants(fmt: Format) -> Iterator[tuple[str, PlaneSpec]]:
    yield "", PlaneSpec(fmt)
    for label, other in _formats_of(fmt):
        yield label, PlaneSpec(other)
    for label, options in _OPTIONS.items():
        spec = _try(PlaneSpec, fmt, **options)
        if spec is not None:
            yield label, spec


def _answered(case: Case) -> Case:
    """Return `case` with the reference's answer."""
    if case.x is None:
        raise SpecError(f"build_vectors: {case.id} has no input")
    return replace(case, want=dict(_REFERENCE.encode(case.x, case)))


def _decode_case(case: Case, name: str) -> Case:
    """Return the case that decodes the plane that `case` encodes."""
    asked = Case(
        name,
        "decode",
        case.spec,
        shape=case.shape,
        direction=case.direction,
        given=case.want,
    )
    return replace(asked, want={"values": _REFERENCE.decode(case.want, asked)})


def _inputs_of(fmt: Format, spec: PlaneSpec) -> tuple[str, ...]:
    if spec == PlaneSpec(fmt):
        return tuple(INPUTS)
    if spec.format.rule != fmt.rule:
        return _RULED
    return _SHORT if spec.stochastic else (*_SHORT, "wide")


def _encode_cases(entry: Entry) -> Iterator[Case]:
    block = entry.format.block or (1, 16)
    for label, spec in _variants(entry.format):
        name = "/".join(part for part in (entry.name, label) if part)
        for input_name in _inputs_of(entry.format, spec):
            dtype, x = make_input(input_name, block)
            case = Case(
                f"{name}/{input_name}/encode",
                "encode",
                describe(spec),
                dtype,
                x.shape,
                "columnwise" if input_name == "tall" else "rowwise",
                x,
                stream=int(input_name == "tall"),
            )
            if spec.stochastic:
                case = replace(case, seed=_SEEDS[0])
                if input_name == "ties":  # as a shard, with another seed and stream
                    case = replace(case, seed=_SEEDS[1], stream=3, offset=(5, 48))
            case = _answered(case)
            yield case
            if input_name in (_DECODED if not label else _DECODED[:1]):
                yield _decode_case(case, f"{name}/{input_name}/decode")


def _codes_case(entry: Entry) -> Iterator[Case]:
    """Decode every code under scales from all over the scale element's range, NaN included."""
    fmt = entry.format
    if fmt.element is None or fmt.scale is None or fmt.block is None:
        return
    spec = PlaneSpec(fmt)
    width = max(fmt.block[1], 1 << fmt.element.bits)
    rows = 2 * fmt.block[0] if fmt.is_square else 8
    wanted = spec.buffers(rows, width)
    count = wanted[0].numel * fmt.element.codes_per_byte
    codes: Array = (np.arange(count) % (1 << fmt.element.bits)).astype(np.uint8)
    codes = codes.reshape(wanted[0].shape[0], -1)
    if fmt.is_square:
        codes[4 : fmt.block[0]] = codes[fmt.block[0] + 4 :] = 0  # so that files stay small
    if fmt.element.codes_per_byte == 2:
        codes = codes[:, 0::2] | (codes[:, 1::2] << 4)
    given: dict[str, Array] = {"data": codes, "scale": _scales(fmt.scale, wanted[1].shape)}
    for buffer in wanted[2:]:
        given[buffer.name] = np.full(buffer.shape, 123.0, dtype=np.float32)
    shape = (rows, width)
    asked = Case(f"{entry.name}/codes/decode", "decode", describe(spec), shape=shape, given=given)
    yield replace(asked, want={"values": _REFERENCE.decode(given, asked)})


def _scales(scale: Element, shape: tuple[int, ...]) -> Array:
    count = int(np.prod(shape))
    if scale.bits > 8:
        return (
            np.ldexp(np.float32(1.5), np.linspace(-140, 120, count).astype(int))
            .astype(np.float32)
            .reshape(shape)
        )
    top = (1 << scale.bits) - 1 if not scale.has_sign else scale.nan_code
    return np.linspace(0, top, count).round().astype(np.uint8).reshape(shape)


def _midpoints(which: Element) -> Array:
    """Return each midpoint of neighbouring values, its FP32 neighbours, and both signs of all."""
    values = np.array(sorted({abs(v) for v in code_values(which) if np.isfinite(v)}))
    middle = ((values[1:] + values[:-1]) / 2).astype(np.float32)
    top = np.float32(which.max)
    points = np.concatenate((middle, [top, top * np.float32(1.0625), top * np.float32(1.125)]))
    points = points.astype(np.float32)
    both = (points, np.nextafter(points, np.float32(0)), np.nextafter(points, np.float32(np.inf)))
    around = np.concatenate(both)
    return np.concatenate((around, -around)).astype(np.float32)


def _cast_cases() -> Iterator[Case]:
    used = {entry.format.element for entry in entries() if not entry.format.is_identity}
    for which in ELEMENTS.values():
        if which not in used:
            continue
        spec = {"element": which.name}
        for name, dtype, x in (
            ("all_bfloat16", "bfloat16", all_values("bfloat16")),
            ("all_float16", "float16", all_values("float16")),
            ("midpoints", "float32", _midpoints(which)),
        ):
            asked = Case(f"casts/{which.name}/{name}", "cast", spec, dtype, (1, x.size), x=x)
            yield _answered(asked)
        codes = np.arange(1 << which.bits, dtype=np.uint8)
        asked = Case(
            f"casts/{which.name}/codes",
            "uncast",
            spec,
            shape=(1, codes.size),
            given={"data": codes},
        )
        yield replace(asked, want={"values": _REFERENCE.decode({"data": codes}, asked)})


def _quantized() -> list[Entry]:
    return [entry for entry in entries() if not entry.format.is_identity]


def _neighbours() -> Iterator[tuple[Entry, Entry]]:
    """Yield pairs of formats: each with the two after it, so that every one is on both sides."""
    all_of_them = _quantized()
    for i, entry in enumerate(all_of_them):
        for step in (1, 3):
            yield entry, all_of_them[(i + step) % len(all_of_them)]


def _hybrid_cases() -> Iterator[Case]:
    pairs = [*((entry, entry) for entry in _quantized()), *_neighbours()]
    for i, (row, col) in enumerate(pairs):
        name = f"{row.name}_{col.name}"
        source, plain = PlaneSpec(row.format), PlaneSpec(col.format)
        # The dtype that the source is rounded to matters: both take turns.
        yield _from_row(source, plain, name, ("bfloat16", "float32")[i % 2])
        transformed = _try(PlaneSpec, col.format, True, DEFAULT_SIGNS) if i % 3 == 0 else None
        if transformed is not None:
            yield _from_row(source, transformed, f"{name}_sr_rht", "bfloat16")


def _from_row(row: PlaneSpec, col: PlaneSpec, name: str, dtype: str) -> Case:
    return _answered(
        Case(
            f"hybrids/{name}/{dtype}/encode",
            "encode",
            describe(col),
            dtype,
            _HYBRID,
            "columnwise",
            matrix("hybrid", _HYBRID),
            seed=_SEEDS[0] if col.stochastic else None,
            stream=1,
            source=describe(row),
        )
    )


def _plane(spec: PlaneSpec, rows: int) -> Buffers:
    x = matrix("gemm", (rows, _INNER))
    case = Case("gemm", "encode", describe(spec), "bfloat16", x.shape, x=x)
    return _REFERENCE.encode(x, case)


def _gemm_case(a: PlaneSpec, b: PlaneSpec, name: str) -> Case:
    given, other = _plane(a, _ROWS), _plane(b, _OTHER_ROWS)
    product, bound = true_product((given, a, _ROWS), (other, b, _OTHER_ROWS), _INNER)
    return Case(
        f"gemm/{name}",
        "gemm",
        describe(a),
        shape=(_ROWS, _INNER),
        given=given,
        want={"product": product, "bound": bound.astype(np.float32)},
        other=(describe(b), (_OTHER_ROWS, _INNER), other),
    )


def _gemm_cases() -> Iterator[Case]:
    for entry in _quantized():
        plain = PlaneSpec(entry.format)
        yield _gemm_case(plain, plain, f"{entry.name}_{entry.name}")
        transformed = _try(PlaneSpec, entry.format, False, DEFAULT_SIGNS)
        if transformed is not None:
            yield _gemm_case(transformed, transformed, f"{entry.name}_rht")
        scaled = _try(PlaneSpec, entry.format, row_scaled=True)
        if scaled is not None:
            yield _gemm_case(scaled, plain, f"{entry.name}_rows")
            yield _gemm_case(scaled, scaled, f"{entry.name}_rows_rows")
    for a, b in _neighbours():
        yield _gemm_case(PlaneSpec(a.format), PlaneSpec(b.format), f"{a.name}_{b.name}")


def build_vectors() -> Iterator[tuple[str, str, list[Case]]]:
    """Yield (name, summary, cases) of every file."""
    yield "casts", "element casts and the values of all codes", list(_cast_cases())
    for entry in _quantized():
        cases = [*_encode_cases(entry), *_codes_case(entry)]
        yield entry.name, entry.summary, cases
    yield "hybrids", "columnwise planes made of a decoded rowwise plane", list(_hybrid_cases())
    yield "gemm", "products of two planes, FP64, and bounds for FP32", list(_gemm_cases())


def write_vectors(folder: Path) -> list[Path]:
    """Write every file into `folder`, which is made if it is not there; return their paths.

    Vector files of formats that no longer exist are left alone.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, summary, cases in build_vectors():
        path = folder / f"{name}.npz"
        write_file(path, summary, cases, f"hybridq {__version__}, backend reference")
        written.append(path)
    return written
