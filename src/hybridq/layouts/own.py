"""hybridq's own layout: every plane of any format, with the planes' own buffers.

Source: ours; `hybridq.ptq.Record` says what the bytes do not.
"""

from __future__ import annotations

from typing import Any, Final

from ..direction import Direction
from ..errors import SpecError
from ..formats import PlaneSpec
from .layout import Described, Layout, register
from .matching import by_start_or_end
from .part import Part
from .scheme import Scheme

__all__ = ["HYBRIDQ", "NAME", "VERSION"]

NAME: Final = "hybridq"
#: Of the configuration's fields. A reader refuses a later one.
VERSION: Final = 1


def _scheme(spec: PlaneSpec, direction: Direction) -> Scheme:
    """Return the scheme of planes of `spec`: each buffer as it is."""
    parts = []
    for buffer in spec.buffers(1, 1):
        if buffer.dtype is None:
            raise SpecError(
                f"layouts: {NAME} holds identity planes of a fixed dtype, got {spec.text}; "
                "resolve it first"
            )
        parts.append(Part(f"{{weight}}.{direction}.{buffer.name}", buffer.name, buffer.dtype))
    return Scheme(name=spec.short_text, spec=spec.text, parts=tuple(parts), inputs={"none": None})


def _config(said: Described) -> dict[str, Any]:
    specs = sorted({scheme.spec for scheme in said.schemes.values()})
    if len(specs) > 1:
        raise SpecError(
            f"layouts: {NAME}'s configuration says one format for all weights, or a recipe, got "
            f"{' and '.join(specs)}"
        )
    made: dict[str, Any] = {"quant_method": NAME, "version": VERSION, "format": specs[0]}
    return {**made, "columnwise": None, "modules_to_not_convert": list(said.kept)}


#: All formats, both planes.
HYBRIDQ = register(
    Layout(
        name=NAME,
        summary="hybridq itself: both planes of every format, to train from",
        source="ours",
        schemes=(),
        methods=(NAME,),
        config=_config,
        excludes=by_start_or_end,
        holds_stacks=True,
        scheme_for=_scheme,
    )
)
