"""The layout rule and what follows from it: transposes, hybrids, derivable planes, shards."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hybridq
from encode_cases import SHAPES, options_of
from hybridq import formats
from hybridq.formats import DEFAULT_SIGNS, PlaneSpec
from oracle.bridge import (
    DTYPES,
    assert_bits_equal,
    assert_planes_equal,
    decode_plane,
    encode_plane,
    encode_planes,
    stat_of,
)
from oracle.samples import ALL_KINDS, sample


@st.composite
def matrices(draw):
    return sample(
        draw(st.sampled_from(ALL_KINDS)),
        draw(SHAPES),
        draw(st.sampled_from(sorted(DTYPES))),
        draw(st.integers(0, 2**32 - 1)),
    )


@given(data=st.data())
def test_columnwise_plane_is_the_rowwise_plane_of_the_transpose(backend, fmt, data):
    """Same spec, same bytes: transform, stochastic stream and offsets included."""
    x = data.draw(matrices())
    spec = data.draw(st.sampled_from(options_of(fmt)))
    options, transposed = {}, {}
    if spec.stochastic:
        row0, col0 = (16 * data.draw(st.integers(0, 9)) for _ in range(2))
        options = {"seed": 3, "stream": 7, "row0": row0, "col0": col0}
        transposed = {"seed": 3, "stream": 7, "row0": col0, "col0": row0}
    if spec.four_over_six and spec.format.is_square:
        return  # decides once, in the order of the rowwise matrix: see the test of derived planes
    columns = encode_plane(x, spec, "columnwise", **options)
    rows = encode_plane(x.t(), spec, "rowwise", **transposed)
    again = encode_plane(x.t().contiguous(), spec, "rowwise", **transposed)
    assert_planes_equal(columns, rows, str(spec))
    assert_planes_equal(again, rows, str(spec))


@given(data=st.data())
def test_derivable_plane_equals_the_derived_one(backend, fmt, data):
    """Square blocks: transposing codes and scales is encoding the transpose."""
    x = data.draw(matrices())
    for spec in options_of(fmt):
        if not spec.is_derivable:
            continue
        row, col = encode_planes(x, spec, spec)
        if spec.format.is_identity:
            assert_bits_equal(row["data"].t(), col["data"], str(spec))
            continue
        if spec.format.element.bits == 4:
            codes = torch.stack([row["data"] & 15, row["data"] >> 4], -1)
            codes = codes.reshape(x.shape[0], 2 * row["data"].shape[1])[:, : x.shape[1]].t()
            if codes.shape[1] % 2:
                codes = torch.nn.functional.pad(codes, (0, 1))
            derived = codes[:, 0::2] | codes[:, 1::2] << 4
        else:
            derived = row["data"].t()
        assert_bits_equal(derived.contiguous(), col["data"], f"{spec} data")
        scale = row["scale"] if spec.format.block is None else row["scale"].t().contiguous()
        assert_bits_equal(scale, col["scale"], f"{spec} scale", any_nan=False)
        if "amax" in row:
            assert_bits_equal(row["amax"], col["amax"], f"{spec} amax", any_nan=False)


def test_square_and_tensor_formats_are_derivable_and_only_they():
    derivable = {name for name in formats.names() if PlaneSpec(formats.format(name)).is_derivable}
    assert derivable == {
        name
        for name in formats.names()
        if (block := formats.format(name).block) is None or block[0] == block[1]
    }
    for name in derivable - {"bf16", "fp16", "fp32", "identity"}:
        fmt = formats.format(name)
        assert not PlaneSpec(fmt, stochastic=True).is_derivable
        if fmt.block is None:
            assert not PlaneSpec(fmt, signs=DEFAULT_SIGNS).is_derivable


def test_hybrid_planes_are_those_of_uniform_tensors(backend, fmt, seed):
    """quantize(x, A, columnwise=B) holds the rowwise plane of A and the columnwise one of B."""
    x = sample("normal", (48, 80), "bfloat16", seed)
    rowwise = hybridq.quantize(x, fmt).rowwise
    for other in formats.names():
        hybrid = hybridq.quantize(x, fmt, columnwise=other)
        for plane, uniform in (
            (hybrid.rowwise, rowwise),
            (hybrid.columnwise, hybridq.quantize(x, other).columnwise),
        ):
            assert plane.spec == uniform.spec
            assert_planes_equal(plane.buffers, uniform.buffers, f"{fmt} {other} {plane.spec}")


def test_quantized_tensor_holds_the_ops_planes(backend, fmt, seed):
    """The public function adds nothing to the op's bytes, and decodes as the op does."""
    x = sample("normal", (48, 80), "bfloat16", seed)
    tensor = hybridq.quantize(x, fmt)
    for plane, direction in ((tensor.rowwise, "rowwise"), (tensor.columnwise, "columnwise")):
        want = encode_plane(x, plane.spec, direction)
        assert_planes_equal(plane.buffers, want, direction)
    decoded = decode_plane(tensor.rowwise.buffers, tensor.rowwise.spec, *x.shape, x.dtype)
    assert_bits_equal(tensor.dequantize(), decoded)


