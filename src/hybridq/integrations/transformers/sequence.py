"""Models of transformers whose sequences several ranks share: an attention implementation.

Around the implementation that a model has (sdpa, flash, flex, another one that is registered) heads
are exchanged for tokens; masks are made by that implementation's own function, of the whole
sequences. Nothing of a model is patched: implementation, mask and loss are what transformers lets
others give.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..._log import log_once
from ...calibration.caches import has_cache
from ...distributed.sequence import Comparison, HeadExchange, label_count, over_ranks
from .ring import in_ring
from .sequence_images import TOKEN_TYPES, WHOLE, OwnFeatures, takes_images

__all__ = ["in_ring", "share_sequences"]

_WHERE: Final = "sequence_parallel"
#: Attention that sees which keys are hidden by its mask alone, not by `position_ids`.
_BY_MASK: Final = ("sdpa", "flex_attention")
_KNOWN: Final = (*_BY_MASK, "flash_attention_2", "flash_attention_3", "flash_attention_4")
#: Kinds of layers in which tokens meet in attention alone.
_LAYERS: Final = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
#: Tensors that a forward may be given.
_INPUTS: Final = {
    "input_ids",
    "inputs_embeds",
    "attention_mask",
    "position_ids",
    "labels",
    "shift_labels",
    "num_items_in_batch",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "logits_to_keep",
}
_numbers: Final = itertools.count()


class _Whole(NamedTuple):
    """What a forward's masks are made of.

    Attributes:
        positions: int64 `[batch or 1, whole length]` where sequences are packed, else None.
        sequences: the number of the packed sequence of each token, or None.
        has_mask: an attention_mask was given.
    """

    positions: torch.Tensor | None
    sequences: torch.Tensor | None
    has_mask: bool


class _Grouped:
    """A module as its attention sees it, with other heads of queries for each head of keys."""

    def __init__(self, module: Any, groups: int) -> None:
        self._module, self.num_key_value_groups = module, groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _Shared:
    """One model and the ranks that share its sequences."""

    def __init__(self, model: Any, exchange: HeadExchange, comparison: Comparison) -> None:
        self.exchange, self._comparison = exchange, comparison
        config = model.config.get_text_config()
        self.inner: str = config._attn_implementation
        _check(model, config, self.inner)
        self._attend = ALL_ATTENTION_FUNCTIONS[self.inner]
        self._mask = ALL_MASK_ATTENTION_FUNCTIONS.get(self.inner)
        self._signature = inspect.signature(model.forward)
        self._whole: _Whole | None = None
        self._has_loss = False
        self._features = OwnFeatures(model, exchange) if takes_images(model) else None
        # Named by what is inside: transformers asks for "flash" and "sdpa" in names.
        self.name = f"ulysses_{next(_numbers)}_{self.inner.replace('/', '_').replace('|', '_')}"

    def __deepcopy__(self, memo: dict[int, Any]) -> _Shared:
        return self  # which transformers knows by its name

    # ---- attention

    def attention(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        **options: Any,
    ) -> tuple[torch.Tensor, Any]:
        """Return what the inner implementation makes of the whole sequences: this rank's part.

        Args:
            module: of the layer.
            query, key, value: `[batch, heads, own length, features]`.
            attention_mask: of the whole sequences, as `mask` made it.
            options: of the inner implementation.
        """
        if options.get("position_bias") is not None:
            raise ValueError(f"{_WHERE}: attention must have no position_bias, got one")
        heads, groups = query.shape[1], query.shape[1] // key.shape[1]
        whole = key.shape[2] * self.exchange.world
        if isinstance(attention_mask, torch.Tensor):
            if attention_mask.shape[-1] != whole:
                raise ValueError(
                    f"{_WHERE}: masks must be of the whole sequence of {whole} tokens, got "
                    f"{tuple(attention_mask.shape)}; call the model that was given"
                )
            attention_mask = self.exchange.own_mask(attention_mask, heads)
        q, k, v = self.exchange.scatter_heads(query, key, value)
        sinks = options.get("s_aux")
        if sinks is not None:
            own = heads // self.exchange.world
            options["s_aux"] = sinks.narrow(0, self.exchange.rank * own, own)
        positions = options.get("position_ids")
        if positions is not None and positions.shape[-1] * self.exchange.world == whole:
            by_mask = attention_mask is not None or self.inner in _BY_MASK
            options["position_ids"] = None if by_mask else self.exchange.gathered(positions)
        if q.shape[1] // k.shape[1] != groups:
            module = _Grouped(module, q.shape[1] // k.shape[1])
        mixed, weights = self._attend(module, q, k, v, attention_mask, **options)
        return self.exchange.gather_heads(mixed, 2, 1), weights

    def mask(self, **options: Any) -> Any:
        """Return the inner implementation's mask of the whole sequences.

        Args:
            options: as transformers gives them; `q_length` is of this rank's part.
        """
        whole = self._whole
        world = self.exchange.world
        if whole is None or options["kv_length"] != options["q_length"] * world:
            raise RuntimeError(
                f"{_WHERE}: the model that was given must be called, got a call of a part of it, "
                "or of another model that has the same configuration object; make each model of "
                "a copy of it"
            )
        options["q_length"] = options["kv_length"]
        if not whole.has_mask:
            options["attention_mask"] = None
        if whole.sequences is not None and whole.positions is not None:
            options["mask_function"] = _within(options["mask_function"], *whole[:2])
            options["allow_is_causal_skip"] = options["allow_is_bidirectional_skip"] = False
        return self._mask(**options)

    # ---- the model's forward

    def before(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the arguments of a forward, with positions and mask as this rank needs them.

        Args:
            model: that is called.
            args, kwargs: what it is given.
        """
        given = self._signature.bind_partial(*args, **kwargs).arguments
        for name, parameter in self._signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                given.update(given.pop(name, {}))
        given = {name: value for name, value in given.items() if value is not None}
        self._comparison.check(_WHERE, (), given)
        problem = _problem(model, given, self._features is not None)
        if problem:
            raise ValueError(f"{_WHERE}: {problem}")
        tokens = given["input_ids"] if "input_ids" in given else given["inputs_embeds"]
        length, world = tokens.shape[1], self.exchange.world
        positions = given.get("position_ids")
        sequences = None
        if positions is None:
            first = self.exchange.rank * length
            place = torch.arange(length, dtype=torch.int64, device=tokens.device)
            given["position_ids"] = place[None] + first
        elif "attention_mask" not in given:
            positions = self.exchange.gathered(positions)
            sequences = _sequences(positions)
        has_mask = "attention_mask" in given
        if not has_mask:
            shape = (tokens.shape[0], length * world)
            whole = torch.ones(shape, dtype=torch.bool, device=tokens.device)
        else:
            whole = given["attention_mask"]
            if whole.dim() == 2 and whole.shape[1] == length:
                whole = self.exchange.gathered(whole)
        given["attention_mask"], given["use_cache"] = whole, False
        packed = None
        if positions is not None and sequences is not None:
            packed, sequences = (x.expand(tokens.shape[0], -1) for x in (positions, sequences))
        self._whole = _Whole(packed, sequences, has_mask)
        self._has_loss = False
        if self._features is not None:
            kinds = [name for name in TOKEN_TYPES if name in given]
            if packed is not None and kinds:
                raise ValueError(
                    f"{_WHERE}: packed sequences must be without images, got {kinds[0]}"
                )
            given.update({name: self.exchange.gathered(given[name]) for name in kinds})
            self._features.replace(model, given)
        return (), given

    def after(self, model: Any, args: Any, kwargs: dict[str, Any], made: Any) -> None:
        """Raise where a model made its loss by itself.

        Args:
            model, args, kwargs: of the call.
            made: its result.
        """
        self._whole = None
        if "labels" in kwargs and not self._has_loss and made is not None:
            raise ValueError(
                f"{_WHERE}: the loss must be made by the model's loss_function, got "
                f"{type(model).__name__}, which makes its own; call it without labels and take "
                "hybridq.distributed.sequence_loss"
            )

    def loss(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int,
        num_items_in_batch: Any = None,
        ignore_index: int = -100,
        **options: Any,
    ) -> torch.Tensor:
        """Return the loss of all ranks, as `sequence_loss`.

        Args:
            logits, labels, vocab_size, ignore_index: as models of transformers give them.
            num_items_in_batch: what the sum is divided by; None: the number of all ranks' labels.
            options: with `shift_labels`.
        """
        self._has_loss = True
        count = num_items_in_batch
        if count is None:
            count = label_count(options["shift_labels"], self.exchange, ignore_index)
        part = ForCausalLMLoss(logits, labels, vocab_size, count, ignore_index, **options)
        return over_ranks(part, self.exchange)


