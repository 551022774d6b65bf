"""The demo's model: sizes, initial values, causality, rotary positions."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from hybridq.demo.model import ModelConfig, Rotary, Transformer

TINY = ModelConfig(layers=2, hidden=32, heads=2, ffn=48, sequence=24)


def test_default_has_about_three_million_parameters():
    with torch.device("meta"):
        assert Transformer(ModelConfig()).num_parameters() == pytest.approx(3e6, rel=0.1)


def test_every_projection_is_of_the_given_class_and_lm_head_is_not():
    class Projection(nn.Linear):
        pass

    model = Transformer(TINY, Projection)
    names = {n for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    given = {n for n, m in model.named_modules() if isinstance(m, Projection)}
    assert names - given == {"lm_head"}
    assert len(given) == 4 * TINY.layers


def test_the_class_of_the_projections_does_not_change_the_initial_values():
    class Projection(nn.Linear):
        pass

    states = []
    for linear in (nn.Linear, Projection):
        torch.manual_seed(3)
        states.append(Transformer(TINY, linear).state_dict())
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_a_byte_sees_nothing_of_its_future():
    torch.manual_seed(0)
    model = Transformer(TINY)
    tokens = torch.randint(256, (1, 24))
    changed = tokens.clone()
    changed[0, 12:] = (changed[0, 12:] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.equal(before[0, :12], after[0, :12])
    assert not torch.allclose(before[0, 12], after[0, 12])


def test_initial_loss_is_near_that_of_a_uniform_guess():
    torch.manual_seed(0)
    model = Transformer(TINY)
    tokens = torch.randint(256, (4, 24))
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten().roll(7))
    assert abs(loss.item() - math.log(256)) < 1.5


def test_rotary_scores_depend_on_the_distance_alone():
    rotary = Rotary(TINY)
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, 16).expand(2, 24, 16).unbind(0)
    scores = rotary(query) @ rotary(key).T
    for distance in (0, 1, 5):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    # A rotation keeps lengths.
    torch.testing.assert_close(rotary(query).norm(dim=-1), query.norm(dim=-1))
    assert not torch.allclose(scores[0, 0], scores[5, 0])


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"layers": 0}, "layers must be at least 1, got 0"),
        ({"hidden": 30, "heads": 4}, "hidden=30 with heads=4"),
        ({"hidden": 12, "heads": 4}, "even head size"),
    ],
)
def test_bad_sizes(sizes, text):
    with pytest.raises(ValueError, match=text):
        ModelConfig(**sizes)


def test_a_sequence_that_is_too_long():
    with pytest.raises(ValueError, match="at most 24, got 25"):
        Transformer(TINY)(torch.zeros(1, 25, dtype=torch.int64))
