"""A recipe in words: which formats each of its GEMMs multiplies."""

from __future__ import annotations

from collections.abc import Mapping

from ..formats import PlaneSpec
from ..gemm import CONTRACT
from ..quantizers import Quantizer

__all__ = ["gemm_formats", "gemms_text", "word"]

Formats = str | tuple[str, str] | None


def word(spec: PlaneSpec) -> str:
    """Return the string by which `hybridq.recipe` takes a plane: its format's name, and options.

    Args:
        spec: the plane's. `"bf16"` is a plane that is as it is, whatever its dtype.
    """
    if spec.format.is_identity:
        return "bf16" if spec.format.element is None else spec.text
    return spec.short_text


def gemm_formats(quantizers: Mapping[str, Quantizer]) -> dict[str, Formats]:
    """Return the formats of each GEMM's operands: one for both, a pair, or None.

    Args:
        quantizers: of the slots. A GEMM that lacks a plane has None.
    """
    found: dict[str, Formats] = {}
    for gemm in CONTRACT:
        a = getattr(quantizers[gemm.a], gemm.a_direction)
        b = getattr(quantizers[gemm.b], gemm.b_direction)
        if a is None or b is None:
            found[gemm.name] = None
        else:
            found[gemm.name] = word(a) if a == b else (word(a), word(b))
    return found


def gemms_text(quantizers: Mapping[str, Quantizer]) -> str:
    """Return one line: a format where it is everywhere the same, else those of each GEMM.

    Args:
        quantizers: of the slots.
    """
    found = gemm_formats(quantizers)
    kinds = set(found.values())
    if len(kinds) == 1 and isinstance(only := kinds.pop(), str):
        return only
    return ", ".join(f"{gemm} {_pair(formats)}" for gemm, formats in found.items())


def _pair(formats: Formats) -> str:
    if formats is None:
        return "lacks a plane"
    return formats if isinstance(formats, str) else " x ".join(formats)
