"""Which layout a checkpoint has: by its configurations, or by the names of its tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..errors import CheckpointError, must_be_one_of
from .auto_fp8 import AUTO_FP8
from .comfyui import COMFYUI, METADATA
from .compressed_tensors import COMPRESSED_TENSORS
from .deepseek_v4 import DEEPSEEK_V4
from .fbgemm_fp8 import FBGEMM_FP8
from .fine_grained_fp8 import FINE_GRAINED_FP8
from .gpt_oss import GPT_OSS_MXFP4
from .layout import Layout, get, names
from .mistral import MISTRAL
from .mlx import CONFIG_KEY, MLX, is_of_mlx
from .modelopt import MODELOPT
from .own import HYBRIDQ
from .quark import QUARK
from .torchao import TORCHAO

__all__ = [
    "ENTRIES",
    "check_inputs_are_plain",
    "detect",
    "kv_cache_of",
    "said_of",
    "without_entries",
]

#: Ends of names that only one layout has, where no configuration says which it is.
_MARKS = (
    (".weight_packed", COMPRESSED_TENSORS),
    (".weight_scale_2", MODELOPT),
    ("_scale_inv", FINE_GRAINED_FP8),  # of a weight, or of a stack under its own name
    (".qscale_weight", MISTRAL),
    ("_proj_blocks", GPT_OSS_MXFP4),
    (".scales", MLX),
    ("_qdata", TORCHAO),
    (".rowwise.data", HYBRIDQ),
    (".columnwise.data", HYBRIDQ),
)


#: Layouts of FP8 that call a weight's scale the same.
_WITH_SCALES = tuple(
    one.name for one in (AUTO_FP8, COMPRESSED_TENSORS, FBGEMM_FP8, MODELOPT, QUARK)
)


#: Entries of a configuration that say how its model is quantized, the second of old
#: compressed-tensors.
ENTRIES = ("quantization_config", "compression_config")


def said_of(config: Mapping[str, Any]) -> Any:
    """Return what a configuration says of quantization, or the first one in it that does; or None.

    Args:
        config: what a `config.json` holds; configurations of parts (`text_config`,
            `thinker_config.text_config`, ...) stand in it.
    """
    for key in ENTRIES:
        said = config.get(key)
        if isinstance(said, Mapping) and key == ENTRIES[1]:
            return {"quant_method": COMPRESSED_TENSORS.name, **said}
        if said is not None:
            return said
    if is_of_mlx(config.get(CONFIG_KEY)):
        return config[CONFIG_KEY]
    parts = (said_of(one) for one in config.values() if isinstance(one, Mapping))
    return next((said for said in parts if said is not None), None)


def without_entries(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration, and those of its parts, without what is said of quantization.

    Args:
        config: what a `config.json` holds.
    """
    return {
        key: without_entries(one) if isinstance(one, Mapping) else one
        for key, one in config.items()
        if key not in ENTRIES and not (key == CONFIG_KEY and is_of_mlx(one))
    }


def _method_of(said: Any) -> Any:
    """Return `quant_method` as the table of layouts spells it."""
    method = said.get("quant_method") if isinstance(said, Mapping) else None
    spelled = COMPRESSED_TENSORS.name.replace("-", "_")
    return COMPRESSED_TENSORS.name if method == spelled else method


#: What a linear layer multiplies its input with first, factors or a rotation: ends of their names.
_OF_INPUTS = (".pre_quant_scale", ".input_rotation")
#: Start of the last part of the name of a rotation that many layers have.
_SHARED_ROTATION = "shared_input_rotation_"


def check_inputs_are_plain(tensors: Iterable[str], config: Mapping[str, Any] | None = None) -> None:
    """Raise where a product multiplies its input with factors or a rotation of its own.

    Its weight means nothing without them, and no reader of these layouts asks for them.

    Args:
        tensors: names of the tensors of a checkpoint.
        config: what its `config.json` holds, or None.

    Raises:
        CheckpointError: there are such factors, or a rotation.

    Source: the names are ModelOpt's, which keeps factors where AWQ could not fold them, and
    Quark's, for rotations that run in front of a layer; `transform_config` is compressed-tensors'.
    """
    said = said_of(config or {})
    transforms = said.get("transform_config") if isinstance(said, Mapping) else None
    for name, where in _transforms_at_run_time(transforms):
        raise CheckpointError(
            f"layouts: a weight must multiply the input as it comes, got transform {name!r} of "
            f"the configuration, which runs in front of products or behind them ({where!r}); "
            "quantize the model with transforms that are part of its weights alone"
        )
    found = [
        name
        for name in tensors
        if name.endswith(_OF_INPUTS) or name.rpartition(".")[2].startswith(_SHARED_ROTATION)
    ]
    if found and not found[0].endswith(_OF_INPUTS[0]):
        raise CheckpointError(
            f"layouts: a weight must multiply the input as it comes, got {found[0]!r}"
            f"{f' and {len(found) - 1} more' if len(found) > 1 else ''}, which rotates the input "
            "first; quantize the model without rotations that run in front of its layers"
        )
    if found:
        raise CheckpointError(
            f"layouts: a weight must multiply the input as it comes, got {found[0]!r}"
            f"{f' and {len(found) - 1} more' if len(found) > 1 else ''}, which scales the input "
            "first; fold it into the layer before, as hybridq.calibration.smooth and awq do "
            "without in_front"
        )