def shard_step(spec: PlaneSpec, direction: str) -> tuple[int, int]:
    """The smallest (row, column) steps of X at which a plane may be cut into whole bytes."""
    height, width = spec.format.block or (1, 1)
    if spec.signs is not None:
        width = max(width, 16)
    if spec.format.element is not None and spec.format.element.bits == 4:
        width = max(width, 2)
    return (height, width) if direction == "rowwise" else (width, height)


@pytest.mark.thinned(1, few=25)
@given(data=st.data())
def test_shards_encode_to_shards_of_the_whole(backend, fmt, direction, data):
    """With its offsets and the whole's amax, an aligned shard has the whole's bytes."""
    spec = data.draw(st.sampled_from(options_of(fmt)))
    x = data.draw(matrices())
    step = shard_step(spec, direction)
    row0, col0 = (
        data.draw(st.integers(0, size // unit)) * unit
        for size, unit in zip(x.shape, step, strict=True)
    )
    # A shard ends at a block's border or where the matrix ends.
    row1, col1 = (
        min(size, start + data.draw(st.integers(0, size // unit + 1)) * unit)
        for size, unit, start in zip(x.shape, step, (row0, col0), strict=True)
    )
    shard = x[row0:row1, col0:col1]
    options = {"seed": 11, "stream": 2} if spec.stochastic else {}
    whole = encode_plane(x, spec, direction, **options)
    if spec.needs_amax:
        amax = torch.ops.hybridq.amax(x, str(spec), direction)
        if spec.row_scaled:
            amax = amax[row0:row1] if direction == "rowwise" else amax[col0:col1]
        options["stat"] = amax
    part = encode_plane(shard, spec, direction, row0=row0, col0=col0, **options)
    if direction == "columnwise":
        row0, row1, col0, col1 = col0, col1, row0, row1
    k0, k1 = col0, spec.padded(col1)
    height, width = spec.format.block or (1, 1)
    per_byte = 1
    if spec.format.element is not None and spec.format.element.bits == 4:
        per_byte = 2
    data_part = whole["data"][row0:row1, k0 // per_byte : -(-k1 // per_byte)]
    if row1 <= row0 or col1 <= col0:
        assert part["data"].numel() == 0
        return
    assert_bits_equal(part["data"], data_part.contiguous(), f"{spec} data")
    if "scale" not in whole:
        return
    if spec.format.block is None:
        assert_bits_equal(part["scale"], whole["scale"], f"{spec} scale", any_nan=False)
        return
    scale = whole["scale"][row0 // height : -(-row1 // height), k0 // width : -(-k1 // width)]
    assert_bits_equal(part["scale"], scale.contiguous(), f"{spec} scale", any_nan=False)
    if "amax" in whole:
        amax = whole["amax"][row0:row1] if spec.row_scaled else whole["amax"]
        assert_bits_equal(part["amax"], amax, f"{spec} amax", any_nan=False)


def test_stochastic_shards_of_one_value_tile_the_whole(backend, seed):
    """Odd cuts, too: per-tensor FP8 may be cut anywhere, the bytes come from the coordinates."""
    x = sample("normal", (37, 53), "float32", seed)
    for name in ("fp8_e4m3", "fp8_e5m2"):
        spec = PlaneSpec(formats.format(name), stochastic=True)
        amax = stat_of(x.abs().max().item())
        whole = encode_plane(x, spec, seed=seed)["data"]
        for row0, col0 in ((0, 0), (5, 7), (11, 17), (36, 52)):
            part = encode_plane(x[row0:, col0:], spec, seed=seed, stat=amax, row0=row0, col0=col0)
            assert_bits_equal(part["data"], whole[row0:, col0:].contiguous(), name)


def test_transform_uses_its_signs(backend, seed):
    """Other signs, other planes; and decoding undoes exactly the plane's own."""
    x = sample("normal", (32, 64), "bfloat16", seed)
    spec = PlaneSpec(formats.format("mxfp8"), signs=DEFAULT_SIGNS)
    other = replace(spec, signs=DEFAULT_SIGNS ^ 1)
    mine, theirs = encode_plane(x, spec), encode_plane(x, other)
    assert not torch.equal(mine["data"], theirs["data"])
    for plane, own in ((mine, spec), (theirs, other)):
        error = (decode_plane(plane, own, 32, 64) - x.float()).norm() / x.float().norm()
        assert error < 0.05  # E4M3 keeps 2^-4 of a value at worst, 0.03 in the mean
    crossed = (decode_plane(mine, other, 32, 64) - x.float()).norm() / x.float().norm()
    assert crossed > 0.3


@pytest.mark.parametrize("name", ["fp8_e4m3", "nvfp4_16x16"])
def test_columns_of_decoded_rows_have_their_own_scale(name: str) -> None:
    """Decoded values have another amax, by a rounding: the planes share nothing then."""
    quantizer = hybridq.quantizer(name, True, columnwise_source="rowwise_dequantized")
    differ = 0
    for seed in range(60):
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(seed))
        t = quantizer(x)
        seen = hybridq.quantizer(name, True)(t.rowwise.dequantize(torch.float32)).columnwise
        for part, buffer in t.columnwise.buffers.items():
            assert torch.equal(buffer, seen.buffers[part]), (seed, part)
            differ += part != "data" and not torch.equal(buffer.t(), t.rowwise.buffers[part])
    assert differ
