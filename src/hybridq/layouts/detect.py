"""Which layout a checkpoint has: by its configurations, or by the names of its tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import CheckpointError, must_be_one_of
from .compressed_tensors import COMPRESSED_TENSORS
from .fine_grained_fp8 import FINE_GRAINED_FP8
from .gpt_oss import GPT_OSS_MXFP4
from .layout import Layout, get, names
from .modelopt import MODELOPT
from .own import HYBRIDQ

__all__ = ["check_inputs_are_plain", "detect", "kv_cache_of"]

#: Ends of names that only one layout has.
_MARKS = (
    (".weight_packed", COMPRESSED_TENSORS),
    (".weight_scale_2", MODELOPT),
    (".weight_scale_inv", FINE_GRAINED_FP8),
    ("_proj_blocks", GPT_OSS_MXFP4),
    (".rowwise.data", HYBRIDQ),
    (".columnwise.data", HYBRIDQ),
)


def _said(config: Mapping[str, Any]) -> Any:
    """Return what a configuration, or that of the text in it, says of quantization."""
    said = config.get("quantization_config")
    text = config.get("text_config")
    if said is None and isinstance(text, Mapping):
        return text.get("quantization_config")
    return said


#: End of the names of factors that a linear layer multiplies its input with first.
_INPUT_FACTORS = ".pre_quant_scale"


def check_inputs_are_plain(tensors: Iterable[str]) -> None:
    """Raise where a product multiplies its input with factors of its own, channel by channel.

    Its weight means nothing without them, and no reader of these layouts asks for them.

    Args:
        tensors: names of the tensors of a checkpoint.

    Raises:
        CheckpointError: there are such factors.

    Source: the name is ModelOpt's, which keeps them where AWQ could not fold them.
    """
    found = [name for name in tensors if name.endswith(_INPUT_FACTORS)]
    if found:
        raise CheckpointError(
            f"layouts: a weight must multiply the input as it comes, got {found[0]!r}"
            f"{f' and {len(found) - 1} more' if len(found) > 1 else ''}, which scales the input "
            "first; fold it into the layer before, as hybridq.calibration.smooth and awq do "
            "without in_front"
        )


#: Rows and columns of a scale's block, where a configuration says them.
_BLOCK_SIZE = "weight_block_size"


def _check_blocks(layout: Layout, said: Mapping[str, Any]) -> None:
    """Raise where blocks are of another size than a layout's: shapes of scales may be the same."""
    known = [one.config[_BLOCK_SIZE] for one in layout.schemes if _BLOCK_SIZE in one.config]
    block = said.get(_BLOCK_SIZE)
    size = list(block) if isinstance(block, list | tuple) else block
    if known and size is not None and size not in known:
        raise CheckpointError(
            f"layouts: {_BLOCK_SIZE} of {layout.name} must be one of "
            f"{', '.join(map(str, known))}, got {block!r}"
        )


def detect(
    config: Mapping[str, Any] | None,
    tensors: Iterable[str],
    hf_quant_config: Mapping[str, Any] | None = None,
) -> Layout | None:
    """Return the layout of a checkpoint, or None where nothing in it is quantized.

    Args:
        config: what its `config.json` holds, or None if it has none.
        tensors: names of its tensors.
        hf_quant_config: what its `hf_quant_config.json` holds, or None.

    Raises:
        CheckpointError: it is quantized in a way that no layout reads, or that two could mean.
    """
    said = _said(config or {})
    method = said.get("quant_method") if isinstance(said, Mapping) else None
    if method is not None:
        for name in names():
            if method in get(name).methods:
                _check_blocks(get(name), said)
                return get(name)
        known = sorted({one for name in names() for one in get(name).methods})
        raise CheckpointError(
            f"layouts: quant_method of the configuration {must_be_one_of(known, method)}; no "
            "layout reads this checkpoint"
        )
    if hf_quant_config is not None:
        return MODELOPT
    found = []
    has_scale = False
    for tensor in tensors:
        found += [layout for mark, layout in _MARKS if tensor.endswith(mark)]
        has_scale = has_scale or tensor.endswith(".weight_scale")
    each = {layout.name: layout for layout in found}
    if len(each) > 1 or (has_scale and not each):
        raise CheckpointError(
            "layouts: the tensors' names could mean "
            f"{' or '.join(sorted(each) or ['compressed-tensors', 'modelopt'])}, and no "
            "configuration says which; name the layout"
        )
    return next(iter(each.values()), None)


def kv_cache_of(
    config: Mapping[str, Any] | None, hf_quant_config: Mapping[str, Any] | None = None
) -> str:
    """Return what a checkpoint says that KV caches are held in: `"fp8"` where it says nothing.

    Args:
        config: content of `config.json`, or None.
        hf_quant_config: content of `hf_quant_config.json`, or None.
    """
    said = _said(config or {})
    beside = (hf_quant_config or {}).get("quantization")
    scheme = said.get("kv_cache_scheme") if isinstance(said, Mapping) else None
    if not scheme and isinstance(beside, Mapping):
        scheme = beside.get("kv_cache_quant_algo")
    return scheme.lower() if isinstance(scheme, str) else "fp8"