def _transforms_at_run_time(said: object) -> Iterator[tuple[str, str]]:
    """Yield name and place of each transform that is no part of a weight.

    Args:
        said: `transform_config` of a configuration, or anything else.
    """
    groups = said.get("config_groups") if isinstance(said, Mapping) else None
    for name, group in groups.items() if isinstance(groups, Mapping) else ():
        for one in group.get("apply") or () if isinstance(group, Mapping) else ():
            where = one.get("location") if isinstance(one, Mapping) else None
            if where is not None and not str(where).startswith("weight_"):
                yield str(name), str(where)


#: Rows and columns of a scale's block, where a configuration says them, for all weights and in a
#: group of them.
_BLOCK_SIZE = "weight_block_size"
_BLOCK_OF_GROUP = "block_structure"


def _blocks_of(said: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield each size of blocks that a configuration says, with its key."""
    if said.get(_BLOCK_SIZE) is not None:
        yield _BLOCK_SIZE, said[_BLOCK_SIZE]
    groups = said.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping) and weights.get(_BLOCK_OF_GROUP) is not None:
            yield _BLOCK_OF_GROUP, weights[_BLOCK_OF_GROUP]


def _check_blocks(layout: Layout, said: Mapping[str, Any]) -> None:
    """Raise where blocks are of another size than a layout's: shapes of scales may be the same."""
    own = [one.config for one in layout.schemes]
    known = {
        _BLOCK_SIZE: [one[_BLOCK_SIZE] for one in own if _BLOCK_SIZE in one],
        _BLOCK_OF_GROUP: [
            one["weights"][_BLOCK_OF_GROUP]
            for one in own
            if _BLOCK_OF_GROUP in one.get("weights", {})
        ],
    }
    for key, block in _blocks_of(said):
        size = list(block) if isinstance(block, list | tuple) else block
        if isinstance(size, str) and key == _BLOCK_OF_GROUP:  # older ones say "128x128"
            size = [int(one) if one.isdigit() else one for one in size.split("x")]
        if known[key] and size not in known[key]:
            raise CheckpointError(
                f"layouts: {key} of {layout.name} must be one of "
                f"{', '.join(map(str, known[key]))}, got {block!r}"
            )


#: All say "fp8" in their configurations: the last part of the names of their scales, or its end.
_OF_FP8 = {
    "_scale_inv": FINE_GRAINED_FP8,
    "qscale_weight": MISTRAL,
    "weight_scale": AUTO_FP8,
    "scale": DEEPSEEK_V4,
}


def _of_fp8(said: Mapping[str, Any], tensors: Iterable[str]) -> Layout:
    """Return which layout a configuration means: by names of scales, or by the blocks in it."""
    ends = {name.rpartition(".")[2] for name in tensors}
    found = [
        layout
        for end, layout in _OF_FP8.items()
        if end in ends or (end.startswith("_") and any(one.endswith(end) for one in ends))
    ]
    if found:
        return found[0]
    return FINE_GRAINED_FP8 if _BLOCK_SIZE in said else AUTO_FP8


#: Ends of names that ComfyUI's files alone have; others of theirs are other layouts' too.
_OF_COMFYUI = (*COMFYUI.marks, ".scale_weight")


def detect(
    config: Mapping[str, Any] | None,
    tensors: Iterable[str],
    hf_quant_config: Mapping[str, Any] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Layout | None:
    """Return the layout of a checkpoint, or None where nothing in it is quantized.

    Args:
        config: what its `config.json` holds, or None if it has none.
        tensors: names of its tensors.
        hf_quant_config: what its `hf_quant_config.json` holds, or None.
        metadata: strings in the headers of its files, or None.

    Raises:
        CheckpointError: it is quantized in a way that no layout reads, or that two could mean.
    """
    said = said_of(config or {})
    method = _method_of(said)
    if method is not None:
        own = [get(name) for name in names() if method in get(name).methods]
        if own:
            layout = _of_fp8(said, tensors) if method == "fp8" else own[0]
            _check_blocks(layout, said)
            return layout
        known = sorted({one for name in names() for one in get(name).methods})
        raise CheckpointError(
            f"layouts: quant_method of the configuration {must_be_one_of(known, method)}; no "
            "layout reads this checkpoint; decode it with the program that wrote it, and give it "
            "in BF16"
        )
    if hf_quant_config is not None:
        return MODELOPT
    if is_of_mlx(said):
        return MLX
    tensors = tuple(f".{name}" for name in tensors)  # that of one module may be its weight's alone
    if METADATA in (metadata or {}) or any(name.endswith(_OF_COMFYUI) for name in tensors):
        return COMFYUI
    found = []
    has_scale = False
    for tensor in tensors:
        found += [layout for mark, layout in _MARKS if tensor.endswith(mark)]
        has_scale = has_scale or tensor.endswith(".weight_scale")
    each = {layout.name: layout for layout in found}
    if len(each) > 1 or (has_scale and not each):
        raise CheckpointError(
            "layouts: the tensors' names could mean "
            f"{' or '.join(sorted(each) or _WITH_SCALES)}, and no "
            "configuration says which; name the layout (--from, or the second argument of "
            "load_checkpoint)"
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
    said = said_of(config or {})
    beside = (hf_quant_config or {}).get("quantization")
    scheme = said.get("kv_cache_scheme") if isinstance(said, Mapping) else None
    if not scheme and isinstance(beside, Mapping):
        scheme = beside.get("kv_cache_quant_algo")
    # AutoFP8 says "static", of scales.
    return scheme.lower() if isinstance(scheme, str) and scheme != "static" else "fp8"
