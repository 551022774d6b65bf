"""Speeds of rotary positions, which scripts read, write and load."""

from __future__ import annotations

import io
import math
import pickle

import pytest
import torch

import hybridq
import hybridq.te as te


def by_hand(position: float, dim: int = 8, base: float = 10000.0) -> torch.Tensor:
    half = [position * base ** (-2 * i / dim) for i in range(dim // 2)]
    return torch.tensor(half + half)


def test_angles_follow_the_speeds_that_a_script_writes() -> None:
    rotary = te.RotaryPositionEmbedding(8)
    assert te.attention.rope.RotaryPositionEmbedding is te.RotaryPositionEmbedding
    assert isinstance(rotary, hybridq.RotaryPositionEmbedding)
    assert torch.equal(rotary(5), hybridq.RotaryPositionEmbedding(8)(5))
    pairs = {"rotary_percent": 0.5, "rotary_base": 500.0, "interleaved": True}
    other = te.RotaryPositionEmbedding(16, **pairs)
    assert torch.equal(other(5), hybridq.RotaryPositionEmbedding(16, **pairs)(5))
    torch.testing.assert_close(rotary.inv_freq, by_hand(1.0)[:4])
    rotary.inv_freq = rotary.inv_freq / 4  # as Llama 3's models stretch them
    torch.testing.assert_close(rotary(5)[4, 0, 0], by_hand(1.0))
    assert torch.equal(rotary(3, offset=2), rotary(5)[2:])


def test_checkpoints_have_the_speeds() -> None:
    rotary, other = te.RotaryPositionEmbedding(8, rotary_base=500.0), te.RotaryPositionEmbedding(8)
    assert list(rotary.state_dict()) == ["inv_freq"]
    held = io.BytesIO()
    torch.save(rotary.state_dict(), held)
    held.seek(0)
    other.load_state_dict(torch.load(held, weights_only=True))
    assert torch.equal(other(7), rotary(7)) and not torch.equal(other(7), hybridq_angles())
    assert torch.equal(pickle.loads(pickle.dumps(other))(7), rotary(7))


def hybridq_angles() -> torch.Tensor:
    return hybridq.RotaryPositionEmbedding(8)(7)


def test_speeds_stay_as_they_are_where_a_model_is_converted() -> None:
    rotary = te.RotaryPositionEmbedding(8)
    rotary.inv_freq = rotary.inv_freq / 3
    want = rotary(1000)
    model = torch.nn.ModuleList([rotary]).bfloat16()
    assert rotary.inv_freq.dtype == torch.float32 and torch.equal(rotary(1000), want)
    model.to_empty(device="cpu")
    assert torch.equal(rotary(1000), want)
    model.to("meta").to_empty(device="cpu")
    assert torch.equal(rotary(7), hybridq_angles())
    with torch.device("meta"):
        made = te.RotaryPositionEmbedding(8)
    assert made(7).is_meta and torch.equal(made.to_empty(device="cpu")(7), hybridq_angles())


@pytest.mark.parametrize(("count", "divided_by"), [(4, 2.0), (16, 2.0), (17, 17 / 8), (32, 4.0)])
def test_positions_are_interpolated(count: int, divided_by: float) -> None:
    rotary = te.RotaryPositionEmbedding(
        8, seq_len_interpolation_factor=2, pretrained_max_position_embeddings=8
    )
    torch.testing.assert_close(rotary(count)[count - 1, 0, 0], by_hand((count - 1) / divided_by))
    assert math.isclose(rotary(count)[1, 0, 0, 0].item(), 1 / divided_by, rel_tol=1e-6)


def test_one_number_alone_interpolates_nothing_and_says_so(caplog) -> None:
    with caplog.at_level("WARNING", logger="hybridq"):
        rotary = te.RotaryPositionEmbedding(8, 1.0, 4)
    assert torch.equal(rotary(7), hybridq_angles())
    assert "have an effect only together" in caplog.text
