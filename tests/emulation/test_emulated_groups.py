"""Planes of groups as their products take them, in the emulator: the bits of what was made before.

Before, tokens and matrices were encoded in planes of their own, stacked, folded, and their scales
laid down: each by an operation that other tests hold to the reference.
"""

from __future__ import annotations

import pytest
import torch

import emulated
import kernel_cases as cases
from hybridq.formats import PlaneSpec
from hybridq.kernels.choice import ALIGNMENT, EncodeRequest, Place
from hybridq.kernels.folded_backend import _encoded
from hybridq.kernels.ragged import capacity, group_ends, padded_offsets
from ragged_cases import as_groups

MODULE = emulated.load()
if MODULE is None:
    pytest.skip("the emulated kernels are not built (make emulation)", allow_module_level=True)

BACKEND = emulated.make_backend(MODULE)
PLAIN = cases.plain_specs()
#: The specs of a grouped product's planes: of tokens, and of matrices.
TOKENS = ["mxfp8", "mxfp8_e5m2", "fp8_1x128", "mxfp4"]
STACKS = ["mxfp8", "fp8_128x128", "fp8_e4m3", "nvfp4_16x16", "nvfp4", "fp8_1x128", "mxfp8_32x32"]
ENDS = {
    "even": [64, 128, 192],
    "ragged": [0, 37, 37, 150, 165],
    "wrong": [70, 50, 400, -3],
    "none": [0, 0],
}


@pytest.fixture(autouse=True)
def _random_order(seed: int):
    MODULE.set_seed(seed)


def _offsets(name: str) -> tuple[torch.Tensor, int]:
    ends = ENDS[name]
    return torch.tensor(ends, dtype=torch.int32), 192 if name == "even" else 165


