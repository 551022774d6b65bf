"""Ranges, single rows and concatenation: planes' own rows where no block is cut, else values."""

from __future__ import annotations

import copy
import io

import pytest
import torch

import hybridq
from hybridq import PlaneError, QuantizedTensor
from hybridq.tensor import DecodedPart
from tensor_tools import PAIRS, same_planes, sharing


@pytest.fixture(params=sorted(PAIRS))
def matrix(request) -> QuantizedTensor:
    """A [300, 130] tensor of each kind of pair."""
    return hybridq.quantize(torch.randn(300, 130), **PAIRS[request.param])


def bytes_are_the_slice(part: QuantizedTensor, whole: QuantizedTensor, rows: slice) -> None:
    """Assert that every buffer of `part` is that range of the whole tensor's, or all of it."""
    for direction in ("rowwise", "columnwise"):
        mine, theirs = getattr(part, direction), getattr(whole, direction)
        if mine is None:
            continue
        assert mine.spec == theirs.spec
        for name, buffer in mine.buffers.items():
            full = theirs.buffers[name]
            if full.numel() == 1 and buffer is full:
                continue  # of the whole tensor
            axis = 0 if direction == "rowwise" else 1
            fmt = mine.spec.format
            packed = 1 if fmt.element is None or axis == 0 else fmt.element.codes_per_byte
            first = rows.start // (packed if name == "data" else fmt.block[axis])
            want = full.narrow(axis, first, buffer.shape[axis])
            assert torch.equal(buffer, want), (direction, name)
            assert buffer.untyped_storage().data_ptr() == full.untyped_storage().data_ptr()


@pytest.mark.parametrize("rows", [slice(0, 128), slice(128, 256), slice(256, 300)])
def test_rows_that_cut_no_block_keep_both_planes(matrix, rows) -> None:
    part = matrix[rows]
    assert isinstance(part, QuantizedTensor) and type(part) is type(matrix)
    assert part.get_usages() == matrix.get_usages() and part.is_contiguous()
    assert torch.equal(part.dequantize(), matrix.dequantize()[rows])
    for plane, whole in zip(part.tensor_storage.planes, matrix.tensor_storage.planes, strict=True):
        assert torch.equal(plane.dequantize(), whole.dequantize()[rows])
        shapes = [buffer.shape for buffer in plane.spec.buffers(*plane.matrix)]
        assert [tuple(b.shape) for b in plane.tensors] == shapes
    bytes_are_the_slice(part, matrix, rows)
    assert sharing(part.clone()) == sharing(matrix)


@pytest.mark.parametrize("rows", [slice(3, 77), slice(0, 1), slice(299, 300), slice(5, 5)])
def test_rows_that_cut_blocks_drop_that_plane_or_give_values(matrix, rows) -> None:
    part = matrix[rows]
    assert torch.equal(hybridq_values(part), matrix.dequantize()[rows])
    start, length = rows.start, rows.stop - rows.start
    assert torch.equal(hybridq_values(matrix.narrow(0, start, length)), hybridq_values(part))
    survivors = [
        plane.direction
        for plane in matrix.tensor_storage.planes
        if length == 0
        or not (start % plane.unit(0) or (rows.stop % plane.unit(0) and rows.stop != 300))
    ]
    if survivors:
        assert [plane.direction for plane in part.tensor_storage.planes] == survivors
    else:
        assert isinstance(part, DecodedPart) and part.is_contiguous()


def hybridq_values(t: torch.Tensor) -> torch.Tensor:
    return t.dequantize() if isinstance(t, QuantizedTensor) else t


