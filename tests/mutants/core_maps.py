"""Mutants of the norms and activations of the C++ core."""

from __future__ import annotations

from . import rules
from .record import of_core

_NORM = ("tests/kernels/operators/test_norm_encode.py::test_norm_is_the_oracles",)
_ACTIVATION = (
    "tests/kernels/operators/test_activation_encode.py::test_activation_of_every_half_is_the_oracles",
)

CORE_MAPS = (
    of_core(
        "sums-fold-other-pairs",
        rules.FOLDED_SUMS,
        "cpu/norm.h",
        "p[i] = AddRn(p[i], p[i + 64]);",
        "p[i] = AddRn(p[i], p[127 - i]);",
        _NORM,
    ),
    of_core(
        "relu-drops-nan",
        rules.RELU_NAN,
        "formats/activation.h",
        "static_cast<uint32_t>(v < 0.0f) - 1u",
        "static_cast<uint32_t>(!(v > 0.0f)) - 1u",
        _ACTIVATION,
    ),
    of_core(
        "sigmoid-of-one-form",
        rules.SMALL_SIGMOID,
        "formats/activation.h",
        "return DivRn(v < 0.0f ? small : 1.0f, AddRn(small, 1.0f));",
        "return DivRn(1.0f, AddRn(v < 0.0f ? DivRn(1.0f, small) : small, 1.0f));",
        _ACTIVATION,
    ),
    of_core(
        "gate-after-rounding",
        rules.GATE_IN_FP32,
        "cpu/map_tile.h",
        "*a = MulRn(*a, first);",
        "*a = MulRn(Input<kType>::Get(RoundTo<kType>(*a)), first);",
        _ACTIVATION,
    ),
)
