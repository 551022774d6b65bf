"""The layout of Mistral's own checkpoints (consolidated): FP8 with one scale per tensor.

Those that it publishes for transformers are of the layout `fine-grained-fp8`.

Source: vLLM, `mistral_mapping` of its Llama: `qscale_weight` and `qscale_act` are what values of
weights and inputs are multiplied with.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from .layout import Described, Layout, register
from .matching import by_name_or_pattern
from .part import FACTOR, SCALAR, Part, ScalarPart
from .scheme import Scheme

__all__ = ["MISTRAL", "NAME"]

NAME: Final = "mistral"

_FP8_TENSOR = Scheme(
    name="fp8_tensor",
    spec="fp8_e4m3",
    parts=(
        Part("{module}.weight", "data", torch.float8_e4m3fn),
        Part(
            *("{module}.qscale_weight", "scale", torch.float32, SCALAR),
            widened=(torch.bfloat16, torch.float16),
        ),
    ),
    input=ScalarPart("{module}.qscale_act", "input", (), FACTOR, 448.0),
    shares_scale=True,
    inputs={"dynamic": "dynamic", "static": "static"},
)


def _config(said: Described) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "activation_scheme": said.inputs or "dynamic",
        "weight_block_size": None,
        "modules_to_not_convert": list(said.kept),
    }


#: FP8 with one scale per tensor.
MISTRAL = register(
    Layout(
        name=NAME,
        summary="Mistral's own names: vLLM",
        source="vLLM, mistral_mapping",
        schemes=(_FP8_TENSOR,),
        methods=("fp8",),
        config=_config,
        excludes=by_name_or_pattern,
    )
)
