"""Which products on a CPU read the codes of their operands, of which nothing decoded is kept."""

from __future__ import annotations

import torch

from ...formats import PlaneSpec
from ..choice import OpQuery, choose
from ..cpu import CPU, codes_reason, planes_reason, tiles_reason

__all__ = ["no_codes_reason", "no_planes_reason"]


def no_codes_reason(a: PlaneSpec, b: PlaneSpec) -> str | None:
    """Return None if a product of few rows of `a` on a CPU reads the codes of `b`, else why not.

    Args:
        a, b: the operands' specs.
    """
    if b.format.is_identity:
        return "b is not quantized"
    if b.signs is not None and a.signs != b.signs:
        return "b is transformed and a is not, so it is transformed back"
    return _other_decoder(b, "b") or codes_reason(b)


def no_planes_reason(a: PlaneSpec, b: PlaneSpec, in_bf16: bool) -> str | None:
    """Return None if a product on a CPU decodes its operands on the way, else why not.

    Args:
        a, b: the operands' specs.
        in_bf16: the product is made in BF16, which holds both; else in FP32.
    """
    if a.signs != b.signs:
        return "one operand is transformed and the other is not, so it is transformed back"
    for name, spec in (("a", a), ("b", b)):
        reason = tiles_reason(spec) if in_bf16 else planes_reason(spec)
        if reason is None and not spec.format.is_identity:
            reason = _other_decoder(spec, name)
        if reason is not None:
            return reason
    return None


def _other_decoder(spec: PlaneSpec, name: str) -> str | None:
    """Return who decodes planes of a spec on a CPU if it is not the core, else None."""
    decoder = choose(OpQuery("operand", "cpu", torch.float32, spec)).chosen
    if decoder is None or decoder is CPU:
        return None
    return f"the backend {decoder.name} decodes {name}"
