"""hybridq: quantized tensors for PyTorch, any format in either direction of any tensor.

`import hybridq` registers the operators (`torch.ops.hybridq`) and what `torch.load` needs to read
quantized tensors. Everything else is loaded when its name is first asked for.

Example:
    >>> import torch, hybridq
    >>> t = hybridq.quantize(torch.randn(4, 64), "mxfp8", columnwise="nvfp4")
    >>> t.dequantize().shape
    torch.Size([4, 64])
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from . import quantizers  # and so kernels, storage and tensor: what graphs and files refer to
from ._version import __version__

# Bound at once: the name is also that of a package, which importing it binds here.
from .tensor import gemm

if TYPE_CHECKING:
    from . import (
        calibration,
        conformance,
        converters,
        distributed,
        errors,
        estimate,
        formats,
        integrations,
        kernels,
        layouts,
        moe,
        nn,
        optim,
        ptq,
        recipes,
        report,
        rollout,
        serving,
        settings,
        storage,
        te,
        tensor,
    )
    from .calibration import Calibration
    from .calibration.calibrate import calibrate
    from .converters import register_converter
    from .converters.conversion import conversion
    from .converters.convert import convert
    from .errors import (
        BackendError,
        CheckpointError,
        HybridQWarning,
        PlaneError,
        RecipeError,
        SpecError,
    )
    from .formats import DEFAULT_SIGNS, Element, Format, PlaneSpec
    from .gemm.prepare import forget, prepare
    from .nn import (
        GroupedLinear,
        LayerNormLinear,
        LayerNormMLP,
        Linear,
        MultiheadAttention,
        RMSNormLinear,
        RotaryPositionEmbedding,
        TransformerLayer,
        dequantized_state_dict,
        fp8_model_init,
        quantized_model_init,
        state_dict_with_history,
        update_scaling,
    )
    from .nn.autograd.checkpoint import checkpoint
    from .nn.autograd.offload import get_cpu_offload_context, offload
    from .ptq import convert_checkpoint, export, load_checkpoint
    from .quantizers import (
        DelayedScalingRequest,
        Float8BlockQuantizer,
        Float8CurrentScalingQuantizer,
        Float8Quantizer,
        HybridQuantizer,
        IdentityQuantizer,
        MXFP8Quantizer,
        NVFP4Quantizer,
        Quantizer,
        multi_tensor_quantize,
        quantize,
        quantize_grouped,
        quantizer,
    )
    from .recipes import CustomRecipe, QuantizerRole, Recipe, RecipeSchedule, fp8_autocast
    from .recipes.autocast import autocast
    from .recipes.recipe_by_gemm import recipe
    from .report import MemoryReport, advise, memory_report
    from .report.show import show
    from .report.summary import summary
    from .serving import quantize_model
    from .settings import backend, gemm_cache
    from .storage import Plane, RaggedTensor, TensorStorage
    from .tensor import (
        Explanation,
        Float8BlockwiseQTensor,
        Float8Tensor,
        HybridQuantizedTensor,
        IdentityTensor,
        MXFP8Tensor,
        NVFP4Tensor,
        QuantizedTensor,
        explain,
        grouped_gemm,
        prepare_for_saving,
        restore_from_saved,
    )

__all__ = [
    "BackendError",
    "Calibration",
    "CheckpointError",
    "CustomRecipe",
    "Format",
    "GroupedLinear",
    "HybridQWarning",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MultiheadAttention",
    "Plane",
    "PlaneError",
    "PlaneSpec",
    "QuantizedTensor",
    "Quantizer",
    "QuantizerRole",
    "RMSNormLinear",
    "Recipe",
    "RecipeError",
    "RecipeSchedule",
    "SpecError",
    "TransformerLayer",
    "__version__",
    "autocast",
    "backend",
    "calibrate",
    "checkpoint",
    "convert",
    "convert_checkpoint",
    "explain",
    "export",
    "forget",
    "gemm",
    "gemm_cache",
    "grouped_gemm",
    "load_checkpoint",
    "memory_report",
    "multi_tensor_quantize",
    "offload",
    "prepare",
    "quantize",
    "quantize_grouped",
    "quantize_model",
    "quantized_model_init",
    "quantizer",
    "recipe",
    "show",
    "update_scaling",
]

#: Packages that are loaded when they are first asked for.
_PACKAGES: Final = (
    *(
        "calibration",
        "conformance",
        "converters",
        "distributed",
        "estimate",
        "integrations",
        "layouts",
        "moe",
        "nn",
    ),
    *("optim", "ptq", "recipes", "report", "rollout", "serving", "te"),
)
#: Module to the names of `__all__` that it defines.
_NAMES: Final = {
    "calibration": ("Calibration", "calibrate"),
    "converters": ("convert",),
    "errors": (
        *("BackendError", "CheckpointError", "HybridQWarning", "PlaneError", "RecipeError"),
        "SpecError",
    ),
    "formats": ("Format", "PlaneSpec"),
    "gemm.prepare": ("forget", "prepare"),
    "nn": (
        *("GroupedLinear", "LayerNormLinear", "LayerNormMLP", "Linear", "MultiheadAttention"),
        *("RMSNormLinear", "TransformerLayer", "checkpoint", "offload", "quantized_model_init"),
        "update_scaling",
    ),
    "ptq": ("convert_checkpoint", "export", "load_checkpoint"),
    "quantizers": (
        *("Quantizer", "multi_tensor_quantize", "quantize", "quantize_grouped", "quantizer"),
    ),
    "recipes": ("CustomRecipe", "QuantizerRole", "Recipe", "RecipeSchedule", "autocast"),
    "recipes.recipe_by_gemm": ("recipe",),  # in `recipes` a module has the name
    "report": ("memory_report", "show"),
    "serving": ("quantize_model",),
    "settings": ("backend", "gemm_cache"),
    "storage": ("Plane",),
    "tensor": ("QuantizedTensor", "explain", "grouped_gemm"),
}
#: Names of these packages that can also be had here, as `hybridq.Float8Tensor`.
_ALIASES: Final = {
    "converters": ("conversion", "register_converter"),
    "formats": ("DEFAULT_SIGNS", "Element"),
    "nn": (
        *("RotaryPositionEmbedding", "dequantized_state_dict", "fp8_model_init"),
        "get_cpu_offload_context",
        "state_dict_with_history",
    ),
    "quantizers": (
        *("DelayedScalingRequest", "Float8BlockQuantizer", "Float8CurrentScalingQuantizer"),
        *("Float8Quantizer", "HybridQuantizer", "IdentityQuantizer", "MXFP8Quantizer"),
        "NVFP4Quantizer",
    ),
    "recipes": ("fp8_autocast",),
    "report": ("MemoryReport", "advise", "summary"),
    "storage": ("RaggedTensor", "TensorStorage"),
    "tensor": (
        *("Explanation", "Float8BlockwiseQTensor", "Float8Tensor", "HybridQuantizedTensor"),
        *("IdentityTensor", "MXFP8Tensor", "NVFP4Tensor", "prepare_for_saving"),
        "restore_from_saved",
    ),
}
_MODULE_OF: Final = {
    name: module
    for table in (_NAMES, _ALIASES)
    for module, names in table.items()
    for name in names
}

if not TYPE_CHECKING:  # a type checker sees the imports above, and that there is nothing else

    def __getattr__(name: str) -> Any:
        if name in _PACKAGES:
            return import_module(f"{__name__}.{name}")
        if name not in _MODULE_OF:
            text = f"module {__name__!r} has no attribute {name!r}"
            # With both, Python itself says which name may have been meant.
            raise AttributeError(text, name=name, obj=sys.modules[__name__])
        value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        globals()[name] = value  # found without this function from now on
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *_MODULE_OF, *_PACKAGES})