def test_what_is_dropped_by_format() -> None:
    """1xN blocks leave any rows their rowwise plane; square blocks lose both."""
    x = torch.randn(64, 64)
    assert hybridq.quantize(x, "mxfp8")[3:9].get_usages() == {
        "rowwise": True,
        "columnwise": False,
    }
    assert isinstance(hybridq.quantize(x, "mxfp8_32x32")[3:9], DecodedPart)
    assert isinstance(hybridq.quantize(x, "mxfp8_32x32")[32:], QuantizedTensor)
    # One scale per tensor: nothing is cut; packed codes: a byte is two rows of the other plane.
    assert all(hybridq.quantize(x, "fp8_e4m3")[3:9].get_usages().values())
    assert hybridq.quantize(x, "nvfp4")[16:48].columnwise is not None
    assert hybridq.quantize(x, "nvfp4")[16:40].columnwise is None


def test_a_part_refuses_what_is_no_tensor() -> None:
    part = hybridq.quantize(torch.ones(64, 32), "mxfp8")[:32]
    with pytest.raises(TypeError, match="quantize_"):
        part.quantize_([1.0])


def test_nothing_splits_into_no_parts() -> None:
    empty = hybridq.quantize(torch.zeros(0, 32), "mxfp8")
    assert torch.split(empty, [], 0) == torch.split(torch.zeros(0, 32), [], 0) == ()


def test_split_chunk_unbind_and_select(matrix) -> None:
    plain = matrix.dequantize()
    for pieces, want in (
        (matrix.split(128), plain.split(128)),
        (matrix.chunk(4), plain.chunk(4)),
        (matrix.split([1, 0, 299]), plain.split([1, 0, 299])),
        (matrix.tensor_split(3), plain.tensor_split(3)),
        (matrix.unbind(), plain.unbind()),
        ((matrix[7], matrix[-1], matrix.select(0, 0)), (plain[7], plain[-1], plain[0])),
        ((matrix[2, 3], matrix[:, 5], matrix[..., -1]), (plain[2, 3], plain[:, 5], plain[:, -1])),
    ):
        assert len(pieces) == len(want)
        for piece, value in zip(pieces, want, strict=True):
            assert piece.shape == value.shape and torch.equal(hybridq_values(piece), value)


def test_columns_are_rows_of_the_transpose() -> None:
    t = hybridq.quantize(torch.randn(64, 96), "mxfp8", columnwise="nvfp4")
    part = t[:, 32:64]
    same_planes(part.mT, t.mT[32:64])
    assert torch.equal(part.dequantize(), t.dequantize()[:, 32:64])
    assert t[:, 32:33].dim() == 2 and type(t[:, 5:7]) is not type(t), "MXFP8 blocks are cut"


def test_leading_dimensions() -> None:
    t = hybridq.quantize(torch.randn(4, 32, 48), "mxfp8")
    plain = t.dequantize()
    assert t[1].shape == (32, 48) and all(t[1].get_usages().values())
    assert torch.equal(t[1:3].dequantize(), plain[1:3])
    assert torch.equal(t[1, 3:5].dequantize(), plain[1, 3:5])
    assert isinstance(t[:, 3:5], DecodedPart) and torch.equal(t[:, 3:5], plain[:, 3:5])
    assert torch.equal(t.unsqueeze(0).squeeze(0).dequantize(), plain)
    assert isinstance(t.unsqueeze(1), QuantizedTensor)


def test_errors_are_torchs_own() -> None:
    t = hybridq.quantize(torch.randn(8, 32), "mxfp8")
    for bad in (
        lambda t: t[8],
        lambda t: t.narrow(0, 4, 5),
        lambda t: t.split([3, 3]),
        lambda t: t.select(2, 0),
        lambda t: t.chunk(0),
        lambda t: torch.cat([t, t[:, :16]]),
    ):
        with pytest.raises((IndexError, RuntimeError)) as plain_error:
            bad(t.dequantize())
        with pytest.raises(plain_error.type):
            bad(t)


# ---- writes through a part


def test_a_write_to_rows_of_their_own_touches_no_other_byte() -> None:
    x = torch.randn(96, 64)
    t = hybridq.quantize(x, "mxfp8")
    before = t.clone()
    t[32:64].mul_(3.0)
    same_planes(t[:32], before[:32])
    same_planes(t[64:], before[64:])
    same_planes(t[32:64], t.quantizer(before.dequantize()[32:64] * 3.0))


