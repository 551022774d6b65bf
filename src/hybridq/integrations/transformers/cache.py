"""HybridQCache: keys and values of attention in few bits, as transformers' caches hold them.

A token's keys of one head are a row `[head_dim]`. Its codes and scales are tensors
`[batch, heads, tokens, *]` that grow, slide, are cropped and reordered as keys and values are: each
pair of them, of keys and of values, is held by a cache layer of transformers' own.

Source: transformers 5.23 and 5.24, cache_utils.py.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import nn
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DummyLayer,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    LinearAttentionLayer,
    StaticCache,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from ...calibration import Calibration
from ...formats import PlaneSpec
from .cache_amaxes import Amaxes, by_layer, has_two_caches, name_missed, parted_by_layer
from .cache_states import check_room, check_states

__all__ = ["HybridQCache", "QuantizedStates"]

#: Layers of transformers that hold keys and values and nothing else.
_KNOWN: Final = (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer)
#: Layers that hold neither.
_WITHOUT: Final = (LinearAttentionLayer, DummyLayer)


class QuantizedStates(CacheLayerMixin):
    """Keys and values of one layer, quantized as they come and decoded for attention.

    What attention sees are decoded values, of new tokens too: so results do not depend on how a
    prompt is cut into calls.

    Args:
        plain: a layer of transformers without content, whose way of growing this one has.
        spec: of the planes whose rows are tokens.
        amaxes: FP32 `[1]` of keys and of values, where `spec` has one statistic for a tensor.

    Attributes:
        parts: a layer like `plain` for each buffer of a plane, that holds those of keys and values.
    """

    def __init__(
        self,
        plain: CacheLayerMixin,
        spec: PlaneSpec,
        amaxes: Amaxes | None = None,
    ) -> None:
        self._spec, self._amaxes = spec.text, amaxes
        shapes = [buffer.shape for buffer in spec.buffers(3, 64)]
        # A buffer of one entry for the whole tensor follows from the amax, and is not held.
        self._is_held, self._dims = [shape[0] == 3 for shape in shapes], [*map(len, shapes)]
        self.parts = [copy.deepcopy(plain) for held in self._is_held if held]
        self.is_initialized = False

    # ---- what transformers asks

    @property
    def is_compileable(self) -> bool:
        """Whether its shapes stay."""
        return self.parts[0].is_compileable

    @property
    def is_croppable(self) -> bool:
        """Whether tokens can be taken away from its end."""
        return self.parts[0].is_croppable

    @property
    def is_sliding(self) -> bool:
        """Whether it holds a window of tokens."""
        return self.parts[0].is_sliding

    @property
    def record_past(self) -> bool:
        """Whether a window keeps tokens until the next `crop`."""
        return getattr(self.parts[0], "record_past", False)

    @property
    def batch_size(self) -> int:
        """Rows of the batch; of a layer of static shapes that has content."""
        return self.parts[0].batch_size

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        held = [one for part in self.parts for one in (part.keys, part.values)]
        return sum(one.numel() * one.element_size() for one in held if one is not None)

    @property
    def keys(self) -> torch.Tensor | None:
        """The keys, decoded, `[batch, heads, tokens, head_dim]`; None before the first."""
        return self._decoded(0)

    @property
    def values(self) -> torch.Tensor | None:
        """The values, decoded; None before the first."""
        return self._decoded(1)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Take dtype, device and sizes from the first states, which are not held yet.

        Args:
            key_states, value_states: `[batch, heads, tokens, head_dim]`.
        """
        self.dtype, self.device = key_states.dtype, key_states.device
        self._widths = (key_states.shape[-1], value_states.shape[-1])
        if self._amaxes is not None:
            k, v = self._amaxes
            self._amaxes = (k.to(self.device), v.to(self.device))
        none = [
            self._encode(one[..., :0, :], i) for i, one in enumerate((key_states, value_states))
        ]
        self._whole = [whole for _, whole in none]
        for part, k, v in zip(self.parts, none[0][0], none[1][0], strict=True):
            part.lazy_initialization(k, v)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hold the states of new tokens; return those that attention sees, decoded.

        Args:
            key_states, value_states: `[batch, heads, tokens, head_dim]`.
            args, kwargs: transformers' own, of no meaning here.

        Raises:
            ValueError: of another batch or model, or more tokens than there is room for.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if not torch.compiler.is_compiling():
            first, most = self.parts[0], self.get_max_length()
            check_states(first.keys, self._widths, key_states, value_states)
            if self.is_compileable and not self.is_sliding:
                check_room(first, most, key_states.shape[-2])
        keys, values = self._encode(key_states, 0)[0], self._encode(value_states, 1)[0]
        seen = [part.update(k, v) for part, k, v in zip(self.parts, keys, values, strict=True)]
        return self._decode([k for k, _ in seen], 0), self._decode([v for _, v in seen], 1)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the length and the offset of what a query sees.

        Args:
            query_length: tokens that will come.
        """
        return self.parts[0].get_mask_sizes(query_length)

    def get_seq_length(self) -> int:
        """Return how many tokens were seen."""
        return self.parts[0].get_seq_length()

    def get_max_length(self) -> int:
        """Return how many tokens there may be; -1: any number."""
        return self.parts[0].get_max_length()

    def reset(self) -> None:
        """Forget all tokens."""
        for part in self.parts:
            part.reset()

    def offload(self) -> None:
        """Move codes and scales to the CPU."""
        for part in self.parts:
            part.offload()

    def prefetch(self) -> None:
        """Move them back."""
        for part in self.parts:
            part.prefetch()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Take rows of the batch in another order, as beam search does.

        Args:
            beam_idx: integers.
        """
        for part in self.parts:
            part.reorder_cache(beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        """Take tokens away from the end.

        Args:
            tokens_to_remove: how many, negative, as transformers has it.
        """
        for part in self.parts:
            part.crop(tokens_to_remove)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row of the batch.

        Args:
            repeats: how often.
        """
        for part in self.parts:
            part.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep some rows of the batch.

        Args:
            indices: of the rows.
        """
        for part in self.parts:
            part.batch_select_indices(indices)

    def activate_past_recording(self) -> None:
        """Have a window keep tokens until the next `crop`."""
        for part in self.parts:
            if hasattr(part, "activate_past_recording"):
                part.activate_past_recording()

    # ---- planes

    def _encode(
        self, states: torch.Tensor, which: int
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the buffers of keys (0) or values (1) by token, and those of the whole tensor."""
        lead, width = states.shape[:-1], states.shape[-1]
        stat = None if self._amaxes is None else self._amaxes[which]
        rows = states.reshape(lead.numel(), width)
        made = torch.ops.hybridq.encode(rows, self._spec, "", stat, None, None)
        held, whole = [], []
        for one, is_held in zip(made, self._is_held, strict=True):
            if is_held:
                held.append(one.view(*lead, one.shape[1] if one.dim() == 2 else 1))
            else:
                whole.append(one)
        return held, whole

    def _decode(self, held: Sequence[torch.Tensor], which: int) -> torch.Tensor:
        """Return the states that buffers by token stand for."""
        lead, width = held[0].shape[:-1], self._widths[which]
        count, own, whole = lead.numel(), iter(held), iter(self._whole[which])
        buffers = []
        for is_held, dims in zip(self._is_held, self._dims, strict=True):
            one = next(own if is_held else whole)
            buffers.append(one.reshape(count, one.shape[-1]) if dims == 2 else one.reshape(-1))
        made = torch.ops.hybridq.decode(buffers, self._spec, count, width, self.dtype)
        return made.view(*lead, width)

    def _decoded(self, which: int) -> torch.Tensor | None:
        held = [part.values if which else part.keys for part in self.parts]
        is_empty = not self.is_initialized or held[0] is None or held[0].numel() == 0
        return None if is_empty else self._decode(held, which)


class _Cache(Cache):
    """Layers of QuantizedStates.

    Args:
        plain: layers of transformers without content.
        spec: of the planes whose rows are tokens.
        amaxes: by the number of the layer; of those without, rows have their own.
    """

    def __init__(
        self, plain: Sequence[CacheLayerMixin], spec: PlaneSpec, amaxes: dict[int, Amaxes]
    ) -> None:
        self.format: list[str | None] = []
        layers = [self._layer(i, one, spec, amaxes.get(i)) for i, one in enumerate(plain)]
        super().__init__(layers=layers)

    def _layer(self, number: int, plain: Any, spec: PlaneSpec, own: Amaxes | None) -> Any:
        if type(plain) in _WITHOUT:
            self.format.append(None)
            return plain
        if type(plain) not in _KNOWN:
            raise ValueError(
                "HybridQCache: layers of a model must hold keys and values alone, got a "
                f"{type(plain).__name__} at {number}; use transformers' own cache"
            )
        if own is None and spec.needs_tensor_amax:
            spec = _by_row(spec)
        self.format.append(spec.short_text)
        return QuantizedStates(plain, spec, own)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return sum(one.nbytes for one in self.layers if isinstance(one, QuantizedStates))


class HybridQCache(_Cache):
    """A cache of transformers whose keys and values are held in few bits.

    Give it to a model's forward, or to `generate(cache=)`; before transformers 5.24 both call it
    `past_key_values`. It holds what a DynamicCache of the model would, or with `max_cache_len` a
    StaticCache, sliding windows included, and can be cropped, reordered, repeated and selected from
    as that one. Of a model of an encoder and a decoder it is an EncoderDecoderCache too, of two
    caches in few bits: `self_attention_cache`, and `cross_attention_cache` of the encoder's states.

    Args:
        model: whose layers it is for.
        format: a format or spec string whose blocks lie in one row, of one head of one token. Of a
            format with one statistic for a tensor (`"fp8"`, `"nvfp4"`), each row has its own
            (`"fp8_1x128"`, `"nvfp4;rows"`), unless there is a calibration.
        calibration: gives such formats the amax of the keys and of the values of each layer, by the
            name of its attention module: `k_scale` and `v_scale` are `amax / 448` of FP8. Or the
            path of its file. Layers that it does not know are named in a warning, and have a
            statistic for each row.
        max_cache_len: tokens that there may be: shapes stay, as `torch.compile` wants it. None: it
            grows. Cross-attention has as many as the encoder made, either way.

    Attributes:
        format: the spec string of each layer that holds keys; None of one that holds none. Those of
            cross-attention come last.

    Raises:
        ValueError: the format has blocks of several tokens or random bits, the calibration is of no
            use or has two modules for a layer, the model has layers that hold something else than
            keys and values, or `max_cache_len` is below 1 or no integer.
        SpecError: there is no such format.
        TypeError: `model` is no model of transformers.

    Example:
        >>> import torch
        >>> from transformers import AutoModelForCausalLM, LlamaConfig
        >>> from hybridq.integrations.transformers import HybridQCache
        >>> sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2}
        >>> config = LlamaConfig(vocab_size=96, num_hidden_layers=2, **sizes)
        >>> model, ids = AutoModelForCausalLM.from_config(config), torch.arange(5)[None]
        >>> cache = HybridQCache(model, "nvfp4")
        >>> made = model.generate(ids, cache=cache, max_new_tokens=3, do_sample=False)
        >>> made.shape, cache.get_seq_length(), cache.format[0]
        (torch.Size([1, 8]), 7, 'nvfp4;rows')
    """

    def __new__(cls, model: Any = None, *args: Any, **kwargs: Any) -> HybridQCache:
        """Return one cache, or where attention is of two kinds one that holds two."""
        return super().__new__(_OfBoth if cls is HybridQCache and has_two_caches(model) else cls)

    def __init__(
        self,
        model: Any,
        format: str = "fp8",
        calibration: Calibration | str | os.PathLike[str] | None = None,
        *,
        max_cache_len: int | None = None,
    ) -> None:
        spec, found = _checked(model, format, calibration)
        self._hold(_plain(model, max_cache_len), spec, model, found)

    def _hold(
        self, plain: list[Any], spec: PlaneSpec, model: Any, found: Calibration | None
    ) -> None:
        """Become a cache of these layers."""
        amaxes = {} if found is None else by_layer(model, found)
        if found is not None:
            name_missed(amaxes, len(plain))
        super().__init__(plain, spec, amaxes)


class _Cross(_Cache):
    """The states of an encoder, which come once and whole, and neither slide nor leave room.

    Args:
        count: of layers.
        spec, amaxes: as `_Cache` takes them.
        others: what T5Gemma's `generate` makes a cache of this class with.

    Raises:
        TypeError: it is made with others.
    """

    def __init__(
        self,
        count: int = 0,
        spec: PlaneSpec | None = None,
        amaxes: dict[int, Amaxes] | None = None,
        **others: Any,
    ) -> None:
        if others or spec is None:
            raise TypeError(
                "HybridQCache: generate must take the cache of cross-attention as it is, and this "
                "model's makes another; use EncoderDecoderCache(HybridQCache(model, format)"
                ".self_attention_cache, DynamicCache())"
            )
        super().__init__([DynamicLayer() for _ in range(count)], spec, amaxes or {})


class _OfBoth(EncoderDecoderCache, HybridQCache):
    """The HybridQCache of a model of an encoder and a decoder: attention asks for the former class.

    Args:
        model, format, calibration, max_cache_len: as HybridQCache takes them.
    """

    __init__ = HybridQCache.__init__  # EncoderDecoderCache has another

    def _hold(
        self, plain: list[Any], spec: PlaneSpec, model: Any, found: Calibration | None
    ) -> None:
        own: dict[int, Amaxes] = {}
        cross: dict[int, Amaxes] = {}
        if found is not None:
            own, cross = parted_by_layer(model, found)
            name_missed(own, len(plain))
            name_missed(cross, len(plain), "cross-attention in ")
        parts = _Cache(plain, spec, own), _Cross(len(plain), spec, cross)
        EncoderDecoderCache.__init__(self, *parts)
        self.format = self.self_attention_cache.format + self.cross_attention_cache.format

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        both: int = self.self_attention_cache.nbytes + self.cross_attention_cache.nbytes
        return both

    def check_dynamic_cache(self, method: str) -> None:
        """Let tokens be cropped, and rows repeated and selected: layers in few bits know how.

        Args:
            method: of no meaning here.
        """

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """Raise: it is not said which attention's states these are.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "HybridQCache: of a model of an encoder and a decoder it must be given to the model "
            "itself, since it holds a cache of each attention, got it as a part of another cache; "
            "its self_attention_cache and cross_attention_cache can be parts"
        )


