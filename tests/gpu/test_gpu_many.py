"""Many tensors in one launch on a GPU: the CPU's bits, no waiting, graphs, the public door."""

from __future__ import annotations

import pytest
import torch

import hybridq
import kernel_cases as cases
from gpu_tools import no_waiting, same_storages
from tensor_tools import PAIRS

ALL = {**cases.plain_specs(), **cases.option_specs()}


@pytest.mark.parametrize("name", cases.MANY)
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_weights_formats(kernels, name, dtype) -> None:
    row, col = cases.many_specs(name)
    for i in range(3):
        cases.check_many(kernels, cases.mixed_list(dtype, 20 * i), row, col)
    aligned = [
        cases.matrix(*shape, dtype, i, cases.SPECIALS[i % 5])
        for i, shape in enumerate((*cases.ALIGNED, (512, 640), (1024, 256), (48, 2048)))
    ]
    cases.check_many(kernels, aligned * 11, row, col)  # more than one table


@pytest.mark.parametrize("name", ALL)
def test_every_format_and_option(kernels, name) -> None:
    xs = cases.mixed_list(torch.bfloat16, 2)
    cases.check_many(kernels, xs, ALL[name], ALL[name], row_stream=3, col_stream=9)


@pytest.mark.parametrize("name", cases.pairs())
def test_hybrid_pairs(kernels, name) -> None:
    cases.check_many(kernels, cases.mixed_list(torch.bfloat16, 3), *cases.pairs()[name])


@pytest.mark.parametrize("gives", [(True, True), (True, False), (False, True)])
def test_amaxes_may_be_given(kernels, gives) -> None:
    for row, col in ("nvfp4", "nvfp4"), ("fp8_e4m3", "nvfp4_16x16"), ("mxfp8", "nvfp4"):
        xs = cases.mixed_list(torch.bfloat16, 5)
        cases.check_many(kernels, xs, ALL[row], ALL[col], gives)


@pytest.mark.parametrize("pair", sorted(PAIRS))
def test_the_public_door(pair) -> None:
    quantizer = hybridq.quantizer(**PAIRS[pair])
    tensors = [torch.randn(shape) for shape in ((64, 64), (3, 32, 40), (0, 16), (7,), (256, 512))]
    there = [tensor.cuda() for tensor in tensors]
    made = hybridq.multi_tensor_quantize(there, quantizer)
    for tensor, one in zip(tensors, made, strict=True):
        assert one.device.type == "cuda"
        same_storages(one, quantizer(tensor))


def test_nothing_waits_for_the_gpu() -> None:
    tensors = [torch.randn(64 + 16 * i, 128, device="cuda") for i in range(60)]
    tensors.append(torch.randn(7, 33, device="cuda"))
    quantizers = [hybridq.quantizer(**PAIRS[pair]) for pair in sorted(PAIRS)]
    hybridq.multi_tensor_quantize(tensors, quantizers[0])
    with no_waiting():
        for quantizer in quantizers:
            hybridq.multi_tensor_quantize(tensors, quantizer)


@pytest.mark.parametrize("name", ["mxfp8 both", "nvfp4 both", "fp8_e4m3 both", "mxfp8 | nvfp4"])
def test_a_captured_launch_has_its_table(name) -> None:
    """Replayed long after the arguments of the call are gone, with new values."""
    row, col = (str(spec) for spec in cases.many_specs(name))
    xs = [torch.randn(64, 32 + 8 * i, device="cuda") for i in range(60)]
    xs.append(torch.randn(7, 33, device="cuda"))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.ops.hybridq.encode_many(xs, row, col)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = torch.ops.hybridq.encode_many(xs, row, col)
    for _ in range(2):
        for x in xs:
            x.copy_(torch.randn_like(x))
        graph.replay()
        want = torch.ops.hybridq.encode_many([x.cpu() for x in xs], row, col)
        for i, (one, other) in enumerate(zip(made, want, strict=True)):
            cases.assert_same(one, other, f"buffer {i}")


def test_compiled_code_has_eager_bits() -> None:
    torch._dynamo.reset()
    quantizer = hybridq.quantizer("mxfp8", "nvfp4")
    tensors = [torch.randn(64, 96, device="cuda") for _ in range(5)]

    def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
        return [t.dequantize() for t in hybridq.multi_tensor_quantize(list(tensors), quantizer)]

    compiled = torch.compile(run, fullgraph=True)
    for got, want in zip(compiled(*tensors), run(*tensors), strict=True):
        assert torch.equal(got, want)


def test_seeds_come_from_the_generator_as_single_calls_draw_them() -> None:
    quantizer = hybridq.NVFP4Quantizer(stochastic_rounding=True)
    tensors = [torch.randn(64, 96, device="cuda") for _ in range(4)]
    torch.cuda.manual_seed(4)
    made = hybridq.multi_tensor_quantize(tensors, quantizer)
    torch.cuda.manual_seed(4)
    for one, tensor in zip(made, tensors, strict=True):
        same_storages(one, quantizer(tensor))


def test_tensors_on_two_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs, got {torch.cuda.device_count()}")
    tensors = [torch.randn(64, 96, device=f"cuda:{i % 2}") for i in range(6)]
    made = hybridq.multi_tensor_quantize(tensors, hybridq.NVFP4Quantizer())
    for one, tensor in zip(made, tensors, strict=True):
        assert one.device == tensor.device
        same_storages(one, hybridq.NVFP4Quantizer()(tensor.cpu()))