def test_a_write_to_any_rows_leaves_no_plane_stale(matrix) -> None:
    part = matrix[100:200]
    if not isinstance(part, QuantizedTensor):
        return  # values, documented as a copy
    want = matrix.dequantize()
    want[100:200] += 10.0
    is_direct = part.part is None
    version = matrix._version
    part.add_(10.0)
    assert matrix._version > version
    if not is_direct:
        same_planes(matrix, matrix.quantizer(want))
    else:
        own = matrix.quantizer(want)
        assert torch.equal(matrix.dequantize()[100:200], own.dequantize()[100:200])
    assert torch.equal(part.dequantize(), matrix.dequantize()[100:200])
    rows = [plane.dequantize() for plane in matrix.tensor_storage.planes]
    assert all((r[100:200] > 0).float().mean() > 0.9 for r in rows), "both planes are new"


def test_a_part_of_a_part_and_of_a_transpose_is_written_whole() -> None:
    t = hybridq.quantize(torch.randn(64, 64), "fp8_e4m3")
    want = t.dequantize()
    want[10:20, 8:16] = 500.0
    t[8:40][2:12][:, 8:16].fill_(500.0)
    same_planes(t, t.quantizer(want))
    with pytest.raises(PlaneError, match="no quantizer"):
        t[3:9].mT.fill_(0.0)  # a transposed part has no quantizer of its own
    same_planes(t, t.quantizer(want))


def test_copies_of_a_part_own_their_memory() -> None:
    t = hybridq.quantize(torch.randn(64, 64), "fp8_e4m3")
    before = t.clone()
    part = t[10:20]
    file = io.BytesIO()
    torch.save(part, file)
    file.seek(0)
    for other in (
        part.clone(),
        copy.deepcopy(part),
        torch.load(file, weights_only=True),
        part.to("cpu", copy=True),
    ):
        same_planes(other, part)
        assert other.part is None and other.quantizer == t.quantizer
        other.zero_()
        assert not other.dequantize().any()
    same_planes(t, before)


# ---- cat


def test_cat_inverts_chunk_byte_for_byte(matrix) -> None:
    pieces = matrix.split(128)
    back = torch.cat(pieces)
    same_planes(back, matrix)
    assert back.quantizer == matrix.quantizer and sharing(back) == sharing(matrix)
    pointer = back.tensor_storage.first.data.untyped_storage().data_ptr()
    assert pointer != matrix.tensor_storage.first.data.untyped_storage().data_ptr()
    back.zero_()
    assert matrix.dequantize().any()


def test_cat_of_strangers() -> None:
    """Block scales stand beside each other; two tensors with one scale each do not."""
    a, b = torch.randn(32, 64), torch.randn(40, 64)
    q = hybridq.MXFP8Quantizer()
    same_planes(torch.cat([q(a), q(b)]), q(torch.cat([a, b])))
    assert torch.cat([q(b), q(a)]).columnwise is None, "the seam is inside a block"
    one = hybridq.quantize(a, "fp8_e4m3"), hybridq.quantize(b, "fp8_e4m3")
    made = torch.cat(one)
    assert type(made) is torch.Tensor
    assert torch.equal(made, torch.cat([t.dequantize() for t in one]))
    mixed = torch.cat([q(a), b])
    assert type(mixed) is torch.Tensor and torch.equal(mixed[32:], b)
    wide = torch.cat([q(a), q(a)], dim=1)
    same_planes(wide, q(torch.cat([a, a], dim=1)))


# ---- flat views, as FSDP2 takes them