def _within(seen: Callable[..., Any], positions: Any, sequences: Any) -> Callable[..., Any]:
    """Return a mask function of packed sequences, which asks `seen` about positions in them."""

    def inner(batch: Any, head: Any, query: Any, key: Any) -> Any:
        same = sequences[batch, query] == sequences[batch, key]
        return same & seen(batch, head, positions[batch, query], positions[batch, key])

    return inner


def _sequences(positions: torch.Tensor) -> torch.Tensor | None:
    """Return the number of the packed sequence of each token, or None where there is one."""
    begins = torch.diff(positions, prepend=positions[:, :1] - 1) != 1
    return begins.cumsum(-1) if bool(begins.any()) else None


def _problem(model: Any, given: dict[str, Any], has_images: bool) -> str:
    """Return why a forward cannot be run, or nothing."""
    if has_cache(given):
        return "a forward must have no KV cache, got one; generate on one rank"
    tensors = [name for name, value in given.items() if isinstance(value, torch.Tensor)]
    known = {*_INPUTS, *TOKEN_TYPES, *WHOLE} if has_images else _INPUTS
    other = [name for name in tensors if name not in known]
    if other:
        return f"tokens alone are shared, in the text model, got {', '.join(other)}"
    if "mm_encoder_outputs" in given:
        return "images must be given as pixels, got mm_encoder_outputs"
    if ("input_ids" in given) is ("inputs_embeds" in given):
        return "a forward must be given input_ids or inputs_embeds"
    if "labels" in given and "shift_labels" not in given:
        return (
            "labels must be shifted before the sequence is cut, got labels alone; give what "
            "hybridq.distributed.shard_sequence returns"
        )
    routers = given.get("output_router_logits", getattr(model.config, "output_router_logits", 0))
    if routers:
        return "the loss of routers is no sum over tokens, got output_router_logits=True"
    if isinstance(given.get("attention_mask"), dict):
        return "attention_mask must be a tensor, got a dict"
    positions = given.get("position_ids")
    if positions is not None and positions.dim() != 2:
        return f"position_ids must be [batch or 1, length], got {tuple(positions.shape)}"
    return ""


