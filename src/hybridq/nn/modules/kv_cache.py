"""Keys and values of tokens that were seen, for text made token by token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch

from .attention_masks import Lengths
from .constructor_arguments import check_count, checked

__all__ = ["InferenceParams"]


class InferenceParams:
    """The keys and values of every attention module, by sequence: given to forwards of inference.

    Before each forward `pre_step` says how many tokens of which sequences it brings. Their keys and
    values are added behind those that are there, and their queries see both.

    Args:
        max_batch_size: sequences at a time.
        max_sequence_length: tokens of a sequence.

    Memory is taken when a module is first run, `[max_batch_size, max_sequence_length, heads,
    features]` of keys and of values, in their dtype. Sequences that a step does not name are
    forgotten.

    Raises:
        ValueError: a size is not positive.

    Source: Transformer Engine's class of that name, of whose methods these are some.

    Example:
        >>> import torch, hybridq
        >>> layer = hybridq.TransformerLayer(64, 160, 4, attn_input_format="bshd").eval()
        >>> x, cache = torch.randn(1, 7, 64), hybridq.nn.InferenceParams(1, 7)
        >>> with torch.no_grad():
        ...     cache.pre_step({0: 6})
        ...     first = layer(x[:, :6], inference_params=cache)
        ...     cache.pre_step({0: 1})
        ...     last = layer(x[:, 6:], inference_params=cache)
        ...     torch.allclose(last, layer(x)[:, 6:], atol=1e-5)
        True
    """

    @checked
    def __init__(self, max_batch_size: int, max_sequence_length: int) -> None:
        if max_batch_size < 1 or max_sequence_length < 1:
            raise ValueError(
                "InferenceParams: sizes must be positive, got "
                f"{max_batch_size} and {max_sequence_length}"
            )
        self.max_batch_size, self.max_sequence_length = max_batch_size, max_sequence_length
        #: Tokens of each sequence, those of the step included; in the order of the batch.
        self.sequences: dict[Any, int] = {}
        #: Of each sequence, its row in memory.
        self._rows: dict[Any, int] = {}
        self._steps: list[int] = []
        self._memory: WeakKeyDictionary[Any, tuple[torch.Tensor, torch.Tensor]]
        self._memory = WeakKeyDictionary()
        #: Modules that have brought their tokens since `pre_step`.
        self._stepped: WeakSet[Any] = WeakSet()

    def reset(self) -> None:
        """Forget all sequences; the memory is kept."""
        self.sequences, self._rows, self._steps = {}, {}, []
        self._stepped = WeakSet()

    def pre_step(self, step_dict: Mapping[Any, int]) -> None:
        """Say what the next forward brings.

        Args:
            step_dict: of each sequence of the batch, in its order, how many tokens.

        Raises:
            TypeError: a number of tokens is no whole number.
            ValueError: there are too many sequences, or too many tokens of one.
        """
        for one, n in step_dict.items():
            check_count("InferenceParams.pre_step", f"the number of tokens of {one!r}", n)
        lengths = {one: self.sequences.get(one, 0) + n for one, n in step_dict.items()}
        longest = max(lengths.values(), default=0)
        if not lengths or len(lengths) > self.max_batch_size:
            raise ValueError(
                f"InferenceParams.pre_step: a step must bring tokens of 1 to {self.max_batch_size} "
                f"sequences, got {dict(step_dict)}"
            )
        if longest > self.max_sequence_length:
            raise ValueError(
                f"InferenceParams.pre_step: sequences must have at most "
                f"{self.max_sequence_length} tokens, got {longest}"
            )
        rows = {one: row for one, row in self._rows.items() if one in lengths}
        free = iter(sorted(set(range(self.max_batch_size)) - set(rows.values())))
        self._rows = {one: rows[one] if one in rows else next(free) for one in lengths}
        self.sequences, self._steps = lengths, list(step_dict.values())
        self._stepped = WeakSet()

    @property
    def batch_size(self) -> int:
        """How many sequences the step has."""
        return len(self.sequences)

    def lengths(self, device: torch.device) -> Lengths:
        """Return how many queries and keys each sequence of the step has.

        Args:
            device: of the result.
        """
        given = (self._steps, list(self.sequences.values()))
        return Lengths(*[torch.tensor(one, dtype=torch.int64, device=device) for one in given])

    def positions(self, length: int, device: torch.device) -> torch.Tensor:
        """Return the position of each new token in its sequence, int64 `[batch, length]`.

        Args:
            length: of the padded batch of new tokens.
            device: of the result.
        """
        of_queries, of_keys = self.lengths(device)
        token = torch.arange(length, dtype=torch.int64, device=device)
        last = (of_keys - 1).clamp(min=0)
        return torch.minimum((of_keys - of_queries)[:, None] + token, last[:, None])

    def get_seqlens_pre_step(self) -> torch.Tensor:
        """Return how many tokens each sequence had before the step, int32 `[batch]`, on the CPU."""
        before = [n - s for n, s in zip(self.sequences.values(), self._steps, strict=True)]
        return torch.tensor(before, dtype=torch.int32, device="cpu")

    def step(
        self, owner: Any, new_keys: torch.Tensor, new_values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the new tokens of a module, and return all keys and values of the step's sequences.

        Args:
            owner: the attention module.
            new_keys, new_values: `[batch, length, heads, features]`; behind each sequence's new
                tokens is padding.

        Returns:
            `[batch, longest, heads, features]` of both, padded.

        Raises:
            ValueError: the batch is another, or shorter, than `pre_step` said.
            RuntimeError: a gradient would be needed of what is kept; the module has brought other
                tokens since `pre_step`, or had another dtype or device before.
        """
        batch, length = new_keys.shape[:2]
        if batch != self.batch_size or length < max(self._steps, default=0):
            raise ValueError(
                f"InferenceParams: pre_step announced {self._steps} new tokens, got a batch of "
                f"{batch} with {length}; call pre_step before each forward"
            )
        if torch.is_grad_enabled() and (new_keys.requires_grad or new_values.requires_grad):
            raise RuntimeError(
                "InferenceParams: keys and values that are kept have no gradient, got some that "
                "need one; run the forward in torch.no_grad()"
            )
        memory = self._memory.get(owner)
        if memory is None:
            lead = (self.max_batch_size, self.max_sequence_length)
            memory = self._memory[owner] = (
                new_keys.new_zeros(*lead, *new_keys.shape[2:]),
                new_values.new_zeros(*lead, *new_values.shape[2:]),
            )
        if (memory[0].dtype, memory[0].device) != (new_keys.dtype, new_keys.device):
            raise RuntimeError(
                f"InferenceParams: keys must be {memory[0].dtype} on {memory[0].device}, as those "
                f"that are kept, got {new_keys.dtype} on {new_keys.device}; begin with new "
                "InferenceParams where a module was moved or cast"
            )
        rows = list(self._rows.values())
        known = zip(rows, self.sequences.values(), self._steps, strict=True)
        source: list[int] = []
        target: list[int] = []
        for at, (row, total, new) in enumerate(known):
            source += range(at * length, at * length + new)
            first = row * self.max_sequence_length + total - new
            target += range(first, first + new)
        index = torch.tensor([source, target], dtype=torch.int64, device=new_keys.device)
        longest = max(self.sequences.values())
        made = []
        for kept, new_ones in zip(memory, (new_keys, new_values), strict=True):
            given = new_ones.reshape(-1, *new_ones.shape[2:]).index_select(0, index[0])
            flat = kept.flatten(0, 1)
            if owner in self._stepped and not torch.equal(flat.index_select(0, index[1]), given):
                raise RuntimeError(
                    "InferenceParams: a module brings its keys and values once after each "
                    "pre_step, got others a second time; call pre_step before each forward, and "
                    "have a module for each place in the model (they may share parameters)"
                )
            flat.index_copy_(0, index[1], given)
            own = kept[:batch] if rows == list(range(batch)) else kept[rows]
            made.append(own[:, :longest])
        self._stepped.add(owner)
        return made[0], made[1]