def test_view_minus_one_is_the_same_planes(matrix) -> None:
    flat = matrix.view(-1)
    assert flat.shape == (300 * 130,) and isinstance(flat, QuantizedTensor)
    same_planes(flat, matrix)
    assert torch.equal(flat.dequantize(), matrix.dequantize().view(-1))
    same_planes(flat.view(300, 130), matrix)
    file = io.BytesIO()
    torch.save(flat, file)
    file.seek(0)
    saved, entries = hybridq.prepare_for_saving(flat)
    names, context = flat.__tensor_flatten__()
    inner = {name: getattr(flat, name) for name in names}
    for other in (
        flat.clone(),
        copy.deepcopy(flat),
        torch.load(file, weights_only=True),
        hybridq.restore_from_saved(entries, saved)[0],
        QuantizedTensor.__tensor_unflatten__(inner, context, flat.shape, flat.stride()),
    ):
        assert other.shape == flat.shape
        same_planes(other, flat)
    flat.zero_()
    assert not matrix.dequantize().any()
    assert torch.equal(flat[3:7], torch.zeros(4))


# ---- rows dequantized alone


@pytest.mark.parametrize(
    "index",
    [slice(3, 50), slice(None), slice(-5, None), slice(7, 7), [0, 299, 5, 5, -1], []],
    ids=str,
)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_dequantize_rows(matrix, index, dtype) -> None:
    whole = matrix.dequantize(dtype=dtype)
    got = matrix.dequantize_rows(index, dtype=dtype)
    want = whole[index] if isinstance(index, slice) else whole[torch.tensor(index).long()]
    assert type(got) is torch.Tensor and torch.equal(got, want)
    if not isinstance(index, slice):
        assert torch.equal(matrix.dequantize_rows(torch.tensor(index).long(), dtype=dtype), want)


def test_only_the_rows_are_decoded(monkeypatch) -> None:
    t = hybridq.quantize(torch.randn(300, 64), "fp8_128x128")
    decoded = []
    plane_type = type(t.rowwise)
    original = plane_type.dequantize
    monkeypatch.setattr(
        plane_type, "dequantize", lambda p, *a: decoded.append(p.rows) or original(p, *a)
    )
    t.dequantize_rows([1, 200, 299])
    t.dequantize_rows(slice(130, 140))
    torch.nn.functional.embedding(torch.tensor([[4, 9]]), t)
    t[torch.tensor([5])]
    t.index_select(0, torch.tensor([5, 6, 7, 8]))
    assert decoded == [3, 128, 2, 1, 4]


def test_lookups_equal_those_of_the_values(matrix) -> None:
    plain, index = matrix.dequantize(), torch.tensor([[3, 299], [0, 3]])
    assert torch.equal(torch.nn.functional.embedding(index, matrix), plain[index])
    assert torch.equal(matrix[index], plain[index])
    assert torch.equal(matrix[torch.tensor(-1)], plain[-1])
    assert torch.equal(matrix[[1, -2]], plain[[1, -2]])
    assert torch.equal(matrix.index_select(0, index[0]), plain.index_select(0, index[0]))
    mask = plain[:, 0] > 0
    assert torch.equal(matrix[mask], plain[mask])
    assert torch.equal(matrix[index[0], index[1] % 130], plain[index[0], index[1] % 130])


def test_dequantize_rows_passes_the_gradient_to_those_rows() -> None:
    x = torch.randn(40, 32, requires_grad=True)
    t = hybridq.quantize(x, "mxfp8")
    (t.dequantize_rows([3, 3, 7]).sum() + 2 * t.dequantize_rows(slice(7, 9)).sum()).backward()
    want = torch.zeros(40, 32)
    want[3], want[7], want[8] = 2.0, 3.0, 2.0
    assert torch.equal(x.grad, want)


def test_dequantize_rows_refuses_what_it_cannot_do() -> None:
    t = hybridq.quantize(torch.randn(8, 32), "mxfp8")
    with pytest.raises(ValueError, match="step 1"):
        t.dequantize_rows(slice(0, 8, 2))
    with pytest.raises(TypeError, match="integers"):
        t.dequantize_rows([0.5])
    with pytest.raises(TypeError, match="integer tensor"):
        t.dequantize_rows(torch.zeros(2))
    with pytest.raises(ValueError, match="2-D"):
        t.view(2, 4, 32).dequantize_rows([0])
    for bad in ([8], [-9]):
        with pytest.raises(IndexError):
            t.dequantize_rows(bad)


