"""Kernels that one call of the core runs: they write what each writes alone."""

from __future__ import annotations

import pytest
import torch

from hybridq import PlaneSpec
from hybridq.kernels.cpu import core
from hybridq.kernels.cpu.backend import core_spec, encoder

pytestmark = pytest.mark.skipif(core is None, reason="the compiled core is missing")


def _alone(x, spec, is_col):
    from hybridq.kernels.choice import EncodeRequest

    pair = ("", spec.text) if is_col else (spec.text, "")
    return encoder(*((None, spec) if is_col else (spec, None)), x.dtype)(x, EncodeRequest(*pair))


@pytest.mark.parametrize("is_col", [False, True])
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "nvfp4_16x16", "fp8_e4m3", "fp8_128x128"])
def test_steps_write_what_kernels_write_alone(name, is_col) -> None:
    """Encode, decode and transpose, at other bases in each run."""
    spec = PlaneSpec.parse(name).resolve(torch.bfloat16)
    x = torch.randn(70, 48, dtype=torch.bfloat16)
    wanted = _alone(x, spec, is_col)
    rows, cols = x.shape[::-1] if is_col else x.shape
    native, steps = core_spec(spec)[0], core.Steps()
    data, scale, amax = ((0, 64 * 1024 * n) for n in range(3))
    has_amax = len(wanted) > 2
    own = (data, scale, amax if has_amax else None)
    steps.encode(native, is_col, "bfloat16", *x.shape, *x.stride(), (1, 0), *own, None)
    steps.decode(native, "bfloat16", rows, cols, *own, (2, 128))
    bits = spec.format.element.bits
    steps.transpose(rows, cols, bits, data, (3, 0))
    packed = (cols, -(-rows // 2)) if bits == 4 else (cols, rows)
    for _ in range(2):
        memory = torch.full((3 * 64 * 1024,), 0xA5, dtype=torch.uint8)
        decoded = torch.zeros(64 + rows * cols, dtype=torch.bfloat16)
        flipped = torch.zeros(packed, dtype=torch.uint8)
        steps.run([one.data_ptr() for one in (memory, x, decoded, flipped)], 1)
        for (_, start), buffer in zip((data, scale, amax), wanted, strict=False):
            found = memory[start : start + buffer.nbytes]
            assert torch.equal(found, buffer.reshape(-1).view(torch.uint8))
        values = torch.ops.hybridq.decode(wanted, spec.text, rows, cols, torch.bfloat16)
        assert torch.equal(decoded[64:].view(rows, cols), values)
        codes = wanted[0].view(torch.uint8)
        assert torch.equal(flipped, torch.ops.hybridq.transpose(codes, rows, cols, bits))


def test_what_steps_refuse() -> None:
    spec, steps = core_spec(PlaneSpec.parse("mxfp8").resolve(torch.float32))[0], core.Steps()
    places = ((0, 0), (1, 0), (2, 0), None, None)
    random = core_spec(PlaneSpec.parse("mxfp8;sr"))[0]
    with pytest.raises(ValueError, match="must round to nearest"):
        steps.encode(random, False, "float32", 2, 32, 32, 1, *places)
    with pytest.raises(ValueError, match="rows and cols must be >= 0"):
        steps.encode(spec, False, "float32", -2, 32, 32, 1, *places)
    with pytest.raises(ValueError, match="float64"):
        steps.encode(spec, False, "float64", 2, 32, 32, 1, *places)
    with pytest.raises(ValueError, match="bits must be 4, 8, 16 or 32, got 3"):
        steps.transpose(2, 2, 3, (0, 0), (1, 0))
    with pytest.raises(ValueError, match="must be a base and an offset >= 0, got -1 and 0"):
        steps.transpose(2, 2, 8, (-1, 0), (1, 0))
    steps.encode(spec, False, "float32", 2, 32, 32, 1, *places)
    with pytest.raises(ValueError, match="as many bases as steps name must be given, got 2 of 3"):
        steps.run([1, 1], 1)
    with pytest.raises(ValueError, match="threads must be >= 1, got 0"):
        steps.run([1, 1, 1], 0)
    with pytest.raises(ValueError, match="x must not be null"):
        steps.run([0, 64, 64], 1)
