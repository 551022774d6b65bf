"""Between torch tensors and the oracle: specs, values, buffers and their comparison.

This is the only module of the oracle that knows hybridq's records; it reads their fields.
"""

from __future__ import annotations

import numpy as np
import torch

from hybridq.formats import PlaneSpec

from .planes import OracleSpec, encode

BUFFER_NAMES = ("data", "scale", "amax")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_IDENTITY = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def oracle_spec(spec: PlaneSpec, dtype: torch.dtype = torch.float32) -> OracleSpec:
    """The oracle's own spec; `dtype` decides what the open identity format stores."""
    fmt = spec.format
    return OracleSpec(
        element=fmt.element.name if fmt.element is not None else _IDENTITY[dtype],
        block=fmt.block,
        rule=fmt.rule,
        power_of_two=fmt.power_of_two,
        eps=fmt.eps,
        stochastic=spec.stochastic,
        signs=spec.signs,
        tensor_bound=spec.tensor_bound,
        four_over_six=spec.four_over_six,
        row_scaled=spec.row_scaled,
    )


def values_of(x: torch.Tensor) -> np.ndarray:
    """float32 values of a tensor of any floating dtype (subnormals kept)."""
    return x.detach().to(torch.float32).contiguous().numpy()


def expected(
    x: torch.Tensor,
    spec: PlaneSpec,
    direction: str = "rowwise",
    *,
    stat: float | np.ndarray | None = None,
    seed: int = 0,
    row0: int = 0,
    col0: int = 0,
    stream: int | None = None,
) -> dict[str, np.ndarray]:
    """The oracle's buffers of one plane of `x`; row0 and col0 place `x` in the whole tensor."""
    values = values_of(x)
    offsets = (row0, col0)
    if direction == "columnwise":
        values, offsets = values.T, (col0, row0)
    if stream is None:
        stream = int(direction == "columnwise")
    return encode(
        values,
        oracle_spec(spec, x.dtype),
        dtype=NAMES[x.dtype],
        stat=stat,
        seed=seed,
        row0=offsets[0],
        k0=offsets[1],
        stream=stream,
        is_columnwise=direction == "columnwise",
    )


def encode_planes(
    x: torch.Tensor, row: PlaneSpec | None, col: PlaneSpec | None = None, **options
) -> tuple[dict[str, torch.Tensor] | None, dict[str, torch.Tensor] | None]:
    """Both planes of `x` as `{buffer name: tensor}`, made by the op of the backend in force."""
    seed = options.pop("seed", None)
    if seed is not None and not isinstance(seed, torch.Tensor):
        seed = torch.tensor([seed], dtype=torch.int64)
    flat = list(torch.ops.hybridq.encode(x, str(row or ""), str(col or ""), seed=seed, **options))
    planes = []
    for spec in (row, col):
        if spec is None:
            planes.append(None)
            continue
        names = [buffer.name for buffer in spec.format.buffers(1, 1)]
        planes.append({name: flat.pop(0) for name in names})
    if flat:
        raise AssertionError(f"encode returned {len(flat)} buffers too many")
    return planes[0], planes[1]


def encode_plane(x: torch.Tensor, spec: PlaneSpec, direction: str = "rowwise", **options):
    """The buffers of one plane; `stat` and `stream` are those of that plane."""
    side = "row" if direction == "rowwise" else "col"
    for name in ("stat", "stream"):
        if name in options:
            options[f"{side}_{name}"] = options.pop(name)
    if direction == "rowwise":
        return encode_planes(x, spec, None, **options)[0]
    return encode_planes(x, None, spec, **options)[1]


def decode_plane(
    buffers: dict[str, torch.Tensor],
    spec: PlaneSpec,
    rows: int,
    k: int,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """[rows, k] of the plane's own matrix, by the op of the backend in force."""
    ordered = [buffers[name] for name in BUFFER_NAMES if name in buffers]
    return torch.ops.hybridq.decode(ordered, str(spec), rows, k, dtype)


def stat_of(value: float) -> torch.Tensor:
    """An amax given from outside, as ops take it."""
    return torch.tensor([value], dtype=torch.float32)


def _comparable(array: np.ndarray | torch.Tensor, one_nan: bool) -> np.ndarray:
    """Bits; if `one_nan`, with every NaN that of docs/reference/numerics.md, "One NaN"."""
    if isinstance(array, torch.Tensor):
        array = values_of(array) if array.is_floating_point() else array.numpy()
    if array.dtype == np.uint8:
        return array
    array = np.ascontiguousarray(array, dtype=np.float32)
    bits = array.view(np.uint32).copy()
    if one_nan:
        bits[np.isnan(array)] = 0x7FC00000
    return bits


def assert_bits_equal(got, want, what: str = "values", any_nan: bool = True) -> None:
    """Same shape and same bits, signs of zeros included.

    What is expected may be computed with any NaN. So may what is tested, unless `any_nan` is False:
    for scales and amaxes, which have one.
    """
    got_bits, want_bits = _comparable(got, any_nan), _comparable(want, True)
    if got_bits.shape != want_bits.shape:
        raise AssertionError(f"{what}: shape {got_bits.shape}, expected {want_bits.shape}")
    if np.array_equal(got_bits, want_bits):
        return
    places = np.argwhere(got_bits != want_bits)
    first = tuple(int(i) for i in places[0])
    raise AssertionError(
        f"{what}: {len(places)} of {got_bits.size} differ, first at {first}: "
        f"{int(got_bits[first]):#x}, expected {int(want_bits[first]):#x}"
    )


def assert_planes_equal(got: dict, want: dict, what: str = "plane") -> None:
    """Every buffer of two planes, bit for bit."""
    if sorted(got) != sorted(want):
        raise AssertionError(f"{what}: buffers {sorted(got)}, expected {sorted(want)}")
    for name in want:
        # Data is codes, which are bytes, or in an identity plane what torch's cast gives.
        assert_bits_equal(got[name], want[name], f"{what}.{name}", any_nan=name == "data")
