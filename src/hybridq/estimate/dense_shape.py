"""Models that are only shapes: what a plan is made of where no machine holds the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

from ..converters import convert
from ..nn import Linear

__all__ = ["DenseShape"]

#: Of shapes that are derived from a number of parameters: hidden over layers, ffn over hidden,
#: the size of a head, queries per key, vocabulary. Those of the large dense models of 2024.
_ASPECT: Final = 104
_FFN: Final = 3.5
_HEAD: Final = 128
_QUERIES: Final = 8
_VOCAB: Final = 128256
#: A model of more has tensors that torch cannot size, or more layers than can be listed.
_MOST_PARAMS: Final = 10**15


@dataclass(frozen=True)
class DenseShape:
    """A decoder-only transformer with grouped queries and SwiGLU, as sizes.

    Args:
        layers: blocks.
        hidden: width of the residual stream.
        ffn: width of the feed-forward layer.
        heads, kv_heads: query heads, and the key and value heads that they share.
        vocab: rows of the embedding, and of the head.

    Raises:
        ValueError: a size is below 1, or heads do not divide hidden, or kv_heads heads, or there
            are more than 1e15 parameters.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int = _VOCAB

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if type(value) is not int or value < 1:
                raise ValueError(f"DenseShape: {name} must be an int of at least 1, got {value!r}")
        for a, b in (("hidden", "heads"), ("heads", "kv_heads")):
            if getattr(self, a) % getattr(self, b):
                raise ValueError(
                    f"DenseShape: {a} must be a multiple of {b}, got {a}={getattr(self, a)} with "
                    f"{b}={getattr(self, b)}"
                )
        if self.num_params > _MOST_PARAMS:
            raise ValueError(
                f"DenseShape: there must be at most {_MOST_PARAMS:g} parameters, got "
                f"{self.num_params:.3g}"
            )

    @staticmethod
    def of(
        params: float | None = None,
        *,
        layers: int | None = None,
        hidden: int | None = None,
        ffn: int | None = None,
        heads: int | None = None,
        kv_heads: int | None = None,
        vocab: int | None = None,
    ) -> DenseShape:
        """Return a shape of about `params` parameters, or one whose other sizes follow from these.

        What is not given is as in the large dense models of 2024: heads of 128, eight queries per
        key, ffn 3.5 times hidden, about 104 of hidden per layer, a vocabulary of 128256.

        Args:
            params: how many parameters; then `layers` must not be given.
            layers, hidden, ffn, heads, kv_heads, vocab: sizes that are known.

        Raises:
            ValueError: neither `params` nor `layers` and `hidden` are given, or too much is, or
                `params` is below 1 or above 1e15.

        Example:
            >>> from hybridq.distributed import DenseShape
            >>> DenseShape.of(70e9)
            DenseShape(layers=79, hidden=8192, ffn=28672, heads=64, kv_heads=8, vocab=128256)
        """
        if params is None and (layers is None or hidden is None):
            raise ValueError("DenseShape.of: give params, or layers and hidden, got neither")
        if params is not None and layers is not None:
            raise ValueError("DenseShape.of: params give the number of layers, got both")
        if params is not None and not 1 <= params <= _MOST_PARAMS:
            raise ValueError(
                f"DenseShape.of: params must be at least 1 and at most {_MOST_PARAMS:g}, got "
                f"{params:g}"
            )
        if hidden is None:
            per_layer_of_one = 3 * _FFN + 2 + 2 / _QUERIES  # values over hidden squared
            wanted = (float(params or 1) * _ASPECT / per_layer_of_one) ** (1 / 3)
            unit = 1024 if wanted >= 3 * 1024 else _HEAD
            hidden = max(round(wanted / unit), 1) * unit
        heads = heads or max(hidden // _HEAD, 1)
        if kv_heads is None:
            kv_heads = heads // _QUERIES if heads % _QUERIES == 0 else heads
        ffn = ffn or round(_FFN * hidden)
        one = DenseShape(1, hidden, ffn, heads, kv_heads, vocab or _VOCAB)
        if layers is None:
            inside = one._block_params
            layers = max(round((float(params or 1) - (one.num_params - inside)) / inside), 0)
            if not layers:
                raise ValueError(
                    f"DenseShape.of: params must be enough for a layer beside the vocabulary of "
                    f"{one.vocab} x {hidden}, got {params:g}; give a smaller vocab or hidden"
                )
        return DenseShape(layers, hidden, ffn, heads, kv_heads, one.vocab)

    @property
    def _kv(self) -> int:
        """Rows of the keys' and the values' projections together."""
        return 2 * self.kv_heads * (self.hidden // self.heads)

    @property
    def _block_params(self) -> int:
        return self.hidden * (2 * self.hidden + self._kv + 3 * self.ffn + 2)

    @property
    def num_params(self) -> int:
        """How many parameters the model has."""
        return self.layers * self._block_params + (2 * self.vocab + 1) * self.hidden

    @property
    def kv_size(self) -> int:
        """Columns of the keys and the values together."""
        return self._kv

    def model(
        self,
        dtype: torch.dtype = torch.float32,
        *,
        layers: int | None = None,
        parts: int = 1,
        has_head: bool = True,
    ) -> nn.Module:
        """Return modules with these parameters on the meta device; they have no forward.

        Queries, keys and values are one matrix, gate and up another. The head is not quantized.

        Args:
            dtype: of the parameters.
            layers: of a first stage of a pipeline; None: all of them.
            parts: ranks of a tensor-parallel group, of which this is the one with the largest part:
                of rows of the embedding, the head and the matrices that hidden states enter, of
                columns of those that they leave. Norms are whole.
            has_head: whether norm and head are there, which a first stage has not.
        """
        vocab = -(-self.vocab // parts)
        with torch.device("meta"):
            root = nn.Module()
            root.embedding = nn.Embedding(vocab, self.hidden, dtype=dtype)
            count = self.layers if layers is None else layers
            root.layers = nn.ModuleList(self._block(dtype, parts) for _ in range(count))
            if has_head:
                root.norm = nn.RMSNorm(self.hidden, dtype=dtype)
                root.lm_head = nn.Linear(self.hidden, vocab, bias=False, dtype=dtype)
        return convert(root)

    def _block(self, dtype: torch.dtype, parts: int) -> nn.Module:
        hidden, ffn = self.hidden, -(-self.ffn // parts)
        own, kv = -(-hidden // parts), -(-self._kv // parts)
        block = nn.Module()
        sizes = {
            "qkv": (hidden, own + kv),
            "out": (own, hidden),
            "gate_up": (hidden, 2 * ffn),
            "down": (ffn, hidden),
        }
        for name, (ins, outs) in sizes.items():
            setattr(block, name, Linear(ins, outs, bias=False, dtype=dtype))
        for name in ("attention_norm", "ffn_norm"):
            setattr(block, name, nn.RMSNorm(hidden, dtype=dtype))
        return block
