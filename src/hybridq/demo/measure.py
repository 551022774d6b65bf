"""Bytes that a training step holds: quantized weights, and activations saved for the backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor, nn

from ..nn.modules import QuantizedModule
from ..recipes import QuantizerRole, get
from ..report import saved_nbytes


def activation_nbytes(
    forward: Callable[[int], Tensor], batch: int, exclude: Iterable[Tensor] = ()
) -> int:
    """Bytes saved for the backward that belong to the ``batch`` samples.

    It is the difference between a forward of ``2 * batch`` and one of ``batch`` samples, so what
    does not grow with the batch (weights cast or quantized for the backward, rotary tables)
    drops out, in whatever form a recipe keeps it.

    Args:
        forward: ``forward(n)`` runs ``n`` samples and returns the loss.
        batch: samples per training step.
        exclude: as for ``saved_nbytes``.
    """
    held = list(exclude)
    return saved_nbytes(lambda: forward(2 * batch), held) - saved_nbytes(
        lambda: forward(batch), held
    )


def weight_nbytes(model: nn.Module, recipe: str) -> int:
    """Bytes of the projections' weights in the form that the GEMMs of a training step read.

    That is one BF16 copy without a recipe, and the rowwise plane for the forward with the
    columnwise plane for the backward under one; buffers that both planes share count once.

    Args:
        model: matrices of its modules of hybridq count (with recipe ``"bf16"`` the same ones).
        recipe: a name known to ``hybridq.recipes.get``.
    """
    total = 0
    for name, module in model.named_modules():
        if not isinstance(module, QuantizedModule):
            continue
        for own, part in module.weight_parts.items():
            role = QuantizerRole(module.module_type, "weight", f"{name}.{part}" if part else name)
            matrices = getattr(module, own).detach().bfloat16()
            if module.holds_transposed:
                matrices = matrices.mT
            for weight in matrices.unbind() if matrices.dim() > 2 else [matrices]:
                if recipe == "bf16":
                    total += weight.nbytes
                else:
                    total += get(recipe).quantizer(role).undelayed()(weight).nbytes
    return total
