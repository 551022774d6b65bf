"""Quantizers that a user writes in Python: a class that overrides `quantize_impl` or `quantize`.

What it makes of a matrix may be an object with up to three tensors and a `dequantize`, a quantized
tensor, or plain values; the object's tensors are what modules keep and save. It becomes a codec of
hybridq (`hybridq.formats.register_codec`), which has one direction: a columnwise plane is what
the quantizer makes of the transposed matrix, with `rowwise_usage` alone. With a `qgemm` products
of two such planes are its own; their contraction is always last, so each is one of `FPROP`.

Source: names and order of arguments of `qgemm`: Transformer Engine's custom recipes.
"""

from __future__ import annotations

import copy
import itertools
import re
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import torch

from ..direction import ROWWISE
from ..formats import Codec, CodedMatrix, PlaneSpec, codec_of, register_codec
from ..quantizers import Quantizer as OurQuantizer
from ..storage import Plane, TensorStorage
from ..tensor import QuantizedTensor

__all__ = [
    "GEMMType",
    "GivenScaleCodec",
    "MMParams",
    "coded_quantizer",
    "keep_for",
    "quantizer_of_codec",
]


class GEMMType(Enum):
    """Which of a layer's products a `qgemm` is asked for."""

    FPROP = "fprop"
    DGRAD = "dgrad"
    WGRAD = "wgrad"


@dataclass(frozen=True)
class MMParams:
    """What a `qgemm` is told of the product.

    Args:
        out_dtype: of the result.
        use_split_accumulator: whether sums are FP32.
    """

    out_dtype: torch.dtype | None = None
    use_split_accumulator: bool = True


#: Attributes of a quantizer that say nothing of the codes.
_OUTSIDE: Final = ("rowwise_usage", "columnwise_usage", "internal", "optimize_for_gemm", "_made")
#: Names of codecs by the class and the attributes of the quantizer that each is of.
_known: dict[Any, str] = {}
_numbers: Final = itertools.count()


def _tensors_of(held: Any) -> dict[str, torch.Tensor]:
    """Return the tensors that an object has, by attribute."""
    return {name: one for name, one in vars(held).items() if isinstance(one, torch.Tensor)}


def _tensor_of(spec: PlaneSpec, buffers: Sequence[torch.Tensor], rows: int, cols: int) -> Any:
    """Return the quantized tensor of one rowwise plane."""
    names = [one.name for one in spec.buffers(rows, cols)]
    plane = Plane(spec, ROWWISE, rows, cols, dict(zip(names, buffers, strict=True)))
    return QuantizedTensor.make(TensorStorage(plane, None), (rows, cols), torch.float32)


class _UserCodec(Codec):
    """What a user's quantizer makes of matrices, as buffers.

    Args:
        quantizer: the user's own copy, which makes rowwise planes.
    """

    def __init__(self, quantizer: Any) -> None:
        self.quantizer = quantizer
        #: By size, what was made without its tensors, or the spec of a quantized tensor.
        self._forms: dict[tuple[int, int], Any] = {}
        if hasattr(quantizer, "qgemm"):
            self.product = self._product

    def encode(self, matrix: torch.Tensor) -> Sequence[torch.Tensor]:
        held = self.quantizer.quantize(matrix)
        size = (matrix.shape[0], matrix.shape[1])
        if isinstance(held, QuantizedTensor) and held.quantizer and held.quantizer.is_identity:
            held = held.dequantize()  # whose planes are of the dtype of what they are made of
        if isinstance(held, QuantizedTensor):
            plane: Any = held.rowwise
            self._forms[size] = plane.spec
            return [plane.buffers[name] for name in plane.buffers]
        if isinstance(held, torch.Tensor):
            self._forms[size] = None
            return [held.to(torch.float32)]
        tensors = _tensors_of(held)
        form = copy.copy(held)
        for name in tensors:
            setattr(form, name, None)
        self._forms[size] = (form, tuple(tensors))
        return list(tensors.values())

    def held(self, buffers: Sequence[torch.Tensor], rows: int, cols: int) -> Any:
        """Return what the quantizer had made, with these tensors.

        Args:
            buffers: of a plane.
            rows, cols: of the matrix.
        """
        size = (int(rows), int(cols))
        if size not in self._forms:  # made in another process
            self.encode(torch.ones(size, dtype=torch.float32, device="cpu"))
        form = self._forms[size]
        if form is None:
            return buffers[0]
        if isinstance(form, PlaneSpec):
            return _tensor_of(form, buffers, rows, cols)
        made = copy.copy(form[0])
        for name, one in zip(form[1], buffers, strict=True):
            setattr(made, name, one)
        return made

    def decode(self, buffers: Sequence[torch.Tensor], rows: int, cols: int) -> torch.Tensor:
        held = self.held(buffers, rows, cols)
        if type(held) is torch.Tensor:
            return held
        own = getattr(held, "dequantize", None)
        if own is not None:
            made: torch.Tensor = own(dtype=torch.float32)
            return made
        if not hasattr(self.quantizer, "dequantize"):
            kind, by = type(held).__name__, type(self.quantizer).__name__
            raise TypeError(f"{by}: what it makes must have dequantize(dtype=), got {kind}")
        values: torch.Tensor = self.quantizer.dequantize(held.data, held.scale, torch.float32)
        return values

    def _product(self, a: CodedMatrix, b: CodedMatrix) -> torch.Tensor | None:
        if not (isinstance(a.codec, _UserCodec) and isinstance(b.codec, _UserCodec)):
            return None
        left = a.codec.held(a.buffers, a.rows, a.cols)
        right = b.codec.held(b.buffers, b.rows, b.cols)
        if not all(hasattr(one, "data") and hasattr(one, "scale") for one in (left, right)):
            return None
        made: torch.Tensor = self.quantizer.qgemm(
            left.data,
            right.data,
            MMParams(torch.float32),
            torch.float32,
            left.scale,
            right.scale,
            None,
            gemm_type=GEMMType.FPROP,
            qresult_x=left,
            qresult_w=right,
        )
        return made


