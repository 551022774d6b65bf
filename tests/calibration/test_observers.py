"""Observers against NumPy: every granularity, and errors of the library's own encode."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn

import hybridq
from hybridq.calibration import MSE, Max, Observer, Percentile

SHAPES = [(7, 20), (1, 20), (64, 20)]


def matrices(dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    """Values over many powers of two, with zeros and one huge outlier."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for rows, cols in SHAPES:
        x = torch.randn(rows, cols, generator=generator)
        x *= 2.0 ** torch.randint(-30, 8, (rows, cols), generator=generator)
        x[0, ::5] = 0
        made.append(x.to(dtype))
    made[-1][5, 3] = 1e5
    return made


def seen(observer: Observer, data: list[torch.Tensor]) -> torch.Tensor | None:
    running = observer.start()
    for one in data:
        running(one)
    return running.amax()


def samples(data: list[torch.Tensor], granularity: str, block: int) -> list[np.ndarray]:
    """The magnitudes of each group, in FP64."""
    x = np.abs(np.concatenate([one.double().numpy() for one in data]))
    if granularity == "tensor":
        return [x.ravel()]
    if granularity == "token":
        return [x.max(1)]
    width = 1 if granularity == "channel" else block
    return [x[:, at : at + width].ravel() for at in range(0, x.shape[1], width)]


def nearest_rank(values: np.ndarray, percent: float) -> float:
    ordered = np.sort(values)
    return ordered[max(math.ceil(round(len(ordered) * percent / 100, 9)), 1) - 1]


GRANULARITIES = [("tensor", 0), ("token", 0), ("channel", 0), ("block", 8), ("block", 20)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("granularity", "block"), GRANULARITIES)
def test_max(granularity: str, block: int, dtype: torch.dtype) -> None:
    data = matrices(dtype)
    got = seen(Max(granularity, block), data)
    want = [one.max() for one in samples(data, granularity, block)]
    assert got.dtype == torch.float32
    assert got.double().reshape(-1).tolist() == want
    assert got.dim() == (granularity in ("channel", "block"))


@pytest.mark.parametrize("percent", [100, 99.9, 90, 50, 1e-6])
@pytest.mark.parametrize(("granularity", "block"), GRANULARITIES)
def test_percentiles_of_bf16_are_exact(granularity: str, block: int, percent: float) -> None:
    data = matrices(torch.bfloat16)
    got = seen(Percentile(granularity, block, percent, bits=7), data)
    want = [nearest_rank(one, percent) for one in samples(data, granularity, block)]
    assert got.double().reshape(-1).tolist() == want


@pytest.mark.parametrize("bits", [None, 0, 3, 10])
@pytest.mark.parametrize(("granularity", "block"), GRANULARITIES)
def test_percentiles_are_as_accurate_as_they_say(granularity, block, bits) -> None:
    data = matrices(torch.float32)
    for percent in (99, 60):
        observer = Percentile(granularity, block, percent, bits)
        got = seen(observer, data).double().reshape(-1).tolist()
        for value, own in zip(got, samples(data, granularity, block), strict=True):
            want = nearest_rank(own, percent)
            assert want <= value < want * (1 + 2.0**-observer.mantissa_bits) or value == want == 0
            assert value <= own.max()


def test_a_histogram_does_not_grow_with_the_data() -> None:
    running = Percentile().start()
    data = matrices(torch.float32)
    for one in data:
        running(one)
    size = running.counts.numel()
    for _ in range(50):
        for one in data:
            running(one)
    assert running.counts.numel() == size <= 1 << 15
    assert int(running.counts.sum()) == 51 * sum(one.numel() for one in data)


def test_small_magnitudes_have_bins() -> None:
    tiny = torch.tensor([[0.0, 1e-45, -(2.0**-130), 3e38, torch.finfo(torch.float32).max]])
    assert seen(Percentile(percent=20), [tiny]) == 0
    assert 0 < seen(Percentile(percent=40), [tiny]) <= 2.0**-133
    assert seen(Percentile(percent=60), [tiny]) == 2.0**-130
    assert seen(Percentile(percent=100), [tiny]) == torch.finfo(torch.float32).max


@pytest.mark.parametrize("observer", [Max(), Max("block", 8), Percentile("channel"), Percentile()])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_so(observer: Observer, value: float) -> None:
    x = torch.ones(4, 20)
    x[2, 17] = value
    assert not seen(observer, [torch.ones(4, 20), x, torch.ones(4, 20)]).isfinite().all()


