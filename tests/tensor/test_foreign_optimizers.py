"""What optimizers of other packages ask of a quantized parameter."""

from __future__ import annotations

import pytest

import hybridq


def test_no_optimizer_takes_a_parameter_for_a_flat_one(weight) -> None:
    """Prodigy and D-Adaptation look for FSDP's mark, and then reduce over ranks of CUDA devices."""
    assert not hasattr(weight, "_fsdp_flattened")
    assert not getattr(weight, "_fsdp_flattened", False)
    with pytest.raises(RuntimeError, match="a flat parameter is made of plain ones"):
        weight._fsdp_flattened = True
    with hybridq.quantized_model_init("nvfp4"):
        layer = hybridq.Linear(32, 32)
    assert not any(hasattr(one, "_fsdp_flattened") for one in layer.parameters())
