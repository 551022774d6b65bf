"""What no layout reads, known by names and dtypes: to be named, and never taken for values.

Source: the checkpoints that these programs write: GPTQModel, AutoAWQ, AutoRound, bitsandbytes,
HQQ, ExLlama, torchao, optimum-quanto, MLX, Nunchaku, compressed-tensors 0.20, ModelOpt 0.47.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch

from ..errors import CheckpointError
from .comfyui import DESCRIPTION
from .comfyui import METADATA as COMFYUI_KEY
from .stored import TensorInfo

__all__ = ["check_is_no_other"]

_INTEGERS: Final = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.uint32)
_FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class _Kind:
    """Tensors of a quantization that no layout reads.

    Args:
        what: it is.
        end: of the name of its codes.
        dtypes: that the codes have; none: any.
        beside: end of the name of a tensor of the same module that tells; "": none is needed.
        beside_dtypes: of that one; none: any.
        without: end of the name of a tensor that its module does not have; "": none.
    """

    what: str
    end: str
    dtypes: tuple[torch.dtype, ...] = ()
    beside: str = ""
    beside_dtypes: tuple[torch.dtype, ...] = ()
    without: str = ""

    def is_it(self, name: str, entries: Mapping[str, TensorInfo]) -> bool:
        """Return whether a tensor is of this kind.

        Args:
            name: of the tensor.
            entries: dtype and shape of every tensor, by name.
        """
        if not name.endswith(self.end) or (self.dtypes and entries[name][0] not in self.dtypes):
            return False
        module = name.removesuffix(self.end)
        if self.without and module + self.without in entries:
            return False
        if not self.beside:
            return True
        beside = entries.get(module + self.beside)
        return beside is not None and beside[0] in (self.beside_dtypes or (beside[0],))


_GPTQ: Final = "integers of GPTQ, AWQ or AutoRound"
_SPARSE: Final = "a sparse matrix of compressed-tensors"
_INT: Final = "integers (INT4 or INT8)"
#: The first that fits is named.
_KINDS: Final = (
    _Kind(_GPTQ, ".qweight", beside=".scales"),
    _Kind(_GPTQ, ".qweight", beside=".qzeros"),
    _Kind("bitsandbytes' FP4 or NF4", ".weight", (torch.uint8,), ".weight.absmax"),
    _Kind("bitsandbytes' INT8", ".weight", (torch.int8,), ".SCB"),
    _Kind("integers of HQQ", ".W_q", _INTEGERS),
    _Kind("a trellis of EXL3", ".trellis", _INTEGERS, ".suh"),
    _Kind("integers of EXL2", ".q_weight", _INTEGERS, ".q_scale"),
    _Kind("integers of MLX", ".weight", (torch.uint32,), ".scales", _FLOATS),
    _Kind("codes of Nunchaku (SVDQuant)", ".qweight", (torch.int8,), ".wscales"),
    _Kind("codes of optimum-quanto", ".weight._data", beside=".weight._scale"),
    _Kind("integers of torchao", "_qdata", _INTEGERS, "_scale", _FLOATS),
    _Kind("integers of torchao", "_qdata", _INTEGERS, "_scale_and_zero"),
    _Kind("E5M2 of torchao", "_qdata", (torch.float8_e5m2,), "_scale"),
    *(_Kind("codes of torchao", f".weight{one}qdata") for one in ("_", ":", ":_")),
    _Kind("integers of compressed-tensors (pack-quantized)", ".weight_packed", (torch.int32,)),
    _Kind("a 2:4 matrix of compressed-tensors (marlin-24)", ".scale_packed", _FLOATS, ".meta"),
    _Kind(_SPARSE, ".compressed", (), ".bitmask"),
    _Kind(_INT, ".weight", (torch.int8,), ".weight_scale"),
    _Kind(_INT, ".weight", (torch.uint8,), ".weight_scale", _FLOATS, without=".weight_scale_2"),
    *(
        _Kind(f"{what} with scales", ".weight", (dtype,), end, without=DESCRIPTION)
        for dtype, what in (
            (torch.float8_e5m2, "E5M2"),
            (torch.float8_e4m3fnuz, "E4M3FNUZ (of AMD's MI300)"),
            (torch.float8_e5m2fnuz, "E5M2FNUZ (of AMD's MI300)"),
        )
        for end in (".weight_scale", ".weight_scale_inv")
    ),
)
#: Ends that are asked for before any kind is.
_ENDS: Final = tuple(dict.fromkeys(one.end for one in _KINDS))


def check_is_no_other(
    entries: Mapping[str, TensorInfo],
    metadata: Mapping[str, str] | None = None,
    *,
    is_comfyui: bool = False,
) -> None:
    """Raise where a tensor holds codes of another program that no layout reads.

    Args:
        entries: dtype and shape of every tensor of the checkpoint, by name.
        metadata: strings in the headers of its files, or None.
        is_comfyui: it is said to be of ComfyUI, which has scales of E5M2, too.

    Raises:
        CheckpointError: there is one; the text says what it is.
    """
    is_comfyui = is_comfyui or COMFYUI_KEY in (metadata or {})
    kinds = tuple(one for one in _KINDS if not (is_comfyui and one.without == DESCRIPTION))
    own = {f".{name}": info for name, info in entries.items()}  # one may be a module's alone
    for name, (dtype, shape) in entries.items():
        if not f".{name}".endswith(_ENDS):
            continue
        kind = next((one for one in kinds if one.is_it(f".{name}", own)), None)
        if kind is not None:
            raise CheckpointError(
                f"layouts: {name!r}, {dtype} {list(shape)}, holds {kind.what}, and no layout reads "
                "that; decode the checkpoint with the program that wrote it, and give it in BF16"
            )
