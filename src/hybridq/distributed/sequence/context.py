"""`context_parallel`: torch's ring attention, on CPUs too, around modules of hybridq and others."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import nn

from ... import settings
from ..._torch_ranks import RingAttention, ring_attention
from ...nn.modules.gathered_keys import check_module_in_ring
from .comparison import Comparison
from .cpu_ring import cpu_operators
from .mesh import exchange_of
from .ring_tokens import Tokens
from .sequence_parallel import library_of

__all__ = ["context_parallel"]

#: What computes with masks, windows, padding and dropout.
_ULYSSES: Final = "take hybridq.distributed.sequence_parallel"
#: What torch says where no kernel may, or can, compute attention.
_NO_KERNEL: Final = "No (viable backend|available kernel)"


@contextmanager
def context_parallel(
    mesh: Any,
    model: nn.Module | None = None,
    *,
    buffers: Sequence[torch.Tensor],
    buffer_seq_dims: Sequence[int],
    no_restore_buffers: set[torch.Tensor] | None = None,
    load_balance: bool = True,
) -> Iterator[None]:
    """Let the ranks of a mesh share sequences in the block, by torch's ring attention.

    It is `torch.distributed.tensor.experimental.context_parallel`: each buffer is cut in place to
    this rank's tokens until the block ends, and `scaled_dot_product_attention` sees the tokens of
    all ranks, whose keys and values come to each in turn. Added are an operator for CPUs, checks,
    masks, and models of transformers. Forward and backward both belong into the block. Numbers of
    heads need not be divisible by that of ranks. In the ring attention is causal, or with
    `load_balance=False` sees all, without dropout on a CPU. Windows and masks, of the whole
    sequences, are those of hybridq's modules: there the keys and values of all ranks are gathered.
    See docs/guides/long-sequences.md.

    Args:
        mesh: a DeviceMesh of one dimension.
        model: what runs, so that ranks compare the recipe in force on it; a model of transformers
            must be given, with `sdpa` attention: it is kept from making masks of a part, and must
            be called with `position_ids` of `buffers`, and without labels.
        buffers: tensors with the whole sequences, which the block has the parts of: tokens, shifted
            labels, positions, rotary angles. All equally long, no parameters; views of others
            have memory of their own in the block.
        buffer_seq_dims: of each the dimension of its tokens.
        no_restore_buffers: those of them that stay cut.
        load_balance: this rank has the r-th part from the start and the r-th from the end, of twice
            as many parts as ranks where these divide the length, so that causal attention is as
            much work on all ranks; else, and where they do not, the r-th of as many as ranks.

    Raises:
        RuntimeError: torch.distributed is not initialized; on every rank: ranks differ in shapes or
            in the recipe; or attention that no operator of the ring computes, or that is called by
            a name which was imported before; in a backward: it runs after the block.
        TypeError: `mesh` is none.
        ValueError: a mesh of several dimensions, lengths that differ or that the ranks do not
            divide, a mask, or a model of transformers whose attention is known to fail.

    Source: the arguments are torch's; Ring Attention (arXiv:2310.01889).

    Example:
        >>> import torch, hybridq
        >>> import torch.distributed as dist
        >>> from hybridq.distributed import context_parallel
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> mesh = dist.init_device_mesh("cpu", (1,))
        >>> layer = hybridq.TransformerLayer(64, 128, 4, attention_dropout=0.0)
        >>> x = torch.randn(16, 2, 64)
        >>> with context_parallel(mesh, layer, buffers=[x], buffer_seq_dims=[0]):
        ...     layer(x).sum().backward()
        >>> dist.destroy_process_group()
    """
    from torch.distributed.tensor.experimental import context_parallel as of_torch

    if not hasattr(mesh, "get_group") or not hasattr(mesh, "ndim"):
        raise TypeError(
            f"context_parallel: mesh must be a DeviceMesh, got {type(mesh).__name__}; "
            "torch.distributed.init_device_mesh makes one"
        )
    exchange = exchange_of("context_parallel", mesh)
    problem = _problem(buffers, buffer_seq_dims, exchange.world)
    given: dict[str, object] = {"load_balance": bool(load_balance)}
    given |= {
        f"buffer {place}, tokens along {dim}, requires_grad={one.requires_grad}": one
        for place, (one, dim) in enumerate(zip(buffers, buffer_seq_dims, strict=False))
    }
    Comparison(nn.Identity() if model is None else model, exchange).check(
        "context_parallel", (), given
    )
    if problem:
        raise ValueError(f"context_parallel: {problem}")
    ring = ring_attention()
    length = buffers[0].shape[buffer_seq_dims[0]]
    is_balanced = load_balance and length % (2 * exchange.world) == 0
    tokens = Tokens(exchange.name, exchange.rank, exchange.world, length, is_balanced)
    with ExitStack() as stack:
        stack.enter_context(_balanced(ring, is_balanced))
        stack.enter_context(_no_other())
        if mesh.device_type == "cpu":
            stack.enter_context(cpu_operators(ring))
        if model is not None:
            place = tokens.places(buffers[0].device)
            _enter_library(stack, model, place)
        stack.enter_context(_apart(buffers, no_restore_buffers or set()))
        stack.enter_context(
            _ended(
                of_torch(
                    mesh,
                    buffers=list(buffers),
                    buffer_seq_dims=list(buffer_seq_dims),
                    no_restore_buffers=no_restore_buffers,
                )
            )
        )
        stack.enter_context(_checked(tokens, mesh.device_type))
        yield


def _problem(buffers: Sequence[torch.Tensor], dims: Sequence[int], world: int) -> str:
    """Return why buffers cannot be cut, or nothing."""
    if not buffers or len(buffers) != len(dims):
        return f"each buffer must have a dimension of tokens, got {len(buffers)} and {len(dims)}"
    for one, dim in zip(buffers, dims, strict=True):
        if not -one.dim() <= dim < one.dim():
            return f"dimension {dim} of tokens must be one of {tuple(one.shape)}"
        if one.requires_grad:
            return f"buffers must not require a gradient, got one of shape {tuple(one.shape)}"
    lengths = [one.shape[dim] for one, dim in zip(buffers, dims, strict=True)]
    if len(set(lengths)) > 1:
        return f"buffers must have equally many tokens, got {lengths}; cut them to the sequence"
    if lengths[0] % world:
        return f"the ranks must divide the length, got {lengths[0]} tokens on {world} ranks"
    return ""


@contextmanager
def _apart(buffers: Sequence[torch.Tensor], stay: set[torch.Tensor]) -> Iterator[None]:
    """Give buffers memory of their own in the block, where it is not: torch resizes them in place.

    Tokens and labels are often two views of one batch, and positions one row for all sequences.

    Args:
        buffers: as `context_parallel` takes them.
        stay: those that stay cut behind the block, and so do not get back what they had.
    """
    users: dict[int, set[int]] = {}
    for one in buffers:
        users.setdefault(one.untyped_storage()._cdata, set()).add(id(one))
    before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for one in buffers:
        storage = one.untyped_storage()
        is_whole = one.is_contiguous() and one.numel() * one.element_size() == storage.nbytes()
        if not is_whole or len(users[storage._cdata]) > 1:
            before.setdefault(id(one), (one, one.detach()))
    for one, whole in before.values():
        one.data = whole.clone(memory_format=torch.contiguous_format)
    try:
        yield
    finally:
        for one, whole in before.values():
            if not any(one is other for other in stay):
                one.data = whole


@contextmanager
def _ended(block: Any) -> Iterator[None]:
    """Enter a block of torch, and end it as if without an error where one leaves it.

    In torch 2.10 an error leaves attention replaced and buffers cut.
    """
    block.__enter__()
    try:
        yield
    finally:
        block.__exit__(None, None, None)


@contextmanager
def _balanced(ring: RingAttention, is_balanced: bool) -> Iterator[None]:
    before = ring.options.enable_load_balance
    ring.options.enable_load_balance = is_balanced
    try:
        yield
    finally:
        ring.options.enable_load_balance = before


@contextmanager
def _no_other() -> Iterator[None]:
    """Refuse attention past torch's ring, which stands in the place of a name of torch alone.

    A function that a module imported before is torch's own; without kernels it computes nothing.
    """
    from torch.nn.attention import sdpa_kernel

    with sdpa_kernel([]):
        try:
            yield
        except RuntimeError as error:
            if not re.match(_NO_KERNEL, str(error)):
                raise
            raise RuntimeError(
                "context_parallel: attention must be torch.nn.functional."
                "scaled_dot_product_attention, looked up when it is called; a function that was "
                "imported before (from torch.nn.functional import scaled_dot_product_attention) "
                "would see this rank's tokens alone; import torch.nn.functional as F, and call "
                "F.scaled_dot_product_attention"
            ) from error


def _fused(device: str) -> Any:
    """Keep attention out of the composite, whose causal mask is that of tokens in order."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if device == "cpu":
        return sdpa_kernel([SDPBackend.FLASH_ATTENTION])
    return sdpa_kernel(
        [
            SDPBackend.FLASH_ATTENTION,
            SDPBackend.EFFICIENT_ATTENTION,
            SDPBackend.CUDNN_ATTENTION,
        ]
    )