def _checked(
    model: Any, format: str, calibration: Calibration | str | os.PathLike[str] | None
) -> tuple[PlaneSpec, Calibration | None]:
    """Return the spec and the calibration that a cache has, or raise what is wrong with them."""
    config = getattr(model, "config", None)
    if not (isinstance(model, nn.Module) and hasattr(config, "get_text_config")):
        raise TypeError(
            f"HybridQCache: model must be one of transformers, got {type(model).__name__}"
        )
    spec = PlaneSpec.parse(format)
    if spec.unit(0) != 1 or spec.stochastic or spec.format.is_identity:
        raise ValueError(
            "HybridQCache: a format of rows is needed, whose blocks lie in one token, rounded "
            f"to nearest, got {format!r}"
        )
    if isinstance(calibration, str | os.PathLike):
        calibration = Calibration.load(calibration)
    if calibration is not None and not spec.needs_tensor_amax:
        raise ValueError(
            f"HybridQCache: {format} takes no amax of a tensor: its blocks and rows have their "
            "own; leave the calibration out, or take fp8 or nvfp4"
        )
    return spec, calibration


def _plain(model: Any, max_cache_len: int | None) -> list[CacheLayerMixin]:
    """Return the layers without content that transformers would make for self-attention."""
    if max_cache_len is None:
        return list(DynamicCache(config=model.config).layers)
    if not isinstance(max_cache_len, int) or max_cache_len < 1:
        raise ValueError(
            f"HybridQCache: max_cache_len must be an integer >= 1 or None, got {max_cache_len!r}"
        )
    return list(StaticCache(config=model.config, max_cache_len=max_cache_len).layers)


def _by_row(spec: PlaneSpec) -> PlaneSpec:
    """Return the spec whose rows have the statistic that `spec` has of a tensor."""
    if spec.format.is_tensor_scaled:
        element = spec.format.element
        own = PlaneSpec.parse("fp8_1x128")
        return replace(own, format=replace(own.format, element=element), signs=spec.signs)
    return replace(spec, row_scaled=True)
