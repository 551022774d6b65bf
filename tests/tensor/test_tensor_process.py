"""Threads, forked children, shared memory and other processes."""

from __future__ import annotations

import multiprocessing
import threading

import pytest
import torch
import torch.multiprocessing as mp

import hybridq
from hybridq import QuantizedTensor
from tensor_tools import PAIRS, same_planes, sharing


def test_shared_memory() -> None:
    for options in PAIRS.values():
        t = hybridq.quantize(torch.randn(16, 64), **options)
        before = t.clone()
        assert not t.is_shared()
        assert t.share_memory_() is t and t.is_shared()
        same_planes(t, before)
        assert sharing(t) == sharing(before)
    model = torch.nn.Linear(64, 16)
    model.weight = torch.nn.Parameter(hybridq.quantize(model.weight.detach(), "mxfp8"))
    assert model.share_memory().weight.is_shared()


def _echo(inbox, outbox) -> None:
    torch.set_num_threads(1)
    t = inbox.get()
    t.add_(1.0)
    outbox.put(t)
    inbox.get()


@pytest.mark.more
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_through_a_queue_the_memory_is_shared(start) -> None:
    context = mp.get_context(start)
    inbox, outbox = context.Queue(), context.Queue()
    child = context.Process(target=_echo, args=(inbox, outbox), daemon=True)
    child.start()
    t = hybridq.quantize(torch.randn(16, 64), "mxfp8", columnwise="nvfp4")
    want = t.quantizer(t.dequantize() + 1.0)
    inbox.put(t)
    back = outbox.get(timeout=120)
    assert isinstance(back, QuantizedTensor) and back.quantizer == t.quantizer
    same_planes(back, want)
    same_planes(t, want)  # the child wrote into the same memory
    inbox.put(None)
    child.join(60)
    assert child.exitcode == 0


def _child(pipe, x, t) -> None:
    made = hybridq.quantize(x, "mxfp8", columnwise="nvfp4")
    torch.set_num_threads(1)  # torch's own threads do not survive a fork; the core's calls do
    product = hybridq.gemm(made, t)
    buffers = [b.numpy() for b in made.tensor_storage.flatten()[0]]
    pipe.send((buffers, product.numpy()))


def test_a_forked_child_quantizes_and_multiplies() -> None:
    """After this process has used its threads: a team from before the fork would hang there."""
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        x = torch.randn(512, 512)
        t = hybridq.quantize(x, "mxfp8", columnwise="nvfp4")
        want = hybridq.gemm(t, t)
        context = multiprocessing.get_context("fork")
        here, there = context.Pipe()
        child = context.Process(target=_child, args=(there, x, t), daemon=True)
        child.start()
        assert here.poll(120), "the child hangs"
        buffers, product = here.recv()
        child.join(60)
        assert child.exitcode == 0
    finally:
        torch.set_num_threads(threads)
    for got, own in zip(buffers, t.tensor_storage.flatten()[0], strict=True):
        assert torch.equal(torch.from_numpy(got), own)
    assert torch.equal(torch.from_numpy(product), want)


def test_threads_quantize_multiply_and_write_at_once() -> None:
    xs = [torch.randn(96, 128) for _ in range(8)]
    names = ["mxfp8", "nvfp4", "fp8_e4m3", "fp8_128x128"]
    want = [_work(x, names[i % 4]) for i, x in enumerate(xs)]
    got: list = [None] * len(xs)
    errors: list[BaseException] = []
    barrier = threading.Barrier(len(xs))

    def run(i: int) -> None:
        try:
            barrier.wait(60)
            for _ in range(20):
                got[i] = _work(xs[i], names[i % 4])
                assert all(torch.equal(a, b) for a, b in zip(got[i], want[i], strict=True))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(xs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not errors and not any(thread.is_alive() for thread in threads)


def _work(x: torch.Tensor, name: str) -> list[torch.Tensor]:
    t = hybridq.quantize(x, name)
    product = hybridq.gemm(t, t)
    t.mul_(2.0)
    return [product, *t.tensor_storage.flatten()[0], t.dequantize_rows([3, 5])]


def test_threads_read_one_tensor() -> None:
    t = hybridq.quantize(torch.randn(96, 128), "nvfp4")
    want = t.dequantize(), hybridq.gemm(t, t)
    results: list = []

    def run() -> None:
        results.extend(
            torch.equal(t.dequantize(), want[0]) and torch.equal(hybridq.gemm(t, t), want[1])
            for _ in range(20)
        )

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert results == [True] * 80