@contextmanager
def _checked(tokens: Tokens, device: str) -> Iterator[None]:
    """Refuse, in words, what torch's functions of the block do not compute."""
    ring = F.scaled_dot_product_attention

    @functools.wraps(ring)
    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> torch.Tensor:
        if attn_mask is not None:
            raise ValueError(
                "context_parallel: attention must have no mask but a causal one, got one of shape "
                f"{tuple(attn_mask.shape)}; {_ULYSSES}"
            )
        if tokens.is_balanced and not is_causal:
            raise ValueError(
                "context_parallel: attention must be causal, got is_causal=False; give "
                f"load_balance=False for attention without a mask, and for any other {_ULYSSES}"
            )
        if dropout_p and device == "cpu":
            raise ValueError(
                f"context_parallel: attention must have no dropout on a CPU, got {dropout_p}; "
                f"{_ULYSSES}"
            )
        try:
            with _fused(device):
                made: torch.Tensor = ring(query, key, value, None, dropout_p, is_causal, **options)
        except RuntimeError as error:
            if not re.search(_NO_KERNEL, str(error)):
                raise
            shapes = ", ".join(str(tuple(one.shape)) for one in (query, key, value))
            raise RuntimeError(
                f"context_parallel: no operator of the ring computes attention of {shapes} in "
                f"{query.dtype}; {_ULYSSES}"
            ) from error
        if made.requires_grad and not torch.compiler.is_compiling():
            made.register_hook(_check_in_block)
        return made

    known: Any = attention
    known.ring_tokens = tokens  # where `MultiheadAttention` with a mask finds whose tokens are here
    replaced: Any = F
    state = settings.current()
    of_torch = F.multi_head_attention_forward
    fastpath = torch.backends.mha.get_fastpath_enabled()
    replaced.scaled_dot_product_attention, state.in_ring = attention, True
    replaced.multi_head_attention_forward = _of_modules(of_torch)
    torch.backends.mha.set_fastpath_enabled(False)  # one operator, past both functions
    try:
        yield
    finally:
        replaced.scaled_dot_product_attention, state.in_ring = ring, False
        replaced.multi_head_attention_forward = of_torch
        torch.backends.mha.set_fastpath_enabled(fastpath)


