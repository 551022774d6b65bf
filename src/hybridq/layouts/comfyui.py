"""The layout of ComfyUI: one file of a diffusion model, a text encoder or all of a pipeline.

Each quantized linear has a tensor `comfy_quant` beside it, its description in JSON, or the file's
metadata has one for all. Scales of blocks lie in cuBLASLt's tiles, and of two E2M1 codes in a byte
the first is in the upper half: names, dtypes and most shapes are ModelOpt's, the bytes are not.
Older files have a marker `scaled_fp8` and scales under other names. FP8 without a scale is a value.
FP8 with one scale per row is what convert-to-quant writes for an extension of ComfyUI.

Source: ComfyUI, QUANTIZATION.md, `comfy.ops` (how a linear is loaded and saved) and `comfy.utils`
(what older files are taken for); comfy-kitchen 0.2.40, `comfy_kitchen.tensor`; convert-to-quant
1.3.4.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import torch

from ..errors import CheckpointError
from .layout import Described, Layout, register
from .matching import by_name
from .order import HIGH_NIBBLE_FIRST, TILES
from .part import FACTOR, ROWS, SCALAR, TILED, Part, ScalarPart
from .per_tensor import CODES, PER_ROW, WIDENED, input_scale
from .said import Said
from .scheme import Mark, Scheme
from .stored import StoredWeight

__all__ = ["COMFYUI", "DESCRIPTION", "METADATA", "NAME"]

NAME: Final = "comfyui"
#: Key of a file's metadata that says how its layers are quantized.
METADATA: Final = "_quantization_metadata"
#: End of the name of the tensor that says it of one layer.
DESCRIPTION: Final = ".comfy_quant"

_E4M3, _E5M2, _U8, _FP32 = torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.float32
#: Inputs: quantized as they come, by calibrated scales, or not at all.
_INPUTS: Final = {"dynamic": "dynamic", "static": "static", "none": "none"}


def _mark(name: str, inputs: Mapping[str, str]) -> Mark:
    """Return what says that a linear is held in a format of ComfyUI's."""
    made = {}
    for how in inputs:
        said: dict[str, Any] = {"format": name}
        if how == "none":
            said["full_precision_matrix_mult"] = True
        made[how] = json.dumps(said).encode()
    return Mark(f"{{module}}{DESCRIPTION}", made)


def _fp8(name: str, codes: torch.dtype, scale: str, of_input: str, mark: Mark | None) -> Scheme:
    is_e4m3 = codes == _E4M3
    return Scheme(
        name=name,
        spec="fp8_e4m3" if is_e4m3 else "fp8_e5m2",
        parts=(
            CODES if is_e4m3 else Part("{module}.weight", "data", codes),
            Part(f"{{module}}.{scale}", "scale", _FP32, SCALAR, widened=WIDENED),
        ),
        input=input_scale(of_input, torch.finfo(codes).max),
        inputs=_INPUTS,
        mark=mark,
    )


_NVFP4 = Scheme(
    name="nvfp4",
    spec="nvfp4",
    parts=(
        Part("{module}.weight", "data", _U8, order=HIGH_NIBBLE_FIRST),
        Part("{module}.weight_scale", "scale", _E4M3, TILED, widened=(_U8,), order=TILES),
        Part("{module}.weight_scale_2", "amax", _FP32, SCALAR, FACTOR),
    ),
    input=ScalarPart("{module}.input_scale", "input", (), FACTOR, 448.0 * 6.0),
    inputs=_INPUTS,
    mark=_mark("nvfp4", _INPUTS),
    rows=16,
)
_MXFP8_INPUTS: Final = {"dynamic": "dynamic", "none": "none"}
_MXFP8 = Scheme(
    name="mxfp8",
    spec="mxfp8",
    parts=(CODES, Part("{module}.weight_scale", "scale", _U8, TILED, order=TILES)),
    inputs=_MXFP8_INPUTS,
    mark=_mark("mxfp8", _MXFP8_INPUTS),
    rows=32,
)


def _config(said: Described) -> dict[str, Any]:
    """Return nothing: the tensors say it."""
    del said
    return {}


