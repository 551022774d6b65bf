"""The layout of Mistral's own checkpoints (consolidated): FP8 with one scale per tensor.

Those that it publishes for transformers are of the layout `fine-grained-fp8`.

Source: vLLM, `mistral_mapping` of its Llama: `qscale_weight` and `qscale_act` are what values of
weights and inputs are multiplied with.
"""

from __future__ import annotations

from typing import Any, Final

from .layout import Described, Layout, register
from .matching import by_name_or_pattern
from .per_tensor import fp8_tensor

__all__ = ["MISTRAL", "NAME"]

NAME: Final = "mistral"


def _config(said: Described) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "activation_scheme": said.inputs or "dynamic",
        "weight_block_size": None,
        "modules_to_not_convert": list(said.kept),
        "ignored_layers": list(said.kept),
    }


#: FP8 with one scale per tensor.
MISTRAL = register(
    Layout(
        name=NAME,
        summary="Mistral's own names: vLLM",
        source="vLLM, mistral_mapping",
        schemes=(fp8_tensor("qscale_weight", "qscale_act"),),
        methods=("fp8",),
        config=_config,
        excludes=by_name_or_pattern,
    )
)
