"""hybridq.offload: what a forward saves goes to the host, and comes back for the backward.

Saved tensors are packed by torch's hooks. They belong to *layers*, numbered as they run. A tensor
stays where it is until `window` more layers have begun, and only then goes out: what the backward
needs first never moves. In the backward, the first tensor that a layer asks for brings in those of
the `window` layers before it. On CUDA both ways are copies on a stream of their own, to and from
pinned memory, beside the computation.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, Final

import torch
from torch import nn

from ... import settings
from ...errors import must_be_one_of
from ...tensor import is_quantized

__all__ = ["ENTERED", "Offload", "get_cpu_offload_context", "offload", "tell_offload"]

#: The contexts that are entered, in any thread: where there are none, a forward asks no further.
ENTERED: Final[list[Offload]] = []

_SAVED: Final = ("planes", "all")
#: What a tensor is known by, in a hook that is given another object of the same memory.
_Place = tuple[int, int, torch.Size]


class _Saved:
    """A saved tensor: here, on the host, or on its way.

    Args:
        tensor: as autograd gave it.
        layer: that saved it.
    """

    __slots__ = ("__weakref__", "arrives", "device", "here", "host", "layer", "version")

    def __init__(self, tensor: torch.Tensor, layer: int) -> None:
        self.here: torch.Tensor | None = tensor
        self.host: torch.Tensor | None = None
        self.device = tensor.device
        self.layer = layer
        self.version = -1 if tensor.is_inference() else tensor._version
        #: The event after which `here` may be read; None: at once.
        self.arrives: Any = None

    def check_unwritten(self, tensor: torch.Tensor) -> None:
        """Raise where the tensor was written after it was saved."""
        if self.version >= 0 and tensor._version != self.version:
            raise RuntimeError(
                "offload: a saved tensor was modified by an inplace operation after the forward "
                f"that saved it, got shape {tuple(tensor.shape)}, version {tensor._version} and "
                f"not {self.version}; leave out the inplace operation"
            )


class Offload:
    """The context that `hybridq.offload` returns; it may be entered again and again.

    Attributes:
        nbytes_out: bytes that went to the host so far.
        nbytes_back: bytes that came back.
    """

    def __init__(
        self, layers: Iterable[nn.Module], window: int, saved: str, pin_memory: bool
    ) -> None:
        self.nbytes_out = 0
        self.nbytes_back = 0
        self._layers = list(layers)
        self._window, self._saved, self._pins = window, saved, pin_memory
        self._layer = 0
        #: Whether `next_layer` is called by somebody else than the modules of hybridq.
        self._is_told = bool(self._layers)
        self._of_layer: dict[int, list[weakref.ref[_Saved]]] = {}
        self._planes: set[_Place] = set()
        self._weights: frozenset[int] = frozenset()
        self._streams: dict[torch.device, Any] = {}
        self._lock = threading.RLock()  # several devices have a backward thread each
        self._entered: list[tuple[Any, list[Any], object]] = []

    # ---- the forward

    @property
    def inside_context(self) -> bool:
        """Whether the context is entered, as Megatron-Core's layers ask."""
        return bool(self._entered)

    def __enter__(self) -> Offload:
        if self._saved == "all":
            self._weights = frozenset(_memories(self._layers))
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        handles = [one.register_forward_pre_hook(self._begin) for one in self._layers]
        state = settings.current()
        self._entered.append((hooks, handles, state.offload))
        state.offload = self
        ENTERED.append(self)
        hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        hooks, handles, previous = self._entered.pop()
        hooks.__exit__(*error)
        for handle in handles:
            handle.remove()
        settings.current().offload = previous
        ENTERED.remove(self)
        self._planes.clear()

    def _begin(self, *_: Any) -> None:
        self.next_layer()

    def next_layer(self) -> None:
        """Say that a layer begins: tensors of the layer `window` before it go to the host."""
        with self._lock:
            self._layer += 1
            for layer in [one for one in self._of_layer if one <= self._layer - self._window]:
                for saved in _living(self._of_layer[layer]):
                    self._send(saved)
            dead = [one for one, given in self._of_layer.items() if not _living(given)]
            for layer in dead:
                del self._of_layer[layer]

    def note(self, planes: Iterable[torch.Tensor]) -> None:
        """Say which tensors are planes that nobody but the backward holds, before they are saved.

        Args:
            planes: of one module's call.
        """
        if not self._is_told:
            self.next_layer()
        self._planes = {_place(one) for one in planes}

    def _pack(self, tensor: torch.Tensor) -> Any:
        if not self._takes(tensor):
            return tensor
        with self._lock:
            saved = _Saved(tensor, self._layer)
            self._of_layer.setdefault(self._layer, []).append(weakref.ref(saved))
            if self._window == 0:
                self._send(saved)
        return saved

    def _takes(self, tensor: torch.Tensor) -> bool:
        if torch.compiler.is_compiling() or type(tensor) is not torch.Tensor:
            return False
        if tensor.layout != torch.strided or not _is_dense(tensor) or tensor.numel() <= 1:
            return False
        if self._saved == "planes":
            return _place(tensor) in self._planes
        return tensor.untyped_storage()._cdata not in self._weights

    # ---- both ways

    def _stream(self, device: torch.device) -> Any:
        if device.type != "cuda":
            return None
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def _send(self, saved: _Saved) -> None:
        """Begin to copy a tensor to the host, and let go of it here."""
        tensor = saved.here
        if tensor is None or saved.host is not None:
            return
        saved.check_unwritten(tensor)
        stream = self._stream(tensor.device)
        pins = self._pins and stream is not None
        saved.host = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu", pin_memory=pins
        )
        if stream is None:
            saved.host.copy_(tensor)
        else:
            stream.wait_stream(torch.cuda.current_stream(tensor.device))
            with torch.cuda.stream(stream):
                saved.host.copy_(tensor, non_blocking=True)
            tensor.record_stream(stream)
        self.nbytes_out += tensor.nbytes
        saved.here = None

    def _fetch(self, saved: _Saved) -> None:
        """Begin to copy a tensor back."""
        host = saved.host
        if saved.here is not None or host is None:
            return
        stream = self._stream(saved.device)
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            saved.here = torch.empty_strided(
                host.shape, host.stride(), dtype=host.dtype, device=saved.device
            )
            saved.here.copy_(host, non_blocking=True)
            if stream is not None:
                saved.arrives = torch.cuda.Event()
                saved.arrives.record(stream)
        self.nbytes_back += host.nbytes

    def _unpack(self, packed: Any) -> torch.Tensor:
        if not isinstance(packed, _Saved):
            given: torch.Tensor = packed
            return given
        with self._lock:
            self._fetch(packed)
            for layer in range(packed.layer - 1, packed.layer - 1 - self._window, -1):
                for saved in _living(self._of_layer.get(layer, [])):
                    self._fetch(saved)
            tensor = packed.here
            if tensor is None:  # neither here nor on the host: it never was packed
                raise RuntimeError("offload: a saved tensor must be here or on the host, got none")
            if packed.host is None:
                packed.check_unwritten(tensor)
                return tensor
            packed.here = None  # the backward holds it now; the host has it for another one
            if packed.arrives is not None:
                current = torch.cuda.current_stream(tensor.device)
                current.wait_event(packed.arrives)
                tensor.record_stream(current)
                packed.arrives = None
            return tensor