class GivenScaleCodec(_UserCodec):
    """FP8 codes with the scale of a `Float8Quantizer`, which records the amax of what it sees.

    Args:
        quantizer: of `hybridq.te`, with the caller's tensors.
    """

    def buffers(self, rows: int, cols: int) -> Sequence[tuple[Sequence[int], torch.dtype]]:
        return [((rows, cols), torch.uint8), ((1,), torch.float32)]

    def encode(self, matrix: torch.Tensor) -> Sequence[torch.Tensor]:
        plane = self.quantizer.frozen.quantize(matrix).rowwise
        return [plane.data, plane.scale]

    def held(self, buffers: Sequence[torch.Tensor], rows: int, cols: int) -> Any:
        return _tensor_of(self.quantizer.frozen.rowwise, buffers, rows, cols)


def coded_quantizer(quantizer: Any, codec: type[Codec] = _UserCodec) -> OurQuantizer:
    """Return the quantizer of hybridq whose planes a user's quantizer makes.

    Quantizers of one class with equal attributes are one.

    Args:
        quantizer: of a class that overrides `quantize_impl` or `quantize`. What it keeps between
            calls it keeps in a copy, which is made now.
        codec: made of that copy.
    """
    own = {name: one for name, one in vars(quantizer).items() if name not in _OUTSIDE}
    kind = type(quantizer)
    key: Any = (kind, tuple(sorted(own.items(), key=lambda item: item[0])))
    origin = None
    try:
        known = _known.get(key)
    except TypeError:  # an attribute that has no hash
        key, origin = (kind, id(quantizer)), quantizer
        known = _known.get(key)
    if known is None:
        word = re.sub(r"[^a-z0-9_]", "_", kind.__qualname__.lower())
        made = copy.copy(quantizer)
        made.set_usage(rowwise=True, columnwise=False)
        known = _known[key] = f"te.{word}.{next(_numbers)}"
        own_codec: Any = codec(made)  # type: ignore[call-arg]
        own_codec.origin = origin  # whose id stands for it
        # A class of a user means the same wherever it is made; one of tensors goes with them.
        is_kept = origin is None and codec is _UserCodec
        spec = PlaneSpec(register_codec(known, own_codec, is_listed=False, is_kept=is_kept))
        weakref.finalize(own_codec, _known.pop, key, None).atexit = False
    else:
        spec = PlaneSpec.parse(f"codec/python/{known}")
    return OurQuantizer(spec, spec)


def keep_for(owner: Any, quantizer: Any) -> None:
    """Let the codecs of a quantizer of hybridq live as long as the factory that it came from.

    Plans know a codec by its name alone, and modules keep plans of a factory as long as that.

    Args:
        owner: the factory, or the object whose method it is.
        quantizer: what it returned.
    """
    specs = getattr(quantizer, "rowwise", None), getattr(quantizer, "columnwise", None)
    for codec in {codec_of(one.format.family) for one in specs if one and one.format.is_python}:
        try:
            owners = codec.__dict__.setdefault("owners", weakref.WeakSet())
            if owner not in owners:
                owners.add(owner)
                weakref.finalize(owner, id, codec).atexit = False
        except TypeError:  # an owner that knows no weak reference, or has no hash
            _unowned.append(codec)


#: Codecs of factories that cannot be watched: for the life of the process.
_unowned: list[Codec] = []


def quantizer_of_codec(spec: PlaneSpec) -> Any:
    """Return a copy of the user's quantizer whose planes have this spec, or None of other codecs.

    Args:
        spec: of a codec's format.
    """
    codec = codec_of(spec.format.family)
    if not isinstance(codec, _UserCodec):
        return None
    made = copy.copy(codec.quantizer)
    made.set_usage(rowwise=True, columnwise=True)
    return made