def _check(model: Any, config: Any, inner: str) -> None:
    """Raise where a model is known to fail."""
    kind = type(model).__name__
    if inner.startswith("ulysses_"):
        raise ValueError(f"{_WHERE}: a model must be given once, got one that was before")
    if inner == "eager" or inner.startswith("paged|") or inner not in ALL_ATTENTION_FUNCTIONS:
        raise ValueError(
            f"{_WHERE}: the attention implementation must be registered with transformers, got "
            f"{inner!r}, which every model has of its own; call "
            "model.set_attn_implementation('sdpa') first"
        )
    if inner not in _KNOWN:
        log_once(
            f"ulysses {inner}",
            f"{_WHERE}: attention {inner!r} is not known; it is given all tokens of some heads, "
            "and masks and position_ids of the whole sequence",
        )
    layers = set(getattr(config, "layer_types", None) or ()) - _LAYERS
    text = _text_model(model, config)
    mixing = {type(one).__name__ for one in text.modules() if isinstance(one, torch.nn.Conv1d)}
    if layers or mixing:
        raise ValueError(
            f"{_WHERE}: tokens must meet in attention alone, got {kind} with "
            f"{', '.join(sorted(layers | mixing))}"
        )
    parameters = inspect.signature(model.forward).parameters
    if "position_ids" not in parameters:
        raise ValueError(f"{_WHERE}: forward must take position_ids, got {kind}, which does not")


def _text_model(model: Any, config: Any) -> Any:
    """Return the part of a model that has the text configuration."""
    parts: Iterator[Any] = (one for one in model.modules() if getattr(one, "config", 0) is config)
    return next(parts, model)


def share_sequences(model: Any, exchange: HeadExchange, comparison: Comparison) -> None:
    """Let ranks share the sequences of a model of transformers.

    Args:
        model: a PreTrainedModel, the outermost.
        exchange: among which ranks.
        comparison: of what forwards are given.

    Raises:
        ValueError: its attention, layers or forward are known to fail.
    """
    shared = _Shared(model, exchange, comparison)
    AttentionInterface.register(shared.name, shared.attention)
    if shared._mask is not None:
        AttentionMaskInterface.register(shared.name, shared.mask)
    config = model.config.get_text_config()
    chosen: Any = shared.name
    if config is not model.config:
        keys = [key for key in model.config.sub_configs if getattr(model.config, key) is config]
        chosen = dict.fromkeys(keys, shared.name)
    model.set_attn_implementation(chosen)
    if config._attn_implementation != shared.name:
        raise ValueError(
            f"{_WHERE}: attention must be what set_attn_implementation sets, got "
            f"{type(model).__name__}, which does not support it"
        )
    model.register_forward_pre_hook(shared.before, with_kwargs=True)
    model.register_forward_hook(shared.after, with_kwargs=True)
    if getattr(model, "loss_type", None) is not None and model.loss_function is ForCausalLMLoss:
        model.loss_function = shared.loss
        # Trainer would count the labels of its own rank.
        model.accepts_loss_kwargs = False
