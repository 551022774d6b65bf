"""Models of transformers inside of torch's ring attention: `sdpa`, without masks of a part.

transformers makes a mask wherever positions do not count on by one, as those of a rank's two parts
do not. An implementation without a mask function gets none, and what a mask would have said is
checked before the forward.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ...calibration.caches import has_cache

__all__ = ["in_ring"]

_WHERE: Final = "context_parallel"
#: transformers asks for "sdpa" in names.
_NAME: Final = "ring_sdpa"
_ULYSSES: Final = "take hybridq.distributed.sequence_parallel"


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    **options: Any,
) -> tuple[torch.Tensor, Any]:
    """Return what `sdpa` makes of this rank's tokens, inside of torch's context parallelism."""
    for what in ("sliding_window", "position_bias", "s_aux"):
        if options.get(what) is not None:
            raise ValueError(
                f"{_WHERE}: attention must see all that came before, got {what}; {_ULYSSES}"
            )
    if attention_mask is not None:
        raise ValueError(
            f"{_WHERE}: attention must have no mask but a causal one, got one; {_ULYSSES}"
        )
    made: tuple[torch.Tensor, Any] = ALL_ATTENTION_FUNCTIONS["sdpa"](
        module, query, key, value, None, **options
    )
    return made


def _problem(given: dict[str, Any], places: torch.Tensor) -> str:
    """Return why a forward cannot be run, or nothing."""
    if has_cache(given):
        return "a forward must have no KV cache, got one; generate on one rank"
    if given.get("labels") is not None:
        return (
            "a forward must have no labels, whose loss would be the rank's, got some; take "
            "hybridq.distributed.sequence_loss of its logits"
        )
    mask = given.get("attention_mask")
    if mask is not None and not isinstance(mask, torch.Tensor):
        return f"attention_mask must be a tensor, got {type(mask).__name__}"
    if mask is not None and not bool((mask != 0).all()):
        return f"no token may be hidden, got an attention_mask; {_ULYSSES}"
    found = given.get("position_ids")
    if found is None or found.dim() != 2 or found.shape[-1] != len(places):
        return (
            "position_ids must be given, [batch or 1, length], and be one of buffers, got "
            f"{'none' if found is None else tuple(found.shape)}"
        )
    if not bool((found == places.to(found.device)).all()):
        return f"position_ids must be 0, 1, ... of the whole, got other ones; {_ULYSSES}"
    return ""


def _check(model: Any) -> None:
    """Raise where a model is known to fail."""
    config, kind = model.config, type(model).__name__
    text = config.get_text_config()
    if text is not config:
        raise ValueError(f"{_WHERE}: the model must be a text model, got {kind}; {_ULYSSES}")
    if text._attn_implementation != "sdpa":
        raise ValueError(
            f"{_WHERE}: attention must be scaled_dot_product_attention, got "
            f"{text._attn_implementation!r}; call model.set_attn_implementation('sdpa') first"
        )
    layers = set(getattr(text, "layer_types", None) or ()) - {"full_attention", "attention"}
    mixing = {type(one).__name__ for one in model.modules() if isinstance(one, torch.nn.Conv1d)}
    if layers or mixing:
        raise ValueError(
            f"{_WHERE}: layers must have full attention, got {kind} with "
            f"{', '.join(sorted(layers | mixing))}; {_ULYSSES}"
        )
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ValueError(f"{_WHERE}: forward must take position_ids, got {kind}, which does not")


@contextmanager
def in_ring(model: Any, places: torch.Tensor) -> Iterator[None]:
    """Let a model attend through torch's context parallelism in the block.

    Args:
        model: a PreTrainedModel, the outermost.
        places: int64 `[own length]`: where this rank's tokens stand in the whole sequence.

    Raises:
        ValueError: its attention or layers are known to fail; in a forward: positions, a mask,
            labels or a cache that are.
    """
    _check(model)
    signature = inspect.signature(model.forward)

    def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = dict(signature.bind_partial(*args, **kwargs).arguments)
        for name, parameter in signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                given.update(given.pop(name, {}))
        problem = _problem(given, places)
        if problem:
            raise ValueError(f"{_WHERE}: {problem}")
        given.pop("attention_mask", None)
        return (), {**given, "use_cache": False}

    AttentionInterface.register(_NAME, _attention)
    model.set_attn_implementation(_NAME)
    hook = model.register_forward_pre_hook(before, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()
        model.set_attn_implementation("sdpa")