def e4m3_error(x: np.ndarray, clip: float) -> float:
    """Squared errors of FP8 with one scale of the tensor: `448 / clip`, in FP32 steps."""
    scale = np.float32(448.0) / np.float32(clip)
    codes = np.clip(x.astype(np.float32) * scale, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    back = codes.astype(np.float32) * np.float32(1.0 / scale)
    return float(((x - back.astype(np.float64)) ** 2).sum())


def test_mse_is_the_best_of_its_clips() -> None:
    generator = torch.Generator().manual_seed(0)
    data = [torch.randn(48, 64, generator=generator) for _ in range(3)]
    data[0][0, 0] = 25.0  # worth clipping where there are few large values
    ratios = tuple(i / 16 for i in range(1, 17))
    running = MSE("fp8_e4m3", ratios).start()
    for again in (True, False):
        for one in data:
            running(one)
        assert running.begins_again() == again
    x = np.concatenate([one.double().numpy() for one in data])
    clips = [float(np.float32(25.0 * one)) for one in ratios]
    errors = [e4m3_error(x, clip) for clip in clips]
    got = float(running.amax())
    assert got in clips
    assert errors[clips.index(got)] <= min(errors) * (1 + 1e-6)
    assert max(errors) > 1.01 * min(errors)


@pytest.mark.parametrize("name", ["nvfp4", "fp8_e4m3", "fp8_e5m2"])
def test_mse_takes_the_librarys_own_encode(name: str) -> None:
    torch.manual_seed(0)
    x, ratios = torch.randn(32, 64) ** 5, (1.0, 0.7, 0.4, 0.1)
    running = MSE(name, ratios).start()
    running(x)
    assert running.begins_again()
    running(x)
    errors = []
    for ratio in ratios:
        amax = (x.abs().max().double() * ratio).float().reshape(1)
        made = torch.ops.hybridq.encode(x, name, "", amax)
        back = torch.ops.hybridq.decode(made, name, *x.shape, torch.float32)
        errors.append(float((x.double() - back.double()).square().sum()))
    assert len(set(errors)) > 2, "clips must differ"
    best = ratios[errors.index(min(errors))]
    assert running.amax() == (x.abs().max().double() * best).float()


def test_mse_in_a_pass() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    data = [torch.randn(16, 32) for _ in range(2)]
    got = hybridq.calibrate(net, data, "nvfp4", observer={"input": "mse", "weight": "mse"})
    running = MSE("nvfp4").start()
    for _ in range(2):
        for one in data:
            running(one)
        running.begins_again()
    assert got.amax("0", "input") == running.amax()
    assert running.amax() < max(one.abs().max() for one in data), "nothing was clipped"
    assert int(got.tokens["0"]) == 32 and got.batches == 2
    assert got.amax("0", "weight") <= net[0].weight.abs().max()
    # A format without an amax of the tensor clips nothing.
    plain = hybridq.calibrate(net, data, "mxfp8", observer="mse")
    assert plain.amax("0", "input") == max(one.abs().max() for one in data)
    with pytest.raises(ValueError, match=r"MSE: a format must be known, got none"):
        hybridq.calibrate(net, data, observer="mse")
    with pytest.raises(ValueError, match=r"observer of input reads data twice, .*got generator"):
        hybridq.calibrate(net, (one for one in data), "nvfp4", observer="mse")


def test_granularities_in_a_pass() -> None:
    torch.manual_seed(0)
    net, data = nn.Sequential(nn.Linear(20, 8)), [torch.randn(3, 20) for _ in range(2)]
    observers = {"input": Max("channel"), "weight": Max("block", 8)}
    found = hybridq.calibrate(net, data, observer=observers)
    assert torch.equal(found.amax("0", "input"), torch.cat(data).abs().amax(0))
    assert found.amax("0", "weight").shape == (3,)
    assert found.observers == {"input": "max per channel", "weight": "max per block of 8"}
    with pytest.raises(ValueError, match="observers must be the same"):
        found.merge(hybridq.calibrate(net, data))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Max("chanel"), "Max: granularity must be one of .* did you mean 'channel'"),
        (lambda: Max("block"), "Max: block must be a positive number of channels"),
        (lambda: Max(block=8), "and 0 for others, got 8 for 'tensor'"),
        (lambda: Percentile(percent=0), "percent must be above 0 and at most 100, got 0"),
        (lambda: Percentile(bits=16), "bits must be 0 to 15, got 16"),
        (lambda: MSE(ratios=(1.5,)), "ratios must be above 0 and at most 1"),
        (lambda: hybridq.calibrate(nn.Linear(8, 8), [], observer="maxi"), "did you mean 'max'"),
        (lambda: hybridq.calibrate(nn.Linear(8, 8), [], slots=["inputs"]), "mean 'input'"),
    ],
)
def test_what_is_no_observer(make, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()
