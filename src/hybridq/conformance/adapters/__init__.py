"""Adapters that come with hybridq: its own backends, and peers where they are installed."""

from __future__ import annotations

from functools import partial
from importlib import import_module

from ...kernels import backends
from ..adapter import Adapter, register_adapter
from .ours import HybridQAdapter

__all__ = ["HybridQAdapter"]


def _peer(module: str) -> Adapter:
    """Import a library's adapter only when it is asked for: the library may not be installed."""
    return import_module(f".{module}", __name__).ADAPTER


register_adapter("hybridq", HybridQAdapter)
for _backend in backends():
    if "encode" in _backend.ops:
        register_adapter(f"hybridq-{_backend.name}", partial(HybridQAdapter, _backend.name))
register_adapter("ml_dtypes", partial(_peer, "peer_ml_dtypes"))
register_adapter("torchao", partial(_peer, "peer_torchao"))
