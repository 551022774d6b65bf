"""What scripts for Transformer Engine ask before they train: is it there, and with which recipe?

Every recipe of hybridq runs on every machine, in any shape; what a chip lacks is computed another
way, with the same codes. So the answers are short. `python -m hybridq doctor` and
`hybridq.explain` say what runs natively.
"""

from __future__ import annotations

from .autocast import default_recipe
from .bind import bind
from .named import get
from .recipe import Recipe

__all__ = [
    "check_recipe_support",
    "get_align_size_for_quantization",
    "get_default_recipe",
    "is_bf16_available",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
]


def _available(return_reason: bool) -> bool | tuple[bool, str]:
    return (True, "") if return_reason else True


def is_fp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Return True: FP8 with one scale per tensor runs on every machine.

    Args:
        return_reason: return `(True, "")` instead: there is no reason why not.

    Source: Transformer Engine's name and argument; there it is a property of the GPU.
    """
    return _available(return_reason)


def is_fp8_block_scaling_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Return True: blockwise FP8 runs on every machine.

    Args:
        return_reason: as in `is_fp8_available`.
    """
    return _available(return_reason)


def is_mxfp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Return True: MXFP8 runs on every machine.

    Args:
        return_reason: as in `is_fp8_available`.
    """
    return _available(return_reason)


def is_nvfp4_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Return True: NVFP4 runs on every machine.

    Args:
        return_reason: as in `is_fp8_available`.
    """
    return _available(return_reason)


def is_bf16_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Return True: BF16 tensors are computed with on every machine.

    Args:
        return_reason: as in `is_fp8_available`.
    """
    return _available(return_reason)


def get_default_recipe() -> Recipe:
    """Return the recipe of an `autocast` that names none; the same as `default_recipe`."""
    return default_recipe()


def check_recipe_support(recipe: Recipe | str) -> None:
    """Raise unless a linear module can be run under `recipe`, forward and backward.

    Args:
        recipe: a Recipe, or the name of one. Its factory is asked for each slot of a module
            without a name.

    Raises:
        RecipeError: a GEMM would lack a plane.
        TypeError, ValueError: it is no recipe, or its factory returned no Quantizer.

    Source: Transformer Engine's name; there it asserts what the GPU can do.
    """
    bind(get(recipe))


def get_align_size_for_quantization(recipe: Recipe | str) -> int:
    """Return 1, the multiple that each group of tokens must have: any number will do.

    Args:
        recipe: a Recipe, or the name of one.

    Raises:
        TypeError, ValueError: it is no recipe.

    Source: Transformer Engine's name; there it is 16, 32 or 128.
    """
    get(recipe)
    return 1
