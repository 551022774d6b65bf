"""Planes that arrive of all ranks' tokens, against the planes of the whole: the same bytes."""

from __future__ import annotations

import pytest
import torch

import hybridq
from hybridq import PlaneSpec
from hybridq.direction import COLUMNWISE, ROWWISE
from hybridq.kernels.choice import EncodeRequest
from hybridq.shards import OwnPlane, TokenGather, cut, encode_cut, token_gather

WORLD, LENGTH, FEATURES = 3, 128, 48
FORMATS = [*hybridq.formats.names(), "nvfp4;sr;rht", "mxfp8;sr", "nvfp4;rows"]


def parts(x: torch.Tensor, runs: int) -> list[torch.Tensor]:
    """Return the rows of each rank: its tokens of every run."""
    split = x.view(runs, WORLD, LENGTH, x.shape[1])
    return [split[:, rank].reshape(runs * LENGTH, x.shape[1]) for rank in range(WORLD)]


def encoded(x, row, col, runs, rest):
    """Return the planes that each rank makes of its rows; the ranks are simulated."""
    own = parts(x, runs)
    tokens = [TokenGather("group", rank, WORLD, runs) for rank in range(WORLD)]
    told: list[torch.Tensor] = []

    def run(rank, known):
        def reduce(bits, op, group):
            told.append(bits.clone())
            return bits if known is None else known

        at = tokens[rank].cut(len(own[rank]), row, col)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cut, "functional_all_reduce", reduce)
            if at is None:
                made = torch.ops.hybridq.encode(own[rank], row.spec, col.spec)
                return made[: row.num_buffers], made[row.num_buffers :]
            return encode_cut(own[rank], row, col, rest, at)

    for rank in range(WORLD):
        run(rank, None)
    known = torch.stack(told).amax(0) if told else None
    return tokens, [run(rank, known) for rank in range(WORLD)]


def arrived(monkeypatch, tokens, planes, are_of_one=False):
    """Return the planes that each rank gets, and the bytes that one sends."""
    sent: list[torch.Tensor] = []
    monkeypatch.setattr(token_gather, "wait_tensor", lambda x: torch.cat(sent))
    monkeypatch.setattr(token_gather, "functional_all_gather", lambda x, *_: sent.append(x) or x)
    waiting = [one.start(own, are_of_one) for one, own in zip(tokens, planes, strict=True)]
    return [one.wait() for one in waiting], sent[0].numel()


def check(found, whole):
    for a, b in zip(found, whole, strict=True):
        assert a.is_contiguous() and a.shape == b.shape and a.dtype == b.dtype
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("runs", [1, 2])
@pytest.mark.parametrize("name", FORMATS)
def test_the_bytes_are_those_of_the_whole(monkeypatch, name, runs) -> None:
    dtype = torch.bfloat16
    spec = PlaneSpec.parse(name).resolve(dtype)
    text = spec.plain_text(dtype)
    if text.is_plain:
        pytest.skip("the tensor itself")
    torch.manual_seed(0)
    x = torch.randn(runs * WORLD * LENGTH, FEATURES).mul(torch.randn(FEATURES).exp()).to(dtype)
    rest = EncodeRequest(seed=torch.tensor([7]) if text.is_stochastic else None)
    tokens, made = encoded(x, text, text, runs, rest)
    assert tokens[0].unit(text, text) <= LENGTH
    planes = [
        [OwnPlane(rows, text, ROWWISE), OwnPlane(cols, text, COLUMNWISE)] for rows, cols in made
    ]
    found, nbytes = arrived(monkeypatch, tokens, planes)
    whole = torch.ops.hybridq.encode(x, text.spec, text.spec, seed=rest.seed)
    for rows, cols in found:
        check(rows, whole[: text.num_buffers])
        check(cols, whole[text.num_buffers :])
    if text.is_derivable and text.codes_per_byte == 1:
        found, fewer = arrived(monkeypatch, tokens, planes, are_of_one=True)
        assert nbytes == 2 * fewer
        for rows, cols in found:
            check([*rows, *cols], whole)


def test_values_and_rows_of_another_format(monkeypatch) -> None:
    x = torch.randn(WORLD * LENGTH, FEATURES, dtype=torch.bfloat16)
    plain = PlaneSpec.plain(torch.bfloat16).plain_text(torch.bfloat16)
    tokens = [TokenGather("group", rank, WORLD) for rank in range(WORLD)]
    planes = [[OwnPlane([own], plain, ROWWISE)] for own in parts(x, 1)]
    for ((found,),) in arrived(monkeypatch, tokens, planes)[0]:
        assert torch.equal(found, x)


@pytest.mark.parametrize("runs", [1, 2])
def test_sums_are_scattered_in_the_order_of_the_tokens(monkeypatch, runs) -> None:
    x = torch.randn(runs * WORLD * LENGTH, 4)
    monkeypatch.setattr(token_gather, "send_sum", lambda y, world, *_: y.chunk(world))
    for rank, own in enumerate(parts(x, runs)):
        assert torch.equal(TokenGather("group", rank, WORLD, runs).scatter(x)[rank], own)


def test_units_are_of_the_planes_that_are_made() -> None:
    texts = {
        name: PlaneSpec.parse(name).resolve(torch.float32).plain_text(torch.float32)
        for name in ("mxfp8", "nvfp4", "fp8_block", "fp8_e4m3", "nvfp4;rht")
    }
    tokens = TokenGather("group", 0, 2)
    assert tokens.unit(texts["mxfp8"], None) == 1
    assert tokens.unit(texts["mxfp8"], texts["mxfp8"]) == 32
    assert tokens.unit(texts["mxfp8"], texts["nvfp4"]) == 16
    assert tokens.unit(texts["fp8_e4m3"], texts["fp8_block"]) == 128
