"""Launches past Triton's Python: the same kernels, with the arguments that Triton would give them.

No GPU: a driver says that one is there, and what Triton would compile is a note of its calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import triton_tools
from hybridq.formats import PlaneSpec
from hybridq.kernels.choice import BlockSide, GemmArgs, GroupedArgs, Operand, OpQuery, Place
from hybridq.kernels.inputs import Chip
from hybridq.kernels.triton import plan, plan_grouped_block, prepared
from hybridq.kernels.triton.direct import kind_of
from hybridq.kernels.triton.plan_parts import Tiled

pytestmark = pytest.mark.skipif(triton_tools.MISSING is not None, reason=str(triton_tools.MISSING))

#: Of the driver that is not there.
DEVICE = 991
BF16 = torch.bfloat16
#: K in one part, on either side, in several parts; and numbers that are constants to Triton.
SIZES = [(16, 256, 256), (256, 16, 256), (3, 640, 4096), (1, 1, 1)]


class Kernel:
    """What Triton compiled a kernel to."""

    calls: list[tuple[Kernel, tuple[Any, ...]]]

    def __init__(self, calls: list[Any]) -> None:
        self.calls, self.function, self.packed_metadata = calls, 7, (4, 1, 0)

    def run(self, *given: Any) -> None:
        self.calls.append((self, given))

    def launch_metadata(self, *_: Any) -> str:
        return "metadata"


@pytest.fixture
def gpu(monkeypatch) -> Iterator[SimpleNamespace]:
    """A GPU's driver to Triton, on which CPU tensors are; and how often Triton's Python ran."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver, jit

    from hybridq.kernels.triton import launch

    made = SimpleNamespace(calls=[], ordinary=0, launch=launch)

    class Driver:
        def get_current_target(self) -> Any:
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self) -> int:
            return DEVICE

        def get_current_stream(self, device: int) -> int:
            return 0

    run = jit.JITFunction.run

    def ordinary(self: Any, *args: Any, **options: Any) -> Any:
        made.ordinary += 1
        return run(self, *args, **options)

    before = driver._active
    driver.set_active(Driver())  # type: ignore[arg-type]
    monkeypatch.setattr(jit.JITFunction, "run", ordinary)
    for kernel in launch.KERNELS.values():
        assert kernel.device_caches[DEVICE]  # from here on it has a compiler
        monkeypatch.setattr(kernel, "compile", lambda *_, **__: Kernel(made.calls))
    monkeypatch.setattr(launch, "_compiled", {})
    monkeypatch.setattr(launch, "_is_direct", lambda _: not launch.is_watched())
    monkeypatch.setattr(prepared, "is_current", lambda _: True)
    monkeypatch.setattr(plan, "processors", lambda _: 132)
    yield made
    driver._active = before
    for kernel in launch.KERNELS.values():
        kernel.device_caches.pop(DEVICE, None)


def operand(name: str, rows: int, k: int, begin: int = 0) -> Operand:
    """A plane, each buffer so many bytes behind an address that kernels like."""
    spec = PlaneSpec.parse(name)
    buffers = []
    for buffer in spec.buffers(rows, k):
        dtype = buffer.dtype or BF16
        memory = torch.zeros(buffer.numel * dtype.itemsize + 64, dtype=torch.uint8)
        at = -memory.data_ptr() % 32 + begin
        own = memory[at : at + buffer.numel * dtype.itemsize].view(dtype)
        buffers.append(own.view(buffer.shape))
    return Operand(buffers, spec, rows, k)


def product(a: str, b: str, sizes: tuple[int, int, int]) -> prepared.PreparedGemm:
    specs = (PlaneSpec.parse(a), PlaneSpec.parse(b))
    chip = Chip.of("cuda", (9, 0))
    made = prepared.planner(OpQuery("gemm", "cuda", BF16, *specs, "auto", sizes, chip))
    assert made is not None
    return made


