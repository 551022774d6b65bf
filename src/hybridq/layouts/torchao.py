"""The layout of torchao's checkpoints, which transformers writes with `TorchAoConfig`; read only.

A weight `M.W` stands as `M._W_qdata`, `M._W_scale` and so on, and the metadata of a file says as
JSON of which class each tensor was. torchao 0.14 called them `M.W:qdata`, `M.W:scale`, and plain
tensors `M.W:_data`. Scales of MX and NVFP4 are swizzled or not; their shapes tell. Stacks of
experts have their scales along the last axis, whatever their model multiplies along.

No reader takes a file by its metadata alone: transformers makes the class that `config.json` names,
of the version that is installed.

Source: torchao 0.14 to 0.18, `prototype/safetensors`, `Float8Tensor`, `MXTensor`, `NVFP4Tensor`;
transformers 5.24, `TorchAoHfQuantizer`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NoReturn

import torch

from ..errors import CheckpointError, SpecError
from .layout import Described, Layout, register
from .matching import by_start_or_end
from .order import AS_IS, TILES
from .part import FACTOR, ONE_BY_ONE, SAME, SCALAR, SWIZZLED, Part, ScalarPart, Shape
from .said import Said
from .scheme import Scheme
from .stored import StoredWeight

__all__ = ["INSTEAD", "NAME", "TORCHAO", "current_names", "without_classes"]

NAME: Final = "torchao"
#: What to take where it would be written.
INSTEAD: Final = (
    "compressed-tensors, which transformers, vLLM and SGLang read with the same formats"
)

_U8, _E4M3, _E8M0 = torch.uint8, torch.float8_e4m3fn, torch.float8_e8m0fnu
_FP32: Final = torch.float32
#: Largest code times largest block scale of NVFP4: with it as an amax the factor is 1.
_LARGEST: Final = 448.0 * 6.0
#: Key of the metadata: names of all tensors, each a key of its own.
_NAMES: Final = "tensor_names"
#: The class of what is not quantized.
_PLAIN: Final = "Tensor"
#: The classes that are read.
_CLASSES: Final = ("Float8Tensor", "MXTensor", "NVFP4Tensor")
#: Columns of a scale's block in one row.
_GROUPS: Final = (32, 64, 128)


def _part(name: str, buffer: str, dtype: torch.dtype, shape: Shape = SAME) -> Part:
    order = TILES if shape is SWIZZLED else AS_IS
    return Part(f"{{parent}}._{{leaf}}_{name}", buffer, dtype, shape, order=order)


def _fp8(name: str, block: str, scale: Shape = SAME) -> Scheme:
    spec = f"e4m3/{block}/fp32/amax/float8_block" if block else "fp8_e4m3"
    parts = (_part("qdata", "data", _E4M3), _part("scale", "scale", _FP32, scale))
    return Scheme(name, spec, parts, config={"_type": "Float8Tensor"})


def _mx(name: str, codes: torch.dtype, element: str, scale: Shape) -> Scheme:
    parts = (_part("qdata", "data", codes), _part("scale", "scale", _E8M0, scale))
    said = {"_type": "MXTensor", "elem_dtype": element, "block_size": 32}
    return Scheme(name, name, parts, config=said)


_FACTOR: Final = Part("{parent}._{leaf}_per_tensor_scale", "amax", _FP32, SCALAR, FACTOR)
_ACT_SCALE: Final = "act_per_tensor_scale"
_INPUT: Final = ScalarPart(f"{{module}}._weight_{_ACT_SCALE}", "input", (), FACTOR, _LARGEST)


def _nvfp4(scale: Shape, *factor: Part) -> Scheme:
    """Return the scheme with a second-level scale, or of blocks alone."""
    parts = (_part("qdata", "data", _U8), _part("scale", "scale", _E4M3, scale), *factor)
    said = {"_type": "NVFP4Tensor", "block_size": 16}
    constants = {} if factor else {"amax": _LARGEST}
    return Scheme("nvfp4", "nvfp4", parts, _INPUT, config=said, constants=constants)


_FP8: Final = (
    _fp8("fp8_tensor", "", ONE_BY_ONE),
    _fp8("fp8_channel", "1x{cols}"),
    _fp8("fp8_block", "128x128"),
    *(_fp8("fp8_group", f"1x{cols}") for cols in _GROUPS),
)
_MX: Final = (
    *(_mx("mxfp8", _E4M3, "float8_e4m3fn", scale) for scale in (SWIZZLED, SAME)),
    *(_mx("mxfp4", _U8, "float4_e2m1fn_x2", scale) for scale in (SWIZZLED, SAME)),
)
_NVFP4: Final = (
    *(_nvfp4(scale, _FACTOR) for scale in (SWIZZLED, SAME)),
    *(_nvfp4(scale) for scale in (SWIZZLED, SAME)),
)


def _config(said: Described) -> NoReturn:
    del said
    raise SpecError(f"layouts: {NAME} is read, and not written; take {INSTEAD}")


def _classes(metadata: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return what metadata says of each tensor, by name; empty: it is not torchao's."""
    try:
        said = {name: json.loads(metadata[name]) for name in json.loads(metadata[_NAMES])}
    except (KeyError, TypeError, ValueError, RecursionError):
        return {}
    return said if all(map(_is_class, said.values())) else {}


