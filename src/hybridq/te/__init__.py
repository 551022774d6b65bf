"""Transformer Engine's names: `import hybridq.te as te`.

Names, order of arguments and defaults are those of `transformer_engine.pytorch`; what computes is
hybridq, on any machine. Its module paths lead here, too: `hybridq.te.pytorch.quantization`,
`hybridq.te.common.recipe`. docs/guides/from-transformer-engine.md has the table of all names.

Example:
    >>> import torch, hybridq.te as te
    >>> from hybridq.te.common.recipe import DelayedScaling, Format
    >>> model = te.Linear(64, 32, bias=True)
    >>> with te.autocast(enabled=True, recipe=DelayedScaling(margin=0, fp8_format=Format.E4M3)):
    ...     y = model(torch.randn(8, 64))
    >>> y.sum().backward()
"""

from __future__ import annotations

import sys

from . import (
    aliases,
    attention,
    common,
    constants,
    cpp_extensions,
    cpu_offload,
    cross_entropy,
    custom_recipes,
    distributed,
    graph,
    hybrid,
    module,
    ops,
    optimizers,
    permutation,
    quantization,
    quantizers,
    readouts,
    refused,
    rope,
    router,
    tensor,
    utils,
)
from .aliases import stand_in
from .common.recipe import quantizer_factory
from .constants import *  # noqa: F403
from .cpu_offload import get_cpu_offload_context
from .cross_entropy import *  # noqa: F403
from .distributed import *  # noqa: F403
from .graph import *  # noqa: F403
from .hybrid import *  # noqa: F403
from .module import *  # noqa: F403
from .permutation import *  # noqa: F403
from .quantization import *  # noqa: F403
from .quantizers import *  # noqa: F403
from .refused import REFUSED, refusing
from .tensor import *  # noqa: F403
from .utils import *  # noqa: F403

__all__ = [
    "common",
    "cpp_extensions",
    "custom_recipes",
    "get_cpu_offload_context",
    "ops",
    "optimizers",
    "pytorch",
    "quantizer_factory",
    "stand_in",
    *constants.__all__,
    *cross_entropy.__all__,
    *distributed.__all__,
    *graph.__all__,
    *hybrid.__all__,
    *module.__all__,
    *permutation.__all__,
    *quantization.__all__,
    *quantizers.__all__,
    *(name for name in tensor.__all__ if not name.endswith("Quantizer")),
    *utils.__all__,
]

#: For libraries that ask for Transformer Engine's version, and take names of one from 2.9.
__version__ = "2.9.0"
#: This package: `transformer_engine.pytorch` is what `hybridq.te` has the names of.
pytorch = sys.modules[__name__]
aliases.install()
__getattr__ = refusing(__name__, "te", REFUSED)