def told(
    calls: list[Any], tensors: list[torch.Tensor], result: torch.Tensor
) -> list[tuple[Any, ...]]:
    """What kernels were told, an address as the place of the tensor that it is of."""
    place = {one.data_ptr(): at for at, one in reversed(list(enumerate(tensors)))}
    place[result.data_ptr()] = "result"  # type: ignore[assignment]
    found = []
    for kernel, given in calls:
        head, own = (*given[:6], *given[7:9]), given[9:]  # but for the metadata
        row: list[Any] = [kernel, *head[:6]]
        for one in own:
            address = one.data_ptr() if isinstance(one, torch.Tensor) else one
            if isinstance(address, int) and address > 1 << 20:
                row.append(place.get(address, "parts"))
            else:
                row.append(one)
        found.append(tuple(row))
    return found


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    "sizes", [(16, 256, 256), (256, 16, 256), (3, 640, 4096), (1, 1, 1)], ids=str
)
@pytest.mark.parametrize(
    "names", [("mxfp8", "mxfp8"), ("nvfp4", "mxfp8"), ("fp8_e4m3", "nvfp4"), ("bf16", "nvfp4")]
)
def test_a_product_again_tells_kernels_the_same(gpu, names, sizes, has_bias) -> None:
    m, n, k = sizes
    run = product(*names, sizes)
    seen = []
    for turn in range(3):
        a, b = operand(names[0], m, k), operand(names[1], n, k)
        bias = torch.zeros(n + 64, dtype=BF16)
        bias = bias[-bias.data_ptr() % 32 // 2 :][:n] if has_bias else None
        tensors = [*a.buffers, *b.buffers, *([] if bias is None else [bias])]
        args = GemmArgs(bias, None, BF16, work=Place(torch.zeros(0), 0, 5 if turn == 1 else 0))
        before, calls = gpu.ordinary, len(gpu.calls)
        result = run(a, b, args)
        assert result.shape == (m, n) and result.dtype is BF16
        seen.append(told(gpu.calls[calls:], tensors, result))
        assert (gpu.ordinary == before) == (turn > 0)
        if turn:  # addresses, and nobody is told
            for _, given in gpu.calls[calls:]:
                assert given[3] == (5 if turn == 1 else 0) and given[6:9] == (None, None, None)
                assert not any(isinstance(one, torch.Tensor) for one in given)
    assert len(seen[0]) == (2 if k == 4096 else 1)
    first = [row[:4] + row[5:] for row in seen[0]]
    for again in seen[1:]:  # but for the stream
        assert [row[:4] + row[5:] for row in again] == first


def test_what_differs_is_triton_s_to_decide(gpu) -> None:
    """Other addresses, layouts, results, sizes, and somebody who is told of launches."""
    run = product("mxfp8", "mxfp8", (16, 256, 256))
    args = GemmArgs(None, None, BF16)
    a, b = operand("mxfp8", 16, 256), operand("mxfp8", 256, 256)
    into = torch.zeros(16, 256, dtype=BF16)
    codes = torch.zeros(512, 512, dtype=torch.uint8)[:, :256]  # rows that are further apart
    spread = b._replace(buffers=[codes[:256], b.buffers[1]])
    others = {
        "odd address": (operand("mxfp8", 16, 256, begin=8), b, args),
        "rows apart": (a, spread, args),
        "added": (a, b, args._replace(accumulate_into=into)),
        "dtype": (a, b, args._replace(out_dtype=torch.float32)),
        "bias": (a, b, args._replace(bias=torch.zeros(256))),
        "rows": (operand("mxfp8", 17, 256), b, args),
    }
    for _ in range(2):
        run(a, b, args)
    assert gpu.ordinary == 1
    usual = gpu.calls[-1][0]
    for name, given in others.items():
        gpu.launch._compiled.clear()
        before = gpu.ordinary
        run(*given)
        assert gpu.ordinary == before + 1, name
        # Rows that are further apart by a multiple of 16 are another argument alone.
        assert (gpu.calls[-1][0] is usual) == (name == "rows apart"), name
    from triton import knobs

    heard: list[Any] = []
    knobs.runtime.launch_enter_hook.add(heard.append)
    try:
        before = gpu.ordinary
        run(a, b, args)
        assert gpu.ordinary == before + 1 and gpu.calls[-1][1][6] == "metadata"
    finally:
        knobs.runtime.launch_enter_hook.remove(heard.append)
    before = gpu.ordinary
    run(a, b, args)
    assert gpu.ordinary == before and gpu.calls[-1][0] is usual


def test_any_launch_again_finds_its_kernel(gpu) -> None:
    """Without a prepared product: one kernel for each kind of arguments, as Triton has it."""
    device = torch.device("cpu")
    for rows, k in ((16, 256), (16, 512), (16, 256), (32, 256), (5, 272), (6, 272), (5, 257)):
        a, b = operand("mxfp8", rows, k), operand("nvfp4", 300, k)
        result, launches = plan.plan_gemm(a, b, GemmArgs(None, None, BF16))
        gpu.launch.run(launches, device)
        direct = gpu.calls[-1]
        known = gpu.launch._compiled
        gpu.launch._compiled = {}
        gpu.launch.run(launches, device)  # by Triton
        gpu.launch._compiled = known
        tensors = [*a.buffers, *b.buffers]
        again = told([direct, gpu.calls[-1]], tensors, result)
        assert again[0] == again[1]
    assert gpu.ordinary < 7 + 7  # some were known


def _grouped(tokens: int) -> tuple[torch.Tensor, tuple[Any, ...]]:
    """A product of groups whose matrices are read by tiles."""
    sides = []
    for rows, matrices in ((tokens, 1), (256, 2)):
        codes = torch.zeros(matrices * rows, 256, dtype=torch.uint8)
        scale = torch.zeros(2, -(-matrices * rows // 4) * 4)
        sides.append(BlockSide(codes, scale, "e4m3", rows))
    ends, padded = torch.zeros(2, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    args = GroupedArgs(ends, tokens, padded, None, None, BF16)
    return plan_grouped_block.plan_grouped_block(*sides, args, True)


def test_matrices_that_are_read_by_tiles_are_described_again(gpu) -> None:
    device = torch.device("cpu")
    for turn, tokens in enumerate((48, 48, 64)):
        _, launches = _grouped(tokens)
        gpu.launch.run(launches, device)
        kernel, given = gpu.calls[-1]
        assert gpu.ordinary == 1 and kernel is gpu.calls[0][0]
        order, _ = gpu.launch.names(launches[0].kernel)
        for name, one in zip(order, given[9:], strict=True):
            told_of = launches[0].arguments[name]
            if isinstance(told_of, Tiled):
                assert one.base is told_of.tensor and one.block_shape == list(told_of.block)
                assert one.shape == list(told_of.tensor.shape)
            elif isinstance(told_of, torch.Tensor) and turn:
                assert one == told_of.data_ptr()


def test_names_are_in_the_order_of_the_kernels(gpu) -> None:
    for name, kernel in gpu.launch.KERNELS.items():
        order, count = gpu.launch.names(name)
        assert list(order) == kernel.arg_names and count == len(order) - len(kernel.constexprs)


def test_kinds_are_what_triton_compiles_for(gpu) -> None:
    """Where Triton sees a difference, kinds see one."""
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.jit import native_specialize_impl

    words = torch.zeros(64, dtype=torch.int16)
    words = words[-words.data_ptr() % 32 // 2 :]
    tensors = [
        words,
        words[1:],
        words[8:],
        words.view(torch.uint8),
        torch.nn.Parameter(words.float()),
    ]
    bytes_ = torch.zeros(64, 64, dtype=torch.uint8)
    matrices = [bytes_, bytes_[:32], bytes_.view(torch.float8_e4m3fn), bytes_.view(torch.float32)]
    tiled = [Tiled(one, block) for one in matrices for block in ((16, 16), (32, 16))]
    numbers = [0, 1, 2, 15, 16, 17, 1 << 31, (1 << 31) - 1, (1 << 31) + 16, 1 << 40, (1 << 40) + 1]
    given = [*tensors, *tiled, *numbers, True, False, 1.0, 2.5, None]
    described = [gpu.launch._described(one) if isinstance(one, Tiled) else one for one in given]
    theirs = [native_specialize_impl(CUDABackend, one, False, True, True) for one in described]
    for i, first in enumerate(given):
        for j, second in enumerate(given):
            if theirs[i] != theirs[j]:
                assert kind_of(first) != kind_of(second), (first, second)
