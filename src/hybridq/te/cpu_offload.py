"""Offload to the host under Transformer Engine's names: by layers as they run, or by calls.

Source: names, order and defaults of arguments: Transformer Engine's `pytorch/cpu_offload.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Final

import torch

from .. import nn
from ..tensor import SavedTensor, is_quantized
from .signatures import only_defaults, options

__all__ = ["OffloadableLayerState", "get_cpu_offload_context"]

#: At their defaults only.
_OTHERS: Final = options(
    "manual_synchronization=False, retain_pinned_cpu_buffers=False, offload_stream=None"
)


def get_cpu_offload_context(
    enabled: bool = False,
    num_layers: int | None = 1,
    model_layers: int = 1,
    offload_activations: bool = True,
    offload_weights: bool = False,
    double_buffering: bool = False,
    manual_synchronization: bool = False,
    retain_pinned_cpu_buffers: bool = False,
    offload_stream: Any = None,
) -> tuple[Any, Callable[[torch.Tensor], torch.Tensor]]:
    """Return `hybridq.get_cpu_offload_context`: a context for each layer, and `sync(x)`.

    Args:
        enabled, num_layers, model_layers, offload_activations: as there.
        offload_weights, double_buffering: the same.
        manual_synchronization, retain_pinned_cpu_buffers, offload_stream: at their defaults.

    Raises:
        NotImplementedError: one of the last three is given another value.
    """
    if enabled:
        others = (manual_synchronization, retain_pinned_cpu_buffers, offload_stream)
        only_defaults(
            "get_cpu_offload_context",
            dict(zip(_OTHERS, others, strict=True)),
            _OTHERS,
            ", since layers are told apart by sync() and transfers have a stream of their own",
        )
    return nn.get_cpu_offload_context(
        enabled, num_layers, model_layers, offload_activations, offload_weights, double_buffering
    )


class _Buffers:
    """Plain tensors that are on one side, in the order in which they were pushed."""

    def __init__(self) -> None:
        self.tensor_list: list[torch.Tensor] = []


class OffloadableLayerState:
    """Tensors of one layer that go to the host and come back, each step by a call.

    The steps are `push_tensor` (any number), `start_offload`,
    `release_activation_forward_gpu_memory`, `start_reload`, `pop_tensor`, `release_all_memory`.
    Of a quantized tensor every buffer travels, and its planes come back bit for bit.

    Args:
        offload_stream: CUDA stream of the copies; None: a new one where tensors are on a GPU.
        retain_pinned_cpu_buffers: False.

    Attributes:
        state: `not_offloaded`, `offload_started`, `offload_finished` or `reload_started`.

    Raises:
        NotImplementedError: `retain_pinned_cpu_buffers` is True.

    Example:
        >>> import torch, hybridq.te as te
        >>> from hybridq.te.pytorch.cpu_offload import OffloadableLayerState
        >>> state = OffloadableLayerState()
        >>> planes = te.MXFP8Quantizer(te.DType.kFloat8E4M3)(torch.ones(4, 32))
        >>> key = state.push_tensor(planes)
        >>> state.start_offload()
        >>> state.release_activation_forward_gpu_memory()
        >>> state.start_reload()
        >>> torch.equal(state.pop_tensor(key).dequantize(), planes.dequantize())
        True
    """

    _NEXT: Final = {
        "start_offload": ("not_offloaded", "offload_started"),
        "release_activation_forward_gpu_memory": ("offload_started", "offload_finished"),
        "start_reload": ("offload_finished", "reload_started"),
    }

    def __init__(self, offload_stream: Any = None, retain_pinned_cpu_buffers: bool = False) -> None:
        only_defaults(
            "OffloadableLayerState",
            {"retain_pinned_cpu_buffers": retain_pinned_cpu_buffers},
            _OTHERS,
            ", since torch's allocator keeps pinned memory that is freed",
        )
        self.offload_stream = offload_stream
        self.release_all_memory()

    def release_all_memory(self) -> None:
        """Forget all tensors, here and on the host, and begin anew."""
        self.state = "not_offloaded"
        self.fwd_gpu_tensor_group, self.cpu_tensor_group = _Buffers(), _Buffers()
        self.bwd_gpu_tensor_group = _Buffers()
        #: Of each tensor the place of its first buffer, and what puts it together again.
        self._pushed: list[tuple[int, SavedTensor | None]] = []
        self._devices: list[torch.device] = []

    def push_tensor(self, tensor: torch.Tensor) -> int:
        """Take a tensor, and return the key by which `pop_tensor` gives it back.

        Args:
            tensor: quantized or plain.

        Raises:
            RuntimeError: the offload has begun.
        """
        self._check("push_tensor", "not_offloaded")
        buffers, entry = SavedTensor.of(tensor) if is_quantized(tensor) else ([tensor], None)  # type: ignore[arg-type]
        held = self.fwd_gpu_tensor_group.tensor_list
        self._pushed.append((len(held), entry))
        held += buffers
        return len(self._pushed) - 1

    def start_offload(self) -> None:
        """Begin to copy all tensors to the host."""
        self._step("start_offload")
        held = self.fwd_gpu_tensor_group.tensor_list
        self._devices = [one.device for one in held]
        with self._copying():
            for one in held:
                own: dict[str, Any] = {"dtype": one.dtype, "device": "cpu"}
                host = torch.empty_strided(one.shape, one.stride(), pin_memory=one.is_cuda, **own)
                self.cpu_tensor_group.tensor_list.append(host.copy_(one, non_blocking=True))

    def release_activation_forward_gpu_memory(self) -> None:
        """Let go of the tensors here, once their copies are made."""
        self._step("release_activation_forward_gpu_memory")
        self._wait()
        self.fwd_gpu_tensor_group.tensor_list.clear()

    def start_reload(self) -> None:
        """Begin to copy all tensors back."""
        self._step("start_reload")
        with self._copying():
            for host, device in zip(self.cpu_tensor_group.tensor_list, self._devices, strict=True):
                made = torch.empty_strided(
                    host.shape, host.stride(), dtype=host.dtype, device=device
                )
                self.bwd_gpu_tensor_group.tensor_list.append(made.copy_(host, non_blocking=True))

    def pop_tensor(self, key: int) -> torch.Tensor:
        """Return a tensor, as it was pushed, from where it is now.

        Args:
            key: what `push_tensor` returned.

        Raises:
            RuntimeError: it is on the host, and not on its way back.
        """
        self._check("pop_tensor", "not_offloaded", "reload_started")
        is_back = self.state == "reload_started"
        if is_back:
            self._wait()
        held = (self.bwd_gpu_tensor_group if is_back else self.fwd_gpu_tensor_group).tensor_list
        at, entry = self._pushed[key]
        return held[at] if entry is None else entry.restore_from_saved(held[at:])[0]

    def _step(self, name: str) -> None:
        wanted, after = self._NEXT[name]
        self._check(name, wanted)
        self.state = after

    def _check(self, name: str, *wanted: str) -> None:
        if self.state not in wanted:
            raise RuntimeError(f"{name}: state must be {' or '.join(wanted)}, got {self.state}")

    def _copying(self) -> Any:
        """Return the context of the copies: their stream, behind what was computed so far."""
        if not any(device.type == "cuda" for device in self._devices):
            return nullcontext()
        if self.offload_stream is None:
            self.offload_stream = torch.cuda.Stream()
        self.offload_stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self.offload_stream)

    def _wait(self) -> None:
        """Let the current stream wait for the copies."""
        if any(device.type == "cuda" for device in self._devices):
            torch.cuda.current_stream().wait_stream(self.offload_stream)
