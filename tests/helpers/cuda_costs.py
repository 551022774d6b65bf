"""What a layer costs on a GPU that is not there: launches, memory, bytes and frames, counted.

Tensors are fake and know only their shapes; a module that records its calls stands in for the
compiled kernels, and a shape for torch's scaled product. So the host's own path runs as it would on
a chip, down to the launch.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import hybridq
from fake_indexing import Indexing
from hybridq.kernels import Backend, DeviceSupport
from hybridq.kernels.choice.registry import forget_choices, register_backend
from hybridq.kernels.cuda import backend as cuda
from hybridq.kernels.cuda import block_product, encoder, folder, norm_activation, operand_decoder
from hybridq.kernels.inputs import device
from hybridq.kernels.scaled_mm import backend as native
from hybridq.kernels.scaled_mm import operand_layout
from hybridq.kernels.triton import backend as triton
from hybridq.kernels.triton import plan_grouped_block
from hybridq.kernels.triton.plan_parts import Tiled
from hybridq.nn.autograd import grouped_function, linear_function
from hybridq.nn.autograd.linear_backward import linear_backward
from hybridq.nn.modules import eager_fast_path, grouped_module

_SOURCES = str(Path(hybridq.__file__).parent)
_PRODUCTS = ("mm", "addmm", "bmm")
_MAKES_MEMORY = ("empty", "new_empty", "empty_strided", "new_empty_strided", "empty_like")
_NO_WORK = (*_MAKES_MEMORY, "detach", "alias", "lift_fresh", "_unsafe_view", "set_")


@dataclass
class Costs:
    """What was counted.

    Args:
        kernels: calls of the compiled core's functions, by name. One is one launch or more.
        products: of torch: `scaled_mm`, `mm`, with the dtype of the result.
        others: what else torch launches, by operator.
        allocations: tensors with new memory.
        nbytes: that operators of torch other than products read and write, by rows of the result.
        frames: of Python, in hybridq.
    """

    kernels: Counter[str] = field(default_factory=Counter)
    products: Counter[str] = field(default_factory=Counter)
    others: Counter[str] = field(default_factory=Counter)
    allocations: int = 0
    nbytes: int = 0
    frames: int = 0

    @property
    def launches(self) -> int:
        """Device operations, where each call of the core counts as one."""
        return sum(sum(one.values()) for one in (self.kernels, self.products, self.others))


class _Module:
    """The compiled core's functions over GPU memory: they note that they were called."""

    def __init__(self, costs: list[Costs]) -> None:
        self._costs = costs

    def architectures(self) -> list[str]:
        return ["sm_90a"]

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            self._costs[-1].kernels[name] += 1
            return True

        return call


class _Kernels(cuda.GpuKernels):
    def __init__(self, module: Any, costs: list[Costs]) -> None:
        super().__init__(module)
        self._costs = costs

    def pointer(self, tensor: torch.Tensor | None, written: bool = False) -> int:
        self._costs[-1].frames += 1  # as many as what this stands in for
        return 0

    def pointers(self, tensors: Any) -> list[int]:
        self._costs[-1].frames += 1
        return [0] * len(tensors)

    @contextlib.contextmanager
    def launch(self, device: torch.device) -> Iterator[int]:
        self._costs[-1].frames += 3
        yield 0


class _Watch(TorchDispatchMode):
    def __init__(self, costs: list[Costs]) -> None:
        super().__init__()
        self._costs = costs

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        costs, name = self._costs[-1], function.overloadpacket.__name__
        if function.namespace not in ("aten", "hybridq"):
            return made
        outs = [one for one in torch.utils._pytree.tree_leaves(made) if isinstance(one, FakeTensor)]
        given = [
            one
            for one in torch.utils._pytree.tree_leaves((args, kwargs))
            if isinstance(one, torch.Tensor)
        ]
        known = {one.untyped_storage()._cdata for one in given}
        new = [one for one in outs if one.untyped_storage()._cdata not in known]
        costs.allocations += len(new)
        if function.namespace == "hybridq":  # where no call may go past the dispatcher
            costs.kernels[name] += 1
            return made
        if name in _NO_WORK or (function.is_view and not new):
            return made
        if name in _PRODUCTS:
            costs.products[f"{name} {str(outs[0].dtype).removeprefix('torch.')}"] += 1
            return made
        if not new and not function._schema.is_mutable:
            return made
        costs.others[name] += 1
        read = [one for one in given if one is not (kwargs or {}).get("out")]
        costs.nbytes += sum(one.numel() * one.element_size() for one in (*read, *outs))
        return made


