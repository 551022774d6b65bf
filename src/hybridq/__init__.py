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

# isort: off
if TYPE_CHECKING:  # what is in no `__all__` is exported by `name as name`
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
        monitoring,
        nn,
        optim,
        ptq,
        recipes,
        rollout,
        serving,
        settings,
        storage,
        te,
        tensor,
        tracing,
    )
    from ._callable_package import report as report
    from .calibration import Calibration
    from .calibration.calibrate import calibrate
    from .converters import register_converter as register_converter
    from .converters.conversion import conversion as conversion
    from .converters.convert import convert
    from .errors import (
        BackendError,
        CheckpointError,
        HybridQWarning,
        PlaneError,
        RecipeError,
        SpecError,
    )
    from .formats import DEFAULT_SIGNS as DEFAULT_SIGNS, Element as Element, Format, PlaneSpec
    from .gemm.prepare import forget as forget, prepare
    from .monitoring.monitor import monitor as monitor
    from .nn import (
        GroupedLinear,
        LayerNormLinear,
        LayerNormMLP,
        Linear,
        MultiheadAttention,
        RMSNormLinear,
        RotaryPositionEmbedding as RotaryPositionEmbedding,
        TransformerLayer,
        dequantized_state_dict as dequantized_state_dict,
        fp8_model_init as fp8_model_init,
        quantized_model_init,
        state_dict_with_history as state_dict_with_history,
        update_scaling,
    )
    from .nn.autograd.checkpoint import checkpoint
    from .nn.autograd.offload import get_cpu_offload_context as get_cpu_offload_context, offload
    from .ptq import convert_checkpoint, export, load_checkpoint
    from .quantizers import (
        DelayedScalingRequest as DelayedScalingRequest,
        Float8BlockQuantizer as Float8BlockQuantizer,
        Float8CurrentScalingQuantizer as Float8CurrentScalingQuantizer,
        Float8Quantizer as Float8Quantizer,
        HybridQuantizer as HybridQuantizer,
        IdentityQuantizer as IdentityQuantizer,
        MXFP8Quantizer as MXFP8Quantizer,
        NVFP4Quantizer as NVFP4Quantizer,
        Quantizer,
        multi_tensor_quantize as multi_tensor_quantize,
        quantize,
        quantize_grouped as quantize_grouped,
        quantizer,
    )
    from .recipes import (
        CustomRecipe,
        QuantizerRole,
        Recipe,
        RecipeSchedule,
        fp8_autocast as fp8_autocast,
    )
    from .recipes.autocast import autocast
    from .recipes.recipe_by_gemm import recipe
    from .report import MemoryReport as MemoryReport, advise as advise, memory_report
    from .report.show import show
    from .report.summary import summary as summary
    from .serving import quantize_model
    from .settings import backend, gemm_cache as gemm_cache
    from .storage import Plane, RaggedTensor as RaggedTensor, TensorStorage as TensorStorage
    from .tensor import (
        Explanation as Explanation,
        Float8BlockwiseQTensor as Float8BlockwiseQTensor,
        Float8Tensor as Float8Tensor,
        HybridQuantizedTensor as HybridQuantizedTensor,
        IdentityTensor as IdentityTensor,
        MXFP8Tensor as MXFP8Tensor,
        NVFP4Tensor as NVFP4Tensor,
        QuantizedTensor,
        explain,
        grouped_gemm,
        prepare_for_saving as prepare_for_saving,
        restore_from_saved as restore_from_saved,
    )
    from .tracing.trace import trace as trace
# isort: on

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
    "gemm",
    "grouped_gemm",
    "load_checkpoint",
    "memory_report",
    "offload",
    "prepare",
    "quantize",
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
        "monitoring",
        "nn",
    ),
    *("optim", "ptq", "recipes", "report", "rollout", "serving", "te", "tracing"),
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
    "gemm.prepare": ("prepare",),
    "nn": (
        *("GroupedLinear", "LayerNormLinear", "LayerNormMLP", "Linear", "MultiheadAttention"),
        *("RMSNormLinear", "TransformerLayer", "checkpoint", "offload", "quantized_model_init"),
        "update_scaling",
    ),
    "ptq": ("convert_checkpoint", "export", "load_checkpoint"),
    "quantizers": ("Quantizer", "quantize", "quantizer"),
    "recipes": ("CustomRecipe", "QuantizerRole", "Recipe", "RecipeSchedule", "autocast"),
    "recipes.recipe_by_gemm": ("recipe",),  # in `recipes` a module has the name
    "report": ("memory_report", "show"),
    "serving": ("quantize_model",),
    "settings": ("backend",),
    "storage": ("Plane",),
    "tensor": ("QuantizedTensor", "explain", "grouped_gemm"),
}
#: Names of these packages that can also be had here, as `hybridq.Float8Tensor`.
_ALIASES: Final = {
    "converters": ("conversion", "register_converter"),
    "formats": ("DEFAULT_SIGNS", "Element"),
    "gemm.prepare": ("forget",),
    "nn": (
        *("RotaryPositionEmbedding", "dequantized_state_dict", "fp8_model_init"),
        "get_cpu_offload_context",
        "state_dict_with_history",
    ),
    "quantizers": (
        *("DelayedScalingRequest", "Float8BlockQuantizer", "Float8CurrentScalingQuantizer"),
        *("Float8Quantizer", "HybridQuantizer", "IdentityQuantizer", "MXFP8Quantizer"),
        *("NVFP4Quantizer", "multi_tensor_quantize", "quantize_grouped"),
    ),
    "recipes": ("fp8_autocast",),
    "monitoring": ("monitor",),
    "tracing": ("trace",),
    "report": ("MemoryReport", "advise", "summary"),
    "settings": ("gemm_cache",),
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
