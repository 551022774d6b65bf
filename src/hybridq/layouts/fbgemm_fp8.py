"""The layout of FBGEMM's FP8 checkpoints, as Meta published Llama 3.1 405B in it.

Each linear may have `input_scale_ub`, at which readers cut the scale of a row of its input; they
take it from the configuration, and it is read over.

Source: transformers 5.24, `FbgemmFp8Config` and `FbgemmFp8Linear`; vLLM, `FBGEMMFp8Config`.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from .layout import Described, Layout, register
from .matching import by_start_or_end
from .part import Part
from .per_tensor import CODES, PER_ROW, WIDENED
from .scheme import Scheme

__all__ = ["FBGEMM_FP8", "NAME"]

NAME: Final = "fbgemm-fp8"
#: Readers cut amaxes of rows of inputs at this: what Meta's checkpoints say.
_UPPER_BOUND: Final = 1200.0


def _config(said: Described) -> dict[str, Any]:
    return {
        "quant_method": "fbgemm_fp8",
        "activation_scale_ub": _UPPER_BOUND,
        "modules_to_not_convert": list(said.kept),
    }


#: FP8 with one scale per row.
FBGEMM_FP8 = register(
    Layout(
        name=NAME,
        summary="vLLM and transformers: FP8 with one scale per row, as Meta published Llama",
        source="transformers 5.24, FbgemmFp8Config; vLLM, FBGEMMFp8Config",
        schemes=(
            Scheme(
                name="fp8_channel",
                spec=PER_ROW,
                parts=(
                    CODES,
                    Part("{module}.weight_scale", "scale", torch.float32, widened=WIDENED),
                ),
                inputs={"dynamic": "dynamic"},
            ),
        ),
        marks=(".input_scale_ub",),
        methods=("fbgemm_fp8",),
        config=_config,
        excludes=by_start_or_end,
    )
)
