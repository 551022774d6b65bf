"""The layout of AMD's Quark: MXFP4 for its own chips, and FP8 per tensor or per row.

Source: amd-quark 0.13, `quark.torch.export`; vLLM, `QuarkConfig`; SGLang, `quark`.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

import torch

from .layout import Described, Layout, register
from .matching import by_name_pattern_or_glob
from .part import FACTOR, ROWS, Part, ScalarPart
from .per_tensor import CODES, PER_ROW, WIDENED, fp8_tensor, input_scale
from .scheme import Scheme

__all__ = ["NAME", "QUARK"]

NAME: Final = "quark"

_VERSION: Final = "0.13"
_KV: Final = ("k_proj", "v_proj")


def _spec(dtype: str, qscheme: str, dynamic: bool, **more: Any) -> dict[str, Any]:
    """Return what a configuration says of one tensor: all keys that Quark writes of it."""
    return {
        "dtype": dtype,
        "qscheme": qscheme,
        "is_dynamic": dynamic,
        "ch_axis": None,
        "group_size": None,
        "symmetric": True,
        "round_method": "half_even",
        "scale_type": "float",
        "scale_format": None,
        "scale_calculation_mode": None,
        **more,
    }


def _fp8(dynamic: bool) -> dict[str, Any]:
    return _spec("fp8_e4m3", "per_tensor", dynamic, observer_cls="PerTensorMinMaxObserver")


def _fp8_rows(dynamic: bool, axis: int) -> dict[str, Any]:
    observer = "PerChannelMinMaxObserver"
    return _spec("fp8_e4m3", "per_channel", dynamic, ch_axis=axis, observer_cls=observer)


def _mxfp4(dynamic: bool) -> dict[str, Any]:
    return _spec(
        *("fp4", "per_group", dynamic),
        ch_axis=-1,
        group_size=32,
        symmetric=None,
        scale_format="e8m0",
        scale_calculation_mode="even",
        observer_cls="PerBlockMXObserver",
    )


_MXFP4 = Scheme(
    name="mxfp4",
    spec="mxfp4",
    parts=(
        Part("{module}.weight", "data", torch.uint8),
        Part("{module}.weight_scale", "scale", torch.uint8),
    ),
    config=_mxfp4(False),
    inputs={"dynamic": _mxfp4(True)},
)
_FP8_TENSOR = fp8_tensor(
    *("weight_scale", "input_scale"),
    config=_fp8(False),
    inputs={"dynamic": _fp8_rows(True, 1), "static": _fp8(False)},
)
_FP8_CHANNEL = Scheme(
    name="fp8_channel",
    spec=PER_ROW,
    parts=(CODES, Part("{module}.weight_scale", "scale", torch.float32, ROWS, widened=WIDENED)),
    input=input_scale("input_scale"),
    config=_fp8_rows(False, 0),
    inputs={"dynamic": _fp8_rows(True, 1), "static": _fp8(False)},
)


def _of_scheme(said: Described, scheme: Scheme) -> dict[str, Any]:
    inputs = scheme.inputs[said.inputs or next(iter(scheme.inputs))]
    made = {"weight": dict(scheme.config), "input_tensors": dict(inputs)}
    return {**made, "output_tensors": None, "bias": None, "target_device": None}


def _config(said: Described) -> dict[str, Any]:
    counts = Counter(scheme.name for scheme in said.schemes.values())
    [(common, _)] = counts.most_common(1)
    own = next(scheme for scheme in said.schemes.values() if scheme.name == common)
    others = {
        name: _of_scheme(said, scheme)
        for name, scheme in said.schemes.items()
        if scheme.name != common
    }
    groups = [] if said.kv_cache is None else [f"*{name}" for name in _KV]
    # Readers take the first entry that matches: single names before patterns.
    layers = {**others, **{group: _of_scheme(said, own) for group in groups}}
    if groups:
        for name, layer in layers.items():
            if name.endswith(_KV):
                layer["output_tensors"] = _fp8(False)
    return {
        "quant_method": NAME,
        "global_quant_config": _of_scheme(said, own),
        "layer_quant_config": layers,
        "layer_type_quant_config": {},
        "kv_cache_quant_config": {group: layers[group] for group in groups},
        "kv_cache_post_rope": False,
        "exclude": list(said.kept),
        "algo_config": None,
        "softmax_quant_spec": None,
        "quant_mode": "eager_mode",
        "version": _VERSION,
        "export": {
            "kv_cache_group": groups,
            "min_kv_scale": 0.0,
            "pack_method": "reorder",
            "weight_format": "real_quantized",
            "weight_merge_groups": None,
        },
    }


#: MXFP4, and FP8 per tensor or per row.
QUARK = register(
    Layout(
        name=NAME,
        summary="AMD's Quark: vLLM and SGLang, transformers with the package amd-quark",
        source="amd-quark 0.13, quark.torch.export",
        schemes=(_MXFP4, _FP8_TENSOR, _FP8_CHANNEL),
        methods=(NAME,),
        config=_config,
        excludes=by_name_pattern_or_glob,
        kv={
            "fp8": (
                ScalarPart("{attention}.k_proj.output_scale", "k", (), FACTOR, 448.0),
                ScalarPart("{attention}.v_proj.output_scale", "v", (), FACTOR, 448.0),
            )
        },
    )
)
