"""Names of Transformer Engine that are not here, and why."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dis import opname
from typing import Any, Final, NoReturn

__all__ = ["REFUSED", "refusing"]

_UB: Final = "collectives are not hidden under GEMMs by user buffers"
_KERNEL: Final = "hybridq has no module of this attention"
_SOFTMAX: Final = "attention takes torch's, with masks and scales: te.DotProductAttention"
_JIT: Final = "modules are compiled by torch.compile, whole"
_MUON: Final = "hybridq.optim.Muon has its own iterations"

#: By name, the reason. Names of the package itself, and of its modules `jit`, `module`, `softmax`.
REFUSED: Final = {
    "CPLoadBalancingStrategy": "ranks share sequences by hybridq.distributed.sequence_parallel",
    "CusolverMpCtx": _MUON,
    "FusedMLAQUpProjFunction": _KERNEL,
    "FusedMLAQUpProjRopeQuant": _KERNEL,
    "FusedScaleMaskSoftmax": _SOFTMAX,
    "GatedDeltaNetAttention": _KERNEL,
    "ManualOffloadSynchronizer": "hybridq.offload moves planes as their layers begin and end",
    "ScaledAlignedCausalMaskedSoftmax": _SOFTMAX,
    "ScaledMaskedSoftmax": _SOFTMAX,
    "ScaledSoftmax": _SOFTMAX,
    "ScaledUpperTriangMaskedSoftmax": _SOFTMAX,
    "UserBufferQuantizationMode": _UB,
    "apply_recipe": "a recipe by names of modules is hybridq.recipes.ByName",
    "destroy_ub": _UB,
    "get_cudnn_version": "nothing here runs cuDNN by itself",
    "initialize_ub": _UB,
    "jit_fuser": _JIT,
    "mark_not_offload": "hybridq.offload takes the planes of activations, and no parameter",
    "newton_schulz": _MUON,
    "newton_schulz_tp": _MUON,
    "no_torch_dynamo": _JIT,
    "onnx_export": "ONNX has no operators for pairs of planes; see hybridq.export",
    "set_jit_fusion_options": _JIT,
}


def refusing(module: str, where: str, table: Mapping[str, str]) -> Callable[[str], NoReturn]:
    """Return the `__getattr__` of a module that says why it does not have the names of a table.

    Args:
        module: its name.
        where: what a script calls it.
        table: by name, the reason.
    """

    def __getattr__(name: str) -> NoReturn:
        own: dict[str, Any] = {"name": name, "obj": sys.modules[module]}
        if name not in table:
            raise AttributeError(f"module {module!r} has no attribute {name!r}", **own)
        text = f"{where}.{name} is not here: {table[name]}"
        # Of `from module import name` Python would keep nothing that an AttributeError says.
        frame = sys._getframe(1)
        if opname[frame.f_code.co_code[frame.f_lasti]] == "IMPORT_FROM":
            raise ImportError(text, name=name)
        raise AttributeError(text, **own)

    return __getattr__


__getattr__ = refusing(__name__, "te", REFUSED)
