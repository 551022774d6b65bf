"""Backends that encode tokens sorted by group, each forced in turn."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import emulated
import hybridq
from hybridq.kernels.choice import registry

MODULE = emulated.load()


@pytest.fixture(params=["cpu", "reference", "emulated"])
def encoder(request) -> Iterator[str]:
    """Every backend that encodes, forced."""
    if request.param != "emulated":
        request.node.user_properties.append(("backend", request.param))
        with hybridq.backend(request.param):
            yield request.param
        return
    if MODULE is None:
        pytest.skip("the emulated kernels are not built (make emulation)")
    MODULE.set_seed(1)
    MODULE.reset()
    registry.register_backend(emulated.make_backend(MODULE))
    try:
        with hybridq.backend("emulated"):
            yield request.param
    finally:
        registry.unregister_backend("emulated")