#: What a description may call each scheme.
_FORMATS: Final = {
    "nvfp4": ("nvfp4",),
    "mxfp8": ("mxfp8", "hybrid_mxfp8"),  # with a scale for readers that take no other
    "fp8_tensor": ("float8_e4m3fn", "float8_e4m3fn_rowwise"),  # of one row
    "fp8_e5m2": ("float8_e5m2",),
    "fp8_channel": ("float8_e4m3fn_rowwise", "float8_e4m3fn"),
}
_KNOWN: Final = frozenset(name for names in _FORMATS.values() for name in names)
_DECODE: Final = "decode the file with the program that wrote it, and give it in BF16"


def _check(weights: Mapping[str, StoredWeight], given: Said) -> None:
    """Raise where weights are not what a file says of their layers.

    Shapes and dtypes tell neither rows and columns that fill a weight up from its own, nor a
    weight that was rotated from one that was not.

    Args:
        weights: that are quantized, as they were found by names, dtypes and shapes.
        given: what the files say.

    Raises:
        CheckpointError: a description cannot be read, or says something else.
    """
    for where, module, said in _descriptions(given.marks, given.headers):
        named = _weights_of(module, given.names)
        quantized = [one for one in named if one in weights] or named
        if len(quantized) != 1:
            continue  # a header may speak of tensors that were taken out
        [name] = quantized
        kind = said.get("format")
        weight = weights.get(name)
        allowed = _KNOWN if weight is None else _FORMATS[weight.scheme.name]
        if kind not in allowed:
            raise CheckpointError(
                f"layouts: the format of {name!r} in {where} must be "
                f"{' or '.join(sorted(allowed))}, got {kind!r}; {_DECODE}"
            )
        if said.get("convrot"):
            raise CheckpointError(
                f"layouts: a weight must multiply the input as it comes, got {name!r}, whose "
                f"input is rotated first, as {where} says; {_DECODE}"
            )
        shape = said.get("orig_shape")
        if weight is not None and shape is not None and shape != list(weight.shape):
            raise CheckpointError(
                f"layouts: {name!r} must have the shape of its model's weight, got "
                f"{list(weight.shape)}, which is {shape} filled up with zeros, as {where} says; "
                f"{_DECODE}"
            )


def _weights_of(module: str, names: Iterable[str]) -> list[str]:
    """Return which names a layer's weight may have; a header may leave out how they begin."""
    name = f".{module}.weight" if module else ".weight"
    found = [one for one in names if f".{one}".endswith(name)]
    return [one for one in found if f".{one}" == name] or found


def _descriptions(
    marks: Mapping[str, bytes], headers: Iterable[Mapping[str, str]]
) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield where a description stands, its layer and what it says."""
    for name, data in marks.items():
        if f".{name}".endswith(DESCRIPTION):
            yield repr(name), f".{name}".removesuffix(DESCRIPTION)[1:], _read(name, data)
    for metadata in headers:
        layers = _read(METADATA, metadata.get(METADATA, "{}")).get("layers")
        for module, said in layers.items() if isinstance(layers, Mapping) else ():
            if isinstance(said, Mapping):
                yield f"the header's {METADATA}", module, said


def _read(name: str, data: bytes | str) -> Mapping[str, Any]:
    try:
        said = json.loads(data)
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, Mapping):
        raise CheckpointError(f"layouts: {name!r} must be an object in JSON, got {data[:60]!r}")
    return said


#: NVFP4, MXFP8, and FP8 with one scale per tensor.
COMFYUI = register(
    Layout(
        name=NAME,
        summary="ComfyUI's diffusion models and text encoders",
        source="ComfyUI, QUANTIZATION.md; comfy-kitchen 0.2.40",
        schemes=(
            _NVFP4,
            _fp8(
                "fp8_tensor", _E4M3, "weight_scale", "input_scale", _mark("float8_e4m3fn", _INPUTS)
            ),
            _fp8("fp8_e5m2", _E5M2, "weight_scale", "input_scale", _mark("float8_e5m2", _INPUTS)),
            _MXFP8,
        ),
        others=(
            _fp8("fp8_tensor", _E4M3, "scale_weight", "scale_input", None),
            _fp8("fp8_e5m2", _E5M2, "scale_weight", "scale_input", None),
            Scheme(
                name="fp8_channel",
                spec=PER_ROW,
                parts=(CODES, Part("{module}.weight_scale", "scale", _FP32, ROWS)),
            ),
        ),
        marks=(DESCRIPTION, "scaled_fp8"),
        has_plain_codes=True,
        methods=(),
        config=_config,
        excludes=by_name,
        check=_check,
    )
)
