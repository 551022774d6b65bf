"""The layout of GPT-OSS's checkpoints: stacks of experts in MXFP4, all else as it is.

Source: the checkpoint gpt-oss-20b; transformers 5.23, `integrations/mxfp4.py`.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from .layout import Described, Layout, register
from .matching import by_start_or_end
from .part import GROUPS_OF_32, Part
from .scheme import Scheme

__all__ = ["GPT_OSS_MXFP4", "NAME"]

NAME: Final = "gpt-oss-mxfp4"

_MXFP4 = Scheme(
    name="mxfp4",
    spec="mxfp4",
    parts=(
        Part("{weight}_blocks", "data", torch.uint8, GROUPS_OF_32),
        Part("{weight}_scales", "scale", torch.uint8),
    ),
    inputs={"none": None},
)


def _config(said: Described) -> dict[str, Any]:
    return {"quant_method": "mxfp4", "modules_to_not_convert": list(said.kept)}


#: Stacks of experts in MXFP4.
GPT_OSS_MXFP4 = register(
    Layout(
        name=NAME,
        summary="experts of GPT-OSS: transformers, vLLM and SGLang",
        source="gpt-oss-20b; transformers 5.23, Mxfp4Config",
        schemes=(_MXFP4,),
        methods=("mxfp4",),
        config=_config,
        excludes=by_start_or_end,
        holds_stacks=True,
        holds_matrices=False,
    )
)