class _ByOperators(Indexing):
    """More of what Python's own methods ask a CUDA for that this build of torch may not have."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.copy_:
            return torch.ops.aten.copy_.default(*args)
        return super().__torch_function__(function, types, args, kwargs)


@contextlib.contextmanager
def fake_gpu(monkeypatch: Any, capability: tuple[int, int] = (9, 0)) -> Iterator[list[Costs]]:
    """Make CUDA tensors fake ones on a chip of this capability; the last of the list counts."""
    costs = [Costs()]

    def scaled_mm(a, b, *_, output_dtype, **__):
        costs[-1].products[f"scaled_mm {str(output_dtype).removeprefix('torch.')}"] += 1
        return a.new_empty((a.shape[0], b.shape[1]), dtype=output_dtype)

    def run(launches, _):
        for launch in launches:
            costs[-1].products[launch.kernel] += 1
            tiles = sum(isinstance(one, Tiled) for one in launch.arguments.values())
            costs[-1].frames += 4 + tiles  # as many as what this stands in for

    # As under CUDA 13, whatever this torch is built with.
    chip = replace(device.Chip.of("cuda", capability), cuda=(13, 0))
    monkeypatch.setattr(device, "_chip", lambda kind, index: chip)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(device.torch.cuda, "current_stream", lambda _: _Stream())
    monkeypatch.setattr(device, "cuda_stream", None)  # which asks the driver, where one is built in
    monkeypatch.setattr(native, "scaled_mm", scaled_mm)
    monkeypatch.setattr(triton, "_missing", lambda: None)
    monkeypatch.setattr(plan_grouped_block, "_major", lambda _: capability[0])
    monkeypatch.setattr(plan_grouped_block, "processors", lambda _: 132)
    monkeypatch.setattr(block_product, "_processors", lambda _: 132)
    stub = SimpleNamespace(run=run)  # Triton may not be here
    monkeypatch.setitem(sys.modules, "hybridq.kernels.triton.launch", stub)
    monkeypatch.setattr(native, "block_takes_bias", lambda *_: True)
    monkeypatch.setattr(FakeTensor, "data_ptr", lambda self: 0, raising=False)
    monkeypatch.setattr(operand_layout, "_ALIGNMENT", 1)
    for module in (
        encoder,
        folder,
        norm_activation,
        operand_decoder,
    ):  # of fake tensors there are views alone
        monkeypatch.setattr(module, "part_of", torch.as_strided)
    monkeypatch.setattr(linear_function._Linear, "apply", _Held.apply)
    monkeypatch.setattr(grouped_function._GroupedLinear, "apply", _HeldGroups.apply)
    # A chip has no modes of fake tensors.

    def can_bypass(*_: object) -> bool:
        costs[-1].frames += 1
        return True

    def is_plain(_: object) -> bool:
        costs[-1].frames += 1
        return True

    for name, module in tuple(sys.modules.items()):
        if name.startswith("hybridq.") and "can_bypass_dispatcher" in vars(module):
            monkeypatch.setattr(module, "can_bypass_dispatcher", can_bypass)
    monkeypatch.setattr(eager_fast_path, "is_plain", is_plain)
    plain = grouped_module._PLAIN_TYPES | {FakeTensor}  # as which fake parameters are known
    monkeypatch.setattr(grouped_module, "_PLAIN_TYPES", plain)
    monkeypatch.setattr(linear_function, "_apply", _Held.apply)
    kernels = _Kernels(_Module(costs), costs)
    backend = Backend(
        "cuda",
        cuda.spec_reason,
        kernels.operations(),
        devices=DeviceSupport(("cuda",)),
        priority=60,
        finds_amax=True,
        encoder=kernels.encoder,
        group_encoder=kernels.group_encoder,
        folder=kernels.folder,
        operand_decoder=kernels.operand_decoder,
        finisher=kernels.finisher,
    )
    register_backend(backend)
    try:
        with FakeTensorMode(), _ByOperators(), _Watch(costs):
            yield costs
    finally:
        register_backend(cuda.CUDA)
        forget_choices()


class _Held:
    """Autograd of linear parts, by hand: the engine would ask for a GPU."""

    function: type = linear_function._Linear
    #: All that ran, the last one last.
    made: ClassVar[list[_Held]] = []

    def save_for_backward(self, *saved: torch.Tensor) -> None:
        self.saved = list(saved)

    @classmethod
    def apply(cls, *given: Any) -> Any:
        _Held.made.append(cls())
        with torch.no_grad():
            y, anchor = cls.function.forward(_Held.made[-1], *given)
        return y.requires_grad_(), anchor  # what comes next asks for its gradient

    def backward(self, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return linear_backward(self, self.saved[:-1], dy)


class _HeldGroups(_Held):
    function = grouped_function._GroupedLinear

    def backward(self, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        offsets, through, *saved = self.saved
        return grouped_function._backward(self, offsets, saved[:-1], dy, through)


def backward(dy: torch.Tensor, parts: int = 1) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of the first of the last linear parts that ran, and of its own.

    Args:
        dy: of the last one's output.
        parts: how many, each of which took what the one before made.
    """
    grads: tuple[torch.Tensor | None, ...] = (dy,)
    with torch.no_grad():
        for held in reversed(_Held.made[-parts:]):
            grads = held.backward(grads[0])
    return grads


class _Stream:
    cuda_stream = 0


def counted(costs: list[Costs], run: Any) -> tuple[Any, Costs]:
    """Return what `run` returns, and what it cost."""
    costs.append(Costs())

    def note(frame: Any, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(_SOURCES):
            costs[-1].frames += 1

    sys.setprofile(note)
    try:
        made = run()
    finally:
        sys.setprofile(None)
    return made, costs[-1]
