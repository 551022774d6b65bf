"""`sequence_parallel`: attention over sequences that lie on several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, Final, TypeVar

from torch import nn

from ...nn import DotProductAttention
from ...nn.modules.exchange import SharedAttention
from .comparison import Comparison
from .exchange import HeadExchange, copies_of_heads
from .mesh import exchange_of

__all__ = ["library_of", "sequence_parallel"]

_Module = TypeVar("_Module", bound=nn.Module)

#: A library whose models have attention of their own, and the module of hybridq that knows them by
#: `share_sequences(model, exchange, comparison)` and `in_ring(model, places)`.
_LIBRARIES: Final = {"transformers": "hybridq.integrations.transformers.sequence"}


def sequence_parallel(model: _Module, mesh: Any = None, *, communication: Any = None) -> _Module:
    """Let the ranks of a mesh share the sequences that a model is given; return the model.

    Each rank then calls the model with its part of every sequence (`shard_sequence`), all parts
    equally long. What works on single tokens is not touched. Around attention one all-to-all brings
    all tokens of some heads to each rank, and one brings all heads of its tokens back (Ulysses);
    fewer heads of keys than ranks are sent to several. Sizes are taken from the tensors that
    arrive. Before each forward ranks compare the shapes of its inputs and the recipe in force.

    Of `hybridq.MultiheadAttention` and `TransformerLayer`, masks and rotary angles are of the whole
    sequence. A module of your own takes part if it has the attributes `exchange` (None),
    `num_attention_heads` and `num_gqa_groups`, and calls `exchange.attend` where one is set. A
    model of transformers is changed by `hybridq.integrations.transformers`: its text model attends
    by `ulysses_...` around the implementation that it had, and its loss is that of all ranks. See
    docs/guides/long-sequences.md.

    Args:
        model: one that has attention modules of hybridq, or of transformers; or one inside of it.
            Before `fully_shard`, DistributedDataParallel or compiling.
        mesh: a DeviceMesh of one dimension, a process group, or None: all ranks.
        communication: the name of a format, or of a PlaneSpec, in which queries, keys, values and
            attention's results travel, and their gradients; a pair: one for each direction; None:
            as they are.

    Raises:
        RuntimeError: torch.distributed is not initialized. In a forward, on every rank: ranks
            differ.
        TypeError: `model` is no module, `mesh` neither a mesh nor a group, or `communication` no
            name or pair of names.
        SpecError: `communication` names no format.
        ValueError: no attention in it that is known, or some of another kind beside it (torch's
            MultiheadAttention, a DotProductAttention by itself, a second model of transformers);
            heads that the ranks do not divide, a mesh of several dimensions, or attention that is
            known to fail.

    Source: DeepSpeed-Ulysses (arXiv:2309.14509).

    Example:
        >>> import torch, hybridq
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> layer = hybridq.TransformerLayer(64, 128, 4, num_gqa_groups=2)
        >>> layer = hybridq.distributed.sequence_parallel(layer)
        >>> layer(torch.randn(10, 2, 64)).shape  # of 10 tokens that this rank has
        torch.Size([10, 2, 64])
        >>> dist.destroy_process_group()
    """
    given: object = model
    if not isinstance(given, nn.Module):
        raise TypeError(
            f"sequence_parallel: model must be an nn.Module, got {type(given).__name__}"
        )
    exchange = exchange_of("sequence_parallel", mesh, communication)
    own = [one for one in model.modules() if isinstance(one, SharedAttention)]
    foreign = [(one, path) for one in model.modules() if (path := library_of(one)) is not None]
    if not own and not foreign:
        raise ValueError(
            "sequence_parallel: the model must have attention of hybridq or of transformers, got "
            f"{type(model).__name__} without any"
        )
    _check_all_take_part(model, own, foreign)
    for attention in own:
        _share(attention, exchange)
    if foreign:
        outermost, path = foreign[0]
        comparison = Comparison(outermost, exchange)
        import_module(path).share_sequences(outermost, exchange, comparison)
    else:
        _compare_before(model, exchange)
    return model


def library_of(module: nn.Module) -> str | None:
    """Return the module of hybridq that knows a model's attention; None: no library's model.

    Args:
        module: a model, or anything else.
    """
    for kind in type(module).__mro__:
        library = kind.__module__.partition(".")[0]
        if library in _LIBRARIES and kind.__name__ == "PreTrainedModel":
            return _LIBRARIES[library]
    return None


def _check_all_take_part(
    model: nn.Module, own: Sequence[Any], foreign: Sequence[tuple[nn.Module, str]]
) -> None:
    """Raise where attention of a model would see a rank's part alone."""
    part = {id(one) for shared in own for one in shared.modules()}
    if foreign:
        outermost = foreign[0][0]
        part |= {id(one) for one in outermost.modules()}
    rest = {id(one) for one, _ in foreign}
    left = [
        f"{name or 'the model'} ({type(one).__name__})"
        for name, one in model.named_modules()
        if id(one) not in part
        and (isinstance(one, nn.MultiheadAttention | DotProductAttention) or id(one) in rest)
    ]
    if left:
        raise ValueError(
            "sequence_parallel: all attention of the model must see whole sequences, got "
            f"{', '.join(left)}, which would see a rank's part alone; take "
            "hybridq.MultiheadAttention in its place (or give your module around "
            "DotProductAttention the attribute exchange), and call sequence_parallel with each "
            "model of transformers by itself"
        )


def _share(attention: SharedAttention, exchange: HeadExchange) -> None:
    heads, groups = attention.num_attention_heads, attention.num_gqa_groups
    copies_of_heads(heads, groups, exchange.world)
    if attention.exchange is not None:
        raise ValueError("sequence_parallel: a model must be given once, got one that was before")
    attention.exchange = exchange


def _compare_before(model: nn.Module, exchange: HeadExchange) -> None:
    comparison = Comparison(model, exchange)

    def compare(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        comparison.check("sequence_parallel", args, kwargs)

    model.register_forward_pre_hook(compare, with_kwargs=True)
