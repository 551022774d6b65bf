"""Statistics of slots against NumPy in FP64, on tensors whose errors are known."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import hybridq
from hybridq.direction import COLUMNWISE, ROWWISE
from hybridq.formats import PlaneSpec
from hybridq.recipes import bind, get
from hybridq.report.measure import effective_scales
from hybridq.report.precision import OUTLIER, SlotStatistics, measure_plane, measure_slot


def oracle(x: torch.Tensor, y: torch.Tensor) -> dict[str, float]:
    """Errors of y against x, by NumPy."""
    want, got = x.double().numpy(), y.double().numpy()
    magnitude = np.abs(want)
    bulk = (
        magnitude <= OUTLIER * np.sort(magnitude[magnitude > 0])[(np.sum(magnitude > 0) - 1) // 2]
    )
    noise = (got - want) ** 2
    return {
        "relative_error": math.sqrt(noise.sum() / (want**2).sum()),
        "bulk_error": math.sqrt(noise[bulk].sum() / (want[bulk] ** 2).sum()),
        "snr_db": 10 * math.log10((want**2).sum() / noise.sum()),
        "underflow_share": float(((want != 0) & (got == 0)).sum() / (want != 0).sum()),
        "outlier_share": float((~bulk).mean()),
        "amax": float(magnitude.max()),
    }


def spoiled(rows: int, cols: int) -> torch.Tensor:
    """A matrix with outliers, zeros, and values of many magnitudes."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(rows, cols, generator=generator)
    x *= torch.exp2(torch.randint(-12, 3, x.shape, generator=generator).float())
    x[0, :3] = torch.tensor([4000.0, -2500.0, 0.0])
    return x


@pytest.mark.parametrize("fmt", ["fp8", "mxfp8", "nvfp4", "fp8_128x128", "mxfp4"])
def test_statistics_are_those_of_numpy(fmt: str) -> None:
    x = spoiled(70, 100)
    tensor = hybridq.quantize(x, fmt, columnwise=fmt)
    for plane in tensor.tensor_storage.planes:
        found = measure_plane(x, plane)
        for name, value in oracle(x, plane.dequantize()).items():
            assert getattr(found, name) == pytest.approx(value, rel=1e-9), (plane.direction, name)
        assert (found.values, found.calls, found.bad) == (x.numel(), 1, 0)


def test_errors_are_those_of_torchs_own_cast() -> None:
    """FP8 with one scale for the tensor, without hybridq: E4M3 of `x * 448 / amax`."""
    x = spoiled(32, 64)
    scale = torch.tensor(448.0) / x.abs().max()
    y = (x * scale).to(torch.float8_e4m3fn).float() * (1.0 / scale)
    plan = bind(get("fp8_current")).input
    for found in measure_slot(x, plan, "input").values():
        for name, value in oracle(x, y).items():
            assert getattr(found, name) == pytest.approx(value, rel=1e-6), name
        exponent = math.floor(math.log2(1.0 / float(scale)))
        assert dict(found.scales) == {exponent: 1}


def test_scales_have_the_factor_of_the_second_level() -> None:
    """A block of NVFP4 whose largest value is 6 * 2^k has codes in units of 2^k."""
    x = torch.tensor([[6.0] * 16 + [0.75] * 16 + [0.0] * 16])
    plane = hybridq.quantize(x, "nvfp4").rowwise
    found = measure_plane(x, plane)
    assert found.relative_error < 1e-6  # the factor is an FP32 number
    assert found.scales[0] == 1 and found.scales[-3] == 1
    view = hybridq.show(hybridq.quantize(x, "nvfp4")).planes[0].scales
    assert view.largest == pytest.approx(1.0, rel=1e-6)


def test_saturation_is_what_lies_beyond_the_largest_code() -> None:
    """A plane whose scale knew of 7 alone: 64 values of 100 lie beyond, 448 of 1 are exact."""
    x = torch.ones(8, 64)
    x[:, :8] = 100.0
    found = measure_plane(x, hybridq.quantize(x.clamp(max=7.0), "fp8").rowwise)
    assert found.saturation_share == 64 / 512
    want = math.sqrt(64 * 93**2 / (64 * 100**2 + 448))
    assert found.relative_error == pytest.approx(want, rel=1e-6)
    assert found.underflow_share == 0.0


