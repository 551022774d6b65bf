"""Constructors of modules refuse what is not of their parameters' types, and take what is."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch

import hybridq
from hybridq import nn as hnn

#: Modules, and what makes each.
MADE: dict[Any, dict[str, Any]] = {
    hybridq.Linear: {"in_features": 64, "out_features": 32},
    hybridq.LayerNormLinear: {"in_features": 64, "out_features": 32},
    hnn.RMSNormLinear: {"in_features": 64, "out_features": 32},
    hybridq.LayerNormMLP: {"hidden_size": 64, "ffn_hidden_size": 96},
    hybridq.GroupedLinear: {"num_gemms": 2, "in_features": 64, "out_features": 32},
    hybridq.MultiheadAttention: {"hidden_size": 64, "num_attention_heads": 4},
    hybridq.TransformerLayer: {
        "hidden_size": 64,
        "ffn_hidden_size": 96,
        "num_attention_heads": 4,
    },
    hnn.DotProductAttention: {"num_attention_heads": 4, "kv_channels": 16},
    hnn.Embedding: {"num_embeddings": 9, "embedding_dim": 64},
    hnn.LayerNorm: {"normalized_shape": 64},
    hnn.RMSNorm: {"normalized_shape": 64},
    hnn.PatchConv2d: {"in_channels": 3, "out_channels": 8, "kernel_size": 4},
    hnn.Quantize: {},
    hnn.InferenceParams: {"max_batch_size": 1, "max_sequence_length": 4},
    hybridq.RotaryPositionEmbedding: {"dim": 16},
}


def of_type(annotation: str) -> list[Any]:
    """Return each module's parameters of one type, but those that torch or the module checks."""
    own = ("tp_size", "num_gemms", "padding_idx")
    return [
        pytest.param(kind, name, id=f"{kind.__name__}-{name}")
        for kind in MADE
        for name, parameter in inspect.signature(kind).parameters.items()
        if parameter.annotation == annotation and name not in own
    ]


@pytest.mark.parametrize(("kind", "name"), of_type("bool"))
@pytest.mark.parametrize("value", ["false", "no", 2, 0.5, None], ids=repr)
def test_a_switch_is_a_bool(kind: Any, name: str, value: Any) -> None:
    """The text "false" switched it on, silently."""
    with pytest.raises(TypeError, match=rf"{kind.__name__}: {name} must be a bool, got"):
        kind(**{**MADE[kind], name: value})


@pytest.mark.parametrize(("kind", "name"), of_type("int"))
@pytest.mark.parametrize("value", ["64", 64.0, True, None], ids=repr)
def test_a_size_is_an_int(kind: Any, name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=rf"{kind.__name__}: {name} must be an int, got"):
        kind(**{**MADE[kind], name: value})


@pytest.mark.parametrize(("kind", "name"), [*of_type("int"), *of_type("int | None")])
def test_a_size_is_not_negative(kind: Any, name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} must (not be negative|be at least)"):
        kind(**{**MADE[kind], name: -4})


@pytest.mark.parametrize(("kind", "name"), of_type("float"))
@pytest.mark.parametrize("value", ["1e-5", True], ids=repr)
def test_a_number_is_no_text(kind: Any, name: str, value: Any) -> None:
    """YAML reads 1e-5 as a text."""
    with pytest.raises(TypeError, match=rf"{kind.__name__}: {name} must be a number, got"):
        kind(**{**MADE[kind], name: value})


@pytest.mark.parametrize("shape", ["64", 64.5, (8, 4.5), True], ids=repr)
@pytest.mark.parametrize("kind", [hnn.LayerNorm, hnn.RMSNorm])
def test_a_norms_shape_is_ints(kind: Any, shape: Any) -> None:
    """4.5 was 4, and the text "64" two dimensions, of 6 and of 4."""
    with pytest.raises(TypeError, match="normalized_shape must be an int, got"):
        kind(shape)


def test_no_heads_of_keys_is_not_as_many_as_of_queries() -> None:
    for made in (
        lambda: hybridq.MultiheadAttention(64, 4, num_gqa_groups=0),
        lambda: hybridq.TransformerLayer(64, 96, 4, num_gqa_groups=0),
        lambda: hnn.DotProductAttention(4, 16, num_gqa_groups=0),
    ):
        with pytest.raises(ValueError, match="num_gqa_groups"):
            made()
    with pytest.raises(ValueError, match="kv_channels must be at least 1, got 0"):
        hybridq.MultiheadAttention(64, 4, kv_channels=0)


@pytest.mark.parametrize("kind", MADE, ids=lambda kind: kind.__name__)
def test_what_counts_as_one_is_taken(kind: Any) -> None:
    """Ints 0 and 1 for bools, as nn.Linear takes them, and numpy's whole numbers for sizes."""
    known = inspect.signature(kind).parameters
    given = {name: np.int64(v) if isinstance(v, int) else v for name, v in MADE[kind].items()}
    given |= {n: int(p.default) for n, p in known.items() if p.annotation == "bool"}
    if kind is hybridq.GroupedLinear:  # whose sizes are ints alone
        given |= MADE[kind]
    made, plain = kind(**given), kind(**MADE[kind])
    if isinstance(made, torch.nn.Module):
        ours = {n: t.shape for n, t in made.state_dict().items() if torch.is_tensor(t)}
        own = {n: t.shape for n, t in plain.state_dict().items() if torch.is_tensor(t)}
        assert ours == own


def test_unknown_arguments_have_pythons_own_words() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'biass'"):
        hybridq.Linear(64, 32, biass=True)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        hybridq.Linear(64)  # type: ignore[call-arg]


def test_torchs_own_ways_to_make_a_module_work() -> None:
    made = torch.nn.utils.skip_init(hybridq.Linear, 64, 32, bias=False)
    assert made.weight.shape == (32, 64)
    assert made.bias is None
