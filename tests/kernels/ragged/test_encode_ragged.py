"""`encode_ragged`: rows of the tokens and columns of the padded tokens, on every backend.

Planes are compared with the oracle's bit for bit (see `ragged_cases`).
"""

from __future__ import annotations

import pytest
import torch

import emulated
import hybridq
import kernel_cases as cases
from hybridq import reference
from hybridq.formats import PlaneSpec, names
from hybridq.kernels.choice import registry as registry
from hybridq.kernels.operators import encode_ragged as ops_ragged
from ragged_cases import BY_KERNEL, PAIRS, SIZES, ends, expected, padded, planes_of, same, text

MODULE = emulated.load()


# ---- bits


@pytest.mark.thinned(1)
@pytest.mark.parametrize("name", PAIRS)
def test_planes_are_those_of_the_padded_tokens(name: str, encoder: str) -> None:
    row, col = PAIRS[name]
    seed = torch.tensor([11])
    for i, (sizes, rest) in enumerate(SIZES):
        tokens = sum(sizes) + rest
        # Aligned for the tile kernel, and not.
        for cols in (72, 21) if i in (0, 2) else (72,):
            x = cases.matrix(tokens, cols, cases.DTYPES[i % 3], i, cases.SPECIALS[i % 5])
            got = torch.ops.hybridq.encode_ragged(
                x, ends(sizes), text(row), text(col), None, None, seed
            )
            same(got, planes_of(x, sizes, row, col, seed), f"{name}, {sizes}, {cols}, {x.dtype}")


@pytest.mark.parametrize("name", ["nvfp4 sr", "nvfp4 sr | nvfp4 rht sr", "mxfp8 sr"])
def test_streams_and_seeds_are_those_of_encode(name: str, encoder: str) -> None:
    """Row: those of x. Column: those of the padded x, each token at its padded place."""
    row, col = PAIRS[name]
    sizes, rest = SIZES[0]
    x = cases.matrix(sum(sizes) + rest, 64, torch.bfloat16, 3, "normal")
    seen = []
    for number, streams in ((5, (0, 1)), (5, (4, 9)), (-7, (0, 1))):
        seed = torch.tensor([number])
        got = torch.ops.hybridq.encode_ragged(
            x,
            ends(sizes),
            row.text,
            col.text,
            None,
            None,
            seed,
            row_stream=streams[0],
            col_stream=streams[1],
        )
        same(got, planes_of(x, sizes, row, col, seed, streams), f"{name} {number} {streams}")
        seen.append(got)
    assert not torch.equal(seen[0][0], seen[1][0]) and not torch.equal(seen[0][0], seen[2][0])


@pytest.mark.parametrize("name", ["fp8_e4m3", "nvfp4", "mxfp8 | nvfp4 rht", "nvfp4 rows"])
def test_statistics_can_be_given(name: str, encoder: str) -> None:
    row, col = PAIRS[name]
    sizes, rest = SIZES[0]
    x = cases.matrix(sum(sizes) + rest, 64, torch.bfloat16, 3, "normal")
    columns = padded(x, sizes)
    stats = [
        2.5 * reference.tensor_amax(own, spec) if spec.needs_amax else None
        for own, spec in ((x, row), (columns.t(), col))
    ]
    for first, second in (stats, (stats[0], None), (None, stats[1])):
        got = torch.ops.hybridq.encode_ragged(x, ends(sizes), row.text, col.text, first, second)
        want = reference.encode_plane(
            x, row, stat=stats[0] if first is not None else _amax(x, row)
        ) + reference.encode_plane(
            columns.t(),
            col,
            stat=stats[1] if second is not None else _amax(columns.t(), col),
            is_columnwise=True,
        )
        same(got, want, name)


def _amax(own: torch.Tensor, spec: PlaneSpec) -> torch.Tensor | None:
    return reference.tensor_amax(own, spec) if spec.needs_amax else None


@pytest.mark.parametrize("keep_row", [True, False])
@pytest.mark.parametrize(
    "name", ["mxfp8 | nvfp4", "nvfp4 sr | nvfp4 rht sr", "bf16 | nvfp4 rht sr", "mxfp8 sr | fp32"]
)
def test_columns_of_what_the_rows_decode_to(name: str, keep_row: bool, encoder: str) -> None:
    row, col = PAIRS[name]
    sizes, rest = SIZES[0]
    seed = torch.tensor([2])
    for dtype in cases.DTYPES:
        x = cases.matrix(sum(sizes) + rest, 72, dtype, 3, "normal")
        first = expected(x, row, 0, seed, False)
        seen = reference.decode_plane(first, row, *x.shape, dtype)
        want = [*(first if keep_row else []), *planes_of(seen, sizes, None, col, seed)]
        got = torch.ops.hybridq.encode_ragged(
            x,
            ends(sizes),
            row.text,
            col.text,
            None,
            None,
            seed,
            col_source="rowwise_dequantized",
            keep_row=keep_row,
        )
        same(got, want, f"{name} {dtype}")


