"""What depends on the kind of a device, and what decides which GEMM a device can run."""

from __future__ import annotations

import contextlib
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Final

import torch

from ..._torch_private import cuda_stream

__all__ = [
    "Chip",
    "chip_of",
    "described",
    "has_autocast",
    "has_float64",
    "is_current",
    "is_host",
    "stream_of",
    "wide",
    "wide_device",
    "without_autocast",
]

# Asked once: dynamo cannot trace the question in every torch. What another package registers
# (PrivateUse1, under any name) has a key of its own in any case.
_WITHOUT_AUTOCAST: Final = frozenset(
    kind
    for kind in (
        *("cpu", "cuda", "xpu", "mps", "hpu", "xla", "mtia", "ipu", "maia", "lazy", "vulkan"),
        *("meta", "hip", "ve", "fpga", "ideep", "opengl", "opencl"),
    )
    if not torch.amp.is_autocast_available(kind)
)
#: For any number of uses, nested ones too.
_AS_IT_IS: Final = contextlib.nullcontext()
#: What a described GPU is assumed to be driven by where this torch is built without CUDA.
_CUDA: Final = (13, 0)


def has_autocast(kind: str) -> bool:
    """Return whether torch.autocast is on for devices of `kind`; some do not know it (meta)."""
    return kind not in _WITHOUT_AUTOCAST and torch.is_autocast_enabled(kind)


def without_autocast(kind: str) -> Any:
    """Return a context in which torch.autocast touches nothing, for code that settles dtypes."""
    if has_autocast(kind):
        return torch.autocast(kind, enabled=False)
    return _AS_IT_IS


def _pair(version: str | None) -> tuple[int, int] | None:
    found = re.match(r"(\d+)\.(\d+)", version or "")
    return (int(found[1]), int(found[2])) if found else None


@dataclass(frozen=True)
class Chip:
    """A device as far as the choice of a kernel depends on it. A value: it need not be here.

    Args:
        kind: `"cpu"`, `"cuda"`, ...
        capability: compute capability of an NVIDIA GPU, `(9, 0)` for H100 and H200; None if it
            has none or is not known.
        cuda: version of CUDA, and so of cuBLASLt, that torch was built with; None without CUDA.
        torch: version of torch.
        is_rocm: torch calls AMD's GPUs `cuda` too.
    """

    kind: str
    capability: tuple[int, int] | None = None
    cuda: tuple[int, int] | None = None
    torch: tuple[int, int] = (0, 0)
    is_rocm: bool = False

    @cached_property
    def _hash(self) -> int:
        return hash((self.kind, self.capability, self.cuda, self.torch, self.is_rocm))

    def __hash__(self) -> int:
        return self._hash  # looked up on every call

    def __str__(self) -> str:
        if self.capability is None:
            return self.kind
        return f"{self.kind} sm_{self.capability[0]}{self.capability[1]}"

    @staticmethod
    def of(kind: str, capability: tuple[int, int] | None = None) -> Chip:
        """Return the chip of this kind under the torch that is installed.

        Args:
            kind: `"cpu"`, `"cuda"`, ...
            capability: compute capability of an NVIDIA GPU. With one, a torch without CUDA counts
                as built with CUDA 13.0, so that a GPU can be asked about on any machine.
        """
        cuda = _pair(torch.version.cuda)
        if capability is not None and cuda is None:
            cuda = _CUDA
        version = _pair(torch.__version__) or (0, 0)
        is_rocm = kind == "cuda" and torch.version.hip is not None
        return Chip(kind, capability, cuda if kind == "cuda" else None, version, is_rocm)


@lru_cache(maxsize=64)
def _chip(kind: str, index: int) -> Chip:
    if kind == "cuda" and torch.version.hip is None:
        return Chip.of(kind, torch.cuda.get_device_capability(index))
    return Chip.of(kind)


def chip_of(device: torch.device) -> Chip:
    """Return the chip of a device that holds tensors."""
    if device.type != "cuda":
        return _chip(device.type, 0)
    return _chip("cuda", torch.cuda.current_device() if device.index is None else device.index)


def is_host(kind: str) -> bool:
    """Return whether values on devices of `kind` are read without waiting for what runs there.

    There a loop may ask where groups end; elsewhere they stay on the device.

    Args:
        kind: type of a device.
    """
    return kind == "cpu"


@lru_cache(maxsize=32)
def has_float64(kind: str) -> bool:
    """Return whether devices of `kind` compute in FP64, asked of one; False where there is none.

    Those of CUDA have it, and so has what holds no data.

    Args:
        kind: type of a device.
    """
    if kind in ("cpu", "cuda", "meta"):
        return True

    def asked() -> bool:
        try:
            return float(torch.ones(2, dtype=torch.float64, device=kind).mul(3.0).sum()) == 6.0
        except (AssertionError, NotImplementedError, RuntimeError, TypeError):
            return False

    # In a thread of its own, which no mode of the caller's reaches (fake tensors of a compiler).
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asked).result()


def wide_device(device: torch.device) -> torch.device:
    """Return where what a tensor on `device` is measured by is computed in FP64: there, or the CPU.

    Args:
        device: of a tensor.
    """
    return device if has_float64(device.type) else torch.device("cpu")


def wide(x: torch.Tensor) -> torch.Tensor:
    """Return x in FP64, on the CPU where its device has none.

    Args:
        x: any.
    """
    return x.to(wide_device(x.device)).to(torch.float64)


def stream_of(device: torch.device) -> int:
    """Return the handle of the stream that work on `device` goes to now; 0 where it has none."""
    if device.type != "cuda":
        return 0
    if cuda_stream is not None and device.index is not None:
        return cuda_stream(device.index)
    return torch.cuda.current_stream(device).cuda_stream


def is_current(device: torch.device) -> bool:
    """Return whether a GPU is the current one, so that kernels on it need no guard.

    Args:
        device: of a tensor on a GPU.
    """
    return device.index == torch.cuda.current_device()


def described(device: str | torch.device | Chip) -> Chip:
    """Return the chip that a user names, without starting any device.

    Args:
        device: a device of torch, a Chip, or an NVIDIA architecture as `"sm_90"`. A GPU of torch
            that is not there has no known capability.

    Raises:
        ValueError: it is none of these.
    """
    if isinstance(device, Chip):
        return device
    if isinstance(device, str):
        named = re.fullmatch(r"sm_(\d+)(\d)[af]?", device)
        if named:
            return Chip.of("cuda", (int(named[1]), int(named[2])))
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ValueError(
            f"device: must be a device of torch or an architecture as sm_90, got {device!r}"
        ) from error
    if found.type == "cuda" and torch.cuda.is_available():
        return chip_of(found)
    return Chip.of(found.type)