def test_gradients_flow_through_parts() -> None:
    w = torch.nn.Parameter(hybridq.quantize(torch.randn(64, 32), "mxfp8"))
    weight = torch.randn(64, 32)
    loss = (w[:32].dequantize() * weight[:32]).sum() + (w[32:] * weight[32:]).sum()
    loss.backward()
    assert torch.equal(w.grad, weight)
    w.grad = None
    (w.view(-1).dequantize() * weight.view(-1)).sum().backward()
    assert torch.equal(w.grad, weight)
    w.grad = None
    (torch.cat(w.chunk(2)).mT.dequantize() * weight.t()).sum().backward()
    assert torch.equal(w.grad, weight)
    w.grad = None
    (w[3] * weight[3]).sum().backward()
    assert torch.equal(w.grad[3], weight[3]) and not w.grad[4].any()


@pytest.mark.parametrize("fmt", ["mxfp8", "fp8_128x128", "nvfp4_16x16", "fp8_e4m3"])
@pytest.mark.parametrize(
    "key", [slice(3, 9), 5, (..., 3), (slice(None), slice(2, 7)), (slice(1, 4), [0, 2])]
)
def test_an_assignment_to_any_part_reaches_the_tensor(fmt, key) -> None:
    """A part that cuts every block is a copy; what is assigned to it must not stay there."""
    t = hybridq.quantize(torch.randn(256, 256), fmt)
    expected = t.dequantize()
    expected[key] = 2.0
    t[key] = 2.0
    torch.testing.assert_close(t.dequantize()[key], expected[key], rtol=0.2, atol=0.0)
    torch.testing.assert_close(t.dequantize(), expected, rtol=0.2, atol=0.5)


def test_an_assignment_keeps_the_gradient() -> None:
    leaf = hybridq.quantize(torch.randn(128, 128), "fp8_128x128").requires_grad_()
    t = leaf.clone()
    value = torch.ones(3, 128, requires_grad=True)
    t[2:5] = value
    t.sum().backward()
    assert torch.equal(value.grad, torch.ones(3, 128))
    assert float(leaf.grad.sum()) == 125 * 128


@pytest.mark.parametrize(
    "call",
    [
        lambda t: t.view(-2, -3, 64),
        lambda t: t.view(-1, -1, 1),
        lambda t: t.unsqueeze(5),
        lambda t: t.squeeze(7),
        lambda t: t.transpose(0, 3),
        lambda t: t.permute(0, 0),
        lambda t: t.permute(0),
        lambda t: t.permute(2, 1),
    ],
)
@pytest.mark.parametrize("shape", [(6, 64), (1, 1)])
def test_dimensions_that_do_not_exist_are_refused_as_torch_does(call, shape) -> None:
    x = torch.randn(shape)
    with pytest.raises((IndexError, RuntimeError)) as plain:
        call(x)
    with pytest.raises(plain.type):
        call(hybridq.quantize(x, "mxfp8"))


def test_a_view_of_no_columns_has_the_rows_of_its_shape() -> None:
    t = hybridq.quantize(torch.zeros(2, 0), "mxfp8")
    for shape in ((5, 0), (0, 3), (0,)):
        view = t.view(shape)
        assert view.shape == shape
        if isinstance(view, QuantizedTensor):
            assert (view.rowwise.rows, view.rowwise.cols) == hybridq.tensor.matrix_shape(shape)
    assert hybridq.gemm(t, torch.zeros(3, 0)).shape == (2, 3)
    with pytest.raises(IndexError):
        hybridq.quantize(torch.zeros(0, 64), "mxfp8")[torch.tensor([3])]
