"""The library on CUDA tensors: the CPU's bytes, whichever door they come through."""

from __future__ import annotations

import warnings

import pytest
import torch

import hybridq
import kernel_cases as cases
from gpu_tools import no_waiting, same_storages
from hybridq.kernels import OpQuery
from hybridq.kernels.choice import registry as registry
from tensor_tools import PAIRS

SPECS = {**cases.plain_specs(), **cases.option_specs()}


@pytest.mark.parametrize("name", SPECS)
def test_the_cuda_backend_is_chosen_without_a_word(name) -> None:
    for op in ("encode", "decode", "operand", "amax"):
        query = OpQuery(op, "cuda", torch.bfloat16, SPECS[name])
        backend = registry._backends["cuda"]
        assert backend.answer(query).reason is None, backend.answer(query)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hybridq.quantize(torch.randn(64, 64, device="cuda"), SPECS[name])


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("shape", [(128, 256), (3, 5, 50), (1, 1), (0, 16)], ids=str)
def test_quantize_and_dequantize(name, shape) -> None:
    for dtype in cases.DTYPES:
        x = torch.randn(shape).to(dtype)
        seed = torch.tensor([5])
        want = hybridq.quantize(x, SPECS[name], SPECS[name], seed=seed)
        got = hybridq.quantize(x.cuda(), SPECS[name], SPECS[name], seed=seed.cuda())
        same_storages(got, want)
        cases.same_values(got.dequantize(), want.dequantize(), name)
        for direction in ("rowwise", "columnwise"):
            plane, other = getattr(got, direction), getattr(want, direction)
            cases.same_values(plane.dequantize(), other.dequantize(), f"{name} {direction}")


@pytest.mark.parametrize("pair", sorted(PAIRS))
@pytest.mark.parametrize("special", cases.SPECIALS)
def test_pairs_and_their_parts(pair, special) -> None:
    x = cases.matrix(320, 144, torch.bfloat16, 4, special)
    want = hybridq.quantize(x, **PAIRS[pair])
    got = hybridq.quantize(x.cuda(), **PAIRS[pair])
    same_storages(got, want)
    same_storages(got.to("cpu"), want)
    same_storages(want.to("cuda"), want)
    same_storages(got.clone(), want)
    same_storages(got.t(), want.t())
    for rows in (slice(0, 128), slice(128, 320), slice(5, 77)):
        mine, theirs = got[rows], want[rows]
        if hasattr(mine, "dequantize"):
            mine, theirs = mine.dequantize(), theirs.dequantize()
        cases.same_values(mine.contiguous(), theirs.contiguous(), f"{pair} {rows}")
    cases.same_values(got.dequantize(), want.dequantize(), pair)


@pytest.mark.parametrize("pair", sorted(PAIRS))
def test_writing_into_a_tensor(pair) -> None:
    x, other = torch.randn(2, 96, 64).cuda()
    target = hybridq.quantize(x, **PAIRS[pair])
    target.quantizer.update_quantized(other, target)
    same_storages(target, hybridq.quantize(other.cpu(), **PAIRS[pair]))


def test_seeds_come_from_the_generator_of_the_device() -> None:
    x = torch.randn(64, 128, device="cuda")
    options = {"rowwise": "nvfp4", "stochastic": True}
    torch.cuda.manual_seed(3)
    one, two = hybridq.quantize(x, **options), hybridq.quantize(x, **options)
    torch.cuda.manual_seed(3)
    same_storages(hybridq.quantize(x, **options), one)
    assert not torch.equal(one.rowwise.data, two.rowwise.data)
    torch.cuda.manual_seed(3)
    seed = torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device="cuda")
    same_storages(one, hybridq.quantize(x.cpu(), **options, seed=seed.cpu()))


@pytest.mark.parametrize("name", SPECS)
def test_quantize_and_decode_never_wait_for_the_gpu(name) -> None:
    x = torch.randn(160, 136, device="cuda", dtype=torch.bfloat16)
    hybridq.quantize(x, SPECS[name], SPECS[name]).dequantize()  # what is made once may wait
    with no_waiting():
        made = hybridq.quantize(x, SPECS[name], SPECS[name])
        made.dequantize()
        made.columnwise.dequantize(torch.bfloat16)


def test_tensors_of_another_device_than_the_current_one() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs, got {torch.cuda.device_count()}")
    x = torch.randn(160, 136)
    for name in ("mxfp8", "nvfp4", "fp8_e4m3"):
        want = hybridq.quantize(x, name)
        got = hybridq.quantize(x.to("cuda:1"), name)
        assert torch.cuda.current_device() == 0 and got.device.index == 1
        same_storages(got, want)
        cases.same_values(got.dequantize(), want.dequantize(), name)
    with pytest.raises(ValueError, match="one device"):
        hybridq.gemm(
            hybridq.quantize(x.to("cuda:0"), "mxfp8"), hybridq.quantize(x.to("cuda:1"), "mxfp8")
        )
