"""Adapters of PEFT that multiply by a weight of their own making: no recipe sees these products."""

from __future__ import annotations

from typing import Final

from torch import nn

from ..errors import warn_once
from ..nn import QuantizedModule
from . import require

require("peft")

from peft.tuners.tuners_utils import BaseTunerLayer  # noqa: E402

__all__ = ["tell_of_own_products"]

#: Layers whose forward makes a weight of the base's and the adapter's, and multiplies by it.
_OWN_PRODUCTS: Final = frozenset(
    {"FrodLayer", "GloraLayer", "HRALayer", "ShiraLayer", "SupertuningLayer"}
)


def _multiplies_itself(one: BaseTunerLayer) -> bool:
    """Return whether a layer passes its base by while its adapters are not merged."""
    if getattr(one, "miss_fn", None) == "bat":  # the one of MiSS's ways that needs the whole weight
        return True
    return any(kind.__name__ in _OWN_PRODUCTS for kind in type(one).__mro__)


def tell_of_own_products(model: nn.Module) -> None:
    """Warn, once for a kind of adapters, where they multiply in the place of a module of hybridq.

    Args:
        model: with layers that PEFT has adapted, or none.
    """
    found: dict[str, list[str]] = {}
    for name, one in model.named_modules():
        if not isinstance(one, BaseTunerLayer) or not _multiplies_itself(one):
            continue
        if isinstance(one.get_base_layer(), QuantizedModule):
            kind = type(one).__module__.removeprefix("peft.tuners.").split(".")[0]
            found.setdefault(kind, []).append(name or "the model")
    for kind, names in found.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        warn_once(
            f"peft own products {kind}",
            f"peft: adapters of {kind} multiply by a weight that they make in each forward, in "
            f"high precision under any recipe, got those of {names[0]}{more}; a recipe holds once "
            "they are merged, and beside other adapters, such as LoRA's",
        )
