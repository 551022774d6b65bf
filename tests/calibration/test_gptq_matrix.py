"""GPTQ of one matrix: against Optimal Brain Quantization by steps, and plain rounding."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hybridq.calibration.gptq_matrix import Hessian, error_in_output, gptq_plane, inverse_factor
from hybridq.formats import PlaneSpec
from oracle.bridge import assert_bits_equal, decode_plane, encode_plane, oracle_spec, values_of
from oracle.planes import decode, encode, pack_nibbles

SPECS = [
    "nvfp4",
    "nvfp4_16x16",
    "nvfp4;4o6=mse",
    "nvfp4;bound=256;4o6=mae",
    "nvfp4;rows",
    "mxfp4",
    "mxfp8",
    "mxfp8_32x32",
    "mxfp6_e3m2",
    "fp8_e4m3",
    "fp8_1x128",
    "fp8_128x128",
]


def correlated(tokens: int, cols: int, seed: int) -> torch.Tensor:
    """Inputs `[tokens, cols]` of few directions, some columns much larger than the others."""
    generator = torch.Generator().manual_seed(seed)
    rank = max(2, cols // 4)
    mixing = torch.randn(rank, cols, generator=generator)
    x = torch.randn(tokens, rank, generator=generator) @ mixing
    x += 0.1 * torch.randn(tokens, cols, generator=generator)
    return x * torch.exp(torch.randn(cols, generator=generator))


def hessian_of(x: torch.Tensor) -> torch.Tensor:
    made = Hessian(x.shape[1])
    made.add(x)
    return made.matrix


def optimal_brain(w: torch.Tensor, h: np.ndarray, spec: PlaneSpec) -> np.ndarray:
    """Q `[rows, cols]` by OBQ's equations in a fixed order, the inverse Hessian updated explicitly.

    arXiv:2208.11580: a weight p is rounded; the others take `-(w_p - q_p) / [H^-1]_pp * [H^-1]_:,p`
    (equation 7); `H^-1` loses p by one step of Gaussian elimination (equation 4). A block's scale
    is that of its values when its first column is reached. The grid of values that codes have
    comes from the oracle's decoder, and the nearest one is looked for in it.
    """
    own = oracle_spec(spec)
    rows, cols = w.shape
    left = values_of(w).astype(np.float64)
    amax = None
    if spec.needs_amax:
        whole = np.abs(values_of(w))
        amax = whole.max(axis=1) if spec.row_scaled else whole.max()
    width = spec.format.block[1] if spec.format.block else cols
    inverse = np.linalg.inv(h)
    result = np.zeros_like(left)
    num_codes = 1 << spec.format.element.bits
    for column in range(cols):
        if column % width == 0:
            block = left[:, column : column + width].astype(np.float32)
            made = encode(block, own, stat=amax)
            # One column for each code, each under the scale of the block.
            codes = np.arange(num_codes, dtype=np.uint8)[None, :].repeat(rows, 0)
            grids = []
            for code in range(num_codes):
                one = codes[:, code : code + 1]
                data = pack_nibbles(one) if own.element == "e2m1" else one
                grids.append(decode(dict(made, data=data), own, rows, 1)[:, 0])
            grid = np.stack(grids, 1).astype(np.float64)
            grid[~np.isfinite(grid)] = np.nan
        nearest = np.nanargmin(np.abs(grid - left[:, column : column + 1]), axis=1)
        result[:, column] = grid[np.arange(rows), nearest]
        step = (left[:, column] - result[:, column]) / inverse[column, column]
        left -= np.outer(step, inverse[column])
        drop = np.outer(inverse[:, column], inverse[column]) / inverse[column, column]
        inverse = inverse - drop
        inverse[column] = inverse[:, column] = 0.0
    return result


@pytest.mark.parametrize("text", SPECS)
def test_choices_are_those_of_optimal_brain_quantization(text):
    spec = PlaneSpec.parse(text)
    rows, cols = 5, 70  # an odd tail in every format
    w = torch.randn(rows, cols, generator=torch.Generator().manual_seed(1))
    h = hessian_of(correlated(200, cols, 2))
    damped = h + 0.01 * h.diagonal().mean() * torch.eye(cols, dtype=torch.float64)
    plane = gptq_plane(w, h, spec)
    want = optimal_brain(w, damped.numpy(), spec)
    np.testing.assert_array_equal(plane.dequantize().numpy(), want.astype(np.float32))
    assert not np.array_equal(want, values_of(w))


@pytest.mark.thinned(1, few=8)
@pytest.mark.parametrize("text", SPECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_diagonal_hessian_gives_the_bytes_of_plain_rounding(text, dtype):
    spec = PlaneSpec.parse(text)
    w = torch.randn(37, 301, generator=torch.Generator().manual_seed(3)).to(dtype)
    w[3] = 0.0
    w[4, ::3] = -0.0
    w[5, 7] = 1e-30
    for h in (torch.eye(301), torch.diag(torch.arange(301.0)), torch.zeros(301, 301)):
        plane = gptq_plane(w, h.double(), spec)
        for name, want in encode_plane(w, spec).items():
            assert_bits_equal(plane.buffers[name], want, name)


@pytest.mark.parametrize("text", SPECS)
def test_a_plane_is_of_the_formats_shapes_and_decodes_by_every_backend(text, backend):
    spec = PlaneSpec.parse(text)
    for rows, cols in ((1, 1), (3, 33), (0, 16), (4, 0)):
        w = torch.randn(rows, cols)
        plane = gptq_plane(w, hessian_of(correlated(64, cols, 5)), spec)
        wanted = [(b.name, b.shape, b.dtype) for b in spec.buffers(rows, cols)]
        assert [(n, tuple(b.shape), b.dtype) for n, b in plane.buffers.items()] == wanted
        assert decode_plane(plane.buffers, spec, rows, cols).shape == (rows, cols)


@pytest.mark.thinned(1, few=4)
@pytest.mark.parametrize("text", SPECS)
def test_the_error_in_the_output_is_less_than_that_of_plain_rounding(text):
    """Of 8 matrices under correlated inputs, each; on average by a quarter."""
    spec = PlaneSpec.parse(text)
    ratios = []
    for seed in range(8):
        w = torch.randn(16, 128, generator=torch.Generator().manual_seed(seed))
        h = hessian_of(correlated(512, 128, 100 + seed))
        plain = decode_plane(encode_plane(w, spec), spec, 16, 128)
        made = gptq_plane(w, h, spec).dequantize()
        ratios.append(float(error_in_output(w, made, h) / error_in_output(w, plain, h)))
    assert max(ratios) < 1.0, ratios
    assert sum(ratios) / 8 < 0.75, ratios


def test_the_factor_is_that_of_the_inverse():
    h = hessian_of(correlated(300, 40, 7))
    factor = inverse_factor(h, 0.02)
    damped = h + 0.02 * h.diagonal().mean() * torch.eye(40, dtype=torch.float64)
    assert torch.equal(factor, factor.triu())
    inverse = np.linalg.inv(damped.numpy())
    np.testing.assert_allclose((factor.t() @ factor).numpy(), inverse, rtol=1e-9, atol=1e-18)


def test_a_hessian_adds_parts_of_any_shape():
    x = correlated(60, 24, 9)
    parts = Hessian(24)
    parts.add(x[:20].reshape(4, 5, 24))
    parts.add(x[20:].to(torch.float32))
    assert parts.tokens == 60
    exact = 2.0 * x.double().t() @ x.double()
    torch.testing.assert_close(parts.matrix, exact, rtol=1e-5, atol=1e-4)


def test_an_error_of_the_output_is_that_of_the_inputs():
    x, w = correlated(60, 24, 9), torch.randn(7, 24)
    made = w.to(torch.bfloat16)
    want = ((w.double() - made.double()) @ x.double().t()).square().sum()
    torch.testing.assert_close(
        error_in_output(w, made, 2.0 * x.double().t() @ x.double()), want, rtol=1e-9, atol=0.0
    )


def test_a_shared_amax_scales_the_tensor():
    w, spec = torch.randn(4, 64), PlaneSpec.parse("nvfp4")
    shared = torch.tensor([9.0])
    plane = gptq_plane(w, torch.eye(64).double(), spec, amax=shared)
    for name, want in encode_plane(w, spec, stat=shared).items():
        assert_bits_equal(plane.buffers[name], want, name)
    assert plane.amax.data_ptr() != shared.data_ptr()


@pytest.mark.parametrize("text", ["bf16", "nvfp4;sr", "nvfp4;rht"])
def test_specs_without_a_column_order_are_refused(text):
    with pytest.raises(ValueError, match="gptq_plane: the spec must be of a quantized format"):
        gptq_plane(torch.randn(4, 16), torch.eye(16).double(), PlaneSpec.parse(text))


def test_wrong_inputs_are_refused():
    spec, eye = PlaneSpec.parse("nvfp4"), torch.eye(16).double()
    with pytest.raises(ValueError, match=r"hessian \[cols, cols\], got \[4, 16\] and \[8, 8\]"):
        gptq_plane(torch.randn(4, 16), eye[:8, :8], spec)
    with pytest.raises(ValueError, match="weight must be finite"):
        gptq_plane(torch.full((4, 16), float("nan")), eye, spec)
    with pytest.raises(ValueError, match="must be positive definite"):
        gptq_plane(torch.randn(4, 16), -eye, spec)
    with pytest.raises(ValueError, match="inputs must be finite"):
        Hessian(2).add(torch.tensor([[1.0, float("inf")]]))
    with pytest.raises(ValueError, match="inputs must have 2 columns"):
        Hessian(2).add(torch.zeros(3, 4))