def _check_in_block(grad: torch.Tensor) -> None:
    """Raise in a backward behind the block: what computes there is torch's, and no ring."""
    del grad
    if not hasattr(F.scaled_dot_product_attention, "ring_tokens"):
        raise RuntimeError(
            "context_parallel: a backward must run inside of the block, as its forward did, got "
            "one after the block; call loss.backward() before it ends"
        )


def _of_modules(of_torch: Any) -> Any:
    """Return what `nn.MultiheadAttention` calls, refusing what it computes of a rank's part alone.

    Args:
        of_torch: `torch.nn.functional.multi_head_attention_forward`.
    """
    parameters = inspect.signature(of_torch)

    @functools.wraps(of_torch)
    def forward(*args: Any, **kwargs: Any) -> Any:
        given = parameters.bind(*args, **kwargs)
        given.apply_defaults()
        check_module_in_ring(
            given.arguments["need_weights"],
            given.arguments["bias_k"] is not None,
            given.arguments["add_zero_attn"],
        )
        return of_torch(*args, **kwargs)

    return forward


def _enter_library(stack: ExitStack, model: nn.Module, places: torch.Tensor) -> None:
    """Prepare models of a library for the block."""
    found = [(one, path) for one in model.modules() if (path := library_of(one)) is not None]
    if found:
        outermost, path = found[0]
        stack.enter_context(import_module(path).in_ring(outermost, places))
