"""How other programs want quantized weights named, shaped and described: a table of layouts.

A layout says which tensors of a file a plane becomes, and how they are read back; it reads and
writes no file itself (`hybridq.ptq` does). See docs/guides/export.md.

Example:
    >>> import torch, hybridq
    >>> from hybridq import layouts
    >>> plane = hybridq.quantize(torch.randn(32, 64), "nvfp4").rowwise
    >>> stored = layouts.get("modelopt").stored("mlp.up_proj.weight", plane.spec, (32, 64))
    >>> [(one.name, list(one.shape)) for one in stored.tensors][2]
    ('mlp.up_proj.weight_scale_2', [])
    >>> [again] = stored.decode(stored.encode([plane]))
    >>> torch.equal(again.dequantize(), plane.dequantize())
    True
"""

from __future__ import annotations

from .auto_fp8 import AUTO_FP8
from .comfyui import COMFYUI
from .compressed_tensors import COMPRESSED_TENSORS
from .deepseek_v4 import DEEPSEEK_V4
from .detect import (
    ENTRIES,
    check_inputs_are_plain,
    detect,
    kv_cache_of,
    said_of,
    without_entries,
)
from .faults import FAULTS, Fault, faults_of
from .fbgemm_fp8 import FBGEMM_FP8
from .fine_grained_fp8 import FINE_GRAINED_FP8
from .foreign import check_is_no_other
from .gpt_oss import GPT_OSS_MXFP4
from .layout import Described, Layout, get, names, register
from .mistral import MISTRAL
from .mlx import MLX
from .modelopt import MODELOPT
from .own import HYBRIDQ
from .part import Part, ScalarPart
from .quark import QUARK
from .said import Said
from .scheme import Scheme
from .siblings import sibling_groups, siblings
from .stored import StoredTensor, StoredWeight, TensorInfo
from .torchao import TORCHAO, current_names, without_classes

__all__ = [
    "AUTO_FP8",
    "COMFYUI",
    "COMPRESSED_TENSORS",
    "DEEPSEEK_V4",
    "ENTRIES",
    "FAULTS",
    "FBGEMM_FP8",
    "FINE_GRAINED_FP8",
    "GPT_OSS_MXFP4",
    "HYBRIDQ",
    "MISTRAL",
    "MLX",
    "MODELOPT",
    "QUARK",
    "TORCHAO",
    "Described",
    "Fault",
    "Layout",
    "Part",
    "Said",
    "ScalarPart",
    "Scheme",
    "StoredTensor",
    "StoredWeight",
    "TensorInfo",
    "check_inputs_are_plain",
    "check_is_no_other",
    "current_names",
    "detect",
    "faults_of",
    "get",
    "kv_cache_of",
    "names",
    "register",
    "said_of",
    "sibling_groups",
    "siblings",
    "without_classes",
    "without_entries",
]
