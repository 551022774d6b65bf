"""ml_dtypes: element casts and the values of codes. Its NumPy types have no scales.

Source: https://github.com/jax-ml/ml_dtypes
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from ..case import Array, Buffers, Case

__all__ = ["ADAPTER"]

_TYPES = {
    "e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
    "e2m1": "float4_e2m1fn",
    "e3m2": "float6_e3m2fn",
    "e2m3": "float6_e2m3fn",
}


def _type(case: Case) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, _TYPES[case.spec["element"]]))


class _MLDtypes:
    name = f"ml_dtypes {ml_dtypes.__version__}"

    def supports(self, case: Case) -> str | None:
        if case.kind not in ("cast", "uncast"):
            return "has elements only, no scales"
        if case.spec["element"] not in _TYPES:
            return f"has no {case.spec['element']}"
        return None

    def encode(self, x: Array, case: Case) -> Buffers:
        with np.errstate(all="ignore"):
            return {"data": x.astype(_type(case)).view(np.uint8)}

    def decode(self, buffers: Buffers, case: Case) -> Array:
        return buffers["data"].view(_type(case)).astype(np.float32)


ADAPTER = _MLDtypes()
