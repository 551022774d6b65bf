"""The layout of vLLM's own FP8 checkpoints, as AutoFP8 wrote them: one scale per tensor.

Source: AutoFP8 0.1, `auto_fp8.quantize`; vLLM, `Fp8Config` without `weight_block_size`; SGLang.
"""

from __future__ import annotations

from typing import Any, Final

from .layout import Described, Layout, register
from .matching import by_name_or_pattern
from .part import FACTOR, ScalarPart
from .per_tensor import fp8_tensor

__all__ = ["AUTO_FP8", "NAME"]

NAME: Final = "auto-fp8"


def _config(said: Described) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "activation_scheme": said.inputs or "dynamic",
        "ignored_layers": list(said.kept),
        **({} if said.kv_cache is None else {"kv_cache_scheme": "static"}),
    }


#: FP8 with one scale per tensor.
AUTO_FP8 = register(
    Layout(
        name=NAME,
        summary="vLLM's and SGLang's FP8 with one scale per tensor, as AutoFP8 wrote it",
        source="AutoFP8 0.1; vLLM, Fp8Config",
        schemes=(fp8_tensor("weight_scale", "input_scale"),),
        methods=("fp8",),
        config=_config,
        excludes=by_name_or_pattern,
        kv={
            "fp8": (
                ScalarPart("{attention}.k_proj.output_scale", "k", (), FACTOR, 448.0),
                ScalarPart("{attention}.v_proj.output_scale", "v", (), FACTOR, 448.0),
            )
        },
    )
)
