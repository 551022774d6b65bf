"""Rules of texts and records: parse what is nearly right, build what contradicts itself."""

from __future__ import annotations

from typing import Any, Final

import torch
from hypothesis import strategies as st

import hybridq
from hybridq.formats import ELEMENTS, Element, Format, PlaneSpec
from hybridq.quantizers import Quantizer

from .invariants import check_backends, same_planes
from .policy import Wrong, attempt
from .pool import Pool, fuzz

__all__ = ["TextRules", "spec_texts"]

_SOUND: Final = (
    "e4m3/1x32/e8m0/rceil/mxfp8",
    "e2m1/1x16/e4m3/two_level/nvfp4;sr;rht=d7e8",
    "e2m1/16x16/e4m3/two_level/nvfp4;bound=256;4o6=mae",
    "e2m1/1x16/e4m3/two_level/nvfp4;rows",
    "e5m2/tensor/fp32/amax/fp8/pow2/eps=0.001",
    "e4m3/128x128/fp32/amax/fp8_block/pow2",
    "bf16/identity/identity",
    "same/identity/identity",
    "mxfp8",
    "nvfp4;sr",
    "fp8_1x128;rht=0",
)
_TOKENS: Final = (
    *("/", ";", "|", "=", "x", " ", "\n", "\0", "é", "nan", "inf", "-", "-1", "0", "1e400"),
    *("1x32", "16x16", "0x0", "1x0", "-1x32", "1x2147483648", "4294967296x4294967296", "3x5"),
    *("1x9223372036854775808", "1x99999999999999999999999", "1000000x1000000", "1x1", "7x7"),
    *("e4m3", "e8m0", "fp32", "e2m1", "bf16", "tensor", "identity", "same", "pow2", "eps=1e300"),
    *("eps=1e-46", "eps=nan", "rows", "sr", "rht=", "rht=1ffff", "rht=-1", "bound=256"),
    *("bound=nan", "4o6=mse", "4o6=", "amax", "two_level", "rceil", "floor", "even", "¹"),
)


@st.composite
def _mutated(draw: Any, sound: tuple[str, ...], tokens: tuple[str, ...]) -> str:
    text = draw(st.sampled_from(sound))
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, len(text)))
        stop = min(len(text), start + draw(st.integers(0, 6)))
        text = text[:start] + draw(st.sampled_from(tokens)) + text[stop:]
    return text


@st.composite
def _reassembled(draw: Any) -> str:
    """A text whose parts are each one of those known."""
    parts = [[], [], [], [], []]
    for text in _SOUND:
        for place, part in enumerate(text.split(";")[0].split("/")[:5]):
            parts[place].append(part)
    head = "/".join(draw(st.sampled_from(sorted({*p, *_TOKENS}))) for p in parts)
    options = draw(st.lists(st.sampled_from(_TOKENS), max_size=2))
    return ";".join((head, *options))


def spec_texts() -> st.SearchStrategy[str]:
    """Texts of planes, some of them right."""
    return st.one_of(
        st.sampled_from(_SOUND),
        _mutated(_SOUND, _TOKENS),
        _mutated(_SOUND, _TOKENS),
        _reassembled(),
        st.text(max_size=12),
    )


