"""The layout of Apple's MLX: folders that mlx-lm loads, in its modes `mxfp4`, `mxfp8` and `nvfp4`.

Codes lie in words of 32 bits, the first in the lowest bits, which are the bytes of a plane; stacks
of experts are single tensors. Its NVFP4 has no second-level scale, so that small weights have
subnormal block scales: it is read, and not written; of stacks, it may have each expert's amax.

Source: mlx 0.32, `mlx.core.quantize`; mlx-lm 0.32, `mlx_lm.utils` (configurations, what it infers
from shapes) and `mlx_lm.models.switch_layers` (stacks).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

import torch

from .layout import Described, Layout, register
from .matching import by_name
from .part import SAME, SCALAR, WORDS, Part
from .scheme import Scheme

__all__ = ["CONFIG_KEY", "MLX", "NAME", "is_of_mlx"]

NAME: Final = "mlx"
#: Where a configuration says it, beside where the Hugging Face Hub looks for it.
CONFIG_KEY: Final = "quantization"
_U8: Final = torch.uint8
#: The factor of a plane with this amax is 1.
_AMAX_OF_ONE: Final = 448.0 * 6.0
_CODES: Final = Part("{module}.weight", "data", torch.uint32, WORDS)


def is_of_mlx(said: Any) -> bool:
    """Return whether what a configuration says of quantization is MLX's.

    Args:
        said: an entry of it.
    """
    if not isinstance(said, Mapping):
        return False
    return {"group_size", "bits"} <= said.keys() and "quant_method" not in said


def _mode(name: str, group_size: int, bits: int, scales: torch.dtype = _U8) -> Scheme:
    return Scheme(
        name=name,
        spec=name,
        parts=(_CODES, Part("{module}.scales", "scale", scales, SAME, widened=(_U8,))),
        config={"group_size": group_size, "bits": bits, "mode": name},
        inputs={"none": "none"},
        constants={} if name != "nvfp4" else {"amax": _AMAX_OF_ONE},
    )


_MXFP4, _MXFP8 = _mode("mxfp4", 32, 4), _mode("mxfp8", 32, 8)
_NVFP4 = _mode("nvfp4", 16, 4, torch.float8_e4m3fn)
_NVFP4_OF_EXPERTS = Scheme(
    name="nvfp4",
    spec="nvfp4",
    parts=(*_NVFP4.parts, Part("{module}.global_scale", "amax", torch.float32, SCALAR)),
    config=_NVFP4.config,
)


def _config(said: Described) -> dict[str, Any]:
    """Return the mode of most modules, and by name that of the others."""
    counts = Counter(one.name for one in said.schemes.values())
    [(most, _)] = counts.most_common(1)
    own = next(one for one in said.schemes.values() if one.name == most)
    others = {name: dict(one.config) for name, one in said.schemes.items() if one.name != most}
    return {**own.config, **others}


#: MXFP4 and MXFP8; NVFP4, and stacks of experts, are read.
MLX = register(
    Layout(
        name=NAME,
        summary="mlx-lm, on Apple's chips and on CPUs",
        source="mlx 0.32, mlx.core.quantize; mlx-lm 0.32",
        schemes=(_MXFP4, _MXFP8),
        others=(_NVFP4,),
        stacks=(_MXFP4, _MXFP8, _NVFP4_OF_EXPERTS, _NVFP4),
        methods=(),
        config=_config,
        config_keys=(CONFIG_KEY, "quantization_config"),
        excludes=by_name,
    )
)