def _living(given: list[weakref.ref[_Saved]]) -> list[_Saved]:
    return [saved for saved in (one() for one in given) if saved is not None]


def _place(tensor: torch.Tensor) -> _Place:
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset()), tensor.shape


def _memories(modules: Iterable[nn.Module]) -> Iterable[int]:
    """Yield the memory of parameters and buffers, which stays where it is."""
    for module in modules:
        for one in (*module.parameters(), *module.buffers()):
            held = one.tensor_storage.flatten()[0] if is_quantized(one) else [one]  # type: ignore[attr-defined]
            yield from (buffer.untyped_storage()._cdata for buffer in held)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a copy with the same strides takes the memory of its values alone."""
    size = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length == 1:
            continue
        if stride != size:
            return False
        size *= length
    return True


def tell_offload(*planes: Iterable[torch.Tensor]) -> None:
    """Say which planes a module is about to save, if somebody wants to know.

    Args:
        *planes: that nobody but the backward holds.
    """
    if torch.compiler.is_compiling():
        return
    told = settings.current().offload
    if told is not None:
        told.note(one for given in planes for one in given)


def offload(
    *layers: nn.Module, window: int = 1, saved: str = "planes", pin_memory: bool = True
) -> Offload:
    """Context: what forwards inside save for their backwards goes to the host, and back in time.

    A tensor goes out once `window` more layers have begun; the tensors of the last layers, which
    the backward needs first, never move. In the backward those of `window` layers come in ahead.
    The values are the same bits. On CUDA the copies run beside the computation.

    Args:
        *layers: modules whose calls are the layers, such as the blocks of a transformer. None:
            each call of a module of hybridq is one.
        window: how many layers stay, and come in ahead; 0: everything goes out at once, and comes
            back when it is asked for.
        saved: `"planes"`: the planes that hybridq's modules save of inputs, and of weights that
            are quantized in each forward; `"all"`: all that autograd saves inside, except
            parameters and buffers of the layers.
        pin_memory: copy to and from pinned memory (CUDA), which is asynchronous.

    Returns:
        A context, to be entered around each forward; `nbytes_out` and `nbytes_back` count what
        moved. On a CPU the copies are made as well, within its memory.

    Inside `hybridq.checkpoint` (and torch's) nothing is saved that could go out; with `"all"` the
    inputs of the recomputed part do. Views that leave gaps in their memory stay, and so does what
    compiled code saves, with `"planes"`.

    Raises:
        TypeError: a layer is no module, or `window` no int.
        ValueError: `window` is negative, `saved` is another word, or `"all"` without layers.
        RuntimeError: in the forward or the backward: a saved tensor was written in place.

    Source: ours, over torch's saved tensor hooks, as `torch.autograd.graph.save_on_cpu`.

    Example:
        >>> import torch, hybridq
        >>> model = torch.nn.Sequential(*[hybridq.Linear(64, 64) for _ in range(4)])
        >>> store = hybridq.offload(*model, window=1)
        >>> with store, hybridq.autocast(recipe="mxfp8"):
        ...     y = model(torch.randn(32, 64))
        >>> y.sum().backward()
        >>> store.nbytes_out > 0, store.nbytes_out == store.nbytes_back
        (True, True)
    """
    for layer in layers:
        if not isinstance(layer, nn.Module):
            raise TypeError(f"offload: layers must be modules, got {type(layer).__name__}")
    if not isinstance(window, int) or isinstance(window, bool):
        raise TypeError(f"offload: window must be an int, got {type(window).__name__}")
    if window < 0:
        raise ValueError(f"offload: window must not be negative, got {window}")
    if saved not in _SAVED:
        raise ValueError(f"offload: saved {must_be_one_of(_SAVED, saved)}")
    if saved == "all" and not layers:
        raise ValueError(
            "offload: saved='all' needs the layers, whose parameters must stay, got none; give "
            "the blocks of the model"
        )
    return Offload(layers, window, saved, pin_memory)


def get_cpu_offload_context(
    enabled: bool = False,
    num_layers: int | None = 1,
    model_layers: int = 1,
    offload_activations: bool = True,
    offload_weights: bool = False,
    double_buffering: bool = False,
) -> tuple[Any, Callable[[torch.Tensor], torch.Tensor]]:
    """Return a context for each layer, and a function to be called between layers.

    Args:
        enabled: False: both do nothing.
        num_layers: how many layers' planes go to the host; None: all but one.
        model_layers: how many layers there are.
        offload_activations: must be True.
        offload_weights, double_buffering: must be False.

    Returns:
        The context, entered around each layer, and `sync(x)`, called with each layer's result,
        which it returns.

    Raises:
        NotImplementedError: an argument that must have a value has another.
        ValueError: `num_layers` is not between 0 and `model_layers`.

    Source: Transformer Engine's function of that name; `hybridq.offload` is what it gives.

    Example:
        >>> import torch, hybridq
        >>> layers = [hybridq.Linear(64, 64) for _ in range(3)]
        >>> context, sync = hybridq.get_cpu_offload_context(True, 2, 3)
        >>> x = torch.randn(32, 64)
        >>> for layer in layers:
        ...     with context, hybridq.autocast(recipe="mxfp8"):
        ...         x = layer(x)
        ...     x = sync(x)
        >>> x.sum().backward()
        >>> context.nbytes_out > 0
        True
    """
    if not enabled:
        return nullcontext(), lambda x: x
    fixed = {"offload_activations": True, "offload_weights": False, "double_buffering": False}
    given = (offload_activations, offload_weights, double_buffering)
    for (name, needed), value in zip(fixed.items(), given, strict=True):
        if value is not needed:
            raise NotImplementedError(
                f"get_cpu_offload_context: {name} must be {needed}, since planes of activations "
                f"are what goes to the host, got {value}"
            )
    out = model_layers - 1 if num_layers is None else num_layers
    if not 0 <= out <= model_layers:
        raise ValueError(
            f"get_cpu_offload_context: num_layers must be 0 to model_layers={model_layers}, got "
            f"{num_layers}"
        )
    # The last layer's `sync` begins a layer that never runs.
    made = Offload((), model_layers - out + 1, "planes", True)
    made._is_told = True

    def sync(x: torch.Tensor) -> torch.Tensor:
        made.next_layer()
        return x

    return made, sync
