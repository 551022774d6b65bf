"""decode: every backend equals the oracle bit for bit, for planes made by the oracle and for
planes that no encoder would make."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hybridq
from encode_cases import SHAPES, options_of
from hybridq import formats
from hybridq.formats import PlaneSpec
from oracle import decode as oracle_decode
from oracle import operand as oracle_operand
from oracle import round_to
from oracle.bridge import (
    DTYPES,
    NAMES,
    assert_bits_equal,
    decode_plane,
    expected,
    oracle_spec,
    stat_of,
)
from oracle.samples import ALL_KINDS, sample


def to_torch(buffers: dict, spec: PlaneSpec, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The oracle's buffers as an op takes them; identity values back in their dtype."""
    planes = {name: torch.from_numpy(np.ascontiguousarray(b)) for name, b in buffers.items()}
    if spec.format.is_identity:
        stored = spec.format.storage_dtype or dtype
        planes["data"] = planes["data"].to(stored)
    return planes


def check(buffers: dict, spec: PlaneSpec, rows: int, k: int, source: torch.dtype) -> None:
    planes = to_torch(buffers, spec, source)
    for name, dtype in DTYPES.items():
        got = decode_plane(planes, spec, rows, k, dtype)
        assert got.dtype == dtype and got.is_contiguous()
        want = oracle_decode(buffers, oracle_spec(spec, source), rows, k, name)
        assert_bits_equal(got, want, f"{spec} [{rows}, {k}] to {name}")


@given(data=st.data())
def test_backend_equals_oracle(backend, fmt, direction, data):
    spec = data.draw(st.sampled_from(options_of(fmt)))
    shape = data.draw(SHAPES)
    dtype = data.draw(st.sampled_from(sorted(DTYPES)))
    kind = data.draw(st.sampled_from(ALL_KINDS))
    x = sample(kind, shape, dtype, data.draw(st.integers(0, 2**32 - 1)))
    rows, k = shape if direction == "rowwise" else shape[::-1]
    check(expected(x, spec, direction, seed=5), spec, rows, k, x.dtype)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_backend_equals_oracle_for_every_kind(backend, fmt, kind, seed):
    for spec in options_of(fmt):
        if not spec.stochastic:
            x = sample(kind, (35, 70), "float32", seed)
            check(expected(x, spec), spec, 35, 70, x.dtype)


@pytest.mark.thinned(1)
@pytest.mark.parametrize("shape", [(40, 70), (129, 257), (1, 1), (0, 33), (33, 0)])
def test_any_bytes_decode(backend, fmt, shape, seed):
    """Uniformly random codes and scales: NaN codes, inf, zero scales and overflow included."""
    rng = np.random.default_rng(seed)
    for spec in options_of(fmt):
        if spec.stochastic:
            continue
        buffers = {}
        for buffer in spec.resolve(torch.float32).buffers(*shape):
            if buffer.dtype == torch.uint8:
                buffers[buffer.name] = rng.integers(0, 256, buffer.shape).astype(np.uint8)
            else:
                bits = rng.integers(0, 2**31, buffer.shape).astype(np.uint32)
                values = bits.view(np.float32)
                if spec.format.is_identity:
                    values = sample("bits", shape, buffer.dtype, seed).float().numpy()
                buffers[buffer.name] = values
        if "amax" in buffers:
            buffers["amax"] = rng.choice([1.0, 1e-38, 3e38], buffers["amax"].shape)
            buffers["amax"] = buffers["amax"].astype(np.float32)
        element = spec.format.element
        if element is not None and element.bits == 4 and spec.padded(shape[1]) % 2:
            buffers["data"][:, -1] &= 15  # the high nibble of an odd tail is 0
        check(buffers, spec, *shape, torch.float32)


def test_one_rounding_at_the_end(backend):
    """FP32 product first: 9 * 0.0390625 rounded once, not scale rounded, then product."""
    spec = PlaneSpec(formats.format("fp8_e4m3"))
    scale = np.float32(0.1)
    for code in range(0x7F):
        plane = {"data": torch.tensor([[code]], dtype=torch.uint8), "scale": stat_of(scale)}
        value = reference_value(code, scale)
        for dtype in (torch.bfloat16, torch.float16):
            got = decode_plane(plane, spec, 1, 1, dtype)
            assert_bits_equal(got, torch.tensor([[value]]).to(dtype), f"code {code}")


def reference_value(code: int, scale: np.float32) -> float:
    exponent, mantissa = code >> 3, code & 7
    value = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
    return float(np.float32(value) * scale)


def outside_bf16(values: np.ndarray) -> bool:
    """Whether a non-zero value has left BF16's normal range, above or below; NaN does not count."""
    magnitude = np.abs(values)
    above = magnitude > np.float32(torch.finfo(torch.bfloat16).max)
    below = (magnitude > 0) & (magnitude < np.float32(2.0**-126))
    return bool((above | below).any())


@pytest.mark.thinned(2)
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_operand_of_a_gemm_equals_oracle(backend, fmt, kind, seed):
    """code * block scale in BF16 and FP32, no factor, transform left in place; and the flag."""
    from hybridq.kernels.choice import registry as registry

    if formats.format(fmt).is_identity:
        return  # an identity plane is its own operand
    (operand,) = (b.ops["operand"] for b in registry.backends() if b.name == backend)
    for spec in options_of(fmt):
        if spec.stochastic:
            continue
        x = sample(kind, (35, 70), "float32", seed)
        buffers = expected(x, spec)
        want, _ = oracle_operand(buffers, oracle_spec(spec), 35, 70)
        ordered = list(to_torch(buffers, spec, x.dtype).values())
        for dtype in (torch.bfloat16, torch.float32):
            got, is_outside = operand(ordered, spec, 35, 70, dtype)
            assert got.dtype == dtype
            assert_bits_equal(got, round_to(want, NAMES[dtype]), f"{spec} {dtype}")
            assert is_outside == outside_bf16(want), f"{spec} {dtype}: flag {is_outside}"


def test_backends_agree_on_larger_planes(fmt, direction, seed):
    from declared import BACKENDS
    from oracle.bridge import encode_plane

    x = sample("heavy", (129, 391), "bfloat16", seed)
    rows, k = x.shape if direction == "rowwise" else x.shape[::-1]
    for spec in options_of(fmt):
        if spec.stochastic:
            continue
        with hybridq.backend("reference"):
            plane = encode_plane(x, spec, direction)
            want = {dtype: decode_plane(plane, spec, rows, k, dtype) for dtype in NAMES}
        for name in BACKENDS:
            with hybridq.backend(name):
                for dtype in NAMES:
                    got = decode_plane(plane, spec, rows, k, dtype)
                    assert_bits_equal(got, want[dtype], f"{name} {spec} {dtype}")
