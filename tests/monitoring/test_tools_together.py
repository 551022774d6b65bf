"""Monitors, traces and reports at once: each shows what it shows alone, and leaves nothing."""

from __future__ import annotations

import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import eval_frame

import hybridq
from hybridq import settings
from hybridq._eager import running_eagerly
from hybridq.monitoring import Monitor, MonitorRecord
from hybridq.nn.autograd import unwatched, watch_products
from hybridq.tracing import compare
from rank_runs import needs_gloo


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    stance = eval_frame._stance
    yield
    assert settings.current().watcher is None and not settings.current().watchers
    assert eval_frame._stance is stance and stance.stance == "default"


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = (nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    model: nn.Sequential = hybridq.convert(nn.Sequential(*layers))
    return model


def square(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean()


class Turn:
    """A model in training, one step at a time, each with data of its own."""

    def __init__(self, seed: int = 0) -> None:
        self.model = net(seed)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.data = torch.Generator().manual_seed(seed)
        self.records: list[MonitorRecord] = []

    def monitor(self, every: int) -> Monitor:
        options: Any = {"optimizer": self.optimizer, "layers": None}
        return hybridq.monitor(self.model, every, self.records.append, **options)

    def forward(self) -> torch.Tensor:
        with hybridq.autocast(recipe="mxfp8"):
            x = torch.randn(32, 64, generator=self.data).requires_grad_()
            return square(self.model(x))

    def step(self) -> None:
        self.forward().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def alone(seed: int, every: int, steps: int) -> list[MonitorRecord]:
    """Return what a monitor records of a training beside which nothing runs."""
    turn = Turn(seed)
    with turn.monitor(every):
        for _ in range(steps):
            turn.step()
    return turn.records


@pytest.mark.parametrize(("every", "others"), [(2, 2), (2, 3), (1, 2)])
@pytest.mark.parametrize("is_first_closed_first", [True, False])
def test_two_monitors_in_turn(every: int, others: int, is_first_closed_first: bool) -> None:
    """Two models and their optimizers, as a GAN has them."""
    one, other = Turn(0), Turn(1)
    both = [one.monitor(every), other.monitor(others)]
    for _ in range(6):
        one.step()
        other.step()
    for watch in both if is_first_closed_first else reversed(both):
        watch.close()
    assert one.records == alone(0, every, 6)
    assert other.records == alone(1, others, 6)
    assert len(one.records[0].slots) == 2 * 3 * 3


def test_a_monitor_that_is_closed_within_its_step_leaves_the_other() -> None:
    turn = Turn()
    closed, stays = hybridq.monitor(turn.model, 1), turn.monitor(1)
    loss = turn.forward()
    with pytest.warns(hybridq.HybridQWarning, match="no step was counted"):
        closed.close()
    assert eval_frame._stance.stance == "force_eager"
    loss.backward()
    turn.optimizer.step()
    stays.close()
    assert turn.records == alone(0, 1, 1)


@pytest.mark.parametrize("is_trace_closed_first", [True, False])
def test_a_monitor_beside_a_trace(tmp_path: Path, is_trace_closed_first: bool) -> None:
    turn, single = Turn(), Turn()
    with hybridq.trace(tmp_path / "alone", single.model) as writer:
        for _ in range(4):
            single.step()
            writer.step()
    writer = hybridq.trace(tmp_path / "beside", turn.model)
    watch = turn.monitor(2)
    for _ in range(4):
        turn.step()
        writer.step()
    tools: list[Any] = [writer, watch]
    for tool in tools if is_trace_closed_first else reversed(tools):
        tool.close()
    assert turn.records == alone(0, 2, 4)
    assert (tmp_path / "beside").read_bytes() == (tmp_path / "alone").read_bytes()


def test_a_report_within_a_sampled_step(tmp_path: Path) -> None:
    """Its runs are not those of the training: neither the monitor nor the trace is shown them."""
    turn, batch = Turn(), torch.full((32, 64), 100.0)
    want = hybridq.report(net(), batch, recipe="mxfp8", loss=square, switch=True)
    writer = hybridq.trace(tmp_path / "a", turn.model)
    with turn.monitor(1):
        loss = turn.forward()
        got = hybridq.report(turn.model, batch, recipe="mxfp8", loss=square, switch=True)
        loss.backward()
        turn.optimizer.step()
        writer.step()
    writer.close()
    assert got.slots == want.slots and len(got.slots) > 0
    assert turn.records == alone(0, 1, 1)
    single = Turn()
    with hybridq.trace(tmp_path / "b", single.model) as writer:
        single.step()
        writer.step()
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_report_whose_loop_steps_the_watched_optimizer() -> None:
    """The monitor's step begins inside of the report's run, and ends behind it."""
    turn = Turn()

    def loop(model: nn.Module) -> None:
        square(model(torch.ones(32, 64))).backward()
        turn.optimizer.step()

    watch = turn.monitor(1)
    hybridq.report(turn.model, loop, recipe="mxfp8")
    assert eval_frame._stance.stance == "force_eager"
    turn.step()
    watch.close()
    assert [len(one.slots) for one in turn.records] == [0, 18]


class Counts:
    sees_plain = True

    def __init__(self) -> None:
        self.products = self.gradients = 0

    def __call__(self, product: Any) -> Any:
        self.products += 1

        def count(_: torch.Tensor) -> None:
            self.gradients += 1

        return count


def test_blocks_may_end_in_any_order() -> None:
    layer, seen = hybridq.Linear(32, 32), [Counts() for _ in range(3)]
    blocks = [watch_products(one) for one in seen]

    def run() -> None:
        layer(torch.ones(2, 32)).sum().backward()

    blocks[0].__enter__(), run()
    blocks[1].__enter__(), run()
    with unwatched():
        run()
        blocks[2].__enter__(), run()
        blocks[0].__exit__(None, None, None)
    run()
    blocks[2].__exit__(None, None, None), run()
    blocks[1].__exit__(None, None, None), run()
    assert [one.products for one in seen] == [one.gradients for one in seen] == [2, 3, 2]


def test_the_stance_is_restored_by_the_last_in_any_thread() -> None:
    outer, inner = running_eagerly(), running_eagerly()

    def enter() -> None:
        inner.__enter__()

    with torch.compiler.set_stance("eager_on_recompile"):
        outer.__enter__()
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
        outer.__exit__(None, None, None)
        assert eval_frame._stance.stance == "force_eager"
        inner.__exit__(None, None, None)
        assert eval_frame._stance.stance == "eager_on_recompile"


def test_a_block_may_be_ended_by_another_thread() -> None:
    """The thread whose block it was shows nothing more, and keeps no watcher."""
    turn, closed = Turn(), list[MonitorRecord]()
    watch = hybridq.monitor(turn.model, 1, closed.append, optimizer=turn.optimizer)
    stays = turn.monitor(1)
    seen, block = Counts(), ExitStack()
    block.enter_context(watch_products(seen))
    turn.step()
    for end in (watch.close, block.close):
        thread = threading.Thread(target=end)
        thread.start()
        thread.join()
    held = weakref.ref(seen)
    assert seen.products == seen.gradients == 2
    del seen
    turn.step()
    assert held() is None
    assert len(settings.current().watchers) == 1
    stays.close()
    assert turn.records == alone(0, 1, 2) and closed == turn.records[:1]


def test_a_monitor_that_nobody_closes_says_nothing_as_python_ends() -> None:
    code = (
        "import torch, hybridq\n"
        "import torch._dynamo\n"
        "watch = hybridq.monitor(torch.nn.Linear(4, 4), every=1)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


@needs_gloo
def test_names_of_a_wrapped_model_are_its_own(tmp_path) -> None:
    """DistributedDataParallel puts `module` in front of names, and torch.compile `_orig_mod`."""
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        parallel = nn.parallel.DistributedDataParallel
        torch.manual_seed(0)
        model, x = hybridq.Linear(32, 32), torch.randn(32, 32)
        plain = nn.Sequential(model)
        for number, wrapped in enumerate(
            (plain, parallel(plain), torch.compile(parallel(plain), backend="eager"))
        ):
            optimizer = torch.optim.SGD(plain.parameters(), 0.0)
            records: list = []
            with (
                hybridq.trace(tmp_path / str(number), wrapped) as writer,
                hybridq.monitor(wrapped, optimizer=optimizer, to=records.append, every=1),
            ):
                torch.manual_seed(0)
                with hybridq.autocast(recipe="mxfp8"):
                    plain(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                writer.step()
            assert {one.layer for one in records[0].slots} == {"0"}, number
            if number:
                assert compare(tmp_path / "0", tmp_path / str(number)) is None, number
    finally:
        torch.distributed.destroy_process_group()