def test_a_kernel_that_reads_the_offsets_moves_no_tokens(monkeypatch) -> None:
    """And one that cannot says so before it launches anything."""
    if MODULE is None:
        pytest.skip("the emulated kernels are not built (make emulation)")
    moved, other = [], ("nvfp4 rows", "mxfp8 sr")
    pad = ops_ragged.pad_tokens
    monkeypatch.setattr(ops_ragged, "pad_tokens", lambda *a: moved.append(1) or pad(*a))
    registry.register_backend(emulated.make_backend(MODULE))
    try:
        with hybridq.backend("emulated"):
            for name, cols in (*((name, 72) for name in (*BY_KERNEL, *other)), ("mxfp8", 33)):
                row, col = PAIRS[name]
                x = cases.matrix(268, cols, torch.bfloat16, 1, "normal")
                before = len(moved)
                args = (None, None, torch.tensor([3]))
                torch.ops.hybridq.encode_ragged(x, ends((200, 60)), row.text, col.text, *args)
                assert (len(moved) == before) == (name in BY_KERNEL), (name, cols)
    finally:
        registry.unregister_backend("emulated")


# ---- the operator


@pytest.mark.parametrize("name", ["mxfp8", "mxfp8 | nvfp4 rht sr", "none | nvfp4", "bf16"])
def test_opcheck(name: str) -> None:
    row, col = PAIRS[name]
    op = torch.ops.hybridq.encode_ragged.default
    args = (torch.randn(9, 40), ends((2, 0, 5)), text(row), text(col), None, None)
    torch.library.opcheck(op, (*args, torch.tensor([3])))
    if row is not None:
        torch.library.opcheck(
            op,
            (*args, torch.tensor([3])),
            {"col_source": "rowwise_dequantized", "keep_row": False},
        )


def test_it_has_no_derivative_and_says_so() -> None:
    x = torch.randn(4, 32, requires_grad=True)
    (y,) = torch.ops.hybridq.encode_ragged(x, ends((4,)), "", "bf16")
    with pytest.raises(RuntimeError, match="encode_ragged: has no derivative"):
        y.sum().backward()


X, ENDS = torch.randn(6, 64), ends((2, 3))


@pytest.mark.parametrize(
    "args,options,error,message",
    [
        ((X, ENDS.long(), "mxfp8", ""), {}, ValueError, "offsets must be int32 \\[G\\]"),
        ((X, ENDS[None], "mxfp8", ""), {}, ValueError, "offsets must be int32 \\[G\\]"),
        ((X[0], ENDS, "mxfp8", ""), {}, ValueError, "encode_ragged: x must be \\[rows, cols\\]"),
        ((X.double(), ENDS, "mxfp8", ""), {}, TypeError, "encode_ragged: dtype must be float32"),
        ((X, ENDS, "", "mxfp8;sr"), {}, ValueError, "encode_ragged: stochastic rounding needs"),
        ((X, ENDS, "", "fp7"), {}, hybridq.SpecError, "format: must be one of"),
        ((X, ENDS, "", "mxfp8"), {"col_source": "x"}, ValueError, "encode_ragged: col_source must"),
        (
            (X, ENDS, "", "mxfp8"),
            {"col_source": "rowwise_dequantized"},
            hybridq.SpecError,
            "encode_ragged: col_source 'rowwise_dequantized' needs a row spec",
        ),
        ((X, ENDS, "mxfp8", "", None, None, torch.ones(1)), {}, ValueError, "seed must be int64"),
        (
            (X, ENDS, "nvfp4", "nvfp4", None, torch.ones(2)),
            {},
            ValueError,
            "encode_ragged: a statistic of .* must be float32 with one value",
        ),
        ((X, ENDS, "", "mxfp8"), {"col_stream": -1}, ValueError, "a stream must be in"),
        ((X, ENDS.to("meta"), "", "mxfp8"), {}, ValueError, "x and offsets must be on one device"),
    ],
)
def test_bad_calls_of_the_operator_say_why(args, options, error, message: str) -> None:
    with pytest.raises(error, match=message):
        torch.ops.hybridq.encode_ragged(*args, **options)


def test_every_format_is_tested() -> None:
    assert set(names()) - {"identity"} <= set(PAIRS)