@pytest.mark.parametrize("count", [1, 2, 7, 255, 256, 257, 700])
def test_one_kernel_says_where_groups_lie(count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    for least, most in ((0, 300), (-50, 2000), (0, 1)):
        offsets = torch.randint(least, most, (count,), generator=generator, dtype=torch.int32)
        if least == 0:
            offsets = offsets.cumsum(0, dtype=torch.int32)
        tokens = max(int(offsets.max()) - 5, 0)
        found = BACKEND.group_encoder(None, None, torch.bfloat16).places(offsets, tokens, 0)
        cases.assert_same(found.ends, group_ends(offsets, tokens), f"ends of {count}")
        cases.assert_same(found.padded, padded_offsets(offsets, tokens), f"padded of {count}")
        assert found.columns == capacity(tokens, count)


def _as_taken(buffers: list[torch.Tensor], own: PlaneSpec, rows: int, cols: int):
    """Return codes and scales of a plane as a product takes them: folded, if it folds."""
    if own.format.folded is None:
        return buffers
    made = BACKEND.ops["fold"](buffers, own, rows, cols, 1)
    return [made.codes, made.scale]


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("name", TOKENS)
def test_tokens_as_products_take_them(name: str, ends: str, dtype: torch.dtype) -> None:
    (offsets, tokens), cols = _offsets(ends), 144
    groups, own = as_groups(offsets, tokens), PLAIN[name]
    spec = _encoded(own)
    index = torch.randint(0, 90, (tokens,), generator=torch.Generator().manual_seed(3))
    for with_col, row_index in ((True, None), (True, index), (False, None), (False, index)):
        x = cases.matrix(90 if row_index is not None else tokens, cols, dtype, 2, "normal")
        request = EncodeRequest(row_stream=2, col_stream=3, row_index=row_index)
        encoder = BACKEND.group_encoder(spec, spec if with_col else None, dtype)
        room = encoder.token_room(tokens, cols, offsets.shape[0])
        memory = torch.full((room + 2 * ALIGNMENT,), 0xA5, dtype=torch.uint8)
        got = encoder.tokens(x, groups, request, Place(memory, ALIGNMENT, 0))
        if got is None:  # no kernel reads such rows by an index
            assert row_index is not None and name == "mxfp8_e5m2"
            continue
        moved = x if row_index is None else x[row_index]
        plain = request._replace(row_index=None)
        rows = BACKEND.ops["encode"](moved, own, None, plain)
        want = _as_taken(rows, own, tokens, cols)
        if with_col:
            columns = BACKEND.ops["encode_ragged"](moved, groups, None, own, plain)
            want += _as_taken(columns, own, cols, groups.columns)
        assert len(got) == len(want) == (4 if with_col else 2)
        for j, (mine, theirs) in enumerate(zip(got, want, strict=True)):
            cases.assert_same(mine.contiguous(), theirs.contiguous(), f"{name}: buffer {j}")
            if mine.dtype is torch.float32 and spec != own:  # one column of scales after another
                assert mine.stride(0) == 1 and mine.stride(1) % 4 == 0 and mine.data_ptr() % 16 == 0
            is_dying = mine.untyped_storage()._cdata == memory.untyped_storage()._cdata
            assert is_dying == (j < 2)
        assert (torch.cat([memory[:ALIGNMENT], memory[-ALIGNMENT:]]) == 0xA5).all()


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("name", STACKS)
def test_matrices_of_groups_are_one_stack(name: str, dtype: torch.dtype) -> None:
    own = PLAIN[name]
    spec = _encoded(own)
    for count, with_col in ((3, True), (3, False), (1, True), (50, True)):
        rows, cols = (128, 256) if count < 50 else (16, 32)
        xs = [cases.matrix(rows, cols, dtype, i, cases.SPECIALS[i % 4]) for i in range(count)]
        request = EncodeRequest(row_stream=4, col_stream=5)
        col = spec if with_col else None
        encoder = BACKEND.group_encoder(spec, col, dtype)
        memory = torch.full((encoder.stack_room(count, rows, cols) + ALIGNMENT,), 0xA5).byte()
        got = encoder.stack(xs, request, Place(memory, 0, 0))
        parts = []
        for x in xs:
            made = BACKEND.ops["encode"](x, own, own if with_col else None, request)
            size = len(own.buffers(1, 1))
            part = _as_taken(made[:size], own, rows, cols)
            part += _as_taken(made[size:], own, cols, rows) if with_col else []
            parts.append(part)
        for j, mine in enumerate(got):
            want = torch.stack([part[j] for part in parts])
            cases.assert_same(mine.contiguous(), want, f"{name}: buffer {j} of {count}")
            if own.format.folded is not None and mine.dtype is torch.float32:
                assert mine.stride(1) == 1 and mine.stride(0) == mine.shape[1]
        assert (memory[-ALIGNMENT:] == 0xA5).all()


def test_a_stack_that_no_kernel_folds_is_not_begun() -> None:
    """All or nothing: one matrix of the list is not aligned."""
    spec = _encoded(PLAIN["mxfp8"])
    good = cases.matrix(128, 256, torch.bfloat16, 0, "normal")
    odd = torch.zeros(128 * 256 + 1, dtype=torch.bfloat16)[1:].view(128, 256)
    encoder = BACKEND.group_encoder(spec, spec, torch.bfloat16)
    memory = torch.full((encoder.stack_room(2, 128, 256),), 0xA5).byte()
    assert encoder.stack([good, odd], EncodeRequest(), Place(memory, 0, 0)) is None
    assert encoder.stack([odd], EncodeRequest(), Place(memory, 0, 0)) is None
    assert (memory == 0xA5).all()


@pytest.mark.parametrize("end", [0, 37, 200, -5, 900])
@pytest.mark.parametrize("cols", [8, 520])
def test_rows_behind_the_last_group_become_zeros(end: int, cols: int) -> None:
    x = torch.randn(200, cols).bfloat16()
    want = x.clone()
    want[max(end, 0) :] = 0
    BACKEND.ops["clear_rest"](x, torch.tensor([3, end], dtype=torch.int32))
    cases.assert_same(x, want, f"from {end} on")


def test_rows_that_do_not_begin_at_vectors_are_an_error() -> None:
    x, end = torch.zeros(4, 12).bfloat16(), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="must begin at multiples of 16 bytes"):
        BACKEND.ops["clear_rest"](x, end)
