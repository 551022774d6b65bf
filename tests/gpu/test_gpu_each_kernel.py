"""Each kernel of csrc/cuda: a call that launches it, as the profiler sees, with the CPU's bits.

`make gpu` reads from this file's results which kernels have run on a chip.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import finish_cases
import kernel_cases as cases
import token_row_cases as token_rows
from hybridq import reference
from hybridq.kernels.choice import BlockSide, EncodeRequest, GemmArgs, GroupedArgs, Groups
from hybridq.kernels.cpu.backend import core, core_spec
from hybridq.kernels.cuda.block_product import HOPPER
from hybridq.kernels.ragged import capacity, padded_offsets
from hybridq.kernels.ragged.padded_layout import group_ends
from places import BENCHMARKS
from prologue_cases import check_map, check_map_encode, prologue, source

sys.path.insert(0, str(BENCHMARKS))

from gpu_bench.kernels import kernels_of, native_kernels

Run = Callable[[cases.Kernels], object]
_PLAIN, _OPTIONS = cases.plain_specs(), cases.option_specs()


def _matrix(rows: int = 256, cols: int = 512, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return cases.matrix(rows, cols, dtype, 1, "normal")


def _encode(name: str) -> Run:
    spec = {**_PLAIN, **_OPTIONS}[name]
    return lambda kernels: cases.check_encode(kernels, _matrix(), spec, spec)


def _many(name: str) -> Run:
    spec = _PLAIN[name]
    xs = [_matrix(128 * (1 + i), 512) for i in range(3)]
    return lambda kernels: cases.check_many(kernels, xs, spec, spec)


def _indexed(kernels: cases.Kernels) -> None:
    """Two groups of rows that an index names."""
    x, spec = _matrix(), _PLAIN["mxfp8"]
    index = torch.randint(256, (384,), generator=torch.Generator().manual_seed(1))
    offsets = torch.tensor([130, 384], dtype=torch.int32)
    want = torch.ops.hybridq.encode_ragged(x[index], offsets, spec.text, spec.text)
    starts = kernels.to(padded_offsets(offsets, 384))
    groups = Groups(kernels.to(offsets), starts, capacity(384, 2))
    request = EncodeRequest(row_index=kernels.to(index))
    got = kernels.ops["encode_ragged"](kernels.to(x), groups, spec, spec, request)
    for one, expected in zip(got, want, strict=True):
        cases.assert_same(one, expected, "indexed")


def _amax(name: str, is_transposed: bool, step: int = 1) -> Run:
    def run(kernels: cases.Kernels) -> None:
        x = _matrix()[:, ::step]
        own = x.t() if is_transposed else x
        want = cases.cpu_ops()["amax"](own, _OPTIONS[name])
        there = kernels.to(x)
        got = kernels.ops["amax"](there.t() if is_transposed else there, _OPTIONS[name])
        cases.assert_same(got, want, name)

    return run


def _decode(name: str, op: str, cols: int) -> Run:
    def run(kernels: cases.Kernels) -> None:
        spec = {**_PLAIN, **_OPTIONS}[name]
        x = _matrix(256, cols)
        buffers = cases.cpu_ops()["encode"](x, spec, None, EncodeRequest())
        rest = (spec, *x.shape, torch.bfloat16)
        want = cases.cpu_ops()[op](buffers, *rest)
        got = kernels.ops[op]([kernels.to(buffer) for buffer in buffers], *rest)
        if op == "operand":
            got, want = got[0], want[0]
        cases.same_values(got, want, name)

    return run


def _transpose(cols: int) -> Run:
    def run(kernels: cases.Kernels) -> None:
        data = torch.randint(0, 256, (256, cols), dtype=torch.uint8)
        want = cases.cpu_ops()["transpose"](data, *data.shape, 8)
        got = kernels.ops["transpose"](kernels.to(data), *data.shape, 8)
        cases.assert_same(got, want, "transpose")

    return run


def _round(kernels: cases.Kernels) -> None:
    x, seed = _matrix(dtype=torch.float32), torch.tensor([3])
    rest = (torch.bfloat16, 0, 0, 0)
    want = cases.cpu_ops()["round_stochastic"](x, seed, *rest)
    got = kernels.ops["round_stochastic"](kernels.to(x), kernels.to(seed), *rest)
    cases.same_values(got, want, "round")


def _finish(kernels: cases.Kernels) -> None:
    for case in finish_cases.every_case():
        got = kernels.ops["finish"](*case.on(kernels)[:5])
        cases.same_values(got, case.wanted, case.label)


def _sum_rows(kernels: cases.Kernels) -> None:
    for rows, weights, inverse, _, _, label in token_rows.cases(torch.bfloat16, torch.float32):
        want = cases.cpu_ops()["sum_rows"](rows, weights, inverse, torch.float32)
        given = (kernels.to(one) for one in (rows, weights, inverse))
        cases.same_values(kernels.ops["sum_rows"](*given, torch.float32), want, label)


def _spread_rows(kernels: cases.Kernels) -> None:
    for rows, weights, _, order, grad, label in token_rows.cases(torch.bfloat16, torch.float32):
        given = (grad, rows, weights, order)
        expected = cases.cpu_ops()["spread_rows"](*given, torch.bfloat16)
        there = [kernels.to(one) for one in given]
        got = kernels.ops["spread_rows"](*there, torch.bfloat16)
        for one, want in zip(got, expected, strict=True):
            cases.same_values(one, want, label)


def _module() -> Any:
    """The compiled kernels over pointers: for what the backend has no operation of its own."""
    module = getattr(core, "cuda", None)
    if module is None:
        pytest.skip("this build has no CUDA kernels")
    return module


def _fold(k: int) -> Run:
    def run(kernels: cases.Kernels) -> None:
        expected = getattr(reference, "fold_plane", None)
        if expected is None:
            pytest.skip("the reference has no fold to compare with")
        spec, x, module = _PLAIN["mxfp8"], _matrix(256, k), _module()
        buffers = cases.cpu_ops()["encode"](x, spec, None, EncodeRequest())
        stream = torch.cuda.current_stream().cuda_stream
        for height in (1, 128):
            want = expected(buffers, spec, *x.shape, height)
            data, scale = (kernels.to(buffer) for buffer in buffers)
            codes = torch.empty(256, k, dtype=torch.uint8, device=kernels.device)
            out = torch.empty(256 // height, -(-k // 128), device=kernels.device)
            changed = torch.empty(1, dtype=torch.int64, device=kernels.device)
            addresses = (codes.data_ptr(), out.data_ptr(), *out.stride(), changed.data_ptr())
            module.fold(
                core_spec(spec)[0], data.data_ptr(), scale.data_ptr(), 256, k, height, *addresses,
                stream,
            )  # fmt: skip
            cases.assert_same(codes, want.codes.contiguous(), f"codes, height {height}")
            cases.assert_same(out, want.scale.contiguous(), f"scales, height {height}")
            assert int(changed) == int(want.changed)

    return run


def _swizzle(kernels: cases.Kernels) -> None:
    """The layout that csrc/cuda/swizzle.h describes: written here a second time."""
    module = _module()
    for rows, blocks in ((256, 16), (130, 7), (1, 1), (300, 64)):
        source = torch.randint(0, 256, (rows, blocks), dtype=torch.uint8)
        r, c = torch.meshgrid(torch.arange(rows), torch.arange(blocks), indexing="ij")
        across = -(-blocks // 4)
        place = (r // 128 * across + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4
        want = torch.zeros(-(-rows // 128) * across * 512, dtype=torch.uint8)
        want[place.flatten()] = source.flatten()
        got = torch.full_like(want, 0xA5).to(kernels.device)
        there = source.to(kernels.device)
        stream = torch.cuda.current_stream().cuda_stream
        module.swizzle(there.data_ptr(), rows, blocks, got.data_ptr(), stream)
        cases.assert_same(got, want, f"{rows}x{blocks}")


def _places(kernels: cases.Kernels) -> None:
    """Where groups lie, of ends that rise and of ends that do not."""
    module, tokens = _module(), 700
    for count in (1, 7, 257):
        offsets = torch.randint(-50, 900, (count,), dtype=torch.int32)
        there = kernels.to(offsets)
        ends = torch.empty(count, dtype=torch.int32, device=kernels.device)
        padded = torch.empty(count + 1, dtype=torch.int32, device=kernels.device)
        addresses = ends.data_ptr(), padded.data_ptr()
        stream = torch.cuda.current_stream().cuda_stream
        module.group_places(there.data_ptr(), count, tokens, *addresses, stream)
        cases.assert_same(ends, group_ends(offsets, tokens), f"ends of {count}")
        cases.assert_same(padded, padded_offsets(offsets, tokens), f"padded of {count}")


def _clear(kernels: cases.Kernels) -> None:
    """Rows from the last end on, and no others."""
    for end in (0, 37, 300, -5, 900):
        x = torch.randn(300, 520, generator=torch.Generator().manual_seed(end)).bfloat16()
        got = kernels.to(x)
        kernels.ops["clear_rest"](got, kernels.to(torch.tensor([3, end], dtype=torch.int32)))
        x[max(end, 0) :] = 0
        cases.assert_same(got, x, f"from {end} on")


def _factors(kernels: cases.Kernels) -> None:
    """Two amaxes, each divided by its bound and rounded once."""
    module = _module()
    for pair in torch.tensor([[0.0, 3e-39], [1.0, 448.0], [3.4e38, 896.0]]):
        first, second = (kernels.to(one) for one in pair.split(1))
        out = torch.empty(5, device=kernels.device)
        stream = torch.cuda.current_stream().cuda_stream
        given = first.data_ptr(), 2688.0, second.data_ptr(), 1536.0
        module.two_factors(*given, out.data_ptr(), 4, stream)
        want = pair.double() / torch.tensor([2688.0, 1536.0], dtype=torch.float64)
        cases.assert_same(out[::4], want.float(), str(pair.tolist()))


def _product(kernels: cases.Kernels) -> None:
    """Of codes of small integers, whose sums are exact, with scales of powers of two."""
    if torch.cuda.get_device_capability() != HOPPER:
        pytest.skip("the kernel is for sm_90")
    generator = torch.Generator().manual_seed(5)
    ends, n, k = (130, 130, 300), 132, 400
    sides, values = [], []
    for rows, matrices in ((311, 1), (n, 3)):
        pitch = -(-rows // 4) * 4 * matrices
        whole = torch.randint(-2, 3, (pitch, k), generator=generator).float()
        scale = torch.exp2(torch.randint(-2, 3, (4, pitch), generator=generator).float())
        codes = whole.to(torch.float8_e4m3fn).view(torch.uint8)
        sides.append(BlockSide(kernels.to(codes), kernels.to(scale), "e4m3", rows))
        values.append((whole * scale.t().repeat_interleave(128, 1)[:, :k]).double())
    offsets = kernels.to(torch.tensor(ends, dtype=torch.int32))
    args = GroupedArgs(offsets, 311, None, None, None, torch.float32)
    got = kernels.ops["multiply_blocks"](*sides, args, True)
    want, begin = torch.zeros(311, n), 0
    for group, end in enumerate(ends):
        want[begin:end] = (
            values[0][begin:end] @ values[1][n * group : n * (group + 1)].t()
        ).float()
        begin = end
    cases.assert_same(got, want, "groups")
    pair = GemmArgs(None, None, torch.float32)
    one = sides[1]._replace(codes=sides[1].codes[:n], scale=sides[1].scale[:, :n].contiguous())
    got = kernels.ops["multiply_pair"](sides[0], one, pair)
    cases.assert_same(got, (values[0][:311] @ values[1][:n].t()).float(), "a pair")


def _map(kind: str, name: str = "") -> Run:
    def run(kernels: cases.Kernels) -> None:
        x = source(kind, 256, 512, torch.bfloat16, 1, "normal")
        made, spec = prologue(kind, kind == "LayerNorm", 512), {**_PLAIN, **_OPTIONS}.get(name)
        if spec is not None:
            check_map_encode(kernels, x, made, spec, spec, kind)
        else:
            check_map(kernels, x, made, kind)

    return run


#: Kernel to the check that launches it.
CALLS: dict[str, Run] = {
    "EncodeTile": _encode("mxfp8"),
    "EncodeMany": _many("mxfp8"),
    "EncodeIndexed": _indexed,
    "EncodeMapped": _map("swiglu", "mxfp8"),
    "EncodeGeneralMapped": _map("swiglu", "nvfp4 rows"),
    "AmaxGeneralMapped": _map("LayerNorm", "nvfp4 rows"),
    "NormRows": _map("LayerNorm"),
    "ActivateGroups": _map("gelu"),
    "EncodeGeneral": _encode("mxfp8 sr"),
    "EncodeRowsOnce": _encode("nvfp4 rows"),
    "AmaxAlong": _amax("nvfp4 sr", False),
    "AmaxStrided": _amax("nvfp4 sr", False, step=2),
    "RowAmaxDown": _amax("nvfp4 rows", True),
    "TransformAmaxAlong": _amax("nvfp4 rht", False),
    "TransformAmaxDown": _amax("nvfp4 rht", True),
    "DecodeBits": _decode("mxfp8", "operand", 512),
    "DecodeVector": _decode("mxfp8", "decode", 512),
    "DecodeRotated": _decode("mxfp8 rht", "decode", 512),
    "DecodeGroups": _decode("mxfp8", "decode", 77),
    "TransposeTiles": _transpose(512),
    "TransposeAny": _transpose(77),
    "RoundGroups": _round,
    "SumTokenRows": _sum_rows,
    "SpreadTokenRows": _spread_rows,
    "FinishGroups": _finish,
    "FinishElements": _finish,
    "BlockProduct": _product,
    "FoldAligned": _fold(512),
    "FoldGroups": _fold(200),
    "Swizzle": _swizzle,
    "WriteGroupPlaces": _places,
    "ClearRows": _clear,
    "WriteTwoFactors": _factors,
}


@pytest.mark.parametrize("name", sorted({*CALLS, *native_kernels()}))
def test_this_kernel_runs_and_has_the_bits_of_the_cpu(
    name, kernels, record_property, pytestconfig
) -> None:
    record_property("kernel", name)
    assert name in CALLS, f"{name} has no call here: add one to CALLS"
    run = CALLS[name]
    run(kernels)
    if pytestconfig.getoption("--gpu-no-profiler"):
        return
    launched = kernels_of({name: lambda: run(kernels)})
    if not launched:
        pytest.skip("the bits are right, but torch's profiler sees no kernels on this machine")
    assert name in launched[name], f"launched {sorted(launched[name])}"