def _is_class(said: Any) -> bool:
    """Return whether JSON says of a tensor what torchao says."""
    kinds = {"_type": str, "_data": dict, "_tensor_data_names": list}
    return (
        isinstance(said, dict)
        and "_type" in said
        and all(isinstance(said.get(key, kind()), kind) for key, kind in kinds.items())
    )


def without_classes(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the metadata of a file without what torchao says of its tensors.

    Args:
        metadata: of the file.
    """
    own = _classes(metadata)
    taken = {*own, _NAMES} if own else own
    return {key: value for key, value in metadata.items() if key not in taken}


def current_names(names: Iterable[str], metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the names that torchao since 0.15 gives the tensors of a file, by those in it.

    Args:
        names: of the tensors.
        metadata: of the file.
    """
    made = {}
    classes = _classes(metadata)
    for name in names:
        weight, _, part = name.rpartition(":")
        if weight not in classes:
            continue
        parent, _, leaf = weight.rpartition(".")
        made[name] = weight if part == "_data" else f"{parent}._{leaf}_{part}".removeprefix(".")
    return made


def _check(weights: Mapping[str, StoredWeight], given: Said) -> None:
    """Raise where weights are not what the metadata of their files says.

    Shapes and dtypes do not tell blocks of 48 columns from ones of 64, MXFP6 from MXFP4, nor a
    second-level scale that is gone from one that never was.

    Args:
        weights: that are quantized, as they were found by names, dtypes and shapes.
        given: what the files say; the header of each may name all tensors or its own.

    Raises:
        CheckpointError: it says nothing of a weight, or something else.
    """
    classes = {name: said for one in given.headers for name, said in _classes(one).items()}
    for name, said in classes.items():
        kind = said["_type"]
        if kind not in (_PLAIN, *_CLASSES):
            raise CheckpointError(
                f"layouts: {name!r} is {NAME}'s {kind}, and no layout reads that; decode the "
                "checkpoint with the program that wrote it, and give it in BF16"
            )
        if kind != _PLAIN and name not in weights:
            raise CheckpointError(
                f"layouts: {NAME} must hold the parts of {name!r}, {NAME}'s {kind} by the "
                "metadata; they are not there, or of shapes that do not fit each other"
            )
    for name, weight in weights.items():
        if name not in classes:
            raise CheckpointError(
                f"layouts: the metadata of a file of {NAME} must say the class of {name!r}, got "
                f"nothing; {NAME} could not read it either, so write it anew from its source"
            )
        for what, asked, found in _asked(weight, classes[name]):
            if asked != found:
                raise CheckpointError(
                    f"layouts: {what} of {name!r}, {NAME}'s {classes[name]['_type']}, must be "
                    f"{asked}, got {found}; decode the checkpoint with the program that wrote it, "
                    "and give it in BF16"
                )


def _asked(weight: StoredWeight, said: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield what metadata says of a weight: its key, what it must say, what it says."""
    own: dict[str, Any] = {"_type": said["_type"], **said.get("_data", {})}
    for key, asked in weight.scheme.config.items():
        found = own.get(key)
        yield key, asked, found.get("_data") if isinstance(found, dict) else found
    block = own.get("block_size")
    if isinstance(block, list):  # of Float8Tensor, no larger than the matrix
        sizes = weight.spec.format.block or weight.matrix
        own_block = [min(one, size) for one, size in zip(sizes, weight.matrix, strict=True)]
        yield "block_size", [1] * (len(weight.shape) - 2) + own_block, block
    parts = [one.name.rpartition("}_")[2] for one in weight.scheme.parts]
    names = said.get("_tensor_data_names", parts)  # torchao 0.14 does not say them
    yield "the parts", sorted(parts), sorted({*map(str, names)} - {_ACT_SCALE})


#: FP8, MXFP8, MXFP4 and NVFP4, read only.
TORCHAO = register(
    Layout(
        name=NAME,
        summary="torchao's own, as transformers writes them; read only",
        source="torchao 0.18, prototype/safetensors; transformers 5.24, TorchAoConfig",
        schemes=(),
        methods=(NAME,),
        config=_config,
        excludes=by_start_or_end,
        stacks=(*_FP8, *_MX),
        others=(*_FP8, *_MX, *_NVFP4),
        check=_check,
        instead=INSTEAD,
    )
)
