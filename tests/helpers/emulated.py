"""The CUDA kernels in the host's emulator, as a backend for tests (`make emulation` builds it)."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from hybridq.kernels import Backend, DeviceSupport
from hybridq.kernels.choice import EncodeRequest, Groups, Place, Prologue
from hybridq.kernels.cuda.backend import GpuKernels, spec_reason
from hybridq.kernels.cuda.encoder import GpuEncoder
from hybridq.kernels.cuda.group_encoder import GpuGroupEncoder
from places import ROOT

_FOLDER = Path(os.environ.get("HYBRIDQ_EMULATION", ROOT / "build/emulation"))
_FILE = _FOLDER / f"hybridq_emulated{sysconfig.get_config_var('EXT_SUFFIX')}"


def load() -> ModuleType | None:
    """Return the emulated kernels, or None if they are not built.

    Where HYBRIDQ_EMULATION names their folder, as `make test` does, they must be there.
    """
    if not _FILE.exists() and "HYBRIDQ_EMULATION" not in os.environ:
        return None
    spec = importlib.util.spec_from_file_location("hybridq_emulated", _FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class EmulatedKernels(GpuKernels):
    """The CUDA backend's own code over CPU tensors; it may touch them, and no other byte."""

    def pointer(self, tensor: torch.Tensor | None, written: bool = False) -> int:
        if tensor is None:
            return 0
        if tensor.numel():
            reach = [(n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)]
            first = sum(min(r, 0) for r in reach) * tensor.element_size()
            last = (sum(max(r, 0) for r in reach) + 1) * tensor.element_size()
            self.module.add(tensor.data_ptr() + first, last - first, written)
        return tensor.data_ptr()

    def pointers(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        return [self.pointer(tensor) for tensor in tensors]

    def encoder(self, row: Any, col: Any, dtype: torch.dtype) -> GpuEncoder:
        return _Encoder(self, row, col, dtype)

    def group_encoder(self, row: Any, col: Any, dtype: torch.dtype) -> GpuGroupEncoder:
        return _GroupEncoder(self, row, col, dtype)

    @contextlib.contextmanager
    def launch(self, device: torch.device) -> Iterator[int]:
        self.module.begin()
        try:
            yield 0
        finally:
            self.module.end()


class _Encoder(GpuEncoder):
    """Opens what the kernels may touch, where on a GPU nothing is to be opened."""

    def encode(
        self,
        x: torch.Tensor,
        request: EncodeRequest,
        place: Place,
        prologue: Prologue | None = None,
    ) -> list[torch.Tensor]:
        with self._kernels.launch(x.device):
            return super().encode(x, request, place, prologue)


class _GroupEncoder(GpuGroupEncoder):
    """The same for groups."""

    def places(self, offsets: torch.Tensor, *rest: Any) -> Groups:
        with self._kernels.launch(offsets.device):
            return super().places(offsets, *rest)

    def tokens(self, x: torch.Tensor, *rest: Any) -> list[torch.Tensor] | None:
        with self._kernels.launch(x.device):
            return super().tokens(x, *rest)

    def stack(self, xs: Sequence[torch.Tensor], *rest: Any) -> list[torch.Tensor] | None:
        with self._kernels.launch(xs[0].device):
            return super().stack(xs, *rest)


def make_backend(module: Any) -> Backend:
    kernels = EmulatedKernels(module)
    return Backend(
        "emulated",
        spec_reason,
        kernels.operations(),
        devices=DeviceSupport(("cpu",)),
        finds_amax=True,
        encoder=kernels.encoder,
        group_encoder=kernels.group_encoder,
        folder=kernels.folder,
        operand_decoder=kernels.operand_decoder,
        finisher=kernels.finisher,
    )