@pytest.mark.parametrize(
    ("spec", "limit", "share"),
    [
        ("e2m1/1x32/e8m0/floor/mxfp4", 7.0, (0.005, 0.1)),  # 6, and half the step from 4
        ("e4m3/1x32/e8m0/floor/mxfp8", 464.0, (0.001, 0.1)),
        ("e5m2/1x32/e8m0/floor/mxfp8", 61440.0, (0.001, 0.1)),
        ("nvfp4", 7.0, (0.0, 0.0)),  # scales are rounded by a sixteenth at most
    ],
)
def test_values_that_rounding_alone_moves_are_not_cut(spec: str, limit: float, share) -> None:
    """The oracle: a value over its block's scale, against where codes of more range would begin."""
    x = torch.randn(256, 128, generator=torch.Generator().manual_seed(0))
    x[0] = x[0].abs().amax()  # nothing is cut where all are the amax
    plane = hybridq.Quantizer(PlaneSpec.parse(spec), None)(x).rowwise
    scales = effective_scales(plane).double()
    scales = scales.repeat_interleave(x.shape[1] // scales.shape[1], 1)
    found = measure_plane(x, plane)
    assert found.saturated == int((x.double().abs() / scales > limit * (1 + 2.0**-21)).sum())
    assert share[0] <= found.saturation_share <= share[1]


def test_what_a_rounding_of_its_scale_misses_was_not_cut() -> None:
    """Values that are all the amax; and codes behind an NVFP4 scale of zero, which are lost."""
    for value in (1.0, 3.3, 0.1):
        x = torch.where(torch.rand(64, 64) < 0.5, -value, value)
        for fmt in ("nvfp4", "fp8", "fp8_1x128", "mxfp8"):
            found = measure_plane(x, hybridq.quantize(x, fmt).rowwise)
            assert found.saturation_share == 0.0, (fmt, value)
    x[0, 0] = 1e8
    found = measure_plane(x, hybridq.quantize(x, "nvfp4").rowwise)
    assert found.underflow_share == (64 * 64 - 1) / 64**2 and found.saturation_share == 0.0


def test_sums_of_parts_are_those_of_the_whole() -> None:
    x = spoiled(64, 64)
    plan = bind(get("mxfp8")).grad_output
    whole = measure_slot(x, plan, "grad_output", [ROWWISE])[ROWWISE]
    parts = [measure_slot(one, plan, "grad_output", [ROWWISE])[ROWWISE] for one in x.split(32)]
    both = parts[0] + parts[1]
    assert both.noise == pytest.approx(whole.noise, rel=1e-12)
    assert (both.scales, both.underflows, both.calls) == (whole.scales, whole.underflows, 2)
    assert both.amax == whole.amax
    nothing = SlotStatistics()
    assert nothing + both == both and nothing.relative_error == 0.0


def test_what_is_not_finite_is_counted_apart() -> None:
    x = torch.ones(32, 64)
    x[3, 5], x[4, 40] = math.nan, math.inf
    found = measure_slot(x, bind(get("mxfp8")).input, "input")
    for direction in (ROWWISE, COLUMNWISE):
        assert found[direction].bad_inputs == 2 and found[direction].severity == math.inf
        assert found[direction].values + found[direction].bad == x.numel()


def test_nothing_is_drawn_for_stochastic_planes() -> None:
    x, plan = torch.randn(32, 32), bind(get("nvfp4")).grad_output
    torch.manual_seed(3)
    first = measure_slot(x, plan, "grad_output")
    state = torch.random.get_rng_state()
    assert first == measure_slot(x, plan, "grad_output")
    torch.manual_seed(3)
    assert torch.equal(state, torch.random.get_rng_state())


def test_a_weight_that_is_held_as_planes_loses_nothing_more() -> None:
    """Encoding what a plane decodes to need not give its codes: the report shows the plane."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 96, dtype=torch.bfloat16)
    model = hybridq.convert(torch.nn.Sequential(layer), least_width=0)
    model = hybridq.quantize_model(model, "mxfp8")
    again = hybridq.quantize(model[0].weight.dequantize(), "mxfp8")
    assert not torch.equal(again.rowwise.data, model[0].weight.rowwise.data)
    found = hybridq.report(model, torch.randn(8, 64).bfloat16(), ["mxfp8"], backward=False)
    rows = {(row.tensor, row.in_run): row.statistics.relative_error for row in found.slots}
    assert rows["weight", True] == 0.0
    assert rows["input", True] > 0.0
