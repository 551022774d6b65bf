"""Hugging Face transformers: models that are quantized while they are loaded, and Trainer.

Importing this module registers `HybridQConfig` with transformers, so that folders written by
`save_pretrained` are known to `from_pretrained`, and a reader of ModelOpt's folders. See
docs/guides/hugging-face.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .. import require

require("transformers")

from .config import VERSION, HybridQConfig  # noqa: E402 (after the check of the version)
from .layout_config import LayoutConfig  # noqa: E402
from .layout_quantizer import LayoutQuantizer, load  # noqa: E402
from .quantizer import HybridQQuantizer  # noqa: E402

if TYPE_CHECKING:
    from .cache import HybridQCache
    from .callback import HybridQCallback
    from .experts_trainer import ExpertsTrainer

__all__ = [
    "VERSION",
    "ExpertsTrainer",
    "HybridQCache",
    "HybridQCallback",
    "HybridQConfig",
    "HybridQQuantizer",
    "LayoutConfig",
    "LayoutQuantizer",
    "load",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        # With what Trainer imports, seconds: whoever only loads a model needs none of it.
        if name == "HybridQCallback":
            from .callback import HybridQCallback

            globals()[name] = HybridQCallback
            return HybridQCallback
        if name == "ExpertsTrainer":
            from .experts_trainer import ExpertsTrainer

            globals()[name] = ExpertsTrainer
            return ExpertsTrainer
        if name == "HybridQCache":
            from .cache import HybridQCache

            globals()[name] = HybridQCache
            return HybridQCache
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