class TextRules(Pool):
    """PlaneSpec.parse, Format, Element, Quantizer.parse, recipes by name."""

    @fuzz(text=spec_texts(), stochastic=st.booleans())
    def parse_spec(self, text: str, stochastic: bool) -> None:
        """What parses has a text that parses to the same, and can be encoded everywhere."""
        spec, error = attempt(lambda: PlaneSpec.parse(text), f"PlaneSpec.parse {text!r}")
        if error is not None:
            return
        if PlaneSpec.parse(spec.text) != spec or PlaneSpec.parse(str(spec)).text != spec.text:
            raise Wrong(f"PlaneSpec.parse: {text!r} gives {spec.text!r}, which is another")
        x = torch.linspace(-3, 5, 3 * 40).view(3, 40)
        seed = torch.tensor([7])
        t, error = attempt(lambda: hybridq.quantize(x, spec, seed=seed), f"quantize {text!r}")
        if error is not None:
            return
        self.keep(t, f"quantize {text!r}")
        with hybridq.backend("reference"):
            if not same_planes(t, hybridq.quantize(x, spec, seed=seed)):
                raise Wrong(f"quantize: {spec.text}: not the reference's bytes")
        for plane in t.tensor_storage.planes:
            check_backends(plane, text)

    @fuzz(value=st.one_of(st.none(), st.integers(), st.binary(max_size=3), st.lists(st.none())))
    def parse_junk(self, value: Any) -> None:
        """What is no text is refused in words."""
        for name, call in {
            "PlaneSpec.parse": PlaneSpec.parse,
            "Format.parse": Format.parse,
            "Quantizer.parse": Quantizer.parse,
            "recipes.get": hybridq.recipes.get,
            "formats.format": hybridq.formats.format,
            "formats.element": hybridq.formats.element,
            "explain": hybridq.explain,
            "quantizer": hybridq.quantizer,
            "register_format": lambda v: hybridq.formats.register_format(v, v),
            "register_element": hybridq.formats.register_element,
        }.items():
            attempt(lambda call=call: call(value), f"{name}({value!r})")

    @fuzz(
        text=st.one_of(
            _mutated(
                ("mxfp8|nvfp4|original|11|", "|mxfp8|original|01|", "nvfp4||original|10|group"),
                ("|", "", "1", "2", "rowwise_dequantized", "mxfp8", *_TOKENS[:6]),
            ),
            st.text(max_size=8),
        )
    )
    def parse_quantizer(self, text: str) -> None:
        """What parses has a text that parses to the same."""
        made, error = attempt(lambda: Quantizer.parse(text), f"Quantizer.parse {text!r}")
        if error is None and Quantizer.parse(made.text) != made:
            raise Wrong(f"Quantizer.parse: {text!r} gives {made.text!r}, which is another")

    @fuzz(text=st.one_of(st.sampled_from(hybridq.recipes.names()), st.text(max_size=8)))
    def parse_recipe(self, text: str) -> None:
        """Recipes by name."""
        attempt(lambda: hybridq.recipes.get(text), "recipes.get")
        attempt(lambda: hybridq.autocast(recipe=text), "autocast")
        attempt(lambda: hybridq.formats.format(text), "format")
        attempt(lambda: hybridq.formats.element(text), "element")
        attempt(lambda: hybridq.explain(text, "mxfp8"), "explain")

    @fuzz(
        element=st.sampled_from((None, "e8m0", "e4m3", "e2m1", "bf16", "e3m4", "fp32", 5)),
        block=st.sampled_from(
            (None, (1, 16), (1, 0), (4, 4), (2, 4), (-1, 3), (1, 2**31), 7, (1,), (1.0, 16.0))
        ),
        scale=st.sampled_from((None, "e8m0", "e4m3", "fp32", "e5m2", "x")),
        rule=st.sampled_from(("amax", "rceil", "floor", "two_level", "identity", "none", None)),
        family=st.sampled_from(("own", "", "a/b", "a;b", "a|b", None, 5)),
        extra=st.sampled_from(
            ({}, {"power_of_two": True}, {"eps": 1e-3}, {"eps": -1}, {"eps": "a"}, {"eps": 1e39})
        ),
        options=st.sampled_from(
            ({}, {"signs": 3}, {"stochastic": True}, {"tensor_bound": 256.0}, {"row_scaled": True})
        ),
    )
    def build_format(
        self, element: Any, block: Any, scale: Any, rule: Any, family: Any, extra: Any, options: Any
    ) -> None:
        """A Format of any fields: refused, or usable everywhere."""
        code, scales = ELEMENTS.get(element, element), ELEMENTS.get(scale, scale)
        made, error = attempt(lambda: Format(code, block, scales, rule, family, **extra), "Format")
        if error is not None:
            return
        if Format.parse(str(made)) != made:
            raise Wrong(f"Format.parse: {made} is not its own text")
        spec, error = attempt(lambda: PlaneSpec(made, **options), "PlaneSpec")
        if error is None:
            self._use(spec)

    def _use(self, spec: PlaneSpec) -> None:
        if PlaneSpec.parse(spec.text) != spec:
            raise Wrong(f"PlaneSpec.parse: {spec.text} is not its own text")
        x, seed = torch.linspace(-2, 3, 5 * 21).view(5, 21), torch.tensor([1])
        t = hybridq.quantize(x, spec, seed=seed)
        self.keep(t, spec.text)
        with hybridq.backend("reference"):
            if not same_planes(t, hybridq.quantize(x, spec, seed=seed)):
                raise Wrong(f"quantize: {spec.text}: not the reference's bytes")

    @fuzz(
        name=st.sampled_from(("e4m3", "e3m3", "", "A", "a b", None)),
        bits=st.lists(st.integers(-2, 9), min_size=4, max_size=4),
        specials=st.sampled_from(("ieee", "fn", "none", "x", None)),
        sign=st.sampled_from((True, False, None)),
    )
    def build_element(self, name: Any, bits: list[int], specials: Any, sign: Any) -> None:
        """An Element of any fields."""
        made, error = attempt(lambda: Element(name, *bits, specials, sign), "Element")
        if error is None:
            for fact in ("max", "min_normal", "min_subnormal", "nan_code", "codes_per_byte"):
                attempt(lambda fact=fact: getattr(made, fact), f"Element.{fact}")
