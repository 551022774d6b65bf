"""How the benchmarks measure, on a CPU: timing, budget, cases that fail, the profiler's events."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

from places import BENCHMARKS

sys.path.insert(0, str(BENCHMARKS))

from gpu_bench import kernels, runner, timing
from gpu_bench.case import Case
from gpu_bench.predict import predict

import gpu

# --- timing


def test_buffers_rotate_beyond_the_cache() -> None:
    assert timing.rotations(1 << 30, 60 << 20) == 1
    assert timing.rotations(60 << 20, 60 << 20) == 4
    assert timing.rotations(1, 60 << 20) == 8  # no more: small cases are launches anyway
    assert timing.rotations(0, 0) == 1


def test_ratios_are_taken_round_by_round() -> None:
    ours = timing.Sample((1.0, 10.0, 2.0))
    copy = timing.Sample((2.0, 10.0, 6.0))
    assert ours.ratio(copy) == 2.0
    assert (ours.median, ours.low, ours.high) == (2.0, 1.0, 10.0)


def test_the_host_timer_counts_its_clock_and_leaves_the_first_round_out() -> None:
    now = [0.0]

    def work(seconds: float):
        def run() -> None:
            now[0] += seconds

        return run

    found = timing.HostTimer(lambda: now[0]).measure({"a": [work(1e-6)] * 4, "b": [work(5e-6)]}, 3)
    assert found["a"].rounds == pytest.approx((1.0, 1.0, 1.0))
    assert found["a"].ratio(found["b"]) == pytest.approx(5.0)


class _Device:
    """A GPU whose queue runs in order, beside a host that needs time to fill it."""

    def __init__(self, host_s: float, is_synchronous: bool = False) -> None:
        self.host = self.end = 0.0  # now, and when the queue is empty
        self.host_s, self.is_synchronous = host_s, is_synchronous
        self.spins: list[float] = []

    def queue(self, seconds: float) -> None:
        self.host += self.host_s
        self.end = max(self.end, self.host) + seconds
        if self.is_synchronous:
            self.host = self.end

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        device = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                self.at = 0.0

            def record(self) -> None:
                self.at = max(device.end, device.host)

            def query(self) -> bool:
                return device.host >= self.at

            def elapsed_time(self, other: Event) -> float:
                return 1e3 * (other.at - self.at)

            def synchronize(self) -> None:
                device.host = max(device.host, self.at)

        def spin(cycles: int) -> None:
            device.spins.append(cycles / 1e9)
            device.end = max(device.end, device.host) + cycles / 1e9

        def wait() -> None:
            device.host = max(device.host, device.end)

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "_sleep", spin)
        monkeypatch.setattr(torch.cuda, "synchronize", wait)
        monkeypatch.setattr(timing.time, "perf_counter", lambda: device.host)


@pytest.mark.parametrize("host_us", [1.0, 500.0])
def test_the_gpu_timer_measures_the_device_however_slow_the_host(monkeypatch, host_us) -> None:
    device = _Device(host_us * 1e-6)
    device.install(monkeypatch)
    cases = {"a": [lambda: device.queue(20e-6)] * 3, "b": [lambda: device.queue(5e-6)] * 3}
    found = timing.GpuTimer().measure(cases, 25)
    assert len(found["a"].rounds) == 25
    assert found["a"].rounds == pytest.approx([20.0] * 25)
    assert found["b"].ratio(found["a"]) == pytest.approx(4.0)
    assert not found["a"].host_limited


def test_a_call_that_waits_for_the_gpu_is_marked(monkeypatch) -> None:
    device = _Device(1e-6, is_synchronous=True)
    device.install(monkeypatch)
    found = timing.GpuTimer().measure({"a": [lambda: device.queue(20e-6)]}, 2)
    assert found["a"].host_limited
    assert len(device.spins) >= 2 + 3  # tried again, with longer spins
    assert device.spins[-1] > device.spins[-2]


def test_a_budget_ends_and_its_parts_with_it() -> None:
    now = [100.0]
    budget = timing.Budget(10.0, lambda: now[0])
    part = budget.part(0.5)
    now[0] += 4
    assert budget.left == 6.0 and part.left == 1.0 and not part.is_over
    now[0] += 1
    assert part.is_over and not budget.is_over
    assert not timing.Budget(None).part(0.1).is_over


# --- runner


def _runner(**rest) -> runner.Runner:
    bench = gpu.dry_bench()
    return runner.Runner(bench, timing.HostTimer(), 2, {}, lambda text: None, **rest)


def _case(name: str, make, **rest) -> Case:
    return Case("cast", name, (4, 4), make, **rest)


def test_a_case_that_raises_costs_no_other_and_is_a_failure() -> None:
    def broken(i: int):
        raise ValueError("no such thing")

    def too_large(i: int):
        raise torch.OutOfMemoryError("no memory")

    run = _runner()
    fine = _case("fine", lambda i: lambda: torch.ones(3), baseline="copy", nbytes=64)
    run.run([_case("broken", broken), _case("large", too_large), fine], timing.Budget(None))
    assert [case["name"] for case in run.cases] == ["fine"]
    assert run.cases[0]["ratio"] > 0 and run.cases[0]["nbytes"] == 64
    assert [case["reason"] for case in run.left_out] == [
        "failed: ValueError: no such thing",
        "not enough memory",
    ]
    assert [case["name"] for case in run.failures] == ["broken"]
    run = _runner()
    run.run([replace(_case("other", broken), section="peer")], timing.Budget(None))
    assert run.left_out and not run.failures


def test_after_an_illegal_access_nothing_more_is_tried(monkeypatch) -> None:
    run = _runner()
    monkeypatch.setattr(run, "_is_alive", lambda: False)

    def broken(i: int):
        raise RuntimeError("an illegal memory access was encountered")

    run.run([_case("broken", broken), _case("next", lambda i: int)], timing.Budget(None))
    assert [c["reason"][:6] for c in run.left_out] == ["failed", "the GP"] and not run.cases
    run.free()


def test_without_time_cases_are_named_and_nothing_fails() -> None:
    run = _runner()
    run.run([_case("late", lambda i: lambda: None)], timing.Budget(0.0))
    assert run.left_out[0]["reason"] == "no time left" and not run.failures and not run.cases


def test_a_copy_moves_the_bytes_that_the_case_needs() -> None:
    run = _runner()
    for copy in run._copies(4096, 3):
        copy()
    arena = run._arena
    assert arena.numel() == 3 * 4096
    for part in arena.reshape(3, 2, 2048):
        assert torch.equal(part[0], part[1])


# --- kernels


def test_the_profilers_events_are_split_at_the_markers() -> None:
    events = [
        ("spin_kernel(long)", 0.0, 1.0),
        ("void hybridq::device::cuda::AmaxAlong<3, false>(AmaxArgs)", 1.0, 20.0),
        ("Memset (Device)", 3.0, 5.0),
        ("spin_kernel(long)", 9.0, 1.0),
        ("void hybridq::device::cuda::EncodeTile<A, B>(TileArgs)", 10.0, 75.0),
    ]
    known = {"AmaxAlong", "EncodeTile"}
    found = kernels.split(reversed(events), ["amax", "encode"], known)
    assert found == {"amax": {"AmaxAlong": 0.8, "other": 0.2}, "encode": {"EncodeTile": 1.0}}
    assert kernels.split(events, ["one", "two", "three"], known) == {}


# --- predictions


def test_decoded_groups_are_predicted_by_what_they_move() -> None:
    """8 groups of 2048 tokens, 4096 x 4096, on an H200: 720 us of product, the rest is bytes."""

    def time(name: str) -> float:
        shape = (8, 16384, 4096, 4096)
        case = Case("grouped", name, shape, lambda i: None, flops=2 * 16384 * 4096 * 4096)
        found = predict(case, "NVIDIA H200").time_us
        assert found is not None
        return found

    product = 2 * 16384 * 4096**2 / 989.5e6 / 0.79
    tokens, stack, rate = 16384 * 4096, 8 * 4096**2, 0.9 * 4.8e6
    assert time("bf16 rows") == pytest.approx(product)
    rows = 3 * (tokens + stack) + 4 * tokens + 4 * tokens
    assert time("nvfp4 x nvfp4 rows") == pytest.approx(product + rows / rate)
    assert time("bf16 x mxfp8 rows") == pytest.approx(product + (3 * stack + 4 * tokens) / rate)
    wgrad = 3 * 2 * tokens + 4 * tokens
    assert time("nvfp4 wgrad") == pytest.approx(product + wgrad / rate)
