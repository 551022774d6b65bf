"""Formats of rows that travel by themselves."""

from __future__ import annotations

from functools import lru_cache

from ..errors import SpecError
from .spec import PlaneSpec

__all__ = ["row_format"]


@lru_cache(maxsize=256)
def row_format(where: str, text: str) -> str:
    """Return the spec string of a format as it travels: each row by itself.

    What a row becomes must not depend on the rows beside it, which other numbers of ranks would
    change. So NVFP4 has an amax for each row, and formats with one scale for a tensor are refused.

    Args:
        where: the function, for errors.
        text: name of a format, or of a PlaneSpec; empty: values as they are.

    Raises:
        SpecError: an unknown name, or a format whose scales are not of one row.
    """
    if not text:
        return ""
    spec = PlaneSpec.parse(text)
    if spec.format.is_identity:
        return spec.text
    if spec.format.rule == "two_level" and not spec.row_scaled and not spec.format.is_square:
        spec = PlaneSpec.parse(f"{spec.text};rows")
    if spec.unit(0) != 1 or spec.needs_tensor_amax or spec.format.block is None:
        raise SpecError(
            f"{where}: rows travel in formats whose scales are of one row each, such as mxfp8, "
            f"fp8_1x128 and nvfp4, got {text!r}"
        )
    return spec.text
