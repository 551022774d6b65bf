"""Quantizers by every way of making one, described by values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from hypothesis import strategies as st

import hybridq
from hybridq.formats import ELEMENTS, Element, Format, element, register_element, register_format

__all__ = ["Made", "makers", "register_own", "sound_makers"]

NAMED: Final[dict[str, Callable[..., Any]]] = {
    name: getattr(hybridq, name)
    for name in (
        "Float8CurrentScalingQuantizer",
        "Float8BlockQuantizer",
        "MXFP8Quantizer",
        "NVFP4Quantizer",
        "IdentityQuantizer",
    )
}


def register_own() -> None:
    """Register formats and elements as a user does; the fuzzer meets them by name."""
    if "e3m4" not in ELEMENTS:
        register_element(Element("e3m4", 8, 3, 4, 3, "ieee"))
        register_element(Element("e2m2", 5, 2, 2, 1, "fn"))
    fp32, e8m0, e4m3 = (element(name) for name in ("fp32", "e8m0", "e4m3"))
    mine, small = ELEMENTS["e3m4"], ELEMENTS["e2m2"]
    register_format("own_1x48", Format(mine, (1, 48), fp32, "amax", "own", eps=1e-3))
    register_format("own_24x24", Format(small, (24, 24), e8m0, "even", "own"))
    register_format("own_1x5", Format(element("e2m1"), (1, 5), e4m3, "two_level", "own"))
    register_format("own_1x64", Format(element("e4m3"), (1, 64), e8m0, "floor", "own"))
    register_format("own_tensor", Format(element("e2m1"), None, fp32, "amax", "own"))


@dataclass(frozen=True)
class Made:
    """A call that makes a quantizer.

    Args:
        by: `"quantizer"`, `"hybrid"` or the name of a named constructor.
        args: its keyword arguments, as pairs; of `"hybrid"` the values may be `Made`.
    """

    by: str
    args: tuple[tuple[str, Any], ...]

    def build(self) -> hybridq.Quantizer:
        """Make it; raises what the constructor raises."""
        options = {k: v.build() if isinstance(v, Made) else v for k, v in self.args}
        if self.by == "quantizer":
            return hybridq.quantizer(options.pop("rowwise"), **options)
        if self.by == "hybrid":
            return hybridq.HybridQuantizer(**options)
        return NAMED[self.by](**options)


_ODD: Final = (None, True, 0, -1, "", "fp8", 3.5, "mxfp8;sr", torch.int8, float("nan"), object)


def _some(draw: Any, choices: dict[str, st.SearchStrategy[Any]], chance: int) -> dict[str, Any]:
    """Draw each of `choices` with a chance of 1 in `chance`."""
    return {
        name: draw(values)
        for name, values in choices.items()
        if draw(st.integers(0, chance - 1)) == 0
    }


def _booleans() -> st.SearchStrategy[bool]:
    return st.booleans()


_OPTIONS: Final = {
    "columnwise_source": st.sampled_from(("rowwise_dequantized", "original")),
    "stochastic": _booleans(),
    "hadamard": _booleans(),
    "power_of_two": _booleans(),
    "eps": st.sampled_from((0.0, 1e-12, 1.0, 1e30)),
    "four_over_six": st.sampled_from(("mae", "mse")),
    "row_scaled": _booleans(),
    "scale_rule": st.sampled_from(("rceil", "floor", "ceil", "even")),
}
_KWARGS: Final = {
    "Float8CurrentScalingQuantizer": {
        "fp8_dtype": st.sampled_from(("e4m3", "e5m2", torch.float8_e5m2, "e2m1")),
        "force_pow_2_scales": _booleans(),
        "amax_epsilon": st.sampled_from((0.0, 1e-6, -1.0, 1e39, float("inf"))),
        "with_amax_reduction": _booleans(),
    },
    "Float8BlockQuantizer": {
        "fp8_dtype": st.sampled_from(("e4m3", "e5m2")),
        "force_pow_2_scales": _booleans(),
        "block_scaling_dim": st.sampled_from((1, 2, 3, None)),
    },
    "MXFP8Quantizer": {
        "fp8_dtype": st.sampled_from(("e4m3", "e5m2", "bf16")),
        "with_2d_quantization": _booleans(),
    },
    "NVFP4Quantizer": {
        "with_rht": _booleans(),
        "with_post_rht_amax": _booleans(),
        "with_2d_quantization": _booleans(),
        "stochastic_rounding": _booleans(),
        "row_scaled_nvfp4": _booleans(),
        "nvfp4_use_4over6": _booleans(),
        "nvfp4_e4m3_max": st.sampled_from((448, 256, 100)),
        "nvfp4_4over6_err_mode": st.sampled_from(("MAE", "mse", "max")),
        "with_random_sign_mask": _booleans(),
    },
    "IdentityQuantizer": {"dtype": st.sampled_from((None, torch.bfloat16, torch.float64))},
}


@st.composite
def _free(draw: Any) -> Made:
    names = st.sampled_from(hybridq.formats.names())
    row = draw(st.one_of(names, names, names, st.none()))
    args = {"rowwise": row}
    if row is None or draw(st.booleans()):
        args["columnwise"] = draw(st.one_of(names, names, st.sampled_from((False, None, True))))
    return Made("quantizer", tuple({**args, **_some(draw, _OPTIONS, 7)}.items()))


@st.composite
def _named(draw: Any) -> Made:
    name = draw(st.sampled_from(sorted(NAMED)))
    usage = {"rowwise": _booleans(), "columnwise": _booleans()}
    return Made(name, tuple({**_some(draw, _KWARGS[name], 3), **_some(draw, usage, 5)}.items()))


@st.composite
def _hybrid(draw: Any) -> Made:
    parts = st.one_of(_free(), _named())
    args = {"rowwise_quantizer": draw(parts), "columnwise_quantizer": draw(parts)}
    sources = {"columnwise_source": st.sampled_from(("rowwise_dequantized", "original"))}
    return Made("hybrid", tuple({**args, **_some(draw, sources, 2)}.items()))


@st.composite
def _mistaken(draw: Any) -> Made:
    """A call with one argument of a kind that it does not take."""
    made = draw(st.one_of(_free(), _named(), _hybrid()))
    known = {"quantizer": _OPTIONS, **_KWARGS}.get(made.by, {})
    names = sorted({*known, *dict(made.args)})
    if not names:
        return made
    wrong = {draw(st.sampled_from(names)): draw(st.sampled_from(_ODD))}
    return Made(made.by, tuple({**dict(made.args), **wrong}.items()))


@st.composite
def _sound(draw: Any) -> Made:
    """A call that is right: another one is drawn where options do not go together."""
    for _ in range(4):
        made = draw(st.one_of(_free(), _free(), _named(), _hybrid()))
        try:
            usages = made.build().get_usages()
        except (TypeError, ValueError, RuntimeError):
            continue
        if any(usages.values()):
            return made
    return Made("quantizer", (("rowwise", "mxfp8"),))


def sound_makers() -> st.SearchStrategy[Made]:
    """Calls that make a quantizer."""
    return _sound()


def makers() -> st.SearchStrategy[Made]:
    """Calls of every kind, one in six with a wrong argument."""
    return st.one_of(_free(), _free(), _free(), _named(), _hybrid(), _mistaken())
