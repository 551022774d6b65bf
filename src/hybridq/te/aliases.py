"""Transformer Engine's module paths: `hybridq.te.pytorch`, and what scripts import below it.

Each is another name of one module here, so that a class is one object whatever path it came by,
and an attribute of the one that it lies in: `te.module.base.TransformerEngineBaseModule`.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Final

from .refused import REFUSED

__all__ = ["PATHS", "install", "stand_in"]

#: A module here to the paths below `pytorch`, and below `hybridq.te` itself, that lead to it.
PATHS: Final = {
    "constants": (),
    "cpp_extensions": ("cpp_extensions.gemm",),
    "cpu_offload": (),
    "cross_entropy": (),
    "custom_recipes": (),
    "custom_recipes.quantizer_factories": (),
    "custom_recipes.quantizer_factory_zoo": (),
    "custom_recipes.reference": (
        *("custom_recipes.reference_nvfp4", "custom_recipes.reference_current_scaling"),
    ),
    "distributed": (),
    "graph": (),
    "grouped": ("tensor.grouped_tensor",),
    "attention": (
        *("attention.dot_product_attention", "attention.multi_head_attention"),
        "attention.inference",
    ),
    "module": (
        *("transformer", "module.base", "module.linear"),
        *("module.layernorm_linear", "module.layernorm_mlp", "module.grouped_linear"),
        *("module.layernorm", "module.rmsnorm", "module.fp8_padding", "module.fp8_unpadding"),
    ),
    "ops": ("ops.basic", "ops.linear", "ops.sequential"),
    "multi_tensor": ("optimizers.multi_tensor_apply",),
    "optimizers": ("optimizers.fused_adam", "optimizers.fused_sgd"),
    "permutation": (),
    "python_quantizers": ("custom_recipes.quantization", "custom_recipes.gemm"),
    "quantization": ("fp8",),
    "tensor": (
        *("quantized_tensor", "float8_tensor", "tensor.storage", "tensor.float8_tensor"),
        "tensor.quantized_tensor",
        *("tensor.mxfp8_tensor", "tensor.nvfp4_tensor", "tensor.float8_blockwise_tensor"),
        *("tensor.hybrid_tensor", "tensor.identity_tensor"),
        *(f"tensor.storage.{kind}_tensor_storage" for kind in ("float8", "mxfp8", "nvfp4")),
        *(f"tensor.storage.{kind}_tensor_storage" for kind in ("hybrid", "identity")),
        "tensor.storage.float8_blockwise_tensor_storage",
    ),
    "refused": ("export", "newton_schulz", "optimizers.newton_schulz", "jit", "softmax"),
    "rope": ("attention.rope",),
    "router": (),
    "utils": ("tensor.utils", "attention.dot_product_attention.utils"),
}


def install() -> None:
    """Enter every path in `sys.modules`, and in the module that it lies in."""
    package = __package__
    sys.modules[f"{package}.pytorch"] = sys.modules[package]
    for name, paths in PATHS.items():
        module = import_module(f"{package}.{name}")
        sys.modules[f"{package}.pytorch.{name}"] = module
        for path in paths:
            for root in (package, f"{package}.pytorch"):
                sys.modules[f"{root}.{path}"] = module
    for name in ("common", "common.recipe"):
        sys.modules[f"{package}.pytorch.{name}"] = import_module(f"{package}.{name}")
    for paths in PATHS.values():
        for path in paths:
            parent, _, name = f"{package}.{path}".rpartition(".")
            if name not in REFUSED:  # what has the name of a path is a function there
                setattr(sys.modules[parent], name, sys.modules[f"{package}.{path}"])


def stand_in(name: str = "transformer_engine") -> None:
    """Let `import transformer_engine` mean `hybridq.te`, for libraries that import it themselves.

    `transformer_engine_torch`, its compiled module, then has the tables of `hybridq.te.constants`.

    Args:
        name: of the package.

    Raises:
        ImportError: the package is installed, or imported already.

    Example:
        >>> import hybridq.te
        >>> hybridq.te.stand_in("transformer_engine_of_this_example")
        >>> import transformer_engine_of_this_example.pytorch as te
        >>> te is hybridq.te
        True
    """
    package = str(__package__)
    known = sys.modules.get(name)
    if known is not sys.modules[package] and (known is not None or find_spec(name) is not None):
        raise ImportError(f"stand_in: {name} must not be installed, got one")
    for path, module in list(sys.modules.items()):
        if path == package or path.startswith(f"{package}."):
            sys.modules[name + path[len(package) :]] = module
    sys.modules.setdefault(f"{name}_torch", sys.modules[f"{package}.constants"])
